"""The choice between masked steps and calls without masks, from made-up measurements."""

from typing import Any

import pytest

from specjax.drafts.shapes import Chain
from specjax.serving.choice import DraftChoice
from specjax.serving.constrained_choice import Call, ConstrainedChoice, Leaving, pooled_leaving

SECONDS = {(1, 0): 0.010, (1, 1): 0.012, (8, 0): 0.020, (8, 1): 0.040}
MASKED = {"drafted": 0.014, "host": 0.011}


def choice_of(masked: int | None = 1) -> ConstrainedChoice:
    free = DraftChoice([None, Chain(3)], SECONDS)
    return ConstrainedChoice(free, plain=0, masked=masked, steps=8)


def simulate(choice: ConstrainedChoice, leaving: float, drafted_tokens: float, calls: int) -> Any:
    """Make calls of one row, and return how often each kind was chosen."""
    row, chosen, owed = Leaving(pooled_leaving()), {"drafted": 0, "host": 0, "free": 0}, 0.0
    replays, accepted, illegal = 0, 0.0, 0.0
    for _ in range(calls):
        draft = None if replays else 1
        call = choice.choose((1, 1), 1, forced=[replays], leaving=[row.rate], draft=draft)
        chosen[call.kind] += 1
        if call.kind == "free":
            owed += 3 * call.steps * leaving
            has_left = owed >= 1
            owed -= has_left
            row.checked(3 * call.steps // (2 if has_left else 1), has_left)
            replays = int(has_left)
            continue
        replays = 0
        choice.record(call, 1, 0, MASKED[call.kind])
        if call.kind == "drafted":
            illegal += leaving
            row.drafted(legal=illegal < 1)
            illegal -= illegal >= 1
            accepted += drafted_tokens
            choice.record_tokens("drafted", 1, int(accepted))
            accepted -= int(accepted)
    return chosen


def test_a_text_that_stays_legal_is_decoded_freely() -> None:
    chosen = simulate(choice_of(), leaving=0.0, drafted_tokens=3.0, calls=200)
    assert chosen["free"] > 190


def test_a_text_that_leaves_often_is_decoded_in_masked_steps() -> None:
    chosen = simulate(choice_of(), leaving=0.35, drafted_tokens=1.9, calls=1000)
    assert chosen["drafted"] > 900


def test_drafts_that_are_rejected_are_given_up() -> None:
    chosen = simulate(choice_of(), leaving=0.35, drafted_tokens=1.05, calls=1000)
    assert chosen["host"] > 900
    assert chosen["drafted"] >= 5  # tried again now and then


def test_a_masked_step_does_not_look_faster_than_the_free_step_that_it_contains() -> None:
    choice = choice_of()
    for _ in range(3):
        choice.record(Call("drafted"), 1, 0, SECONDS[1, 1] / 3)
    assert choice.choose((1, 1), 1, forced=[0], leaving=[0.001], draft=1).kind == "free"


def test_longer_calls_for_texts_that_leave_rarely() -> None:
    steps = [
        choice_of().choose((1, 1), 1, forced=[0], leaving=[rate], draft=1).steps
        for rate in (0.0, 0.02, 0.1)
    ]
    assert steps[0] == 8
    assert steps == sorted(steps, reverse=True)
    assert steps[2] < 8


def test_a_row_that_leaves_costs_the_rows_beside_it() -> None:
    """Check that one of eight rows that often leaves makes masked steps faster for all."""
    legal, alone = [0.0] * 8, [0.0] * 7 + [0.5]
    choice = choice_of()
    assert choice.choose((8, 8), 8, forced=[0] * 8, leaving=legal, draft=1) == Call("free", 8)
    few = choice_of().choose((8, 8), 8, forced=[0] * 8, leaving=alone, draft=1)
    many = choice_of().choose((8, 8), 8, forced=[0] * 8, leaving=[0.5] * 8, draft=1)
    assert few.kind == many.kind == "drafted"


@pytest.mark.parametrize("masked", [None, 1])
def test_forced_text_and_copies_have_kinds_of_their_own(masked: int | None) -> None:
    options: dict[str, Any] = {"leaving": [0.5], "draft": 1}
    assert choice_of(masked).choose((1, 1), 1, forced=[8], **options) == Call("host")
    copying = choice_of(masked).choose((1, 1), 1, forced=[0], copies=True, **options)
    assert copying == Call("copying")
