"""Which draft under which load: the one rule, in plain Python.

A step of n running rows emits E tokens a row and takes S seconds, with each draft its own E and S. The draft with the most
tokens a second, E / S, is taken; plain decoding, whose E is 1, is one of them. S is measured when the engine starts, and on and
on while it runs, by the number of rows that are computed. E is what the drafts that are running come to.

With few rows a pass over a draft takes hardly longer than one over a single token, and a long draft pays. With many rows every
further node costs its full time, and a short draft or none is faster. The text does not depend on any of this: with coupled
sampling it is the same whatever is drafted.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specjax.drafts.shapes import Chain, DraftShape

MEMORY = 400
"""Steps of a row after which what was accepted counts 1/e of what is accepted now."""

LATENCY = 20
"""Calls, likewise, for seconds."""

TRIALS = 1 / 50
"""Share of the time in which drafts are tried that were not taken lately: acceptance changes with the texts. It is a share of
the time and not of the calls, because under load a call with a long draft may take as long as twenty without."""

BETTER = 1.03
"""By so much another draft must be better to be taken: changing costs time, too."""

TRY_UNKNOWN = 8
"""One call in so many tries a draft whose seconds are not known yet."""

_EXPECTED = 0.8
"""The chance that a drafted token is accepted, as long as nothing is known: high, so that drafts are tried."""
_EXPECTED_STEPS = 4.0
"""So many steps of a row that expectation counts."""


@dataclass
class _Measured:
    """Sums over steps of rows, the older the lighter.

    Attributes:
        steps: ``[K]`` of rows.
        emitted: ``[K]`` what they emitted: of a draft its tokens (K is 1), of chains those of each depth.
    """

    steps: np.ndarray
    emitted: np.ndarray

    @classmethod
    def expected(cls, tokens: np.ndarray) -> "_Measured":
        """As long as nothing is known: so many ``tokens`` [K] a step."""
        return cls(np.full(len(tokens), _EXPECTED_STEPS), _EXPECTED_STEPS * tokens)

    def add(self, steps: int, emitted: np.ndarray) -> None:
        """Take in ``steps`` more, for the first entries, as many as ``emitted`` has."""
        known, kept = len(emitted), np.exp(-steps / MEMORY)
        self.steps[:known] = self.steps[:known] * kept + steps
        self.emitted[:known] = self.emitted[:known] * kept + emitted


@dataclass(frozen=True)
class Copies:
    """A draft of which some rows copy from a prediction, and the others draft as always.

    Attributes:
        longest: most tokens that are copied.
        beside: the number of the draft of the other rows; None: they have none.
    """

    longest: int
    beside: int | None

    @property
    def depth(self) -> int:
        """As of other drafts."""
        return self.longest

    def __str__(self) -> str:
        """In a few words."""
        return f"copies of {self.longest}"


class DraftChoice:
    """Chooses among a few drafts before every decode call, and is told what came of it.

    Attributes:
        drafts: to choose from; None is plain decoding. `Copies` are for calls in which some row has a prediction.
        seconds: of a step, by number of rows and number of draft.
        decisions: how often each draft was taken, likewise.

    Examples:
        >>> from specjax.serving.choice import DraftChoice
        >>> seconds = {(1, 0): 0.010, (1, 1): 0.012, (8, 0): 0.020, (8, 1): 0.090}
        >>> choice = DraftChoice([None, specjax.Chain(3)], seconds)
        >>> choice.choose(width=1), choice.choose(width=8)  # a chain for one row, none for eight
        (1, 0)
        >>> choice.record(1, 1, seconds=0.012, steps=1, row_steps=1, emitted=1, accepted_at=[0, 0, 0])
        >>> round(choice.tokens_a_step(1), 2)  # it was rejected: less than was hoped
        2.56
    """

    def __init__(self, drafts: Sequence[DraftShape | Copies | None], seconds: Mapping[tuple[int, int], float]) -> None:
        """Of ``drafts``, None being plain decoding, and the ``seconds`` of a step by number of rows and number of draft."""
        self.drafts = tuple(drafts)
        self.seconds = dict(seconds)
        self.decisions: dict[tuple[int, int], int] = {}
        survival = _EXPECTED ** np.arange(1 + max(_depth(draft) for draft in drafts))
        self._measured = [_Measured.expected(survival[: 1 + _depth(draft)].sum(keepdims=True)) for draft in drafts]
        self._chains = _Measured.expected(survival[1:])  # by depth
        self._current: dict[tuple[int, bool], int] = {}  # by width, and whether some row has a prediction
        # Counted in seconds of one step a call: how many steps a call has does not depend on the draft.
        self._clock = 0.0
        self._since_tried = 0
        self._begun: set[tuple[int, int]] = set()  # whose first call was measured
        self._last_taken = [0.0] * len(self.drafts)

    def tokens_a_step(self, index: int, predicted: float = 1.0) -> float:
        """E, the tokens that a step of a row is expected to emit with a draft, by its number.

        ``predicted`` is the share of the rows that have a prediction. Of other drafts than `Copies` it changes nothing.
        """
        draft = self.drafts[index]
        if draft is None:
            return 1.0
        if isinstance(draft, Copies):
            copied = float(self._measured[index].emitted[0] / self._measured[index].steps[0])
            others = 1.0 if draft.beside is None else self.tokens_a_step(draft.beside)
            return predicted * copied + (1 - predicted) * others
        if _is_plain_chain(draft):  # of one chain every other one's beginning is known
            return 1.0 + float((self._chains.emitted / self._chains.steps)[: draft.depth].sum())
        measured = self._measured[index]
        return float(measured.emitted[0] / measured.steps[0])

    def rate(self, width: int, index: int, predicted: float = 1.0) -> float:
        """E / S: tokens a second of each of the running rows."""
        return self.tokens_a_step(index, predicted) / self.seconds[width, index]

    def choose(
        self,
        width: int,
        predicted: float = 0.0,
        ready: Collection[int] | None = None,
        *,
        plain: int = 0,
        is_measuring: bool = True,
    ) -> int:
        """The number of the draft to decode with.

        Args:
            width: rows that are computed.
            predicted: the share of them that has a prediction.
            ready: numbers of drafts that can be used; None: all.
            plain: the number of plain decoding.
            is_measuring: whether seconds are being measured. They are not while something compiles. Then the first draft
                that is ready is used, for few rows gain from any draft; otherwise seconds are learnt, plain decoding's first.
        """
        indices = [index for index, draft in enumerate(self.drafts) if predicted or not isinstance(draft, Copies)]
        indices = [index for index in indices if ready is None or index in ready]
        unknown = [index for index in indices if (width, index) not in self.seconds]
        if unknown:
            indices = [index for index in indices if index not in unknown]
            taken = self._to_learn(width, unknown, plain) if is_measuring else None
            if taken is None and not indices:
                taken = next((index for index in unknown if self.drafts[index] is not None), plain)
            if taken is not None:
                return self._count(width, taken)
        rates = {index: self.rate(width, index, predicted) for index in indices}
        best = max(indices, key=lambda index: rates[index])
        current = self._current.get((width, predicted > 0), best)
        if rates[best] > BETTER * rates[current]:
            current = best
        self._current[width, predicted > 0] = current
        taken = self._trial(width, current, indices)
        self._clock += self.seconds[width, taken]
        self._last_taken[taken] = self._clock
        return self._count(width, taken)

    def _count(self, width: int, taken: int) -> int:
        self.decisions[width, taken] = self.decisions.get((width, taken), 0) + 1
        return taken

    def _to_learn(self, width: int, unknown: Sequence[int], plain: int) -> int | None:
        """Return the draft of ``unknown`` seconds that it is time to try, plain decoding first. None: it is not time."""
        if plain in unknown:
            return plain
        self._since_tried += 1
        if self._since_tried < TRY_UNKNOWN:
            return None
        self._since_tried = 0
        return min(unknown, key=lambda index: self.decisions.get((width, index), 0))

    def _trial(self, width: int, current: int, indices: Sequence[int]) -> int:
        """The one of ``indices`` that it is time to try, or else the ``current`` one."""
        others = [index for index in indices if index != current]
        due = [
            index
            for index in others
            if (self._clock - self._last_taken[index]) * TRIALS > len(others) * self.seconds[width, index]
        ]
        return min(due, key=lambda index: self._last_taken[index], default=current)

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
        """What came of a decode call.

        Args:
            width: rows that were computed.
            index: of the draft.
            seconds: of the call; None: not known.
            is_upper_bound: whether the call may have been over before. Such seconds only count as long as there are no others.
            steps: of the loop.
            row_steps: of all rows together; with `Copies`, of those that have a prediction.
            emitted: their tokens.
            accepted_at: ``[D]`` steps of rows in which a token of that depth was emitted; what goes beyond the draft is 0.
        """
        if steps and seconds is not None and (width, index) not in self.seconds:
            if (width, index) in self._begun:  # a program's first call takes longer
                self.seconds[width, index] = seconds / steps
            self._begun.add((width, index))
        elif steps and seconds is not None and not is_upper_bound:
            before, share = self.seconds[width, index], min(1.0, steps / LATENCY)
            # A machine that stood still for a moment says nothing about the draft.
            self.seconds[width, index] = before + share * (min(seconds / steps, 4 * before) - before)
        draft = self.drafts[index]
        if draft is None or not row_steps:
            return
        if _is_plain_chain(draft):
            self._chains.add(row_steps, np.asarray(accepted_at, float)[: draft.depth])
        else:
            self._measured[index].add(row_steps, np.array([emitted], float))

    def table(self) -> list[dict[str, object]]:
        """What it goes by, a line a number of rows and draft: seconds and tokens a step, tokens a second, times taken."""
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
