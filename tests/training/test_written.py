"""Records with the tokens that they were written in: how they are read, used and refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specjax import text
from specjax.config import ConfigError
from specjax.templates import with_template
from specjax.training import chat, data, documents, fingerprint, sequences
from specjax.training.config import DataConfig
from specjax.training.tokenizer import read_tokenizer
from specjax.training.written import TOKENIZER, WrittenTokens, parse
from tests.conftest import ASSETS
from tests.training.test_data import CUT, PADDED, TEMPLATE, TEXTS, flat, tokenizer_with

CHATS = [
    [
        {"role": "user", "content": f"What is {number}?"},
        {"role": "assistant", "content": f"It is {number + 1} minus one."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "return None"},
    ]
    for number in range(30)
]


@pytest.fixture
def tokenizer():
    tokenizer = text.load_tokenizer(ASSETS / "target")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def notes(monkeypatch) -> list[str]:
    lines: list[str] = []

    def note(line: str, unasked: bool = False) -> None:
        lines.append(line)

    monkeypatch.setattr(sequences, "say", note)
    monkeypatch.setattr(documents, "say", note)
    return lines


def write(file: Path, records: list[dict]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def by_letters(tokenizer, words: str) -> list[int]:
    """Return the tokens of a text letter by letter, as no tokenizer would encode it."""
    return [token for letter in words for token in text.encode_continuation(tokenizer, letter)]


def written_texts(tokenizer, encode) -> list[dict]:
    """Return `TEXTS` with the tokens of ``encode``; the first three tokens are the prompt's."""
    digest = fingerprint.of_tokenizer(tokenizer, chats=False)
    return [
        {"text": content, **WrittenTokens.of_turns([(ids[:3], ids[3:])], digest).record()}
        for content in TEXTS
        for ids in [encode(tokenizer, content)]
    ]


def spans(mask: np.ndarray) -> list[list[int]]:
    edges = np.flatnonzero(np.diff(np.pad(mask.astype(int), 1)))
    return edges.reshape(-1, 2).tolist()


def written_chats(tokenizer) -> list[dict]:
    digest = fingerprint.of_tokenizer(tokenizer)
    encoded = chat.encode(tokenizer, CHATS, responses_only=True)
    return [
        {"messages": messages, TOKENIZER: digest, "tokens": list(ids), "loss_spans": spans(mask)}
        for messages, (ids, mask) in zip(CHATS, encoded, strict=True)
    ]


def config(source: Path, template: Path | None = None) -> DataConfig:
    named = "" if template is None else str(template)
    return DataConfig(
        str(source), str(ASSETS / "target"), chat_template=named, window=8, holdout=0.2
    )


def as_lists(arrays: dict[str, np.ndarray]) -> dict[str, list]:
    return {name: array.tolist() for name, array in arrays.items()}


def without_tokens(records: list[dict]) -> list[dict]:
    return [
        {name: record[name] for name in ("text", "messages") if name in record}
        for record in records
    ]


def test_answers_stand_after_the_tokens_that_they_were_written_after() -> None:
    goes_on = WrittenTokens.of_turns([([1, 2], [3, 4]), ([1, 2, 3, 4, 5], (6,))], "t")
    assert goes_on.tokens.tolist() == [1, 2, 3, 4, 5, 6] and goes_on.starts == (0,)
    assert goes_on.loss_spans.tolist() == [[2, 4], [5, 6]]
    left_out = WrittenTokens.of_turns(
        [([1, 2], [3, 4]), ([1, 2, 4, 5], [6]), ([1, 2, 4, 5, 6, 7], [8])], "t"
    )
    sequences = [
        (tokens.tolist(), np.flatnonzero(counts).tolist())
        for tokens, counts in left_out.sequences(True)
    ]
    assert sequences == [([1, 2, 3, 4], [2, 3]), ([1, 2, 4, 5, 6, 7, 8], [4, 6])]
    everything = [np.flatnonzero(counts).tolist() for _, counts in left_out.sequences(False)]
    assert everything == [[1, 2, 3], [4, 6]]
    for written_tokens in (goes_on, left_out):
        read = parse(json.loads(json.dumps(written_tokens.record())), "somewhere")
        assert read is not None and read.record() == written_tokens.record()


def test_texts_give_the_same_windows_as_their_tokens(tokenizer, tmp_path, notes) -> None:
    records = written_texts(tokenizer, text.encode)
    source = write(tmp_path / "own.jsonl", records)
    for responses_only in (True, False):
        settings = replace(config(source), responses_only=responses_only)
        _, packed, held_out, *_ = data.prepare(settings)
        write(source, without_tokens(records))
        _, expected, expected_held_out, *_ = data.prepare(settings)
        write(source, records)
        for ours, theirs in ((packed, expected), (held_out, expected_held_out)):
            assert ours["tokens"].tolist() == theirs["tokens"].tolist()
            assert ours["segments"].tolist() == theirs["segments"].tolist()
        train, _ = data.split_documents(documents.read_documents(str(source)), 0.2)
        place = [place for document in train for place in range(len(document.written.tokens))]
        labels = np.array(place[1 : packed["loss_mask"].size + 1])
        # The text before may have been cut, so that the beginning of the next one is no label.
        assert (
            packed["loss_mask"].ravel().tolist()
            == (labels >= (3 if responses_only else 1)).tolist()
        )
    assert notes == 2 * [
        f"data.source='{source}': 40 of 40 documents are read in the tokens they were written in"
    ]


def test_chats_give_the_same_windows_as_their_tokens(tokenizer, tmp_path, notes) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    records = written_chats(tokenizer)
    source = write(tmp_path / "chats.jsonl", records)
    with_tokens = data.prepare(config(source, template))[1:3]
    write(source, without_tokens(records))
    expected = data.prepare(config(source, template))[1:3]
    assert len(notes) == 1
    for ours, theirs in zip(with_tokens, expected, strict=True):
        assert as_lists(ours) == as_lists(theirs)
    template.write_text(TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    with pytest.raises(ConfigError, match="marks no token as the assistant's"):
        data.prepare(config(source, template))
    unmarked = fingerprint.of_tokenizer(
        with_template(text.load_tokenizer(ASSETS / "target"), str(template))
    )
    # The spans of the records replace the marks of the template.
    write(source, [record | {TOKENIZER: unmarked} for record in records])
    _, packed, *_ = data.prepare(config(source, template))
    assert packed["loss_mask"].tolist() == expected[0]["loss_mask"].tolist()


def test_a_training_with_other_variables_than_the_data_has_one_warning_that_names_both(
    tokenizer, tmp_path, notes
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ mood | default('glad') }}" + TEMPLATE)
    records = written_chats(tokenizer)
    glad, sad = ({"chat_template_kwargs": json.dumps({"mood": mood})} for mood in ("glad", "sad"))
    source = tmp_path / "chats.jsonl"
    settings = config(source, template)

    def warned(records: list[dict], variables: str) -> list[str]:
        write(source, records)
        notes.clear()
        data.prepare(replace(settings, chat_template_kwargs=variables))
        return [note for note in notes if "a target answered" in note]

    mixed = [record | (sad if index < 10 else glad) for index, record in enumerate(records)]
    assert warned(mixed, "") == [
        f"data.source={str(source)!r}: a target answered 10 conversations with"
        ' chat_template_kwargs={"mood": "sad"}, and this run has data.chat_template_kwargs={};'
        " give the same variables"
    ]
    (warning,) = warned(mixed, '{"mood": "sad"}')
    assert '20 conversations with chat_template_kwargs={"mood": "glad"}' in warning
    assert 'data.chat_template_kwargs={"mood": "sad"}' in warning
    assert not warned([record | glad for record in records], "")
    assert not warned(records, '{"mood": "sad"}')  # nothing is recorded
    with pytest.raises(ConfigError, match=r":1, .*: chat_template_kwargs: must be the JSON text"):
        warned([record | {"chat_template_kwargs": "[1"} for record in records], "")


def test_tokens_that_the_text_does_not_say_are_those_that_are_trained_on(
    tokenizer, tmp_path
) -> None:
    records = written_texts(tokenizer, by_letters)
    source = write(tmp_path / "texts.jsonl", records)
    _, packed, *_ = data.prepare(config(source))
    train, _ = data.split_documents(documents.read_documents(str(source)), 0.2)
    tokens = {record["text"]: record["tokens"] for record in records}
    assert tokens[TEXTS[0]] != text.encode(tokenizer, TEXTS[0])
    expected = [token for document in train for token in tokens[document.text]]
    trained_on = flat(packed)
    assert trained_on == expected[: len(trained_on)] and len(expected) - len(trained_on) < 8


def test_records_with_and_without_tokens_stand_in_their_order(tokenizer, tmp_path, notes) -> None:
    records = written_texts(tokenizer, by_letters)
    mixed = [
        record if number % 2 else {"text": record["text"]} for number, record in enumerate(records)
    ]
    source = write(tmp_path / "texts.jsonl", mixed)
    _, packed, *_ = data.prepare(config(source))
    train, _ = data.split_documents(documents.read_documents(str(source)), 0.2)
    expected = []
    for document in train:
        encode = text.encode if document.written is None else by_letters
        expected += encode(tokenizer, document.text)
    assert flat(packed) == expected[: len(flat(packed))]
    assert notes == [
        f"data.source='{source}': 20 of 40 documents are read in the tokens they were written in"
    ]


def test_tokens_of_another_tokenizer_or_template_are_not_used(tokenizer, tmp_path, notes) -> None:
    records = [record | {TOKENIZER: "another"} for record in written_texts(tokenizer, by_letters)]
    source = write(tmp_path / "texts.jsonl", records)
    _, packed, *_ = data.prepare(config(source))
    assert notes == [
        f"data.source='{source}': 40 of 40 documents have tokens of another tokenizer or chat"
        " template than this run's: their text is tokenised"
    ]
    write(source, without_tokens(records))
    _, expected, *_ = data.prepare(config(source))
    assert as_lists(packed) == as_lists(expected)
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE.replace("<end>", "<stop>"))
    write(source, written_chats(tokenizer))
    tokenizer_read, packed, *_ = data.prepare(config(source, template))
    assert "<stop>" in tokenizer_read.decode(flat(packed))
    assert "30 of 30 documents have tokens of another" in notes[-1]


def test_a_tokenizer_trained_here_has_no_tokens_of_records(tokenizer, tmp_path, notes) -> None:
    records = [record | {TOKENIZER: ""} for record in written_texts(tokenizer, by_letters)]
    source = write(tmp_path / "texts.jsonl", records)
    data.prepare(DataConfig(str(source), vocab_size=300, window=8, holdout=0.2))
    assert "40 of 40 documents have tokens of another" in notes[-1]


def test_what_other_data_sets_call_tokens_is_not_looked_at(tmp_path) -> None:
    source = write(
        tmp_path / "texts.jsonl",
        [{"text": "a", "tokens": 57}, {"text": "b", "tokens": ["b"], "loss_spans": "c"}],
    )
    assert [document.written for document in documents.read_documents(str(source))] == [None, None]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tokens": "one two"}, "tokens: must be a list of token ids"),
        ({"tokens": [0, 5.5, 6]}, "tokens: must be a list of token ids"),
        ({"tokens": [0, -1, 6]}, "tokens: must be a list of token ids"),
        ({"tokens": [0, [1], 6]}, "tokens: must be a list of token ids"),
        ({"tokens": []}, "tokens: must be a list of token ids"),
        (
            {"tokens": [0, 3072] * 8},
            r"tokens: it has the id 3072, but the vocabulary has only 3072 tokens",
        ),
        ({"loss_spans": None}, "loss_spans: must be a list of pairs of begin and end"),
        ({"loss_spans": [1, 1, 0]}, "loss_spans: must be a list of pairs of begin and end"),
        ({"loss_spans": [[0, 9999]]}, "loss_spans: must be in order, and within the 7 tokens"),
        ({"loss_spans": [[3, 5], [4, 6]]}, "loss_spans: must be in order, and within the 7 tokens"),
        ({"starts": [1]}, "starts: must begin with 0, increase, and be within the 7 tokens"),
        ({"starts": [0, 7]}, "starts: must begin with 0, increase, and be within the 7 tokens"),
    ],
)
def test_damaged_tokens_are_refused_by_their_line(tokenizer, tmp_path, changed, words) -> None:
    digest = fingerprint.of_tokenizer(tokenizer, chats=False)
    whole = {
        "text": "abcdef",
        TOKENIZER: digest,
        "tokens": [0, 5, 6, 7, 8, 9, 10],
        "loss_spans": [[3, 7]],
    }
    source = write(
        tmp_path / "texts.jsonl",
        [whole, whole | changed, *({**whole, "text": f"abc{i}"} for i in range(40))],
    )
    with pytest.raises(ConfigError, match=rf"{tmp_path.name}/texts.jsonl:2: {words}"):
        data.prepare(config(source))


def test_ids_that_the_target_has_and_the_tokenizer_has_not_are_the_targets(
    tokenizer, tmp_path
) -> None:
    """Check ids beyond the tokenizer.

    Published targets have more rows than their tokenizer has tokens, and may write an id without
    text.
    """
    records = written_texts(tokenizer, text.encode)
    for record in records:
        record["tokens"][-1] = 3075
    source = write(tmp_path / "texts.jsonl", records)
    _, packed, *_ = data.prepare(config(source), vocab=3076)
    assert (packed["tokens"] == 3075).sum() > 20
    with pytest.raises(
        ConfigError, match="it has the id 3075, but the vocabulary has only 3075 tokens"
    ):
        data.prepare(config(source), vocab=3075)


def test_a_folder_is_read_without_what_is_not_whole_and_without_notes(
    tokenizer, tmp_path, notes
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    write(folder / "00001-of-00003.jsonl", [{"text": "second"}])
    write(folder / "00000-of-00003.jsonl", [{"text": "first"}])
    write(folder / "00002-of-00003.jsonl.part", [{"text": "third"}])
    for number in range(3):
        settings = "# written by the target of the fingerprint ab\ntarget: embedded\n"
        (folder / f"{number:05d}-of-00003.yaml").write_text(settings)
    (folder / ".00002-of-00003.yaml.tmp").write_text("# written by the tar")
    (folder / "my.yaml").write_text("a: text of one's own")
    for source in (str(folder), f"{folder}/*", f"{folder}/*.jsonl"):
        read = [document.text for document in documents.read_documents(source)]
        assert read == [
            "first",
            "second",
            *(["a: text of one's own"] if "jsonl" not in source else []),
        ]
    assert len(notes) == 2
    assert all("as they are unfinished: 00002-of-00003.jsonl.part" in line for line in notes)


def test_a_fingerprint_is_of_what_decides_the_tokens(tokenizer, tmp_path) -> None:
    whole = fingerprint.of_tokenizer(tokenizer)
    texts = fingerprint.of_tokenizer(tokenizer, chats=False)
    tokenizer("a", truncation=True, max_length=5)  # truncation stays on after this
    assert fingerprint.of_tokenizer(tokenizer) == whole
    for name, left_on in (
        ("padded", {"padding": {**PADDED, "pad_token": "<|endoftext|>"}}),
        ("cut", {"truncation": CUT}),
    ):
        directory = tokenizer_with(tmp_path / name, **left_on)
        generates, trains = text.load_tokenizer(directory), read_tokenizer(directory)
        assert fingerprint.of_tokenizer(generates) == fingerprint.of_tokenizer(trains)
    tokenizer.chat_template = "{{ messages }}"
    assert fingerprint.of_tokenizer(tokenizer) != whole
    assert fingerprint.of_tokenizer(tokenizer, chats=False) == texts
    shutil.copytree(ASSETS / "target", tmp_path / "other")
    content = (tmp_path / "other" / "tokenizer.json").read_text()
    (tmp_path / "other" / "tokenizer.json").write_text(content.replace("<|endoftext|>", "<|text|>"))
    assert fingerprint.of_tokenizer(text.load_tokenizer(tmp_path / "other"), chats=False) != texts
