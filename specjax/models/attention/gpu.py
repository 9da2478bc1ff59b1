"""Attention as one GPU kernel (flash attention; Dao et al. 2022, arXiv 2205.14135, in Pallas for Triton).

Scores live in registers alone, and no slot that a row has not filled is read. Decoding asks few queries of a long cache, and a
chip has more processors than a few rows have heads: so the cache is split among several programs, and a second, small kernel
merges what they found (flash decoding; Dao et al. 2023). What is no part of the cache, drafted tokens and the call's own, is
attended to in the same kernel: every kernel takes two microseconds however little it does.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.models.attention.kernels import triton as plt
from specjax.models.cache import Entry, Other
from specjax.models.primitives import LEAST, capped
from specjax.models.quantized_cache import Part, QuantizedPart, operand

BLOCK = 64
"""Slots that a program reads at a time; fewer where a value has more than 256 numbers, or a page fewer slots."""

ROWS = 64
"""Queries of a program, at most, where a value has no more than 128 numbers; fewer where it has more."""

PROGRAMS = 256
"""That a cache is split for: about two for each of a large chip's processors."""

MAX_SPLITS = 32


def attend_in_kernel(
    q: tuple[jax.Array, ...],
    entry: Entry,
    count: jax.Array,
    since: jax.Array,
    others: Sequence[Other] = (),
    table: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    values_part: int,
    cap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """What `specjax.models.attention.tpu.attend_in_kernel` does, on a GPU: the same arguments, and the same result.

    A page is a multiple of 16 slots, and best a power of two.
    """
    batch, kv_heads, rows, _ = q[0].shape
    page, dim = entry[0].shape[2], entry[values_part].shape[3]
    slots = page if table is None else page * table.shape[1]
    wide = max(_power_of_two(dim), 128)
    tile = min(_power_of_two(rows), max(16, ROWS * 128 // wide))
    block = max(16, min(BLOCK, BLOCK * 256 // wide))  # what is fetched has to fit a processor's own memory
    if table is not None:
        block = math.gcd(block, page)  # all of a block lies in one page
    tiles, blocks = -(-rows // tile), -(-slots // block)
    splits = _power_of_two(-(-PROGRAMS // (batch * kv_heads * tiles)), least=1)
    splits = min(splits, MAX_SPLITS, _power_of_two(blocks, least=1))

    given = [jnp.minimum(count, slots), since, *q, *_arrays(entry)]
    if table is not None:
        given.insert(0, table)
    for other, visible in others:
        given += [visible, *_arrays(other)]
    if sinks is not None:
        given.append(sinks)
    of_splits = (batch, kv_heads, splits, rows)
    whole = jax.ShapeDtypeStruct((batch, kv_heads, rows, dim), q[0].dtype)
    parts = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (of_splits, of_splits, (*of_splits, dim))]
    found = pl.pallas_call(
        functools.partial(
            _kernel,
            parts=len(q),
            entry_parts=len(entry),
            has_scales=isinstance(entry[0], QuantizedPart),
            others=len(others),
            tile=tile,
            width=block,
            splits=splits,
            values_part=values_part,
            has_sinks=sinks is not None,
            in_pages=table is not None,
            cap=cap,
        ),
        grid=(batch, kv_heads, tiles, splits),
        out_shape=whole if splits == 1 else parts,
        # Blocks on their way while one is worked on: for many queries, which keep a program busy, one; for few two.
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3 if tile == 16 and wide == 128 else 2),
        interpret=interpret,
        name="attend",
    )(*given)
    if splits == 1:
        return found
    return pl.pallas_call(
        _merge,
        grid=(batch, kv_heads, rows),
        out_shape=whole,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="merge_splits",
    )(*found)


def _kernel(
    *refs: Any,
    parts: int,
    entry_parts: int,
    has_scales: bool,
    others: int,
    tile: int,
    width: int,
    splits: int,
    values_part: int,
    has_sinks: bool,
    in_pages: bool,
    cap: float | None,
) -> None:
    """What a tile of queries finds in one share of a row's filled slots; the last share has sinks and the other tokens too."""
    table_ref, (count_ref, since_ref, *refs) = (refs[0], refs[1:]) if in_pages else (None, refs)  # pyright: ignore
    arrays = entry_parts * (1 + has_scales)
    q_refs, entry_refs, refs = refs[:parts], refs[parts : parts + arrays], refs[parts + arrays :]
    others_refs, out_refs = refs[: others * (1 + arrays)], refs[others * (1 + arrays) :]
    sinks_ref, out_refs = (out_refs[0], out_refs[1:]) if has_sinks else (None, out_refs)
    b, h, first_row, split = pl.program_id(0), pl.program_id(1), pl.program_id(2) * tile, pl.program_id(3)
    rows = q_refs[0].shape[2]
    is_row = first_row + jnp.arange(tile) < rows
    q = [_load(ref, (b, h), first_row, is_row) for ref in q_refs]
    since = plt.load(since_ref.at[b, pl.ds(first_row, tile)], mask=is_row, other=jnp.iinfo(jnp.int32).max)
    count, earliest = count_ref[b], jnp.min(since)

    def add(
        found: tuple[jax.Array, ...], refs: Any, start: Any, is_slot: jax.Array, visible: jax.Array, at: Any = b
    ) -> tuple[jax.Array, ...]:
        top, mass, total = found
        entry = _load_entry(refs, entry_parts, (at, h), start, is_slot)
        values = operand(entry[values_part], q[0].dtype)
        scores = jnp.where(visible, capped(_scores(q, entry), cap), 2 * LEAST)
        largest = jnp.maximum(top, jnp.max(scores, axis=1))
        weights, shrunk = jnp.exp(scores - largest[:, None]), jnp.exp(top - largest)
        total = total * shrunk[:, None] + _dot(_scaled(weights, entry[values_part]).astype(values.dtype), values, 0)
        return largest, mass * shrunk + jnp.sum(weights, axis=1), total

    def of_cache(block: jax.Array, found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slot = block * width + jnp.arange(width)
        is_seen = (slot < count) & (slot >= earliest)
        at, start = _place_of(block * width, b, table_ref, entry_refs[0].shape)
        return add(found, entry_refs, start, is_seen, is_seen[None] & (slot[None] >= since[:, None]), at)

    def of_others(found: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for i in range(others):
            visible_ref, *entry_refs = others_refs[i * (1 + arrays) : (i + 1) * (1 + arrays)]
            there = entry_refs[0].shape[2]
            own_width = min(width, _power_of_two(there))

            def of_block(
                block: jax.Array,
                found: tuple[jax.Array, ...],
                width: int = own_width,
                there: int = there,
                visible_ref: Any = visible_ref,
                entry_refs: Any = entry_refs,
            ) -> tuple[jax.Array, ...]:
                is_slot = block * width + jnp.arange(width) < there
                visible = plt.load(
                    visible_ref.at[b, pl.ds(first_row, tile), pl.ds(block * width, width)],
                    mask=is_row[:, None] & is_slot[None],
                    other=0,
                )
                return add(found, entry_refs, block * width, is_slot, visible > 0)

            found = jax.lax.fori_loop(0, -(-there // own_width), of_block, found)
        return found

    # The blocks that hold what any of these queries sees, in equal shares.
    first = jnp.maximum(earliest, 0) // width
    last = (count + width - 1) // width
    share = (jnp.maximum(last - first, 0) + splits - 1) // splits
    dim = _power_of_two(entry_refs[values_part].shape[3])
    start = _before_all_keys(tile, dim, sinks_ref, h, first_row, split, splits)
    begin = first + split * share
    top, mass, total = found = jax.lax.fori_loop(begin, jnp.minimum(begin + share, last), of_cache, start)
    if others:
        top, mass, total = jax.lax.cond(split == splits - 1, of_others, lambda found: found, found)
    if splits > 1:
        top_ref, mass_ref, total_ref = out_refs
        at_rows = pl.ds(first_row, tile)
        plt.store(top_ref.at[b, h, split, at_rows], top, mask=is_row)
        plt.store(mass_ref.at[b, h, split, at_rows], mass, mask=is_row)
        _store(total_ref, (b, h, split), first_row, is_row, total)
    else:
        (out_ref,) = out_refs
        _store(out_ref, (b, h), first_row, is_row, total / jnp.where(mass > 0, mass, 1.0)[:, None])


def _before_all_keys(
    tile: int, dim: int, sinks_ref: Any, head: Any, first_row: Any, split: Any, splits: int
) -> tuple[jax.Array, ...]:
    """Top, mass and total of a tile of queries that have met no key. In the last share they have met their sinks, where there
    are any: each with a weight of 1 and no value."""
    top, mass, total = jnp.full(tile, LEAST, jnp.float32), jnp.zeros(tile, jnp.float32), jnp.zeros((tile, dim), jnp.float32)
    if sinks_ref is None:
        return top, mass, total
    of_rows = plt.load(sinks_ref.at[head, (first_row + jnp.arange(tile)) % sinks_ref.shape[1]])
    return jnp.where(split == splits - 1, of_rows, top), jnp.where(split == splits - 1, jnp.ones_like(mass), mass), total


def _place_of(slot: Any, row: Any, table_ref: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Where a row's slot lies in a cache of that shape: in which row of it, or in which page, and at which place there."""
    if table_ref is None:
        return row, slot
    pages, _, page, _ = shape
    return jnp.clip(table_ref[row, slot // page], 0, pages - 1), slot % page


def _merge(top_ref: Any, mass_ref: Any, total_ref: Any, out_ref: Any) -> None:
    """What one query found in all shares."""
    b, h, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    dim = total_ref.shape[4]
    there = jnp.arange(_power_of_two(dim)) < dim
    top = top_ref[b, h, :, row]
    weights = jnp.exp(top - jnp.max(top))
    mass = jnp.sum(mass_ref[b, h, :, row] * weights)
    splits, numbers = _rows_and_numbers(0, top.size, _numbers(dim))
    total = plt.load(total_ref.at[b, h, splits, row, numbers], mask=there[None], other=0.0)
    found = jnp.sum(total * weights[:, None], axis=0) / jnp.where(mass > 0, mass, 1.0)
    plt.store(out_ref.at[b, h, row, _numbers(dim)], found.astype(out_ref.dtype), mask=there)


def _load(ref: Any, head: tuple[Any, ...], start: Any, is_row: jax.Array) -> jax.Array:
    """Rows of ``ref [..., n, d]`` at ``head`` from ``start`` on, zeros where there are none; as wide as a power of two."""
    at, mask = _window(ref, head, start, is_row)
    return plt.load(ref.at[at], mask=mask, other=0.0)


def _load_entry(refs: Any, parts: int, head: tuple[Any, Any], start: Any, is_row: jax.Array) -> list[Part]:
    """The parts of an entry, `_load` of each ``[n, d]``; with scales ``[n]``, where there are more arrays than parts."""
    numbers = [_load(ref, head, start, is_row) for ref in refs[:parts]]
    of_rows = pl.ds(start, is_row.size)
    scales = [plt.load(ref.at[*head, of_rows], mask=is_row, other=0.0) for ref in refs[parts:]]
    return [QuantizedPart(*pair) for pair in zip(numbers, scales, strict=True)] if scales else [*numbers]


def _store(ref: Any, head: tuple[Any, ...], start: Any, is_row: jax.Array, values: jax.Array) -> None:
    """`_load`, the other way."""
    at, mask = _window(ref, head, start, is_row)
    plt.store(ref.at[at], values.astype(ref.dtype), mask=mask)


def _window(ref: Any, head: tuple[Any, ...], start: Any, is_row: jax.Array) -> tuple[tuple[Any, ...], jax.Array]:
    dim = ref.shape[-1]
    at = (*head, *_rows_and_numbers(start, is_row.size, _numbers(dim)))
    return at, is_row[:, None] & (jnp.arange(_power_of_two(dim)) < dim)[None]


def _numbers(dim: int) -> Any:
    """Indices of a value's numbers, as many as a power of two: an array where a slice would end beyond its axis."""
    width = _power_of_two(dim)
    return pl.ds(0, width) if width == dim else jnp.arange(width)


def _rows_and_numbers(start: Any, rows: int, numbers: Any) -> tuple[Any, Any]:
    """Indices of a tile ``[rows, numbers]`` from row ``start`` on: beside an array every index has to be one."""
    if isinstance(numbers, pl.Slice):
        return pl.ds(start, rows), numbers
    return (start + jnp.arange(rows))[:, None], numbers[None]


def _arrays(entry: Entry) -> list[jax.Array]:
    """The arrays of an entry's parts, and then the scales of those in 8 bits."""
    numbers = [part.numbers if isinstance(part, QuantizedPart) else part for part in entry]
    return numbers + [part.scales for part in entry if isinstance(part, QuantizedPart)]


def _scores(q: Sequence[jax.Array], entry: Sequence[Part]) -> jax.Array:
    """``[rows, n]`` float32, the products of queries and keys, those of all parts added."""
    products = [_scaled(_dot(own, operand(keys, own.dtype), 1), keys) for own, keys in zip(q, entry, strict=False)]
    return functools.reduce(jnp.add, products)


def _scaled(by_slot: jax.Array, part: Part) -> jax.Array:
    """``by_slot [rows, n]``, scores or weights, times the scales of a part in 8 bits."""
    return by_slot * part.scales[None] if isinstance(part, QuantizedPart) else by_slot


def _dot(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    """The product in float32, over the last axis of one and ``axis`` of the other. A drafter's dtype may not be its cache's."""
    dtype = jnp.promote_types(left.dtype, right.dtype)
    axes = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(left.astype(dtype), right.astype(dtype), axes, preferred_element_type=jnp.float32)


def _power_of_two(number: int, least: int = 16) -> int:
    """The smallest that is no smaller: arrays in a kernel have such sizes, and factors of a product at least 16."""
    return max(least, 1 << (number - 1).bit_length())
