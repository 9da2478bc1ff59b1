from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.cache import KVCache

B, S = 3, 8


def filled(length) -> KVCache:
    """A cache whose slot s of row b holds the number 100 b + s everywhere."""
    cache = KVCache.create(layers=2, batch=B, capacity=S, kv_heads=1, head_dim=2)
    content = jnp.broadcast_to((100.0 * jnp.arange(B)[:, None] + jnp.arange(S))[:, None, :, None], (B, 1, S, 2))
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
        np.testing.assert_array_equal(keys[0, 0, :3, 0], [0, 2, 5])
        np.testing.assert_array_equal(keys[1, 0, :4, 0], [100, 101, 102, 105])
        np.testing.assert_array_equal(keys[2, 0, :, 0], 200 + np.arange(S))  # count 0: as it was
        np.testing.assert_array_equal(values, -keys)


def test_writing_beyond_the_capacity_is_dropped_and_touches_no_other_row() -> None:
    new = jnp.arange(1.0, 4.0)[None, None, :, None] * jnp.ones((B, 1, 3, 2))
    cache = replace(KVCache.create(layers=2, batch=B, capacity=S, kv_heads=1, head_dim=2), length=jnp.array([0, 6, 9]))
    written = cache.write([(new, -new)], after=jnp.zeros(1))
    keys, values = (buffer[:, 0, :, 0] for buffer in written.layers[0])
    np.testing.assert_array_equal(keys[0], [1, 2, 3, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(keys[1], [0, 0, 0, 0, 0, 0, 1, 2])
    np.testing.assert_array_equal(keys[2], np.zeros(S))
    np.testing.assert_array_equal(values, -keys)
    np.testing.assert_array_equal(written.layers[1][0], 0)  # only the layers that were given
    np.testing.assert_array_equal(written.length, cache.length)


def test_committed_slots() -> None:
    np.testing.assert_array_equal(filled([0, 3, S]).committed.sum(axis=1), [0, 3, S])
    np.testing.assert_array_equal(filled([0, 3, S]).committed[1], [True] * 3 + [False] * (S - 3))


def test_keeping_a_path_copies_no_buffer() -> None:
    """Donated buffers are updated in place: no copy of a buffer, and far less scratch memory than one of them takes."""
    cache = KVCache.create(layers=4, batch=3, capacity=4096, kv_heads=2, head_dim=16)
    path, count = jnp.array([[0, 2, 5], [0, 3, 4], [0, 1, 3]]), jnp.array([3, 2, 0])
    compiled = jax.jit(KVCache.keep, donate_argnums=0).lower(cache, path, count).compile()
    buffer = cache.layers[0][0]
    shape = ",".join(map(str, buffer.shape))
    assert [line for line in compiled.as_text().splitlines() if f"f32[{shape}]" in line and " copy(" in line] == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))
    assert memory.temp_size_in_bytes < buffer.nbytes / 50
    compiled(cache, path, count)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache.layers))


def test_what_the_tokens_of_a_call_see() -> None:
    above = jnp.array([[[1, 0, 1]], [[0, 1, 0]], [[1, 1, 1]]], bool)
    visible = np.asarray(filled([0, 3, 6]).visible(above))[:, 0]
    np.testing.assert_array_equal(visible[0], [1, 0, 1, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(visible[1], [1, 1, 1, 0, 1, 0, 0, 0])
    np.testing.assert_array_equal(visible[2], [1] * 8)  # what lies beyond the capacity is nowhere
