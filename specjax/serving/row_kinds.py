"""The kinds of rows by which acceptance is counted: regions of an answer, and context lengths.

How many drafted tokens are accepted depends on what the model writes. A thought that repeats the
question is easy to predict, an answer less so, and the arguments of a call of a tool often copy
from the prompt. It depends on the length of the context, too: some drafters read a part of it only.

A region is told by token ids alone, because the engine's thread has no time for text.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from typing import Literal, NamedTuple, get_args

import numpy as np

Region = Literal["thinking", "answer", "tool_call"]
"""A region of an answer. All text outside of thoughts and calls of tools is "answer"."""

REGIONS: tuple[Region, ...] = get_args(Region)

_CONTEXT_LIMITS = 256, 1024, 4096, 16384, 65536

CONTEXTS = (*map(str, _CONTEXT_LIMITS), "more")
"""The ranges of context lengths: up to 256 tokens, from 257 to 1024, and so on."""


class RowKind(NamedTuple):
    """The region and the context length of a row at the start of a decode call.

    Attributes:
        region: the region.
        context: the range of its number of tokens, one of `CONTEXTS`.

    Examples:
        >>> from specjax.serving.row_kinds import RowKind
        >>> RowKind.of("thinking", 1024)
        RowKind(region='thinking', context='1024')
        >>> RowKind.of("answer", 10**6).context
        'more'
    """

    region: Region
    context: str

    @classmethod
    def of(cls, region: Region, length: int) -> "RowKind":
        """Return the kind of a row with ``length`` tokens in its context."""
        return _KINDS[region][bisect_left(_CONTEXT_LIMITS, length)]


_KINDS = {region: [RowKind(region, context) for context in CONTEXTS] for region in REGIONS}


def sums_by_kind(counts: np.ndarray, kinds: Sequence[RowKind]) -> dict[RowKind, list[int]]:
    """Return the sums of ``counts [B, C]`` over the rows of each kind, C numbers each.

    Examples:
        >>> import numpy as np
        >>> from specjax.serving.row_kinds import RowKind, sums_by_kind
        >>> kinds = [RowKind.of("answer", length) for length in (10, 300, 20)]
        >>> list(sums_by_kind(np.array([[1, 2], [3, 4], [5, 6]]), kinds).values())
        [[6, 8], [3, 4]]
    """
    numbers: dict[RowKind, int] = {}
    of_rows = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    is_of_kind = np.arange(len(numbers))[:, None] == np.array(of_rows, np.int64)
    sums = is_of_kind.astype(np.int64) @ counts.astype(np.int64, copy=False)
    return dict(zip(numbers, sums.tolist(), strict=True))


@dataclass(frozen=True)
class RegionMark:
    """Tokens after which another region begins.

    Attributes:
        ids: the tokens, at least one.
        inside: the regions in which they mean that. Elsewhere they are like any others.
        begins: the region that begins after the last of them.

    Examples:
        >>> from specjax.serving.row_kinds import RegionMark
        >>> RegionMark((7,), ("answer",), "thinking").begins
        'thinking'
    """

    ids: tuple[int, ...]
    inside: tuple[Region, ...]
    begins: Region


@dataclass(frozen=True)
class RegionMarks:
    """The marks of a model's answers.

    Attributes:
        marks: the marks. Without any, all text is "answer".

    Examples:
        >>> from specjax.serving.row_kinds import RegionMark, RegionMarks
        >>> RegionMarks((RegionMark((7, 8), ("answer",), "thinking"),)).longest
        2
    """

    marks: tuple[RegionMark, ...] = ()

    @cached_property
    def by_last_token(self) -> dict[int, list[RegionMark]]:
        """The marks by their last token, the longest first."""
        by_token: dict[int, list[RegionMark]] = {}
        for mark in sorted(self.marks, key=lambda mark: -len(mark.ids)):
            by_token.setdefault(mark.ids[-1], []).append(mark)
        return by_token

    @cached_property
    def resets(self) -> frozenset[int]:
        """The last tokens of marks that mean the same in all regions."""
        return frozenset(mark.ids[-1] for mark in self.marks if set(mark.inside) == set(REGIONS))

    @cached_property
    def longest(self) -> int:
        """The number of tokens of the longest mark, at least 1."""
        return max((len(mark.ids) for mark in self.marks), default=1)


class RegionReader:
    """The region that one text is in, while the text grows.

    Attributes:
        region: the region of the next token.

    Examples:
        >>> from specjax.serving.row_kinds import RegionMark, RegionMarks, RegionReader
        >>> begin = RegionMark((7,), ("answer",), "thinking")
        >>> end = RegionMark((8, 9), ("thinking",), "answer")
        >>> reader = RegionReader(RegionMarks((begin, end)), prompt=[1, 7])
        >>> reader.region
        'thinking'
        >>> reader.append([2, 8]), reader.append([9, 3, 3])
        ([('thinking', 2)], [('thinking', 1), ('answer', 2)])
    """

    def __init__(self, marks: RegionMarks = RegionMarks(), prompt: Iterable[int] = ()) -> None:
        """Start after a prompt, which may have begun a region of the answer."""
        self.region: Region = "answer"
        self._marks = marks
        self._newest: list[int] = []  # the last tokens, in which a mark may have begun
        if marks.marks:
            self._read_prompt(list(prompt))

    def _read_prompt(self, prompt: list[int]) -> None:
        """Advance over a prompt, from the last mark that means the same in all regions.

        In a chat that is what begins the answer, so the messages before it are not read.
        """
        backwards = prompt[::-1]
        ends = (_places(backwards, token) for token in self._marks.resets)
        for place in merge(*ends):
            end = len(prompt) - 1 - place
            by_length = self._marks.by_last_token[prompt[end]]
            mark = next((it for it in by_length if _ends_with(prompt, end, it.ids)), None)
            if mark is not None and set(mark.inside) == set(REGIONS):
                self.region = mark.begins
                self._newest = prompt[max(0, end + 1 - self._marks.longest) : end + 1]
                self.append(prompt[end + 1 :])
                return
        self.append(prompt)

    def append(self, tokens: Sequence[int]) -> list[tuple[Region, int]]:
        """Advance over new tokens.

        Returns:
            The regions of the tokens, in their order, each with its number of tokens. The tokens of
            a mark belong to the region that they end. A region may have no tokens.
        """
        by_token, longest = self._marks.by_last_token, self._marks.longest
        if not by_token:
            return [(self.region, len(tokens))]
        runs, begin = [], 0
        if not by_token.keys().isdisjoint(tokens):
            text, before = [*self._newest, *tokens], len(self._newest)
            for end in (at for at in range(before, len(text)) if text[at] in by_token):
                mark = next(filter(self._fits(text, end), by_token[text[end]]), None)
                if mark is not None:
                    runs.append((self.region, end + 1 - before - begin))
                    self.region, begin = mark.begins, end + 1 - before
        self._newest = [*self._newest, *tokens[-longest:]][-longest:]
        return [*runs, (self.region, len(tokens) - begin)]

    def _fits(self, text: Sequence[int], end: int) -> Callable[[RegionMark], bool]:
        """Return a function that says whether a mark ends at index ``end`` of a text."""

        def fits(mark: RegionMark) -> bool:
            return self.region in mark.inside and _ends_with(text, end, mark.ids)

        return fits


def _ends_with(text: Sequence[int], end: int, ids: tuple[int, ...]) -> bool:
    """Return whether a text has some tokens up to the index ``end``, which is that of the last."""
    return tuple(text[max(0, end + 1 - len(ids)) : end + 1]) == ids


def _places(tokens: list[int], token: int) -> Iterator[int]:
    """Yield the indices of a token."""
    place = -1
    with suppress(ValueError):
        while True:
            place = tokens.index(token, place + 1)
            yield place
