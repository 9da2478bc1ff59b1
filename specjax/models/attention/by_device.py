"""Attention: queries meet what a layer remembers. Nothing else in the package multiplies queries and keys.

What is attended to comes in `pieces`, and is found in them as if they were one. Where a cache is attended to, TPUs and GPUs
have a kernel each (`tpu`, `gpu`); the JAX of `plain` is what they are tested against, and runs everywhere else, on GPUs too
where `kernels` finds that theirs cannot. All three keep the same running sums of a softmax, by the same names: ``top``, the
largest score so far; ``mass``, the sum of exp(score - top); ``total``, the sum of exp(score - top) value.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax import sharding
from specjax.models.attention import gpu, tpu
from specjax.models.attention.kernels import takes_triton
from specjax.models.attention.pieces import BLOCK, Filled, Piece
from specjax.models.attention.plain import attend_plainly, group_queries, group_sinks
from specjax.models.cache import Entry


def attend(
    q: Float[Array, "B T heads d"] | tuple[jax.Array, ...],
    pieces: Sequence[Piece],
    *,
    scale: float | None = None,
    values_part: int = 1,
    sinks: Float[Array, " heads"] | None = None,
    cap: float | None = None,
) -> Float[Array, "B T heads_d"]:
    """Grouped-query attention over several pieces as if they were one. Scores and softmax in float32.

    A query that sees nothing at all finds zeros. Gradients go through everything, sinks too, where no piece is a cache.

    Args:
        q: the queries, which meet the first part of an entry. A tuple ``[B, T, heads, d_i]`` meets the first parts one by one,
            and the products are added: latent attention meets the latents and the rotated keys.
        pieces: what is committed, what a draft holds in scratch, and what the call itself adds.
        scale: of the scores; by default ``d ** -0.5``.
        values_part: which part of an entry is attended to: the second, or, in latent attention, the latents again.
        sinks: a score of each query head, neither scaled nor capped, which takes its share of the softmax once and has no value
            (gpt-oss; Xiao et al. 2024, arXiv 2309.17453, gave that part to the first tokens).
        cap: scores, scaled, become cap tanh(score / cap) (Gemma 2, arXiv 2408.00118).

    Examples:
        Two tokens with values of 3, and a sink that is scored as they are: each has a third, the sink's of nothing.

        >>> from specjax.models.attention import attend
        >>> entry = jnp.zeros((1, 1, 2, 4)), jnp.full((1, 1, 2, 4), 3.0)
        >>> queries, seen = jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 2), bool)
        >>> attend(queries, [(entry, seen)], sinks=jnp.zeros(1)).tolist()
        [[[2.0, 2.0, 2.0, 2.0]]]
    """
    given = q if isinstance(q, tuple) else (q,)
    batch, count = given[0].shape[:2]
    grouped = group_queries(given, pieces, scale)
    of_heads = group_sinks(sinks, grouped)
    by_triton = all(takes_triton(piece.mesh) for piece in pieces if isinstance(piece, Filled))
    found = _attend_grouped(
        grouped, tuple(pieces), of_heads, values_part=values_part, block=BLOCK, cap=cap, by_triton=by_triton
    )
    return found.transpose(0, 2, 1, 3, 4).reshape(batch, count, -1)


@functools.partial(jax.jit, static_argnames=("values_part", "block", "cap", "by_triton"), inline=True)
def _attend_grouped(
    q: tuple[jax.Array, ...],
    pieces: tuple[Piece, ...],
    sinks: jax.Array | None,
    *,
    values_part: int,
    block: int,
    cap: float | None,
    by_triton: bool,
) -> jax.Array:
    """``[B, kv_heads, T, G, dim]`` what grouped queries find in all pieces, as suits the device. Traced once for all layers
    alike."""
    plainly = functools.partial(attend_plainly, values_part=values_part, block=block, cap=cap)
    by_kernel = functools.partial(_attend_by_kernel, values_part=values_part, cap=cap)
    has_cache = any(isinstance(piece, Filled) for piece in pieces)
    return jax.lax.platform_dependent(
        q,
        pieces,
        sinks,
        tpu=functools.partial(by_kernel, kernel=tpu.attend_in_kernel) if has_cache else plainly,
        cuda=functools.partial(by_kernel, kernel=gpu.attend_in_kernel) if has_cache and by_triton else plainly,
        default=plainly,
    )


def _attend_by_kernel(
    q: tuple[jax.Array, ...],
    pieces: Sequence[Piece],
    sinks: jax.Array | None = None,
    *,
    values_part: int,
    kernel: Callable[..., jax.Array],
    cap: float | None = None,
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
        sinks: jax.Array | None,
    ) -> jax.Array:
        shape = q[0].shape
        rows = tuple(part.reshape(*shape[:2], -1, part.shape[-1]) for part in q)
        by_query = functools.partial(jnp.repeat, repeats=shape[3], axis=1)
        beside = [(other, by_query(mask)) for other, mask in zip(others, visible, strict=True)]
        found = kernel(
            rows, entry, count, by_query(since), beside, table, sinks, values_part=values_part, cap=cap, interpret=interpret
        )
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
            in_specs=(by_head, by_kv_head, by_row, by_row, by_row, by_kv_head, by_row, place(("kv_heads", "heads"))),
            out_specs=by_head,
            check_vma=False,
        )
    return run(q, filled.entry, filled.count, since, filled.table, others, visible, sinks)


def _visible(mask: jax.Array | None, batch: int, count: int) -> jax.Array:
    """``[B, T, n]`` int8, which tokens of a piece each of T queries sees: a piece's mask as a kernel reads it."""
    mask = jnp.eye(count, dtype=bool)[None] if mask is None else mask
    return jnp.broadcast_to(mask, (batch, count, mask.shape[-1])).astype(jnp.int8)
