"""A slow search for the contexts of `specjax.drafters.Suffix`: a dictionary of n-grams."""

from collections import defaultdict
from collections.abc import Sequence

from specjax.drafters.suffix_index import CONTEXT_LENGTHS, SORTED_TOKENS

Group = tuple[int, list[tuple[int, ...]]]
"""The length of a context, and what follows each of its occurrences that count."""


class NgramDictionary:
    """A dictionary of all n-grams of some texts.

    Each has the tokens from each occurrence on to the end of its text.

    Texts can be added, and removed in the order in which they were added.
    """

    def __init__(self, texts: Sequence[Sequence[int]] = ()) -> None:
        self.texts: list[tuple[int, ...]] = []
        self._occurrences = defaultdict(list)
        for text in texts:
            self.add(text)

    def add(self, text: Sequence[int]) -> None:
        text = tuple(map(int, text))
        self.texts.append(text)
        for ngram, suffix in _ngrams(text):
            self._occurrences[ngram].append(suffix)

    def remove_oldest(self) -> None:
        for ngram, _ in _ngrams(self.texts.pop(0)):
            self._occurrences[ngram].pop(0)  # those of the oldest text are the first

    def occurrences(self, ngram: Sequence[int]) -> list[tuple[int, ...]]:
        """Return what follows each occurrence, up to the end of its text, sorted."""
        suffixes = self._occurrences.get(tuple(map(int, ngram)), [])
        return sorted(
            (suffix[len(ngram) :] for suffix in suffixes),
            key=lambda after: after[: SORTED_TOKENS - len(ngram)],
        )


def _ngrams(text: tuple[int, ...]):
    for start in range(len(text)):
        for length in CONTEXT_LENGTHS:
            if start + length <= len(text):
                yield text[start : start + length], text[start:]


def sampled(occurrences: list[tuple[int, ...]], samples: int) -> list[tuple[int, ...]]:
    """Return ``samples`` occurrences at equal distances; all of them if there are no more."""
    count = len(occurrences)
    if count <= samples:
        return occurrences
    return [occurrences[place * count // samples] for place in range(samples)]


def groups_of(
    text: Sequence[int], ngrams: NgramDictionary, samples: int, latest: int, depth: int
) -> list[Group]:
    """Return the groups of occurrences that count for ``text``, the longest context first."""
    text = tuple(map(int, text))
    groups: list[Group] = []
    for length in CONTEXT_LENGTHS:
        ends = [
            end
            for end in range(length, len(text))
            if text[end - length : end] == text[len(text) - length :]
        ]
        if ends and not groups:
            starts = reversed(ends[-latest:])
            groups.append((length, [(text[end:] * depth)[:depth] for end in starts]))
    fewest, of_index = 0, []
    for length in CONTEXT_LENGTHS:
        occurrences = ngrams.occurrences(text[-length:]) if length <= len(text) else []
        if len(occurrences) > fewest and len(of_index) < 2:
            fewest = len(occurrences)
            of_index.append((length, [after[:depth] for after in sampled(occurrences, samples)]))
    return sorted(groups + of_index, key=lambda group: -group[0])


def shares_below(groups: list[Group], path: tuple[int, ...]) -> dict[int, float]:
    """Return the share of each token that follows a path of drafted tokens."""
    depth = len(path)
    shares: dict[int, float] = {}
    for context, occurrences in reversed(groups):
        going_on = [
            after[depth] for after in occurrences if after[:depth] == path and len(after) > depth
        ]
        weight, size = context + depth, len(going_on)
        shares = {
            token: (weight * going_on.count(token) + shares.get(token, 0.0)) / (weight * size + 1)
            for token in {*going_on, *shares}
        }
    return shares


def all_paths(groups: list[Group], depth: int, least: float) -> dict[tuple[int, ...], float]:
    """Return all paths of at most ``depth`` tokens whose share is at least ``least``."""
    paths: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        level = {
            (*path, token): share * of_path
            for path, of_path in level.items()
            for token, share in shares_below(groups, path).items()
            if share * of_path >= least
        }
        paths |= level
    return paths
