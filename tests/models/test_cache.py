import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sharding
from specjax.models.attention.pieces import Filled
from specjax.models.cache import (
    KVCache,
    PagedCache,
    RingCache,
    empty_entries,
    gather_entries,
    place_entries,
)

B, S = 3, 8
PARTS = ((1, 2), (1, 2))


def filled(length) -> KVCache:
    """A cache whose slot s of row b holds the number 100 b + s everywhere."""
    cache = KVCache.create([PARTS] * 2, batch=B, capacity=S)
    return KVCache(
        layers=tuple((numbers(S), -numbers(S)) for _ in cache.layers), length=jnp.asarray(length)
    )


def numbers(count: int) -> jax.Array:
    return jnp.broadcast_to(
        (100.0 * jnp.arange(B)[:, None] + jnp.arange(count))[:, None, :, None], (B, 1, count, 2)
    )


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
    assert [part[:, 0, 0].tolist() for part in written.layers[0]] == [
        [[1.0] * 6, [0.0] * 6],
        [[2.0] * 2, [0.0] * 2],
    ]


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
    assert (
        barrier.primitive.name == "optimization_barrier"
        and traced.jaxpr.invars[-1] in barrier.invars
    )
    assert len(updates) >= 2 and traced.jaxpr.invars[-2] not in [
        name for update in updates for name in update.invars
    ]


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
    assert [
        line
        for line in compiled.as_text().splitlines()
        if f"f32[{shape}]" in line and " copy(" in line
    ] == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))
    assert memory.temp_size_in_bytes < buffer.nbytes / 50
    compiled(cache, new, path, count)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache.layers))


def ring(slots: int = 6, kept: int = 2) -> RingCache:
    return RingCache.around(KVCache.create([PARTS] * 2, batch=B, capacity=slots), kept)


@pytest.mark.parametrize(
    "parts", [[(1, 1, 1)] * 17, [(3, 1, 2)] * 9, [(17, 5, 0)], [(11, 2, 9), (12, 3, 12)]]
)
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
        np.testing.assert_array_equal(
            np.asarray(cache.layers[1][1])[row], -np.asarray(cache.layers[1][0])[row]
        )


# --- pages ----------------------------------------------------------------------------------------

PAGES, PAGE, NONE = 8, 4, 8  # a row of S = 8 slots has two pages; NONE is out of range
TABLE = np.array([[6, 0], [3, 7], [5, NONE]])
TWO_HEADS = [((2, 3), (2, 5)), ((2, 3), (2, 5))]


def drawn(rows: int, count: int, seed: int = 0) -> tuple:
    """Entries of ``count`` tokens a row, no two numbers of which are alike."""
    rng = np.random.default_rng(seed)
    return tuple(
        tuple(jnp.asarray(rng.normal(size=(rows, h, count, d)), jnp.float32) for h, d in parts)
        for parts in TWO_HEADS
    )


def both(table: np.ndarray = TABLE, mesh=None) -> tuple[KVCache, PagedCache]:
    """Empty caches of the same rows. All that has not been written in pages is NaN."""
    plain = KVCache.create(TWO_HEADS, batch=len(table), capacity=S)
    paged = PagedCache.like(plain, pages=PAGES, page=PAGE, mesh=mesh).with_table(
        jnp.asarray(table, jnp.int32)
    )
    return plain, paged.replace(
        layers=jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), paged.layers)
    )


def appended(cache, rounds):
    for seed, counts in enumerate(rounds):
        cache = cache.append(
            drawn(len(counts), 3, seed), jnp.array(counts), after=jnp.zeros(len(counts))
        )
    return cache


def written(cache: PagedCache) -> list[set[tuple[int, int]]]:
    """(page, place) that hold something, of every pool."""
    pools = [np.isfinite(np.asarray(pool)) for pool in jax.tree.leaves(cache.layers)]
    assert all(np.array_equal(pool.any((1, 3)), pool.all((1, 3))) for pool in pools), (
        "a token is written whole"
    )
    return [
        {(int(page), int(place)) for page, place in np.argwhere(pool.all((1, 3)))} for pool in pools
    ]


def places(table: np.ndarray, lengths) -> set[tuple[int, int]]:
    """Where the tokens of each row lie that its pages have room for."""
    return {
        (int(row[slot // PAGE]), slot % PAGE)
        for row, length in zip(table, lengths, strict=True)
        for slot in range(min(length, S))
        if row[slot // PAGE] < PAGES
    }


def test_pages_hold_what_slots_hold() -> None:
    rounds = [[3, 2, 1], [0, 3, 1], [3, 1, 2]]
    plain, paged = (appended(cache, rounds) for cache in both())
    np.testing.assert_array_equal(paged.length, plain.length)
    assert written(paged) == [places(TABLE, [6, 6, 4])] * 4
    for length in range(1, 7):  # every place that all rows have
        at = jnp.minimum(jnp.array([[0, length - 1]] * B), paged.length[:, None] - 1)
        jax.tree.map(np.testing.assert_array_equal, paged.gather(at), plain.gather(at))
    by_head = jnp.array([[[0, 5], [3, 4]], [[2, 1], [5, 5]], [[3, 0], [1, 2]]])
    jax.tree.map(np.testing.assert_array_equal, paged.gather(by_head), plain.gather(by_head))


def test_pages_are_read_in_the_order_of_the_table_and_nan_stays_out() -> None:
    plain, paged = (appended(cache, [[3, 2, 1], [2, 3, 0]]) for cache in both())
    for start, width in ((0, S), (0, PAGE), (PAGE, PAGE), (PAGE, S)):
        found, visible = Filled.of(paged, 1).block(start, width)
        expected, as_visible = Filled.of(plain, 1).block(start, width)
        np.testing.assert_array_equal(visible, as_visible)
        assert np.asarray(visible).any()
        jax.tree.map(
            np.testing.assert_array_equal, found, expected
        )  # zeros where nothing is filled, as in `plain`


def test_what_has_no_page_is_dropped() -> None:
    """Beyond the capacity, beyond a row's pages, and where the table names no page: the last page, -1 to numpy, stays free."""
    table = np.array([[6, 0], [3, 2], [5, NONE]])
    plain, cache = (
        appended(cache, [[3, 3, 3]] * 3) for cache in both(table)
    )  # nine tokens, of which eight have slots
    np.testing.assert_array_equal(cache.length, [9, 9, 9])
    assert written(cache) == [places(table, [9, 9, 9])] * 4
    assert PAGES - 1 not in {page for page, _ in written(cache)[0]}
    given = jax.tree.map(
        lambda *parts: jnp.concatenate(parts, axis=2), *(drawn(B, 3, seed) for seed in range(3))
    )
    at = jnp.array(
        [np.arange(S), np.arange(S), np.arange(S) % PAGE]
    )  # of the third row's eight slots four have a page
    for found in (cache, plain):  # what came too late is written over nothing
        jax.tree.map(np.testing.assert_array_equal, found.gather(at), gather_entries(given, at))
    _, nothing = both(np.full((B, 2), NONE))
    assert written(appended(nothing, [[3, 3, 3]] * 3)) == [set()] * 4
    again = appended(cache, [[0, 0, 0]])
    jax.tree.map(np.testing.assert_array_equal, again, cache)


def test_layers_of_pages_are_picked_with_their_table() -> None:
    cache = appended(both()[1], [[3, 2, 1]])
    picked = cache.of_layers((1,))
    np.testing.assert_array_equal(picked.table, cache.table)
    jax.tree.map(np.testing.assert_array_equal, picked.layers, cache.layers[1:])
    assert (picked.page, picked.capacity) == (PAGE, S)


GROUPED = np.array(
    [[6, 0], [3, 7], [6, 1], [0, NONE]]
)  # two rows a group; page 6 and page 0 are other ones in each
ROUNDS = [[3, 2, 1, 3], [1, 3, 3, 3], [3, 3, 0, 1]]


@pytest.mark.full
def test_groups_of_rows_number_their_pages_apart_and_exchange_nothing() -> None:
    mesh = sharding.make_mesh(data=2, model=2)
    plain, grouped = both(GROUPED, mesh)
    assert grouped.groups == 2 and grouped.layers[0][0].shape[0] == 2 * PAGES
    pool = grouped.layers[0][0]
    grouped = jax.device_put(grouped, jax.tree.map(lambda leaf: shard(leaf, mesh), grouped))
    assert grouped.layers[0][0].sharding.shard_shape(pool.shape) == (PAGES, 1, PAGE, 3)

    def spread(values):
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, shard(jnp.asarray(leaf), mesh)), values
        )

    append, gather = jax.jit(PagedCache.append), jax.jit(PagedCache.gather)
    read = jax.jit(lambda cache: Filled.of(cache, 1, mesh=mesh).block(0, S))
    for seed, counts in enumerate(ROUNDS):
        given = spread((drawn(4, 3, seed), jnp.array(counts), jnp.zeros(4)))
        appending = append.lower(grouped, *given)
        grouped, plain = (
            append(grouped, *given),
            plain.append(drawn(4, 3, seed), jnp.array(counts), after=jnp.zeros(4)),
        )
    global_table = GROUPED + np.where(GROUPED < PAGES, [[0], [0], [PAGES], [PAGES]], 2 * PAGES)
    assert written(grouped)[0] == {
        (int(row[slot // PAGE]), slot % PAGE)
        for row, length in zip(global_table, [7, 8, 4, 7], strict=True)
        for slot in range(length)
        if row[slot // PAGE] < 2 * PAGES
    }
    at = spread(jnp.array([[0, 6], [7, 5], [3, 0], [2, 3]]))
    by_head = spread(
        jnp.array([[[0, 5], [3, 4]], [[2, 1], [5, 7]], [[3, 0], [1, 2]], [[0, 1], [3, 3]]])
    )
    for positions in (at, by_head):
        jax.tree.map(
            np.testing.assert_array_equal, gather(grouped, positions), plain.gather(positions)
        )
    (found, visible), (expected, as_visible) = read(grouped), Filled.of(plain, 1).block(0, S)
    np.testing.assert_array_equal(visible, as_visible)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x[:3], y[:3]), found, expected
    )  # the last row lacks a page
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x[3:, :, :PAGE], y[3:, :, :PAGE]),
        found,
        expected,
    )
    for program in (gather.lower(grouped, at), gather.lower(grouped, by_head), read.lower(grouped)):
        text = program.compile().as_text()
        assert [word for word in COLLECTIVES if word in text] == []
    # The compiler for CPUs gathers the few new tokens of all heads, those for TPUs and GPUs nothing: see tests/lowering.
    text = appending.compile().as_text()
    assert [word for word in COLLECTIVES if word in text] in ([], ["all-gather"])


COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
)


def shard(leaf: jax.Array, mesh) -> jax.sharding.NamedSharding:
    """Rows and pages by the data axis; heads, where there are any, by the model axis."""
    axes = ("data", "model") if leaf.ndim == 4 else ("data",)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
