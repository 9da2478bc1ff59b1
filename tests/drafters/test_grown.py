"""A drafter of a small target on a grown copy of it: the same drafts, and the same text."""

import jax
import numpy as np
import pytest

import specjax
from specjax.drafters import Eagle3, EarlyExit, MixtureOfAttentions, OnGrown
from specjax.errors import InputError
from specjax.models.growth import grow
from specjax.tree import Chain
from tests.conftest import outputs, tiny_target

SMALL = tiny_target()
INNER = {
    "features": Eagle3.init(SMALL, jax.random.key(0), Chain(3), taps=(0, 1, 2)),
    "keys, values and the last layer": MixtureOfAttentions.init(SMALL, jax.random.key(0), Chain(3), tli=1),
    "the first layer": EarlyExit(layers=1, draft=Chain(3)),
}


@pytest.mark.parametrize("reads", list(INNER))
def test_it_drafts_as_on_the_small_target(reads) -> None:
    small, inner = SMALL, INNER[reads]
    grown = grow(small, hidden_size=24, intermediate_size=32, num_layers=3)
    prompts = np.array([[1, 4, 2, 4], [5, 9, 10, 3]])
    ours = specjax.generate(small, inner, prompts, max_new_tokens=24)
    theirs = specjax.generate(grown, OnGrown.of(inner, small), prompts, max_new_tokens=24)
    assert outputs(ours) == outputs(theirs)
    np.testing.assert_array_equal(ours.stats.accepted_at, theirs.stats.accepted_at)
    assert ours.stats.accepted.sum() > 0


def test_what_cannot_have_grown_is_refused() -> None:
    small = tiny_target()
    inner = Eagle3.init(small, jax.random.key(0), Chain(3))
    for change, message in [
        ({"hidden_size": 8}, "hidden_size=8 cannot have grown from 16"),
        ({"num_layers": 1}, "num_layers=1 cannot have grown from 2"),
        ({"num_kv_heads": 1}, "num_kv_heads=1 cannot have grown from 2"),
        ({"head_dim": 8}, "head_dim=8, and the small target's is 4"),
        ({"vocab_size": 12}, "vocab_size=12, and the small target's is 11"),
    ]:
        with pytest.raises(InputError, match=message):
            OnGrown.of(inner, small).check(tiny_target(**change))
