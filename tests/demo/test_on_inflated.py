"""Check that a small target's drafter drafts the same on an inflated copy of the target."""

import jax
import numpy as np
import pytest

import specjax
from specjax.demo import OnInflated, inflate
from specjax.drafters import Eagle3, EarlyExit, Gemma4Assistant, MixtureOfAttentions
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from tests.conftest import outputs, tiny_target

SMALL = tiny_target()
INNER = {
    "features": Eagle3.init(SMALL, jax.random.key(0), Chain(3), taps=(0, 1, 2)),
    "keys, values and the last layer": MixtureOfAttentions.init(
        SMALL, jax.random.key(0), Chain(3), tli=1
    ),
    "the first layer": EarlyExit(layers=1, draft=Chain(3)),
    "the last layer's keys and values": Gemma4Assistant.init(SMALL, jax.random.key(0), Chain(3)),
}


THOROUGH = pytest.param("keys, values and the last layer", marks=pytest.mark.thorough)


@pytest.mark.full
@pytest.mark.parametrize(
    "reads", ["features", THOROUGH, "the first layer", "the last layer's keys and values"]
)
def test_it_drafts_as_on_the_small_target(reads) -> None:
    small, inner = SMALL, INNER[reads]
    inflated = inflate(small, hidden_size=24, intermediate_size=32, num_layers=3)
    prompts = np.array([[1, 4, 2, 4], [5, 9, 10, 3]])
    ours = specjax.generate(small, inner, prompts, max_new_tokens=24)
    theirs = specjax.generate(inflated, OnInflated.of(inner, small), prompts, max_new_tokens=24)
    assert outputs(ours) == outputs(theirs)
    np.testing.assert_array_equal(ours.stats.accepted_at, theirs.stats.accepted_at)
    assert ours.stats.accepted.sum() > 0


@pytest.mark.full
def test_what_cannot_have_been_inflated_is_refused() -> None:
    small = tiny_target()
    inner = Eagle3.init(small, jax.random.key(0), Chain(3))
    for change, message in [
        ({"hidden_size": 8}, "hidden_size=8 cannot have been inflated from 16"),
        ({"num_layers": 1}, "num_layers=1 cannot have been inflated from 2"),
        ({"num_kv_heads": 1}, "num_kv_heads=1 cannot have been inflated from 2"),
        ({"head_dim": 8}, "head_dim=8, but the small target's is 4"),
        ({"vocab_size": 12}, "vocab_size=12, but the small target's is 11"),
    ]:
        with pytest.raises(InputError, match=message):
            OnInflated.of(inner, small).check(tiny_target(**change))
