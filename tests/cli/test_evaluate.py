"""``specjax evaluate`` and ``specjax regenerate`` on tiny models: what they write adds up, and what they refuse."""

import json

import pytest

from specjax.cli.main import main
from specjax.models.transformer import Target

TURNS = [("writing", ["def one(", "def two("]), ("rag", ["import os"])]


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps({"category": category, "turns": turns}) + "\n" for category, turns in TURNS))
    return file


def test_every_method_answers_every_turn(tiny_pair, questions, tmp_path, capsys) -> None:
    target, _ = tiny_pair
    arguments = ["--target", target, "--questions", str(questions), "--max-new-tokens", "6", "--repeats", "2"]
    assert main(["evaluate", *arguments, "--drafter", f"{target}@chain:2", "--output", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert list(results) == ["mt-bench", "retrieval", "overall"]
    for category, answers in (("mt-bench", 2), ("retrieval", 1), ("overall", 3)):
        plain, own = (results[category][name] for name in ("plain", f"{target}@chain:2"))
        assert plain["answers"] == own["answers"] == answers
        assert (plain["speedup"], plain["spread"], plain["acceptance_length_pooled"]) == (1.0, [1.0, 1.0], 1.0)
        assert own["acceptance_length_pooled"] == own["acceptance_length_of_requests"] == 3  # the target drafts for itself
        assert len(own["acceptance_by_position"]) == 2
        assert own["spread"][0] <= own["spread"][1]
    text = (tmp_path / "out" / "results.md").read_text()
    assert "| mt-bench | plain |" in text
    assert "medians of 2 interleaved runs" in text
    assert (tmp_path / "out" / "results.png").stat().st_size > 5000
    assert "retrieval" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--repeats", "0"], "repeats=0"),
        (["--drafter", "prompt-lookup", "prompt-lookup"], "none twice"),
        (["--questions", "nowhere.jsonl"], "questions='nowhere.jsonl'"),
        (["--drafter", "prompt-lookup@square"], "square"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tiny_pair, questions, changes, words, capsys) -> None:
    arguments = ["evaluate", "--target", tiny_pair[0], "--questions", str(questions), "--drafter", "prompt-lookup"]
    assert main([*arguments, *changes]) == 2
    assert words in capsys.readouterr().err


def test_texts_are_written_anew_whatever_the_batch_and_wherever_it_stopped(tiny_pair, tmp_path) -> None:
    target, _ = tiny_pair
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": f"def function_{i}(self): pass"}) + "\n" for i in range(5)))
    arguments = ["regenerate", "--target", target, "--source", str(source), "--max-new-tokens", "10", "--prompt-tokens", "4"]
    assert main([*arguments, "--output", str(tmp_path / "whole.jsonl"), "--batch", "4"]) == 0
    whole = (tmp_path / "whole.jsonl").read_text()
    assert len(whole.splitlines()) == 5
    assert all(json.loads(line)["text"].startswith("def") for line in whole.splitlines())
    begun = tmp_path / "begun.jsonl"
    begun.write_text("".join(whole.splitlines(keepends=True)[:2]) + '{"text": "de')  # what a kill can leave
    (tmp_path / "begun.yaml").write_text((tmp_path / "whole.yaml").read_text())
    assert main([*arguments, "--output", str(begun), "--batch", "2"]) == 0
    assert begun.read_text() == whole
    assert main([*arguments, "--output", str(begun), "--seed", "2"]) == 2
    (tmp_path / "begun.yaml").unlink()
    assert main([*arguments, "--output", str(begun)]) == 2
    assert main(["regenerate", "--target", target, "--source", str(source), "--output", "here.txt"]) == 2


def test_answers_of_a_conversation_are_the_targets(tiny_pair, tmp_path) -> None:
    """Greedy: each answer is what the target says to all that was said before it, its own earlier answers among them."""
    target, _ = tiny_pair
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    asked = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "no"}, {"role": "user", "content": "two?"}]
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"messages": asked}) + "\n" + json.dumps({"messages": asked[:1]}) + "\n")
    output = tmp_path / "out" / "chats.jsonl"
    arguments = ["--target", target, "--source", str(source), "--output", str(output), "--chat-template", str(template)]
    assert main(["regenerate", *arguments, "--temperature", "0", "--max-new-tokens", "6", "--batch", "2"]) == 0
    long, short = (json.loads(line)["messages"] for line in output.read_text().splitlines())
    assert [message["role"] for message in long] == ["user", "assistant", "user", "assistant"]
    assert [message["content"] for message in long[::2]] == ["one?", "two?"]
    assert short == long[:2]
    from specjax import pipeline

    generator = pipeline.load(Target.from_pretrained(target), tokenizer=target)
    generator.tokenizer.chat_template = template.read_text()
    assert generator(long[:3], max_new_tokens=6).text == long[3]["content"]
