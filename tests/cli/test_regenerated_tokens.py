"""Check the tokens in the records of ``specjax regenerate``.

They are the tokens that the target read and wrote, and training reads them.
"""

import json
from pathlib import Path

import jax
import pytest

import specjax
from specjax import pipeline
from specjax.cli.main import main
from specjax.models.transformer import Target
from specjax.training import data
from specjax.training.config import DataConfig
from specjax.training.documents import read_documents
from tests.cli.conftest import end_at
from tests.cli.test_evaluate import TEMPLATE, of_texts, records, write_source

TEXTS = [f"def function_{i}(self): pass" for i in range(12)]
ENDED = TEMPLATE.replace("{{ m['content'] }}\n", "{{ m['content'] }}{{ '<|endoftext|>' }}")
THOUGHTLESS = ENDED.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else 'said' }}")


def generator(target: str, template: str = "") -> pipeline.TextGenerator:
    text_generator = pipeline.load(Target.from_pretrained(target), tokenizer=target)
    text_generator.tokenizer.chat_template = template or None
    return text_generator


def answers(record: dict) -> list[list[int]]:
    return [record["tokens"][begin:end] for begin, end in record["loss_spans"]]


def test_a_texts_tokens_are_the_prompts_and_the_targets(tiny_pair, tmp_path) -> None:
    """Compare the recorded tokens with greedy texts of the library's own loop."""
    source, output = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    write_source(source, TEXTS)
    assert main(of_texts(tiny_pair[0], source, "--temperature", "0", "--output", str(output))) == 0
    generate = generator(tiny_pair[0])
    for text, record in zip(TEXTS, records(output), strict=True):
        prompt = generate.encode(text)[:4]
        result = specjax.generate(generate.target, None, [prompt], max_new_tokens=10)
        assert record["tokens"] == result.tokens[0, : result.lengths[0]].tolist()
        assert record["loss_spans"] == [[4, len(record["tokens"])]] and "starts" not in record
        assert record["text"] == generate.tokenizer.decode(
            record["tokens"], skip_special_tokens=True
        )


@pytest.mark.full
def test_an_end_that_the_target_wrote_is_a_token_of_its_answer(tiny_pair, tmp_path) -> None:
    source, output = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    write_source(source, TEXTS)
    generate = generator(tiny_pair[0])
    third = generate(TEXTS[0][:20], max_new_tokens=3)
    prompt = generate.encode(TEXTS[0])[:4]
    end = int(specjax.generate(generate.target, None, [prompt], max_new_tokens=3).tokens[0, 6])
    assert len(third.tokens) == 3
    target = end_at(Path(tiny_pair[0]), tmp_path / "ends", end)
    assert main(of_texts(target, source, "--temperature", "0", "--output", str(output))) == 0
    answers_of_records = [answers(record)[0] for record in records(output)]
    assert answers_of_records[0][-1] == end and len(answers_of_records[0]) <= 3
    assert all(len(answer) == 10 or answer[-1] == end for answer in answers_of_records)


@pytest.mark.parametrize("template", [ENDED, THOUGHTLESS])
@pytest.mark.full
def test_each_answer_of_a_chat_stands_after_what_it_was_written_after(
    tiny_pair, tmp_path, template
) -> None:
    """Check where each answer of a chat is recorded.

    Answers share a sequence if the next prompt continues it. An answer has its own sequence if the
    template leaves something out, or if its text has other tokens than were written.
    """
    file, source, output = (
        tmp_path / name for name in ("template.jinja", "chats.jsonl", "out.jsonl")
    )
    file.write_text(template)
    long_chat = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "two?"},
    ]
    chats = [long_chat, long_chat[:1], [*long_chat[:2], *long_chat]]
    source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    command = ["regenerate", "--target", tiny_pair[0], "--source", str(source)]
    command += ["--output", str(output), "--chat-template", str(file)]
    command += ["--temperature", "0", "--max-new-tokens", "6", "--batch", "2"]
    file.write_text("{{ mood }}" + template)
    assert main([*command, "--chat-template-kwargs", '{"mood": ""}']) == 0
    generate = generator(tiny_pair[0], template)
    for record in records(output):
        starts = record.get("starts", [0])
        messages = record["messages"]
        for number, (begin, end) in enumerate(record["loss_spans"]):
            start = max(position for position in starts if position <= begin)
            prompt = generate.encode(messages[: 2 * number + 1])
            assert record["tokens"][start:begin] == prompt
            # One length for all prompts, and so one program.
            padded = [prompt + [0] * (64 - len(prompt))]
            result = specjax.generate(
                generate.target, None, padded, [len(prompt)], max_new_tokens=6
            )
            assert (
                record["tokens"][begin:end]
                == result.tokens[0, len(prompt) : result.lengths[0]].tolist()
            )
        assert record["chat_template_kwargs"] == '{"mood": ""}'
        assert len(record["loss_spans"]) == len(messages) // 2
        if template == THOUGHTLESS:
            assert len(starts) == len(messages) // 2


def test_training_reads_the_tokens_of_all_shards(tiny_pair, tmp_path) -> None:
    """Use temperature 1, where a random model writes tokens other than those of its text."""
    source, folder = tmp_path / "texts.jsonl", tmp_path / "out"
    write_source(source, TEXTS)
    for number in range(2):
        assert (
            main(of_texts(tiny_pair[0], source, "--output", str(folder), "--shard", f"{number}/2"))
            == 0
        )
    settings = DataConfig(
        str(folder / "*.jsonl"), tiny_pair[0], window=4, holdout=0.2, responses_only=False
    )
    train, _ = data.split_documents(read_documents(settings.source), 0.2)
    _, packed, *_ = data.prepare(settings)
    by_document = {
        record["document"]: record["tokens"]
        for file in sorted(folder.glob("*.jsonl"))
        for record in records(file)
    }
    by_text = {
        record["text"]: record["tokens"]
        for file in folder.glob("*.jsonl")
        for record in records(file)
    }
    assert len(by_document) == len(by_text) == len(TEXTS)
    expected = [token for document in train for token in by_text[document.text]]
    packed_tokens = [*packed["tokens"][:, :-1].ravel().tolist(), int(packed["tokens"][-1, -1])]
    assert (
        packed_tokens == expected[: len(packed_tokens)] and len(expected) - len(packed_tokens) < 4
    )
    tokenizer = generator(tiny_pair[0]).tokenizer
    assert (
        sum(tokenizer(text)["input_ids"] != tokens for text, tokens in by_text.items())
        > len(TEXTS) / 2
    )
    assert main(["regenerate", "--output", str(folder), "--missing", "2"]) == 0
    again = DataConfig(str(folder), tiny_pair[0], window=4, holdout=0.2, responses_only=False)
    jax.tree.map(
        lambda a, b: (a == b).all() or pytest.fail("the folder is read otherwise"),
        packed,
        data.prepare(again)[1],
    )


def test_a_run_that_an_older_version_began_goes_on(tiny_pair, tmp_path) -> None:
    """Continue a run whose first records have no tokens.

    New records have tokens, and training reads both kinds.
    """
    source, output = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    write_source(source, TEXTS)
    command = of_texts(tiny_pair[0], source, "--output", str(output))
    assert main(command) == 0
    fresh = records(output)
    older = [
        {
            name: value
            for name, value in record.items()
            if name in ("text", "regenerated_from", "document", "copy")
        }
        for record in fresh[:5]
    ]
    output.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in older))
    assert main(command) == 0
    assert records(output) == [*older, *fresh[5:]]
    read = read_documents(str(output))
    assert [document.written is None for document in read] == [True] * 5 + [False] * 7
    data.prepare(DataConfig(str(output), tiny_pair[0], window=4, holdout=0.3))


@pytest.mark.full
def test_what_is_written_after_records_with_tokens_is_what_it_was(tiny_pair, tmp_path) -> None:
    """Check that tokens decide neither which documents are equal nor where they come from."""
    source, once, bare, twice = (
        tmp_path / f"{name}.jsonl" for name in ("texts", "once", "bare", "twice")
    )
    write_source(source, TEXTS)
    assert main(of_texts(tiny_pair[0], source, "--output", str(once))) == 0
    records_without_tokens = [
        {name: record[name] for name in ("text", "regenerated_from")} for record in records(once)
    ]
    bare.write_text("".join(json.dumps(record) + "\n" for record in records_without_tokens))
    assert main(of_texts(tiny_pair[0], once, "--output", str(twice))) == 0
    expected = twice.read_text()
    twice.unlink()
    assert main(of_texts(tiny_pair[0], bare, "--output", str(twice))) == 0
    assert twice.read_text() == expected
