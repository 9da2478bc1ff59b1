"""Compare the suffix index with a dictionary of n-grams."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import suffix_index
from specjax.drafters.suffix_index import (
    CONTEXT_LENGTHS,
    LONGEST_CONTEXT,
    SORTED_TOKENS,
    SuffixIndex,
    roomy_capacity,
    sorted_positions,
)
from specjax.errors import InputError
from tests.conftest import compilations
from tests.drafters.ngrams import NgramDictionary, sampled

SAMPLES, DEPTH = 4, 3
ROWS, CAPACITY = 40, 400  # the same for all tests, which so share a program


@jax.jit
def search(index, contexts, lengths, segments=None):
    """Return the number of occurrences for each context length, and what follows them."""
    first, count = index.matches(contexts, lengths, segments)
    following = [
        index.following(first[:, place], count[:, place], length, SAMPLES, DEPTH)
        for place, length in enumerate(CONTEXT_LENGTHS)
    ]
    return count, jnp.stack([tokens for tokens, _ in following], axis=1)


def contexts_of(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    rows = rows + [[]] * (ROWS - len(rows))
    contexts = np.zeros((len(rows), LONGEST_CONTEXT), np.int32)  # token 0 is an ordinary token
    for row, tokens in enumerate(rows):
        newest = tokens[-LONGEST_CONTEXT:]
        contexts[row, LONGEST_CONTEXT - len(newest) :] = newest
    return contexts, np.array([len(tokens) for tokens in rows], np.int32)


def random_texts(rng, vocab: int, count: int, longest: int) -> list[list[int]]:
    """Return random texts that copy parts of each other."""
    texts: list[list[int]] = []
    for _ in range(count):
        text = rng.integers(0, vocab, rng.integers(0, longest)).tolist()
        if texts and rng.random() < 0.7:
            source = texts[rng.integers(len(texts))]
            start = rng.integers(0, len(source) + 1)
            text = (text[: longest // 4] + source[start : start + longest // 2])[:longest]
        texts.append(text)
    return texts


def check(index: SuffixIndex, ngrams: NgramDictionary, rows: list[list[int]]) -> int:
    """Check all matches of some rows; return how many occurrences there are."""
    counts, following = map(np.asarray, search(index, *contexts_of(rows)))
    for row, tokens in enumerate(rows):
        for place, length in enumerate(CONTEXT_LENGTHS):
            occurrences = ngrams.occurrences(tokens[-length:]) if length <= len(tokens) else []
            assert counts[row, place] == len(occurrences), (row, length)
            expected = [after[:DEPTH] for after in sampled(occurrences, SAMPLES)]
            padded = [(*after, *[-1] * (DEPTH - len(after))) for after in expected]
            padded += [(-1,) * DEPTH] * (SAMPLES - len(padded))
            assert following[row, place].tolist() == list(map(list, padded)), (row, length)
    return int(counts.sum())


def random_rows(rng, texts: list[list[int]], vocab: int, count: int) -> list[list[int]]:
    """Return rows that end as a part of a text does, or with random tokens."""
    rows = []
    for _ in range(count):
        row = rng.integers(0, vocab, rng.integers(0, 20)).tolist()
        if texts and rng.random() < 0.8:
            source = texts[rng.integers(len(texts))]
            end = rng.integers(0, len(source) + 1)
            row += source[max(0, end - rng.integers(1, 20)) : end]
        rows.append(row)
    return rows


@pytest.mark.parametrize("vocab", [2, 3, 20])
def test_the_matches_are_those_of_a_dictionary_of_ngrams(vocab) -> None:
    rng = np.random.default_rng(vocab)
    occurrences = 0
    for _ in range(3):
        texts = random_texts(rng, vocab, count=5, longest=60)
        index = SuffixIndex.of(texts, CAPACITY)
        occurrences += check(index, NgramDictionary(texts), random_rows(rng, texts, vocab, ROWS))
    assert occurrences > 500


@pytest.mark.thorough
@pytest.mark.parametrize("vocab", [2, 4, 50])
def test_a_million_texts_are_added_and_removed_and_searched(vocab, monkeypatch) -> None:
    """Texts come and go within the capacity, and nothing is compiled again.

    As in a server, each index is made from the one before. Some are sorted anew.
    """
    monkeypatch.setattr(suffix_index, "MOST_INSERTED", 1.0)  # by `with_texts` nothing is
    rng = np.random.default_rng(vocab)
    ngrams, operations, compiled = NgramDictionary(), 0, None
    index = SuffixIndex.on_host([])
    while operations < 340_000:
        end, begin = sum(len(text) + 1 for text in ngrams.texts), 0
        new = random_texts(rng, vocab, count=rng.integers(2, 4), longest=60)[1:]
        for text in new:
            ngrams.add(text)
            operations += 1
        while sum(len(text) + 1 for text in ngrams.texts) > CAPACITY:
            begin += len(ngrams.texts[0]) + 1
            ngrams.remove_oldest()
            operations += 1
        texts = list(map(list, ngrams.texts))
        if rng.random() < 0.1:
            index = SuffixIndex.on_host(texts)
        else:
            index = index.with_texts(new, begin, end)
        rows = random_rows(rng, texts, vocab, ROWS)
        check(jax.tree.map(jnp.asarray, index.padded(CAPACITY)), ngrams, rows)
        operations += len(rows)
        compiled = compilations() if compiled is None else compiled
    assert compilations() == compiled


def test_other_texts_within_the_capacity_compile_nothing() -> None:
    rows = contexts_of([[1, 2], [3]])
    search(SuffixIndex.of([[1, 2, 3]], CAPACITY), *rows)
    before = compilations()
    counts, _ = search(SuffixIndex.of([[1, 2, 3], [1, 2, 4, 1, 2]], CAPACITY), *rows)
    assert compilations() == before
    assert counts[0, -1] == 3


def test_an_index_without_a_token_has_no_match() -> None:
    for texts in ([], [[]], [[], []]):
        counts, following = search(SuffixIndex.of(texts, CAPACITY), *contexts_of([[1, 2], [3]]))
        assert counts.sum() == 0
        assert (np.asarray(following) == -1).all()


def test_no_match_and_no_continuation_crosses_the_end_of_a_text() -> None:
    index = SuffixIndex.of([[1, 2, 3], [4, 5]], CAPACITY)
    counts, following = search(index, *contexts_of([[3, 4], [2, 3], [4, 5]]))
    assert counts[:3, -1].tolist() == [0, 1, 1]
    assert (np.asarray(following) == -1).all()


def test_the_samples_of_many_occurrences_have_their_shares() -> None:
    text = []
    for place in range(100):
        text += [7, 8, 1 if place % 3 == 0 else 2]
    _, following = search(SuffixIndex.of([text], CAPACITY), *contexts_of([[7, 8]]))
    ones = np.mean(np.asarray(following)[0, -1, :, 0] == 1)
    assert abs(ones - 1 / 3) < 1 / SAMPLES


@pytest.mark.parametrize("vocab", [1, 2, 300, 2**31 - 1])
def test_positions_are_sorted_by_what_follows(vocab) -> None:
    rng = np.random.default_rng(vocab)
    tokens = rng.integers(-1, vocab, 300, np.int64).astype(np.int32)
    tokens[100:180] = tokens[200:280]
    expected = sorted(
        range(300), key=lambda place: (tokens[place : place + SORTED_TOKENS].tolist(), place)
    )
    assert sorted_positions(tokens).tolist() == expected


def check_insertions(vocab: int, changes: int, capacity: int, seed: int = 0) -> int:
    """Change an index many times, and compare it each time with one that is sorted anew.

    Returns:
        The number of changes in which new texts came beside more than two windows that stayed.
    """
    rng = np.random.default_rng((seed, vocab))
    texts: list[list[int]] = []
    index, inserted = SuffixIndex.on_host(texts), 0
    for _ in range(changes):
        longest = 40 if rng.random() < 0.95 else 2 * capacity
        new = random_texts(rng, vocab, rng.integers(0, 3), longest)
        if rng.random() < 0.3:
            new.append([vocab - 1] * rng.integers(0, 40))
        end = sum(len(text) + 1 for text in texts)
        first = rng.integers(0, 3) if rng.random() < 0.5 else 0
        while sum(len(text) + 1 for text in [*texts[first:], *new]) > capacity:
            if first < len(texts):
                first += 1
            else:
                new[0] = new[0][1 - capacity :]
                new = new if len(new) == 1 else new[1:]
        begin = sum(len(text) + 1 for text in texts[:first])
        index = index.with_texts(new, begin, end)
        texts = texts[first:] + new
        inserted += bool(new) and end - begin > 2 * SORTED_TOKENS
        sorted_anew = SuffixIndex.on_host(texts)
        for name, expected in vars(sorted_anew).items():
            np.testing.assert_array_equal(getattr(index, name), expected, name)
            assert getattr(index, name).dtype == expected.dtype
    return inserted


@pytest.mark.parametrize("vocab", [1, 2, 30])
def test_an_index_with_inserted_texts_is_that_of_all_texts(vocab, monkeypatch) -> None:
    monkeypatch.setattr(suffix_index, "MOST_INSERTED", 1.0)  # nothing is sorted anew
    assert check_insertions(vocab, changes=150, capacity=300) > 80


@pytest.mark.full
@pytest.mark.thorough_except("1", "2")
@pytest.mark.parametrize("vocab", [1, 2, 3, 30, 2**31 - 1])
def test_thousands_of_insertions(vocab, monkeypatch) -> None:
    monkeypatch.setattr(suffix_index, "MOST_INSERTED", 1.0)  # nothing is sorted anew
    assert check_insertions(vocab, changes=1000, capacity=600, seed=1) > 500


@pytest.mark.full
@pytest.mark.parametrize("vocab", [1, 30])
def test_insertions_between_sorts_of_all_positions(vocab, monkeypatch) -> None:
    merges = []

    def counting(*arguments: Any) -> np.ndarray:
        merges.append(1)
        return merged(*arguments)

    merged = suffix_index._merged
    monkeypatch.setattr(suffix_index, "_merged", counting)
    changes = 400
    check_insertions(vocab, changes, capacity=4000, seed=2)
    assert 50 < len(merges) < changes - 50  # both ways are taken often


def test_few_positions_are_inserted_and_many_are_sorted_anew(monkeypatch) -> None:
    lengths = []

    def counting(tokens: np.ndarray) -> np.ndarray:
        lengths.append(len(tokens))
        return sorted_positions(tokens)

    monkeypatch.setattr(suffix_index, "sorted_positions", counting)
    index = SuffixIndex.on_host([list(range(1599))])
    index.with_texts([[5] * 70], 0, 1600).with_texts([[5] * 90], 0, 1671)
    assert lengths == [1600, SORTED_TOKENS + 71, 1600 + 71 + 91]


def test_inserted_texts_are_checked() -> None:
    index = SuffixIndex.on_host([[1, 2]])
    with pytest.raises(InputError, match="smallest token id"):
        index.with_texts([[3, -1]], 0, 3)
    with pytest.raises(InputError, match="the token id 2147483648"):
        index.with_texts([[2**31]], 0, 3)


def test_texts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="capacity=7: the texts need 8 tokens"):
        SuffixIndex.of([[1, 2, 3], [1, 2, 3]], capacity=7)
    for wrong in ([[1, -1]], [[-2]]):
        with pytest.raises(InputError, match="smallest token id"):
            SuffixIndex.of(wrong)
    for token in (2**31, 2**70, -(2**70)):
        with pytest.raises(InputError) as caught:
            SuffixIndex.of([[1], [2, token]])
        assert str(caught.value) == f"texts: the token id {token}; give ids from 0 to 2147483647"
    assert SuffixIndex.of([[1], [2**31 - 1]]).largest == 2**31 - 1


def test_a_capacity_has_little_room() -> None:
    for count in (0, 1, 1024, *range(1025, 70_000, 97)):
        capacity = roomy_capacity(count)
        assert max(count, 1024) <= capacity <= max(count, 1024) * 9 / 8
        assert roomy_capacity(capacity) == capacity
    assert len({roomy_capacity(count) for count in range(1025, 2049)}) == 8


def test_a_search_in_a_segment_finds_what_an_index_of_its_texts_alone_has() -> None:
    rng = np.random.default_rng(7)
    texts = [random_texts(rng, 3, count, longest=60) for count in (4, 0, 5)]
    texts[1] = texts[0][:2]  # the same texts in two segments
    index = SuffixIndex.empty(segments=4, capacity=CAPACITY)
    for segment in (2, 0, 1, 0):  # one of them twice, the fourth one never
        index = index.put(segment, SuffixIndex.of(texts[segment], CAPACITY))
    assert index.sizes.tolist() == [sum(map(len, part)) for part in (*texts, [])]
    rows = random_rows(rng, texts[0] + texts[2], 3, ROWS)
    for segment, part in enumerate((*texts, [], [])):
        segments = jnp.full(ROWS, segment if segment < 4 else -1, jnp.int32)
        alone = search(SuffixIndex.of(part, CAPACITY), *contexts_of(rows))
        inside = search(index, *contexts_of(rows), segments)
        for expected, result in zip(alone, inside, strict=True):
            np.testing.assert_array_equal(result, expected)
        assert (alone[0].sum() > 0) == (segment < 3)
