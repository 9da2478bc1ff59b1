import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cache import KVCache, visible_slots, write

B, S = 3, 8


def filled(length) -> KVCache:
    """A cache whose slot s of row b holds the number 100 b + s everywhere."""
    cache = KVCache.create(layers=2, batch=B, capacity=S, kv_heads=1, head_dim=2)
    content = jnp.broadcast_to((100.0 * jnp.arange(B)[:, None] + jnp.arange(S))[..., None, None], (B, S, 1, 2))
    return KVCache(layers=tuple((content, -content) for _ in cache.layers), length=jnp.asarray(length))


def test_keeping_a_chain_moves_nothing() -> None:
    cache = filled([0, 2, 4])
    kept = cache.keep(None, jnp.array([1, 0, 3]))
    np.testing.assert_array_equal(kept.length, [1, 2, 7])
    assert kept.layers[0][0] is cache.layers[0][0]


def test_keeping_a_path_moves_it_below_the_new_length() -> None:
    cache = filled([0, 2, 4])
    path = jnp.array([[0, 2, 5], [0, 3, 4], [0, 1, 3]])
    kept = cache.keep(path, jnp.array([3, 2, 0]))
    np.testing.assert_array_equal(kept.length, [3, 4, 4])
    for keys, values in kept.layers:
        np.testing.assert_array_equal(keys[0, :3, 0, 0], [0, 2, 5])
        np.testing.assert_array_equal(keys[1, :4, 0, 0], [100, 101, 102, 105])
        np.testing.assert_array_equal(keys[2, :, 0, 0], 200 + np.arange(S))  # count 0: as it was
        np.testing.assert_array_equal(values, -keys)


def test_writing_beyond_the_capacity_is_dropped_and_touches_no_other_row() -> None:
    buffer = jnp.zeros((B, S, 1, 2))
    new = jnp.arange(1.0, 4.0)[None, :, None, None] * jnp.ones((B, 3, 1, 2))
    written = write(buffer, new, jnp.array([0, 6, 9]))[..., 0, 0]
    np.testing.assert_array_equal(written[0], [1, 2, 3, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(written[1], [0, 0, 0, 0, 0, 0, 1, 2])
    np.testing.assert_array_equal(written[2], np.zeros(S))


def visible_oracle(length: int, mask: np.ndarray) -> np.ndarray:
    count = len(mask)
    visible = np.zeros((count, S), bool)
    for t in range(count):
        for s in range(S):
            visible[t, s] = s < length or (s - length < count and mask[t, s - length])
    return visible


@pytest.mark.parametrize("kind", ["causal", "shared", "per row"])
def test_visible_slots(kind) -> None:
    length, count = [0, 3, 6], 4
    rng = np.random.default_rng(0)
    causal = np.tril(np.ones((count, count), bool))
    masks = {
        "causal": np.stack([causal] * B),
        "shared": np.stack([causal & (rng.random((count, count)) < 0.5)] * B),
        "per row": causal & (rng.random((B, count, count)) < 0.5),
    }[kind]
    given = {"causal": None, "shared": masks[:1], "per row": masks}[kind]
    visible = jax.jit(visible_slots, static_argnums=1)(filled(length), count, given)
    for row in range(B):
        np.testing.assert_array_equal(visible[row], visible_oracle(length[row], masks[row]))
