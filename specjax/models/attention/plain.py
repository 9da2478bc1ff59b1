"""Attention in plain JAX, on any device; the kernels are tested against it.

Each piece is attended to alone, and the results are merged with the sums of their weights (online
softmax, Milakov and Gimelshein 2018, arXiv 1805.02867). So no array of scores is ever larger than a
piece. A long piece is read in blocks of slots: only the scores of one block exist at a time, and
blocks without filled slots are never read. Queries that share a context go in chunks of rows: only
the scores of one chunk exist at a time, in the gradient as well.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.models.attention.pieces import (
    BLOCK,
    LOOP,
    SHORT_ROWS,
    Filled,
    Piece,
    Shared,
    Sparse,
    in_groups,
)
from specjax.models.cache import Entry
from specjax.models.primitives import LEAST, capped
from specjax.models.quantized_cache import Part, dequantize, operand, rescaled

SCORES_BYTES = 2**29
"""The bound of the scores of queries and a `Shared` context on each device, in bytes.

Some three arrays of that size exist at a time. A chunk still has hundreds of queries for each head
at the lengths that drafters are trained at, so that its products are limited by arithmetic.
"""


@struct.dataclass
class Attended:
    """The unnormalized attention output of queries over one piece, or over several.

    Attributes:
        top: ``[B, kv_heads, T, G]`` float32, the largest score.
        mass: ``[B, kv_heads, T, G]`` float32, the sum of exp(score - top).
        total: ``[B, kv_heads, T, G, dim]`` float32, the sum of exp(score - top) value.
    """

    top: jax.Array
    mass: jax.Array
    total: jax.Array

    def merge(self, second: "Attended") -> "Attended":
        """Return the output over the tokens of both."""
        top = jnp.maximum(self.top, second.top)
        factor, second_factor = jnp.exp(self.top - top), jnp.exp(second.top - top)
        return Attended(
            top=top,
            mass=self.mass * factor + second.mass * second_factor,
            total=self.total * factor[..., None] + second.total * second_factor[..., None],
        )


def attend_plainly(
    q: tuple[jax.Array, ...],
    pieces: Sequence[Piece],
    sinks: jax.Array | None = None,
    *,
    values_part: int,
    block: int,
    cap: float | None = None,
) -> jax.Array:
    """Return the output of grouped queries, ``[B, kv_heads, T, G, dim]``, in plain JAX.

    Args:
        q: the scaled queries, as `group_queries` returns them.
        pieces: the keys and values.
        sinks: ``[kv_heads, G]`` float32, the sinks' scores; None if there are none.
        values_part: as in `specjax.models.attention.attend`.
        block: the block width of a short cache.
        cap: as in `specjax.models.attention.attend`.
    """

    def attend_to(q: tuple[jax.Array, ...], pieces: Sequence[Piece]) -> jax.Array:
        attended = _attend_all(q, pieces, sinks, values_part, block, cap)
        # A query that sees no key has mass 0, and its output is 0.
        mass = jnp.where(attended.mass > 0, attended.mass, 1.0)
        return (attended.total / mass[..., None]).astype(q[0].dtype)

    if any(isinstance(piece, Shared) for piece in pieces):
        return _by_chunks_of_rows(attend_to, q, pieces)
    return attend_to(q, pieces)


def _by_chunks_of_rows(
    attend_to: Callable[[tuple[jax.Array, ...], Sequence[Piece]], jax.Array],
    q: tuple[jax.Array, ...],
    pieces: Sequence[Piece],
) -> jax.Array:
    """Return ``attend_to(q, pieces)``, computed for some rows of each shared context at a time.

    Several chunks are computed again for the gradient.
    """
    shared = tuple(piece for piece in pieces if isinstance(piece, Shared))
    contexts, slots = shared[0].entry[0].shape[0], shared[0].entry[0].shape[2]
    queries = q[0].shape[0]
    rows = queries // contexts
    devices = 1 if shared[0].mesh is None else shared[0].mesh.size
    bytes_of_row = 4 * contexts * math.prod(q[0].shape[1:4]) * slots
    width = min(max(SCORES_BYTES * devices // bytes_of_row, 1), rows)
    if width == rows:
        return attend_to(q, pieces)
    chunks = -(-rows // width)

    def is_split(x: jax.Array) -> bool:
        # Of the entries and masks beside a context, those with one row are of all rows.
        return x.shape[0] == queries

    def split(x: jax.Array) -> jax.Array:
        by_context = x.reshape(contexts, rows, *x.shape[1:])
        padding = [(0, 0), (0, chunks * width - rows)] + [(0, 0)] * (x.ndim - 1)
        padded = jnp.pad(by_context, padding, mode="edge")
        by_chunk = padded.reshape(contexts, chunks, width, *x.shape[1:])
        return jnp.moveaxis(by_chunk, 1, 0).reshape(chunks, contexts * width, *x.shape[1:])

    def join(x: jax.Array) -> jax.Array:
        by_context = jnp.moveaxis(x.reshape(chunks, contexts, width, *x.shape[2:]), 0, 1)
        return by_context.reshape(contexts, chunks * width, *x.shape[2:])[:, :rows].reshape(
            queries, *x.shape[2:]
        )

    entries = tuple(piece.entry for piece in shared)
    # The gradients of the contexts are summed over the chunks, in float32.
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), entries)
    whole = tuple(
        replace(piece, entry=()) if isinstance(piece, Shared) else piece for piece in pieces
    )
    leaves, tree = jax.tree.flatten((q, whole))
    places = [place for place, leaf in enumerate(leaves) if is_split(leaf)]

    @jax.checkpoint
    def attend_chunk(wide: tuple[Entry, ...], parts: list[jax.Array]) -> jax.Array:
        of_chunk = list(leaves)
        for place, part in zip(places, parts, strict=True):
            of_chunk[place] = part
        q, pieces = jax.tree.unflatten(tree, of_chunk)
        narrow = iter(jax.tree.map(lambda x, like: x.astype(like.dtype), wide, entries))
        return attend_to(
            q,
            [
                replace(piece, entry=next(narrow)) if isinstance(piece, Shared) else piece
                for piece in pieces
            ],
        )

    return join(
        jax.lax.map(
            functools.partial(attend_chunk, wide), [split(leaves[place]) for place in places]
        )
    )


def attention_paid(
    q: Float[Array, "B T heads d"],
    filled: Filled,
    extra: Sequence[Piece],
    *,
    scale: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    cap: float | None = None,
) -> Float[Array, "B kv_heads S"]:
    """Return the attention weight of each slot, summed over the queries of a KV head.

    Args:
        q: the queries.
        filled: the slots of a cache.
        extra: further pieces that the queries attend to. Their weights, and those of sinks, are not
            part of the result.
        scale: as in `specjax.models.attention.attend`.
        sinks: as in `specjax.models.attention.attend`.
        cap: as in `specjax.models.attention.attend`.
    """
    grouped = group_queries((q,), (filled, *extra), scale)
    attended = _attend_all(grouped, (filled, *extra), group_sinks(sinks, grouped), 0, BLOCK, cap)
    width = filled.block_width(BLOCK)

    def add(block: jax.Array | int, paid: jax.Array) -> jax.Array:
        entry, visible = filled.block(block * width, width)
        scores = _scores(grouped, entry, visible, cap)
        weights = jnp.exp(scores - attended.top[..., None]) / attended.mass[..., None]
        # The last block begins earlier, so that it ends with the cache (see `Filled.block`).
        first = jnp.minimum(block * width, filled.slots - width)
        before = jax.lax.dynamic_slice_in_dim(paid, first, width, axis=2)
        return jax.lax.dynamic_update_slice_in_dim(
            paid, before + weights.sum(axis=(2, 3)), first, axis=2
        )

    zeros = jnp.zeros((*grouped[0].shape[:2], filled.slots), jnp.float32)
    return jax.lax.fori_loop(0, -(-jnp.max(filled.count) // width), add, zeros)


def group_queries(
    q: tuple[jax.Array, ...], pieces: Sequence[Piece], scale: float | None
) -> tuple[jax.Array, ...]:
    """Scale queries ``[B, T, heads, d]`` and group them as ``[B, kv_heads, T, G, d]``.

    The G queries that share one KV head are neighbours. The axes are in the order in which the
    matrix products read and write them: any other order costs a transposed copy.
    """
    batch, count, heads, d = q[0].shape
    first = pieces[0][0] if isinstance(pieces[0], tuple) else pieces[0].entry
    kv_heads = first[0].shape[1]
    factor = d**-0.5 if scale is None else scale

    def group(part: jax.Array) -> jax.Array:
        by_kv_head = part.reshape(batch, count, kv_heads, heads // kv_heads, part.shape[-1])
        return by_kv_head.transpose(0, 2, 1, 3, 4) * factor

    return tuple(map(group, q))


def group_sinks(sinks: jax.Array | None, q: tuple[jax.Array, ...]) -> jax.Array | None:
    """Group sinks ``[heads]`` as ``[kv_heads, G]`` float32, like the heads of `group_queries`."""
    if sinks is None:
        return None
    # A sink of -inf takes no part. It becomes finite, since -inf minus -inf would be NaN.
    return jnp.maximum(sinks.astype(jnp.float32), LEAST).reshape(q[0].shape[1], q[0].shape[3])


def _attend_all(
    q: tuple[jax.Array, ...],
    pieces: Sequence[Piece],
    sinks: jax.Array | None,
    values_part: int,
    block: int,
    cap: float | None,
) -> Attended:
    """Attend to all pieces, a cache in blocks of its `Filled.block_width`, and to the sinks."""

    def attend_to(piece: Piece) -> Attended:
        if isinstance(piece, Filled):
            return _attend_in_blocks(q, piece, values_part, piece.block_width(block), cap)
        if isinstance(piece, Sparse):
            return _attend_sparse(q, piece, values_part, block, cap)
        if isinstance(piece, Shared):
            return _attend_shared(q, piece, values_part, cap)
        return _attend_piece(q, *piece, values_part, cap)

    attended = list(map(attend_to, pieces))
    if sinks is not None:
        # Sinks are like one more key without a value: a mass of exp(0) at their own score.
        top = jnp.broadcast_to(sinks[:, None], attended[0].top.shape)
        attended.append(
            Attended(top=top, mass=jnp.ones_like(top), total=jnp.zeros_like(attended[0].total))
        )
    return functools.reduce(Attended.merge, attended)


def _attend_shared(
    q: tuple[jax.Array, ...], shared: Shared, values_part: int, cap: float | None
) -> Attended:
    """Attend to a context, with the queries of all of its rows as if they were of one."""
    contexts, _, slots, _ = shared.entry[0].shape
    queries, heads, count, _, _ = q[0].shape
    rows = queries // contexts

    def side_by_side(x: jax.Array) -> jax.Array:
        by_context = x.reshape(contexts, rows, heads, count, *x.shape[3:])
        return jnp.moveaxis(by_context, 1, 2).reshape(contexts, heads, rows * count, *x.shape[3:])

    def apart(x: jax.Array) -> jax.Array:
        by_row = x.reshape(contexts, heads, rows, count, *x.shape[3:])
        return jnp.moveaxis(by_row, 2, 1).reshape(queries, heads, count, *x.shape[3:])

    def of_queries(bound: jax.Array) -> jax.Array:
        return jnp.broadcast_to(bound, (queries, count)).reshape(contexts, rows * count, 1)

    number = jnp.arange(slots)
    visible = (number >= of_queries(shared.first)) & (number <= of_queries(shared.last))
    attended = _attend_piece(tuple(map(side_by_side, q)), shared.entry, visible, values_part, cap)
    return jax.tree.map(apart, attended)


def _attend_piece(
    q: tuple[jax.Array, ...],
    entry: Entry,
    visible: jax.Array | None,
    values_part: int,
    cap: float | None,
) -> Attended:
    """Attend to a piece as a whole."""
    if visible is None:  # each query sees one token: its own
        values = dequantize(entry[values_part]).astype(jnp.float32)
        score = capped(_products("bktd,bktgd->bktg", entry, q), cap)
        total_of_one = jnp.broadcast_to(values[:, :, :, None], (*score.shape, values.shape[-1]))
        return Attended(top=score, mass=jnp.ones_like(score), total=total_of_one)
    scores = _scores(q, entry, visible, cap)
    # The result does not depend on the shift by `top`, so no gradient flows through it.
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1), LEAST))
    weights = jnp.exp(scores - top[..., None])
    values = operand(entry[values_part], q[0].dtype)
    weighted = rescaled(weights, entry[values_part], (2, 3)).astype(values.dtype)
    total = jnp.einsum("bktgs,bksd->bktgd", weighted, values, preferred_element_type=jnp.float32)
    return Attended(top=top, mass=jnp.sum(weights, axis=-1), total=total)


def _products(equation: str, entry: Entry, q: tuple[jax.Array, ...]) -> jax.Array:
    """Return the float32 products of keys and queries, summed over the parts of the entry.

    The third axis of the result is that of the keys' slots; the axes after it are the queries'.
    """

    def product(keys: Part, part: jax.Array) -> jax.Array:
        products = jnp.einsum(
            equation, operand(keys, part.dtype), part, preferred_element_type=jnp.float32
        )
        return rescaled(products, keys, range(3, products.ndim))

    return functools.reduce(
        jnp.add, [product(keys, part) for keys, part in zip(entry, q, strict=False)]
    )


def _scores(
    q: tuple[jax.Array, ...], entry: Entry, visible: jax.Array, cap: float | None
) -> jax.Array:
    """Return the scores of queries and all keys of a piece, ``[B, kv_heads, T, G, S]`` float32."""
    # Keys first: with the queries first XLA's CPU backend would transpose all keys, not the scores.
    scores = capped(_products("bksd,bktgd->bkstg", entry, q).transpose(0, 1, 3, 4, 2), cap)
    # Finite and below LEAST: a row without visible keys then has weights of exp(LEAST) = 0, not
    # NaN.
    return jnp.where(visible[:, None, :, None], scores, 2 * LEAST)


def _attend_in_blocks(
    q: tuple[jax.Array, ...], filled: Filled, values_part: int, width: int, cap: float | None
) -> Attended:
    """Attend to a cache block by block.

    It starts at the first block that any query sees, and ends with the last that any row has
    filled.
    """

    def attend_at(start: jax.Array | int) -> Attended:
        entry, visible = filled.block(start, width)
        return _attend_piece(q, entry, visible, values_part, cap)

    if width == filled.slots:
        return attend_at(0)
    empty = _nothing(q[0].shape[:-1], filled.entry[values_part].shape[-1])
    blocks = -(-jnp.max(filled.count) // width)
    first = 0
    if filled.since is not None:  # empty rows do not lower the first block
        since = jnp.where(filled.count[:, None] > 0, filled.since, filled.slots)
        first = (jnp.maximum(jnp.min(since), 0) // width).astype(blocks.dtype)
    with jax.named_scope(LOOP):
        return jax.lax.fori_loop(
            first, blocks, lambda block, sums: sums.merge(attend_at(block * width)), empty
        )


def _attend_sparse(
    q: tuple[jax.Array, ...], sparse: Sparse, values_part: int, block: int, cap: float | None
) -> Attended:
    """Attend to short rows of a cache as a whole, and to selected slots of the long ones."""
    batch, heads, queries = q[0].shape[:3]
    with jax.named_scope(SHORT_ROWS):
        short = sparse.short
        whole = _attend_in_blocks(q, short, values_part, short.block_width(block), cap)

    slots, visible = sparse.groups()
    groups, _, width, _ = slots.shape

    def joined(part: jax.Array) -> jax.Array:
        part = jnp.moveaxis(part, 0, 2)
        return part.reshape(batch, heads, groups * width, *part.shape[4:])[:, :, :queries]

    def attend_to(of_group: tuple[tuple[jax.Array, ...], jax.Array, jax.Array]) -> Attended:
        """Attend to the slots of a group. Each query is a row, with entries of its own."""
        q, slots, visible = of_group
        rows = tuple(
            part.swapaxes(1, 2).reshape(batch * width, heads, 1, *part.shape[3:]) for part in q
        )
        shown = visible.reshape(batch * width, 1, -1)
        attended = _attend_piece(rows, sparse.gather(slots, visible), shown, values_part, cap)
        return jax.tree.map(
            lambda part: part.reshape(batch, width, heads, *part.shape[3:]).swapaxes(1, 2), attended
        )

    def attend_to_all(q: tuple[jax.Array, ...], slots: jax.Array, visible: jax.Array) -> Attended:
        queries_of = tuple(in_groups(part, 2, groups) for part in q)
        by_group = jax.lax.map(attend_to, (queries_of, slots, visible))
        return jax.tree.map(joined, by_group)

    nothing = _nothing(q[0].shape[:-1], sparse.entry[values_part].shape[-1])
    copied = jax.lax.cond(jnp.any(visible), attend_to_all, lambda *_: nothing, q, slots, visible)
    return whole.merge(copied)


def _nothing(shape: tuple[int, ...], dim: int) -> Attended:
    """Return the output ``[*shape, dim]`` over no tokens; ``shape`` is ``[B, kv_heads, T, G]``."""
    return Attended(
        top=jnp.full(shape, LEAST, jnp.float32),
        mass=jnp.zeros(shape, jnp.float32),
        total=jnp.zeros((*shape, dim), jnp.float32),
    )
