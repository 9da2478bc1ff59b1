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
    """Return a cache whose slot s of row b holds the number 100 b + s everywhere."""
    cache = KVCache.create([PARTS] * 2, batch=B, capacity=S)
    return KVCache(
        layers=tuple((numbers(S), -numbers(S)) for _ in cache.layers), length=jnp.asarray(length)
    )


def numbers(count: int) -> jax.Array:
    return jnp.broadcast_to(
        (100.0 * jnp.arange(B)[:, None] + jnp.arange(count))[:, None, :, None], (B, 1, count, 2)
    )


def test_appending_the_entries_of_a_path() -> None:
    """Rows append the entries of their accepted nodes, and no others."""
    cache = filled([0, 2, 4])
    new = [(1000 + numbers(6), -1000 - numbers(6))] * 2
    path = jnp.array([[0, 2, 5], [0, 3, -1], [0, 1, 3]])
    appended_cache = cache.append(gather_entries(new, path), jnp.array([3, 2, 0]), after=path)
    np.testing.assert_array_equal(appended_cache.length, [3, 4, 4])
    for keys, values in appended_cache.layers:
        np.testing.assert_array_equal(keys[0, 0, :, 0], [1000, 1002, 1005, 3, 4, 5, 6, 7])
        np.testing.assert_array_equal(keys[1, 0, :4, 0], [100, 101, 1100, 1103])
        np.testing.assert_array_equal(keys[2, 0, :, 0], 200 + np.arange(S))  # count 0: as it was
        np.testing.assert_array_equal(values, -keys)


def test_appending_beyond_the_capacity_is_dropped_and_touches_no_other_row() -> None:
    new = jnp.arange(1.0, 4.0)[None, None, :, None] * jnp.ones((B, 1, 3, 2))
    cache = KVCache.create([PARTS], batch=B, capacity=S).replace(length=jnp.array([0, 6, 9]))
    appended_cache = cache.append([(new, -new)], jnp.full(B, 3), after=jnp.zeros(B))
    keys, values = (buffer[:, 0, :, 0] for buffer in appended_cache.layers[0])
    np.testing.assert_array_equal(keys[0], [1, 2, 3, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(keys[1], [0, 0, 0, 0, 0, 0, 1, 2])
    np.testing.assert_array_equal(keys[2], np.zeros(S))
    np.testing.assert_array_equal(values, -keys)


def test_an_entry_may_have_parts_of_different_sizes() -> None:
    """An entry holds a latent shared by all heads and a small rotary key, as in DeepSeek."""
    cache = KVCache.create([((1, 6), (1, 2))], batch=2, capacity=4)
    new = [(jnp.ones((2, 1, 1, 6)), jnp.full((2, 1, 1, 2), 2.0))]
    appended_cache = cache.append(new, jnp.array([1, 0]), after=jnp.zeros(2))
    assert [part[:, 0, 0].tolist() for part in appended_cache.layers[0]] == [
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
    """The update waits for ``after``.

    Without it XLA would copy all scratch, to be able to write at once.
    """
    scratch, new = (empty_entries([PARTS], batch=B, slots=slots) for slots in (5, 1))
    traced = jax.make_jaxpr(place_entries)(scratch, new, 3, jnp.zeros(B))
    barrier, *updates = traced.eqns
    *_, offset, after = traced.jaxpr.invars
    assert barrier.primitive.name == "optimization_barrier" and after in barrier.invars
    operands = [name for update in updates for name in update.invars]
    assert len(updates) >= 2 and offset not in operands


@pytest.mark.parametrize("page", [None, 64])
def test_appending_copies_no_buffer(page) -> None:
    """Donated buffers are updated in place.

    No buffer is copied, and the scratch memory is far smaller than one of them.
    """
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


def ring(slots: int = 6, first: int = 2) -> RingCache:
    return RingCache.around(KVCache.create([PARTS] * 2, batch=B, capacity=slots), first)


@pytest.mark.full_except("parts0", "parts2")
@pytest.mark.thorough_except("parts1")
@pytest.mark.parametrize(
    "parts", [[(1, 1, 1)] * 17, [(3, 1, 2)] * 9, [(17, 5, 0)], [(11, 2, 9), (12, 3, 12)]]
)
def test_a_ring_holds_the_first_tokens_and_the_newest(parts) -> None:
    """A ring holds exactly the first tokens and the newest of each row.

    Tokens come in parts of any size, also larger than the ring.
    """
    cache, lengths = ring(), np.zeros(B, int)
    for count in parts:
        width = max(*count, 1)
        positions = jnp.asarray(lengths)[:, None] + jnp.arange(width)
        new = jnp.broadcast_to((1.0 + positions)[:, None, :, None], (B, 1, width, 2))
        cache = cache.append([(new, -new)] * 2, jnp.asarray(count), after=positions)
        lengths = lengths + np.array(count)
    np.testing.assert_array_equal(cache.length, lengths)
    for row, length in enumerate(lengths):
        expected = {*range(min(2, length)), *range(max(0, length - 4), length)}
        slots = int(cache.filled[row])
        stored = np.asarray(cache.layers[1][0])[row, 0, :slots, 0] - 1
        assert sorted(stored.astype(int)) == sorted(expected)
        np.testing.assert_array_equal(stored, cache.positions_by_slot(cache.length)[row, :slots])
        np.testing.assert_array_equal(
            np.asarray(cache.layers[1][1])[row], -np.asarray(cache.layers[1][0])[row]
        )


# --- pages ----------------------------------------------------------------------------------------

PAGES, PAGE, NONE = 8, 4, 8  # a row of S = 8 slots has two pages; NONE is out of range
TABLE = np.array([[6, 0], [3, 7], [5, NONE]])
TWO_HEADS = [((2, 3), (2, 5)), ((2, 3), (2, 5))]


def drawn(rows: int, count: int, seed: int = 0) -> tuple:
    """Return entries of ``count`` tokens a row whose numbers are all different."""
    rng = np.random.default_rng(seed)
    return tuple(
        tuple(jnp.asarray(rng.normal(size=(rows, h, count, d)), jnp.float32) for h, d in parts)
        for parts in TWO_HEADS
    )


def both(table: np.ndarray = TABLE, mesh=None) -> tuple[KVCache, PagedCache]:
    """Return empty caches of the same rows, one plain and one in pages.

    Slots of pages that nothing was written to are NaN.
    """
    plain = KVCache.create(TWO_HEADS, batch=len(table), capacity=S)
    paged = PagedCache.like(plain, pages=PAGES, page=PAGE, mesh=mesh)
    paged = paged.with_table(jnp.asarray(table, jnp.int32))
    layers = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), paged.layers)
    return plain, paged.replace(layers=layers)


def appended(cache, rounds):
    for seed, counts in enumerate(rounds):
        cache = cache.append(
            drawn(len(counts), 3, seed), jnp.array(counts), after=jnp.zeros(len(counts))
        )
    return cache


def written(cache: PagedCache) -> list[set[tuple[int, int]]]:
    """Return the (page, place) of each slot that holds something, for every pool."""
    pools = [np.isfinite(np.asarray(pool)) for pool in jax.tree.leaves(cache.layers)]
    assert all(np.array_equal(pool.any((1, 3)), pool.all((1, 3))) for pool in pools), (
        "a token is written whole"
    )
    return [
        {(int(page), int(place)) for page, place in np.argwhere(pool.all((1, 3)))} for pool in pools
    ]


def places(table: np.ndarray, lengths) -> set[tuple[int, int]]:
    """Return the (page, place) of each token of each row that its pages have room for."""
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
    for length in range(1, 7):
        by_row = jnp.minimum(jnp.array([[0, length - 1]] * B), paged.length[:, None] - 1)
        jax.tree.map(np.testing.assert_array_equal, paged.gather(by_row), plain.gather(by_row))
    by_head = jnp.array([[[0, 5], [3, 4]], [[2, 1], [5, 5]], [[3, 0], [1, 2]]])
    jax.tree.map(np.testing.assert_array_equal, paged.gather(by_head), plain.gather(by_head))


def test_pages_are_read_in_the_order_of_the_table_and_nan_stays_out() -> None:
    plain, paged = (appended(cache, [[3, 2, 1], [2, 3, 0]]) for cache in both())
    for start, width in ((0, S), (0, PAGE), (PAGE, PAGE), (PAGE, S)):
        entry, visible = Filled.of(paged, 1).block(start, width)
        expected, expected_visible = Filled.of(plain, 1).block(start, width)
        np.testing.assert_array_equal(visible, expected_visible)
        assert np.asarray(visible).any()
        # Slots that are not filled are read as zeros, as those of `plain`.
        jax.tree.map(np.testing.assert_array_equal, entry, expected)


def test_what_has_no_page_is_dropped() -> None:
    """Tokens beyond the capacity or a row's pages, or without a page in the table, are dropped.

    The last page, which is -1 to numpy, stays free.
    """
    table = np.array([[6, 0], [3, 2], [5, NONE]])
    # Eight of nine tokens have slots.
    plain, cache = (appended(cache, [[3, 3, 3]] * 3) for cache in both(table))
    np.testing.assert_array_equal(cache.length, [9, 9, 9])
    assert written(cache) == [places(table, [9, 9, 9])] * 4
    assert PAGES - 1 not in {page for page, _ in written(cache)[0]}
    entries = jax.tree.map(
        lambda *parts: jnp.concatenate(parts, axis=2), *(drawn(B, 3, seed) for seed in range(3))
    )
    # The third row has a page for four of its eight slots.
    by_row = jnp.array([np.arange(S), np.arange(S), np.arange(S) % PAGE])
    expected = gather_entries(entries, by_row)
    # Tokens that came too late are not written over others.
    for some_cache in (cache, plain):
        jax.tree.map(np.testing.assert_array_equal, some_cache.gather(by_row), expected)
    _, without_pages = both(np.full((B, 2), NONE))
    assert written(appended(without_pages, [[3, 3, 3]] * 3)) == [set()] * 4
    unchanged = appended(cache, [[0, 0, 0]])
    jax.tree.map(np.testing.assert_array_equal, unchanged, cache)


def test_layers_of_pages_are_picked_with_their_table() -> None:
    cache = appended(both()[1], [[3, 2, 1]])
    picked = cache.of_layers((1,))
    np.testing.assert_array_equal(picked.table, cache.table)
    jax.tree.map(np.testing.assert_array_equal, picked.layers, cache.layers[1:])
    assert (picked.page, picked.capacity) == (PAGE, S)


# Two rows a group: pages 6 and 0 of one group are not those of the other.
GROUPED = np.array([[6, 0], [3, 7], [6, 1], [0, NONE]])
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
        arguments = (drawn(4, 3, seed), jnp.array(counts), jnp.zeros(4))
        on_mesh = spread(arguments)
        appending = append.lower(grouped, *on_mesh)
        grouped = append(grouped, *on_mesh)
        plain = plain.append(*arguments[:2], after=arguments[2])
    global_table = GROUPED + np.where(GROUPED < PAGES, [[0], [0], [PAGES], [PAGES]], 2 * PAGES)
    assert written(grouped)[0] == {
        (int(row[slot // PAGE]), slot % PAGE)
        for row, length in zip(global_table, [7, 8, 4, 7], strict=True)
        for slot in range(length)
        if row[slot // PAGE] < 2 * PAGES
    }
    by_row = spread(jnp.array([[0, 6], [7, 5], [3, 0], [2, 3]]))
    by_head = spread(
        jnp.array([[[0, 5], [3, 4]], [[2, 1], [5, 7]], [[3, 0], [1, 2]], [[0, 1], [3, 3]]])
    )
    for positions in (by_row, by_head):
        jax.tree.map(
            np.testing.assert_array_equal, gather(grouped, positions), plain.gather(positions)
        )
    entry, visible = read(grouped)
    expected, expected_visible = Filled.of(plain, 1).block(0, S)
    np.testing.assert_array_equal(visible, expected_visible)
    # The last row lacks its second page.
    for rows, slots in ((slice(0, 3), slice(None)), (slice(3, None), slice(0, PAGE))):
        jax.tree.map(
            lambda x, y, part=np.s_[rows, :, slots]: np.testing.assert_array_equal(
                x[part], y[part]
            ),
            entry,
            expected,
        )
    for program in (
        gather.lower(grouped, by_row),
        gather.lower(grouped, by_head),
        read.lower(grouped),
    ):
        text = program.compile().as_text()
        assert [word for word in COLLECTIVES if word in text] == []
    # The compiler for CPUs gathers the few new tokens of all heads. Those for TPUs and GPUs gather
    # nothing: see tests/lowering.
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
    """Return the sharding of rows and pages by the data axis, and of heads by the model axis."""
    axes = ("data", "model") if leaf.ndim == 4 else ("data",)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
