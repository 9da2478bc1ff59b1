"""The counters of an engine since it was made, over all of its texts."""

import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specjax.decoding.stats import Stats


@dataclass
class Totals:
    """The sums of the counters of rows.

    The device counts each text from zero, in 32 bits. An engine runs for months, and 64 rows draft
    2**31 tokens within hours. So the sums are Python integers, which do not overflow.

    Attributes:
        generated: generated tokens.
        drafted: drafted tokens.
        accepted: drafted tokens that were accepted and emitted.
        drafted_at: by depth, the steps in which a token was drafted there; the first number is that
            of the root's children.
        accepted_at: by depth, the steps in which such a token was accepted and emitted.
        drafted_by: drafted tokens that each part of the drafter offered.
        accepted_by: tokens among them that were accepted and emitted.
        accepted_only_by: those that no other part offered.

    Examples:
        >>> from specjax.serving.totals import Totals
        >>> totals = Totals()
        >>> for _ in range(2):
        ...     totals.add(plain.stats)
        >>> totals.generated, totals.drafted
        (32, 0)
    """

    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    drafted_by: list[int] = field(default_factory=list)
    accepted_by: list[int] = field(default_factory=list)
    accepted_only_by: list[int] = field(default_factory=list)

    @property
    def drafted_steps(self) -> int:
        """The steps with a draft, counted per row."""
        return max(self.drafted_at, default=0)

    def add(self, stats: Stats) -> None:
        """Add the counters ``[B]`` of rows.

        Their depth and their number of parts must be the same in all calls.
        """
        histogram = _sums(stats.histogram)
        self.generated += sum(emitted * steps for emitted, steps in enumerate(histogram))
        self.drafted += _sums(stats.drafted)
        self.accepted += _sums(stats.accepted)
        self.drafted_at = _added(self.drafted_at, _sums(stats.drafted_at))
        self.accepted_at = _added(self.accepted_at, _sums(stats.accepted_at))
        self.drafted_by = _added(self.drafted_by, _sums(stats.drafted_by))
        self.accepted_by = _added(self.accepted_by, _sums(stats.accepted_by))
        self.accepted_only_by = _added(self.accepted_only_by, _sums(stats.accepted_only_by))


def _sums(counts: Any) -> Any:
    """Return the sums over rows as Python integers."""
    return np.asarray(counts).sum(axis=0, dtype=np.int64).tolist()


def _added(before: list[int], new: list[int]) -> list[int]:
    """Return the sums by depth or by part. ``before`` is empty at first."""
    return list(map(operator.add, before, new)) if before else new
