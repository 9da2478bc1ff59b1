import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specjax import text
from specjax.config import ConfigError
from specjax.training import data, documents
from specjax.training.config import DataConfig
from specjax.training.documents import Document
from tests.conftest import ASSETS
from tests.training.packing import pack


@pytest.mark.full
def test_the_standard_library_is_found_without_tests_and_tables() -> None:
    names = {"/".join(file.parts) for file in documents.find_files("stdlib")}
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any(
        "site-packages" in name or "/test/" in name or "/encodings/" in name for name in names
    )


@pytest.mark.parametrize("rule", ["content", "name"])
def test_the_side_of_a_document_depends_on_itself_alone(rule) -> None:
    everything = [Document(f"directory/{i}.py", text=f"text {i}") for i in range(300)]
    train, held_out = data.split_documents(everything, 0.1, rule)
    assert sorted((*train, *held_out), key=everything.index) == everything
    assert 0.03 < len(held_out) / len(everything) < 0.25
    fewer_train, fewer_held_out = data.split_documents(everything[::2], 0.1, rule)
    assert set(fewer_train) <= set(train)
    assert set(fewer_held_out) <= set(held_out)


def test_equal_documents_are_on_one_side_wherever_they_are() -> None:
    texts = [f"text {i}" for i in range(100)]
    copies = [
        [Document(f"{folder}/file:{i}", text=text) for i, text in enumerate(texts)]
        for folder in ("a", "b", "c", "d")
    ]
    again = [
        Document("e", text="new", origin=documents.find_origin(document)) for document in copies[0]
    ]
    sides = [
        {documents.find_origin(document) for document in data.split_documents(read, 0.1)[1]}
        for read in (*copies, again)
    ]
    assert len(sides[0]) > 3 and all(side == sides[0] for side in sides)
    by_name = [
        frozenset(document.text for document in data.split_documents(read, 0.1, "name")[1])
        for read in copies
    ]
    assert len(set(by_name)) == 4


def test_packing_loses_and_repeats_nothing() -> None:
    texts = [[0, 5, 6], [0, 7], [0, 8, 9, 10, 11], [0, 1]]
    packed = pack(texts, window=3, begin=0)
    flat = [token for text in texts for token in text]
    owner = [i for i, text in enumerate(texts) for _ in text]
    for i, (tokens, segments) in enumerate(zip(packed["tokens"], packed["segments"], strict=True)):
        assert tokens.tolist() == flat[3 * i : 3 * i + 4]
        assert segments.tolist() == owner[3 * i : 3 * i + 4]
    assert len(packed["tokens"]) == (len(flat) - 1) // 3
    assert packed["loss_mask"].shape == (len(packed["tokens"]), 3)
    assert np.all(packed["loss_mask"])


def test_batches_are_fixed_by_the_seed_and_resume_anywhere() -> None:
    packed = pack([list(range(101))], window=4)

    def take(iterator, count: int) -> np.ndarray:
        return np.stack([next(iterator)["tokens"] for _ in range(count)])

    whole = take(data.batches(packed, 4, seed=3), 20)
    np.testing.assert_array_equal(whole, take(data.batches(packed, 4, seed=3), 20))
    assert not np.array_equal(whole, take(data.batches(packed, 4, seed=4), 20))
    first = data.batches(packed, 4, seed=3)
    take(first, 9)
    resumed = data.batches(packed, 4, seed=3)
    resumed.set_state(first.get_state())
    np.testing.assert_array_equal(take(resumed, 11), whole[9:])
    epoch = whole[:6].reshape(-1, 5)[:, 0]  # 24 of 25 windows
    assert len(set(epoch.tolist())) == 24


def test_bad_sources_are_refused_by_name(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"data\.source="):
        documents.find_files(str(tmp_path / "*.txt"))
    with pytest.raises(ConfigError, match=r"data\.window=64"):
        pack([[1, 2, 3]], 64)
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(ConfigError, match=r"data\.holdout"):
        data.prepare(DataConfig(source=str(tmp_path)))


# --- the tokens of a source -----------------------------------------------------------------------

TEXTS = [
    f"def function_{i}(self): return [{i}, self.value, {{'name': other}}, None]\n" * 2
    for i in range(40)
]
PADDED = {
    "strategy": {"Fixed": 64},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
}
CUT = {"direction": "Right", "max_length": 20, "strategy": "LongestFirst", "stride": 0}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<end>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<end>{% endif %}{% endfor %}"
)


def tokenizer_with(directory: Path, **changes) -> Path:
    """Save the embedded target's tokenizer with other entries in its tokenizer.json."""
    directory.mkdir()
    shutil.copy(ASSETS / "target" / "tokenizer_config.json", directory)
    content = json.loads((ASSETS / "target" / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps({**content, **changes}))
    return directory


def write_texts(directory: Path) -> str:
    directory.mkdir()
    for i, content in enumerate(TEXTS):
        (directory / f"{i}.py").write_text(content)
    return str(directory)


def flat(packed: dict[str, np.ndarray]) -> list[int]:
    return [*packed["tokens"][:, :-1].ravel().tolist(), int(packed["tokens"][-1, -1])]


@pytest.mark.parametrize(
    "left_on", [{"padding": {**PADDED, "pad_token": "<|endoftext|>"}}, {"truncation": CUT}]
)
def test_texts_have_the_tokens_that_generation_gives_them(left_on, tmp_path) -> None:
    directory, source = (
        tokenizer_with(tmp_path / "tokenizer", **left_on),
        write_texts(tmp_path / "texts"),
    )
    _, packed, *_ = data.prepare(
        DataConfig(source=source, tokenizer=str(directory), window=8, holdout=0.2)
    )
    train, _ = data.split_documents(documents.read_documents(source), 0.2)
    generation = text.load_tokenizer(directory)
    expected = [token for document in train for token in text.encode(generation, document.text)]
    assert len(text.encode(generation, TEXTS[0])) > 30
    assert flat(packed) == expected[: len(flat(packed))]
    assert len(expected) - len(flat(packed)) < 8  # the window that is not full


@pytest.mark.parametrize(
    "left_on", [{"padding": {**PADDED, "pad_token": "<|endoftext|>"}}, {"truncation": CUT}]
)
def test_chats_have_the_tokens_that_generation_gives_them(left_on, tmp_path) -> None:
    directory, template = (
        tokenizer_with(tmp_path / "tokenizer", **left_on),
        tmp_path / "template.jinja",
    )
    template.write_text(TEMPLATE)
    chats = [
        [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        for content in TEXTS
    ]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    settings = DataConfig(
        str(source), str(directory), chat_template=str(template), window=8, holdout=0.2
    )
    tokenizer, packed, *_ = data.prepare(replace(settings, responses_only=False))
    train, _ = data.split_documents(documents.read_documents(str(source)), 0.2)
    generation = text.load_tokenizer(directory)
    generation.chat_template = TEMPLATE
    expected = [
        token for document in train for token in text.encode_chat(generation, document.messages)
    ]
    assert flat(packed) == expected[: len(flat(packed))]
    # The tokenizer that comes back encodes as generation does.
    assert tokenizer.encode(TEXTS[0]).ids == text.encode(generation, TEXTS[0])


# --- where a document ends ------------------------------------------------------------------------


def labels_across(packed: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels that belong to another document than their input, and which count."""
    across = packed["segments"][:, 1:] != packed["segments"][:, :-1]
    return packed["tokens"][:, 1:][across], packed["loss_mask"][across]


def test_texts_of_a_tokenizer_that_begins_none_end_with_an_end_token(tmp_path) -> None:
    directory, source = (
        tokenizer_with(tmp_path / "tokenizer", post_processor=None),
        write_texts(tmp_path / "texts"),
    )
    _, packed, *_ = data.prepare(
        DataConfig(source=source, tokenizer=str(directory), window=8, holdout=0.2)
    )
    tokens, counts = labels_across(packed)
    assert len(tokens) > 20
    assert not counts.any()
    tokens, segments = flat(packed), [*packed["segments"][:, :-1].ravel().tolist(), -1]
    last = [tokens[i] for i in range(len(tokens) - 2) if segments[i] != segments[i + 1]]
    assert last == [0] * len(last)  # the end token, which is a label that counts
    ends = packed["tokens"][:, 1:] == 0
    assert ends.sum() >= len(last) - 1 and packed["loss_mask"][ends].all()


def test_the_end_token_is_the_targets_where_the_tokenizer_has_none(tmp_path) -> None:
    directory, source = (
        tokenizer_with(tmp_path / "tokenizer", post_processor=None),
        write_texts(tmp_path / "texts"),
    )
    (directory / "tokenizer_config.json").write_text("{}")
    settings = DataConfig(source=source, tokenizer=str(directory), window=8, holdout=0.2)
    for end, expected in ((7, 7), (None, None)):
        _, packed, *_ = data.prepare(settings, end=end)
        assert not labels_across(packed)[1].any()
        assert (flat(packed).count(7) > 20) == (expected == 7)


def test_a_begin_token_goes_on_being_learnt_as_the_end_of_the_text_before(tmp_path) -> None:
    source = write_texts(tmp_path / "texts")
    settings = DataConfig(source=source, tokenizer=str(ASSETS / "target"), window=8, holdout=0.2)
    _, packed, *_ = data.prepare(settings, end=7)
    tokens, counts = labels_across(packed)
    assert len(tokens) > 20 and set(tokens.tolist()) == {0} and counts.all()
    assert packed["loss_mask"].all()
    begins = np.flatnonzero(np.array(flat(packed)) == 0)
    assert 7 not in flat(packed)[:1] and sum(np.diff(begins) == 1) == 0


def test_a_conversation_is_no_label_of_the_one_before(tmp_path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    source = tmp_path / "chats.jsonl"
    chats = [{"messages": [{"role": "user", "content": content}]} for content in TEXTS]
    source.write_text("".join(json.dumps(record) + "\n" for record in chats))
    settings = DataConfig(
        str(source), str(ASSETS / "target"), chat_template=str(template), window=8, holdout=0.2
    )
    for begins in (False, True):
        template.write_text(("{{ bos_token }}" if begins else "") + TEMPLATE)
        _, packed, *_ = data.prepare(replace(settings, responses_only=False))
        tokens, counts = labels_across(packed)
        assert len(tokens) > 20
        assert counts.all() if begins else not counts.any()
