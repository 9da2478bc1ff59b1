"""Tests of the rule that chooses drafts, on known numbers and on a made-up machine."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specjax.drafts.shapes import Chain, DraftShape, StaticTree, UnionTree, complete_tree
from specjax.serving.choice import TRIALS, TRY_UNKNOWN, DraftChoice, RowGroup, RowResults

TREE = StaticTree(complete_tree((2, 2, 2)))
DRAFTS = (None, Chain(3), Chain(7), TREE)
STEPS = 8


def depth_of(draft: DraftShape | None) -> int:
    return 0 if draft is None else draft.depth


def tokens_of(draft: DraftShape | None, chance: float) -> float:
    """Return the expected number of tokens of a step.

    Each drafted token is accepted with probability ``chance`` if those before it are.
    """
    return sum(chance**depth for depth in range(depth_of(draft) + 1))


def tell(
    choice: DraftChoice,
    width: int,
    number: int,
    chance: float,
    *,
    seconds: float,
    steps: int = STEPS,
    **named: Any,
) -> None:
    """Record the average result of a call."""
    row_steps, depth = width * steps, depth_of(choice.drafts[number])
    survival = row_steps * chance ** np.arange(1, depth + 1)
    accepted = np.pad(survival, (0, max(map(depth_of, choice.drafts)) - depth))
    emitted = round(row_steps + survival.sum())
    choice.record(
        width,
        number,
        RowResults(row_steps, emitted, accepted.tolist()),
        seconds=seconds * steps,
        steps=steps,
        **named,
    )


def costs(width: int, drafts: Sequence[DraftShape | None] = DRAFTS, free: int = 16) -> list[float]:
    """Return the seconds of a step with each draft.

    The pass takes longer beyond ``free`` tokens, and each drafted level takes a constant time.
    """
    nodes = [width * (1 if draft is None else draft.nodes) for draft in drafts]
    return [
        0.01 * max(1.0, n / free) + 0.001 * depth_of(draft)
        for n, draft in zip(nodes, drafts, strict=True)
    ]


def seconds_by(
    widths: Sequence[int], drafts: Sequence[DraftShape | None] = DRAFTS
) -> dict[tuple[int, int], float]:
    return {
        (width, number): seconds
        for width in widths
        for number, seconds in enumerate(costs(width, drafts))
    }


# --- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("width", [1, 4, 16, 64])
def test_what_is_taken_has_the_most_tokens_a_second(width, chance) -> None:
    choice = DraftChoice(DRAFTS, seconds_by([width]))
    for number in range(len(DRAFTS)):
        tell(choice, width, number, chance, seconds=costs(width)[number], steps=5000)
    for number, draft in enumerate(DRAFTS):
        assert choice.tokens_a_step(number) == pytest.approx(tokens_of(draft, chance), rel=0.02)
        assert choice.rate(width, number) == pytest.approx(
            choice.tokens_a_step(number) / costs(width)[number]
        )
    rates = [
        tokens_of(draft, chance) / seconds
        for draft, seconds in zip(DRAFTS, costs(width), strict=True)
    ]
    assert rates[choice.choose(width)] == max(rates)


def test_each_load_has_its_own_draft() -> None:
    choice = DraftChoice(DRAFTS[:3], seconds_by([1, 4, 64]))
    for _ in range(20):
        tell(choice, 1, 2, 0.8, seconds=costs(1)[2])
    assert [choice.choose(width) for width in (1, 4, 64)] == [2, 1, 0]


def test_a_draft_must_be_clearly_better_to_replace_another() -> None:
    choice = DraftChoice([None, None], {(1, 0): 0.0100, (1, 1): 0.0101})
    assert choice.choose(1) == 0
    choice.seconds[1, 1] = 0.0098
    assert choice.choose(1) == 0
    choice.seconds[1, 1] = 0.0096
    assert choice.choose(1) == 1


def test_there_is_nothing_to_choose_of_one() -> None:
    for drafts in ((None,), (TREE,)):
        choice = DraftChoice(drafts, {(1, 0): 0.01})
        for _ in range(300):
            assert choice.choose(1) == 0
            tell(choice, 1, 0, 0.5, seconds=0.01)


# --- learning -------------------------------------------------------------------------------------


def calls_until(choice: DraftChoice, width: int, expected: int, chance: float) -> int:
    """Return the number of calls before ten in a row that use the ``expected`` draft."""
    latest: list[int] = []
    for call in range(3000):
        latest = [*latest[-9:], choice.choose(width)]
        if latest == [expected] * 10:
            return call
        tell(choice, width, latest[-1], chance, seconds=costs(width, choice.drafts)[latest[-1]])
    raise AssertionError(f"draft {expected} is not taken")


def test_it_learns_that_acceptance_drops_and_rises() -> None:
    choice = DraftChoice(DRAFTS[:3], seconds_by([4]))
    assert calls_until(choice, 4, expected=1, chance=0.8) < 30
    assert calls_until(choice, 4, expected=0, chance=0.1) < 60
    # Plain decoding does not measure drafts, so only trials show that they pay again.
    assert calls_until(choice, 4, expected=1, chance=0.9) < 2000


def test_chains_inform_each_other_and_no_trees() -> None:
    choice = DraftChoice(DRAFTS, seconds_by([1]))
    before = choice.tokens_a_step(3)
    for _ in range(200):
        tell(choice, 1, 2, 0.4, seconds=0.017)
    assert choice.tokens_a_step(1) == pytest.approx(tokens_of(Chain(3), 0.4), rel=0.02)
    assert choice.tokens_a_step(3) == before
    for _ in range(200):
        tell(choice, 1, 1, 0.9, seconds=0.013)
    # A shorter chain informs the first levels of a longer one. The rest keeps its estimate.
    assert choice.tokens_a_step(2) == pytest.approx(
        tokens_of(Chain(3), 0.9) + sum(0.4**depth for depth in range(4, 8)), rel=0.02
    )


def test_a_chain_that_ends_early_is_no_chain_like_others() -> None:
    drafts = (Chain(3), Chain(3, stop_below=0.5))
    choice = DraftChoice(drafts, seconds_by([1], drafts))
    before = choice.tokens_a_step(0)
    for _ in range(200):
        tell(choice, 1, 1, 0.1, seconds=0.013)
    assert choice.tokens_a_step(0) == before
    assert choice.tokens_a_step(1) == pytest.approx(tokens_of(Chain(3), 0.1), rel=0.02)


def test_seconds_follow_the_machine() -> None:
    choice = DraftChoice(DRAFTS, seconds_by([4, 8]))
    untouched = {key: seconds for key, seconds in choice.seconds.items() if key != (4, 1)}
    for _ in range(40):
        tell(choice, 4, 1, 0.5, seconds=0.09)
    assert choice.seconds[4, 1] == pytest.approx(0.09, rel=0.01)
    assert {key: choice.seconds[key] for key in untouched} == untouched


def test_a_machine_that_stood_still_once_changes_little() -> None:
    choice = DraftChoice(DRAFTS, dict.fromkeys(seconds_by([4]), 0.01))
    tell(choice, 4, 1, 0.5, seconds=60.0, steps=1)
    assert choice.seconds[4, 1] <= 0.01 * (1 + 3 / 20) + 1e-9
    choice.record(4, 1, RowResults(0, 0, [0] * 7), seconds=60.0, steps=0)
    assert choice.seconds[4, 1] <= 0.01 * (1 + 3 / 20) + 1e-9


# --- trials ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 16, 64])
def test_others_are_tried_for_a_share_of_the_time_and_no_longer(width) -> None:
    choice, spent = DraftChoice(DRAFTS, seconds_by([width])), [0.0] * len(DRAFTS)
    for _ in range(100):
        for number in range(len(DRAFTS)):
            tell(choice, width, number, 0.2, seconds=choice.seconds[width, number])
    for _ in range(20_000):
        number = choice.choose(width)
        spent[number] += choice.seconds[width, number]
    share = 1 - max(spent) / sum(spent)
    assert 0.8 * TRIALS < share <= TRIALS
    assert min(spent) > 0
    assert sum(choice.decisions.values()) == 20_000
    assert [
        choice.decisions[width, number] * choice.seconds[width, number] for number in range(4)
    ] == pytest.approx(spent)


def test_the_table_says_what_it_goes_by() -> None:
    choice = DraftChoice(
        (None, Chain(3)), {(8, 1): 0.05, (8, 0): 0.02, (1, 0): 0.01, (1, 1): 0.012}
    )
    chosen = [choice.choose(8) for _ in range(3)]
    table = choice.table()
    assert [(line["rows"], line["draft"]) for line in table] == [
        (1, "none"),
        (1, "chain of 3"),
        (8, "none"),
        (8, "chain of 3"),
    ]
    assert [line["taken"] for line in table] == [0, 0, chosen.count(0), chosen.count(1)]
    for line, number in zip(table, (0, 1, 0, 1), strict=True):
        seconds = choice.seconds[line["rows"], number]  # pyright: ignore[reportArgumentType]
        assert line["tokens_a_second"] == choice.tokens_a_step(number) / seconds


# --- a machine that is made up --------------------------------------------------------------------


def simulate(
    choice: DraftChoice, chances: Sequence[float], width: int, calls: int, seed: int
) -> tuple[float, list[int]]:
    """Run a machine whose times and acceptance are random.

    Return its tokens per second, and the index of the chosen draft of each call.
    """
    draw, seconds_of = np.random.default_rng(seed), costs(width, choice.drafts)
    tokens, spent, chosen = 0, 0.0, []
    longest = max(map(depth_of, choice.drafts))
    for _ in range(calls):
        number = choice.choose(width)
        steps = int(draw.integers(1, STEPS + 1))
        would_accept = (
            draw.random((width * steps, depth_of(choice.drafts[number]))) < chances[number]
        )
        accepted = np.cumprod(would_accept, axis=1).sum(0)
        emitted = width * steps + int(accepted.sum())
        seconds = seconds_of[number] * steps * max(0.5, 1 + 0.1 * draw.standard_normal())
        choice.record(
            width,
            number,
            RowResults(
                width * steps, emitted, np.pad(accepted, (0, longest - len(accepted))).tolist()
            ),
            seconds=seconds,
            steps=steps,
        )
        tokens, spent, chosen = tokens + emitted, spent + seconds, [*chosen, number]
    return tokens / spent, chosen


def best_rate(chances: Sequence[float], width: int) -> float:
    columns = zip(DRAFTS, chances, costs(width), strict=True)
    rates = [tokens_of(draft, chance) / seconds for draft, chance, seconds in columns]
    return width * max(rates)


@pytest.mark.full
@pytest.mark.thorough_except("0-1", "0-4", "0-16", "0-64", "1-1", "1-4", "2-16", "3-64")
@pytest.mark.parametrize("width", [1, 4, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_as_fast_as_the_best_draft_at_every_load(width, seed) -> None:
    draw = random.Random(seed)
    chances = [draw.uniform(0.1, 0.95)] * 3 + [draw.uniform(0.1, 0.95)]
    rate, _ = simulate(
        DraftChoice(DRAFTS, seconds_by([width])), chances, width, calls=600, seed=seed
    )
    assert rate > 0.97 * best_rate(chances, width)


def test_it_is_as_fast_as_the_best_draft_when_loads_come_and_go() -> None:
    widths, chances, draw = (1, 4, 16, 64), [0.7] * 3 + [0.85], random.Random(0)
    choice = DraftChoice(DRAFTS, seconds_by(widths))
    loads = draw.choices(widths, k=60)
    rates = [
        simulate(choice, chances, width, calls=30, seed=period)[0]
        for period, width in enumerate(loads)
    ]
    assert sum(rates) > 0.97 * sum(best_rate(chances, width) for width in loads)


def test_the_same_calls_have_the_same_choices() -> None:
    first, again = (
        simulate(DraftChoice(DRAFTS, seconds_by([4])), [0.5] * 4, 4, calls=300, seed=1)
        for _ in range(2)
    )
    assert first == again
    assert set(first[1]) <= set(range(len(DRAFTS)))


def test_as_long_as_something_compiles_the_first_draft_that_is_ready_is_used() -> None:
    choice = DraftChoice(DRAFTS, {})
    assert [
        choice.choose(1, ready=ready, is_measuring=False) for ready in ([0], [0, 2], [0, 1, 2])
    ] == [0, 2, 1]
    # The first draft is measured first, because the others are compared with it.
    assert {choice.choose(1) for _ in range(3 * TRY_UNKNOWN)} == {0}
    for _ in range(5):  # calls without a measured time
        choice.record(1, 0, RowResults(8, 8, [0] * 7), seconds=None, steps=8)
    assert choice.seconds == {}


def test_where_all_draft_the_first_that_is_ready_is_used() -> None:
    choice = DraftChoice((Chain(3), Chain(7)), {})
    assert [choice.choose(1, ready=ready, is_measuring=False) for ready in ([0, 1], [1])] == [0, 1]


def test_seconds_that_may_be_too_many_are_better_than_none() -> None:
    """Check upper bounds of a call's time.

    Handing out texts may take longer than a call. Then the engine never learns when the device was
    done.
    """
    choice = DraftChoice(DRAFTS, {})
    chosen = []
    for _ in range(20 * TRY_UNKNOWN):
        chosen.append(choice.choose(1))
        tell(choice, 1, chosen[-1], 0.9, seconds=0.5, is_upper_bound=True)
    assert set(choice.seconds.values()) == {0.5}
    assert set(chosen) == {0, 1, 2, 3}
    tell(choice, 1, 0, 0.9, seconds=0.1)
    tell(choice, 1, 0, 0.9, seconds=0.9, is_upper_bound=True)  # does not replace a measurement
    assert choice.seconds[1, 0] < 0.5


def test_drafts_are_tried_once_in_a_while_until_their_seconds_are_known() -> None:
    choice, seconds = DraftChoice(DRAFTS, {}), costs(1)
    for slow in (10.0, 1.0):  # the slow first call of a program is not counted
        tell(choice, 1, 0, 0.5, seconds=slow * seconds[0])
    assert choice.seconds == {(1, 0): pytest.approx(seconds[0])}
    assert {
        choice.choose(1, ready=[0, 1, 2], is_measuring=False) for _ in range(3 * TRY_UNKNOWN)
    } == {0}
    chosen = []
    for _ in range(8 * TRY_UNKNOWN):
        chosen.append(choice.choose(1, ready=[0, 1, 2]))
        tell(choice, 1, chosen[-1], 0.9, seconds=seconds[chosen[-1]])
    assert set(choice.seconds) == {(1, 0), (1, 1), (1, 2)}
    assert set(chosen) == {0, 1, 2}  # the tree is not ready
    assert choice.choose(1, ready=[0, 1, 2]) != 0


# --- kinds of rows --------------------------------------------------------------------------------

THINKING, ANSWER, LONG_ANSWER = ("thinking", "256"), ("answer", "256"), ("answer", "1024")
CHANCES = {"thinking": 0.92, "answer": 0.15}


def survival_of(draft: DraftShape | None, chance: float, row_steps: int) -> np.ndarray:
    """Return how often a draft is accepted to each depth, on average; 0 beyond its own depth."""
    depth = depth_of(draft)
    return np.pad(row_steps * chance ** np.arange(1, depth + 1), (0, 7 - depth))


def record_kind(
    choice: DraftChoice, index: int, kind: RowGroup, chance: float, row_steps: int
) -> None:
    """Record the average result of a call whose rows are all of one kind."""
    accepted = survival_of(choice.drafts[index], chance, row_steps)
    emitted = round(row_steps + accepted.sum())
    results = RowResults(row_steps, emitted, accepted.tolist())
    choice.record(4, index, results, seconds=None, steps=STEPS, by_kind={kind: results})


@pytest.mark.parametrize("index", [2, 3])
def test_the_tokens_of_a_call_are_the_mean_over_its_rows(index: int) -> None:
    choice = DraftChoice(DRAFTS, seconds_by([4]))
    for _ in range(100):
        for kind in (THINKING, ANSWER):
            record_kind(choice, index, kind, CHANCES[kind[0]], 64)
    tokens = [tokens_of(DRAFTS[index], CHANCES[kind[0]]) for kind in (THINKING, ANSWER)]
    for kind, expected in zip((THINKING, ANSWER), tokens, strict=True):
        assert choice.tokens_a_step(index, row_kinds={kind: 3}) == pytest.approx(expected, rel=0.01)
    mixed = choice.tokens_a_step(index, drafting=0.5, row_kinds={THINKING: 1, ANSWER: 3})
    assert mixed == pytest.approx(1 + 0.5 * ((tokens[0] + 3 * tokens[1]) / 4 - 1), rel=0.01)
    assert min(tokens) < choice.tokens_a_step(index) < max(tokens)


def test_a_kind_with_few_steps_counts_as_its_region_and_a_new_region_as_all() -> None:
    choice = DraftChoice(DRAFTS, seconds_by([4]))
    for _ in range(100):
        record_kind(choice, 3, ANSWER, 0.25, 64)
    of_answers = choice.tokens_a_step(3, row_kinds={ANSWER: 1})
    assert choice.tokens_a_step(3, row_kinds={LONG_ANSWER: 1}) == pytest.approx(
        of_answers, rel=1e-3
    )
    assert choice.tokens_a_step(3, row_kinds={THINKING: 1}) == choice.tokens_a_step(3)
    before = choice.tokens_a_step(3, row_kinds={LONG_ANSWER: 1})
    estimates = []
    for _ in range(100):
        record_kind(choice, 3, LONG_ANSWER, 0.9, 8)
        estimates.append(choice.tokens_a_step(3, row_kinds={LONG_ANSWER: 1}))
    assert before < estimates[0] < tokens_of(TREE, 0.9) - 0.5
    assert estimates == sorted(estimates)
    assert estimates[-1] == pytest.approx(tokens_of(TREE, 0.9), rel=0.02)


def test_the_mean_of_a_kind_is_that_of_a_slow_oracle() -> None:
    """Compare with weights that are computed anew from all results."""
    draw, choice = np.random.default_rng(0), DraftChoice(DRAFTS, seconds_by([4]))
    results: dict[RowGroup, list[tuple[int, float]]] = {}
    for _ in range(40):
        kind = (THINKING, ANSWER, LONG_ANSWER)[draw.integers(3)]
        row_steps, chance = int(draw.integers(1, 60)), float(draw.random())
        record_kind(choice, 3, kind, chance, row_steps)
        emitted = round(row_steps + survival_of(TREE, chance, row_steps).sum())
        for group in (kind[:0], kind[:1], kind):
            results.setdefault(group, []).append((row_steps, emitted))

    def mean(group: RowGroup) -> float:
        expected, weight = tokens_of(TREE, 0.8) if not group else mean(group[:-1]), 16.0
        entries = [(4.0 if not group else weight, 0.0), *results[group]]
        ages = np.cumsum([steps for steps, _ in results[group]][::-1])[::-1]
        fades = np.exp(-np.append(ages, 0.0) / 400)
        steps = np.array([steps for steps, _ in entries])
        tokens = np.array([entries[0][0] * expected, *(tokens for _, tokens in entries[1:])])
        return float((fades * tokens).sum() / (fades * steps).sum())

    for kind in (THINKING, ANSWER, LONG_ANSWER):
        assert choice.tokens_a_step(3, row_kinds={kind: 2}) == pytest.approx(mean(kind))


def simulate_regions(seed: int, *, by_kind: bool, cycles: int = 12) -> tuple[float, list[list]]:
    """Run texts that think and answer in turn, and return tokens per second and the choices.

    With ``by_kind`` the choice knows the regions.
    """
    draw, choice = np.random.default_rng(seed), DraftChoice(DRAFTS, seconds_by([2]))
    tokens, spent, chosen = 0, 0.0, []
    for kind in [THINKING, ANSWER] * cycles:
        chosen.append([])
        for _ in range(15):
            index = choice.choose(2, row_kinds={kind: 2} if by_kind else None)
            depth = depth_of(DRAFTS[index])
            would_accept = draw.random((2 * STEPS, depth)) < CHANCES[kind[0]]
            accepted = np.pad(np.cumprod(would_accept, axis=1).sum(0), (0, 7 - depth))
            emitted = 2 * STEPS + int(accepted.sum())
            results = RowResults(2 * STEPS, emitted, accepted.tolist())
            seconds = STEPS * costs(2)[index]
            choice.record(
                2,
                index,
                results,
                seconds=seconds,
                steps=STEPS,
                by_kind={kind: results} if by_kind else None,
            )
            tokens, spent = tokens + emitted, spent + seconds
            chosen[-1].append(index)
    return tokens / spent, chosen


@pytest.mark.parametrize("seed", range(4))
def test_each_region_has_its_own_draft_at_once(seed: int) -> None:
    """Compare with the best draft of each region, and with one number of tokens for all regions."""
    rates = {
        region: [tokens_of(draft, chance) / costs(2)[i] for i, draft in enumerate(DRAFTS)]
        for region, chance in CHANCES.items()
    }
    best = {region: int(np.argmax(rates[region])) for region in rates}
    assert best["thinking"] != best["answer"]
    informed, chosen = simulate_regions(seed, by_kind=True)
    without, _ = simulate_regions(seed, by_kind=False)
    assert informed > 1.05 * without
    late = chosen[8:]
    for number, calls in enumerate(late):
        expected = best["answer" if number % 2 else "thinking"]
        assert calls[:3].count(expected) >= 2  # from the first calls of the region on
        assert calls.count(expected) >= 12


@pytest.mark.parametrize("second", [ANSWER, ("thinking", "1024")])
def test_a_draft_that_is_used_with_one_kind_is_tried_with_another(second: RowGroup) -> None:
    """Let the current draft of one kind be the worst of another, although it looks good there.

    What a draft was measured to do with other kinds must not keep others from being tried.
    """
    drafts = (StaticTree(complete_tree((3,))), TREE)
    choice = DraftChoice(drafts, {(1, 0): 0.010, (1, 1): 0.012})
    tokens = {(THINKING, 0): 1.9, (THINKING, 1): 1.2, (second, 0): 1.1, (second, 1): 3.0}
    chosen: dict[RowGroup, list[int]] = {THINKING: [], second: []}
    for kind in [THINKING] * 200 + [second, THINKING] * 100:
        index = choice.choose(1, row_kinds={kind: 1})
        emitted = round(STEPS * tokens[kind, index])
        results = RowResults(STEPS, emitted, [0.0] * 3)
        choice.record(1, index, results, seconds=None, steps=STEPS, by_kind={kind: results})
        chosen[kind].append(index)
    assert chosen[second][40:].count(1) >= 55
    assert chosen[THINKING][200:].count(0) >= 90


def test_first_trials_end_with_what_they_measure_or_after_a_few_calls() -> None:
    """Let no call of the new kind measure anything at first: the trials go on, but not forever."""
    choice = DraftChoice((StaticTree(complete_tree((3,))), TREE), {(1, 0): 0.010, (1, 1): 0.012})
    tried = {True: 0, False: 0}
    for kind, measures in [(THINKING, True)] * 100 + [(ANSWER, False)] * 200:
        index = choice.choose(1, row_kinds={kind: 1})
        results = RowResults(STEPS, round(STEPS * (1.9 - 0.7 * index)), [0] * 3)
        by_kind = {kind: results} if measures else {}
        choice.record(1, index, results, seconds=None, steps=STEPS, by_kind=by_kind)
        tried[measures] += index
    assert 2 <= tried[True] <= 4
    assert 6 <= tried[False] <= 12


# --- the parts of a union -------------------------------------------------------------------------

UNION = UnionTree((Chain(4), Chain(8)))
SPLITS = (None, UNION, *UNION.splits)


def split_seconds(drafting: float = 0.002) -> list[float]:
    """Return the seconds of a step with each of `SPLITS`.

    The first part takes ``drafting`` seconds for each of its levels, and a node takes 0.2 ms.
    """
    levels = [0, 4, 4, 1, 0]
    nodes = [0 if draft is None else draft.nodes - 1 for draft in SPLITS]
    return [0.01 + drafting * it + 0.0002 * n for it, n in zip(levels, nodes, strict=True)]


def call_of_parts(
    index: int, draw: np.random.Generator, chances: tuple[float, float], rows: int
) -> RowResults:
    """Return the results of a call in which each part follows the target with a chance of its own.

    A row's step accepts the longer of the parts' paths.
    """
    lengths = {1: (4, 8), 2: (4, 0), 3: (1, 8), 4: (0, 8)}.get(index, (0, 0))
    steps = rows * STEPS
    agreed = [
        np.cumprod(draw.random((steps, length)) < chance, axis=1).sum(1) if length else [0] * steps
        for length, chance in zip(lengths, chances, strict=True)
    ]
    accepted = np.max(agreed, axis=0)
    at = (np.arange(8) < accepted[:, None]).sum(0)
    return RowResults(
        steps, steps + int(accepted.sum()), at.tolist(), int(sum(agreed[0])), int(sum(agreed[1]))
    )


def simulate_parts(
    chances: tuple[float, float],
    *,
    drafting: float = 0.002,
    tells_parts: bool = True,
    calls: int = 400,
    seed: int = 0,
) -> tuple[float, Counter, DraftChoice]:
    """Return the tokens per second of a machine, and how often each of `SPLITS` was chosen."""
    draw, seconds = np.random.default_rng(seed), split_seconds(drafting)
    choice = DraftChoice(SPLITS, {(2, index): it for index, it in enumerate(seconds)})
    if not tells_parts:
        choice._shares = {}
    tokens, spent, chosen = 0, 0.0, Counter()
    for _ in range(calls):
        index = choice.choose(2, row_kinds={ANSWER: 2})
        results = call_of_parts(index, draw, chances, rows=2)
        time = STEPS * seconds[index]
        choice.record(2, index, results, seconds=time, steps=STEPS, by_kind={ANSWER: results})
        tokens, spent = tokens + results.emitted, spent + time
        chosen[index] += 1
    return tokens / spent, chosen, choice


def rate_of(index: int, chances: tuple[float, float]) -> float:
    draw = np.random.default_rng(9)
    results = call_of_parts(index, draw, chances, rows=2000)
    return 2 * results.emitted / results.row_steps / split_seconds()[index]


@pytest.mark.parametrize(
    ("chances", "best"),
    [
        ((0.7, 0.0), 2),  # the second part never offers what is accepted: the first alone
        ((0.05, 0.9), 4),  # it copies, and the first is no good: without the first
        ((0.0, 0.0), 0),  # nothing pays
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_split_of_a_union_is_the_fastest(
    chances: tuple[float, float], best: int, seed: int
) -> None:
    rates = [rate_of(index, chances) for index in range(len(SPLITS))]
    assert int(np.argmax(rates)) == best
    rate, chosen, _ = simulate_parts(chances, seed=seed)
    assert chosen.most_common(1)[0][0] == best
    assert rate > 0.95 * rates[best]


def test_a_call_with_a_union_measures_its_parts() -> None:
    """Compare with calls with the parts alone: the estimates agree, and no trial is needed."""
    chances, draw = (0.6, 0.4), np.random.default_rng(3)
    choice = DraftChoice(SPLITS, {(2, index): it for index, it in enumerate(split_seconds())})
    for _ in range(300):
        results = call_of_parts(1, draw, chances, rows=8)
        choice.record(2, 1, results, seconds=None, steps=STEPS, by_kind={ANSWER: results})
    for index in (2, 4):
        alone = call_of_parts(index, draw, chances, rows=4000)
        expected = alone.emitted / alone.row_steps
        assert choice.tokens_a_step(index) == pytest.approx(expected, rel=0.04)
        assert choice.tokens_a_step(index, row_kinds={ANSWER: 1}) == choice.tokens_a_step(index)
    assert choice.tokens_a_step(3) == DraftChoice(SPLITS, {}).tokens_a_step(3)  # not measured


def test_parts_are_not_tried_while_their_union_measures_them() -> None:
    """Let the union be the best, and compare with a choice that does not know of parts."""
    chances = (0.75, 0.75)
    informed, without = (
        simulate_parts(chances, drafting=0.0001, tells_parts=tells)[1] for tells in (True, False)
    )
    assert informed[1] > 300
    assert informed[2] + informed[4] <= 2
    assert without[2] + without[4] > 2


def test_a_chain_of_its_own_is_no_part_of_a_union_with_fewer_slots() -> None:
    cut = UnionTree((Chain(4), Chain(8)), (2, 8))
    choice = DraftChoice((None, cut, Chain(4)), {})
    before = choice.tokens_a_step(2)
    results = RowResults(80, 90, [10, *[0] * 7], by_first=0, by_others=10)
    choice.record(1, 1, results, seconds=None, steps=10)
    assert choice.tokens_a_step(2) == before


def test_a_chain_that_is_a_part_of_a_union_informs_other_chains_and_is_informed_by_them() -> None:
    """Check which measurements count: those of the union, or of chains since then."""
    drafts = (None, UNION, Chain(4), Chain(3))
    choice = DraftChoice(drafts, {})

    def of_union(chance: float) -> None:
        accepted = survival_of(Chain(4), chance, 64)
        total = int(accepted.sum())
        results = RowResults(64, 64 + total, accepted.tolist(), by_first=total, by_others=0)
        choice.record(1, 1, results, seconds=None, steps=8, by_kind={ANSWER: results})

    for row_kinds in (None, {ANSWER: 1}):
        before = choice.tokens_a_step(3, row_kinds=row_kinds)
        for _ in range(40):
            of_union(0.6)
        assert choice.tokens_a_step(2) == pytest.approx(tokens_of(Chain(4), 0.6), rel=0.02)
        assert choice.tokens_a_step(3, row_kinds=row_kinds) == before
        for _ in range(40):  # calls with the chain itself
            record_kind(choice, 2, ANSWER, 0.3, 64)
        for index in (2, 3):
            assert choice.tokens_a_step(index, row_kinds=row_kinds) == pytest.approx(
                tokens_of(drafts[index], 0.3), rel=0.02
            )
        for _ in range(40):
            of_union(0.9)
        assert choice.tokens_a_step(2) == pytest.approx(tokens_of(Chain(4), 0.9), rel=0.02)
        for _ in range(40):  # another chain, which says little about the last token of this one
            record_kind(choice, 3, ANSWER, 0.5, 64)
        first = tokens_of(Chain(3), 0.5)
        assert choice.tokens_a_step(2) == pytest.approx(first + 0.3**4, rel=0.02)
