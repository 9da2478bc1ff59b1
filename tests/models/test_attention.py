"""Attention in pieces and blocks against one plain softmax in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.attention import Filled, Shared, attend, attention_paid, by_device, gpu, tpu
from specjax.models.attention import plain as plain_attention
from specjax.models.quantized_cache import QuantizedPart, dequantize, quantize
from specjax.sharding import make_mesh
from tests.conftest import own_programs

KV, GROUP, DIM, SLOTS = 2, 2, 8, 70
COUNTS = np.array([70, 3, 41, 0])
B = len(COUNTS)


@pytest.fixture(scope="module", autouse=True)
def _own_programs():
    with own_programs():
        yield


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    for module in (by_device, plain_attention):
        monkeypatch.setattr(module, "BLOCK", 16)  # does not divide the 70 slots


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def plain(q, keys, values, visible, scale, sinks=None, cap=None):
    """Return attention by one softmax in float64, and the attention paid to each slot.

    A query that sees nothing gets zeros. Sinks are one more column of scores.

    Args:
        q: queries, ``[B, T, heads, d]``.
        keys: ``[B, kv, S, d]``.
        values: ``[B, kv, S, d]``.
        visible: the slots that each query sees, ``[B, T, S]``.
        scale: the factor of the scores.
        sinks: the score of each head's sink; None for no sinks.
        cap: the bound of the scores; None for no bound.

    Returns:
        The output, ``[B, T, heads * d]``, and the attention paid, ``[B, kv, S]``.
    """
    out = np.zeros((*q.shape[:3], values.shape[-1]))
    paid = np.zeros((q.shape[0], keys.shape[1], keys.shape[2]))
    for b, t, head in np.ndindex(*q.shape[:3]):
        slots, kv = visible[b, t], head // (q.shape[2] // keys.shape[1])
        if not slots.any():
            continue
        scores = keys[b, kv, slots].astype(np.float64) @ q[b, t, head] * scale
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        column = [] if sinks is None else [np.float64(sinks[head])]
        scores = np.concatenate([scores, column])
        weights = np.exp(scores - scores.max())
        weights = (weights / weights.sum())[: slots.sum()]
        out[b, t, head] = weights @ values[b, kv, slots]
        paid[b, kv, slots] += weights
    return out.reshape(*q.shape[:2], -1), paid


def make_pieces(count: int, window: int | None, dim: int = DIM):
    """Return a cache, scratch and new tokens as pieces, and all of them together.

    The rows of the cache are filled to different degrees, and the scratch is that of a tree.
    Returns the pieces, the joined keys and values, and which of their slots each query sees.
    """
    entry = tuple(normal(seed, B, KV, SLOTS, dim) for seed in (1, 2))
    scratch = tuple(normal(seed, B, KV, 7, dim) for seed in (3, 4))
    new = tuple(normal(seed, B, KV, count, dim) for seed in (5, 6))
    positions = COUNTS[:, None] + np.arange(count)[None]
    in_scratch = np.random.default_rng(7).random((B, count, 7)) < 0.5
    mask = np.tril(np.ones((1, count, count), bool))
    in_cache = np.broadcast_to(np.arange(SLOTS) < COUNTS[:, None, None], (B, count, SLOTS))
    since = None
    if window is not None:
        since = jnp.asarray(positions - window + 1)
        in_cache = in_cache & (np.arange(SLOTS) > positions[..., None] - window)
    together = [np.concatenate(parts, axis=2) for parts in zip(entry, scratch, new, strict=True)]
    visible = np.concatenate(
        [in_cache, in_scratch, np.broadcast_to(mask, (B, count, count))], axis=2
    )
    pieces = [
        Filled(tuple(map(jnp.asarray, entry)), jnp.asarray(COUNTS), since),
        (tuple(map(jnp.asarray, scratch)), jnp.asarray(in_scratch)),
        (tuple(map(jnp.asarray, new)), jnp.asarray(mask)),
    ]
    return pieces, together, visible


@pytest.mark.full
@pytest.mark.parametrize("window", [None, 1, 10, 33])
@pytest.mark.parametrize("count", [1, 5, 60])
def test_pieces_and_blocks_are_one_softmax(count, window) -> None:
    pieces, (keys, values), visible = make_pieces(count, window)
    q = normal(0, B, count, KV * GROUP, DIM) * 3
    expected, _ = plain(q, keys, values, visible, DIM**-0.5)
    np.testing.assert_allclose(jax.jit(attend)(jnp.asarray(q), pieces), expected, atol=1e-5)


KERNELS = {  # with settings for small sizes
    "tpu": (tpu, {"ROWS": 16}),  # does not divide 60 tokens of two heads
    "gpu": (gpu, {"ROWS": 16, "PROGRAMS": 1}),
    "gpu, splits": (gpu, {"ROWS": 16, "PROGRAMS": 1000}),
}


@pytest.mark.full
@pytest.mark.thorough_except("1-10-nothing-tpu")
@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(
    ("count", "window", "beside"),
    [
        (1, 10, "nothing"),
        # Pages are read with these settings, below.
        pytest.param(1, None, "each its own", marks=pytest.mark.thorough),
        (5, 10, "scratch and own"),
        (60, None, "scratch and own"),
        pytest.param(60, 10, "each its own", marks=pytest.mark.thorough),
    ],
)
def test_kernels_find_what_plain_attention_finds(
    count, window, beside, device, monkeypatch
) -> None:
    """Kernels are interpreted. Slots beyond what is filled hold NaN.

    Entries have one part or two, as those of latent attention have.
    """
    module, sizes = KERNELS[device]
    for name, size in {"BLOCK": 16, **sizes}.items():
        monkeypatch.setattr(module, name, size)
    (cached, scratch, new), _, _ = make_pieces(count, window)
    uncached = {
        "nothing": [],
        "scratch and own": [scratch, new],
        "each its own": [scratch, (new[0], None)],
    }[beside]
    beyond = jnp.arange(SLOTS)[:, None] >= cached.count[:, None, None, None]
    damaged = cached.replace(
        entry=jax.tree.map(lambda part: jnp.where(beyond, jnp.nan, part), cached.entry)
    )
    q = jnp.asarray(normal(0, B, KV, count, GROUP, DIM))
    for parts, values_part in (((q,), 1), ((q, 2 * q), 0)):
        expected = plain_attention.attend_plainly(
            parts, [cached, *uncached], values_part=values_part, block=16
        )
        result = by_device._attend_by_kernel(
            parts,
            [damaged, *uncached],
            values_part=values_part,
            kernel=module.attend_in_kernel,
            interpret=True,
        )
        np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("device", ["tpu", "gpu"])
def test_values_may_be_smaller_than_keys(device, monkeypatch) -> None:
    """The output is then as wide as they are, in plain JAX and in the kernels (MiMo-V2)."""
    module, sizes = KERNELS[device]
    for name, size in {"BLOCK": 16, **sizes}.items():
        monkeypatch.setattr(module, name, size)
    (cached, *beside), _, _ = make_pieces(5, 10)

    def smaller(entry):
        return entry[0], entry[1][..., :3]

    pieces = [cached.replace(entry=smaller(cached.entry))]
    pieces += [(smaller(entry), mask) for entry, mask in beside]
    q = (jnp.asarray(normal(0, B, KV, 5, GROUP, DIM)),)
    whole = plain_attention.attend_plainly(q, [cached, *beside], values_part=1, block=16)
    plainly = plain_attention.attend_plainly(q, pieces, values_part=1, block=16)
    np.testing.assert_allclose(plainly, whole[..., :3], atol=1e-6)
    result = by_device._attend_by_kernel(
        q, pieces, values_part=1, kernel=module.attend_in_kernel, interpret=True
    )
    np.testing.assert_allclose(result, plainly, atol=1e-5)


def in_pages(cached: Filled, page: int, groups: int = 1) -> Filled:
    """Return the same cache in pages.

    The pages lie in any order, and some are free. Free pages, and slots beyond what is filled, hold
    NaN, or the largest integer. Each group of rows has a separate part of the pool.
    """
    order, columns = np.random.default_rng(page), -(-SLOTS // page)
    counts = np.split(np.asarray(cached.count), groups)
    pages = len(counts[0]) * columns + 2
    table = np.full((B, columns), pages, np.int32)
    parts, structure = jax.tree.flatten(cached.entry)
    fillers = [127 if part.dtype == np.int8 else np.nan for part in parts]
    pools = [
        np.full((groups * pages, part.shape[1], page, *part.shape[3:]), filler, part.dtype)
        for part, filler in zip(parts, fillers, strict=True)
    ]
    row = 0
    for group, group_counts in enumerate(counts):
        free = list(order.permutation(pages))
        for count in group_counts:
            for column in range(-(-count // page)):
                table[row, column] = free.pop()
                slots = slice(column * page, min((column + 1) * page, count))
                in_pool = group * pages + table[row, column]
                for pool, part in zip(pools, parts, strict=True):
                    pool[in_pool, :, : slots.stop - slots.start] = part[row, :, slots]
            row += 1
    return cached.replace(
        entry=jax.tree.unflatten(structure, map(jnp.asarray, pools)), table=jnp.asarray(table)
    )


@pytest.mark.full
@pytest.mark.thorough_except("5-33-each its own-16-plain", "60-10-scratch and own-16-tpu")
@pytest.mark.parametrize("device", ["plain", *KERNELS])
@pytest.mark.parametrize(
    "page",
    [pytest.param(8, marks=pytest.mark.thorough), 16, pytest.param(32, marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize(
    ("count", "window", "beside"),
    [
        pytest.param(1, None, "nothing", marks=pytest.mark.thorough),
        pytest.param(1, 10, "scratch and own", marks=pytest.mark.thorough),
        (5, 33, "each its own"),
        (60, 10, "scratch and own"),
    ],
)
def test_pages_are_read_as_one_text(count, window, beside, page, device, monkeypatch) -> None:
    """A block has several pages, one, or a part of one.

    Kernels are interpreted. Entries have one part or two, as those of latent attention have.
    """
    module, sizes = KERNELS.get(device, (plain_attention, {}))
    for name, size in {"BLOCK": 16, **sizes}.items():
        monkeypatch.setattr(module, name, size)
    (cached, scratch, new), _, _ = make_pieces(count, window)
    uncached = {
        "nothing": [],
        "scratch and own": [scratch, new],
        "each its own": [scratch, (new[0], None)],
    }[beside]
    q = jnp.asarray(normal(0, B, KV, count, GROUP, DIM))
    paged = in_pages(cached, page)
    for parts, values_part in (((q,), 1), ((q, 2 * q), 0)):
        expected = plain_attention.attend_plainly(
            parts, [cached, *uncached], values_part=values_part, block=16
        )
        if device == "plain":
            result = plain_attention.attend_plainly(
                parts, [paged, *uncached], values_part=values_part, block=16
            )
        else:
            run = partial(
                by_device._attend_by_kernel, kernel=module.attend_in_kernel, interpret=True
            )
            result = run(parts, [paged, *uncached], values_part=values_part)
        np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("page", [8, 32])
def test_what_is_paid_to_each_slot_of_a_page(page) -> None:
    pieces, _, _ = make_pieces(5, 10)
    q = jnp.asarray(normal(0, B, 5, KV * GROUP, DIM) * 3)
    expected = attention_paid(q, pieces[0], pieces[1:])
    result = attention_paid(q, in_pages(pieces[0], page), pieces[1:])
    np.testing.assert_allclose(result[..., :SLOTS], expected, atol=1e-5)
    assert not np.any(result[..., SLOTS:])


@pytest.mark.full
def test_a_tpu_fetches_no_page_that_a_row_does_not_hold(monkeypatch) -> None:
    """Places of a block beyond a row's pages repeat pages, so that nothing is fetched for them.

    They name what the block before had there; in a row's first block, which has none before it,
    they name one of its pages again.
    """
    monkeypatch.setattr(tpu, "BLOCK", 16)
    (cached, *_), _, _ = make_pieces(1, None)
    paged = in_pages(cached, 8)
    fetched: list[list[int]] = []  # the pages of each block of each row: keys, then values
    pallas_call = tpu.pl.pallas_call

    def call(kernel, *, grid_spec, **options):
        def run(*operands):
            scalars = [np.asarray(x) for x in operands[:4]]
            index_maps = [
                spec.index_map for spec in grid_spec.in_specs if spec.block_shape[2:3] == (8,)
            ]
            for row, block in np.ndindex(B, grid_spec.grid[3]):
                fetched.append(
                    [int(index_map(row, 0, 0, block, *scalars)[0]) for index_map in index_maps]
                )
            return pallas_call(kernel, grid_spec=grid_spec, **options)(*operands)

        return run

    monkeypatch.setattr(tpu.pl, "pallas_call", call)
    q = (jnp.asarray(normal(0, B, KV, 1, GROUP, DIM)),)
    by_device._attend_by_kernel(
        q, [paged], values_part=1, kernel=tpu.attend_in_kernel, interpret=True
    )
    table, k = np.asarray(paged.table), 8
    # A row has 9 pages in two blocks.
    assert len(fetched) == 2 * B and all(len(pages) == 2 * k for pages in fetched)
    for row, count in enumerate(COUNTS):
        row_pages, blocks = list(table[row, : -(-count // 8)]), fetched[2 * row : 2 * row + 2]
        for pages in (*(pages[:k] for pages in blocks), *(pages[k:] for pages in blocks)):
            assert set(pages) <= set(row_pages) or not row_pages
        # The second block fetches the pages that it adds, and nothing else.
        changed = sum(a != b for a, b in zip(*blocks, strict=True))
        assert changed == 2 * max(0, len(row_pages) - k)


@pytest.mark.full
@pytest.mark.thorough_except("1-4", "1000-16")
@pytest.mark.parametrize("dim", [4, 16, 80])
@pytest.mark.parametrize("programs", [1, 1000])
def test_the_gpus_kernel_takes_heads_of_every_size(dim, programs, monkeypatch) -> None:
    """Interpreted: the kernel's blocks are as wide as a power of two, and at least 16."""
    for name, size in {"BLOCK": 16, "ROWS": 16, "PROGRAMS": programs}.items():
        monkeypatch.setattr(gpu, name, size)
    pieces, _, _ = make_pieces(5, 10, dim)
    q = (jnp.asarray(normal(0, B, KV, 5, GROUP, dim)),)
    expected = plain_attention.attend_plainly(q, pieces, values_part=1, block=16)
    result = by_device._attend_by_kernel(
        q, pieces, values_part=1, kernel=gpu.attend_in_kernel, interpret=True
    )
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.full
@pytest.mark.thorough_except(
    "None-2-True-specjax.models.attention.tpu", "None-1-True-specjax.models.attention.gpu"
)
@pytest.mark.parametrize("module", [tpu, gpu])
@pytest.mark.parametrize(("kv_heads", "beside"), [(KV, True), (1, True), (KV, False)])
@pytest.mark.parametrize("page", [None, pytest.param(16, marks=pytest.mark.thorough)])
def test_on_a_mesh_the_kernel_runs_where_rows_and_heads_lie(kv_heads, beside, page, module) -> None:
    """One head of keys cannot be split, but the query heads that share it are.

    Pages lie where their rows do.
    """
    (cached, *uncached), _, _ = make_pieces(5, 10)
    uncached = uncached if beside else []
    cached = cached.replace(entry=tuple(part[:, :kv_heads] for part in cached.entry))
    uncached = [(tuple(part[:, :kv_heads] for part in entry), mask) for entry, mask in uncached]
    q = (jnp.asarray(normal(0, B, kv_heads, 5, GROUP, DIM)),)
    expected = plain_attention.attend_plainly(q, [cached, *uncached], values_part=1, block=16)
    on_mesh = (in_pages(cached, page, groups=2) if page else cached).replace(mesh=make_mesh(2, 2))
    run = partial(
        by_device._attend_by_kernel, values_part=1, kernel=module.attend_in_kernel, interpret=True
    )
    result = jax.jit(run)(q, [on_mesh, *uncached])
    assert result.sharding.shard_shape(result.shape)[1:4] == (
        (1, 5, GROUP) if kv_heads == KV else (1, 5, GROUP // 2)
    )
    np.testing.assert_allclose(result, expected, atol=1e-5)


# --- in 8 bits ------------------------------------------------------------------------------------


def in_8_bits(pieces) -> list:
    """Return pieces whose entries are quantized."""

    def quantized(piece):
        if isinstance(piece, Filled):
            return piece.replace(entry=tuple(map(quantize, piece.entry)))
        return tuple(map(quantize, piece[0])), piece[1]

    return [quantized(piece) for piece in pieces]


@pytest.mark.full
@pytest.mark.thorough_except(
    "1-None-nothing-4-None-None-plain", "5-10-scratch and own-2-16-2.0-tpu"
)
@pytest.mark.parametrize("device", ["plain", *KERNELS])
@pytest.mark.parametrize(
    ("count", "window", "beside", "group", "page", "cap"),
    [
        (1, None, "nothing", 4, None, None),
        (5, 10, "scratch and own", 2, 16, 2.0),
        (60, 10, "scratch and own", 3, None, None),
        (5, 33, "each its own", 3, 8, None),
        pytest.param(60, None, "each its own", 2, 32, 2.0, marks=pytest.mark.thorough),
    ],
)
def test_entries_in_8_bits_are_read_as_floats_would_be(
    count, window, beside, group, page, cap, device, monkeypatch
) -> None:
    """Every form of attention equals plain attention over the rounded floats.

    With sinks, and with entries of two parts; scales beyond what is filled are NaN.
    """
    run = by_kernels_or_plainly(device, monkeypatch)
    pieces = in_8_bits(make_pieces(count, window)[0])
    cached, scratch, new = pieces
    if beside == "each its own":
        new = new[0], None
    uncached = [] if beside == "nothing" else [scratch, new]
    q = jnp.asarray(normal(0, B, KV, count, group, DIM))
    sinks = jnp.asarray(drawn_sinks(KV * group).reshape(KV, group))
    floats = jax.tree.map(
        dequantize, [cached, *uncached], is_leaf=lambda node: isinstance(node, QuantizedPart)
    )
    beyond = jnp.arange(SLOTS) >= cached.count[:, None, None]
    damaged = tuple(
        part.replace(scales=jnp.where(beyond, jnp.nan, part.scales)) for part in cached.entry
    )
    if page:
        read = in_pages(cached, page)
    else:
        read = cached.replace(entry=cached.entry if device == "plain" else damaged)
    for parts, values_part in (((q,), 1), ((q, 2 * q), 0)):
        expected = plain_attention.attend_plainly(
            parts, floats, sinks, values_part=values_part, block=16, cap=cap
        )
        result = run(parts, [read, *uncached], sinks, values_part=values_part, cap=cap)
        np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("module", [tpu, gpu])
@pytest.mark.parametrize("page", [None, pytest.param(16, marks=pytest.mark.thorough)])
def test_scales_lie_on_a_mesh_where_their_numbers_do(page, module) -> None:
    cached, *uncached = in_8_bits(make_pieces(5, 10)[0])
    q = (jnp.asarray(normal(0, B, KV, 5, GROUP, DIM)),)
    expected = plain_attention.attend_plainly(q, [cached, *uncached], values_part=1, block=16)
    on_mesh = (in_pages(cached, page, groups=2) if page else cached).replace(mesh=make_mesh(2, 2))
    run = partial(
        by_device._attend_by_kernel, values_part=1, kernel=module.attend_in_kernel, interpret=True
    )
    result = jax.jit(run)(q, [on_mesh, *uncached])
    assert result.sharding.shard_shape(result.shape)[:2] == (B // 2, 1)
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.full
def test_what_is_paid_to_slots_in_8_bits() -> None:
    cached, *uncached = in_8_bits(make_pieces(5, 10)[0])
    floats = jax.tree.map(
        dequantize, [cached, *uncached], is_leaf=lambda node: isinstance(node, QuantizedPart)
    )
    q = jnp.asarray(normal(0, B, 5, KV * GROUP, DIM) * 3)
    np.testing.assert_allclose(
        attention_paid(q, cached, uncached), attention_paid(q, floats[0], floats[1:]), atol=1e-5
    )


def test_a_query_may_see_its_own_slot_alone() -> None:
    pieces, (keys, values), visible = make_pieces(5, None)
    diagonal = np.eye(5, dtype=bool)
    visible = np.concatenate([visible[..., :-5], np.broadcast_to(diagonal, (B, 5, 5))], axis=2)
    q = normal(0, B, 5, KV * GROUP, DIM) * 3
    expected, _ = plain(q, keys, values, visible, DIM**-0.5)
    result = jax.jit(attend)(jnp.asarray(q), [*pieces[:2], (pieces[2][0], None)])
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_blocks_before_every_window_are_skipped_and_none_that_is_seen() -> None:
    """Nobody sees the first blocks, since all rows are long: with NaN there, nothing changes."""
    counts = np.array([70, 69, 66, 68])
    entry = tuple(normal(seed, B, KV, SLOTS, DIM) for seed in (1, 2))
    positions = counts[:, None] + np.arange(3)
    for window in (1, 4, 6, 18, 19, 20, 36, 52, 60):
        # The last block begins at SLOTS - 16, and is always read.
        first = min((positions.min() - window + 1) // 16 * 16, SLOTS - 16)
        damaged = tuple(jnp.asarray(part).at[:, :, : max(first, 0)].set(jnp.nan) for part in entry)
        visible = np.arange(SLOTS) > positions[..., None] - window
        visible &= np.arange(SLOTS) < counts[:, None, None]
        q = normal(0, B, 3, KV * GROUP, DIM)
        expected, _ = plain(q, *entry, visible, DIM**-0.5)
        filled = Filled(damaged, jnp.asarray(counts), jnp.asarray(positions - window + 1))
        np.testing.assert_allclose(jax.jit(attend)(jnp.asarray(q), [filled]), expected, atol=1e-5)


def test_who_sees_nothing_finds_zeros() -> None:
    pieces, (keys, values), visible = make_pieces(2, None)
    q = normal(0, B, 2, KV * GROUP, DIM)
    expected, _ = plain(
        q, keys[:, :, :SLOTS], values[:, :, :SLOTS], visible[..., :SLOTS], DIM**-0.5
    )
    result = np.asarray(jax.jit(attend)(jnp.asarray(q), pieces[:1]))
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert COUNTS[3] == 0 and not result[3].any()


def test_queries_of_two_parts_attend_to_the_first() -> None:
    """Products with both parts of an entry are added, and the values are its first part.

    This is how latent attention works.
    """
    latents, rotated = normal(1, B, 1, SLOTS, 6), normal(2, B, 1, SLOTS, 4)
    q = normal(3, B, 5, 4, 6), normal(4, B, 5, 4, 4)
    visible = np.broadcast_to(np.arange(SLOTS) < COUNTS[:, None, None], (B, 5, SLOTS))
    expected, _ = plain(
        np.concatenate(q, -1), np.concatenate([latents, rotated], -1), latents, visible, 0.3
    )
    filled = Filled((jnp.asarray(latents), jnp.asarray(rotated)), jnp.asarray(COUNTS))
    result = jax.jit(partial(attend, scale=0.3, values_part=0))(
        tuple(map(jnp.asarray, q)), [filled]
    )
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 10])
def test_what_is_paid_to_each_slot(window) -> None:
    pieces, (keys, values), visible = make_pieces(5, window)
    q = normal(0, B, 5, KV * GROUP, DIM) * 3
    _, expected = plain(q, keys, values, visible, DIM**-0.5)
    result = jax.jit(attention_paid)(jnp.asarray(q), pieces[0], pieces[1:])
    np.testing.assert_allclose(result, expected[..., :SLOTS], atol=1e-5)


def test_what_lies_beyond_what_is_filled_is_never_read() -> None:
    """Blocks without a filled slot are not even multiplied: with NaN there, nothing changes."""
    entry = tuple(
        jnp.asarray(normal(seed, B, KV, SLOTS, DIM)).at[:, :, 48:].set(jnp.nan) for seed in (1, 2)
    )
    count = jnp.asarray([40, 3, 41, 0])
    q = jnp.asarray(normal(0, B, 5, KV * GROUP, DIM))
    clean = tuple(jnp.nan_to_num(part) for part in entry)
    np.testing.assert_array_equal(
        attend(q, [Filled(entry, count)]), attend(q, [Filled(clean, count)])
    )


def test_gradients_are_those_of_a_softmax() -> None:
    keys, values = (jnp.asarray(normal(seed, B, KV, 9, DIM)) for seed in (1, 2))
    q = jnp.asarray(normal(0, B, 9, KV * GROUP, DIM))
    # The first query sees nothing.
    mask = jnp.tril(jnp.ones((1, 9, 9), bool), k=-1).at[0, 3, 3].set(True)

    def softmax(q, keys, values):
        grouped = q.reshape(B, 9, KV, GROUP, DIM) * DIM**-0.5
        scores = jnp.where(
            mask[:, None, :, None], jnp.einsum("btkgd,bksd->bktgs", grouped, keys), -jnp.inf
        )
        weights = jax.nn.softmax(
            jnp.where(jnp.any(mask, axis=-1)[:, None, :, None, None], scores, 0.0)
        )
        output = jnp.einsum("bktgs,bksd->btkgd", weights, values).reshape(B, 9, -1)
        return jnp.where(jnp.any(mask, axis=-1)[..., None], output, 0.0)

    def ours(q, keys, values):
        half = [((keys[:, :, a:b], values[:, :, a:b]), mask[..., a:b]) for a, b in ((0, 4), (4, 9))]
        return attend(q, half)

    weights = 10 * jnp.asarray(normal(8, B, 9, KV * GROUP * DIM))
    expected, result = (
        jax.jit(jax.grad(lambda *args, f=f: jnp.sum(f(*args) * weights), argnums=(0, 1, 2)))(
            q, keys, values
        )
        for f in (softmax, ours)
    )
    for gradient, expected_gradient in zip(result, expected, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-4)


SINKS_AND_CAPS = [(True, None), (False, 2.0), (True, 2.0)]
"""Whether there are sinks, and the cap of the scores.

Queries are drawn so that scores reach some four times that cap. Sinks are drawn so that some take
nearly all attention, and some nothing.
"""


def drawn_sinks(heads: int = KV * GROUP) -> np.ndarray:
    return np.random.default_rng(9).permutation(np.linspace(-4, 6, heads)).astype(np.float32)


@pytest.mark.full
@pytest.mark.parametrize("blocks", ["some", "one"])
@pytest.mark.parametrize(("with_sinks", "cap"), SINKS_AND_CAPS)
@pytest.mark.parametrize(("count", "window"), [(1, None), (5, 10)])
def test_a_sink_is_one_more_score_without_a_value(
    count, window, with_sinks, cap, blocks, monkeypatch
) -> None:
    if blocks == "one":
        monkeypatch.setattr(by_device, "BLOCK", 128)
    pieces, (keys, values), visible = make_pieces(count, window)
    q, sinks = normal(0, B, count, KV * GROUP, DIM) * 3, drawn_sinks() if with_sinks else None
    expected, _ = plain(q, keys, values, visible, 0.5, sinks, cap)
    sink_scores = None if sinks is None else jnp.asarray(sinks)
    result = jax.jit(partial(attend, scale=0.5, cap=cap))(jnp.asarray(q), pieces, sinks=sink_scores)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    # Without sinks, or without the cap, the result would differ: the test can fail.
    without, _ = plain(q, keys, values, visible, 0.5, sinks if cap else None)
    assert np.abs(without - expected).max() > 0.1


def by_kernels_or_plainly(device: str, monkeypatch):
    """Return a function that runs grouped queries over pieces.

    It runs a kernel, interpreted, or attention in plain JAX.
    """
    if device == "plain":
        return partial(plain_attention.attend_plainly, block=16)
    module, sizes = KERNELS[device]
    for name, size in {"BLOCK": 16, **sizes}.items():
        monkeypatch.setattr(module, name, size)
    return partial(by_device._attend_by_kernel, kernel=module.attend_in_kernel, interpret=True)


@pytest.mark.full
@pytest.mark.thorough_except(
    "1-None-nothing-4-None-True-None-plain",
    "5-10-scratch and own-2-None-True-2.0-gpu",
    "60-10-scratch and own-3-None-True-None-plain",
    "5-33-each its own-3-16-True-2.0-tpu",
    "1-10-nothing-1-16-False-2.0-gpu, splits",
)
@pytest.mark.parametrize("device", ["plain", *KERNELS])
@pytest.mark.parametrize(
    ("count", "window", "beside", "group", "page", "with_sinks", "cap"),
    [
        (1, None, "nothing", 4, None, True, None),
        (5, 10, "scratch and own", 2, None, True, 2.0),
        # Tiles of 16 queries begin anywhere in a group of 3.
        (60, 10, "scratch and own", 3, None, True, None),
        (5, 33, "each its own", 3, 16, True, 2.0),
        (1, 10, "nothing", 1, 16, False, 2.0),
        pytest.param(60, None, "each its own", 2, 8, True, 2.0, marks=pytest.mark.thorough),
        pytest.param(5, None, "scratch and own", 4, 32, True, None, marks=pytest.mark.thorough),
    ],
)
def test_every_form_knows_sinks_and_caps(
    count, window, beside, group, page, with_sinks, cap, device, monkeypatch
) -> None:
    """A sink counts once, however many tiles, blocks and splits there are.

    Entries have one part or two, as those of latent attention have.
    """
    run = by_kernels_or_plainly(device, monkeypatch)
    (cached, scratch, new), (keys, values), visible = make_pieces(count, window)
    num_slots = SLOTS if beside == "nothing" else keys.shape[2]
    if beside == "each its own":
        new = (new[0], None)
        visible = np.concatenate(
            [visible[..., :-count], np.broadcast_to(np.eye(count, dtype=bool), (B, count, count))],
            axis=2,
        )
    pieces = [
        in_pages(cached, page) if page else cached,
        *([] if beside == "nothing" else [scratch, new]),
    ]
    keys, values = keys[:, :, :num_slots], values[:, :, :num_slots]
    visible = visible[..., :num_slots]
    q = normal(0, B, KV, count, group, DIM)
    sinks = drawn_sinks(KV * group) if with_sinks else None
    grouped_sinks = None if sinks is None else jnp.asarray(sinks.reshape(KV, group))
    for parts, values_part in (((q,), 1), ((q, 2 * q), 0)):
        all_keys = keys if len(parts) == 1 else np.concatenate([keys, values], -1)
        flat = np.concatenate(parts, -1).transpose(0, 2, 1, 3, 4).reshape(B, count, KV * group, -1)
        expected, _ = plain(flat, all_keys, (keys, values)[values_part], visible, 1.0, sinks, cap)
        result = run(
            tuple(map(jnp.asarray, parts)), pieces, grouped_sinks, values_part=values_part, cap=cap
        )
        result = np.asarray(result).transpose(0, 2, 1, 3, 4).reshape(B, count, -1)
        np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("device", ["plain", *KERNELS])
def test_sinks_and_caps_of_bfloat16(device, monkeypatch) -> None:
    run = by_kernels_or_plainly(device, monkeypatch)
    pieces, (keys, values), visible = make_pieces(5, 10)
    pieces = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, pieces)
    q, keys, values = (
        np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
        for x in (normal(0, B, 5, KV * GROUP, DIM), keys, values)
    )
    sinks = jnp.asarray(drawn_sinks(), jnp.bfloat16)
    expected, _ = plain(q, keys, values, visible, 1.0, np.asarray(sinks, np.float32), 2.0)
    grouped = plain_attention.group_queries((jnp.asarray(q, jnp.bfloat16),), pieces, 1.0)
    result = run(
        grouped, pieces, plain_attention.group_sinks(sinks, grouped), values_part=1, cap=2.0
    )
    assert result.dtype == jnp.bfloat16
    result = np.asarray(result, np.float32).transpose(0, 2, 1, 3, 4).reshape(B, 5, -1)
    np.testing.assert_allclose(result, expected, atol=0.02)


@pytest.mark.full
@pytest.mark.parametrize("device", ["plain", *KERNELS])
def test_with_a_sink_who_sees_nothing_finds_zeros(device, monkeypatch) -> None:
    """A query that sees nothing gets zeros, however large the sink.

    That holds beside tokens that are hidden from it, too. A sink of -inf equals no sink.
    """
    run = by_kernels_or_plainly(device, monkeypatch)
    (cached, (scratch, _), _), (keys, values), visible = make_pieces(2, None)
    pieces = [cached, (scratch, jnp.zeros((1, 2, 7), bool))]
    q = jnp.asarray(normal(0, B, 2, KV * GROUP, DIM))
    sinks = np.array([80.0, -np.inf, -80.0, 0.0], np.float32)
    grouped = plain_attention.group_queries((q,), pieces, None)
    result = run(
        grouped, pieces, plain_attention.group_sinks(jnp.asarray(sinks), grouped), values_part=1
    )
    result = np.asarray(result).transpose(0, 2, 1, 3, 4).reshape(B, 2, -1)
    expected, _ = plain(
        q, keys[:, :, :SLOTS], values[:, :, :SLOTS], visible[..., :SLOTS], DIM**-0.5, sinks
    )
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert COUNTS[3] == 0 and not result[3].any()
    assert np.abs(result[:, :, :DIM]).max() < 1e-20 and result[0, :, DIM:].all()


@pytest.mark.full
@pytest.mark.parametrize("module", [tpu, gpu])
@pytest.mark.parametrize("kv_heads", [KV, 1])
def test_on_a_mesh_sinks_lie_where_their_heads_do(kv_heads, module) -> None:
    (cached, *uncached), (keys, values), visible = make_pieces(5, 10)
    cached = cached.replace(
        entry=tuple(part[:, :kv_heads] for part in cached.entry), mesh=make_mesh(2, 2)
    )
    uncached = [(tuple(part[:, :kv_heads] for part in entry), mask) for entry, mask in uncached]
    q, sinks = normal(0, B, 5, kv_heads * 4, DIM) * 3, drawn_sinks(kv_heads * 4)
    expected, _ = plain(q, keys[:, :kv_heads], values[:, :kv_heads], visible, DIM**-0.5, sinks, 2.0)
    grouped = plain_attention.group_queries((jnp.asarray(q),), [cached], None)
    grouped_sinks = plain_attention.group_sinks(jnp.asarray(sinks), grouped)
    run = partial(
        by_device._attend_by_kernel,
        values_part=1,
        kernel=module.attend_in_kernel,
        cap=2.0,
        interpret=True,
    )
    result = jax.jit(run)(grouped, [cached, *uncached], grouped_sinks)
    assert result.sharding.shard_shape(result.shape)[1:4] == (
        (1, 5, 4) if kv_heads == KV else (1, 5, 2)
    )
    np.testing.assert_allclose(
        np.asarray(result).transpose(0, 2, 1, 3, 4).reshape(B, 5, -1), expected, atol=1e-5
    )


@pytest.mark.parametrize("module", [tpu, gpu])
def test_attention_without_sinks_and_caps_does_not_pay_for_them(module) -> None:
    pieces, _, _ = make_pieces(5, None)
    q = (jnp.asarray(normal(0, B, KV, 5, GROUP, DIM)),)
    sinks = jnp.asarray(drawn_sinks().reshape(KV, GROUP))
    run = partial(by_device._attend_by_kernel, values_part=1, kernel=module.attend_in_kernel)

    def kernel(sinks=None, cap=None) -> tuple[int, bool]:
        """Return how many arrays the kernel gets, and whether it computes a tanh."""
        traced = jax.make_jaxpr(partial(run, cap=cap))(q, pieces, sinks)
        # A second call merges the splits.
        call = next(call for call in traced.eqns if call.primitive.name == "pallas_call")
        return len(call.invars), "tanh" in str(call)

    operands, has_tanh = kernel()
    assert not has_tanh
    assert kernel(cap=2.0) == (operands, True)
    assert kernel(sinks) == (operands + 1, False)


@pytest.mark.parametrize(("with_sinks", "cap"), SINKS_AND_CAPS)
def test_what_is_paid_to_each_slot_beside_sinks(with_sinks, cap) -> None:
    pieces, (keys, values), visible = make_pieces(5, 10)
    q, sinks = normal(0, B, 5, KV * GROUP, DIM) * 3, drawn_sinks() if with_sinks else None
    _, expected = plain(q, keys, values, visible, 0.5, sinks, cap)
    sink_scores = None if sinks is None else jnp.asarray(sinks)
    result = jax.jit(partial(attention_paid, scale=0.5, cap=cap))(
        jnp.asarray(q), pieces[0], pieces[1:], sinks=sink_scores
    )
    np.testing.assert_allclose(result, expected[..., :SLOTS], atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("with_sinks", "cap"), SINKS_AND_CAPS)
def test_gradients_with_sinks_and_caps_are_those_of_a_softmax(with_sinks, cap) -> None:
    """Sinks have gradients as well.

    The last piece holds each query's slot, and the first query sees nothing else.
    """
    keys, values = (jnp.asarray(normal(seed, B, KV, 14, DIM)) for seed in (1, 2))
    q, sinks = jnp.asarray(normal(0, B, 5, KV * GROUP, DIM)) * 3, jnp.asarray(drawn_sinks())
    mask = jnp.asarray(np.random.default_rng(3).random((1, 5, 9)) < 0.6).at[0, 0].set(False)
    visible = jnp.concatenate([mask, jnp.eye(5, dtype=bool)[None]], axis=2)

    def softmax(q, keys, values, sinks):
        grouped = q.reshape(B, 5, KV, GROUP, DIM) * DIM**-0.5
        scores = jnp.einsum("btkgd,bksd->bktgs", grouped, keys)
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        scores = jnp.where(visible[:, None, :, None], scores, -jnp.inf)
        column = jnp.broadcast_to(sinks.reshape(KV, 1, GROUP, 1), (*scores.shape[:-1], 1))
        column = column if with_sinks else jnp.full_like(column, -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
        return jnp.einsum("bktgs,bksd->btkgd", weights, values).reshape(B, 5, -1)

    def ours(q, keys, values, sinks):
        parts = [(keys[:, :, a:b], values[:, :, a:b]) for a, b in ((0, 4), (4, 9), (9, 14))]
        pieces = [(parts[0], mask[..., :4]), (parts[1], mask[..., 4:]), (parts[2], None)]
        return attend(q, pieces, sinks=sinks if with_sinks else None, cap=cap)

    weights = 10 * jnp.asarray(normal(8, B, 5, KV * GROUP * DIM))
    expected, result = (
        jax.jit(jax.grad(lambda *args, f=f: jnp.sum(f(*args) * weights), argnums=range(4)))(
            q, keys, values, sinks
        )
        for f in (softmax, ours)
    )
    assert with_sinks == bool(jnp.all(jnp.abs(expected[3]) > 1e-3))
    for gradient, expected_gradient in zip(result, expected, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-4)


SHARED = {
    "first": jnp.asarray([[0, 1, 2], [0, 0, 0], [2, 2, 3], [1, 1, 1], [0, 1, 0], [4, 4, 4]]),
    "last": jnp.asarray([[2], [0], [4], [3], [1], [4]]),
}


def shared_attention(q, context, entry):
    """Attend to two contexts of 5 tokens, each with 3 rows of 3 queries, and to the own tokens."""
    causal = jnp.tril(jnp.ones((3, 3), bool))[None]
    return attend_to(q, [Shared(context, **SHARED), (entry, causal)])


def copied_context(q, context, entry):
    """Do the same with a copy of the context for each row."""
    number = jnp.arange(5)
    visible = (number >= SHARED["first"][..., None]) & (number <= SHARED["last"][..., None])
    copies = jax.tree.map(lambda x: jnp.repeat(x, 3, axis=0), context)
    causal = jnp.tril(jnp.ones((3, 3), bool))[None]
    return attend_to(q, [(copies, visible), (entry, causal)])


def attend_to(q, pieces):
    """Attend without a compiled program, which would not depend on the bound of a chunk."""
    grouped = plain_attention.group_queries((q,), pieces, None)
    return plain_attention.attend_plainly(grouped, pieces, values_part=1, block=16)


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_rows_share_a_context_as_if_each_had_a_copy(rows, monkeypatch) -> None:
    """Check values and gradients, with a chunk of so many rows of each context at a time."""
    monkeypatch.setattr(plain_attention, "SCORES_BYTES", rows * 4 * 2 * 4 * 3 * 5)
    keys = iter(jax.random.split(jax.random.key(0), 5))
    q = jax.random.normal(next(keys), (6, 3, 4, 8))
    context, entry = (
        tuple(jax.random.normal(next(keys), (count, 2, slots, 8)) for _ in range(2))
        for count, slots in ((2, 5), (6, 3))
    )

    def differentiate(function):
        # A function of its own, because JAX would use the program of another bound again.
        loss = lambda *arguments: jnp.sum(jnp.sin(function(*arguments)))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6),
        differentiate(shared_attention)(q, context, entry),
        differentiate(copied_context)(q, context, entry),
    )
    program = differentiate(shared_attention).lower(q, context, entry).as_text()
    assert ("stablehlo.while" in program) == (rows < 3)
