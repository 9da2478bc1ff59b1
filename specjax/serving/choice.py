"""The choice of the fastest draft under the current load, in plain Python.

With a given draft, a step emits E tokens per row and takes S seconds. The draft with the most
tokens per second, E / S, is used; plain decoding, whose E is 1, is one of the candidates. S is
measured for each number of computed rows, when the engine starts and while it runs. E is the mean
over recent steps.

With few rows, a pass over a draft takes hardly longer than one over a single token, so a long
draft pays. With many rows, each further node costs its full time, so a short draft or none is
faster. The text does not depend on the choice: with coupled sampling it is the same for all drafts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specjax.drafts.shapes import Chain, DraftShape

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


@dataclass
class _Measured:
    """Exponentially decaying sums over row steps.

    Attributes:
        steps: ``[K]`` the steps. K is 1 for a draft, and the largest depth for chains.
        emitted: ``[K]`` the emitted tokens; for chains, those of each depth.
    """

    steps: np.ndarray
    emitted: np.ndarray

    @classmethod
    def expected(cls, tokens: np.ndarray) -> "_Measured":
        """Return the initial sums, for an assumed number of ``tokens [K]`` per step."""
        return cls(np.full(len(tokens), _EXPECTED_STEPS), _EXPECTED_STEPS * tokens)

    def add(self, steps: int, emitted: np.ndarray) -> None:
        """Add ``steps`` steps, which emitted ``emitted [k]`` tokens, to the first k entries."""
        count, decay = len(emitted), np.exp(-steps / MEMORY)
        self.steps[:count] = self.steps[:count] * decay + steps
        self.emitted[:count] = self.emitted[:count] * decay + emitted


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
            _Measured.expected(survival[: 1 + _depth(draft)].sum(keepdims=True)) for draft in drafts
        ]
        self._chains = _Measured.expected(survival[1:])  # by depth
        # The draft in use, by number of rows and by whether some row has a prediction.
        self._current: dict[tuple[int, bool], int] = {}
        # The clock advances by the time of one step per call, because the number of steps per call
        # does not depend on the draft.
        self._clock = 0.0
        self._since_tried = 0
        self._has_run: set[tuple[int, int]] = set()  # those whose first, slower call is over
        self._last_used = [0.0] * len(self.drafts)

    def tokens_a_step(self, index: int, predicted: float = 1.0, drafting: float = 1.0) -> float:
        """Return E, the expected number of emitted tokens per row and step.

        Args:
            index: the index of the draft.
            predicted: the share of the rows that have a prediction. It matters for `Copies` alone.
            drafting: the share of the rows that draft. The others emit one token per step.
        """
        return 1.0 + drafting * (self._drafted_tokens(index, predicted) - 1.0)

    def _drafted_tokens(self, index: int, predicted: float) -> float:
        """Return the expected number of emitted tokens per step of a row that drafts."""
        draft = self.drafts[index]
        if draft is None:
            return 1.0
        if isinstance(draft, Copies):
            copied = float(self._measured[index].emitted[0] / self._measured[index].steps[0])
            drafted = 1.0 if draft.beside is None else self.tokens_a_step(draft.beside)
            return predicted * copied + (1 - predicted) * drafted
        if _is_plain_chain(draft):  # chains share their measurements: each begins like the others
            return 1.0 + float((self._chains.emitted / self._chains.steps)[: draft.depth].sum())
        measured = self._measured[index]
        return float(measured.emitted[0] / measured.steps[0])

    def rate(self, width: int, index: int, predicted: float = 1.0, drafting: float = 1.0) -> float:
        """Return E / S, the expected tokens per second of a row."""
        return self.tokens_a_step(index, predicted, drafting) / self.seconds[width, index]

    def choose(
        self,
        width: int,
        predicted: float = 0.0,
        ready: Collection[int] | None = None,
        *,
        plain: int = 0,
        is_measuring: bool = True,
        drafting: float = 1.0,
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
        """
        indices = [
            index
            for index, draft in enumerate(self.drafts)
            if predicted or not isinstance(draft, Copies)
        ]
        indices = [index for index in indices if ready is None or index in ready]
        untimed = [index for index in indices if (width, index) not in self.seconds]
        if untimed:
            indices = [index for index in indices if index not in untimed]
            choice = self._to_time(width, untimed, plain) if is_measuring else None
            if choice is None and not indices:
                choice = next((index for index in untimed if self.drafts[index] is not None), plain)
            if choice is not None:
                return self._count(width, choice)
        rates = {index: self.rate(width, index, predicted, drafting) for index in indices}
        best = max(indices, key=lambda index: rates[index])
        current = self._current.get((width, predicted > 0), best)
        if current not in indices:  # requests that run now have named others
            current = best
        if rates[best] > BETTER * rates[current]:
            current = best
        self._current[width, predicted > 0] = current
        choice = self._trial(width, current, indices)
        self._clock += self.seconds[width, choice]
        self._last_used[choice] = self._clock
        return self._count(width, choice)

    def fastest(self, width: int, indices: Sequence[int]) -> int:
        """Return the draft of ``indices`` with the most tokens per second; the first if unknown."""
        timed = [index for index in indices if (width, index) in self.seconds]
        timed = [index for index in timed if not isinstance(self.drafts[index], Copies)]
        return max(timed, key=lambda index: self.rate(width, index), default=indices[0])

    def _count(self, width: int, index: int) -> int:
        self.decisions[width, index] = self.decisions.get((width, index), 0) + 1
        return index

    def _to_time(self, width: int, untimed: Sequence[int], plain: int) -> int | None:
        """Return the ``untimed`` draft to try now, plain decoding first; None: not in this call."""
        if plain in untimed:
            return plain
        self._since_tried += 1
        if self._since_tried < TRY_UNKNOWN:
            return None
        self._since_tried = 0
        return min(untimed, key=lambda index: self.decisions.get((width, index), 0))

    def _trial(self, width: int, current: int, indices: Sequence[int]) -> int:
        """Return the draft of ``indices`` that is due for a trial, or else the ``current`` one."""
        idle = [index for index in indices if index != current]
        due = [
            index
            for index in idle
            if (self._clock - self._last_used[index]) * TRIALS
            > len(idle) * self.seconds[width, index]
        ]
        return min(due, key=lambda index: self._last_used[index], default=current)

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
        if _is_plain_chain(draft):
            self._chains.add(row_steps, np.asarray(accepted_at, float)[: draft.depth])
        else:
            self._measured[index].add(row_steps, np.array([emitted], float))

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


def _depth(draft: DraftShape | Copies | None) -> int:
    return 0 if draft is None else draft.depth


def _is_plain_chain(draft: DraftShape | Copies) -> bool:
    return isinstance(draft, Chain) and not draft.stop_below
