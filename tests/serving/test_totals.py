"""Tests of the totals of an engine's statistics, which may exceed 32 bits."""

import numpy as np

from specjax.decoding.stats import Stats
from specjax.serving.totals import Totals

LARGE = 2**30


def stats_of(rows: int, depth: int, count: int) -> Stats:
    """Return statistics in which every counter of every row has the same ``count``."""

    def counts(*shape: int) -> np.ndarray:
        return np.full((rows, *shape), count, np.int32)

    return Stats(
        *(counts(), counts(), counts(), counts(), counts(depth), counts(depth), counts(depth + 2)),
        *(counts(2), counts(2), counts(2)),
    )


def test_sums_of_rows_and_of_calls_do_not_overflow() -> None:
    totals = Totals()
    for _ in range(5):
        totals.add(stats_of(rows=3, depth=2, count=LARGE))
    once = 15 * LARGE
    assert (totals.drafted, totals.accepted, totals.drafted_steps) == (once, once, once)
    assert (totals.drafted_at, totals.accepted_at) == ([once] * 2, [once] * 2)
    assert (totals.drafted_by, totals.accepted_by) == ([once] * 2, [once] * 2)
    assert totals.accepted_only_by == [once] * 2
    assert totals.generated == (0 + 1 + 2 + 3) * once
    numbers = [
        totals.generated,
        totals.drafted,
        totals.accepted,
        *totals.drafted_at,
        *totals.accepted_at,
    ]
    assert {type(number) for number in numbers} == {int}


def test_without_drafts_there_are_no_depths() -> None:
    totals = Totals()
    assert totals.drafted_steps == 0
    totals.add(stats_of(rows=1, depth=0, count=7))
    assert (totals.drafted_steps, totals.drafted_at, totals.generated) == (0, [], 7)
