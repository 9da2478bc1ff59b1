"""Layers with a window see that window alone, in one pass and behind a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import tiny_target

WINDOW, LENGTH = 3, 8


@pytest.mark.parametrize("cached", [0, LENGTH - 1])
def test_the_newest_token_sees_itself_and_the_two_before_it_and_no_more(cached) -> None:
    """The model has one layer, so that the newest token sees what it sees directly."""
    target = tiny_target(num_layers=1, sliding_window=WINDOW, windowed_layers=(0,))
    text = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    texts = np.stack(
        [text, *(np.where(np.arange(LENGTH) == position, 9, text) for position in range(LENGTH))]
    )

    @jax.jit
    def newest(tokens: jax.Array) -> jax.Array:
        if not cached:
            return target.forward(tokens)[0].logits[:, -1]
        cache = target.commit(tokens[:, :cached], target.new_cache(len(texts), LENGTH))[1]
        positions = jnp.full((len(texts), 1), cached)
        output, _ = target.score(tokens[:, cached:], cache, positions=positions)
        return output.logits[:, -1]

    logits = np.asarray(newest(jnp.asarray(texts)))
    differs = [np.abs(changed - logits[0]).max() > 1e-3 for changed in logits[1:]]
    assert differs == [position > LENGTH - 1 - WINDOW for position in range(LENGTH)]
