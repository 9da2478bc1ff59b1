"""Attention in pieces and blocks against one plain softmax in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.attention import Filled, attend, attention_paid, by_device, gpu, tpu
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
        monkeypatch.setattr(module, "BLOCK", 16)  # 70 slots are no whole number of them


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def plain(q, keys, values, visible, scale, sinks=None, cap=None):
    """In float64, of ``q [B, T, heads, d]``, keys and values ``[B, kv, S, d]`` and ``visible [B, T, S]``: what is attended to,
    zeros where nothing is seen; and ``[B, kv, S]`` the attention paid to each slot. Sinks are one more column of scores.
    """
    out = np.zeros((*q.shape[:3], values.shape[-1]))
    paid = np.zeros((q.shape[0], keys.shape[1], keys.shape[2]))
    for b, t, head in np.ndindex(*q.shape[:3]):
        seen, kv = visible[b, t], head // (q.shape[2] // keys.shape[1])
        if not seen.any():
            continue
        scores = keys[b, kv, seen].astype(np.float64) @ q[b, t, head] * scale
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        column = [] if sinks is None else [np.float64(sinks[head])]
        scores = np.concatenate([scores, column])
        weights = np.exp(scores - scores.max())
        weights = (weights / weights.sum())[: seen.sum()]
        out[b, t, head] = weights @ values[b, kv, seen]
        paid[b, kv, seen] += weights
    return out.reshape(*q.shape[:2], -1), paid


def pieces(count: int, window: int | None, dim: int = DIM):
    """A cache that is filled to different degrees, scratch of a tree, and the call's own tokens; and all of it as one."""
    entry = tuple(normal(seed, B, KV, SLOTS, dim) for seed in (1, 2))
    scratch = tuple(normal(seed, B, KV, 7, dim) for seed in (3, 4))
    own = tuple(normal(seed, B, KV, count, dim) for seed in (5, 6))
    positions = COUNTS[:, None] + np.arange(count)[None]
    in_scratch = np.random.default_rng(7).random((B, count, 7)) < 0.5
    mask = np.tril(np.ones((1, count, count), bool))
    in_cache = np.broadcast_to(np.arange(SLOTS) < COUNTS[:, None, None], (B, count, SLOTS))
    since = None
    if window is not None:
        since = jnp.asarray(positions - window + 1)
        in_cache = in_cache & (np.arange(SLOTS) > positions[..., None] - window)
    together = [np.concatenate(parts, axis=2) for parts in zip(entry, scratch, own, strict=True)]
    seen = np.concatenate([in_cache, in_scratch, np.broadcast_to(mask, (B, count, count))], axis=2)
    given = [
        Filled(tuple(map(jnp.asarray, entry)), jnp.asarray(COUNTS), since),
        (tuple(map(jnp.asarray, scratch)), jnp.asarray(in_scratch)),
        (tuple(map(jnp.asarray, own)), jnp.asarray(mask)),
    ]
    return given, together, seen


@pytest.mark.parametrize("window", [None, 1, 10, 33])
@pytest.mark.parametrize("count", [1, 5, 60])
def test_pieces_and_blocks_are_one_softmax(count, window) -> None:
    given, (keys, values), seen = pieces(count, window)
    q = normal(0, B, count, KV * GROUP, DIM) * 3
    expected, _ = plain(q, keys, values, seen, DIM**-0.5)
    np.testing.assert_allclose(jax.jit(attend)(jnp.asarray(q), given), expected, atol=1e-5)


KERNELS = {  # to settle on small sizes
    "tpu": (tpu, {"ROWS": 16}),  # 60 tokens of two heads are no whole number of those
    "gpu": (gpu, {"ROWS": 16, "PROGRAMS": 1}),
    "gpu, splits": (gpu, {"ROWS": 16, "PROGRAMS": 1000}),
}


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(
    ("count", "window", "beside"),
    [
        (1, 10, "nothing"),
        pytest.param(
            1, None, "each its own", marks=pytest.mark.thorough
        ),  # which pages are read with, below
        (5, 10, "scratch and own"),
        (60, None, "scratch and own"),
        pytest.param(60, 10, "each its own", marks=pytest.mark.thorough),
    ],
)
def test_kernels_find_what_plain_attention_finds(
    count, window, beside, device, monkeypatch
) -> None:
    """Interpreted; with NaN where nothing is filled, and in two parts as latent attention has it."""
    module, sizes = KERNELS[device]
    for name, size in {"BLOCK": 16, **sizes}.items():
        monkeypatch.setattr(module, name, size)
    (whole, scratch, own), _, _ = pieces(count, window)
    others = {
        "nothing": [],
        "scratch and own": [scratch, own],
        "each its own": [scratch, (own[0], None)],
    }[beside]
    beyond = jnp.arange(SLOTS)[:, None] >= whole.count[:, None, None, None]
    damaged = whole.replace(
        entry=jax.tree.map(lambda part: jnp.where(beyond, jnp.nan, part), whole.entry)
    )
    q = jnp.asarray(normal(0, B, KV, count, GROUP, DIM))
    for parts, values_part in (((q,), 1), ((q, 2 * q), 0)):
        expected = plain_attention.attend_plainly(
            parts, [whole, *others], values_part=values_part, block=16
        )
        found = by_device._attend_by_kernel(
            parts,
            [damaged, *others],
            values_part=values_part,
            kernel=module.attend_in_kernel,
            interpret=True,
        )
        np.testing.assert_allclose(found, expected, atol=1e-5)


def in_pages(whole: Filled, page: int, groups: int = 1) -> Filled:
    """The same in pages, which lie in any order and of which some are free. NaN stands in free ones, and beyond what is filled
    in the others, and of whole numbers the largest. Each of so many groups of rows has its own part of the pool.
    """
    order, columns = np.random.default_rng(page), -(-SLOTS // page)
    counts = np.split(np.asarray(whole.count), groups)
    pages = len(counts[0]) * columns + 2
    table = np.full((B, columns), pages, np.int32)
    parts, structure = jax.tree.flatten(whole.entry)
    spoiled = [127 if part.dtype == np.int8 else np.nan for part in parts]
    pools = [
        np.full((groups * pages, part.shape[1], page, *part.shape[3:]), nothing, part.dtype)
        for part, nothing in zip(parts, spoiled, strict=True)
    ]
    row = 0
    for group, of_group in enumerate(counts):
        free = list(order.permutation(pages))
        for count in of_group:
            for column in range(-(-count // page)):
                table[row, column] = free.pop()
                there = slice(column * page, min((column + 1) * page, count))
                for pool, part in zip(pools, parts, strict=True):
                    at = group * pages + table[row, column]
                    pool[at, :, : there.stop - there.start] = part[row, :, there]
            row += 1
    return whole.replace(
        entry=jax.tree.unflatten(structure, map(jnp.asarray, pools)), table=jnp.asarray(table)
    )


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
    """Interpreted, with blocks of several pages, of one, and of a part of one; as latent attention has it, too."""
    module, sizes = KERNELS.get(device, (plain_attention, {}))
    for name, size in {"BLOCK": 16, **sizes}.items():
        monkeypatch.setattr(module, name, size)
    (whole, scratch, own), _, _ = pieces(count, window)
    others = {
        "nothing": [],
        "scratch and own": [scratch, own],
        "each its own": [scratch, (own[0], None)],
    }[beside]
    q = jnp.asarray(normal(0, B, KV, count, GROUP, DIM))
    paged = in_pages(whole, page)
    for parts, values_part in (((q,), 1), ((q, 2 * q), 0)):
        expected = plain_attention.attend_plainly(
            parts, [whole, *others], values_part=values_part, block=16
        )
        if device == "plain":
            found = plain_attention.attend_plainly(
                parts, [paged, *others], values_part=values_part, block=16
            )
        else:
            run = partial(
                by_device._attend_by_kernel, kernel=module.attend_in_kernel, interpret=True
            )
            found = run(parts, [paged, *others], values_part=values_part)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("page", [8, 32])
def test_what_is_paid_to_each_slot_of_a_page(page) -> None:
    given, _, _ = pieces(5, 10)
    q = jnp.asarray(normal(0, B, 5, KV * GROUP, DIM) * 3)
    expected = attention_paid(q, given[0], given[1:])
    found = attention_paid(q, in_pages(given[0], page), given[1:])
    np.testing.assert_allclose(found[..., :SLOTS], expected, atol=1e-5)
    assert not np.any(found[..., SLOTS:])


def test_a_tpu_fetches_no_page_that_a_row_does_not_hold(monkeypatch) -> None:
    """And none twice in one block but where a row's first block is not full: what a block lacks is what the one before had."""
    monkeypatch.setattr(tpu, "BLOCK", 16)
    (whole, *_), _, _ = pieces(1, None)
    paged = in_pages(whole, 8)
    asked: list[list[int]] = []
    whole_call = tpu.pl.pallas_call

    def call(kernel, *, grid_spec, **options):
        def run(*given):
            scalars = [np.asarray(x) for x in given[:4]]
            places = [
                spec.index_map for spec in grid_spec.in_specs if spec.block_shape[2:3] == (8,)
            ]
            blocks = grid_spec.grid[3]
            asked.extend(
                [
                    [int(p(b, 0, 0, i, *scalars)[0]) for p in places]
                    for b in range(B)
                    for i in range(blocks)
                ]
            )
            return whole_call(kernel, grid_spec=grid_spec, **options)(*given)

        return run

    monkeypatch.setattr(tpu.pl, "pallas_call", call)
    q = (jnp.asarray(normal(0, B, KV, 1, GROUP, DIM)),)
    by_device._attend_by_kernel(
        q, [paged], values_part=1, kernel=tpu.attend_in_kernel, interpret=True
    )
    table, k = np.asarray(paged.table), 8
    assert len(asked) == 2 * B and all(
        len(pages) == 2 * k for pages in asked
    )  # 9 pages of a row, in two blocks; keys, values
    for row, count in enumerate(COUNTS):
        held, blocks = list(table[row, : -(-count // 8)]), asked[2 * row : 2 * row + 2]
        for pages in (*(pages[:k] for pages in blocks), *(pages[k:] for pages in blocks)):
            assert set(pages) <= set(held) or not held
        changed = sum(a != b for a, b in zip(*blocks, strict=True))
        assert changed == 2 * max(
            0, len(held) - k
        )  # fetched by the second block: what it shows, and nothing else


@pytest.mark.parametrize("dim", [4, 16, 80])
@pytest.mark.parametrize("programs", [1, 1000])
def test_the_gpus_kernel_takes_heads_of_every_size(dim, programs, monkeypatch) -> None:
    """Interpreted: what it works on is as wide as a power of two and at least 16."""
    for name, size in {"BLOCK": 16, "ROWS": 16, "PROGRAMS": programs}.items():
        monkeypatch.setattr(gpu, name, size)
    given, _, _ = pieces(5, 10, dim)
    q = (jnp.asarray(normal(0, B, KV, 5, GROUP, dim)),)
    expected = plain_attention.attend_plainly(q, given, values_part=1, block=16)
    found = by_device._attend_by_kernel(
        q, given, values_part=1, kernel=gpu.attend_in_kernel, interpret=True
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("module", [tpu, gpu])
@pytest.mark.parametrize(("kv_heads", "beside"), [(KV, True), (1, True), (KV, False)])
@pytest.mark.parametrize("page", [None, pytest.param(16, marks=pytest.mark.thorough)])
def test_on_a_mesh_the_kernel_runs_where_rows_and_heads_lie(kv_heads, beside, page, module) -> None:
    """One head of keys cannot be split: the query heads that share it are. Pages lie where their rows do."""
    (whole, *others), _, _ = pieces(5, 10)
    others = others if beside else []
    whole = whole.replace(entry=tuple(part[:, :kv_heads] for part in whole.entry))
    others = [(tuple(part[:, :kv_heads] for part in entry), mask) for entry, mask in others]
    q = (jnp.asarray(normal(0, B, kv_heads, 5, GROUP, DIM)),)
    expected = plain_attention.attend_plainly(q, [whole, *others], values_part=1, block=16)
    on_mesh = (in_pages(whole, page, groups=2) if page else whole).replace(mesh=make_mesh(2, 2))
    run = partial(
        by_device._attend_by_kernel, values_part=1, kernel=module.attend_in_kernel, interpret=True
    )
    found = jax.jit(run)(q, [on_mesh, *others])
    assert found.sharding.shard_shape(found.shape)[1:4] == (
        (1, 5, GROUP) if kv_heads == KV else (1, 5, GROUP // 2)
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


# --- in 8 bits ------------------------------------------------------------------------------------


def in_8_bits(given) -> list:
    """Pieces whose entries are quantized."""

    def one(piece):
        if isinstance(piece, Filled):
            return piece.replace(entry=tuple(map(quantize, piece.entry)))
        return tuple(map(quantize, piece[0])), piece[1]

    return [one(piece) for piece in given]


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
    """Against floats that have been rounded: every form, with sinks, and of two parts; NaN in the scales of what is empty."""
    run = by_kernels_or_plainly(device, monkeypatch)
    given = in_8_bits(pieces(count, window)[0])
    whole, scratch, own = given
    if beside == "each its own":
        own = own[0], None
    others = [] if beside == "nothing" else [scratch, own]
    q = jnp.asarray(normal(0, B, KV, count, group, DIM))
    sinks = jnp.asarray(drawn_sinks(KV * group).reshape(KV, group))
    floats = jax.tree.map(
        dequantize, [whole, *others], is_leaf=lambda node: isinstance(node, QuantizedPart)
    )
    beyond = jnp.arange(SLOTS) >= whole.count[:, None, None]
    damaged = tuple(
        part.replace(scales=jnp.where(beyond, jnp.nan, part.scales)) for part in whole.entry
    )
    read = (
        in_pages(whole, page)
        if page
        else whole.replace(entry=whole.entry if device == "plain" else damaged)
    )
    for parts, values_part in (((q,), 1), ((q, 2 * q), 0)):
        expected = plain_attention.attend_plainly(
            parts, floats, sinks, values_part=values_part, block=16, cap=cap
        )
        found = run(parts, [read, *others], sinks, values_part=values_part, cap=cap)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("module", [tpu, gpu])
@pytest.mark.parametrize("page", [None, pytest.param(16, marks=pytest.mark.thorough)])
def test_scales_lie_on_a_mesh_where_their_numbers_do(page, module) -> None:
    whole, *others = in_8_bits(pieces(5, 10)[0])
    q = (jnp.asarray(normal(0, B, KV, 5, GROUP, DIM)),)
    expected = plain_attention.attend_plainly(q, [whole, *others], values_part=1, block=16)
    on_mesh = (in_pages(whole, page, groups=2) if page else whole).replace(mesh=make_mesh(2, 2))
    run = partial(
        by_device._attend_by_kernel, values_part=1, kernel=module.attend_in_kernel, interpret=True
    )
    found = jax.jit(run)(q, [on_mesh, *others])
    assert found.sharding.shard_shape(found.shape)[:2] == (B // 2, 1)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_what_is_paid_to_slots_in_8_bits() -> None:
    whole, *others = in_8_bits(pieces(5, 10)[0])
    floats = jax.tree.map(
        dequantize, [whole, *others], is_leaf=lambda node: isinstance(node, QuantizedPart)
    )
    q = jnp.asarray(normal(0, B, 5, KV * GROUP, DIM) * 3)
    np.testing.assert_allclose(
        attention_paid(q, whole, others), attention_paid(q, floats[0], floats[1:]), atol=1e-5
    )


def test_a_query_may_see_its_own_slot_alone() -> None:
    given, (keys, values), seen = pieces(5, None)
    own = np.eye(5, dtype=bool)
    seen = np.concatenate([seen[..., :-5], np.broadcast_to(own, (B, 5, 5))], axis=2)
    q = normal(0, B, 5, KV * GROUP, DIM) * 3
    expected, _ = plain(q, keys, values, seen, DIM**-0.5)
    found = jax.jit(attend)(jnp.asarray(q), [*given[:2], (given[2][0], None)])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_blocks_before_every_window_are_skipped_and_none_that_is_seen() -> None:
    """All rows are long, so that the first blocks are seen by nobody: with NaN there, nothing changes."""
    counts = np.array([70, 69, 66, 68])
    entry = tuple(normal(seed, B, KV, SLOTS, DIM) for seed in (1, 2))
    positions = counts[:, None] + np.arange(3)
    for window in (1, 4, 6, 18, 19, 20, 36, 52, 60):
        first = min(
            (positions.min() - window + 1) // 16 * 16, SLOTS - 16
        )  # where the last block begins
        damaged = tuple(jnp.asarray(part).at[:, :, : max(first, 0)].set(jnp.nan) for part in entry)
        seen = np.arange(SLOTS) > positions[..., None] - window
        seen &= np.arange(SLOTS) < counts[:, None, None]
        q = normal(0, B, 3, KV * GROUP, DIM)
        expected, _ = plain(q, *entry, seen, DIM**-0.5)
        filled = Filled(damaged, jnp.asarray(counts), jnp.asarray(positions - window + 1))
        np.testing.assert_allclose(jax.jit(attend)(jnp.asarray(q), [filled]), expected, atol=1e-5)


def test_who_sees_nothing_finds_zeros() -> None:
    given, (keys, values), seen = pieces(2, None)
    q = normal(0, B, 2, KV * GROUP, DIM)
    expected, _ = plain(q, keys[:, :, :SLOTS], values[:, :, :SLOTS], seen[..., :SLOTS], DIM**-0.5)
    found = np.asarray(jax.jit(attend)(jnp.asarray(q), given[:1]))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert COUNTS[3] == 0 and not found[3].any()


def test_queries_of_two_parts_attend_to_the_first() -> None:
    """Latent attention: products with both parts of an entry are added, and the values are the first part again."""
    latents, turned = normal(1, B, 1, SLOTS, 6), normal(2, B, 1, SLOTS, 4)
    q = normal(3, B, 5, 4, 6), normal(4, B, 5, 4, 4)
    seen = np.broadcast_to(np.arange(SLOTS) < COUNTS[:, None, None], (B, 5, SLOTS))
    expected, _ = plain(
        np.concatenate(q, -1), np.concatenate([latents, turned], -1), latents, seen, 0.3
    )
    filled = Filled((jnp.asarray(latents), jnp.asarray(turned)), jnp.asarray(COUNTS))
    found = jax.jit(partial(attend, scale=0.3, values_part=0))(tuple(map(jnp.asarray, q)), [filled])
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 10])
def test_what_is_paid_to_each_slot(window) -> None:
    given, (keys, values), seen = pieces(5, window)
    q = normal(0, B, 5, KV * GROUP, DIM) * 3
    _, expected = plain(q, keys, values, seen, DIM**-0.5)
    found = jax.jit(attention_paid)(jnp.asarray(q), given[0], given[1:])
    np.testing.assert_allclose(found, expected[..., :SLOTS], atol=1e-5)


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
    mask = (
        jnp.tril(jnp.ones((1, 9, 9), bool), k=-1).at[0, 3, 3].set(True)
    )  # the first query sees nothing

    def softmax(q, keys, values):
        grouped = q.reshape(B, 9, KV, GROUP, DIM) * DIM**-0.5
        scores = jnp.where(
            mask[:, None, :, None], jnp.einsum("btkgd,bksd->bktgs", grouped, keys), -jnp.inf
        )
        weights = jax.nn.softmax(
            jnp.where(jnp.any(mask, axis=-1)[:, None, :, None, None], scores, 0.0)
        )
        found = jnp.einsum("bktgs,bksd->btkgd", weights, values).reshape(B, 9, -1)
        return jnp.where(jnp.any(mask, axis=-1)[..., None], found, 0.0)

    def ours(q, keys, values):
        half = [((keys[:, :, a:b], values[:, :, a:b]), mask[..., a:b]) for a, b in ((0, 4), (4, 9))]
        return attend(q, half)

    weights = 10 * jnp.asarray(normal(8, B, 9, KV * GROUP * DIM))
    expected = jax.jit(
        jax.grad(lambda *args: jnp.sum(softmax(*args) * weights), argnums=(0, 1, 2))
    )(q, keys, values)
    found = jax.jit(jax.grad(lambda *args: jnp.sum(ours(*args) * weights), argnums=(0, 1, 2)))(
        q, keys, values
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


SINKS_AND_CAPS = [(True, None), (False, 2.0), (True, 2.0)]
"""Queries are drawn so that scores reach some four times that cap, and sinks so that some take nearly all, and some nothing."""


def drawn_sinks(heads: int = KV * GROUP) -> np.ndarray:
    return np.random.default_rng(9).permutation(np.linspace(-4, 6, heads)).astype(np.float32)


@pytest.mark.parametrize("blocks", ["some", "one"])
@pytest.mark.parametrize(("with_sinks", "cap"), SINKS_AND_CAPS)
@pytest.mark.parametrize(("count", "window"), [(1, None), (5, 10)])
def test_a_sink_is_one_more_score_without_a_value(
    count, window, with_sinks, cap, blocks, monkeypatch
) -> None:
    if blocks == "one":
        monkeypatch.setattr(by_device, "BLOCK", 128)
    given, (keys, values), seen = pieces(count, window)
    q, sinks = normal(0, B, count, KV * GROUP, DIM) * 3, drawn_sinks() if with_sinks else None
    expected, _ = plain(q, keys, values, seen, 0.5, sinks, cap)
    of_heads = None if sinks is None else jnp.asarray(sinks)
    found = jax.jit(partial(attend, scale=0.5, cap=cap))(jnp.asarray(q), given, sinks=of_heads)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    without, _ = plain(
        q, keys, values, seen, 0.5, sinks if cap else None
    )  # that the cases could tell
    assert np.abs(without - expected).max() > 0.1


def by_kernels_or_plainly(device: str, monkeypatch):
    """What runs grouped queries over pieces, by a kernel, interpreted, or in plain JAX."""
    if device == "plain":
        return partial(plain_attention.attend_plainly, block=16)
    module, sizes = KERNELS[device]
    for name, size in {"BLOCK": 16, **sizes}.items():
        monkeypatch.setattr(module, name, size)
    return partial(by_device._attend_by_kernel, kernel=module.attend_in_kernel, interpret=True)


@pytest.mark.parametrize("device", ["plain", *KERNELS])
@pytest.mark.parametrize(
    ("count", "window", "beside", "group", "page", "with_sinks", "cap"),
    [
        (1, None, "nothing", 4, None, True, None),
        (5, 10, "scratch and own", 2, None, True, 2.0),
        (
            60,
            10,
            "scratch and own",
            3,
            None,
            True,
            None,
        ),  # tiles of 16 queries begin anywhere in a group of 3
        (5, 33, "each its own", 3, 16, True, 2.0),
        (1, 10, "nothing", 1, 16, False, 2.0),
        pytest.param(60, None, "each its own", 2, 8, True, 2.0, marks=pytest.mark.thorough),
        pytest.param(5, None, "scratch and own", 4, 32, True, None, marks=pytest.mark.thorough),
    ],
)
def test_every_form_knows_sinks_and_caps(
    count, window, beside, group, page, with_sinks, cap, device, monkeypatch
) -> None:
    """With many tiles, blocks and splits, a sink counts once; and of two parts, as latent attention has them."""
    run = by_kernels_or_plainly(device, monkeypatch)
    (whole, scratch, own), (keys, values), seen = pieces(count, window)
    n = {"nothing": SLOTS, "scratch and own": keys.shape[2], "each its own": keys.shape[2]}[beside]
    if beside == "each its own":
        own = (own[0], None)
        seen = np.concatenate(
            [seen[..., :-count], np.broadcast_to(np.eye(count, dtype=bool), (B, count, count))],
            axis=2,
        )
    given = [
        in_pages(whole, page) if page else whole,
        *([] if beside == "nothing" else [scratch, own]),
    ]
    keys, values, seen = keys[:, :, :n], values[:, :, :n], seen[..., :n]
    q = normal(0, B, KV, count, group, DIM)
    sinks = drawn_sinks(KV * group) if with_sinks else None
    of_heads = None if sinks is None else jnp.asarray(sinks.reshape(KV, group))
    for parts, values_part in (((q,), 1), ((q, 2 * q), 0)):
        met = keys if len(parts) == 1 else np.concatenate([keys, values], -1)
        flat = np.concatenate(parts, -1).transpose(0, 2, 1, 3, 4).reshape(B, count, KV * group, -1)
        expected, _ = plain(flat, met, (keys, values)[values_part], seen, 1.0, sinks, cap)
        found = run(
            tuple(map(jnp.asarray, parts)), given, of_heads, values_part=values_part, cap=cap
        )
        found = np.asarray(found).transpose(0, 2, 1, 3, 4).reshape(B, count, -1)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("device", ["plain", *KERNELS])
def test_sinks_and_caps_of_bfloat16(device, monkeypatch) -> None:
    run = by_kernels_or_plainly(device, monkeypatch)
    given, (keys, values), seen = pieces(5, 10)
    given = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, given)
    q, keys, values = (
        np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
        for x in (normal(0, B, 5, KV * GROUP, DIM), keys, values)
    )
    sinks = jnp.asarray(drawn_sinks(), jnp.bfloat16)
    expected, _ = plain(q, keys, values, seen, 1.0, np.asarray(sinks, np.float32), 2.0)
    grouped = plain_attention.group_queries((jnp.asarray(q, jnp.bfloat16),), given, 1.0)
    found = run(grouped, given, plain_attention.group_sinks(sinks, grouped), values_part=1, cap=2.0)
    assert found.dtype == jnp.bfloat16
    found = np.asarray(found, np.float32).transpose(0, 2, 1, 3, 4).reshape(B, 5, -1)
    np.testing.assert_allclose(found, expected, atol=0.02)


@pytest.mark.parametrize("device", ["plain", *KERNELS])
def test_with_a_sink_who_sees_nothing_finds_zeros(device, monkeypatch) -> None:
    """However large the sink, and with tokens at hand that are hidden; a sink of -inf is none at all."""
    run = by_kernels_or_plainly(device, monkeypatch)
    (whole, (scratch, _), _), (keys, values), seen = pieces(2, None)
    given = [whole, (scratch, jnp.zeros((1, 2, 7), bool))]
    q = jnp.asarray(normal(0, B, 2, KV * GROUP, DIM))
    sinks = np.array([80.0, -np.inf, -80.0, 0.0], np.float32)
    grouped = plain_attention.group_queries((q,), given, None)
    found = run(
        grouped, given, plain_attention.group_sinks(jnp.asarray(sinks), grouped), values_part=1
    )
    found = np.asarray(found).transpose(0, 2, 1, 3, 4).reshape(B, 2, -1)
    expected, _ = plain(
        q, keys[:, :, :SLOTS], values[:, :, :SLOTS], seen[..., :SLOTS], DIM**-0.5, sinks
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (
        COUNTS[3] == 0
        and not found[3].any()
        and np.abs(found[:, :, :DIM]).max() < 1e-20
        and found[0, :, DIM:].all()
    )


@pytest.mark.parametrize("module", [tpu, gpu])
@pytest.mark.parametrize("kv_heads", [KV, 1])
def test_on_a_mesh_sinks_lie_where_their_heads_do(kv_heads, module) -> None:
    (whole, *others), (keys, values), seen = pieces(5, 10)
    whole = whole.replace(
        entry=tuple(part[:, :kv_heads] for part in whole.entry), mesh=make_mesh(2, 2)
    )
    others = [(tuple(part[:, :kv_heads] for part in entry), mask) for entry, mask in others]
    q, sinks = normal(0, B, 5, kv_heads * 4, DIM) * 3, drawn_sinks(kv_heads * 4)
    expected, _ = plain(q, keys[:, :kv_heads], values[:, :kv_heads], seen, DIM**-0.5, sinks, 2.0)
    grouped = plain_attention.group_queries((jnp.asarray(q),), [whole], None)
    of_heads = plain_attention.group_sinks(jnp.asarray(sinks), grouped)
    run = partial(
        by_device._attend_by_kernel,
        values_part=1,
        kernel=module.attend_in_kernel,
        cap=2.0,
        interpret=True,
    )
    found = jax.jit(run)(grouped, [whole, *others], of_heads)
    assert found.sharding.shard_shape(found.shape)[1:4] == (
        (1, 5, 4) if kv_heads == KV else (1, 5, 2)
    )
    np.testing.assert_allclose(
        np.asarray(found).transpose(0, 2, 1, 3, 4).reshape(B, 5, -1), expected, atol=1e-5
    )


@pytest.mark.parametrize("module", [tpu, gpu])
def test_attention_without_sinks_and_caps_does_not_pay_for_them(module) -> None:
    given, _, _ = pieces(5, None)
    q, sinks = (
        (jnp.asarray(normal(0, B, KV, 5, GROUP, DIM)),),
        jnp.asarray(drawn_sinks().reshape(KV, GROUP)),
    )
    run = partial(by_device._attend_by_kernel, values_part=1, kernel=module.attend_in_kernel)

    def kernel(sinks=None, cap=None) -> tuple[int, bool]:
        """How many arrays it is given, and whether it takes a tanh."""
        traced = jax.make_jaxpr(partial(run, cap=cap))(q, given, sinks)
        call = next(
            call for call in traced.eqns if call.primitive.name == "pallas_call"
        )  # a second one merges
        return len(call.invars), "tanh" in str(call)

    operands, has_tanh = kernel()
    assert not has_tanh
    assert kernel(cap=2.0) == (operands, True)
    assert kernel(sinks) == (operands + 1, False)


@pytest.mark.parametrize(("with_sinks", "cap"), SINKS_AND_CAPS)
def test_what_is_paid_to_each_slot_beside_sinks(with_sinks, cap) -> None:
    given, (keys, values), seen = pieces(5, 10)
    q, sinks = normal(0, B, 5, KV * GROUP, DIM) * 3, drawn_sinks() if with_sinks else None
    _, expected = plain(q, keys, values, seen, 0.5, sinks, cap)
    of_heads = None if sinks is None else jnp.asarray(sinks)
    found = jax.jit(partial(attention_paid, scale=0.5, cap=cap))(
        jnp.asarray(q), given[0], given[1:], sinks=of_heads
    )
    np.testing.assert_allclose(found, expected[..., :SLOTS], atol=1e-5)


@pytest.mark.parametrize(("with_sinks", "cap"), SINKS_AND_CAPS)
def test_gradients_with_sinks_and_caps_are_those_of_a_softmax(with_sinks, cap) -> None:
    """Of sinks as well; the last piece is each query's own, and the first query sees that alone."""
    keys, values = (jnp.asarray(normal(seed, B, KV, 14, DIM)) for seed in (1, 2))
    q, sinks = jnp.asarray(normal(0, B, 5, KV * GROUP, DIM)) * 3, jnp.asarray(drawn_sinks())
    mask = jnp.asarray(np.random.default_rng(3).random((1, 5, 9)) < 0.6).at[0, 0].set(False)
    seen = jnp.concatenate([mask, jnp.eye(5, dtype=bool)[None]], axis=2)

    def softmax(q, keys, values, sinks):
        grouped = q.reshape(B, 5, KV, GROUP, DIM) * DIM**-0.5
        scores = jnp.einsum("btkgd,bksd->bktgs", grouped, keys)
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        scores = jnp.where(seen[:, None, :, None], scores, -jnp.inf)
        column = jnp.broadcast_to(sinks.reshape(KV, 1, GROUP, 1), (*scores.shape[:-1], 1))
        column = column if with_sinks else jnp.full_like(column, -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
        return jnp.einsum("bktgs,bksd->btkgd", weights, values).reshape(B, 5, -1)

    def ours(q, keys, values, sinks):
        parts = [(keys[:, :, a:b], values[:, :, a:b]) for a, b in ((0, 4), (4, 9), (9, 14))]
        given = [(parts[0], mask[..., :4]), (parts[1], mask[..., 4:]), (parts[2], None)]
        return attend(q, given, sinks=sinks if with_sinks else None, cap=cap)

    weights = 10 * jnp.asarray(normal(8, B, 5, KV * GROUP * DIM))
    given = (q, keys, values, sinks)
    expected = jax.jit(jax.grad(lambda *args: jnp.sum(softmax(*args) * weights), argnums=range(4)))(
        *given
    )
    found = jax.jit(jax.grad(lambda *args: jnp.sum(ours(*args) * weights), argnums=range(4)))(
        *given
    )
    assert with_sinks == bool(jnp.all(jnp.abs(expected[3]) > 1e-3))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
