"""Tests of the choice of a draft, on pairs of target and drafter whose best draft is known."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from specjax import decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import DraftModel, PromptLookup
from specjax.drafts.shapes import Chain, DynamicTree, StaticTree
from specjax.planning import choice, theory
from specjax.planning.choice import (
    DraftComparison,
    TrialAcceptance,
    compare_drafts,
    measure_acceptance,
)
from specjax.planning.costs import Costs
from specjax.sampling import Sampling, probabilities
from tests.conftest import tiny_target

PROMPTS = np.array([[1, 4, 2, 4, 2, 7], [5, 9, 10, 3, 1, 0]])


def with_costs(monkeypatch, verify_time, draft_time) -> None:
    """Replace the measured times: T_V by a function of the nodes, T_D by one of the width.

    Times are in seconds. The width is the number of nodes that a drafter reads together.
    """

    def measured(target, drafter, *, nodes=(), **_):
        counts = sorted({1, *drafter.node_counts, *nodes})
        return Costs(
            verify={count: verify_time(count) for count in counts},
            draft_time=draft_time(drafter.draft_shape.width),
        )

    monkeypatch.setattr(choice, "measure_costs", measured)


@pytest.mark.thorough
def test_where_nothing_costs_more_than_a_node_the_answer_is_plain(monkeypatch) -> None:
    with_costs(monkeypatch, verify_time=float, draft_time=lambda width: 0.5)
    drafter = DraftModel(tiny_target(seed=5, num_layers=1))
    comparison = compare_drafts(tiny_target(), drafter, PROMPTS, longest=4, nodes=9)
    assert comparison.best.draft is None
    assert comparison.best.speedup == 1.0


@pytest.mark.full
def test_a_perfect_drafter_is_given_the_longest_chain(monkeypatch) -> None:
    with_costs(monkeypatch, verify_time=lambda n: 1.0, draft_time=lambda width: 0.01)
    comparison = compare_drafts(
        tiny_target(), DraftModel(tiny_target()), PROMPTS, longest=4, nodes=9
    )
    # The limit cuts the last step of a trial short.
    np.testing.assert_allclose(comparison.acceptance.survival, 1.0, atol=0.02)
    assert comparison.acceptance.by_rank[0] == pytest.approx(1.0, abs=0.02)
    assert comparison.best.draft == Chain(4)
    assert comparison.best.speedup == pytest.approx(5 / 1.04, rel=0.02)


@pytest.mark.thorough
def test_a_second_best_that_is_often_right_asks_for_a_tree(monkeypatch) -> None:
    with_costs(monkeypatch, verify_time=lambda n: 1.0, draft_time=lambda width: 0.01)
    drafter = DraftModel(tiny_target(seed=5, num_layers=1))
    comparison = compare_drafts(tiny_target(), drafter, PROMPTS, longest=4, nodes=17)
    assert isinstance(comparison.best.draft, StaticTree)
    best = max(
        theory.tree_tokens(comparison.acceptance.by_rank, tree)
        for tree in theory.best_trees(comparison.acceptance.by_rank, 17, 4).values()
    )
    assert comparison.best.tokens == pytest.approx(best, rel=0.05)
    # The engine itself emits as much with the chosen tree.
    result = decoding.generate(
        tiny_target(), replace(drafter, draft=comparison.best.draft), PROMPTS, max_new_tokens=300
    )
    steps = float(np.asarray(result.stats.steps).sum())
    emitted = float(np.asarray(result.lengths).sum() - PROMPTS.size) / steps
    assert emitted == pytest.approx(comparison.best.tokens, rel=0.35)


def test_a_dynamic_tree_that_emits_most_is_chosen_for_what_it_costs(monkeypatch) -> None:
    with_costs(
        monkeypatch, verify_time=lambda n: 1.0 + n / 100, draft_time=lambda width: 0.01 * width
    )
    tree, drafter = DynamicTree(4, 3, 13), DraftModel(tiny_target(seed=5, num_layers=1))
    chances = {
        "survival": (0.7, 0.5, 0.4),
        "by_rank": (0.7, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        "sampled": {},
    }

    def compared(emitted: float, nodes: int = 33) -> DraftComparison:
        acceptance = TrialAcceptance(**chances, dynamic={tree: emitted})
        return compare_drafts(tiny_target(), drafter, PROMPTS, acceptance=acceptance, nodes=nodes)

    best = compared(3.9).best
    assert best.draft == tree
    assert best.seconds == pytest.approx(3 * 0.04 + 1.13)  # 3 levels of 4 nodes; 13 scored
    assert best.speedup == pytest.approx(3.9 * 1.01 / best.seconds)
    assert compared(1.5).best.draft != tree
    smaller = compared(3.9, nodes=9).candidates
    assert tree not in [candidate.draft for candidate in smaller]


def test_two_dynamic_trees_are_tried_as_deep_as_chains_survive() -> None:
    shapes = choice._dynamic_trees((0.9, 0.6, 0.5, 0.19, 0.1), vocab=11)
    assert shapes == [DynamicTree(4, 3, 13), DynamicTree(8, 3, 33)]
    assert choice._dynamic_trees((0.1, 0.0, 0.0), vocab=11)[0].depth == 2
    assert choice._dynamic_trees((0.9,) * 20, vocab=6) == [DynamicTree(4, 20, 21)]
    assert choice._dynamic_trees((0.9,), vocab=11) == []  # with one level a static tree does


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_dynamic_tree_emits_is_what_the_engine_emits_with_it(temperature) -> None:
    target, drafter = tiny_target(), DraftModel(tiny_target(seed=5, num_layers=1))
    sampling, prompts = Sampling(temperature=temperature), np.tile(PROMPTS, (50, 1))
    options = GenerationOptions(max_new_tokens=60, sampling=sampling)
    estimates = measure_acceptance(target, drafter, prompts, options=options, longest=3).dynamic
    assert len(estimates) == 2
    for shape, emitted in estimates.items():
        keys = jax.random.split(jax.random.key(9), len(prompts))
        result = decoding.generate(
            target,
            replace(drafter, draft=shape),
            prompts,
            max_new_tokens=60,
            sampling=sampling,
            key=keys,
        )
        steps = float(np.asarray(result.stats.steps).sum())
        accepted = float(np.asarray(result.stats.accepted).sum())
        assert emitted == pytest.approx(1 + accepted / steps, rel=0.1)


@pytest.mark.full
def test_a_rule_of_chains_is_asked_about_chains_alone() -> None:
    drafter = DraftModel(tiny_target(seed=5, num_layers=1))
    options = GenerationOptions(sampling=Sampling(), rule="block")
    acceptance = measure_acceptance(tiny_target(), drafter, PROMPTS, options=options, longest=1)
    assert (
        len(acceptance.survival),
        acceptance.by_rank,
        acceptance.sampled,
        acceptance.dynamic,
    ) == (1, (), {}, {})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("temperature", "rule", "tolerance"),
    [
        (0.0, None, 0.08),
        (1.0, "independent", 0.04),
        (1.0, "coupled", 0.04),
    ],
)
def test_chances_by_rank_are_those_of_the_models(temperature, rule, tolerance) -> None:
    """Compare the chances with the two models' own distributions where drafts began.

    Greedy texts repeat themselves, so their tolerance is wider.
    """
    target, drafter = tiny_target(), DraftModel(tiny_target(seed=5, num_layers=1))
    sampling = Sampling(temperature=temperature)
    prompts = np.tile(PROMPTS, (100, 1))
    acceptance = measure_acceptance(
        target,
        drafter,
        prompts,
        options=GenerationOptions(max_new_tokens=300, sampling=sampling, rule=rule),
        longest=3,
    )
    by_rank = acceptance.by_rank
    assert bool(acceptance.sampled) == (temperature > 0 and rule != "coupled")
    assert sum(by_rank) <= 1
    result = decoding.generate(
        target,
        None,
        prompts,
        max_new_tokens=60,
        sampling=sampling,
        key=jax.random.split(jax.random.key(7), len(prompts)),
    )
    forward = jax.jit(lambda model, tokens: model.forward(tokens)[0].logits)
    p = np.asarray(probabilities(forward(target, result.tokens), sampling.rows(len(prompts))))
    q = np.asarray(forward(drafter.model, result.tokens))
    if rule == "coupled":
        # Both use the same noise: count how the drafter ranks the token that the target draws.
        noise = np.random.default_rng(0).gumbel(size=q.shape)
        p = np.eye(q.shape[-1])[np.argmax(np.log(p) + noise, axis=-1)]
        q = q + noise
    order = np.argsort(-q, axis=-1, kind="stable")[..., :8]
    expected = np.take_along_axis(p, order, axis=-1)[:, PROMPTS.shape[1] - 1 : -1].mean(axis=(0, 1))
    np.testing.assert_allclose(by_rank, expected, atol=tolerance)


@pytest.mark.full
def test_prompt_lookup_is_offered_chains_alone(monkeypatch) -> None:
    with_costs(monkeypatch, verify_time=lambda n: 1.0, draft_time=lambda width: 0.01)
    comparison = compare_drafts(tiny_target(), PromptLookup(), PROMPTS, longest=3)
    assert comparison.acceptance.by_rank == () and comparison.acceptance.dynamic == {}
    assert {type(candidate.draft) for candidate in comparison.candidates} == {type(None), Chain}


@pytest.mark.thorough
def test_close_to_the_last_position_drafts_are_cut_and_then_given_up(monkeypatch) -> None:
    with_costs(monkeypatch, verify_time=lambda n: 1.0, draft_time=lambda width: 0.01)
    target = tiny_target(max_positions=64)
    drafter = DraftModel(tiny_target(seed=5, num_layers=1))
    for room, deepest in ((4, 3), (1, 0)):
        prompts = np.tile(PROMPTS, (1, 11))[:, : 64 - room]
        comparison = compare_drafts(target, drafter, prompts)
        drafts = [candidate.draft for candidate in comparison.candidates if candidate.draft]
        assert max((draft.depth for draft in drafts), default=0) == deepest


@pytest.mark.thorough
def test_a_trial_generates_no_more_than_it_may(monkeypatch) -> None:
    with_costs(monkeypatch, verify_time=lambda n: 1.0, draft_time=lambda width: 0.01)
    trial_options = []
    options = GenerationOptions(max_new_tokens=9, eos_token_ids=(3,))
    start = decoding.start
    monkeypatch.setattr(decoding, "start", lambda *a: trial_options.append(a[4]) or start(*a))
    compare_drafts(tiny_target(), DraftModel(tiny_target()), PROMPTS, options=options, longest=2)
    assert {(trial.max_new_tokens, trial.eos_token_ids) for trial in trial_options} == {(9, (3,))}
