"""Attention in plain JAX, on any device: what the kernels are tested against.

Each piece is attended to on its own, and the results are merged by the sums of their weights (online softmax, Milakov and
Gimelshein 2018, arXiv 1805.02867). So no array of scores is ever larger than a piece, and a long piece is read in blocks of
slots: the scores of one block are all there is at a time, and blocks that hold nothing are never read.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.models.attention.pieces import BLOCK, LOOP, Filled, Piece
from specjax.models.cache import Entry
from specjax.models.primitives import LEAST, capped
from specjax.models.quantized_cache import Part, dequantize, operand, rescaled


@struct.dataclass
class Attended:
    """What queries found in one piece, or in several.

    Attributes:
        top: ``[B, kv_heads, T, G]`` float32, the largest score.
        mass: likewise, the sum of exp(score - top).
        total: ``[B, kv_heads, T, G, dim]`` float32, the sum of exp(score - top) value.
    """

    top: jax.Array
    mass: jax.Array
    total: jax.Array

    def merge(self, other: "Attended") -> "Attended":
        """What they found in both."""
        top = jnp.maximum(self.top, other.top)
        ours, theirs = jnp.exp(self.top - top), jnp.exp(other.top - top)
        return Attended(
            top=top,
            mass=self.mass * ours + other.mass * theirs,
            total=self.total * ours[..., None] + other.total * theirs[..., None],
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
    """``[B, kv_heads, T, G, dim]`` what grouped queries find in all pieces, in plain JAX; with ``sinks [kv_heads, G]``."""
    found = _attend_all(q, pieces, sinks, values_part, block, cap)
    return (found.total / jnp.where(found.mass > 0, found.mass, 1.0)[..., None]).astype(q[0].dtype)


def attention_paid(
    q: Float[Array, "B T heads d"],
    filled: Filled,
    others: Sequence[Piece],
    *,
    scale: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    cap: float | None = None,
) -> Float[Array, "B kv_heads S"]:
    """How much of the attention of T queries goes to each slot of a cache, summed over the queries that read a key's head.

    Args:
        q: the queries.
        filled: the slots.
        others: further pieces that they attend to. What goes to these is part of no slot, nor is what goes to sinks.
        scale: as in `specjax.models.attention.attend`, like the next two.
        sinks: a score of each query head.
        cap: of the scores.
    """
    grouped = group_queries((q,), (filled, *others), scale)
    found = _attend_all(grouped, (filled, *others), group_sinks(sinks, grouped), 0, BLOCK, cap)
    width = filled.block_width(BLOCK)

    def add(block: jax.Array | int, paid: jax.Array) -> jax.Array:
        entry, visible = filled.block(block * width, width)
        weights = jnp.exp(_scores(grouped, entry, visible, cap) - found.top[..., None]) / found.mass[..., None]
        first = jnp.minimum(block * width, filled.slots - width)
        before = jax.lax.dynamic_slice_in_dim(paid, first, width, axis=2)
        return jax.lax.dynamic_update_slice_in_dim(paid, before + weights.sum(axis=(2, 3)), first, axis=2)

    nothing = jnp.zeros((*grouped[0].shape[:2], filled.slots), jnp.float32)
    return jax.lax.fori_loop(0, -(-jnp.max(filled.count) // width), add, nothing)


def group_queries(q: tuple[jax.Array, ...], pieces: Sequence[Piece], scale: float | None) -> tuple[jax.Array, ...]:
    """Queries ``[B, T, heads, d]`` as ``[B, kv_heads, T, G, d]``, scaled: the G that read one head of keys side by side.

    Axes in the order in which the products give and take them: another order costs a transposed copy.
    """
    batch, count, heads, d = q[0].shape
    first = pieces[0].entry if isinstance(pieces[0], Filled) else pieces[0][0]
    kv_heads = first[0].shape[1]
    factor = d**-0.5 if scale is None else scale
    return tuple(
        part.reshape(batch, count, kv_heads, heads // kv_heads, part.shape[-1]).transpose(0, 2, 1, 3, 4) * factor for part in q
    )


def group_sinks(sinks: jax.Array | None, q: tuple[jax.Array, ...]) -> jax.Array | None:
    """Sinks ``[heads]`` as ``[kv_heads, G]`` float32, as `group_queries` has the heads; -inf, no sink, becomes finite."""
    if sinks is None:
        return None
    return jnp.maximum(sinks.astype(jnp.float32), LEAST).reshape(q[0].shape[1], q[0].shape[3])


def _attend_all(
    q: tuple[jax.Array, ...], pieces: Sequence[Piece], sinks: jax.Array | None, values_part: int, block: int, cap: float | None
) -> Attended:
    """Grouped queries over all pieces; a cache in blocks of its `Filled.block_width`. Sinks are one more, without a value."""
    found = [
        _attend_in_blocks(q, piece, values_part, piece.block_width(block), cap)
        if isinstance(piece, Filled)
        else _attend_piece(q, *piece, values_part, cap)
        for piece in pieces
    ]
    if sinks is not None:
        top = jnp.broadcast_to(sinks[:, None], found[0].top.shape)
        found.append(Attended(top=top, mass=jnp.ones_like(top), total=jnp.zeros_like(found[0].total)))
    return functools.reduce(Attended.merge, found)


def _attend_piece(
    q: tuple[jax.Array, ...], entry: Entry, visible: jax.Array | None, values_part: int, cap: float | None
) -> Attended:
    """Grouped queries over a piece as a whole."""
    if visible is None:  # each query over its own slot
        values = dequantize(entry[values_part]).astype(jnp.float32)
        score = capped(_products("bktd,bktgd->bktg", entry, q), cap)
        own = jnp.broadcast_to(values[:, :, :, None], (*score.shape, values.shape[-1]))
        return Attended(top=score, mass=jnp.ones_like(score), total=own)
    scores = _scores(q, entry, visible, cap)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1), LEAST))
    weights = jnp.exp(scores - top[..., None])
    values = operand(entry[values_part], q[0].dtype)
    of_values = rescaled(weights, entry[values_part], (2, 3)).astype(values.dtype)
    total = jnp.einsum("bktgs,bksd->bktgd", of_values, values, preferred_element_type=jnp.float32)
    return Attended(top=top, mass=jnp.sum(weights, axis=-1), total=total)


def _products(equation: str, entry: Entry, q: tuple[jax.Array, ...]) -> jax.Array:
    """The float32 products of keys and queries, those of all parts added; the keys' slots are the third axis of what comes out,
    and what comes after them is the queries' own."""

    def product(keys: Part, part: jax.Array) -> jax.Array:
        found = jnp.einsum(equation, operand(keys, part.dtype), part, preferred_element_type=jnp.float32)
        return rescaled(found, keys, range(3, found.ndim))

    return functools.reduce(jnp.add, [product(keys, part) for keys, part in zip(entry, q, strict=False)])


def _scores(q: tuple[jax.Array, ...], entry: Entry, visible: jax.Array, cap: float | None) -> jax.Array:
    """``[B, kv_heads, T, G, S]`` float32 of grouped queries and all keys of a piece."""
    # Keys first: with the queries first XLA's CPU backend would transpose all keys instead of the scores.
    scores = capped(_products("bksd,bktgd->bkstg", entry, q).transpose(0, 1, 3, 4, 2), cap)
    return jnp.where(visible[:, None, :, None], scores, 2 * LEAST)


def _attend_in_blocks(q: tuple[jax.Array, ...], filled: Filled, values_part: int, width: int, cap: float | None) -> Attended:
    """Grouped queries over a cache, block by block: from the first that any query sees to the last that any row has filled."""

    def over(start: jax.Array | int) -> Attended:
        entry, visible = filled.block(start, width)
        return _attend_piece(q, entry, visible, values_part, cap)

    if width == filled.slots:
        return over(0)
    shape = q[0].shape[:-1]
    nothing = Attended(
        top=jnp.full(shape, LEAST, jnp.float32),
        mass=jnp.zeros(shape, jnp.float32),
        total=jnp.zeros((*shape, filled.entry[values_part].shape[-1]), jnp.float32),
    )
    blocks = -(-jnp.max(filled.count) // width)
    first = 0
    if filled.since is not None:  # rows that hold nothing do not count
        since = jnp.where(filled.count[:, None] > 0, filled.since, filled.slots)
        first = (jnp.maximum(jnp.min(since), 0) // width).astype(blocks.dtype)
    with jax.named_scope(LOOP):
        return jax.lax.fori_loop(first, blocks, lambda block, found: found.merge(over(block * width)), nothing)
