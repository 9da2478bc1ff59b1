"""Attention: queries meet what a layer remembers. Nothing else in the package multiplies queries and keys.

What is attended to comes in *pieces*: the cache, which may be long, the scratch of a draft, and what a call adds itself. Each
piece is attended to on its own, and the results are merged by the sums of their weights (online softmax, Milakov and Gimelshein
2018, arXiv 1805.02867). So no array of scores is ever larger than a piece, and a long piece is read in blocks of slots: the
scores of one block are all there is at a time, and blocks that hold nothing are never read. Where a cache is attended to, TPUs
and GPUs have a kernel each (`attention_tpu`, `attention_gpu`); the plain JAX here is what they are tested against.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float

from specjax import sharding
from specjax.models import attention_gpu, attention_tpu
from specjax.models.cache import Entry
from specjax.models.primitives import LEAST

BLOCK = 512
"""Slots of a short cache that are attended to at a time; see `block_width`."""

LOOP = "cache_blocks"
"""What the loop over them is called in a compiled program."""


def block_width(slots: int, block: int) -> int:
    """How many slots of a cache with ``slots`` are attended to at a time; ``block`` of a short one.

    The last block is read whole, however few of its slots are filled: so only a long cache has wider ones.
    """
    return min(slots, block if slots < 8 * block else 2 * block)


@struct.dataclass
class Filled:
    """The slots of a cache, as attention reads them.

    Attributes:
        entry: ``[B, heads, S, dim]`` each part.
        count: ``[B]`` how many slots of each row hold something: the first ones.
        since: ``[B|1, T|1]`` the first slot that each query sees. None: all see all that is filled.
        mesh: static, where the entry lives.
    """

    entry: Entry
    count: jax.Array
    since: jax.Array | None = None
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    @property
    def slots(self) -> int:
        """Slots of a row, S."""
        return self.entry[0].shape[2]

    def block(self, start: jax.Array | int, width: int) -> tuple[Entry, jax.Array]:
        """The entries of ``width`` slots that include those from ``start`` on, and ``[B, T|1, width]`` which of them are seen.

        The last block of a cache begins earlier than asked, so that it ends with the cache; what an earlier block has shown is
        hidden in it.
        """
        first = jnp.minimum(start, self.slots - width)
        number = first + jnp.arange(width)
        seen = (number < self.count[:, None])[:, None] & (number >= start)
        if self.since is not None:
            seen &= number >= self.since[..., None]
        return jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, first, width, axis=2), self.entry), seen


Piece = tuple[Entry, jax.Array | None] | Filled
"""What one layer remembers of some tokens, to attend to, and ``[B|1, T|1, S]`` bool, which of them each query sees. None: there
is one for each query, its own, and it sees no other. Or the slots of a cache."""


@struct.dataclass
class Attended:
    """What queries found in one piece, or in several.

    Attributes:
        top: ``[B, kv_heads, T, G]`` float32, the largest score.
        mass: likewise, the sum of exp(score - top).
        values: ``[B, kv_heads, T, G, dim]`` float32, the sum of exp(score - top) value.
    """

    top: jax.Array
    mass: jax.Array
    values: jax.Array

    def merge(self, other: "Attended") -> "Attended":
        """What they found in both."""
        top = jnp.maximum(self.top, other.top)
        ours, theirs = jnp.exp(self.top - top), jnp.exp(other.top - top)
        return Attended(
            top=top,
            mass=self.mass * ours + other.mass * theirs,
            values=self.values * ours[..., None] + other.values * theirs[..., None],
        )


def attend(
    q: Float[Array, "B T heads d"] | tuple[jax.Array, ...],
    pieces: Sequence[Piece],
    *,
    scale: float | None = None,
    values_part: int = 1,
) -> Float[Array, "B T heads_d"]:
    """Grouped-query attention over several pieces as if they were one. Scores and softmax in float32.

    A query that sees nothing at all finds zeros.

    Args:
        q: the queries, which meet the first part of an entry. A tuple ``[B, T, heads, d_i]`` meets the first parts one by one,
            and the products are added: latent attention meets the latents and the rotated keys.
        pieces: what is committed, what a draft holds in scratch, and what the call itself adds.
        scale: of the scores; by default ``d ** -0.5``.
        values_part: which part of an entry is attended to: the second, or, in latent attention, the latents again.
    """
    given = q if isinstance(q, tuple) else (q,)
    batch, count = given[0].shape[:2]
    found = _attend_grouped(_group(given, pieces, scale), tuple(pieces), values_part=values_part, block=BLOCK)
    return found.transpose(0, 2, 1, 3, 4).reshape(batch, count, -1)


@functools.partial(jax.jit, static_argnames=("values_part", "block"), inline=True)  # traced once for all layers alike
def _attend_grouped(q: tuple[jax.Array, ...], pieces: tuple[Piece, ...], *, values_part: int, block: int) -> jax.Array:
    """``[B, kv_heads, T, G, dim]`` what grouped queries find in all pieces, as suits the device."""
    plainly = functools.partial(_attend_plainly, values_part=values_part, block=block)
    by_kernel = functools.partial(_attend_by_kernel, values_part=values_part)
    has_cache = any(isinstance(piece, Filled) for piece in pieces)
    return jax.lax.platform_dependent(
        q,
        pieces,
        tpu=functools.partial(by_kernel, kernel=attention_tpu.attend_in_kernel) if has_cache else plainly,
        cuda=functools.partial(by_kernel, kernel=attention_gpu.attend_in_kernel) if has_cache else plainly,
        default=plainly,
    )


def _attend_plainly(q: tuple[jax.Array, ...], pieces: Sequence[Piece], values_part: int, block: int) -> jax.Array:
    """``[B, kv_heads, T, G, dim]`` what grouped queries find in all pieces, in plain JAX."""
    found = _attend_all(q, pieces, values_part, block)
    return (found.values / jnp.where(found.mass > 0, found.mass, 1.0)[..., None]).astype(q[0].dtype)


def attention_paid(q: Float[Array, "B T heads d"], filled: Filled, others: Sequence[Piece]) -> Float[Array, "B kv_heads S"]:
    """How much of the attention of T queries goes to each slot of a cache, summed over the queries that read a key's head.

    Args:
        q: the queries.
        filled: the slots.
        others: further pieces that they attend to. What goes to these is part of no slot.
    """
    grouped = _group((q,), (filled, *others), None)
    found = _attend_all(grouped, (filled, *others), values_part=0, block=BLOCK)
    width = block_width(filled.slots, BLOCK)

    def add(block: jax.Array | int, paid: jax.Array) -> jax.Array:
        entry, seen = filled.block(block * width, width)
        weights = jnp.exp(_scores(grouped, entry, seen) - found.top[..., None]) / found.mass[..., None]
        first = jnp.minimum(block * width, filled.slots - width)
        before = jax.lax.dynamic_slice_in_dim(paid, first, width, axis=2)
        return jax.lax.dynamic_update_slice_in_dim(paid, before + weights.sum(axis=(2, 3)), first, axis=2)

    nothing = jnp.zeros((*grouped[0].shape[:2], filled.slots))
    return jax.lax.fori_loop(0, -(-jnp.max(filled.count) // width), add, nothing)


def _group(q: tuple[jax.Array, ...], pieces: Sequence[Piece], scale: float | None) -> tuple[jax.Array, ...]:
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


def _attend_all(q: tuple[jax.Array, ...], pieces: Sequence[Piece], values_part: int, block: int) -> Attended:
    """Grouped queries over all pieces; a cache in blocks of its `block_width`."""
    found = [
        _attend_in_blocks(q, piece, values_part, block_width(piece.slots, block))
        if isinstance(piece, Filled)
        else _attend_piece(q, *piece, values_part)
        for piece in pieces
    ]
    return functools.reduce(Attended.merge, found)


def _attend_piece(q: tuple[jax.Array, ...], entry: Entry, visible: jax.Array | None, values_part: int) -> Attended:
    """Grouped queries over a piece as a whole."""
    values = entry[values_part]
    if visible is None:  # each query over its own slot
        score = functools.reduce(
            jnp.add,
            [
                jnp.einsum("bktd,bktgd->bktg", keys, part, preferred_element_type=jnp.float32)
                for keys, part in zip(entry, q, strict=False)
            ],
        )
        own = jnp.broadcast_to(values[:, :, :, None].astype(jnp.float32), (*score.shape, values.shape[-1]))
        return Attended(top=score, mass=jnp.ones_like(score), values=own)
    scores = _scores(q, entry, visible)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1), LEAST))
    weights = jnp.exp(scores - top[..., None])
    found = jnp.einsum("bktgs,bksd->bktgd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return Attended(top=top, mass=jnp.sum(weights, axis=-1), values=found)


def _scores(q: tuple[jax.Array, ...], entry: Entry, visible: jax.Array) -> jax.Array:
    """``[B, kv_heads, T, G, S]`` float32 of grouped queries and all keys of a piece."""
    # Keys first: with the queries first XLA's CPU backend would transpose all keys instead of the scores.
    products = [
        jnp.einsum("bksd,bktgd->bkstg", keys, part, preferred_element_type=jnp.float32)
        for keys, part in zip(entry, q, strict=False)
    ]
    scores = functools.reduce(jnp.add, products).transpose(0, 1, 3, 4, 2)
    return jnp.where(visible[:, None, :, None], scores, 2 * LEAST)


def _attend_by_kernel(
    q: tuple[jax.Array, ...],
    pieces: Sequence[Piece],
    values_part: int,
    kernel: Callable[..., jax.Array],
    interpret: bool = False,
) -> jax.Array:
    """`_attend_plainly` by a device's own kernel, of pieces one of which is a cache. On a mesh each device has its own rows and
    heads, and nothing is exchanged: the heads of keys where the mesh can split these, otherwise the query heads that share
    them."""
    batch, kv_heads, count, group, _ = q[0].shape
    (filled,) = (piece for piece in pieces if isinstance(piece, Filled))
    since = jnp.zeros((1, 1), jnp.int32) if filled.since is None else filled.since
    since = jnp.broadcast_to(since, (batch, count))
    beside = [piece for piece in pieces if not isinstance(piece, Filled)]
    others = tuple(entry for entry, _ in beside)
    visible = tuple(_visible(mask, batch, count) for _, mask in beside)

    def run(
        q: tuple[jax.Array, ...],
        entry: Entry,
        count: jax.Array,
        since: jax.Array,
        others: tuple[Entry, ...],
        visible: tuple[jax.Array, ...],
    ) -> jax.Array:
        shape = q[0].shape
        rows = tuple(part.reshape(*shape[:2], -1, part.shape[-1]) for part in q)
        by_query = functools.partial(jnp.repeat, repeats=shape[3], axis=1)
        beside = [(other, by_query(mask)) for other, mask in zip(others, visible, strict=True)]
        found = kernel(rows, entry, count, by_query(since), beside, values_part=values_part, interpret=interpret)
        return found.reshape(*shape[:-1], -1)

    if filled.mesh is not None:
        units = {"batch": batch, "kv_heads": kv_heads}
        if kv_heads % filled.mesh.shape["model"]:
            units = {"batch": batch, "heads": group}
        place = functools.partial(sharding.partition, filled.mesh, units=units)
        by_head, by_kv_head, by_row = (
            place(("batch", "kv_heads", None, "heads")),
            place(("batch", "kv_heads")),
            place(("batch",)),
        )
        run = jax.shard_map(
            run,
            mesh=filled.mesh,
            in_specs=(by_head, by_kv_head, by_row, by_row, by_kv_head, by_row),
            out_specs=by_head,
            check_vma=False,
        )
    return run(q, filled.entry, filled.count, since, others, visible)


def _visible(mask: jax.Array | None, batch: int, count: int) -> jax.Array:
    """``[B, T, n]`` int8, which tokens of a piece each of T queries sees: a piece's mask as a kernel reads it."""
    mask = jnp.eye(count, dtype=bool)[None] if mask is None else mask
    return jnp.broadcast_to(mask, (batch, count, mask.shape[-1])).astype(jnp.int8)


def _attend_in_blocks(q: tuple[jax.Array, ...], filled: Filled, values_part: int, width: int) -> Attended:
    """Grouped queries over a cache, block by block: from the first that any query sees to the last that any row has filled."""

    def over(start: jax.Array | int) -> Attended:
        entry, seen = filled.block(start, width)
        return _attend_piece(q, entry, seen, values_part)

    if width == filled.slots:
        return over(0)
    shape = q[0].shape[:-1]
    nothing = Attended(
        top=jnp.full(shape, LEAST),
        mass=jnp.zeros(shape),
        values=jnp.zeros((*shape, filled.entry[values_part].shape[-1])),
    )
    first = 0
    if filled.since is not None:  # rows that hold nothing do not count
        since = jnp.where(filled.count[:, None] > 0, filled.since, filled.slots)
        first = jnp.maximum(jnp.min(since), 0) // width
    blocks = -(-jnp.max(filled.count) // width)
    with jax.named_scope(LOOP):
        return jax.lax.fori_loop(first, blocks, lambda block, found: found.merge(over(block * width)), nothing)
