"""Tests of rows that speculate less than their neighbours: the same texts and distributions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import specjax
from specjax import conformance, decoding
from specjax.drafters import Drafter, DraftModel, EarlyExit, NoDraft, PromptLookup, Together
from specjax.drafters.wrapper import Wrapper
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError
from tests.conftest import FEW_TOKENS, SHAPES, compilations, outputs, tiny_target
from tests.decoding.test_loop import LENGTHS, NAMES, NEW, PROMPTS, drafters

WISHES = ["off", 1, None]


def test_limits_may_be_an_array() -> None:
    options = decoding.GenerationOptions(speculation=np.array([0, 2]))
    limits = options.draft_limits(batch=2, draft=SHAPES["chain"])
    assert limits is not None
    assert limits.tolist() == [0, 2]


def several() -> Together:
    """Return drafters that draft together. A limit leaves gaps among the nodes of their union."""
    return Together((EarlyExit(layers=1, draft=SHAPES["static"]), PromptLookup(draft=4)))


@pytest.mark.full
@pytest.mark.thorough_except("draft model")
@pytest.mark.parametrize("name", [*NAMES, "together"])
def test_every_row_has_its_own_text_and_its_own_limit(target, name) -> None:
    drafter = several() if name == "together" else drafters()[name]
    arguments = target, drafter, PROMPTS, LENGTHS
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_ids": ()}
    free = specjax.generate(*arguments, **options)
    limited = specjax.generate(*arguments, **options, speculation=WISHES)
    assert outputs(limited) == outputs(free)
    assert limited.stats.drafted[0] == 0
    assert limited.stats.steps[0] == NEW
    assert not limited.stats.accepted_at[1, 1:].any()
    # What a row may draft does not change what its neighbour drafts.
    np.testing.assert_array_equal(limited.stats.accepted_at[2], free.stats.accepted_at[2])


def test_no_row_drafts_where_all_are_off(target) -> None:
    options = decoding.GenerationOptions(max_new_tokens=8, speculation="off")
    drafter, state = decoding.start(
        target, drafters()["prompt lookup"], PROMPTS, LENGTHS, options=options
    )
    assert isinstance(drafter, NoDraft)
    assert state.draft_limits is None
    # Another row of a mixed state may draft.
    drafter, state = decoding.start(
        target, drafters()["prompt lookup"], PROMPTS, LENGTHS, options=options, mixed=True
    )
    assert not isinstance(drafter, NoDraft)
    assert state.draft_limits is not None
    assert state.draft_limits.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        (["off"], "speculation: 1 of them; give one, or one for each of the 3 rows"),
        (
            "chain:9",
            "speculation='chain:9': give auto, off, a largest depth such as 2, chain:3",
        ),
    ],
)
def test_what_does_not_fit_is_refused(target, speculation, message) -> None:
    with pytest.raises(InputError, match=message):
        specjax.generate(
            target, drafters()["prompt lookup"], PROMPTS, LENGTHS, speculation=speculation
        )


@pytest.mark.full
def test_other_limits_compile_nothing(target) -> None:
    arguments = target, drafters()["prompt lookup"], PROMPTS, LENGTHS
    specjax.generate(*arguments, max_new_tokens=8, speculation=WISHES)
    before = compilations()
    specjax.generate(*arguments, max_new_tokens=8, speculation=[2, "off", "off"])
    assert compilations() == before


@pytest.mark.full
def test_a_request_with_a_limit_takes_the_place_of_a_row(target) -> None:
    drafter = drafters()["prompt lookup"]
    sizes = {"capacity": 32}

    def start(count: int, speculation: Any) -> tuple[Drafter, Any]:
        options = decoding.GenerationOptions(
            max_new_tokens=NEW, eos_token_ids=(), speculation=speculation
        )
        return decoding.start(
            target, drafter, PROMPTS[:count], LENGTHS[:count], options=options, **sizes
        )

    started, state = start(2, WISHES[1:])
    _, unlimited = start(1, None)
    state = decoding.insert(state, unlimited, row=0)
    assert state.draft_limits[0] > 10**9
    done = decoding.decode(target, started, state, max_steps=100)
    assert done.stats.drafted[0] > done.stats.steps[0]
    _, without = start(2, None)
    _, limited = start(1, [1])
    with pytest.raises(InputError, match="the state has no room for limits"):
        decoding.insert(without, limited, row=0)


@struct.dataclass
class LimitedByRow(Wrapper[Any]):
    """A drafter whose rows have the limits 0, 1 and 9 in turn."""

    drafter: Drafter

    @property
    def draft(self) -> DraftShape:
        return self.drafter.draft_shape

    def own_state(self, state: Any) -> Any:
        return state

    def with_own(self, state: Any, own: Any) -> Any:
        return own

    def start(self, target, batch, capacity):
        return self.drafter.start(target, batch, capacity)

    def propose(self, target, state, root, sampling, keys, active, **cache):
        draft, state = super().propose(target, state, root, sampling, keys, active, **cache)
        return draft.limited(jnp.resize(jnp.array([0, 1, 9]), root.shape[0])), state


@pytest.mark.full
@pytest.mark.thorough_except("chain-rejection-25000")
@pytest.mark.parametrize("draws", [25_000, pytest.param(1_000_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("shape", "rule"),
    [("chain", "rejection"), ("chain", "block"), ("sampled", "independent")],
)
def test_the_distribution_is_exact_with_limits(shape, rule, draws) -> None:
    few = tiny_target(seed=2, **FEW_TOKENS)
    model = tiny_target(seed=5, num_layers=1, **FEW_TOKENS)
    drafter = LimitedByRow(DraftModel(model, draft=SHAPES[shape]))
    conformance.check_distribution(few, drafter, rule=rule, draws=draws)


def test_the_last_node_may_follow_a_gap() -> None:
    draft = specjax.drafters.Draft.of_tree(jnp.array([[7, 2, 5, 3]] * 3), np.array([-1, 0, 1, 0]))
    draft = draft.replace(offered_by=jnp.ones((3, 4, 1), bool).at[:, 0].set(False))
    limited = draft.limited(jnp.array([0, 1, 2]))
    assert limited.last.tolist() == [0, 3, 3]
    assert limited.offered_by[..., 0].sum(axis=1).tolist() == [0, 2, 3]
    assert limited.length.tolist() == [0, 2, 3]


def test_a_node_below_the_limit_is_no_node() -> None:
    draft = specjax.drafters.Draft.of_tree(jnp.array([[7, 2, 5, 3]] * 3), np.array([-1, 0, 0, 1]))
    limited = draft.limited(jnp.array([0, 1, 2]))
    assert limited.valid.tolist() == [
        [True, False, False, False],
        [True, True, True, False],
        [True, True, True, True],
    ]
    assert limited.drafted_at.tolist() == [[False, False], [True, False], [True, True]]
    grown = specjax.drafters.Draft.of_tree(
        draft.tokens, jnp.tile(jnp.array([-1, 0, 0, 1]), (3, 1)), levels=2
    )
    np.testing.assert_array_equal(grown.limited(jnp.array([0, 1, 2])).valid, limited.valid)
    assert isinstance(limited.valid, jax.Array)
