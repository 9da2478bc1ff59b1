"""The counters of an engine since it was made, over all of its texts."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from specjax.decoding.stats import Stats
from specjax.serving.row_kinds import Region, RowKind, sums_by_kind


class KindCounts(NamedTuple):
    """The counters of texts in one region, or in one range of context lengths.

    Attributes:
        steps: forward passes of the target, counted per row.
        generated: generated tokens.
        drafted_steps: steps with a draft.
        drafted: drafted tokens.
        accepted: drafted tokens that were accepted and emitted.

    Examples:
        >>> from specjax.serving import KindCounts
        >>> counts = KindCounts.sum([KindCounts(1, 4, 1, 3, 3), KindCounts(2, 4, 2, 6, 2)])
        >>> counts.generated, counts.drafted
        (8, 9)
        >>> round(counts.acceptance_length, 2)  # tokens per step
        2.67
    """

    steps: int = 0
    generated: int = 0
    drafted_steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_length(self) -> float:
        """The tokens per step; 0 before the first step."""
        return self.generated / self.steps if self.steps else 0.0

    @classmethod
    def sum(cls, counts: Iterable["KindCounts"]) -> "KindCounts":
        """Return the sums."""
        return cls(*map(sum, zip(*counts, cls(), strict=True)))


@dataclass(frozen=True)
class RowTokens:
    """The tokens that a row generated in one call.

    Attributes:
        kind: the kind of the row at the start of the call.
        runs: the regions of the tokens in their order, each with its number of tokens.
        accepted: for each token, whether it was drafted and accepted.

    Examples:
        >>> from specjax.serving.row_kinds import RowKind
        >>> from specjax.serving.totals import KindCounts, RowTokens
        >>> runs = [("thinking", 3), ("answer", 3)]
        >>> tokens = RowTokens(RowKind("thinking", "256"), runs, [True, True, False] * 2)
        >>> divided = tokens.by_region(KindCounts(2, 6, drafted_steps=2, drafted=7, accepted=4))
        >>> [(region, counts.steps, counts.drafted) for region, counts in divided]
        [('thinking', 1, 3), ('answer', 1, 4)]
    """

    kind: RowKind
    runs: Sequence[tuple[Region, int]] = ()
    accepted: Sequence[bool] = ()

    def by_region(self, total: KindCounts) -> list[tuple[Region, KindCounts]]:
        """Divide the counters of the call by region.

        A step belongs to the region of its last token, which the target has sampled itself. The
        device does not report the drafted tokens of each step, so they are divided by the steps.
        """
        if len(self.runs) < 2:
            return [(self.runs[0][0] if self.runs else self.kind.region, total)]
        divided, before, begin = [], KindCounts(), 0
        for number, (region, count) in enumerate(self.runs, start=1):
            begin += count
            accepted = sum(self.accepted[:begin])
            steps = begin - accepted
            upto = KindCounts(
                steps,
                begin,
                total.drafted_steps * steps // max(1, total.steps),
                total.drafted * steps // max(1, total.steps),
                accepted,
            )
            # The last step of a text may end with a drafted token.
            upto = total if number == len(self.runs) else upto
            divided.append((region, KindCounts(*map(operator.sub, upto, before))))
            before = upto
        return divided


@dataclass
class Totals:
    """The sums of the counters of rows.

    The device counts each text from zero, in 32 bits. An engine runs for months, and 64 rows draft
    2**31 tokens within hours. So the sums are Python integers, which do not overflow.

    Attributes:
        steps: forward passes of the target, counted per row.
        generated: generated tokens.
        drafted: drafted tokens.
        accepted: drafted tokens that were accepted and emitted.
        drafted_at: by depth, the steps in which a token was drafted there; the first number is that
            of the root's children.
        accepted_at: by depth, the steps in which such a token was accepted and emitted.
        drafted_by: drafted tokens that each part of the drafter offered.
        accepted_by: tokens among them that were accepted and emitted.
        accepted_only_by: those that no other part offered.
        kinds: the counters of texts by region and range of context lengths.

    Examples:
        >>> from specjax.serving.totals import Totals
        >>> totals = Totals()
        >>> for _ in range(2):
        ...     totals.add(plain.stats)
        >>> totals.generated, totals.drafted
        (32, 0)
    """

    steps: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    drafted_by: list[int] = field(default_factory=list)
    accepted_by: list[int] = field(default_factory=list)
    accepted_only_by: list[int] = field(default_factory=list)
    kinds: dict[RowKind, KindCounts] = field(default_factory=dict)

    @property
    def drafted_steps(self) -> int:
        """The steps with a draft, counted per row."""
        return max(self.drafted_at, default=0)

    def add(self, stats: Stats) -> None:
        """Add the counters ``[B]`` of rows.

        Their depth and their number of parts must be the same in all calls.
        """
        histogram = _sums(stats.histogram)
        self.steps += _sums(stats.steps)
        self.generated += sum(emitted * steps for emitted, steps in enumerate(histogram))
        self.drafted += _sums(stats.drafted)
        self.accepted += _sums(stats.accepted)
        self.drafted_at = _added(self.drafted_at, _sums(stats.drafted_at))
        self.accepted_at = _added(self.accepted_at, _sums(stats.accepted_at))
        self.drafted_by = _added(self.drafted_by, _sums(stats.drafted_by))
        self.accepted_by = _added(self.accepted_by, _sums(stats.accepted_by))
        self.accepted_only_by = _added(self.accepted_only_by, _sums(stats.accepted_only_by))

    def add_kinds(
        self,
        stats: Stats,
        kinds: Sequence[RowKind],
        changed: Mapping[int, RowTokens] = MappingProxyType({}),
    ) -> None:
        """Add the counters ``[B]`` of a call to those of kinds.

        Args:
            stats: the counters of its rows.
            kinds: the kind of each row at the start of the call.
            changed: the tokens of the rows whose region changed within the call, by index.
        """
        histogram = np.asarray(stats.histogram, np.int64)
        counts = np.stack(
            [
                stats.steps,
                histogram @ np.arange(histogram.shape[1]),
                np.asarray(stats.drafted_at).max(axis=1, initial=0),
                stats.drafted,
                stats.accepted,
            ],
            axis=1,
        )
        for index, row in changed.items():
            for region, of_region in row.by_region(KindCounts(*counts[index].tolist())):
                self._add_kind(RowKind(region, row.kind.context), of_region)
            counts[index] = 0
        for kind, of_kind in sums_by_kind(counts, kinds).items():
            self._add_kind(kind, of_kind)

    def _add_kind(self, kind: RowKind, counts: Iterable[int]) -> None:
        """Add counters in the order of `KindCounts`."""
        before = self.kinds.get(kind, KindCounts())
        self.kinds[kind] = KindCounts(*map(operator.add, before, counts))


def _sums(counts: Any) -> Any:
    """Return the sums over rows as Python integers."""
    return np.asarray(counts).sum(axis=0, dtype=np.int64).tolist()


def _added(before: list[int], new: list[int]) -> list[int]:
    """Return the sums by depth or by part. ``before`` is empty at first."""
    return list(map(operator.add, before, new)) if before else new
