"""Attention as one TPU kernel in Pallas (flash attention; Dao et al. 2022, arXiv 2205.14135).

Scores stay in the chip's fast memory (VMEM). Queries, keys and values are read once from the large
memory (HBM), and the output is written once. Blocks of a cache that hold no visible slot of a row
are neither fetched nor multiplied. The same kernel attends to the tokens outside the cache, drafted
ones and those of the call: every operation on a TPU costs about a microsecond however little it
does, and a layer's attention to a few tokens would be twenty operations.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.models.cache import Entry, ExtraTokens
from specjax.models.primitives import LEAST, capped
from specjax.models.quantized_cache import Part, QuantizedPart, operand

BLOCK = 512
"""The number of slots fetched at a time for many queries; up to four times as many for few.

In a paged cache it is rounded to whole pages.
"""

ROWS = 512
"""The number of queries of a tile; more would not fit VMEM beside their keys."""

BYTES = 4 << 20
"""The maximum number of bytes of a fetched block that is larger than `BLOCK` slots.

A block is in VMEM twice: the one in use and the next. So keys and values of 512 numbers in bfloat16
take 8 of a v5e's 16 MiB; twice as much did not fit.
"""


def attend_in_kernel(
    q: tuple[jax.Array, ...],
    entry: Entry,
    count: jax.Array,
    since: jax.Array,
    extra: Sequence[ExtraTokens] = (),
    table: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    values_part: int,
    cap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attend R queries to the slots of a cache, and to other tokens outside it.

    Args:
        q: ``[B, kv_heads, R, d_i]`` scaled queries for each part of an entry that is a key; the
            products are summed.
        entry: ``[B, kv_heads, S, d_i]`` each part, all in floats or all in 8 bits; with a table,
            pools ``[pages, kv_heads, page, d_i]``.
        count: ``[B]`` the number of filled slots of each row.
        since: ``[B, R]`` the first slot that each query sees.
        extra: further tokens, with their masks.
        table: ``[B, n]`` int32, the pages of each row in order. None: the slots of a row are
            contiguous.
        sinks: ``[kv_heads, G]`` float32, finite; query r has sink r modulo G.
        values_part: the index of the part that holds the values.
        cap: the soft cap of the scores, as in `specjax.models.attention.attend`.
        interpret: whether to run the kernel as ordinary JAX, on any backend, for tests.

    Returns:
        ``[B, kv_heads, R, d]`` in the queries' dtype; zeros for a query that sees no key.
    """
    batch, kv_heads, rows, _ = q[0].shape
    page, dim = entry[0].shape[2], entry[values_part].shape[3]
    slots = page if table is None else page * table.shape[1]
    tile = min(ROWS, rows)
    stored, scales = _arrays(entry)
    # The scales of all heads are fetched with each head, see `_of_scales`.
    slot_bytes = sum(part.shape[3] * part.dtype.itemsize for part in stored)
    slot_bytes += sum(part.dtype.itemsize * kv_heads for part in scales)
    # Few queries leave VMEM for wider blocks, and so need fewer steps of the grid.
    width = min(BLOCK * max(1, min(4, ROWS // tile, BYTES // (slot_bytes * BLOCK))), slots)
    pages = 1
    if table is not None:
        # The pages of a block are not contiguous: the pool is passed once for each of them, and
        # each copy has its own index map.
        # A cache drops tokens beyond its capacity, but counts them. They must not lead to a column
        # that the table does not have.
        count = jnp.minimum(count, slots)
        pages = max(1, width // page)
        width = pages * page
    blocks = -(-slots // width)

    # The range of blocks that a row needs; the index maps and the kernel skip all others.
    first = jnp.maximum(jnp.min(since, axis=1), 0) // width
    last = jnp.maximum(-(-count // width) - 1, 0)
    scalars = [count, first, last]
    if table is not None:
        # Flat, because a row of a 2D array takes a multiple of 128 numbers in the scalar memory.
        # Unused columns are out of range, and must not be fetched.
        scalars.append(jnp.clip(table, 0, entry[0].shape[0] - 1).reshape(-1))

    def map_rows(b: Any, h: Any, r: Any, i: Any, *_: Any) -> tuple[Any, ...]:
        return b, h, r, 0

    def map_block(
        b: Any, h: Any, r: Any, i: Any, count: Any, first: Any, last: Any
    ) -> tuple[Any, ...]:
        # The chip fetches nothing if the index is that of the block before. So blocks outside of
        # the visible range cost no bandwidth.
        return b, h, jnp.clip(i, first[b], last[b]), 0

    def map_page(
        number: int, b: Any, h: Any, r: Any, i: Any, count: Any, first: Any, last: Any, table: Any
    ) -> tuple[Any, ...]:
        column = jnp.clip(i, first[b], last[b]) * pages + number
        # Beyond the row's last page, repeat the page of the block before, which is not fetched
        # again.
        filled_pages = -(-count[b] // page)
        column = jnp.where(column < filled_pages, column, column - pages)
        column = jnp.clip(column, 0, jnp.maximum(filled_pages - 1, 0))
        return table[b * (slots // page) + column], h, 0, 0

    index_maps: list[Any] = [map_block]
    if table is not None:
        index_maps = [functools.partial(map_page, number) for number in range(pages)]
    # The last tile of queries may reach beyond them: Pallas pads it, and drops the padding's
    # output.
    inputs = [since[..., None], *q, *(part for part in (*stored, *scales) for _ in index_maps)]
    in_specs = [pl.BlockSpec((1, tile, 1), lambda b, h, r, i, *_: (b, r, 0))]
    in_specs += [pl.BlockSpec((1, 1, tile, part.shape[3]), map_rows) for part in q]
    in_specs += [
        pl.BlockSpec((1, 1, width // pages, part.shape[3]), at)
        for part in stored
        for at in index_maps
    ]
    in_specs += [
        pl.BlockSpec((1, kv_heads, width // pages), _of_scales(at))
        for _ in scales
        for at in index_maps
    ]
    if extra:
        extra_entry, visible = _joined(extra)
        beside, (extra_arrays, extra_scales) = visible.shape[2], _arrays(extra_entry)
        inputs += [visible, *extra_arrays, *extra_scales]
        in_specs += [pl.BlockSpec((1, tile, beside), lambda b, h, r, i, *_: (b, r, 0))]
        in_specs += [
            pl.BlockSpec((1, 1, beside, part.shape[3]), lambda b, h, r, i, *_: (b, h, 0, 0))
            for part in extra_arrays
        ]
        in_specs += [
            pl.BlockSpec((1, kv_heads, beside), lambda b, h, r, i, *_: (b, 0, 0))
            for _ in extra_scales
        ]
    if sinks is not None:
        # One array serves all tiles if every tile begins with the first query of a group.
        is_aligned = tile % sinks.shape[1] == 0
        repeats = (tile if is_aligned else rows) // sinks.shape[1]
        inputs.append(jnp.tile(sinks, (1, repeats))[..., None])
        in_specs.append(
            pl.BlockSpec((1, tile, 1), lambda b, h, r, i, *_: (h, 0 if is_aligned else r, 0))
        )
    pairs = batch * kv_heads * rows * slots
    # A paged cache counts as its rows' pages, not as the whole pool each time that it is passed.
    cache_bytes = batch * kv_heads * slots * slot_bytes
    other_bytes = sum(
        part.size * part.dtype.itemsize
        for part in inputs
        if not any(part is x for x in (*stored, *scales))
    )
    return pl.pallas_call(
        functools.partial(
            _kernel,
            parts=len(q),
            entry_parts=len(entry),
            pages=pages,
            width=width,
            blocks=blocks,
            values_part=values_part,
            has_scales=bool(scales),
            has_others=bool(extra),
            has_sinks=sinks is not None,
            in_pages=table is not None,
            cap=cap,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, kv_heads, -(-rows // tile), blocks),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((1, 1, tile, dim), map_rows),
            scratch_shapes=[pltpu.VMEM((tile, size), jnp.float32) for size in (1, 1, dim)],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, rows, dim), q[0].dtype),
        # The axis of blocks is sequential, since the sums in VMEM carry over from block to block.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        # XLA cannot look into a kernel, and schedules other operations around it by this estimate.
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (dim + sum(part.shape[3] for part in q)),
            bytes_accessed=cache_bytes + other_bytes,
            transcendentals=pairs,
        ),
        interpret=interpret,
    )(*scalars, *inputs)


def _arrays(entry: Entry) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the arrays of an entry's parts, and the scales ``[B, kv_heads, S]`` of 8-bit parts."""
    stored = [part.numbers if isinstance(part, QuantizedPart) else part for part in entry]
    return stored, [part.scales for part in entry if isinstance(part, QuantizedPart)]


def _of_scales(index_map: Any) -> Any:
    """Return the index map of the scales of a block whose numbers have ``index_map``.

    The scales of all heads are fetched together, because they are contiguous in memory. To fetch
    them by head they would be laid out anew in every step. By a v5e's compiler that takes a tenth
    of a millisecond for 8 rows of 8192 tokens: longer than reading the scales of all heads with
    every head.
    """

    def map_scales(*indices: Any) -> tuple[Any, ...]:
        row, _, block, _ = index_map(*indices)
        return row, 0, block

    return map_scales


def _joined(extra: Sequence[ExtraTokens]) -> ExtraTokens:
    """Concatenate the extra tokens.

    Masked filler makes their number a multiple of 8, the number of rows of a TPU register.
    """
    missing = -sum(visible.shape[-1] for _, visible in extra) % 8

    def join(*parts: jax.Array) -> jax.Array:
        filler = jnp.zeros((*parts[0].shape[:2], missing, *parts[0].shape[3:]), parts[0].dtype)
        return jnp.concatenate([*parts, filler], axis=2)

    entry = jax.tree.map(join, *(entry for entry, _ in extra))
    return entry, jnp.pad(
        jnp.concatenate([visible for _, visible in extra], axis=2), ((0, 0), (0, 0), (0, missing))
    )


def _kernel(
    count_ref: Any,
    first_ref: Any,
    last_ref: Any,
    *refs: Any,
    parts: int,
    entry_parts: int,
    pages: int,
    width: int,
    blocks: int,
    values_part: int,
    has_scales: bool,
    has_others: bool,
    has_sinks: bool,
    in_pages: bool,
    cap: float | None,
):
    """Attend to one block of one row's head; VMEM holds the running sums until the last block."""
    refs = refs[in_pages:]  # only the index maps read the table
    since_ref, *input_refs, out_ref, top_ref, mass_ref, total_ref = refs
    arrays = entry_parts * (1 + has_scales)
    cache_end = parts + arrays * pages
    q_refs, entry_refs, extra_refs = (
        input_refs[:parts],
        input_refs[parts:cache_end],
        input_refs[cache_end:],
    )
    row, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(3)
    count = count_ref[row]

    def entry_in(refs: Sequence[Any], pages: int) -> list[Part]:
        """Return an entry's parts from its pages: numbers ``[n, d]`` and scales ``[1, n]``."""
        split = [
            [
                ref[0, 0] if i < entry_parts else ref[0, pl.ds(head, 1)]
                for ref in refs[i * pages : (i + 1) * pages]
            ]
            for i in range(arrays)
        ]
        # In registers: the concatenation moves nothing.
        whole = [
            jnp.concatenate(pieces, axis=i // entry_parts) if pages > 1 else pieces[0]
            for i, pieces in enumerate(split)
        ]
        numbers, scales = whole[:entry_parts], whole[entry_parts:]
        if has_scales:
            return [QuantizedPart(*pair) for pair in zip(numbers, scales, strict=True)]
        return [*numbers]

    def product(q: jax.Array, keys: Part) -> jax.Array:
        # The sums are in float32: as bfloat16 a score would have two to three digits.
        products = jax.lax.dot_general(
            q, operand(keys, q.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return products * keys.scales if isinstance(keys, QuantizedPart) else products

    def scores_of(keys: Sequence[Part]) -> jax.Array:
        # An entry may have more parts than the queries: the last ones are values alone.
        products = [product(q[0, 0], part) for q, part in zip(q_refs, keys, strict=False)]
        return capped(functools.reduce(jnp.add, products), cap)

    def add(scores: jax.Array, visible: jax.Array, part: Part) -> None:
        values = operand(part, q_refs[0].dtype)
        # Finite, and below the initial top of LEAST: the weight of a hidden key is then exp(LEAST),
        # which is 0, also where no key is visible. With -inf the difference would be NaN.
        scores = jnp.where(visible, scores, 2 * LEAST)
        before = top_ref[...]
        # Online softmax: earlier sums are rescaled to the new largest score.
        top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights, decay = jnp.exp(scores - top), jnp.exp(before - top)
        # The scales belong to the values: `mass` is the sum of the weights without them.
        weighted = weights * part.scales if isinstance(part, QuantizedPart) else weights
        total = jnp.dot(weighted.astype(values.dtype), values, preferred_element_type=jnp.float32)
        top_ref[...] = top
        mass_ref[...] = mass_ref[...] * decay + jnp.sum(weights, axis=1, keepdims=True)
        total_ref[...] = total_ref[...] * decay + total

    @pl.when(block == 0)
    def _() -> None:
        # Sinks come first, with a weight of 1 and no value.
        top_ref[...] = extra_refs[-1][0] if has_sinks else jnp.full_like(top_ref, LEAST)
        mass_ref[...] = jnp.ones_like(mass_ref) if has_sinks else jnp.zeros_like(mass_ref)
        total_ref[...] = jnp.zeros_like(total_ref)
        # The tokens outside the cache are attended to here, because every row has a block 0, also
        # one whose cache is empty.
        if has_others:
            visible_ref, *entry_refs_beside = extra_refs[: 1 + arrays]
            extra_entry = entry_in(entry_refs_beside, pages=1)
            add(
                scores_of(extra_entry),
                visible_ref[0].astype(jnp.int32) > 0,
                extra_entry[values_part],
            )

    @pl.when((block >= first_ref[row]) & (block <= last_ref[row]) & (count > 0))
    def _() -> None:
        entry = entry_in(entry_refs, pages)
        scores = scores_of(entry)
        slot = block * width + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)

        def clean(array: jax.Array, axis: int) -> jax.Array:
            """Replace unfilled slots by zeros: they may hold NaN, and 0 times NaN is NaN."""
            is_slot = block * width + jax.lax.broadcasted_iota(jnp.int32, array.shape, axis) < count
            return jnp.where(is_slot, array, jnp.zeros_like(array))

        part = entry[values_part]
        values = (
            QuantizedPart(part.numbers, clean(part.scales, 1))  # numbers in 8 bits are never NaN
            if isinstance(part, QuantizedPart)
            else clean(part, 0)
        )
        add(scores, (slot < count) & (slot >= since_ref[0]), values)

    @pl.when(block == blocks - 1)
    def _() -> None:
        # A query that sees no key has a mass and a total of 0. Its output is 0, not NaN.
        mass = mass_ref[...]
        out_ref[0, 0] = (total_ref[...] / jnp.where(mass > 0, mass, 1.0)).astype(out_ref.dtype)
