"""Tests of the chosen depth of drafts, which depends on measured times and acceptance."""

import math

import pytest

from specjax.client.pace import Pace

DEPTHS = (2, 4, 8, 16)


def paced(*, drafting: float, travel: float, accepted: float, rounds: int = 60) -> Pace:
    """Return a `Pace` that has measured some rounds.

    A drafted token takes ``drafting`` seconds, and ``accepted`` of eight drafted tokens are
    accepted on average.
    """
    pace = Pace(DEPTHS)
    for depth in DEPTHS:
        pace.drafted(depth, 9.0)  # not counted, because it includes compilation
        pace.drafted(depth, drafting * depth)
    for number in range(rounds):
        whole = math.floor(accepted) + (number % 10 < 10 * (accepted % 1))
        pace.round(
            seconds=travel,
            server=0.001,
            up=300,
            down=3000 + number % 7,
            drafted=8,
            accepted=int(whole),
        )
    return pace


def test_deeper_when_the_network_is_slow() -> None:
    chosen = [
        paced(drafting=0.004, travel=travel, accepted=5).choose()
        for travel in (0.002, 0.02, 0.2, 2.0)
    ]
    assert chosen == sorted(chosen)
    assert chosen[0] == 2 and chosen[-1] >= 8


def test_shallower_when_drafting_is_dear() -> None:
    chosen = [
        paced(drafting=drafting, travel=0.05, accepted=5).choose()
        for drafting in (0.0001, 0.01, 0.2)
    ]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] >= 8 and chosen[-1] == 2


def test_shallower_when_little_is_accepted() -> None:
    chosen = [
        paced(drafting=0.004, travel=0.05, accepted=accepted).choose() for accepted in (0.1, 1.5, 7)
    ]
    assert chosen == sorted(chosen)
    assert chosen[0] < chosen[-1]


def test_it_has_an_answer_before_anything_was_measured() -> None:
    pace = Pace(DEPTHS)
    assert pace.choose() in DEPTHS
    assert all(math.isfinite(pace.seconds(depth)) and pace.tokens(depth) >= 1 for depth in DEPTHS)
    assert pace.is_worth_keeping(4) in (True, False)
    for seconds in (0.0, 0.0, 1e-9, 5.0):  # equal sizes give no slope
        pace.round(seconds=seconds, server=0.0, up=0, down=0, drafted=0, accepted=0)
        assert pace.choose() in DEPTHS
        seconds_of_rounds = [pace.seconds(depth) for depth in DEPTHS]
        assert all(math.isfinite(value) and value >= 0 for value in seconds_of_rounds)


def test_depths_that_were_not_measured_follow_from_the_nearest() -> None:
    pace = Pace(DEPTHS)
    pace.drafted(4, 9.0)
    pace.drafted(4, 0.04)
    assert [pace.drafting(depth) for depth in DEPTHS] == pytest.approx([0.02, 0.04, 0.08, 0.16])


def test_one_slow_draft_is_soon_forgotten() -> None:
    pace = Pace(DEPTHS)
    for seconds in (0.01, 0.01, 10.0, 0.01, 0.01, 0.01):
        pace.drafted(4, seconds)
    assert pace.drafting(4) < 0.015


def test_bytes_are_paid_for_where_they_take_time() -> None:
    wide, narrow = Pace(DEPTHS), Pace(DEPTHS)
    for number in range(60):
        size = 1000 + 4000 * (number % 5)
        for pace, rate in ((wide, 1e-9), (narrow, 1e-5)):
            pace.round(
                seconds=0.02 + size * rate, server=0.0, up=0, down=size, drafted=8, accepted=5
            )
    assert narrow.travel(16) - narrow.travel(2) > 1000 * (wide.travel(16) - wide.travel(2)) >= 0
    assert narrow.travel(2) > 0


def test_a_draft_that_is_there_is_kept_unless_it_is_far_too_short() -> None:
    pace = paced(drafting=0.02, travel=0.02, accepted=6)
    assert pace.is_worth_keeping(pace.choose())
    quick = paced(drafting=1e-5, travel=0.5, accepted=7.9)
    assert quick.is_worth_keeping(16) and not quick.is_worth_keeping(1)
