"""Run the conformance suite for a target with each kind of layer, with a few drafters.

`tests.evaluation.test_conformance_of_hybrids` has every drafter for layers of the delta rule.
"""

import jax.numpy as jnp
import pytest

from specjax.drafters import DraftModel, PromptLookup
from specjax.evaluation import conformance
from specjax.models import sparse_attention
from specjax.models.states import State
from tests.conftest import BESIDE_ATTENTION, SHAPES, SPARSE, tiny_target
from tests.evaluation import test_conformance_of_hybrids as of_hybrids
from tests.models.test_models_with_states import MODELS

WITH_STATES = {
    name: changes | {"scale": 4.0}
    for name, changes in {**MODELS, "mamba2 beside attention": BESIDE_ATTENTION}.items()
}
KINDS = WITH_STATES | {"indexer": SPARSE}
"""Changes of `tiny_target`. The texts are longer than what the indexer selects."""

DRAFTERS = {
    "prompt lookup": lambda kind: PromptLookup(draft=SHAPES["chain"]),
    "draft model": lambda kind: DraftModel(
        tiny_target(seed=5, **KINDS[kind]), draft=SHAPES["chain"]
    ),
    "draft model, tree": lambda kind: DraftModel(
        tiny_target(seed=5, **KINDS[kind]), draft=SHAPES["dynamic"]
    ),
    "itself, tree": lambda kind: DraftModel(tiny_target(**KINDS[kind]), draft=SHAPES["sampled"]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_keeps_its_contract(kind, name) -> None:
    conformance.check(tiny_target(**KINDS[kind]), DRAFTERS[name](kind), come_and_go=False)


@pytest.mark.full
@pytest.mark.thorough_except("mamba2-prompt lookup")
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_may_come_and_go(kind, name) -> None:
    conformance.check_rows_that_come_and_go(tiny_target(**KINDS[kind]), DRAFTERS[name](kind))


# --- memories that are wrong ----------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kind", WITH_STATES)
@pytest.mark.usefixtures("compiled_anew")
def test_a_state_that_takes_more_than_was_accepted_changes_the_text(monkeypatch, kind) -> None:
    monkeypatch.setattr(State, "append", of_hybrids.writes_a_rejected_node(State.append))
    with pytest.raises(AssertionError, match=r"greedy tokens .* are not plain decoding's"):
        conformance.check_greedy(tiny_target(**KINDS[kind]), DRAFTERS["draft model"](kind))


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled_anew")
def test_nodes_that_select_among_other_branches_change_the_text(monkeypatch) -> None:
    scores_of = sparse_attention._visible_scores

    def in_order(score, piece, queries):
        if isinstance(piece, tuple) and piece[1] is not None and piece[1].shape[-1] == queries:
            piece = piece[0], jnp.tril(jnp.ones((1, queries, queries), bool))
        return scores_of(score, piece, queries)

    monkeypatch.setattr(sparse_attention, "_visible_scores", in_order)
    with pytest.raises(AssertionError, match=r"greedy tokens .* are not plain decoding's"):
        conformance.check_greedy(tiny_target(**SPARSE), DRAFTERS["draft model, tree"]("indexer"))
