"""The kinds of rows by which acceptance is counted: regions of an answer, and context lengths.

How many drafted tokens are accepted depends on what the model writes. A thought that repeats the
question is easy to predict, an answer less so, and the arguments of a call of a tool often copy
from the prompt. It depends on the length of the context, too: some drafters read a part of it only.

A region is told by token ids alone, because the engine's thread has no time for text.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

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
        limits = zip(_CONTEXT_LIMITS, CONTEXTS, strict=False)
        return cls(region, next((name for limit, name in limits if length <= limit), "more"))


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
            self.append(list(prompt))

    def append(self, tokens: Sequence[int]) -> list[tuple[Region, int]]:
        """Advance over new tokens.

        Returns:
            The regions of the tokens, in their order, each with its number of tokens. The tokens of
            a mark belong to the region that they end. A region may have no tokens.
        """
        by_token, longest = self._marks.by_last_token, self._marks.longest
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
            start = max(0, end + 1 - len(mark.ids))
            return self.region in mark.inside and tuple(text[start : end + 1]) == mark.ids

        return fits
