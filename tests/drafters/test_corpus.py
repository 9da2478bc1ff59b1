"""Text files to draft from: what is read, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import text
from specjax.assets import embedded
from specjax.drafters import Suffix, corpus
from specjax.drafters.corpus import read_corpus
from specjax.drafters.registry import load_drafter
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from tests.conftest import compilations, tiny_config


@pytest.fixture(scope="module")
def tokenizer():
    return text.load_tokenizer(embedded("target"))


def test_files_are_read_in_pieces_of_a_bounded_size(tokenizer, tmp_path, monkeypatch) -> None:
    content = "import os\nprint('ä')\n" * 20
    (tmp_path / "a.py").write_text(content)
    (tmp_path / "empty").write_text("")
    monkeypatch.setattr(corpus, "_PIECE", 50)
    tokens = read_corpus([tmp_path / "a.py", str(tmp_path / "empty")], tokenizer, 3072)
    assert tokenizer.decode(tokens[0]) == content
    assert tokens[1] == []


def refusal(function, *arguments, **options) -> str:
    with pytest.raises(InputError) as caught:
        function(*arguments, **options)
    return str(caught.value)


def test_files_that_cannot_be_read_are_refused_by_name(tokenizer, tmp_path, monkeypatch) -> None:
    (tmp_path / "image").write_bytes(b"ok \xff\xfe")
    (tmp_path / "large").write_text("x" * 60)
    (tmp_path / "larger").write_text("x" * 70)
    for name, message in (
        ("image", "no UTF-8 text at byte 3; give text files"),
        ("nothing", "No such file or directory; give text files"),
        ("", "a directory; give text files"),
    ):
        file = tmp_path / name
        assert refusal(read_corpus, [file], tokenizer, 3072) == f"corpus='{file}': {message}"
    monkeypatch.setattr(corpus, "LARGEST_CORPUS", 100)
    large, larger = tmp_path / "large", tmp_path / "larger"
    assert refusal(read_corpus, [large, larger], tokenizer, 3072) == (
        f"corpus='{larger}': the files have 130 bytes together, and this is the largest; give at"
        " most 100, those that answers resemble most"
    )
    assert "largest token id" in refusal(read_corpus, [large], tokenizer, 2)
    assert "no tokenizer" in refusal(read_corpus, [large], None, 3072)


def test_a_file_that_has_grown_is_refused_and_not_cut(tokenizer, tmp_path, monkeypatch) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("x" * 60)
    second.write_text("ä" * 30)
    monkeypatch.setattr(corpus, "LARGEST_CORPUS", 119)  # it would cut the last character
    monkeypatch.setattr(corpus, "_size", lambda file: 0)
    assert refusal(read_corpus, [first, second], tokenizer, 3072) == (
        f"corpus='{second}': with it the files have more than 119 bytes together; give at most as"
        " many, those that answers resemble most"
    )
    monkeypatch.setattr(corpus, "LARGEST_CORPUS", 120)
    assert tokenizer.decode(read_corpus([first, second], tokenizer, 3072)[1]) == "ä" * 30


def test_what_spells_a_special_token_is_text(tokenizer, tmp_path) -> None:
    (tmp_path / "a").write_text("hello <|endoftext|> there")
    (tokens,) = read_corpus([tmp_path / "a"], tokenizer, 3072)
    assert tokenizer.decode(tokens) == "hello <|endoftext|> there"
    assert tokenizer.eos_token_id not in tokens


def test_a_tokenizer_that_lists_no_special_tokens_reads_files_too(tmp_path) -> None:
    def letters(piece: str, **_) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in piece]}

    (tmp_path / "a").write_text("abc")
    assert read_corpus([tmp_path / "a"], letters, 26) == [[0, 1, 2]]


@pytest.mark.parametrize("wrong", [None, 5, [5], b"x", {"a": 1}], ids=str)
def test_what_is_no_path_is_refused(wrong) -> None:
    message = f"corpus={wrong!r}: give paths of text files, or () for none"
    assert refusal(load_drafter, "suffix", None, tiny_config(), corpus=wrong) == message
    assert refusal(specjax.load, "embedded", "suffix", corpus=wrong) == message


def test_a_drafter_by_name_has_the_files(tokenizer, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("import os")
    (tmp_path / "b.txt").write_text("import sys")
    files, config = [tmp_path / "a.txt", tmp_path / "b.txt"], tiny_config(vocab_size=3072)
    tokens = read_corpus(files, tokenizer, 3072)
    both = load_drafter(
        "early-exit:1+suffix", None, config, tokenizer=tokenizer, corpus=files
    ).parts[1]
    alone = load_drafter("suffix", Chain(2), config, tokenizer=tokenizer, corpus=files)
    for drafter in (both, alone):
        ids = np.asarray(drafter.index.tokens)
        texts = [*tokens[0], -1, *tokens[1], -1]
        assert ids.tolist() == texts + [-1] * (len(ids) - len(texts))
    assert alone.draft == Chain(2)
    for of_one in (files[0], str(files[0])):
        drafter = load_drafter("suffix", None, config, tokenizer=tokenizer, corpus=of_one)
        assert drafter.index.sizes == len(tokens[0])
    assert load_drafter("suffix", None, config) == Suffix()


def test_files_for_drafters_that_read_none_are_refused(tmp_path) -> None:
    for name in ("prompt-lookup", "prompt-lookup+early-exit:1"):
        with pytest.raises(InputError, match="reads no files; use the drafter suffix"):
            load_drafter(name, None, tiny_config(), corpus=["a.txt"])
    for drafter in (None, "none", specjax.Suffix()):
        with pytest.raises(InputError, match=r"corpus=\['a.txt'\]: it applies to drafters by name"):
            specjax.load("embedded", drafter, corpus="a.txt")
    with pytest.raises(InputError, match="write suffix; --corpus"):
        load_drafter("suffix:a.txt", None, tiny_config())


def test_an_edit_of_a_file_compiles_nothing(tokenizer, tmp_path) -> None:
    search = jax.jit(lambda index: index.matches(jnp.zeros((1, 16), jnp.int32), jnp.array([3])))
    before = None
    for content in ("import os\n" * 50, "import os\n" * 52):
        (tmp_path / "a.py").write_text(content)
        config = tiny_config(vocab_size=3072)
        file = tmp_path / "a.py"
        search(load_drafter("suffix", None, config, tokenizer=tokenizer, corpus=file).index)
        before = before or compilations()
    assert compilations() == before
