"""Attention as a GPU kernel in Pallas Triton (flash attention; Dao et al. 2022, arXiv 2205.14135).

Scores stay in registers, and unfilled slots are never read. In decoding there are few queries and a
long cache, and a GPU has more processors than a few rows have heads. So the cache is split among
several programs, and a second, small kernel merges their results (flash decoding; Dao et al. 2023).
The same kernel attends to the tokens outside the cache, drafted ones and those of the call, because
every kernel takes two microseconds however little it does.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.models.attention.kernels import triton as plt
from specjax.models.cache import Entry, ExtraTokens
from specjax.models.primitives import LEAST, capped
from specjax.models.quantized_cache import Part, QuantizedPart, operand

BLOCK = 64
"""The number of slots that a program reads at a time.

It is smaller if a value has more than 256 numbers, or a page has fewer slots.
"""

ROWS = 64
"""The maximum number of queries of a program; fewer if a value has more than 128 numbers."""

PROGRAMS = 256
"""The number of programs that a cache is split into: about two per processor of a large GPU."""

MAX_SPLITS = 32


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
    """Run the attention of `specjax.models.attention.tpu.attend_in_kernel` on a GPU.

    The arguments and the result are the same. A page must be a multiple of 16 slots, and is best a
    power of two.
    """
    batch, kv_heads, rows, _ = q[0].shape
    page, dim = entry[0].shape[2], entry[values_part].shape[3]
    slots = page if table is None else page * table.shape[1]
    padded_dim = max(_power_of_two(dim), 128)
    tile = min(_power_of_two(rows), max(16, ROWS * 128 // padded_dim))
    # Queries and blocks shrink as values grow: both must fit the registers and the shared memory.
    block = max(16, min(BLOCK, BLOCK * 256 // padded_dim))
    if table is not None:
        block = math.gcd(block, page)  # so that a block lies within one page
    tiles, blocks = -(-rows // tile), -(-slots // block)
    # Split the cache until about PROGRAMS programs run, but leave each a block or more.
    splits = _power_of_two(-(-PROGRAMS // (batch * kv_heads * tiles)), least=1)
    splits = min(splits, MAX_SPLITS, _power_of_two(blocks, least=1))

    # A cache drops tokens beyond its capacity, but counts them. They have no slot to read.
    inputs = [jnp.minimum(count, slots), since, *q, *_arrays(entry)]
    if table is not None:
        inputs.insert(0, table)
    for extra_entry, visible in extra:
        inputs += [visible, *_arrays(extra_entry)]
    if sinks is not None:
        inputs.append(sinks)
    split_shape = (batch, kv_heads, splits, rows)
    merged_shape = jax.ShapeDtypeStruct((batch, kv_heads, rows, dim), q[0].dtype)
    # In float32, because they are added up again.
    split_outputs = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in (split_shape, split_shape, (*split_shape, dim))
    ]
    outputs = pl.pallas_call(
        functools.partial(
            _kernel,
            parts=len(q),
            entry_parts=len(entry),
            has_scales=isinstance(entry[0], QuantizedPart),
            num_extra=len(extra),
            tile=tile,
            width=block,
            splits=splits,
            values_part=values_part,
            has_sinks=sinks is not None,
            in_pages=table is not None,
            cap=cap,
        ),
        grid=(batch, kv_heads, tiles, splits),
        out_shape=merged_shape if splits == 1 else split_outputs,
        # Stages of the fetch pipeline: two blocks in flight for few queries, and one for many,
        # which keep a program busy for longer.
        compiler_params=plt.CompilerParams(
            num_warps=4, num_stages=3 if tile == 16 and padded_dim == 128 else 2
        ),
        interpret=interpret,
        name="attend",
    )(*inputs)
    if splits == 1:
        return outputs
    return pl.pallas_call(
        _merge,
        grid=(batch, kv_heads, rows),
        out_shape=merged_shape,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="merge_splits",
    )(*outputs)


def _kernel(
    *refs: Any,
    parts: int,
    entry_parts: int,
    has_scales: bool,
    num_extra: int,
    tile: int,
    width: int,
    splits: int,
    values_part: int,
    has_sinks: bool,
    in_pages: bool,
    cap: float | None,
) -> None:
    """Attend a tile of queries to one share of a row's filled slots.

    The last share also attends to the sinks and the tokens outside the cache.
    """
    table_ref, (count_ref, since_ref, *refs) = (refs[0], refs[1:]) if in_pages else (None, refs)  # pyright: ignore
    arrays = entry_parts * (1 + has_scales)
    q_refs, entry_refs, refs = refs[:parts], refs[parts : parts + arrays], refs[parts + arrays :]
    extra_refs, out_refs = refs[: num_extra * (1 + arrays)], refs[num_extra * (1 + arrays) :]
    sinks_ref, out_refs = (out_refs[0], out_refs[1:]) if has_sinks else (None, out_refs)
    b, h, tile_index, split = (pl.program_id(axis) for axis in range(4))
    first_row = tile_index * tile
    is_row = first_row + jnp.arange(tile) < q_refs[0].shape[2]
    q = [_load(ref, (b, h), first_row, is_row) for ref in q_refs]
    # The queries that fill up a tile see nothing, so that they add no block for the others.
    since = plt.load(
        since_ref.at[b, pl.ds(first_row, tile)], mask=is_row, other=jnp.iinfo(jnp.int32).max
    )
    count, earliest = count_ref[b], jnp.min(since)

    def add(
        sums: tuple[jax.Array, ...],
        refs: Any,
        start: Any,
        is_slot: jax.Array,
        visible: jax.Array,
        at: Any = b,
    ) -> tuple[jax.Array, ...]:
        top, mass, total = sums
        entry = _load_entry(refs, entry_parts, (at, h), start, is_slot)
        values = operand(entry[values_part], q[0].dtype)
        # Finite, and below the initial top of LEAST: the weight of a hidden key is then exp(LEAST),
        # which is 0, also where no key is visible. With -inf the difference would be NaN.
        scores = jnp.where(visible, capped(_scores(q, entry), cap), 2 * LEAST)
        # Online softmax: earlier sums are rescaled to the new largest score.
        largest = jnp.maximum(top, jnp.max(scores, axis=1))
        weights, decay = jnp.exp(scores - largest[:, None]), jnp.exp(top - largest)
        # The scales belong to the values: `mass` is the sum of the weights without them.
        weighted = _scaled(weights, entry[values_part]).astype(values.dtype)
        total = total * decay[:, None] + _dot(weighted, values, 0)
        return largest, mass * decay + jnp.sum(weights, axis=1), total

    def attend_block(block: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slot = block * width + jnp.arange(width)
        # Slots that no query sees are loaded as zeros: they may hold NaN, and 0 times NaN is NaN.
        is_needed = (slot < count) & (slot >= earliest)
        at, start = _place_of(block * width, b, table_ref, entry_refs[0].shape)
        visible = is_needed[None] & (slot[None] >= since[:, None])
        return add(sums, entry_refs, start, is_needed, visible, at)

    def attend_extra(sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # The defaults bind this iteration's values, as a closure over loop variables would not.
        for i in range(num_extra):
            visible_ref, *entry_refs = extra_refs[i * (1 + arrays) : (i + 1) * (1 + arrays)]
            num_tokens = entry_refs[0].shape[2]
            extra_width = min(width, _power_of_two(num_tokens))

            def attend_extra_block(
                block: jax.Array,
                sums: tuple[jax.Array, ...],
                width: int = extra_width,
                num_tokens: int = num_tokens,
                visible_ref: Any = visible_ref,
                entry_refs: Any = entry_refs,
            ) -> tuple[jax.Array, ...]:
                is_slot = block * width + jnp.arange(width) < num_tokens
                visible = plt.load(
                    visible_ref.at[b, pl.ds(first_row, tile), pl.ds(block * width, width)],
                    mask=is_row[:, None] & is_slot[None],
                    other=0,
                )
                return add(sums, entry_refs, block * width, is_slot, visible > 0)

            sums = jax.lax.fori_loop(0, -(-num_tokens // extra_width), attend_extra_block, sums)
        return sums

    # The blocks that any of these queries sees are divided into equal shares.
    first = jnp.maximum(earliest, 0) // width
    last = (count + width - 1) // width
    share = (jnp.maximum(last - first, 0) + splits - 1) // splits
    dim = _power_of_two(entry_refs[values_part].shape[3])
    start = _before_all_keys(tile, dim, sinks_ref, h, first_row, split, splits)
    begin = first + split * share
    sums = jax.lax.fori_loop(begin, jnp.minimum(begin + share, last), attend_block, start)
    if num_extra:  # once for each query: in the last share
        sums = jax.lax.cond(split == splits - 1, attend_extra, lambda sums: sums, sums)
    _store_sums(out_refs, (b, h), split, first_row, is_row, sums)


def _store_sums(
    out_refs: Sequence[Any],
    head: tuple[Any, Any],
    split: Any,
    first_row: Any,
    is_row: jax.Array,
    sums: tuple[jax.Array, ...],
) -> None:
    """Store the output of a tile of queries, or its sums if those of other shares are added."""
    top, mass, total = sums
    if len(out_refs) == 1:
        # A query that sees no key has a mass and a total of 0. Its output is 0, not NaN.
        output = total / jnp.where(mass > 0, mass, 1.0)[:, None]
        _store(out_refs[0], head, first_row, is_row, output)
        return
    top_ref, mass_ref, total_ref = out_refs
    at_rows = pl.ds(first_row, is_row.size)
    plt.store(top_ref.at[*head, split, at_rows], top, mask=is_row)
    plt.store(mass_ref.at[*head, split, at_rows], mass, mask=is_row)
    _store(total_ref, (*head, split), first_row, is_row, total)


def _before_all_keys(
    tile: int, dim: int, sinks_ref: Any, head: Any, first_row: Any, split: Any, splits: int
) -> tuple[jax.Array, ...]:
    """Return the initial top, mass and total of a tile of queries.

    In the last share the sinks, if there are any, are counted in: each with a weight of 1 and no
    value.
    """
    top = jnp.full(tile, LEAST, jnp.float32)
    mass, total = jnp.zeros(tile, jnp.float32), jnp.zeros((tile, dim), jnp.float32)
    if sinks_ref is None:
        return top, mass, total
    row_sinks = plt.load(sinks_ref.at[head, (first_row + jnp.arange(tile)) % sinks_ref.shape[1]])
    return (
        jnp.where(split == splits - 1, row_sinks, top),
        jnp.where(split == splits - 1, jnp.ones_like(mass), mass),
        total,
    )


def _place_of(slot: Any, row: Any, table_ref: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return where a row's slot is in a cache of that shape: the row or page, and the offset."""
    if table_ref is None:
        return row, slot
    pages, _, page, _ = shape
    # Unused columns of a table are out of range, and must not be read.
    return jnp.clip(table_ref[row, slot // page], 0, pages - 1), slot % page


def _merge(top_ref: Any, mass_ref: Any, total_ref: Any, out_ref: Any) -> None:
    """Merge what one query found in all shares into its output."""
    b, h, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    dim = total_ref.shape[4]
    is_number = jnp.arange(_power_of_two(dim)) < dim
    top = top_ref[b, h, :, row]
    # A share without a visible key has a top of LEAST, and so no weight beside another share. If no
    # share has one, all masses and totals are 0, and so is the output.
    weights = jnp.exp(top - jnp.max(top))
    mass = jnp.sum(mass_ref[b, h, :, row] * weights)
    splits, numbers = _rows_and_numbers(0, top.size, _numbers(dim))
    total = plt.load(total_ref.at[b, h, splits, row, numbers], mask=is_number[None], other=0.0)
    output = jnp.sum(total * weights[:, None], axis=0) / jnp.where(mass > 0, mass, 1.0)
    plt.store(out_ref.at[b, h, row, _numbers(dim)], output.astype(out_ref.dtype), mask=is_number)


def _load(ref: Any, head: tuple[Any, ...], start: Any, is_row: jax.Array) -> jax.Array:
    """Load rows of ``ref [..., n, d]`` at ``head`` from ``start`` on.

    Rows that do not exist are zeros, and the width is padded to a power of two.
    """
    at, mask = _window(ref, head, start, is_row)
    return plt.load(ref.at[at], mask=mask, other=0.0)


def _load_entry(
    refs: Any, parts: int, head: tuple[Any, Any], start: Any, is_row: jax.Array
) -> list[Part]:
    """Load the parts of an entry, ``[n, d]`` each, as `_load` does.

    If there are more arrays than parts, the rest are the scales ``[n]`` of parts in 8 bits.
    """
    numbers = [_load(ref, head, start, is_row) for ref in refs[:parts]]
    row_slice = pl.ds(start, is_row.size)
    scales = [plt.load(ref.at[*head, row_slice], mask=is_row, other=0.0) for ref in refs[parts:]]
    if not scales:
        return [*numbers]
    return [QuantizedPart(*pair) for pair in zip(numbers, scales, strict=True)]


def _store(
    ref: Any, head: tuple[Any, ...], start: Any, is_row: jax.Array, values: jax.Array
) -> None:
    """Store the values of rows; the inverse of `_load`."""
    at, mask = _window(ref, head, start, is_row)
    plt.store(ref.at[at], values.astype(ref.dtype), mask=mask)


def _window(
    ref: Any, head: tuple[Any, ...], start: Any, is_row: jax.Array
) -> tuple[tuple[Any, ...], jax.Array]:
    dim = ref.shape[-1]
    at = (*head, *_rows_and_numbers(start, is_row.size, _numbers(dim)))
    return at, is_row[:, None] & (jnp.arange(_power_of_two(dim)) < dim)[None]


def _numbers(dim: int) -> Any:
    """Return the indices of a value's numbers, padded to a power of two.

    They are an array if a slice would end beyond its axis.
    """
    width = _power_of_two(dim)
    return pl.ds(0, width) if width == dim else jnp.arange(width)


def _rows_and_numbers(start: Any, rows: int, numbers: Any) -> tuple[Any, Any]:
    """Return the indices of a tile ``[rows, numbers]`` from row ``start`` on.

    If one index is an array, the other must be an array too.
    """
    if isinstance(numbers, pl.Slice):
        return pl.ds(start, rows), numbers
    return (start + jnp.arange(rows))[:, None], numbers[None]


def _arrays(entry: Entry) -> list[jax.Array]:
    """Return the arrays of an entry's parts, followed by the scales of the parts in 8 bits."""
    numbers = [part.numbers if isinstance(part, QuantizedPart) else part for part in entry]
    return numbers + [part.scales for part in entry if isinstance(part, QuantizedPart)]


def _scores(q: Sequence[jax.Array], entry: Sequence[Part]) -> jax.Array:
    """Return the products of queries and keys, ``[rows, n]`` float32, summed over the parts."""
    products = [
        _scaled(_dot(query, operand(keys, query.dtype), 1), keys)
        for query, keys in zip(q, entry, strict=False)
    ]
    return functools.reduce(jnp.add, products)


def _scaled(by_slot: jax.Array, part: Part) -> jax.Array:
    """Multiply scores or weights ``by_slot [rows, n]`` with the scales of a part in 8 bits."""
    return by_slot * part.scales[None] if isinstance(part, QuantizedPart) else by_slot


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Multiply in float32 over the last axis of ``a`` and ``axis`` of ``b``.

    The types are promoted first, since a drafter's dtype may differ from its cache's.
    """
    dtype = jnp.promote_types(a.dtype, b.dtype)
    axes = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(
        a.astype(dtype), b.astype(dtype), axes, preferred_element_type=jnp.float32
    )


def _power_of_two(number: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least ``number`` and ``least``.

    Triton requires such sizes of arrays, and at least 16 of the factors of a matrix product.
    """
    return max(least, 1 << (number - 1).bit_length())
