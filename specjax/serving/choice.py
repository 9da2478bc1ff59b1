"""The choice of the fastest draft under the current load, in plain Python.

With a given draft, a step emits E tokens per row and takes S seconds. The draft with the most
tokens per second, E / S, is used; plain decoding, whose E is 1, is one of the candidates. S is
measured for each number of computed rows, when the engine starts and while it runs. E is the mean
over recent steps of the kinds of rows that the call holds: what region of an answer they write, and
how long their contexts are. While a kind has few steps, the mean over more kinds counts as well.

With few rows, a pass over a draft takes hardly longer than one over a single token, so a long
draft pays. With many rows, each further node costs its full time, so a short draft or none is
faster. The text does not depend on the choice: with coupled sampling it is the same for all drafts.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specjax.drafts.shapes import Chain, DraftShape, UnionTree

MEMORY = 400
"""The number of row steps after which the weight of a measured acceptance has fallen to 1/e."""

LATENCY = 20
"""The number of steps after which the weight of a measured time has fallen to about 1/e."""

TRIALS = 1 / 50
"""The share of the time that is spent on drafts that were not used lately.

Acceptance changes with the texts, so they are tried again. It is a share of the time, not of the
calls, because under load a call with a long draft may take as long as twenty calls without one.
"""

BETTER = 1.03
"""The factor by which a draft must be faster to replace the current one: a change costs time."""

TRY_UNKNOWN = 8
"""The number of calls of which one tries a draft that was not timed yet."""

_EXPECTED = 0.8
"""The assumed chance that a drafted token is accepted, before any is measured.

It is high, so that all drafts are tried.
"""
_EXPECTED_STEPS = 4.0
"""The weight of that assumption, in row steps."""

_SHARED_STEPS = 16.0
"""The weight of the mean over more kinds of rows, in row steps of one kind."""

_FIRST_TRIALS = 2
"""The calls with each draft in a new region before its mean over all regions decides."""

Kind = tuple[str, ...]
"""A kind of rows: a region and a range of context lengths (`specjax.serving.row_kinds.RowKind`). A
beginning of it stands for more kinds, and () for all."""


class _Sums:
    """Exponentially decaying sums over row steps, and the weight of what was expected before.

    ``[K]`` each. K is 1 for a draft, and the largest depth for chains, whose emitted tokens are
    those of each depth.
    """

    def __init__(self, count: int, weight: float) -> None:
        self._weight = np.full(count, weight)
        self._steps, self._emitted = np.zeros(count), np.zeros(count)

    def add(self, steps: int, emitted: np.ndarray) -> None:
        """Add ``steps`` steps, which emitted ``emitted [k]`` tokens, to the first k entries."""
        count, decay = len(emitted), np.exp(-steps / MEMORY)
        for sums in (self._weight, self._steps, self._emitted):
            sums[:count] *= decay
        self._steps[:count] += steps
        self._emitted[:count] += emitted

    def mean(self, expected: np.ndarray) -> np.ndarray:
        """Return the tokens per step, where ``expected [K]`` counts with its weight."""
        return (self._emitted + self._weight * expected) / (self._steps + self._weight)


class _Measured:
    """The measured tokens per step, over all rows and over those of each kind."""

    def __init__(self, expected: np.ndarray) -> None:
        """Begin with an assumed number of tokens ``[K]`` per step."""
        self._expected = expected
        self._sums: dict[Kind, _Sums] = {}
        self._means: dict[Kind, list[float]] = {}  # a choice is made more often than they change

    def add(self, kind: Kind, steps: int, emitted: np.ndarray) -> None:
        """Add ``steps`` steps of rows of one kind, or of all rows if it is ()."""
        if kind not in self._sums:
            weight = _SHARED_STEPS if kind else _EXPECTED_STEPS
            self._sums[kind] = _Sums(len(self._expected), weight)
        self._sums[kind].add(steps, emitted)
        self._means = {}

    def tokens(self, kind: Kind, depth: int = 1) -> float:
        """Return the tokens per step of a kind of rows, the sum of the first ``depth`` of K.

        The mean over all rows is what is expected of a region, and that of the region is what is
        expected of its range of context lengths.
        """
        if kind not in self._means:
            mean = self._expected
            for length in range(len(kind) + 1):
                if (sums := self._sums.get(kind[:length])) is not None:
                    mean = sums.mean(mean)
            self._means[kind] = np.cumsum(mean).tolist()
        return self._means[kind][depth - 1]


@dataclass(frozen=True)
class RowResults:
    """The results of some rows of a call.

    Attributes:
        row_steps: the steps of these rows together.
        emitted: the tokens that they emitted.
        accepted_at: ``[D]`` the steps in which a drafted token of each depth was emitted, 0 beyond
            the draft's own depth.
        by_first: of the accepted tokens, those that the drafter's first part offered; None: it has
            no parts.
        by_others: those that the other parts offered.

    Examples:
        >>> from specjax.serving.choice import RowResults
        >>> RowResults(row_steps=2, emitted=5, accepted_at=[2, 1, 0]).emitted
        5
    """

    row_steps: int
    emitted: int
    accepted_at: Sequence[int] | np.ndarray
    by_first: int | None = None
    by_others: int | None = None


@dataclass(frozen=True)
class Copies:
    """The draft of a call in which some rows copy from a prediction, and the others draft normally.

    Attributes:
        longest: the largest number of tokens that are copied per step.
        beside: the index of the draft of the other rows; None: they draft nothing.
    """

    longest: int
    beside: int | None

    @property
    def depth(self) -> int:
        """The depth of the draft."""
        return self.longest

    def __str__(self) -> str:
        """Return a short description for logs and metrics."""
        return f"copies of {self.longest}"


class DraftChoice:
    """The rule that chooses a draft before each decode call, from measurements of earlier calls.

    Attributes:
        drafts: the drafts to choose from; None is plain decoding. `Copies` is for calls in which
            some row has a prediction.
        seconds: the seconds of a step, by number of rows and index of the draft.
        decisions: how often each draft was chosen, by number of rows and index of the draft.

    Examples:
        >>> from specjax.serving.choice import DraftChoice
        >>> seconds = {(1, 0): 0.010, (1, 1): 0.012, (8, 0): 0.020, (8, 1): 0.090}
        >>> choice = DraftChoice([None, specjax.Chain(3)], seconds)
        >>> choice.choose(width=1), choice.choose(width=8)  # a chain for one row, none for eight
        (1, 0)
        >>> counts = {"steps": 1, "row_steps": 1, "emitted": 1, "accepted_at": [0, 0, 0]}
        >>> choice.record(1, 1, seconds=0.012, **counts)
        >>> round(choice.tokens_a_step(1), 2)  # less than assumed, because the draft was rejected
        2.56
    """

    def __init__(
        self, drafts: Sequence[DraftShape | Copies | None], seconds: Mapping[tuple[int, int], float]
    ) -> None:
        """Make a choice without measured acceptance.

        Args:
            drafts: the drafts to choose from; None is plain decoding.
            seconds: the measured seconds of a step, by number of rows and index of the draft.
        """
        self.drafts = tuple(drafts)
        self.seconds = dict(seconds)
        self.decisions: dict[tuple[int, int], int] = {}
        survival = _EXPECTED ** np.arange(1 + max(_depth(draft) for draft in drafts))
        self._measured = [
            _Measured(survival[: 1 + _depth(draft)].sum(keepdims=True)) for draft in drafts
        ]
        self._chains = _Measured(survival[1:])  # by depth
        self._is_chain = [draft is not None and _is_plain_chain(draft) for draft in self.drafts]
        # By index of a union, the drafts of some of its parts. Its calls measure their tokens, too.
        self._shares = {
            index: _shares(draft, self.drafts)
            for index, draft in enumerate(self.drafts)
            if isinstance(draft, UnionTree)
        }
        for shares in self._shares.values():
            for index in shares:  # a union does not tell the depths of their tokens
                self._is_chain[index] = False
        # The draft in use, by number of rows, by whether some row has a prediction, and by region.
        self._current: dict[tuple[int, bool, str], int] = {}
        # What is measured in one region says little about another one. So drafts are tried in each
        # of them, and each has a clock. It advances by the time of one step per call, because the
        # number of steps per call does not depend on the draft.
        self._clocks: dict[str, float] = {}
        self._last_used: dict[tuple[str, int], float] = {}
        self._calls: Counter[tuple[str, int]] = Counter()
        self._since_tried: Counter[str] = Counter()
        self._has_run: set[tuple[int, int]] = set()  # those whose first, slower call is over

    def tokens_a_step(
        self,
        index: int,
        predicted: float = 1.0,
        drafting: float = 1.0,
        kinds: Mapping[Kind, int] | None = None,
    ) -> float:
        """Return E, the expected number of emitted tokens per row and step.

        Args:
            index: the index of the draft.
            predicted: the share of the rows that have a prediction. It matters for `Copies` alone.
            drafting: the share of the rows that draft. The others emit one token per step.
            kinds: the number of rows that draft, by kind; None: the mean over all kinds counts.
        """
        kinds = kinds or {(): 1}
        tokens = sum(
            rows * self._drafted_tokens(index, predicted, kind) for kind, rows in kinds.items()
        )
        return 1.0 + drafting * (tokens / sum(kinds.values()) - 1.0)

    def _drafted_tokens(self, index: int, predicted: float, kind: Kind) -> float:
        """Return the expected number of emitted tokens per step of a row that drafts."""
        draft = self.drafts[index]
        if draft is None:
            return 1.0
        if isinstance(draft, Copies):
            copied = self._measured[index].tokens(kind)
            beside = draft.beside
            drafted = 1.0 if beside is None else self._drafted_tokens(beside, 0.0, kind)
            return predicted * copied + (1 - predicted) * drafted
        if self._is_chain[index]:  # chains share their measurements: each begins like the others
            return 1.0 + self._chains.tokens(kind, draft.depth)
        return self._measured[index].tokens(kind)

    def rate(
        self,
        width: int,
        index: int,
        predicted: float = 1.0,
        drafting: float = 1.0,
        kinds: Mapping[Kind, int] | None = None,
    ) -> float:
        """Return E / S, the expected tokens per second of a row."""
        return self.tokens_a_step(index, predicted, drafting, kinds) / self.seconds[width, index]

    def choose(
        self,
        width: int,
        predicted: float = 0.0,
        ready: Collection[int] | None = None,
        *,
        plain: int = 0,
        is_measuring: bool = True,
        drafting: float = 1.0,
        kinds: Mapping[Kind, int] | None = None,
    ) -> int:
        """Return the index of the draft to decode with.

        Args:
            width: the number of rows that are computed.
            predicted: the share of the rows that have a prediction.
            ready: the indices of the drafts whose programs are compiled; None: all.
            plain: the index of plain decoding.
            is_measuring: whether the call will be timed, which it is not while a program is being
                compiled. If it is, drafts that were not timed yet are tried now and then, plain
                decoding first. If not, the first compiled draft is used when none is timed.
            drafting: the share of the rows that draft.
            kinds: the number of rows that draft, by kind; None: the kinds do not count.
        """
        region = _main_region(kinds)
        indices = [
            index
            for index, draft in enumerate(self.drafts)
            if predicted or not isinstance(draft, Copies)
        ]
        indices = [index for index in indices if ready is None or index in ready]
        untimed = [index for index in indices if (width, index) not in self.seconds]
        if untimed:
            indices = [index for index in indices if index not in untimed]
            choice = self._to_time(width, untimed, plain, region) if is_measuring else None
            if choice is None and not indices:
                choice = next((index for index in untimed if self.drafts[index] is not None), plain)
            if choice is not None:
                return self._count(width, choice)
        rates = {index: self.rate(width, index, predicted, drafting, kinds) for index in indices}
        best = max(indices, key=lambda index: rates[index])
        current = self._current.get((width, predicted > 0, region), best)
        if current not in indices:  # requests that run now have named others
            current = best
        if rates[best] > BETTER * rates[current]:
            current = best
        self._current[width, predicted > 0, region] = current
        # In a new region, try what could be faster than the current draft there.
        promising = [
            index
            for index in indices
            if (1 + _depth(self.drafts[index])) / self.seconds[width, index] > rates[current]
        ]
        choice = self._first_trial(region, current, promising)
        if choice is None:
            choice = self._trial(width, current, indices, region)
        clock = self._clocks.get(region, 0.0) + self.seconds[width, choice]
        self._clocks[region] = clock
        for index in (choice, *self._shares.get(choice, ())):
            self._last_used[region, index] = clock
            self._calls[region, index] += 1
        return self._count(width, choice)

    def fastest(
        self, width: int, indices: Sequence[int], kinds: Mapping[Kind, int] | None = None
    ) -> int:
        """Return the draft of ``indices`` with the most tokens per second; the first if unknown."""
        timed = [index for index in indices if (width, index) in self.seconds]
        timed = [index for index in timed if not isinstance(self.drafts[index], Copies)]
        rates = {index: self.rate(width, index, kinds=kinds) for index in timed}
        return max(timed, key=lambda index: rates[index], default=indices[0])

    def _count(self, width: int, index: int) -> int:
        self.decisions[width, index] = self.decisions.get((width, index), 0) + 1
        return index

    def _is_turn(self, region: str) -> bool:
        """Count a call, and return True for one of `TRY_UNKNOWN` calls."""
        self._since_tried[region] = (self._since_tried[region] + 1) % TRY_UNKNOWN
        return not self._since_tried[region]

    def _to_time(self, width: int, untimed: Sequence[int], plain: int, region: str) -> int | None:
        """Return the ``untimed`` draft to try now, plain decoding first; None: not in this call."""
        if plain in untimed:
            return plain
        if not self._is_turn(region):
            return None
        return min(untimed, key=lambda index: self.decisions.get((width, index), 0))

    def _first_trial(self, region: str, current: int, indices: Sequence[int]) -> int | None:
        """Return the draft of ``indices`` to try because the region is new; None: there is none."""
        if not region:
            return None
        rare = [
            index
            for index in indices
            if index != current
            and self.drafts[index] is not None  # plain decoding has nothing to measure
            and self._calls[region, index] < _FIRST_TRIALS
        ]
        return rare[0] if rare and self._is_turn(region) else None

    def _trial(self, width: int, current: int, indices: Sequence[int], region: str) -> int:
        """Return the draft of ``indices`` that is due for a trial, or else the ``current`` one."""
        idle, clock = (
            [index for index in indices if index != current],
            self._clocks.get(region, 0.0),
        )
        last_used = {index: self._last_used.get((region, index), 0.0) for index in idle}
        due = [
            index
            for index in idle
            if (clock - last_used[index]) * TRIALS > len(idle) * self.seconds[width, index]
        ]
        return min(due, key=lambda index: last_used[index], default=current)

    def record(
        self,
        width: int,
        index: int,
        *,
        seconds: float | None,
        is_upper_bound: bool = False,
        steps: int,
        row_steps: int,
        emitted: int,
        accepted_at: Sequence[int] | np.ndarray,
        by_first: int | None = None,
        by_others: int | None = None,
        by_kind: Mapping[Kind, RowResults] | None = None,
    ) -> None:
        """Record the result of a decode call.

        Args:
            width: the number of rows that were computed.
            index: the index of the draft.
            seconds: the time of the call; None: it was not measured.
            is_upper_bound: whether the call may have ended earlier than measured. Such a time
                counts only if the draft was not timed before.
            steps: the number of steps of the call.
            row_steps: the steps of all rows together; with `Copies`, of the rows with a prediction.
            emitted: the tokens that these row steps emitted.
            accepted_at: ``[D]`` the row steps in which a drafted token of each depth was emitted,
                0 beyond the draft's own depth.
            by_first: of the accepted tokens, those that the drafter's first part offered; None: it
                has no parts.
            by_others: those that the other parts offered.
            by_kind: the same numbers for the rows of each kind; None: the kinds are unknown.
        """
        if steps and seconds is not None and (width, index) not in self.seconds:
            if (width, index) in self._has_run:  # the first call of a program takes longer
                self.seconds[width, index] = seconds / steps
            self._has_run.add((width, index))
        elif steps and seconds is not None and not is_upper_bound:
            before, share = self.seconds[width, index], min(1.0, steps / LATENCY)
            # The limit keeps one pause of the machine from making the draft look slow for long.
            self.seconds[width, index] = before + share * (
                min(seconds / steps, 4 * before) - before
            )
        draft = self.drafts[index]
        if draft is None or not row_steps:
            return
        self._add((), index, RowResults(row_steps, emitted, accepted_at, by_first, by_others))
        for kind, results in (by_kind or {}).items():
            for length in range(1, len(kind) + 1):
                self._add(kind[:length], index, results)

    def _add(self, kind: Kind, index: int, results: RowResults) -> None:
        """Add the results of rows of one kind to its measurements.

        Those of a union also tell what some of its parts would have accepted without the others:
        an accepted path is cut where these parts do not offer it.
        """
        steps = results.row_steps
        if not steps:
            return
        if self._is_chain[index]:
            depth = _depth(self.drafts[index])
            self._chains.add(kind, steps, np.asarray(results.accepted_at, float)[:depth])
            return
        self._measured[index].add(kind, steps, np.array([results.emitted], float))
        accepted = sum(results.accepted_at)
        for part, name in self._shares.get(index, {}).items():
            of_part = results.by_first if name == "first" else results.by_others
            if of_part is not None:
                tokens = results.emitted - accepted + of_part
                self._measured[part].add(kind, steps, np.array([tokens], float))

    def table(self) -> list[dict[str, object]]:
        """Return the measurements that `choose` compares, by number of rows and draft."""
        return [
            {
                "rows": width,
                "draft": "none" if self.drafts[index] is None else str(self.drafts[index]),
                "seconds_a_step": seconds,
                "tokens_a_step": self.tokens_a_step(index),
                "tokens_a_second": self.rate(width, index),
                "taken": self.decisions.get((width, index), 0),
            }
            for (width, index), seconds in sorted(self.seconds.items())
        ]


def _main_region(kinds: Mapping[Kind, int] | None) -> str:
    """Return the region that most rows are in; "" if the kinds are unknown."""
    rows: Counter[str] = Counter()
    for kind, count in (kinds or {}).items():
        rows[kind[0] if kind else ""] += count
    return max(rows, key=lambda region: rows[region], default="")


def _shares(
    union: UnionTree, drafts: Sequence[DraftShape | Copies | None]
) -> dict[int, Literal["first", "others"]]:
    """Return the indices of ``drafts`` that are a union's first part alone, or its other parts."""
    assert union.slots is not None
    (shape, *rest), (slot, *rest_slots) = union.shapes, union.slots
    without_first = (0, *rest_slots), tuple(rest)
    shares: dict[int, Literal["first", "others"]] = {}
    for index, draft in enumerate(drafts if slot else ()):
        if draft == shape and slot == shape.nodes - 1:
            shares[index] = "first"
        elif isinstance(draft, UnionTree) and (draft.slots, draft.shapes[1:]) == without_first:
            shares[index] = "others"
    return shares


def _depth(draft: DraftShape | Copies | None) -> int:
    return 0 if draft is None else draft.depth


def _is_plain_chain(draft: DraftShape | Copies) -> bool:
    return isinstance(draft, Chain) and not draft.stop_below
