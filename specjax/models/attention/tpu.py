"""Attention as one TPU kernel (flash attention; Dao et al. 2022, arXiv 2205.14135, in Pallas).

Scores live in the chip's fast memory alone: of the big arrays, queries, keys and values are read once and what is found is
written once. Blocks of a cache that hold nothing a row may see are neither fetched nor multiplied, row by row. What is no part
of the cache, drafted tokens and the call's own, is attended to in the same kernel: on a TPU every operation costs about a
microsecond however little it does, and a layer's attention of a few tokens would be twenty.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.models.cache import Entry, Other
from specjax.models.primitives import LEAST, capped
from specjax.models.quantized_cache import Part, QuantizedPart, operand

BLOCK = 512
"""Slots that are fetched at a time, for many queries; up to four times as many for few. Of a cache in pages, whole pages."""

ROWS = 512
"""Queries that are worked on at a time: more would not fit the fast memory beside their keys."""

BYTES = 4 << 20
"""Of what is fetched at a time, at most, where that is more than `BLOCK` slots: it is there twice, the block that is worked on
and the next. Keys and values of 512 numbers in bfloat16 so take 8 of a v5e's 16 MiB; twice as much did not fit."""


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
    """Attention of R queries to the slots of a cache, and to other tokens beside it.

    Args:
        q: ``[B, kv_heads, R, d_i]`` queries for each part of an entry that is a key, scaled; the products are added.
        entry: ``[B, kv_heads, S, d_i]`` each part, all of floats or all in 8 bits; with a table, pools
            ``[pages, kv_heads, page, d_i]``.
        count: ``[B]`` how many slots of each row are filled.
        since: ``[B, R]`` the first slot that each query sees.
        others: further tokens.
        table: ``[B, n]`` int32, the pages of each row in order. None: a row's slots lie side by side.
        sinks: ``[kv_heads, G]`` float32, more than -inf: of query r that of r modulo G.
        values_part: which part is attended to.
        cap: of the scores, as in `specjax.models.attention.attend`.
        interpret: run it as ordinary JAX, on any backend: for tests.

    Returns:
        ``[B, kv_heads, R, d]`` in the queries' dtype, zeros where a query sees nothing.
    """
    batch, kv_heads, rows, _ = q[0].shape
    page, dim = entry[0].shape[2], entry[values_part].shape[3]
    slots = page if table is None else page * table.shape[1]
    tile = min(ROWS, rows)
    stored, scales = _arrays(entry)
    of_slot = sum(part.shape[3] * part.dtype.itemsize for part in stored) + sum(
        part.dtype.itemsize * kv_heads for part in scales
    )
    width = min(BLOCK * max(1, min(4, ROWS // tile, BYTES // (of_slot * BLOCK))), slots)
    pages = 1
    if table is not None:  # a block is some pages, each from a place of its own: the pool is passed once for each
        count = jnp.minimum(count, slots)
        pages = max(1, width // page)
        width = pages * page
    blocks = -(-slots // width)

    first = jnp.maximum(jnp.min(since, axis=1), 0) // width
    last = jnp.maximum(-(-count // width) - 1, 0)
    scalars = [count, first, last]
    if table is not None:
        # Flat, for in the chip's memory for scalars a row of a table takes a multiple of 128. What a row does not use is out of
        # range, and must not be asked for.
        scalars.append(jnp.clip(table, 0, entry[0].shape[0] - 1).reshape(-1))

    def of_rows(b: Any, h: Any, r: Any, i: Any, *_: Any) -> tuple[Any, ...]:
        return b, h, r, 0

    def of_block(b: Any, h: Any, r: Any, i: Any, count: Any, first: Any, last: Any) -> tuple[Any, ...]:
        # Asked for the block that is there already, the chip fetches nothing.
        return b, h, jnp.clip(i, first[b], last[b]), 0

    def of_page(number: int, b: Any, h: Any, r: Any, i: Any, count: Any, first: Any, last: Any, table: Any) -> tuple[Any, ...]:
        column = jnp.clip(i, first[b], last[b]) * pages + number
        # Behind the row's last page: the one of the block before, which is there already.
        held = -(-count[b] // page)
        column = jnp.clip(jnp.where(column < held, column, column - pages), 0, jnp.maximum(held - 1, 0))
        return table[b * (slots // page) + column], h, 0, 0

    places = [of_block] if table is None else [functools.partial(of_page, number) for number in range(pages)]
    given = [since[..., None], *q, *(part for part in (*stored, *scales) for _ in places)]
    in_specs = [pl.BlockSpec((1, tile, 1), lambda b, h, r, i, *_: (b, r, 0))]
    in_specs += [pl.BlockSpec((1, 1, tile, part.shape[3]), of_rows) for part in q]
    in_specs += [pl.BlockSpec((1, 1, width // pages, part.shape[3]), place) for part in stored for place in places]
    in_specs += [pl.BlockSpec((1, kv_heads, width // pages), _of_scales(place)) for _ in scales for place in places]
    if others:
        other, visible = _joined(others)
        beside, (numbers, of_numbers) = visible.shape[2], _arrays(other)
        given += [visible, *numbers, *of_numbers]
        in_specs += [pl.BlockSpec((1, tile, beside), lambda b, h, r, i, *_: (b, r, 0))]
        in_specs += [pl.BlockSpec((1, 1, beside, part.shape[3]), lambda b, h, r, i, *_: (b, h, 0, 0)) for part in numbers]
        in_specs += [pl.BlockSpec((1, kv_heads, beside), lambda b, h, r, i, *_: (b, 0, 0)) for _ in of_numbers]
    if sinks is not None:
        # The same for every tile, where all begin with the first of a group.
        alike = tile % sinks.shape[1] == 0
        given.append(jnp.tile(sinks, (1, (tile if alike else rows) // sinks.shape[1]))[..., None])
        in_specs.append(pl.BlockSpec((1, tile, 1), lambda b, h, r, i, *_: (h, 0 if alike else r, 0)))
    pairs = batch * kv_heads * rows * slots
    # Of a cache in pages the rows' own pages, not the whole pool, and not as often as it is passed.
    of_cache = batch * kv_heads * slots * of_slot
    of_others = sum(part.size * part.dtype.itemsize for part in given if not any(part is one for one in (*stored, *scales)))
    return pl.pallas_call(
        functools.partial(
            _kernel, parts=len(q), entry_parts=len(entry), pages=pages, width=width, blocks=blocks, values_part=values_part,
            has_scales=bool(scales), has_others=bool(others), has_sinks=sinks is not None, in_pages=table is not None, cap=cap,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, kv_heads, -(-rows // tile), blocks),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((1, 1, tile, dim), of_rows),
            scratch_shapes=[pltpu.VMEM((tile, size), jnp.float32) for size in (1, 1, dim)],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, rows, dim), q[0].dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (dim + sum(part.shape[3] for part in q)),
            bytes_accessed=of_cache + of_others,
            transcendentals=pairs,
        ),
        interpret=interpret,
    )(*scalars, *given)  # fmt: skip


def _arrays(entry: Entry) -> tuple[list[jax.Array], list[jax.Array]]:
    """The arrays of an entry's parts, and of parts in 8 bits the scales ``[B, kv_heads, S]``."""
    stored = [part.numbers if isinstance(part, QuantizedPart) else part for part in entry]
    return stored, [part.scales for part in entry if isinstance(part, QuantizedPart)]


def _of_scales(place: Any) -> Any:
    """Where the scales of a block lie whose numbers lie at ``place``: those of all heads, which lie side by side.

    To have them by head they would be laid out anew in every step, of which a v5e's compiler says that it takes a tenth of a
    millisecond for 8 rows of 8192 tokens, longer than to read the others' scales beside a head's numbers.
    """

    def of_scales(*given: Any) -> tuple[Any, ...]:
        row, _, block, _ = place(*given)
        return row, 0, block

    return of_scales


def _joined(others: Sequence[Other]) -> Other:
    """Several of them side by side. Some that nobody sees make n a multiple of 8, which is how a TPU's registers are filled."""
    missing = -sum(visible.shape[-1] for _, visible in others) % 8

    def join(*parts: jax.Array) -> jax.Array:
        filler = jnp.zeros((*parts[0].shape[:2], missing, *parts[0].shape[3:]), parts[0].dtype)
        return jnp.concatenate([*parts, filler], axis=2)

    entry = jax.tree.map(join, *(entry for entry, _ in others))
    return entry, jnp.pad(jnp.concatenate([visible for _, visible in others], axis=2), ((0, 0), (0, 0), (0, missing)))


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
    """One block of one row's head; what is found so far is kept in fast memory until the last."""
    refs = refs[in_pages:]  # the table says what is fetched, and nothing here asks for it
    since_ref, *given, out_ref, top_ref, mass_ref, total_ref = refs
    arrays = entry_parts * (1 + has_scales)
    beside = parts + arrays * pages
    q_refs, entry_refs, others_refs = given[:parts], given[parts:beside], given[beside:]
    row, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(3)
    count = count_ref[row]

    def entry_in(refs: Sequence[Any], pages: int) -> list[Part]:
        """The parts of an entry, numbers ``[n, d]``, scales ``[1, n]``; each array in so many pages."""
        split = [
            [ref[0, 0] if i < entry_parts else ref[0, pl.ds(head, 1)] for ref in refs[i * pages : (i + 1) * pages]]
            for i in range(arrays)
        ]
        # In registers: nothing is moved.
        whole = [jnp.concatenate(of, axis=i // entry_parts) if pages > 1 else of[0] for i, of in enumerate(split)]
        numbers, scales = whole[:entry_parts], whole[entry_parts:]
        return [QuantizedPart(*pair) for pair in zip(numbers, scales, strict=True)] if has_scales else [*numbers]

    def product(q: jax.Array, keys: Part) -> jax.Array:
        found = jax.lax.dot_general(q, operand(keys, q.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return found * keys.scales if isinstance(keys, QuantizedPart) else found

    def scores_of(keys: Sequence[Part]) -> jax.Array:
        return capped(functools.reduce(jnp.add, [product(q[0, 0], part) for q, part in zip(q_refs, keys, strict=False)]), cap)

    def add(scores: jax.Array, visible: jax.Array, part: Part) -> None:
        values = operand(part, q_refs[0].dtype)
        scores = jnp.where(visible, scores, 2 * LEAST)
        before = top_ref[...]
        top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights, shrunk = jnp.exp(scores - top), jnp.exp(before - top)
        of_values = weights * part.scales if isinstance(part, QuantizedPart) else weights
        total = jnp.dot(of_values.astype(values.dtype), values, preferred_element_type=jnp.float32)
        top_ref[...] = top
        mass_ref[...] = mass_ref[...] * shrunk + jnp.sum(weights, axis=1, keepdims=True)
        total_ref[...] = total_ref[...] * shrunk + total

    @pl.when(block == 0)
    def _() -> None:
        # A sink is there before anything else, with a weight of 1 and no value.
        top_ref[...] = others_refs[-1][0] if has_sinks else jnp.full_like(top_ref, LEAST)
        mass_ref[...] = jnp.ones_like(mass_ref) if has_sinks else jnp.zeros_like(mass_ref)
        total_ref[...] = jnp.zeros_like(total_ref)
        if has_others:
            visible_ref, *other_refs = others_refs[: 1 + arrays]
            other = entry_in(other_refs, pages=1)
            add(scores_of(other), visible_ref[0].astype(jnp.int32) > 0, other[values_part])

    @pl.when((block >= first_ref[row]) & (block <= last_ref[row]) & (count > 0))
    def _() -> None:
        entry = entry_in(entry_refs, pages)
        scores = scores_of(entry)
        slot = block * width + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)

        def filled(array: jax.Array, axis: int) -> jax.Array:
            """Beyond the last slot a block holds whatever was there, NaN perhaps."""
            is_slot = block * width + jax.lax.broadcasted_iota(jnp.int32, array.shape, axis) < count
            return jnp.where(is_slot, array, jnp.zeros_like(array))

        part = entry[values_part]
        values = QuantizedPart(part.numbers, filled(part.scales, 1)) if isinstance(part, QuantizedPart) else filled(part, 0)
        add(scores, (slot < count) & (slot >= since_ref[0]), values)

    @pl.when(block == blocks - 1)
    def _() -> None:
        mass = mass_ref[...]
        out_ref[0, 0] = (total_ref[...] / jnp.where(mass > 0, mass, 1.0)).astype(out_ref.dtype)
