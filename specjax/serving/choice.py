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

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Literal

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
"""The measured calls with each draft and a new kind of rows, before a mean over more decides."""

_MOST_FIRST_TRIALS = 8
"""The most calls that are made for them. Some measure nothing, because no row may draft as deep."""

RowGroup = tuple[str, ...]
"""A group of rows: those of a kind (`specjax.serving.row_kinds.RowKind`), which are a region and a
range of context lengths; those of a region, whatever their lengths; or (), all rows."""


class _Sums:
    """Exponentially decaying sums over row steps, and the weight of what was expected before.

    They have K entries. K is 1 for a draft, and the largest depth for chains, whose emitted tokens
    are those of each depth. These are lists, which are faster than arrays for so few numbers.
    """

    def __init__(self, count: int, weight: float) -> None:
        self._weight = [weight] * count
        self.steps, self._emitted = [0.0] * count, [0.0] * count

    def add(self, steps: int, emitted: Sequence[float]) -> None:
        """Add ``steps`` steps, which emitted ``emitted [k]`` tokens, to the first k entries."""
        self.fade(steps, len(emitted))
        for entry, tokens in enumerate(emitted):
            self.steps[entry] += steps
            self._emitted[entry] += tokens

    def fade(self, steps: int, count: int) -> None:
        """Let ``steps`` steps pass, in the first ``count`` entries."""
        decay = math.exp(-steps / MEMORY)
        for sums in (self._weight, self.steps, self._emitted):
            sums[:count] = [value * decay for value in sums[:count]]

    def mean(self, expected: Sequence[float]) -> list[float]:
        """Return the tokens per step, where ``expected [K]`` counts with its weight."""
        sums = zip(self._emitted, self._weight, expected, self.steps, strict=True)
        return [
            (emitted + weight * before) / (steps + weight)
            for emitted, weight, before, steps in sums
        ]


class _Measured:
    """The measured tokens per step of each group of rows."""

    def __init__(self, expected: Sequence[float]) -> None:
        """Begin with an assumed number of tokens ``[K]`` per step."""
        self._expected = expected
        self._sums: dict[RowGroup, _Sums] = {}
        # A choice is made for more drafts than one call measures.
        self._means: dict[RowGroup, list[float]] = {}
        self._totals: dict[RowGroup, list[float]] = {}

    def add(self, group: RowGroup, steps: int, emitted: Sequence[float]) -> None:
        """Add ``steps`` steps of the rows of one group."""
        if group not in self._sums:
            weight = _SHARED_STEPS if group else _EXPECTED_STEPS
            self._sums[group] = _Sums(len(self._expected), weight)
        self._sums[group].add(steps, emitted)
        if self._means:
            self._means, self._totals = {}, {}

    def fade(self, group: RowGroup, steps: int) -> None:
        """Let what is measured of a group weigh less against what is measured from now on."""
        if group in self._sums:
            self._sums[group].fade(steps, len(self._expected))
            self._means, self._totals = {}, {}

    def weight(self, group: RowGroup, depth: int = 1) -> float:
        """Return the weight, in steps, of what is measured of a group at a depth."""
        return self._sums[group].steps[depth - 1] if group in self._sums else 0.0

    def tokens(self, group: RowGroup, depth: int = 1) -> float:
        """Return the tokens per step of a group of rows, the sum of the first ``depth`` of K.

        The mean over all rows is what is expected of a region, and that of the region is what is
        expected of its range of context lengths.
        """
        totals = self._totals.get(group)
        if totals is None:
            totals = self._totals[group] = list(accumulate(self._mean(group)))
        return totals[depth - 1]

    def _mean(self, group: RowGroup) -> Sequence[float]:
        """Return the tokens per step of a group, ``[K]``."""
        mean = self._means.get(group)
        if mean is None:
            expected = self._mean(group[:-1]) if group else self._expected
            sums = self._sums.get(group)
            mean = self._means[group] = list(expected if sums is None else sums.mean(expected))
        return mean


@dataclass(frozen=True)
class RowResults:
    """The results of some rows of a call.

    Attributes:
        row_steps: the steps of these rows together; with `Copies`, of the rows with a prediction.
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
    accepted_at: Sequence[float]
    by_first: int | None = None
    by_others: int | None = None

    def __add__(self, results: "RowResults") -> "RowResults":
        """Return the results of two sets of rows together."""
        is_of_parts = self.by_first is not None and results.by_first is not None
        return RowResults(
            self.row_steps + results.row_steps,
            self.emitted + results.emitted,
            list(map(add, self.accepted_at, results.accepted_at)),
            self.by_first + results.by_first if is_of_parts else None,  # pyright: ignore[reportOperatorIssue]
            self.by_others + results.by_others if is_of_parts else None,  # pyright: ignore[reportOperatorIssue,reportOptionalOperand]
        )


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
        >>> from specjax.serving.choice import DraftChoice, RowResults
        >>> seconds = {(1, 0): 0.010, (1, 1): 0.012, (8, 0): 0.020, (8, 1): 0.090}
        >>> choice = DraftChoice([None, specjax.Chain(3)], seconds)
        >>> choice.choose(width=1), choice.choose(width=8)  # a chain for one row, none for eight
        (1, 0)
        >>> results = RowResults(row_steps=1, emitted=1, accepted_at=[0, 0, 0])
        >>> choice.record(1, 1, results, seconds=0.012, steps=1)
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
        survival = [_EXPECTED**depth for depth in range(1 + max(map(_depth, drafts)))]
        self._measured = [_Measured([sum(survival[: 1 + _depth(draft)])]) for draft in drafts]
        self._chains = _Measured(survival[1:])  # by depth
        # For each draft, whether it is a plain chain.
        self._plain_chains = [draft is not None and _is_plain_chain(draft) for draft in self.drafts]
        # By index of a union, the drafts of some of its parts. Its calls measure their tokens, too.
        self._shares = {
            index: _shares(draft, self.drafts)
            for index, draft in enumerate(self.drafts)
            if isinstance(draft, UnionTree)
        }
        # Chains that are measured in two ways: as chains, and by calls with a union.
        self._shared_chains = {
            index
            for shares in self._shares.values()
            for index in shares
            if self._plain_chains[index]
        }
        # The draft in use, by number of rows, by whether some row has a prediction, and by kind.
        self._current: dict[tuple[int, bool, RowGroup], int] = {}
        # What is measured of one kind of rows says little about another one. So drafts are tried
        # with each of them, and each has a clock. It advances by the time of one step per call,
        # because the number of steps per call does not depend on the draft.
        self._clocks: dict[RowGroup, float] = {}
        self._last_used: dict[tuple[RowGroup, int], float] = {}
        self._measured_calls: Counter[tuple[RowGroup, int]] = Counter()
        self._first_trials: Counter[tuple[RowGroup, int]] = Counter()
        self._since_tried: Counter[RowGroup] = Counter()
        self._has_run: set[tuple[int, int]] = set()  # those whose first, slower call is over

    def tokens_a_step(
        self,
        index: int,
        predicted: float = 1.0,
        drafting: float = 1.0,
        row_kinds: Mapping[RowGroup, int] | None = None,
    ) -> float:
        """Return E, the expected number of emitted tokens per row and step.

        Args:
            index: the index of the draft.
            predicted: the share of the rows that have a prediction. It matters for `Copies` alone.
            drafting: the share of the rows that draft. The others emit one token per step.
            row_kinds: the number of rows that draft, by kind; None: the mean over all kinds counts.
        """
        row_kinds = row_kinds or {(): 1}
        tokens = sum(
            rows * self._drafted_tokens(index, predicted, kind) for kind, rows in row_kinds.items()
        )
        return 1.0 + drafting * (tokens / sum(row_kinds.values()) - 1.0)

    def _drafted_tokens(self, index: int, predicted: float, group: RowGroup) -> float:
        """Return the expected number of emitted tokens per step of a row that drafts."""
        draft = self.drafts[index]
        if draft is None:
            return 1.0
        if isinstance(draft, Copies):
            copied = self._measured[index].tokens(group)
            beside = draft.beside
            drafted = 1.0 if beside is None else self._drafted_tokens(beside, 0.0, group)
            return predicted * copied + (1 - predicted) * drafted
        if self._plain_chains[index] and not self._is_told_by_union(index, group):
            # Chains share their measurements: each begins like the others.
            return 1.0 + self._chains.tokens(group, draft.depth)
        return self._measured[index].tokens(group)

    def _is_told_by_union(self, index: int, group: RowGroup) -> bool:
        """Return whether calls with a union say more about a chain than calls with chains do.

        The first of kind, region and all rows of which anything is measured decides.
        """
        if index not in self._shared_chains:
            return False
        for length in range(len(group), -1, -1):
            by_union = self._measured[index].weight(group[:length])
            by_chains = self._chains.weight(group[:length], _depth(self.drafts[index]))
            if by_union or by_chains:
                return by_union > by_chains / 2
        return False

    def rate(
        self,
        width: int,
        index: int,
        predicted: float = 1.0,
        drafting: float = 1.0,
        row_kinds: Mapping[RowGroup, int] | None = None,
    ) -> float:
        """Return E / S, the expected tokens per second of a row."""
        return (
            self.tokens_a_step(index, predicted, drafting, row_kinds) / self.seconds[width, index]
        )

    def choose(
        self,
        width: int,
        predicted: float = 0.0,
        ready: Collection[int] | None = None,
        *,
        plain: int = 0,
        is_measuring: bool = True,
        drafting: float = 1.0,
        row_kinds: Mapping[RowGroup, int] | None = None,
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
            row_kinds: the number of rows that draft, by kind; None: the kinds do not count.
        """
        kind = _main_kind(row_kinds)
        indices = [
            index
            for index, draft in enumerate(self.drafts)
            if predicted or not isinstance(draft, Copies)
        ]
        indices = [index for index in indices if ready is None or index in ready]
        untimed = [index for index in indices if (width, index) not in self.seconds]
        if untimed:
            indices = [index for index in indices if index not in untimed]
            choice = self._to_time(width, untimed, plain, kind) if is_measuring else None
            if choice is None and not indices:
                choice = next((index for index in untimed if self.drafts[index] is not None), plain)
            if choice is not None:
                return self._count(width, choice)
        rates = {
            index: self.rate(width, index, predicted, drafting, row_kinds) for index in indices
        }
        best = max(indices, key=lambda index: rates[index])
        current = self._current.get((width, predicted > 0, kind), best)
        if current not in indices:  # requests that run now have named others
            current = best
        if rates[best] > BETTER * rates[current]:
            current = best
        self._current[width, predicted > 0, kind] = current
        # With a new kind of rows, try what could be faster than the current draft.
        promising = [
            index
            for index in indices
            if (1 + _depth(self.drafts[index])) / self.seconds[width, index] > rates[current]
        ]
        choice = self._first_trial(kind, current, promising)
        if choice is None:
            choice = self._trial(width, current, indices, kind)
        clock = self._clocks.get(kind, 0.0) + self.seconds[width, choice]
        self._clocks[kind] = clock
        for index in (choice, *self._shares.get(choice, ())):
            self._last_used[kind, index] = clock
        return self._count(width, choice)

    def fastest(
        self, width: int, indices: Sequence[int], row_kinds: Mapping[RowGroup, int] | None = None
    ) -> int:
        """Return the draft of ``indices`` with the most tokens per second; the first if unknown."""
        timed = [index for index in indices if (width, index) in self.seconds]
        timed = [index for index in timed if not isinstance(self.drafts[index], Copies)]
        rates = {index: self.rate(width, index, row_kinds=row_kinds) for index in timed}
        return max(timed, key=lambda index: rates[index], default=indices[0])

    def _count(self, width: int, index: int) -> int:
        self.decisions[width, index] = self.decisions.get((width, index), 0) + 1
        return index

    def _is_turn(self, kind: RowGroup) -> bool:
        """Count a call, and return True for one of `TRY_UNKNOWN` calls."""
        self._since_tried[kind] = (self._since_tried[kind] + 1) % TRY_UNKNOWN
        return not self._since_tried[kind]

    def _to_time(
        self, width: int, untimed: Sequence[int], plain: int, kind: RowGroup
    ) -> int | None:
        """Return the ``untimed`` draft to try now, plain decoding first; None: not in this call."""
        if plain in untimed:
            return plain
        if not self._is_turn(kind):
            return None
        return min(untimed, key=lambda index: self.decisions.get((width, index), 0))

    def _first_trial(self, kind: RowGroup, current: int, indices: Sequence[int]) -> int | None:
        """Return the draft of ``indices`` to try because the kind is new; None: there is none."""
        if not kind:
            return None
        rare = [
            index
            for index in indices
            if index != current
            and self.drafts[index] is not None  # plain decoding has nothing to measure
            and self._measured_calls[kind, index] < _FIRST_TRIALS
            and self._first_trials[kind, index] < _MOST_FIRST_TRIALS
        ]
        if not rare or not self._is_turn(kind):
            return None
        self._first_trials[kind, rare[0]] += 1
        return rare[0]

    def _trial(self, width: int, current: int, indices: Sequence[int], kind: RowGroup) -> int:
        """Return the draft of ``indices`` that is due for a trial, or else the ``current`` one."""
        idle = [index for index in indices if index != current]
        clock = self._clocks.get(kind, 0.0)
        last_used = {index: self._last_used.get((kind, index), 0.0) for index in idle}
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
        results: RowResults,
        *,
        seconds: float | None,
        steps: int,
        is_upper_bound: bool = False,
        by_kind: Mapping[RowGroup, RowResults] | None = None,
    ) -> None:
        """Record the result of a decode call.

        Args:
            width: the number of rows that were computed.
            index: the index of the draft.
            results: the results of the rows by which the draft is judged.
            seconds: the time of the call; None: it was not measured.
            steps: the number of steps of the call.
            is_upper_bound: whether the call may have ended earlier than measured. Such a time
                counts only if the draft was not timed before.
            by_kind: the results of the rows of each kind; None: the kinds are unknown.
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
        if self.drafts[index] is None or not results.row_steps:
            return
        self._add((), index, results)
        by_region: dict[RowGroup, RowResults] = {}
        for kind, of_kind in (by_kind or {}).items():
            if not of_kind.row_steps:
                continue
            region = kind[:1]
            by_region[region] = by_region[region] + of_kind if region in by_region else of_kind
            self._add(kind, index, of_kind)
            for measured in (index, *self._shares.get(index, ())):
                self._measured_calls[kind, measured] += 1
        for region, of_region in by_region.items():
            self._add(region, index, of_region)

    def _add(self, group: RowGroup, index: int, results: RowResults) -> None:
        """Add the results of a group of rows to its measurements.

        Those of a union also tell what some of its parts would have accepted without the others:
        an accepted path is cut where these parts do not offer it.
        """
        steps = results.row_steps
        if self._plain_chains[index]:
            accepted = [float(count) for count in results.accepted_at[: _depth(self.drafts[index])]]
            self._chains.add(group, steps, accepted)
            for chain in self._shared_chains - {index}:
                # What a union said about it was measured earlier than this.
                self._measured[chain].fade(group, steps)
            if index not in self._shared_chains:
                return
        self._measured[index].add(group, steps, [results.emitted])
        if shares := self._shares.get(index):
            accepted = sum(results.accepted_at)
            for part, name in shares.items():
                of_part = results.by_first if name == "first" else results.by_others
                if of_part is not None:
                    tokens = results.emitted - accepted + of_part
                    self._measured[part].add(group, steps, [tokens])

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


def _main_kind(row_kinds: Mapping[RowGroup, int] | None) -> RowGroup:
    """Return the kind of most rows; () if the kinds are unknown."""
    return max(row_kinds, key=lambda kind: row_kinds[kind]) if row_kinds else ()


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
    """Return whether a draft is a chain of a fixed length, whose shorter ones it measures, too."""
    return isinstance(draft, Chain) and not draft.stop_below
