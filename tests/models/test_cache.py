import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.cache import KVCache, PagedCache, RingCache, empty_entries, gather_entries, place_entries
from specjax.sharding import make_mesh

B, S = 3, 8
PARTS = ((1, 2), (1, 2))


def filled(length) -> KVCache:
    """A cache whose slot s of row b holds the number 100 b + s everywhere."""
    cache = KVCache.create([PARTS] * 2, batch=B, capacity=S)
    return KVCache(layers=tuple((numbers(S), -numbers(S)) for _ in cache.layers), length=jnp.asarray(length))


def numbers(count: int) -> jax.Array:
    return jnp.broadcast_to((100.0 * jnp.arange(B)[:, None] + jnp.arange(count))[:, None, :, None], (B, 1, count, 2))


def test_appending_the_entries_of_a_path() -> None:
    """Each row takes its own nodes, and as many of them as it accepted."""
    cache = filled([0, 2, 4])
    new = [(1000 + numbers(6), -1000 - numbers(6))] * 2
    path = jnp.array([[0, 2, 5], [0, 3, -1], [0, 1, 3]])
    kept = cache.append(gather_entries(new, path), jnp.array([3, 2, 0]), after=path)
    np.testing.assert_array_equal(kept.length, [3, 4, 4])
    for keys, values in kept.layers:
        np.testing.assert_array_equal(keys[0, 0, :, 0], [1000, 1002, 1005, 3, 4, 5, 6, 7])
        np.testing.assert_array_equal(keys[1, 0, :4, 0], [100, 101, 1100, 1103])
        np.testing.assert_array_equal(keys[2, 0, :, 0], 200 + np.arange(S))  # count 0: as it was
        np.testing.assert_array_equal(values, -keys)


def test_appending_beyond_the_capacity_is_dropped_and_touches_no_other_row() -> None:
    new = jnp.arange(1.0, 4.0)[None, None, :, None] * jnp.ones((B, 1, 3, 2))
    cache = KVCache.create([PARTS], batch=B, capacity=S).replace(length=jnp.array([0, 6, 9]))
    written = cache.append([(new, -new)], jnp.full(B, 3), after=jnp.zeros(B))
    keys, values = (buffer[:, 0, :, 0] for buffer in written.layers[0])
    np.testing.assert_array_equal(keys[0], [1, 2, 3, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(keys[1], [0, 0, 0, 0, 0, 0, 1, 2])
    np.testing.assert_array_equal(keys[2], np.zeros(S))
    np.testing.assert_array_equal(values, -keys)


def test_an_entry_may_have_parts_of_different_sizes() -> None:
    """A latent shared by all heads and a small rotary key, as in DeepSeek's attention."""
    cache = KVCache.create([((1, 6), (1, 2))], batch=2, capacity=4)
    new = [(jnp.ones((2, 1, 1, 6)), jnp.full((2, 1, 1, 2), 2.0))]
    written = cache.append(new, jnp.array([1, 0]), after=jnp.zeros(2))
    assert [part[:, 0, 0].tolist() for part in written.layers[0]] == [[[1.0] * 6, [0.0] * 6], [[2.0] * 2, [0.0] * 2]]


def test_scratch_holds_drafted_tokens_level_by_level() -> None:
    scratch = empty_entries([PARTS] * 2, batch=B, slots=5)
    scratch = place_entries(scratch, [(numbers(2), -numbers(2))] * 2, 3, after=jnp.zeros(B))
    for keys, values in scratch:
        np.testing.assert_array_equal(keys[1, 0, :, 0], [0, 0, 0, 100, 101])
        np.testing.assert_array_equal(values, -keys)


def test_scratch_is_written_after_it_was_read() -> None:
    """What is written waits for ``after``: without it XLA would copy all scratch, to be able to write at once."""
    scratch, new = (empty_entries([PARTS], batch=B, slots=slots) for slots in (5, 1))
    traced = jax.make_jaxpr(place_entries)(scratch, new, 3, jnp.zeros(B))
    barrier, *updates = traced.eqns
    assert barrier.primitive.name == "optimization_barrier" and traced.jaxpr.invars[-1] in barrier.invars
    assert len(updates) >= 2 and traced.jaxpr.invars[-2] not in [name for update in updates for name in update.invars]


@pytest.mark.parametrize("page", [None, 64])
def test_appending_copies_no_buffer(page) -> None:
    """Donated buffers are updated in place: no copy of a buffer, and far less scratch memory than one of them takes."""
    cache = KVCache.create([((2, 16), (2, 16))] * 4, batch=3, capacity=4096)
    cache = PagedCache.like(cache, pages=3 * 64, page=page) if page else cache
    new = empty_entries([((2, 16), (2, 16))] * 4, batch=3, slots=6)
    path, count = jnp.array([[0, 2, 5], [0, 3, 4], [0, 1, 3]]), jnp.array([3, 2, 0])

    def keep(cache, new, path, count):
        return cache.append(gather_entries(new, path), count, after=path)

    compiled = jax.jit(keep, donate_argnums=0).lower(cache, new, path, count).compile()
    buffer = cache.layers[0][0]
    shape = ",".join(map(str, buffer.shape))
    assert [line for line in compiled.as_text().splitlines() if f"f32[{shape}]" in line and " copy(" in line] == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))
    assert memory.temp_size_in_bytes < buffer.nbytes / 50
    compiled(cache, new, path, count)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache.layers))


PATH = jnp.array([[0, 2, 5], [0, 3, 4], [0, 1, 3], [5, 1, 0]])
NONE = 7
TABLE = jnp.array([[3, 0, NONE], [6, NONE, NONE], [1, 4, 2], [5, NONE, NONE]])


def keep(cache, new):
    """Of six new entries a row the first three, two, one and three of a path."""
    return cache.append(gather_entries(new, PATH), jnp.array([3, 2, 1, 3]), after=PATH)


@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_what_is_appended_to_pages_is_what_is_appended_to_one_text(mesh) -> None:
    """What a row has no page for is dropped, and no other page is touched. No pool is exchanged."""
    devices = mesh and make_mesh(*mesh)
    groups = 2 if mesh else 1
    parts, lengths = ((2, 4), (2, 4)), jnp.array([5, 3, 12, 2])
    whole = KVCache.create([parts], batch=4, capacity=12)
    new = [tuple(jax.random.normal(key, (4, 2, 6, 4)) for key in jax.random.split(jax.random.key(0)))]
    paged = PagedCache.like(whole, pages=NONE, page=4, mesh=devices).with_table(TABLE).replace(length=lengths)
    paged = paged.replace(layers=jax.tree.map(lambda pool: pool + jnp.nan, paged.layers))
    expected, program = keep(whole.replace(length=lengths), new), jax.jit(keep).lower(paged, new).compile()
    found = program(paged, new)
    np.testing.assert_array_equal(found.length, expected.length)
    text = program.as_text()
    assert not any(exchange in text for exchange in ("all-reduce", "all-gather", "all-to-all", "collective-permute"))
    written = 0
    for row, length in enumerate(lengths):
        for position in range(12):
            page = TABLE[row, position // 4]
            if page == NONE or not length <= position < expected.length[row]:
                continue
            at = row // (4 // groups) * NONE + page
            for pool, part in zip(found.layers[0], expected.layers[0], strict=True):
                np.testing.assert_array_equal(pool[at, :, position % 4], part[row, :, position])
            written += 1
    assert written == 3 + 1 + 0 + 2  # the second and the fourth row have one page, and the third is full
    assert np.isfinite(found.layers[0][0]).sum() == written * 2 * 4


def ring(slots: int = 6, kept: int = 2) -> RingCache:
    return RingCache.around(empty_entries([PARTS] * 2, batch=B, slots=slots), kept)


@pytest.mark.parametrize("parts", [[(1, 1, 1)] * 17, [(3, 1, 2)] * 9, [(17, 5, 0)], [(11, 2, 9), (12, 3, 12)]])
def test_a_ring_holds_the_first_tokens_and_the_newest(parts) -> None:
    """Given in parts of any size, also larger than the ring: exactly the kept ones and the last of each row."""
    cache, given = ring(), np.zeros(B, int)
    for count in parts:
        width = max(*count, 1)
        numbers = jnp.asarray(given)[:, None] + jnp.arange(width)  # of tokens, from 0
        new = jnp.broadcast_to((1.0 + numbers)[:, None, :, None], (B, 1, width, 2))
        cache = cache.append([(new, -new)] * 2, jnp.asarray(count), after=numbers)
        given = given + np.array(count)
    np.testing.assert_array_equal(cache.length, given)
    for row, total in enumerate(given):
        expected = {*range(min(2, total)), *range(max(0, total - 4), total)}
        slots = int(cache.filled[row])
        held = np.asarray(cache.layers[1][0])[row, 0, :slots, 0] - 1
        assert sorted(held.astype(int)) == sorted(expected)
        np.testing.assert_array_equal(held, cache.newest_at(cache.length)[row, :slots])
        np.testing.assert_array_equal(np.asarray(cache.layers[1][1])[row], -np.asarray(cache.layers[1][0])[row])
