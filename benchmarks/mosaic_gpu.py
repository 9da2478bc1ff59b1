"""A sketch of our attention kernel in Mosaic GPU, compiled for an H100 without the device.

python -m benchmarks.mosaic_gpu     # JAX 0.12, with the extra compile-cuda

It shows whether the language can express what the kernel needs. Nothing runs, and no result has
been checked: Mosaic GPU makes machine code when a kernel is loaded, and its interpreter does not
support ``wgmma``. Each program attends to the pages of one row and head, and then to the tokens of
a draft by their mask. The cache is not split, no block is prefetched, and queries, pages and drafts
are whole tiles of 64. See docs/concepts/gpu-kernels.md.
"""

import os
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

# Set before jax is imported: only the compiler for GPUs is used, and no GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from specjax.lowering.topologies import compiler_options, find_mesh
from specjax.models.primitives import LEAST, capped

TILE = 64
"""Queries of a program, tokens of a draft and slots of a page.

It is the minimum number of queries in ``wgmma``.
"""

WIDEST = 256
"""The maximum numbers of a value that one product makes."""

TILED: Any = plgpu.Layout.WGMMA


@dataclass(frozen=True)
class Case:
    """A case for the kernel.

    Attributes:
        name: name of the case.
        dim: numbers of a head.
        int8: whether the cache has 8 bits, with a scale for each slot.
        sinks: whether each head has a sink.
        cap: cap of the scores.
    """

    name: str
    dim: int = 128
    int8: bool = False
    sinks: bool = False
    cap: float | None = None


CASES = (
    Case("pages, lengths and the mask of a tree"),
    Case("the same, sinks and heads of 64", dim=64, sinks=True),
    Case("the same, a soft cap and heads of 256", dim=256, cap=50.0),
    Case("the same, heads of 80", dim=80),
    Case("the same, heads of 512", dim=512),
    Case("the same, a cache in 8 bits", int8=True),
)


# A kernel is easiest to read whole.
def attend(case: Case, shape: tuple[int, ...], *arguments: jax.Array) -> jax.Array:  # noqa: PLR0915
    """Compute the attention of one tile of queries for each row and head.

    ``shape`` is ``[B, heads, TILE, dim]``. The further arguments are those of `arguments`.
    """
    parts = -(-case.dim // WIDEST)
    width = case.dim // parts

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, k_scales_ref, v_scales_ref, table_ref, count_ref, sinks_ref, *refs = (
            refs  # pyright: ignore
        )
        own_k_ref, own_v_ref, mask_ref, out_ref, q, stored_k, stored_v, barriers, *wide = refs
        k, v = wide or (stored_k, stored_v)
        row, head = lax.axis_index("row"), lax.axis_index("head")

        def fetch(*copies: tuple[Any, Any]) -> None:
            for i, (source, target) in enumerate(copies):
                plgpu.copy_gmem_to_smem(source, target, barriers.at[i])
            for i in range(len(copies)):
                plgpu.barrier_wait(barriers.at[i])

        def add(
            sums: tuple[Any, ...], visible: jax.Array, scales: tuple[Any, Any] | None
        ) -> tuple[Any, ...]:
            """Add a block of keys and values in shared memory."""
            top, mass, totals = sums
            by_slot = partial(lax.broadcast_in_dim, shape=visible.shape, broadcast_dimensions=[1])
            by_query = partial(lax.broadcast_in_dim, broadcast_dimensions=[0])

            def multiply(scores: Any) -> jax.Array:
                plgpu.wgmma(scores, q, k.transpose((1, 0)))
                return scores[...]

            scores = pl.run_scoped(multiply, plgpu.ACC(visible.shape, jnp.float32))
            scores = capped(scores if scales is None else scores * by_slot(scales[0]), case.cap)
            scores = jnp.where(visible, scores, 2 * LEAST)
            largest = jnp.maximum(top, scores.max(axis=1))
            shrunk, weights = (
                jnp.exp(top - largest),
                jnp.exp(scores - by_query(largest, shape=scores.shape)),
            )
            mass = mass * shrunk + weights.sum(axis=1)
            weights = (weights if scales is None else weights * by_slot(scales[1])).astype(q.dtype)

            def of_part(i: int, total: jax.Array) -> jax.Array:
                values = v.at[:, i * width : (i + 1) * width] if parts > 1 else v
                start = plgpu.ACC.init(total * by_query(shrunk, shape=total.shape))
                return pl.run_state(lambda total: plgpu.wgmma(total, weights, values))(start)

            return largest, mass, tuple(of_part(i, total) for i, total in enumerate(totals))

        def of_page(number: jax.Array, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            page = table_ref[row, number]
            fetch((k_ref.at[page, head], stored_k), (v_ref.at[page, head], stored_v))
            scales = None
            if case.int8:
                for narrow, target in zip((stored_k, stored_v), wide, strict=True):
                    numbers = plgpu.load(
                        narrow, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False
                    )
                    target[...] = plgpu.layout_cast(numbers.astype(q.dtype), TILED)
                plgpu.commit_smem()
                by_slot = partial(plgpu.load, layout=TILED.reduce(0), optimized=False)
                scales = by_slot(k_scales_ref.at[page, head]), by_slot(v_scales_ref.at[page, head])
            slot = number * TILE + plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=TILED)
            return add(sums, slot < count_ref[row], scales)

        fetch((q_ref.at[row, head], q))
        top = jnp.full(TILE, sinks_ref[head] if case.sinks else LEAST, jnp.float32)
        mass = jnp.full(TILE, float(case.sinks), jnp.float32)
        totals = tuple(
            plgpu.layout_cast(jnp.zeros((TILE, width), jnp.float32), TILED) for _ in range(parts)
        )
        sums = (
            plgpu.layout_cast(top, TILED.reduce(1)),
            plgpu.layout_cast(mass, TILED.reduce(1)),
            totals,
        )
        sums = lax.fori_loop(0, (count_ref[row] + TILE - 1) // TILE, of_page, sums)
        fetch((own_k_ref.at[row, head], k), (own_v_ref.at[row, head], v))
        mask = plgpu.load(mask_ref.at[row], layout=TILED, optimized=False)
        _, mass, totals = add(sums, mask.astype(jnp.int32) > 0, None)
        for i, total in enumerate(totals):
            out = (total / lax.broadcast_in_dim(mass, total.shape, [0])).astype(q.dtype)
            q[:, i * width : (i + 1) * width] = out  # the queries are not needed any more
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, out_ref.at[row, head])
        plgpu.wait_smem_to_gmem(0)

    buffer = partial(_buffer, case.dim)
    stored = buffer(jnp.int8 if case.int8 else jnp.bfloat16)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        grid=shape[:2],
        grid_names=("row", "head"),
        scratch_types=[
            buffer(jnp.bfloat16),
            stored,
            stored,
            plgpu.Barrier(num_barriers=2),
            *([buffer(jnp.bfloat16)] * 2 * case.int8),
        ],
    )(*arguments)


def _buffer(dim: int, dtype: Any) -> Any:
    """Return a tile in shared memory, in the layout of ``wgmma``."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = next(size for size in (128, 64, 32) if dim * bits % (8 * size) == 0)
    transforms = plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM((TILE, dim), dtype, transforms=transforms)


def arguments(
    case: Case, mesh: Mesh, batch: int = 8, heads: int = 8, pages: int = 256
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of the kernel's arguments.

    They are queries, pools of keys and values with their scales, the page table, lengths, sinks,
    and the keys, values and mask of a draft.
    """

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    pool = shape(pages, heads, TILE, case.dim, dtype=jnp.int8 if case.int8 else jnp.bfloat16)
    scales = shape(pages, heads, TILE, dtype=jnp.float32)
    tile = shape(batch, heads, TILE, case.dim)
    table, count = shape(batch, pages // batch, dtype=jnp.int32), shape(batch, dtype=jnp.int32)
    mask = shape(batch, TILE, TILE, dtype=jnp.int8)
    return (
        tile,
        pool,
        pool,
        scales,
        scales,
        table,
        count,
        shape(heads, dtype=jnp.float32),
        tile,
        tile,
        mask,
    )


def lower(case: Case, mesh: Mesh) -> str:
    """Lower and compile a case, and return the result."""
    arguments_of_case = arguments(case, mesh)
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            traced = jax.jit(partial(attend, case, arguments_of_case[0].shape)).trace(
                *arguments_of_case
            )
            lowered = traced.lower(lowering_platforms=("cuda",))
        compiled = lowered.compile(compiler_options=dict(compiler_options(mesh)))
    except Exception as error:  # whatever JAX raises is the outcome
        return f"{type(error).__name__}: {(str(error) or repr(error)).splitlines()[0][:200]}"
    calls = re.findall(r'custom_call_target="(\w+)"', compiled.as_text() or "")
    return f"lowers, and compiles to {len(calls)} call of {', '.join(set(calls))}"


def main() -> None:
    """Lower all cases and print the results."""
    mesh, _ = find_mesh("h100", 1, 1)
    table = Table("case", "outcome")
    for case in CASES:
        table.add_row(case.name, lower(case, mesh))
    Console(width=160).print(f"for an H100 by JAX {jax.__version__}", table)


if __name__ == "__main__":
    main()
