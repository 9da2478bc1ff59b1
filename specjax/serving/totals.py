"""What an engine has counted since it was made, over all of its texts."""

import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specjax.decoding.stats import Stats


@dataclass
class Totals:
    """Sums of the statistics of rows.

    The device counts each text from zero, in 32 bits. An engine runs for months, and 64 rows draft 2**31 tokens in some hours.
    So the sums are Python's own whole numbers, which have no largest one.

    Attributes:
        generated: tokens.
        drafted: tokens.
        accepted: of those, emitted.
        drafted_at: by depth, the steps in which a token was drafted there; the first is below the root.
        accepted_at: by depth, the steps in which one of those was emitted.

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

    @property
    def drafted_steps(self) -> int:
        """Steps in which something was drafted, counted for each row."""
        return max(self.drafted_at, default=0)

    def add(self, stats: Stats) -> None:
        """Add what rows, ``[B]``, have counted, in statistics of the same depth as before."""
        histogram = _sums(stats.histogram)
        self.generated += sum(emitted * steps for emitted, steps in enumerate(histogram))
        self.drafted += _sums(stats.drafted)
        self.accepted += _sums(stats.accepted)
        self.drafted_at = _added(self.drafted_at, _sums(stats.drafted_at))
        self.accepted_at = _added(self.accepted_at, _sums(stats.accepted_at))


def _sums(counts: Any) -> Any:
    """Return the sums over rows as Python's numbers."""
    return np.asarray(counts).sum(axis=0, dtype=np.int64).tolist()


def _added(before: list[int], new: list[int]) -> list[int]:
    """Return the sums by depth; there are none before the first."""
    return list(map(operator.add, before, new)) if before else new
