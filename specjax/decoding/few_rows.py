"""How a CPU multiplies the few rows of a decoding step.

A pass over a draft multiplies a few rows by every weight, ``[rows, in]`` by ``[in, out]``. XLA's CPU backend has two libraries
for that. YNNPACK, which it prefers, rearranges the weights in every call, and with AVX-512 that is sometimes the faster way.
Without AVX-512, 4 to 48 rows take Eigen two thirds of YNNPACK's time; 2 rows, or more than 64, take it longer
(docs/results/history.md has the table). One row takes neither: XLA has code of its own.

So where a CPU lacks AVX-512, programs over so many rows are compiled without YNNPACK, and no others: each program gets what
suits its arguments. The choice follows from the CPU's flags and not from a clock, so that one process repeats what another
computed, to the last bit.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from specjax import sharding
from specjax.models.transformer import Target

WITHOUT_YNNPACK = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""XLA's option that names the kinds of operations which YNNPACK takes: none."""

FEWEST, MOST = 3, 48
"""The rows from and to which Eigen is the faster one without AVX-512."""

P = ParamSpec("P")
R = TypeVar("R")


class ByRows(Generic[P, R]):
    """A jitted function that is compiled, on a CPU, as suits the rows of its products.

    Args:
        function: of a ``target`` and more.
        rows: the rows of the target's pass, from the arguments of ``function``, by name.
        models: the names of those that hold weights, the target's first.
        settings: of `jax.jit`.
    """

    def __init__(self, function: Callable[P, R], rows: Callable[..., int], models: Sequence[str], **settings: Any) -> None:
        functools.update_wrapper(self, function)
        self._rows, self._models, self._signature = rows, models, inspect.signature(function)
        self._usual = jax.jit(function, **settings)
        self._without_ynnpack = jax.jit(function, compiler_options=WITHOUT_YNNPACK, **settings)

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        """As ``function``."""
        return self._for(*arguments, **named)(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> jax.stages.Lowered:
        """As the method of what `jax.jit` returns; arguments may be shapes."""
        return self._for(*arguments, **named).lower(*arguments, **named)

    def _for(self, *arguments: P.args, **named: P.kwargs) -> Any:
        given = self._signature.bind(*arguments, **named).arguments
        # A traced call is a part of another program, which has options of its own.
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(given)):
            return self._usual
        models = tuple(given[name] for name in self._models)
        return self._without_ynnpack if avoids_ynnpack(self._rows(**given), models) else self._usual


def by_rows(rows: Callable[..., int], models: Sequence[str], **settings: Any) -> Callable[[Callable[P, R]], ByRows[P, R]]:
    """A decorator that makes a `ByRows`, whose arguments it takes."""
    return lambda function: ByRows(function, rows, models, **settings)


def avoids_ynnpack(rows: int, models: tuple[Any, ...]) -> bool:
    """Whether a program that multiplies so many ``rows`` by the weights of ``models`` is faster without YNNPACK.

    Args:
        rows: of the target's pass: rows of the batch times nodes of a draft.
        models: the target, and the drafter or nothing.
    """
    target: Target = models[0]
    if not (FEWEST <= rows <= MOST and eigen_is_faster() and target.mesh is None and sharding.is_on_cpu(None)):
        return False
    # Narrower weights are YNNPACK's: Eigen has no products of int8, and those of bfloat16 were not measured.
    return not any(leaf.ndim > 1 and leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(models))


@functools.cache
def eigen_is_faster() -> bool:
    """Whether this machine's CPU lacks AVX-512, and this version of XLA knows `WITHOUT_YNNPACK`."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and lacks_avx512(cpuinfo.read_text()) and is_known(WITHOUT_YNNPACK)


def lacks_avx512(cpuinfo: str) -> bool:
    """Whether Linux's description of the CPU is that of an x86 without AVX-512. Of other CPUs nothing was measured: False."""
    flags = next((line.split(":", 1)[1].split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])
    return "avx2" in flags and "avx512f" not in flags


def is_known(options: dict[str, str]) -> bool:
    """Whether XLA takes these compiler options: it refuses those that it does not know."""
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
