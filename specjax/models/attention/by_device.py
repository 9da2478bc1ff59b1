"""Attention over the cache, a draft's scratch and the new tokens, as suits the device.

Nothing else in the package multiplies queries and keys. Keys and values come in `pieces`, and
attention treats them as if they were concatenated. TPUs and GPUs have a kernel each for attention
to a cache (`tpu`, `gpu`). The plain JAX of `plain` is the reference for their tests. It runs on all
other devices, and on GPUs where `kernels` finds that the kernel cannot run. All three keep the same
running sums of an online softmax under the same names: ``top`` is the largest score so far;
``mass`` is the sum of exp(score - top); ``total`` is the sum of exp(score - top) value.
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
from specjax.models.cache import Entries, Entry


def attend(
    q: Float[Array, "B T heads d"] | tuple[jax.Array, ...],
    pieces: Sequence[Piece],
    *,
    scale: float | None = None,
    values_part: int = 1,
    sinks: Float[Array, " heads"] | None = None,
    cap: float | None = None,
) -> Float[Array, "B T heads_d"]:
    """Compute grouped-query attention over several pieces as if they were one.

    Scores and softmax are in float32. A query that sees no key returns zeros. Gradients flow
    through all arguments, sinks included, if no piece is a cache.

    Args:
        q: the queries. They are multiplied with the first part of an entry, the keys. A tuple
            ``[B, T, heads, d_i]`` is multiplied with the first parts one by one, and the products
            are summed: in latent attention with the latents and with the rotated keys.
        pieces: the committed tokens in a cache, the drafted tokens in scratch, and the tokens of
            the call itself.
        scale: the factor of the scores; ``d ** -0.5`` by default.
        values_part: the index of the part of an entry that holds the values: 1, or 0 in latent
            attention, where the latents serve as values too.
        sinks: one score for each query head, neither scaled nor capped. It takes part in the
            softmax once and has no value (gpt-oss; Xiao et al. 2024, arXiv 2309.17453, used the
            first tokens for this).
        cap: the soft cap: scaled scores become cap tanh(score / cap) (Gemma 2, arXiv 2408.00118).

    Examples:
        Two tokens with values of 3, and a sink with the same score. Each has a weight of a third,
        and the sink adds no value:

        >>> from specjax.models.attention import attend
        >>> entry = jnp.zeros((1, 1, 2, 4)), jnp.full((1, 1, 2, 4), 3.0)
        >>> queries, mask = jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 2), bool)
        >>> attend(queries, [(entry, mask)], sinks=jnp.zeros(1)).tolist()
        [[[2.0, 2.0, 2.0, 2.0]]]
    """
    queries = q if isinstance(q, tuple) else (q,)
    batch, count = queries[0].shape[:2]
    grouped = group_queries(queries, pieces, scale)
    grouped_sinks = group_sinks(sinks, grouped)
    by_triton = all(takes_triton(piece.mesh) for piece in pieces if isinstance(piece, Filled))
    output = _attend_grouped(
        grouped,
        tuple(pieces),
        grouped_sinks,
        values_part=values_part,
        block=BLOCK,
        cap=cap,
        by_triton=by_triton,
    )
    return output.transpose(0, 2, 1, 3, 4).reshape(batch, count, -1)


@functools.partial(
    jax.jit, static_argnames=("values_part", "block", "cap", "by_triton"), inline=True
)
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
    """Compute the output of grouped queries, ``[B, kv_heads, T, G, dim]``, as suits the device.

    It is jitted so that layers of the same shapes are traced once.
    """
    plainly = functools.partial(attend_plainly, values_part=values_part, block=block, cap=cap)
    by_kernel = functools.partial(_attend_by_kernel, values_part=values_part, cap=cap)
    # The kernels do not read which slots a query has selected (sparse attention).
    caches = [piece for piece in pieces if isinstance(piece, Filled)]
    has_cache = bool(caches) and all(cache.selected is None for cache in caches)
    return jax.lax.platform_dependent(
        q,
        pieces,
        sinks,
        tpu=functools.partial(by_kernel, kernel=tpu.attend_in_kernel) if has_cache else plainly,
        cuda=functools.partial(by_kernel, kernel=gpu.attend_in_kernel)
        if has_cache and by_triton
        else plainly,
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
    """Run `attend_plainly` with a device's own kernel; exactly one piece must be a cache.

    On a mesh each device has its own rows and heads, and exchanges nothing. The mesh splits the KV
    heads if it can, or else the query heads that share them.
    """
    batch, kv_heads, count, group, _ = q[0].shape
    (filled,) = (piece for piece in pieces if isinstance(piece, Filled))
    since = jnp.zeros((1, 1), jnp.int32) if filled.since is None else filled.since
    since = jnp.broadcast_to(since, (batch, count))
    # The other pieces are few tokens, drafted ones and those of the call; the kernel reads them
    # whole.
    beside = [piece for piece in pieces if isinstance(piece, tuple)]
    extra_entries = tuple(entry for entry, _ in beside)
    masks = tuple(_visible(mask, batch, count) for _, mask in beside)

    def run(
        q: tuple[jax.Array, ...],
        entry: Entry,
        count: jax.Array,
        since: jax.Array,
        table: jax.Array | None,
        extra_entries: Entries,
        masks: tuple[jax.Array, ...],
        sinks: jax.Array | None,
    ) -> jax.Array:
        shape = q[0].shape
        rows = tuple(part.reshape(*shape[:2], -1, part.shape[-1]) for part in q)
        by_query = functools.partial(jnp.repeat, repeats=shape[3], axis=1)
        beside = [
            (entry_beside, by_query(mask))
            for entry_beside, mask in zip(extra_entries, masks, strict=True)
        ]
        output = kernel(
            rows,
            entry,
            count,
            by_query(since),
            beside,
            table,
            sinks,
            values_part=values_part,
            cap=cap,
            interpret=interpret,
        )
        return output.reshape(*shape[:-1], -1)

    if filled.mesh is not None:
        units = {"batch": batch, "kv_heads": kv_heads}
        if kv_heads % filled.mesh.shape["model"]:
            units = {"batch": batch, "heads": group}
        place = functools.partial(sharding.partition, filled.mesh, units=units)
        by_head = place(("batch", "kv_heads", None, "heads"))
        by_kv_head = place(("batch", "kv_heads"))
        by_row = place(("batch",))
        # Pages are on the device of their rows, and each group of rows counts its own pages from 0.
        run = jax.shard_map(
            run,
            mesh=filled.mesh,
            in_specs=(
                by_head,
                by_kv_head,
                by_row,
                by_row,
                by_row,
                by_kv_head,
                by_row,
                place(("kv_heads", "heads")),
            ),
            out_specs=by_head,
            check_vma=False,  # Pallas kernels do not say along which axes their output varies
        )
    return run(q, filled.entry, filled.count, since, filled.table, extra_entries, masks, sinks)


def _visible(mask: jax.Array | None, batch: int, count: int) -> jax.Array:
    """Return ``[B, T, n]`` int8, which tokens of a piece each query sees, as a kernel reads it."""
    # No mask means one token for each query: its own.
    mask = jnp.eye(count, dtype=bool)[None] if mask is None else mask
    return jnp.broadcast_to(mask, (batch, count, mask.shape[-1])).astype(jnp.int8)
