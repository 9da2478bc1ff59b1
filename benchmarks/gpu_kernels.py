"""Attention kernels compiled for an H100 without the device: our own, and tokamax's.

python -m benchmarks.gpu_kernels    # tokamax is compared where it is installed: see
docs/concepts/gpu-kernels.md

Nothing runs. For each case, such as one token against a long cache, every kernel is lowered and
compiled, or the table says why it cannot be. The table has the bytes that the program moves and
those that it must read, its temporary memory, and the number of kernels that it starts. A kernel
that is written by hand counts as reading each of its arguments once.
"""

import argparse  # tyro does not run beside the typeguard that tokamax asks for
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

# Set before jax is imported: only the compiler for GPUs is used, and no GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.extend
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from specjax.lowering.compiled import compile_program
from specjax.lowering.topologies import find_mesh
from specjax.models.attention import BLOCK, LOOP, Filled, attend, by_device
from specjax.models.quantized_cache import QuantizedPart


@dataclass(frozen=True)
class Case:
    """The attention of one layer.

    Attributes:
        name: name of the case.
        queries: tokens of the call, which see the cache and, by a mask, each other.
        dim: numbers of a head.
        page: slots of a page; None: the slots of a row are contiguous.
        int8: whether the cache has 8 bits.
        sinks: whether each head has a sink.
        cap: cap of the scores.
        is_training: whether there is no cache, and gradients are computed.
        batch: number of rows.
        slots: slots of a row's cache.
        heads: query heads.
        kv_heads: key/value heads.
    """

    name: str
    queries: int = 5
    dim: int = 128
    page: int | None = None
    int8: bool = False
    sinks: bool = False
    cap: float | None = None
    is_training: bool = False
    batch: int = 8
    slots: int = 8192
    heads: int = 32
    kv_heads: int = 8


CASES = (
    Case("one token", queries=1),
    Case("chain of 4"),
    Case("tree of 60", queries=60),
    Case("prompt, 512 tokens", queries=512),
    Case("pages of 256", page=256),
    Case("cache in 8 bits", int8=True),
    Case("sinks", sinks=True, dim=64),
    Case("soft cap", cap=50.0, dim=256, heads=16),
    Case("heads of 80", dim=80),
    Case("heads of 512", dim=512, heads=8, kv_heads=1),
    Case("training, gradients", queries=2048, is_training=True, batch=1),
)


class MissingError(Exception):
    """A kernel that has no argument for something that the case needs."""


Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and the shapes of its arguments."""


class Shapes:
    """A factory of array shapes on a mesh of one device."""

    def __init__(self, mesh: Mesh) -> None:
        self.sharding = NamedSharding(mesh, PartitionSpec())

    def __call__(self, *shape: int, dtype: Any = jnp.bfloat16) -> Any:
        """Return the shape of an array."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    def entry(self, case: Case, *shape: int, int8: bool = False) -> tuple[Any, Any]:
        """Return keys and values ``[*shape, dim]``; in 8 bits, each with its scales."""
        if int8:
            part = QuantizedPart(
                self(*shape, case.dim, dtype=jnp.int8), self(*shape, dtype=jnp.float32)
            )
            return part, part
        return self(*shape, case.dim), self(*shape, case.dim)


# --- kernels --------------------------------------------------------------------------------------


def ours(case: Case, shapes: Shapes, by_triton: bool) -> Program:
    """Return specjax's attention, with its kernel or in plain JAX."""
    q = shapes(case.batch, case.queries, case.heads, case.dim)
    new = shapes.entry(case, case.batch, case.kv_heads, case.queries, int8=case.int8)
    mask = shapes(
        1 if case.is_training else case.batch, case.queries, case.queries, dtype=jnp.bool_
    )
    sinks = shapes(case.heads, dtype=jnp.float32) if case.sinks else None
    if case.is_training:
        if by_triton:
            raise MissingError("has no gradients; training is plain JAX")
        return jax.grad(
            lambda q, new, mask: attend(q, [(new, mask)]).astype(jnp.float32).sum(), argnums=(0, 1)
        ), (q, new, mask)
    rows, slots = (
        (case.batch, case.slots)
        if case.page is None
        else (case.batch * case.slots // case.page, case.page)
    )
    cached = shapes.entry(case, rows, case.kv_heads, slots, int8=case.int8)
    count = shapes(case.batch, dtype=jnp.int32)
    table = (
        None if case.page is None else shapes(case.batch, case.slots // case.page, dtype=jnp.int32)
    )

    def run(q, cached, count, table, new, mask, sinks):
        pieces = [Filled(cached, count, table=table), (new, mask)]
        with mock.patch.object(by_device, "takes_triton", lambda mesh: by_triton):
            return attend(q, pieces, sinks=sinks, cap=case.cap)

    return run, (q, cached, count, table, new, mask, sinks)


def tokamax(case: Case, shapes: Shapes, has_our_layout: bool) -> Program:
    """Return tokamax's Mosaic GPU kernel, for our cache layout with the new tokens, or for its own.

    Its own layout is ``[B, S, heads, dim]``, where the cache already has the new tokens.
    """
    import qwix
    import tokamax  # pyright: ignore[reportMissingImports]
    from absl import flags

    flags.FLAGS([__file__])  # it would read this program's command line, and refuse it
    attention = partial(
        tokamax.dot_product_attention, implementation="mosaic_gpu", logits_soft_cap=case.cap
    )
    q = shapes(case.batch, case.queries, case.heads, case.dim)
    new = shapes.entry(case, case.batch, case.kv_heads, case.queries)
    if case.sinks:
        raise MissingError("no argument for sinks")
    if case.is_training:
        if not has_our_layout:
            new = shapes.entry(case, case.batch, case.queries, case.kv_heads)

        def loss(q, new):
            k, v = (part.swapaxes(1, 2) if has_our_layout else part for part in new)
            return attention(q, k, v, is_causal=True).astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1)), (q, new)
    if case.page is not None and not has_our_layout:
        raise MissingError("no argument for a table of pages")
    count = shapes(case.batch, dtype=jnp.int32)
    mask = shapes(case.batch, case.queries, case.queries, dtype=jnp.bool_)

    def visible(count, mask, slots):
        """Return ``[B, 1, T, S]``: the filled slots, then those of the call by its mask."""
        slot = jnp.arange(slots)[None] - count[:, None]
        of_own = jnp.take_along_axis(mask, jnp.clip(slot, 0, case.queries - 1)[:, None], axis=2)
        return ((slot < 0)[:, None] | ((slot < case.queries)[:, None] & of_own))[:, None]

    def with_mask(q, k, v, count, mask):
        if case.queries == 1:
            return attention(q, k, v, key_value_seq_lengths=count + 1)
        return attention(q, k, v, mask=visible(count, mask, k.shape[1]))

    if not has_our_layout:
        k = shapes.entry(case, case.batch, case.slots, case.kv_heads)[0]
        if case.int8:
            scales = shapes(case.batch, case.slots, case.kv_heads, 1)
            k = qwix.QArray(shapes(*k.shape, dtype=jnp.int8), scales, None, jnp.int8)
        return with_mask, (q, k, k, count, mask)

    rows, slots = (
        (case.batch, case.slots)
        if case.page is None
        else (case.batch * case.slots // case.page, case.page)
    )
    cached = shapes.entry(case, rows, case.kv_heads, slots, int8=case.int8)
    table = (
        None if case.page is None else shapes(case.batch, case.slots // case.page, dtype=jnp.int32)
    )

    def run(q, cached, count, table, new, mask):
        def whole(part, new):
            if isinstance(part, QuantizedPart):
                part = (part.numbers * part.scales[..., None]).astype(new.dtype)
            if table is not None:  # pages side by side
                pages = part[table].swapaxes(1, 2)
                part = pages.reshape(case.batch, case.kv_heads, case.slots, case.dim)
            return jnp.concatenate([part, new], axis=2).swapaxes(1, 2)

        k, v = map(whole, cached, new)
        slot = jnp.arange(k.shape[1])
        visible_slots = jnp.broadcast_to(slot < count[:, None], (case.batch, k.shape[1]))[
            :, None
        ].repeat(case.queries, axis=1)
        visible_slots = visible_slots.at[:, :, case.slots :].set(mask)
        return attention(q, k, v, mask=visible_slots[:, None])

    return run, (q, cached, count, table, new, mask)


KERNELS: dict[str, Callable[[Case, Shapes], Program]] = {
    "specjax, Triton": partial(ours, by_triton=True),
    "specjax, plain JAX": partial(ours, by_triton=False),
    "tokamax, our cache": partial(tokamax, has_our_layout=True),
    "tokamax, its own layout": partial(tokamax, has_our_layout=False),
}


# --- measurement ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of a case with a kernel.

    Attributes:
        case: name of the case.
        kernel: name of the kernel.
        moved: bytes that the program reads and writes; None if it does not compile.
        needed: bytes of keys, values, queries and the result.
        temporaries: bytes of temporary memory.
        kernels: number of kernels that it starts.
        failure: why it does not compile.
    """

    case: str
    kernel: str
    needed: int = 0
    moved: int | None = None
    temporaries: int = 0
    kernels: int = 0
    failure: str = ""


def needed_bytes(case: Case) -> int:
    """Return the bytes of keys, values, queries and the result, each counted once."""
    slots = case.queries if case.is_training else case.slots + case.queries
    of_key = case.dim + 4 if case.int8 else 2 * case.dim
    return case.batch * (
        2 * case.kv_heads * slots * of_key + 2 * case.queries * case.heads * case.dim * 2
    )


def compile_case(case: Case, name: str, mesh: Mesh) -> Outcome:
    """Compile a case with the kernel called ``name``."""
    blank = partial(Outcome, case.name, name, needed_bytes(case))
    try:
        function, arguments = KERNELS[name](case, Shapes(mesh))
        # Our kernels ask the mesh for which GPU they are, tokamax's the device that is there.
        is_there = mock.patch.object(
            jax.extend.backend, "get_default_device", lambda: mesh.devices.flat[0]
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), is_there:
            lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
        program, _ = compile_program(
            case.name, lowered, mesh, turns=lambda origin: blocks_of(case) if LOOP in origin else 1
        )
    except MissingError as error:
        return blank(failure=str(error))
    except Exception as error:  # whatever a kernel or the compiler raises is the outcome
        return blank(
            failure=f"{type(error).__name__}: {(str(error) or repr(error)).splitlines()[0][:200]}"
        )
    return blank(
        moved=program.bytes, temporaries=program.memory.temporaries, kernels=program.kernels
    )


def blocks_of(case: Case) -> int:
    """Return the number of iterations of plain attention's loop over a full cache."""
    table = None if case.page is None else jnp.zeros((1, case.slots // case.page))
    cache = Filled((jnp.zeros((1, 1, case.page or case.slots, 0)),), jnp.zeros(1), table=table)
    return -(-case.slots // cache.block_width(BLOCK))


def installed(package: str) -> str:
    """Return the version of a package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def main() -> None:
    """Compile, print and write."""
    parser = argparse.ArgumentParser(description="Compile kernels of attention for an H100.")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[case.name for case in CASES],
        help="names of cases; by default all",
    )
    parser.add_argument(
        "--output", default="", help="a .json file for the results; empty prints only"
    )
    config = parser.parse_args()
    mesh, _ = find_mesh("h100", 1, 1)
    names = [name for name in KERNELS if "tokamax" not in name or installed("tokamax")]
    table = Table("case", "kernel", "moved, MB", "moved / needed", "temporaries, MB", "kernels")
    outcomes = []
    for case in (case for case in CASES if case.name in config.cases):
        for name in names:
            outcome = compile_case(case, name, mesh)
            outcomes.append(outcome)
            if outcome.moved is None:
                table.add_row(case.name, name, outcome.failure)
            else:
                figures = (
                    outcome.moved / 1e6,
                    outcome.moved / outcome.needed,
                    outcome.temporaries / 1e6,
                )
                table.add_row(
                    case.name, name, *(f"{figure:,.2f}" for figure in figures), str(outcome.kernels)
                )
        table.add_section()
    versions = {package: installed(package) for package in ("jax", "tokamax")}
    Console(width=160).print(f"compiled for an H100 by {versions}", table)
    if config.output:
        results = {"versions": versions, "outcomes": [*map(asdict, outcomes)]}
        Path(config.output).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
