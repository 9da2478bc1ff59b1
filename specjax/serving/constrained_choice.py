"""The choice between the kinds of calls for rows with a grammar, in plain Python.

A call with constrained rows is one of these:

- *drafted*: a masked step with the drafter's draft;
- *copying*: a masked step that copies predictions, and drafts forced text and the drafter's draft
  in rows without one;
- *host*: a masked step whose draft is what the grammar forces, or nothing;
- *free*: several steps without masks. A row in which a token is not legal goes back to where it was
  before the call, and the next masked step replays its legal tokens.

Each kind has an expected number of tokens and of seconds. The kind with the most tokens per second
is used. Texts do not depend on the choice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specjax.serving.choice import LATENCY, TRIALS, DraftChoice, RowGroup

MEMORY = 400
"""The number of row steps after which the weight of a masked step's tokens has fallen to 1/e."""

LEAVING_MEMORY = 64
"""The number of tokens after which the weight of a row's free tokens has fallen to 1/e."""

_EXPECTED_LEAVING = 0.05
"""The assumed chance that a free token is not legal, before any is checked."""

_BETTER = 1.05
"""The factor by which a kind must be faster to replace the current one."""

_HOST_SECONDS = 0.001
"""The assumed seconds of the host's work for a call, before any was measured."""

_KINDS: tuple[str, ...] = ("drafted", "copying", "host", "free")


@dataclass
class _Share:
    """A decaying share: ``hits`` of ``count`` events, beside an assumed share."""

    memory: float
    weight: float
    hits: float = 0.0
    count: float = 0.0

    def add(self, hits: float, count: float) -> None:
        decay = math.exp(-count / self.memory)
        self.hits, self.count = self.hits * decay + hits, self.count * decay + count

    def given(self, assumed: float) -> float:
        return (self.hits + self.weight * assumed) / (self.count + self.weight)


@dataclass
class Leaving:
    """The measured share of one text's free tokens that are not legal.

    What free calls showed counts most. Before there was one, the drafted tokens of masked steps
    stand for free tokens, because a drafter writes much like its target.

    Args:
        pooled: the rate over all texts of the same grammar.

    Examples:
        >>> from specjax.serving.constrained_choice import Leaving, pooled_leaving
        >>> row = Leaving(pooled_leaving())
        >>> round(row.rate, 2)  # nothing is known yet
        0.05
        >>> row.drafted(legal=False)
        >>> row.rate > 0.1
        True
        >>> row.checked(legal=60, has_left=False)
        >>> row.rate < 0.02
        True
    """

    pooled: _Share
    _free: _Share = field(default_factory=lambda: _Share(LEAVING_MEMORY, weight=4))
    _drafted: _Share = field(default_factory=lambda: _Share(LEAVING_MEMORY, weight=4))

    @property
    def rate(self) -> float:
        """The chance that the next free token is not legal."""
        return self._free.given(self._drafted.given(self.pooled.given(_EXPECTED_LEAVING)))

    def drafted(self, legal: bool) -> None:
        """Record whether the first drafted token of a masked step was ``legal``."""
        self._drafted.add(not legal, 1)
        self.pooled.add(not legal, 1)

    def checked(self, legal: int, has_left: bool) -> None:
        """Record a free call of ``legal`` tokens, and whether it left the grammar after them."""
        self._free.add(has_left, legal + has_left)
        self.pooled.add(has_left, legal + has_left)


def pooled_leaving() -> _Share:
    """Return the rate over all texts of a grammar, before any token is known."""
    return _Share(MEMORY, weight=4)


@dataclass(frozen=True)
class Call:
    """A call for rows some of which have a grammar.

    Attributes:
        kind: "drafted", "copying", "host" or "free".
        steps: the number of steps, 1 for masked steps.
    """

    kind: str
    steps: int = 1


class ConstrainedChoice:
    """The rule that chooses the kind of a call, from measurements of earlier calls.

    Args:
        free: the choice of the draft of free calls, with the seconds of their steps.
        plain: the index of plain decoding in ``free``.
        masked: the index of the draft of masked steps; None: they have no drafter.
        steps: the largest number of steps of a free call.

    Examples:
        >>> from specjax.serving.choice import DraftChoice
        >>> from specjax.serving.constrained_choice import ConstrainedChoice
        >>> seconds = {(1, 0): 0.010, (1, 1): 0.012}
        >>> free = DraftChoice([None, specjax.Chain(3)], seconds)
        >>> choice = ConstrainedChoice(free, plain=0, masked=1, steps=8)
        >>> choice.choose((1, 1), 1, forced=[0], leaving=[0.001], draft=1)
        Call(kind='free', steps=8)
        >>> choice.choose((1, 1), 1, forced=[0], leaving=[0.4], draft=1)
        Call(kind='drafted', steps=1)
        >>> choice.choose((1, 1), 1, forced=[6], leaving=[0.4], draft=1)
        Call(kind='host', steps=1)
    """

    def __init__(self, free: DraftChoice, plain: int, masked: int | None, steps: int) -> None:
        """Make a choice without measurements."""
        self._free, self._plain, self._masked, self._steps = free, plain, masked, steps
        self._seconds: dict[tuple[int, str, int], float] = {}  # by width, kind and longest draft
        self._has_run: set[tuple[int, str, int]] = set()
        depth = 0 if masked is None else _depth(free, masked)
        # The tokens of a row in a step with a draft, by kind.
        self._tokens = {kind: _Share(MEMORY, weight=4) for kind in _KINDS[:2]}
        self._expected_tokens = sum(0.8**level for level in range(depth + 1))
        self._host_seconds = _HOST_SECONDS  # of a free call
        self._clock = 0.0
        self._last_used: dict[str, float] = dict.fromkeys(_KINDS, 0.0)
        self._current = ""

    def choose(
        self,
        widths: tuple[int, int],
        rows: int,
        *,
        forced: Sequence[int],
        leaving: Sequence[float],
        draft: int | None,
        most: int | None = None,
        copies: bool = False,
        drafts: bool = True,
        row_kinds: Mapping[RowGroup, int] | None = None,
    ) -> Call:
        """Return the call to make.

        Args:
            widths: the number of rows that a masked step computes, and that a free call computes.
            rows: the number of rows that have a text.
            forced: the number of forced tokens of each constrained row.
            leaving: the `Leaving.rate` of each constrained row.
            draft: the index of the draft of a free call; None: no free call may be made now.
            most: the largest number of steps of a free call now; None: the usual one.
            copies: whether some row has a prediction, so that masked steps copy.
            drafts: whether some row may draft. If not, only forced tokens are drafted.
            row_kinds: the number of rows that draft, by kind, as in `DraftChoice.choose`.
        """
        width, free_width = widths
        longest = max(forced, default=0)
        calls: dict[str, tuple[Call, float, float]] = {}
        if not copies:
            calls["host"] = Call("host"), rows + sum(forced), self._of_host(width, longest)
        kind = "copying" if copies else "drafted"
        if copies or (drafts and self._masked is not None):
            tokens = rows * self._tokens[kind].given(self._expected_tokens)
            calls[kind] = Call(kind), tokens, self._of_draft(width, kind)
        if draft is not None:
            most = self._steps if most is None else most
            tokens = self._free.tokens_a_step(draft, row_kinds=row_kinds)
            candidates = [
                self._of_free(width, free_width, rows, leaving, draft, steps, tokens)
                for steps in sorted({1, 2, 4, most})
                if steps <= most
            ]
            # Among equals the longest call.
            calls["free"] = max(candidates, key=lambda it: (it[1] / it[2], it[0].steps))
        chosen = self._best(calls)
        if not longest:
            # A free call is the same step without masks: masked steps need no trial to show that.
            self._current = chosen
            chosen = chosen if chosen == "free" else self._trial(chosen, calls)
        call, _, seconds = calls[chosen]
        self._clock += seconds
        self._last_used[chosen] = self._clock
        return call

    def _best(self, calls: dict[str, tuple[Call, float, float]]) -> str:
        """Return the kind with the most tokens per second; the current one if it is hardly less."""
        rates = {kind: tokens / seconds for kind, (_, tokens, seconds) in calls.items()}
        best = max(rates, key=lambda kind: rates[kind])
        return best if rates[best] > _BETTER * rates.get(self._current, 0.0) else self._current

    def _trial(self, chosen: str, calls: dict[str, tuple[Call, float, float]]) -> str:
        """Return a kind that was not used lately, so that its measurements stay true."""
        idle = [kind for kind in calls if kind != chosen]
        for kind in idle:
            if (self._clock - self._last_used[kind]) * TRIALS > len(idle) * calls[kind][2]:
                return kind
        return chosen

    def _of_draft(self, width: int, kind: str) -> float:
        return self._measured(width, kind, 0, self._plain if self._masked is None else self._masked)

    def _of_host(self, width: int, longest: int) -> float:
        return self._measured(width, "host", _bucket(longest), self._plain)

    def _measured(self, width: int, kind: str, longest: int, like: int) -> float:
        """Return the seconds of a masked step, at least those of a free call of a step ``like`` it.

        A masked step computes more than that call. One that was timed while the machine was faster
        would look better than it is.
        """
        seconds = self._seconds.get((width, kind, longest), self._seconds.get((width, kind, 0)))
        if kind == "copying" and seconds is not None:
            return seconds
        step = self._step(width, like)
        if seconds is None:
            return step + 2 * _HOST_SECONDS
        return max(step + self._host_seconds, seconds)

    def _step(self, width: int, draft: int) -> float:
        """Return the seconds of a free step; if it was not timed, of any other."""
        seconds = self._free.seconds
        return seconds.get((width, draft)) or next(iter(seconds.values()), 1.0)

    def _of_free(
        self,
        width: int,
        free_width: int,
        rows: int,
        leaving: Sequence[float],
        draft: int,
        steps: int,
        tokens_a_step: float,
    ) -> tuple[Call, float, float]:
        """Return a free call, and its expected tokens and seconds, replay included."""
        emitted = steps * tokens_a_step
        stays = [(1 - rate) ** emitted for rate in leaving]
        kept_tokens = sum(
            emitted if rate <= 0 else (1 - stay) * (1 - rate) / rate
            for rate, stay in zip(leaving, stays, strict=True)
        )
        replays = 1 - math.prod(stays)
        tokens = kept_tokens + emitted * (rows - len(leaving)) + replays * rows
        seconds = self._host_seconds + steps * self._step(free_width, draft)
        return Call("free", steps), tokens, seconds + replays * self._of_host(width, round(emitted))

    def record(self, call: Call, width: int, longest: int, seconds: float) -> None:
        """Record the time of a masked step.

        Args:
            call: the call.
            width: the number of rows that were computed.
            longest: the longest draft of the host.
            seconds: its time.
        """
        key = width, call.kind, _bucket(longest) if call.kind == "host" else 0
        if key not in self._has_run:  # the first call of a program takes longer
            self._has_run.add(key)
        elif (before := self._seconds.get(key)) is None:
            self._seconds[key] = seconds
        else:
            # The limit keeps one pause of the machine from making the kind look slow for long.
            self._seconds[key] = before + (min(seconds, 4 * before) - before) / LATENCY

    def record_free(self, seconds: float) -> None:
        """Record the seconds of the host for a free call: the copy of the rows, and the check."""
        limited = min(seconds, 4 * self._host_seconds)
        self._host_seconds += (limited - self._host_seconds) / LATENCY

    def record_tokens(self, kind: str, row_steps: int, emitted: int) -> None:
        """Record the ``emitted`` tokens of a masked step with a draft in ``row_steps`` rows."""
        self._tokens[kind].add(emitted, row_steps)


def _bucket(longest: int) -> int:
    """Return the least power of two, or 0, that is not below ``longest``."""
    return 0 if longest == 0 else 1 << (longest - 1).bit_length()


def _depth(choice: DraftChoice, index: int) -> int:
    draft = choice.drafts[index]
    return 0 if draft is None else draft.depth
