"""Windows that are packed piece by piece, compared with obvious packings of all sequences."""

import numpy as np
import pytest

from specjax.config import ConfigError
from specjax.training import packing
from specjax.training.config import Packing
from specjax.training.packing import DocumentsPacker, WindowsInMemory
from tests.training.packing import pack, sequence, slow_windows

LENGTHS = (0, 3, 40, 1, 0, 2, 17, 1, 30)


def some_sequences(begin: int | None, lengths=LENGTHS, share: float = 0.2):
    random = np.random.default_rng(7)
    sequences = []
    for length in lengths:
        ids = random.integers(0, 5, length)
        if begin is not None and random.random() < 0.7:
            ids[:1] = begin
        mask = random.random(length) < share
        mask[:1] = random.random() < 0.5
        sequences.append(sequence(ids, mask, bool(random.random() < 0.3)))
    return sequences


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("begin", [None, 3])
@pytest.mark.parametrize("window", [2, 5, 16])
def test_windows_are_cut_from_all_sequences_in_a_row(piece, begin, window, monkeypatch) -> None:
    monkeypatch.setattr(packing, "_PIECE", piece)
    sequences = some_sequences(begin)
    expected, packed = slow_windows(sequences, window, begin), pack(sequences, window, begin)
    for name, array in expected.items():
        assert packed[name].dtype == array.dtype
        np.testing.assert_array_equal(packed[name], array, err_msg=name)


def documents_in(packed) -> list[tuple[int, list[int], list[bool]]]:
    """Return each document's index, its tokens, and which of them are labels, in order."""
    documents = {}
    arrays = (packed[name] for name in ("tokens", "segments", "loss_mask"))
    for tokens, segments, mask in zip(*arrays, strict=True):
        for segment in set(segments.tolist()) - {-1}:
            (places,) = np.nonzero(segments == segment)
            assert np.all(np.diff(places) == 1) and segment not in documents
            labels = [bool(mask[place - 1]) for place in places[1:]]
            documents[segment] = tokens[places].tolist(), [False, *labels]
            # The first token does not follow from the document before it.
            assert places[0] == 0 or not mask[places[0] - 1]
        (empty,) = np.nonzero(segments == -1)
        assert empty.tolist() == list(range(len(tokens)))[len(tokens) - len(empty) :]
        assert not mask[max(len(tokens) - len(empty) - 1, 0) :].any()
    return [(segment, *documents[segment]) for segment in sorted(documents)]


@pytest.mark.parametrize("begin", [None, 3])
@pytest.mark.parametrize("window", [2, 5, 16, 64])
@pytest.mark.parametrize("open_windows", [1, 3, 1024])
def test_documents_are_whole_or_cut_into_windows(begin, window, open_windows, monkeypatch) -> None:
    monkeypatch.setattr(packing, "_FEWEST_OPEN", open_windows)
    monkeypatch.setattr(packing, "_MOST_OPEN", open_windows)
    sequences = some_sequences(begin)
    expected = []
    for ids, mask, is_generated in sequences:
        tokens, labels = ids.tolist(), mask.tolist()
        if tokens and tokens[0] == begin and labels[0] and not is_generated:
            tokens, labels = [*tokens, begin], [*labels, True]
        for start in range(0, len(tokens), window):
            part = slice(start, start + window + 1)
            if any(labels[part][1:]):
                expected.append((len(expected), tokens[part], [False, *labels[part][1:]]))
    packed = pack(sequences, window, begin, "documents")
    assert documents_in(packed) == expected
    assert packed["tokens"].dtype == packed["segments"].dtype == np.int32
    assert packed["loss_mask"].any(axis=1).all()


def test_a_document_joins_the_fullest_window_with_room() -> None:
    lengths = [6, 9, 4, 5, 1, 7]  # documents of one token have no label
    packed = pack([[index + 1] * n for index, n in enumerate(lengths)], 9, packing="documents")
    assert [row[row >= 0].tolist() for row in packed["segments"]] == [
        [0] * 6 + [2] * 4,
        [1] * 9,
        [3] * 5,
        [4] * 7,
    ]


def test_windows_of_documents_stay_in_order_and_are_nearly_full(monkeypatch) -> None:
    monkeypatch.setattr(packing, "_ROWS_AT_ONCE", 7)
    random = np.random.default_rng(0)
    lengths = random.geometric(1 / 100, 3000)
    sink = WindowsInMemory()
    packer = DocumentsPacker(sink, 512, None)
    for length in lengths:
        packer.add(sequence(np.ones(length)))
    packer.close()
    packed = sink.take()
    # The first document of a window opened it, so its windows are in the order of the documents.
    assert np.all(np.diff(packed["segments"][:, 0]) > 0)
    assert packer.windows == len(packed["tokens"])
    assert packer.packed_tokens == (packed["segments"] >= 0).sum()
    assert (packed["segments"] >= 0).mean() > 0.98
    assert packer.label_counts.tolist() == [0, packed["loss_mask"].sum()]


def test_too_little_text_is_refused() -> None:
    cases: list[tuple[list, Packing, str]] = [
        ([[1, 2]], "windows", r"data\.window=4: the text has only 2 tokens"),
        ([], "windows", r"data\.window=4: the text has only 0 tokens"),
        ([sequence([1] * 9, [False] * 9)], "windows", "none of the 2 windows has a label"),
        ([[1]], "documents", "it has 1 tokens, and no document with a label"),
        ([sequence([1] * 9, [False] * 9)], "documents", "9 tokens, and no document with a label"),
    ]
    for sequences, kind, words in cases:
        with pytest.raises(ConfigError, match=words):
            pack(sequences, 4, packing=kind)
