"""Text files to draft from: what is read, and what is refused."""

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
from tests.conftest import tiny_config


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


def test_files_that_cannot_be_read_are_refused_by_name(tokenizer, tmp_path, monkeypatch) -> None:
    (tmp_path / "image").write_bytes(b"ok \xff\xfe")
    (tmp_path / "large").write_text("x" * 60)
    (tmp_path / "larger").write_text("x" * 70)
    for name, message in (
        ("image", "image': no UTF-8 text at byte 3; give text files"),
        ("nothing", "nothing': No such file or directory; give text files"),
        ("", "': a directory; give text files"),
    ):
        with pytest.raises(InputError, match=message):
            read_corpus([tmp_path / name], tokenizer, 3072)
    monkeypatch.setattr(corpus, "LARGEST_CORPUS", 100)
    with pytest.raises(InputError, match=r"larger': the files have 130 bytes.* give at most 100"):
        read_corpus([tmp_path / "large", tmp_path / "larger"], tokenizer, 3072)
    with pytest.raises(InputError, match="largest token id"):
        read_corpus([tmp_path / "large"], tokenizer, vocab_size=2)
    with pytest.raises(InputError, match="no tokenizer"):
        read_corpus([tmp_path / "large"], None, 3072)


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
        assert ids[:-1].tolist() == [*tokens[0], -1, *tokens[1], -1]
    assert alone.draft == Chain(2)
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
