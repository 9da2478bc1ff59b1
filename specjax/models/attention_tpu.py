"""Attention over the slots of a cache as one TPU kernel (flash attention; Dao et al. 2022, arXiv 2205.14135, in Pallas).

Scores live in the chip's fast memory alone: of the big arrays, queries, keys and values are read once and what is found is
written once. Blocks that hold nothing a row may see are neither fetched nor multiplied, row by row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK = 512
"""Slots that are fetched at a time."""

ROWS = 512
"""Queries that are worked on at a time: more would not fit the fast memory beside their keys."""

LEAST = float(jnp.finfo(jnp.float32).min) / 2
"""The largest score of who has seen nothing yet: below every score, and above what hides one."""


def attend_to_slots(
    q: tuple[jax.Array, ...],
    entry: tuple[jax.Array, ...],
    count: jax.Array,
    since: jax.Array,
    *,
    values_part: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What each query finds in the slots of a cache.

    Args:
        q: ``[B, kv_heads, R, d_i]`` queries for each part of an entry that is a key, scaled; the products are added.
        entry: ``[B, kv_heads, S, d_i]`` each part.
        count: ``[B]`` how many slots of each row are filled.
        since: ``[B, R]`` the first slot that each query sees.
        values_part: which part is attended to.
        interpret: run it as ordinary JAX, on any backend: for tests.

    Returns:
        ``top [B, kv_heads, R]`` the largest scores, ``mass`` likewise the sums of exp(score - top), and ``values [B, kv_heads,
        R, d]`` the sums of exp(score - top) value; float32.
    """
    batch, kv_heads, rows, _ = q[0].shape
    slots, dim = entry[0].shape[2], entry[values_part].shape[3]
    width, tile = min(BLOCK, slots), min(ROWS, rows)
    keys = entry[: len(q)]
    # In latent attention the values are the keys' first part: it is fetched once.
    values = () if values_part < len(q) else (entry[values_part],)

    first = jnp.maximum(jnp.min(since, axis=1), 0) // width
    last = jnp.maximum(-(-count // width) - 1, 0)

    def of_row(b: Any, h: Any, r: Any, i: Any, *_: Any) -> tuple[Any, ...]:
        return b, h, r, 0

    def of_block(b: Any, h: Any, r: Any, i: Any, count: Any, first: Any, last: Any) -> tuple[Any, ...]:
        # Asked for the block that is there already, the chip fetches nothing.
        return b, h, jnp.clip(i, first[b], last[b]), 0

    in_specs = [pl.BlockSpec((1, tile, 1), lambda b, h, r, i, *_: (b, r, 0))]
    in_specs += [pl.BlockSpec((1, 1, tile, part.shape[3]), of_row) for part in q]
    in_specs += [pl.BlockSpec((1, 1, width, part.shape[3]), of_block) for part in (*keys, *values)]
    out_specs = [pl.BlockSpec((1, 1, tile, size), of_row) for size in (1, 1, dim)]
    out_shape = [jax.ShapeDtypeStruct((batch, kv_heads, rows, size), jnp.float32) for size in (1, 1, dim)]
    top, mass, found = pl.pallas_call(
        functools.partial(_kernel, parts=len(q), width=width, values_part=values_part),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, kv_heads, -(-rows // tile), -(-slots // width)),
            in_specs=in_specs,
            out_specs=out_specs,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(count, first, last, since[..., None], *q, *keys, *values)
    return top[..., 0], mass[..., 0], found


def _kernel(
    count_ref: Any, first_ref: Any, last_ref: Any, since_ref: Any, *refs: Any, parts: int, width: int, values_part: int
):
    """One block of one row's head: what is found so far is kept in the output."""
    *read, top_ref, mass_ref, found_ref = refs
    q_refs, entry_refs = read[:parts], read[parts:]
    row, block = pl.program_id(0), pl.program_id(3)
    count = count_ref[row]

    @pl.when(block == 0)
    def _() -> None:
        top_ref[...] = jnp.full_like(top_ref, LEAST)
        mass_ref[...] = jnp.zeros_like(mass_ref)
        found_ref[...] = jnp.zeros_like(found_ref)

    @pl.when((block >= first_ref[row]) & (block <= last_ref[row]) & (count > 0))
    def _() -> None:
        products = [
            jax.lax.dot_general(q[0, 0], keys[0, 0], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            for q, keys in zip(q_refs, entry_refs, strict=False)
        ]
        scores = functools.reduce(jnp.add, products)
        slot = block * width + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where((slot < count) & (slot >= since_ref[0]), scores, 2 * LEAST)
        before = top_ref[0, 0]
        top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights, shrunk = jnp.exp(scores - top), jnp.exp(before - top)
        values = entry_refs[values_part][0, 0]
        # Beyond the last slot a block holds whatever was there, NaN perhaps.
        is_slot = block * width + jax.lax.broadcasted_iota(jnp.int32, values.shape, 0) < count
        values = jnp.where(is_slot, values, jnp.zeros_like(values))
        found = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        top_ref[0, 0] = top
        mass_ref[0, 0] = mass_ref[0, 0] * shrunk + jnp.sum(weights, axis=1, keepdims=True)
        found_ref[0, 0] = found_ref[0, 0] * shrunk + found
