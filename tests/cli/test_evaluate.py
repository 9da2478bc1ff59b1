"""Check ``specjax evaluate`` and ``specjax regenerate`` on tiny models.

Their output adds up, and what cannot be used is refused.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from specjax.cli.main import main
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.evaluation import losslessness
from specjax.evaluation.conformance import SETTINGS
from specjax.evaluation.drawn_texts import DistributionResult
from specjax.evaluation.losslessness import LosslessnessVerdict
from specjax.evaluation.same_texts import Parting, SameTexts
from specjax.models.transformer import Target
from specjax.sampling import Sampling
from specjax.training import data
from specjax.training.documents import read_documents
from tests.conftest import save_tiny

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = [("writing", ["def one(", "def two("]), ("rag", ["import os"])]


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text(
        "".join(
            json.dumps({"category": category, "turns": turns}) + "\n" for category, turns in TURNS
        )
    )
    return file


@pytest.mark.thorough
def test_every_method_answers_every_turn(tiny_pair, questions, tmp_path, capsys) -> None:
    target, _ = tiny_pair
    arguments = ["--target", target, "--questions", str(questions), "--max-new-tokens", "6"]
    arguments += ["--repeats", "2", "--drafter", f"{target}@chain:2"]
    assert main(["evaluate", *arguments, "--output", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert list(results) == ["mt-bench", "retrieval", "overall"]
    for category, answers in (("mt-bench", 2), ("retrieval", 1), ("overall", 3)):
        plain, drafted = (results[category][name] for name in ("plain", f"{target}@chain:2"))
        assert plain["answers"] == drafted["answers"] == answers
        assert (plain["speedup"], plain["spread"], plain["acceptance_length_pooled"]) == (
            1.0,
            [1.0, 1.0],
            1.0,
        )
        # The target drafts for itself.
        assert drafted["acceptance_length_pooled"] == drafted["acceptance_length_of_requests"] == 3
        assert len(drafted["acceptance_by_position"]) == 2
        assert drafted["spread"][0] <= drafted["spread"][1]
    text = (tmp_path / "out" / "results.md").read_text()
    assert "| mt-bench | plain |" in text
    assert "medians of 2 interleaved runs" in text
    assert (tmp_path / "out" / "results.png").stat().st_size > 5000
    assert "retrieval" in capsys.readouterr().out


@pytest.mark.full
def test_a_protocol_is_followed_and_differences_are_stated(
    tiny_pair, questions, tmp_path, capsys
) -> None:
    target, _ = tiny_pair
    template = tmp_path / "template.jinja"
    # A prompt without the variable is an error, so --thinking must set it.
    switch = "{{ raise_exception('unset') if thinking is not defined }}{{ thinking }}"
    template.write_text(switch + TEMPLATE)
    arguments = ["--target", target, "--questions", str(questions), "--max-new-tokens", "6"]
    arguments += ["--protocol", "speed-bench", "--thinking", "on", "--repeats", "1"]
    arguments += ["--drafter", f"{target}@chain:2", f"{target}@chain:1"]
    arguments += ["--chat-template", str(template)]
    output = tmp_path / "out"
    assert main(["evaluate", *arguments, "--output", str(output)]) == 0
    report = json.loads((output / "results.json").read_text())
    assert list(report["results"]) == ["writing", "rag", "overall"]  # SPEED-Bench's own categories
    assert report["protocol"] == {
        "name": "speed-bench",
        "differences": ["2 questions instead of 880", "max_new_tokens 6 instead of 4096"],
    }
    overall = report["results"]["overall"]
    # The target drafts for itself.
    assert overall[f"{target}@chain:2"]["acceptance_length_by_protocol"] == 3
    assert overall[f"{target}@chain:1"]["acceptance_length_by_protocol"] == 2
    (golden,) = output.glob("golden_al_*.yaml")
    assert golden.read_text().startswith(
        "# dataset: rag, writing | output_len: 6\n# temperature 0\n"
    )
    assert yaml.safe_load(golden.read_text()) == {"target": {"thinking_on": {1: 2.0, 2: 3.0}}}
    assert "Differs from the protocol: 2 questions instead of 880." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--repeats", "0"], "repeats=0"),
        (["--drafter", "prompt-lookup", "prompt-lookup"], "none twice"),
        (["--questions", "nowhere.jsonl"], "questions='nowhere.jsonl'"),
        (["--drafter", "prompt-lookup@square"], "square"),
        (["--corpus", "a.txt"], "drafter='prompt-lookup' reads no files"),
        (
            ["--corpus", "a.txt", "--drafter", "prompt-lookup", "token-recycling@chain:2"],
            "drafter='prompt-lookup token-recycling' reads no files",
        ),
        (
            ["--drafter", "prompt-lookup", "embedded:draft@eagle", "--rule", "block"],
            "rule='block': verifies chains, but the draft",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tiny_pair, questions, changes, words, capsys) -> None:
    arguments = ["evaluate", "--target", tiny_pair[0], "--questions", str(questions)]
    assert main([*arguments, "--drafter", "prompt-lookup", *changes]) == 2
    assert words in capsys.readouterr().err


def verdict(margin: float = 0.0, p_value: float = 0.43) -> LosslessnessVerdict:
    """Return a verdict as `losslessness.check` does.

    With a ``margin``, one text parts by it, where rounding reaches 0.02.
    """
    partings = (Parting(1, 5, 7, 8, margin),) if margin else ()
    texts = SameTexts(texts=8, tokens=64, partings=partings, lag=margin, rounding=0.02)
    names = ("joint", "by preference", "towards the drafter")
    distribution = DistributionResult(
        p_value, dict.fromkeys(names, p_value / 3), 25_000, 800, 0, 0.05, "independent"
    )
    return LosslessnessVerdict(
        greedy=texts, distribution=distribution, coupled=replace(texts, partings=(), lag=0.0)
    )


def lossless(target: str, *options: str) -> list[str]:
    pair = ["--target", target, "--drafter", f"{target}@chain:2", "prompt-lookup"]
    return ["evaluate", "--lossless", *pair, *options]


def test_lossless_pairs_have_a_verdict_in_a_line_and_exit_status_0(
    tiny_pair, questions, tmp_path, capsys, monkeypatch
) -> None:
    calls = []

    def check(target, drafter, tokens, lengths, **options):
        calls.append((drafter.draft_shape, lengths.tolist(), options))
        return verdict(margin=0.003)

    monkeypatch.setattr(losslessness, "check", check)
    options = ("--output", str(tmp_path / "out"), "--temperature", "0.7", "--top-p", "0.9")
    assert main(lossless(tiny_pair[0], *options)) == 0
    printed = capsys.readouterr().out
    assert (
        "lossless: greedy 7 of 8 texts equal, 1 part at near-ties (margin 0.003 where rounding"
        " reaches 0.02)" in printed
    )
    assert (
        "· distribution p = 0.43 (25,000 draws, rule independent) · coupled 8 of 8 texts equal"
        in printed
    )
    assert (
        "greedy text 1 parts at token 5: 7 without the drafter, 8 with it, margin 0.003" in printed
    )
    assert "once in 100,000 tests" in printed
    results = json.loads((tmp_path / "out" / "lossless.json").read_text())["results"]
    assert results["prompt-lookup"]["lossless"] is True
    assert "## prompt-lookup" in (tmp_path / "out" / "lossless.md").read_text()
    assert calls[0][0] == Chain(2)
    assert len(calls[0][1]) == len(losslessness.PROMPTS)
    assert calls[0][2]["settings"] == (Sampling(0.7, top_p=0.9),)
    assert main(lossless(tiny_pair[0], "--questions", str(questions), "--chat", "False")) == 0
    assert len(calls[-1][1]) == 2  # the first turn of each question
    assert calls[-1][2]["settings"] == SETTINGS


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ((), SETTINGS),
        (("--top-k", "5"), (Sampling(1.0, top_k=5),)),
        (("--min-p", "0.1"), (Sampling(1.0, min_p=0.1),)),
        (
            ("--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--min-p", "0.1"),
            (Sampling(0.7, 5, 0.9, 0.1),),
        ),
    ],
)
def test_every_setting_of_drawing_is_tested_for_losslessness(
    tiny_pair, monkeypatch, options, settings
) -> None:
    tested = []

    def check(*_, **options):
        tested.append(options["settings"])
        raise InputError("enough")

    monkeypatch.setattr(losslessness, "check", check)
    assert main(lossless(tiny_pair[0], *options)) == 2
    assert tested == [settings]


@pytest.mark.parametrize("option", [("--top-k", "-1"), ("--min-p", "2"), ("--top-p", "0")])
def test_settings_out_of_range_are_refused_before_anything_is_read(
    questions, capsys, option
) -> None:
    assert main(["evaluate", "--target", "./nothing", "--questions", str(questions), *option]) == 2
    assert f"{option[0][2:].replace('-', '_')}={option[1]}: must be" in capsys.readouterr().err


def test_a_pair_that_is_not_lossless_ends_with_exit_status_1(
    tiny_pair, capsys, monkeypatch
) -> None:
    ended = replace(
        verdict(), greedy=replace(verdict().greedy, partings=(Parting(1, 5, 7, -1, float("inf")),))
    )
    verdicts = iter([verdict(), verdict(margin=3.0, p_value=1e-9), ended, ended])
    monkeypatch.setattr(losslessness, "check", lambda *_, **__: next(verdicts))
    assert main(lossless(tiny_pair[0], "--json")) == 1
    results = json.loads(capsys.readouterr().out)["results"]
    first, second = results.values()
    assert (first["lossless"], second["lossless"]) == (True, False)
    assert second["line"].startswith(
        "NOT LOSSLESS: greedy FAILS: 7 of 8 texts equal, and a token is 3 from the target's choice"
    )
    assert second["distribution"]["p_value"] == 1e-9
    assert not second["distribution"]["passes"]
    assert main(lossless(tiny_pair[0], "--json")) == 1
    out = capsys.readouterr().out
    assert "Infinity" not in out  # it is no JSON
    assert json.loads(out)["results"]["prompt-lookup"]["greedy"]["partings"][0]["margin"] is None


def test_what_cannot_be_tested_for_losslessness_is_refused(tiny_pair, capsys) -> None:
    assert main(lossless(tiny_pair[0], "--draws", "5")) == 2
    assert "draws=5" in capsys.readouterr().err
    assert main(["evaluate", "--target", tiny_pair[0], "--drafter", "prompt-lookup", "--json"]) == 2
    assert "questions=''" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_real_pair_is_tested_from_the_command_line(tiny_pair, capsys) -> None:
    options = ("--draws", "4000", "--max-new-tokens", "8", "--json")
    assert main(lossless(tiny_pair[0], *options)) == 0
    assert len(json.loads(capsys.readouterr().out)["results"]) == 2


@pytest.mark.full
def test_texts_are_written_anew_whatever_the_batch_and_wherever_it_stopped(
    tiny_pair, tmp_path
) -> None:
    target, _ = tiny_pair
    source = tmp_path / "texts.jsonl"
    source.write_text(
        "".join(json.dumps({"text": f"def function_{i}(self): pass"}) + "\n" for i in range(5))
    )
    arguments = ["regenerate", "--target", target, "--source", str(source)]
    arguments += ["--max-new-tokens", "10", "--prompt-tokens", "4"]
    assert main([*arguments, "--output", str(tmp_path / "whole.jsonl"), "--batch", "4"]) == 0
    whole = (tmp_path / "whole.jsonl").read_text()
    assert len(whole.splitlines()) == 5
    assert all(json.loads(line)["text"].startswith("def") for line in whole.splitlines())
    partial = tmp_path / "begun.jsonl"
    # A kill can leave half a line.
    partial.write_text("".join(whole.splitlines(keepends=True)[:2]) + '{"text": "de')
    (tmp_path / "begun.yaml").write_text((tmp_path / "whole.yaml").read_text())
    assert main([*arguments, "--output", str(partial), "--batch", "2"]) == 0
    assert partial.read_text() == whole
    assert main([*arguments, "--output", str(partial), "--seed", "2"]) == 2
    (tmp_path / "begun.yaml").unlink()
    assert main([*arguments, "--output", str(partial)]) == 2
    assert (
        main(["regenerate", "--target", target, "--source", str(source), "--output", "here.txt"])
        == 2
    )


def write_source(path, texts) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def of_texts(target, source, *options: str) -> list[str]:
    """Return the command that regenerates texts.

    The sizes are the same in every test here, so that the tests share compiled programs.
    """
    words = ["regenerate", "--target", str(target), "--source", str(source), "--batch", "4"]
    return [*words, "--max-new-tokens", "10", "--prompt-tokens", "4", *options]


def records(output) -> list[dict]:
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.full
def test_a_rerun_writes_what_is_missing_wherever_the_source_has_it_now(tiny_pair, tmp_path) -> None:
    source, output = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    texts = [f"def function_{i}(self): pass" for i in (0, 1, 2, 2)]
    write_source(source, texts)
    assert main(of_texts(tiny_pair[0], source, "--output", str(output))) == 0
    whole = output.read_text().splitlines(keepends=True)
    # Two equal documents have their own random numbers.
    assert len({json.loads(line)["text"] for line in whole[2:]}) == 2
    output.write_text("".join(whole[:2]))
    write_source(source, ["import first", *texts])
    assert main(of_texts(tiny_pair[0], source, "--output", str(output))) == 0
    assert main(of_texts(tiny_pair[0], source, "--output", str(tmp_path / "fresh.jsonl"))) == 0
    assert output.read_text().splitlines(keepends=True)[:2] == whole[:2]
    completed, fresh = (
        sorted(path.read_text().splitlines()) for path in (output, tmp_path / "fresh.jsonl")
    )
    assert completed == fresh
    assert len(set(completed)) == 5


def assert_prompts_are_on_one_side(output, count: int) -> None:
    """Check the split of ``count`` records, whose prompts begin with the letters a to h."""
    train, held_out = data.split_documents(read_documents(str(output)), 0.5)
    train_prompts, held_out_prompts = (
        {document.text[0] for document in part} for part in (train, held_out)
    )
    assert len(train) + len(held_out) == count
    assert len(train_prompts) + len(held_out_prompts) == 8
    assert not train_prompts & held_out_prompts


@pytest.mark.full
def test_copies_of_a_document_are_on_one_side_of_the_split(tiny_pair, tmp_path) -> None:
    source, output = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    write_source(source, [f"{letter} = 1 + 2" for letter in "abcdefgh"])
    assert main(of_texts(tiny_pair[0], source, "--output", str(output), "--copies", "3")) == 0
    # Each copy has other random numbers.
    assert len({record["text"] for record in records(output)}) > 20
    assert_prompts_are_on_one_side(output, 24)


@pytest.mark.full
def test_copies_of_copies_are_on_the_side_of_the_first(tiny_pair, tmp_path) -> None:
    """Regenerate texts that were regenerated.

    The origin of a record is passed on, but each record has its own label.
    """
    source, once, twice = (tmp_path / f"{name}.jsonl" for name in ("texts", "once", "twice"))
    write_source(source, [f"{letter} = 1 + 2" for letter in "abcdefgh"])
    assert main(of_texts(tiny_pair[0], source, "--output", str(once), "--copies", "3")) == 0
    assert main(of_texts(tiny_pair[0], once, "--output", str(twice))) == 0
    assert_prompts_are_on_one_side(twice, 24)
    assert len({record["document"] for record in records(twice)}) == 24
    whole = twice.read_text()
    assert main(of_texts(tiny_pair[0], once, "--output", str(twice))) == 0
    assert twice.read_text() == whole  # none was missing


@pytest.mark.full
def test_equal_documents_are_on_one_side_of_the_split(tiny_pair, tmp_path) -> None:
    source, output = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    write_source(source, 4 * [f"{letter} = 1 + 2" for letter in "abcdefgh"])
    assert main(of_texts(tiny_pair[0], source, "--output", str(output))) == 0
    assert_prompts_are_on_one_side(output, 32)
    # Each document has its own random numbers.
    assert len({record["text"] for record in records(output)}) > 24


@pytest.mark.thorough
def test_what_does_not_fit_is_left_out_and_counted(tiny_pair, tmp_path, capsys) -> None:
    """Ask a question that is too long alone, one that is too long after another, and one that fits.

    The target has 512 positions.
    """
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    long = {"role": "user", "content": "why? " * 400}
    short, answer = {"role": "user", "content": "one?"}, {"role": "assistant", "content": "no"}
    source = tmp_path / "chats.jsonl"
    chats = [[short], [long], [short, answer, long, answer, short], [short, answer, short]]
    source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    options = ["--source", str(source), "--chat-template", str(template)]
    options += ["--max-new-tokens", "6", "--temperature", "0"]
    outputs = []
    for batch in (2, 3):
        output = tmp_path / f"{batch}.jsonl"
        command = ["regenerate", "--target", tiny_pair[0], "--output", str(output), *options]
        command += ["--batch", str(batch)]
        for _ in range(2):
            assert main(command) == 0
            printed = capsys.readouterr().out
            assert (
                "left out, as there is no room for max_new_tokens=6 in 512 tokens: 1 of 4"
                in printed
            )
        outputs.append(output.read_text())
    assert outputs[0] == outputs[1]
    assert [len(record["messages"]) for record in records(output)] == [2, 2, 4]
    assert "cut before a turn" not in printed  # this answer was written already
    output.unlink()
    assert main(command) == 0
    assert (
        "cut before a turn, as there is no room for max_new_tokens=6 in 512 tokens: 1 of 4"
        in capsys.readouterr().out
    )
    write_source(source, ["def one(): pass"])
    (tmp_path / "out.jsonl").unlink(missing_ok=True)
    options = ("--output", str(tmp_path / "out.jsonl"), "--max-new-tokens", "510")
    assert main(of_texts(tiny_pair[0], source, *options)) == 2
    assert "no room for max_new_tokens=510 in 512 tokens" in capsys.readouterr().err
    assert not (tmp_path / "out.yaml").exists()


@pytest.mark.full
def test_a_command_that_cannot_be_run_claims_nothing(tiny_pair, tmp_path, capsys) -> None:
    source, output = tmp_path / "texts.jsonl", tmp_path / "new" / "out.jsonl"
    write_source(source, ["def one(): pass"])
    wrong = [
        of_texts("./mistyped", source),
        of_texts(tiny_pair[0], source, "--top-p", "0"),
        of_texts(tiny_pair[0], "nowhere"),
    ]
    for command in wrong:
        assert main([*command, "--output", str(output)]) == 2
        assert not output.parent.exists()
    assert main(of_texts(tiny_pair[0], source, "--output", str(output))) == 0
    assert main(of_texts(tiny_pair[0], source, "--output", str(output), "--seed", "2")) == 2
    shutil.copytree(tiny_pair[0], tmp_path / "moving")
    command = of_texts(tmp_path / "moving", source, "--output", str(tmp_path / "moved.jsonl"))
    assert main(command) == 0
    save_tiny(tmp_path / "moving", seed=1)
    assert main(command) == 2
    assert "moving': the model or its data type differs" in capsys.readouterr().err
    output.write_text('{"text": "of an earlier version"}\n')
    assert main(of_texts(tiny_pair[0], source, "--output", str(output))) == 2
    assert "out.jsonl:1: the line does not name its document" in capsys.readouterr().err


@pytest.mark.full
def test_answers_of_a_conversation_are_the_targets(tiny_pair, tmp_path) -> None:
    """Compare each greedy answer with the target's answer to all messages before it.

    The earlier answers among these are the target's own.
    """
    target, _ = tiny_pair
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    messages = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "two?"},
    ]
    source = tmp_path / "chats.jsonl"
    source.write_text(
        json.dumps({"messages": messages}) + "\n" + json.dumps({"messages": messages[:1]}) + "\n"
    )
    output = tmp_path / "out" / "chats.jsonl"
    command = ["regenerate", "--target", target, "--source", str(source), "--output", str(output)]
    command += ["--chat-template", str(template), "--temperature", "0"]
    command += ["--max-new-tokens", "6", "--batch", "2"]
    assert main(command) == 0
    long, short = (json.loads(line)["messages"] for line in output.read_text().splitlines())
    assert [message["role"] for message in long] == ["user", "assistant", "user", "assistant"]
    assert [message["content"] for message in long[::2]] == ["one?", "two?"]
    assert short == long[:2]
    from specjax import pipeline

    generator = pipeline.load(Target.from_pretrained(target), tokenizer=target)
    generator.tokenizer.chat_template = template.read_text()
    assert generator(long[:3], max_new_tokens=6).text == long[3]["content"]
    first, stop = long[1]["content"], long[1]["content"][2:4]
    stopped = ["--output", str(tmp_path / "stopped.jsonl"), "--stop", stop]
    assert main([*command, *stopped]) == 0
    _, record = (
        json.loads(line)["messages"]
        for line in (tmp_path / "stopped.jsonl").read_text().splitlines()
    )
    assert record[1]["content"] == first[: first.find(stop)]


@pytest.mark.full
def test_a_rerun_with_another_template_or_tokenizer_is_refused(tiny_pair, tmp_path, capsys) -> None:
    """Check both files that decide what is written.

    A half with one version and a half with another would be no data set of either.
    """
    target, template = tmp_path / "target", tmp_path / "template.jinja"
    shutil.copytree(tiny_pair[0], target)
    template.write_text(TEMPLATE)
    source, output = tmp_path / "chats.jsonl", tmp_path / "out.jsonl"
    chats = [{"messages": [{"role": "user", "content": content}]} for content in ("one?", "two?")]
    source.write_text("".join(json.dumps(record) + "\n" for record in chats))
    options = ["--source", str(source), "--output", str(output)]
    options += ["--max-new-tokens", "6", "--batch", "2"]
    command = ["regenerate", "--target", str(target), *options, "--chat-template", str(template)]
    assert main(command) == 0
    whole = output.read_text()
    half = whole.splitlines(keepends=True)[0]
    for file, old, new in (
        (template, "<assistant>", "<bot>"),
        (target / "tokenizer.json", "<|endoftext|>", "<|text|>"),
    ):
        content = file.read_text()
        assert old in content
        output.write_text(half)
        file.write_text(content.replace(old, new))
        assert main(command) == 2
        assert (
            "its tokenizer, its chat template or the content of chat_template="
            in capsys.readouterr().err
        )
        assert output.read_text() == half
        file.write_text(content)
    assert main(command) == 0
    assert output.read_text() == whole


def test_what_a_kill_leaves_before_the_first_record_claims_nothing(
    tiny_pair, tmp_path, monkeypatch, capsys
) -> None:
    """Kill the command before and while it notes its options.

    The note is written before the output, and whole or not at all. It binds no later command until
    there is an output.
    """
    source, output = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    write_source(source, ["def one(): pass"])
    command = of_texts(tiny_pair[0], source, "--output", str(output))

    def killed(*_):
        raise KeyboardInterrupt

    def killed_where_it_adds(path, mode="r", *arguments, **options):
        return killed() if mode == "a" else open(path, mode, *arguments, **options)

    with monkeypatch.context() as patched:  # after the options, and before the output
        patched.setattr(Path, "open", killed_where_it_adds)
        assert main(command) == 130
    assert (tmp_path / "out.yaml").read_text().startswith("# written by")
    assert not output.exists() or not output.read_bytes()
    assert main([*command, "--seed", "2"]) == 0  # the corrected command
    first = output.read_text()
    output.unlink()
    (tmp_path / "out.yaml").unlink()
    with monkeypatch.context() as patched:  # while the options are written
        patched.setattr(Path, "replace", killed)
        assert main(command) == 130
    assert not (tmp_path / "out.yaml").exists()
    assert main([*command, "--seed", "2"]) == 0
    assert output.read_text() == first
    output.write_text("")
    noted = (tmp_path / "out.yaml").read_text()
    # Older versions of specjax may leave half a note.
    (tmp_path / "out.yaml").write_text(noted[: len(noted) // 2])
    assert main([*command, "--seed", "2"]) == 0
    assert (tmp_path / "out.yaml").read_text() == noted
    output.unlink()
    (tmp_path / "out.yaml").write_text("seed: 3  # mine\n")
    capsys.readouterr()
    assert main(command) == 2
    assert "out.yaml, the file for its options, has other content" in capsys.readouterr().err
    assert (tmp_path / "out.yaml").read_text() == "seed: 3  # mine\n"
    assert not output.exists()
