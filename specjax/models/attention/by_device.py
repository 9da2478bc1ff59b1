"""Attention: queries meet what a layer remembers. Nothing else in the package multiplies queries and keys.

What is attended to comes in `pieces`, and is found in them as if they were one. Where a cache is attended to, TPUs and GPUs
have a kernel each (`tpu`, `gpu`); the JAX of `plain` runs everywhere else, and is what they are tested against. All three keep
the same running sums of a softmax, by the same names: ``top``, the largest score so far; ``mass``, the sum of
exp(score - top); ``total``, the sum of exp(score - top) value.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax import sharding
from specjax.models.attention import gpu, tpu
from specjax.models.attention.pieces import BLOCK, Filled, Piece
from specjax.models.attention.plain import attend_plainly, group_queries
from specjax.models.cache import Entry


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
    found = _attend_grouped(group_queries(given, pieces, scale), tuple(pieces), values_part=values_part, block=BLOCK)
    return found.transpose(0, 2, 1, 3, 4).reshape(batch, count, -1)


@functools.partial(jax.jit, static_argnames=("values_part", "block"), inline=True)  # traced once for all layers alike
def _attend_grouped(q: tuple[jax.Array, ...], pieces: tuple[Piece, ...], *, values_part: int, block: int) -> jax.Array:
    """``[B, kv_heads, T, G, dim]`` what grouped queries find in all pieces, as suits the device."""
    plainly = functools.partial(attend_plainly, values_part=values_part, block=block)
    by_kernel = functools.partial(_attend_by_kernel, values_part=values_part)
    has_cache = any(isinstance(piece, Filled) for piece in pieces)
    return jax.lax.platform_dependent(
        q,
        pieces,
        tpu=functools.partial(by_kernel, kernel=tpu.attend_in_kernel) if has_cache else plainly,
        cuda=functools.partial(by_kernel, kernel=gpu.attend_in_kernel) if has_cache else plainly,
        default=plainly,
    )


def _attend_by_kernel(
    q: tuple[jax.Array, ...],
    pieces: Sequence[Piece],
    values_part: int,
    kernel: Callable[..., jax.Array],
    interpret: bool = False,
) -> jax.Array:
    """`attend_plainly` by a device's own kernel, of pieces one of which is a cache. On a mesh each device has its own rows and
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
        table: jax.Array | None,
        others: tuple[Entry, ...],
        visible: tuple[jax.Array, ...],
    ) -> jax.Array:
        shape = q[0].shape
        rows = tuple(part.reshape(*shape[:2], -1, part.shape[-1]) for part in q)
        by_query = functools.partial(jnp.repeat, repeats=shape[3], axis=1)
        beside = [(other, by_query(mask)) for other, mask in zip(others, visible, strict=True)]
        found = kernel(rows, entry, count, by_query(since), beside, table, values_part=values_part, interpret=interpret)
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
        # Pages lie where the rows do that they belong to, and each group of rows counts its own from 0.
        run = jax.shard_map(
            run,
            mesh=filled.mesh,
            in_specs=(by_head, by_kv_head, by_row, by_row, by_row, by_kv_head, by_row),
            out_specs=by_head,
            check_vma=False,
        )
    return run(q, filled.entry, filled.count, since, filled.table, others, visible)


def _visible(mask: jax.Array | None, batch: int, count: int) -> jax.Array:
    """``[B, T, n]`` int8, which tokens of a piece each of T queries sees: a piece's mask as a kernel reads it."""
    mask = jnp.eye(count, dtype=bool)[None] if mask is None else mask
    return jnp.broadcast_to(mask, (batch, count, mask.shape[-1])).astype(jnp.int8)
