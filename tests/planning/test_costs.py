"""Tests of measured costs, of the speed-ups predicted from them, and of the off switch."""

import jax
import numpy as np
import pytest

from specjax import decoding
from specjax.decoding.stats import Stats
from specjax.demo import inflate
from specjax.drafters import DraftModel, PromptLookup
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.evaluation import conformance
from specjax.planning import theory
from specjax.planning.costs import Costs, measure_costs, predicted_speedup, trial_key, trial_speedup
from specjax.sampling import Sampling
from tests.conftest import tiny_target

PROMPT = np.array([[1, 4, 2, 4, 2, 7]])
LARGE = {"hidden_size": 1024, "intermediate_size": 2560, "num_layers": 2}


def stats_of(*rows: tuple[list[int], int, int]) -> Stats:
    """Build statistics from ``(emitted in each step, drafted, nodes scored)`` of each row.

    Drafted tokens and scored nodes are those of all the row's steps.
    """
    histogram = np.array([np.bincount(emitted, minlength=6) for emitted, _, _ in rows])
    zeros = np.zeros((len(rows), 4), int)
    drafted_at = zeros + np.array([[row[1], 0, 0, 0] for row in rows])  # only their sum matters
    steps = np.array([len(emitted) for emitted, _, _ in rows])
    drafted, scored = np.array([row[1] for row in rows]), np.array([row[2] for row in rows])
    accepted = histogram @ np.arange(6) - steps
    no_parts = [zeros[:, :0]] * 3
    return Stats(steps, drafted, accepted, scored, drafted_at, zeros, histogram, *no_parts)


def test_the_prediction_is_magicdecs_quotient() -> None:
    costs = Costs(verify={1: 0.010, 5: 0.014}, draft_time=0.001)
    stats = stats_of(([5, 2, 1, 4], 16, 20))
    expected = theory.speedup_from_times(0.010, 0.001, 0.014, gamma=4, tokens=3.0)
    assert predicted_speedup(costs, stats) == pytest.approx(expected)
    assert predicted_speedup(costs, stats, stats) == pytest.approx(expected)


def test_the_slowest_row_of_a_batch_decides() -> None:
    costs = Costs(verify={1: 1.0, 3: 2.0}, draft_time=0.5)
    stats = stats_of(([3, 3], 4, 6), ([1, 1, 2, 2], 8, 12))
    assert predicted_speedup(costs, stats) == pytest.approx(6 * 1.0 / (8 * 0.5 + 4 * 2.0))


def test_a_dynamic_tree_is_charged_all_its_levels() -> None:
    """Check it for a tree whose remaining nodes lie on fewer levels than were drafted."""
    costs = Costs(verify={1: 1.0, 4: 2.0}, draft_time=0.5, levels=3)
    stats = stats_of(([2, 2], 4, 8))
    assert predicted_speedup(costs, stats) == pytest.approx(4 * 1.0 / (2 * 3 * 0.5 + 2 * 2.0))


def test_between_measured_widths_lies_a_line() -> None:
    costs = Costs(verify={1: 1.0, 3: 2.0, 9: 5.0}, draft_time=0.0)
    assert costs.verification(6) == pytest.approx(3.5)


@pytest.mark.thorough
def test_costs_grow_with_the_model() -> None:
    small = tiny_target()
    large = inflate(small, **LARGE)
    drafter = DraftModel(small, draft=Chain(3, stop_below=0.5))
    costs = measure_costs(large, drafter, batch=2, context=8, repeats=3)
    assert set(costs.verify) == {1, *drafter.node_counts}
    assert costs.target == costs.verify[1]
    assert costs.target > 3 * measure_costs(small, None, batch=2, context=8, repeats=3).target
    assert 0 < costs.draft_time < costs.target / 3
    assert measure_costs(large, PromptLookup(), context=8, repeats=1).draft_time < costs.target / 3


def test_a_context_beyond_the_positions_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"context=2000: .* 512 positions of target and drafter"):
        measure_costs(tiny_target(), None, context=2000)


@pytest.mark.thorough  # tests/cli/test_main.py tests the switch through the command line
def test_the_off_switch_tells_a_good_drafter_from_a_bad_one() -> None:
    """Compare a drafter that is always right with one that is never right.

    The good one computes the target's function at a hundredth of its cost. The bad one is another
    model of the target's size.
    """
    small = tiny_target()
    large = inflate(small, **LARGE)
    good = DraftModel(small, draft=Chain(4))
    bad = DraftModel(inflate(tiny_target(seed=7), **LARGE), draft=Chain(4))
    assert decoding.generate(large, good, PROMPT, max_new_tokens=20).stats.accepted[0] == 16
    assert trial_speedup(large, good, PROMPT) > 1
    assert trial_speedup(large, bad, PROMPT) < 1


@pytest.mark.thorough
def test_choosing_by_a_trial_leaves_the_text_alone() -> None:
    """Check that texts chosen by their trials are distributed as all texts are.

    The chosen ones are the generations whose trial accepted many tokens. If the trial has the key
    of the generation itself, the same choice is biased, because it depends on the text.
    """
    sizes = {
        "vocab_size": 4,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 2,
        "num_kv_heads": 1,
    }
    target = tiny_target(seed=2, num_layers=1, **sizes)
    drafter = DraftModel(tiny_target(seed=5, num_layers=1, **sizes), draft=Chain(2))
    prompt, rows = np.array([1, 3, 0, 1]), 50_000
    keys = jax.random.split(jax.random.key(0), rows)

    def run(keys):
        return decoding.generate(
            target,
            drafter,
            np.tile(prompt, (rows, 1)),
            max_new_tokens=3,
            sampling=Sampling(),
            key=keys,
        )

    text = run(keys)
    joint = text.tokens[:, len(prompt) :] @ np.array([16, 4, 1])
    exact = conformance.exact_joint(target, prompt, 3, Sampling())
    for trial, biased in ((run(jax.vmap(trial_key)(keys)), False), (text, True)):
        chosen = trial.stats.accepted > np.mean(trial.stats.accepted)
        p_value = conformance.g_test(np.bincount(joint[chosen], minlength=64), exact)
        assert (p_value < conformance.FALSE_ALARM) == biased
