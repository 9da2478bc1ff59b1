"""Choose how a CPU multiplies the few rows of a decoding step.

A pass over a draft multiplies a few rows by every weight, ``[rows, in]`` by ``[in, out]``. XLA's
CPU backend has two libraries for that. It prefers YNNPACK, which rearranges the weights in every
call; with AVX-512 that is sometimes faster. Without AVX-512, Eigen needs two thirds of YNNPACK's
time for 4 to 48 rows, and more time than YNNPACK for 2 rows or more than 64
(docs/results/history.md has the table). For one row XLA uses neither library.

So on a CPU without AVX-512, programs over that many rows are compiled without YNNPACK; all other
programs use it. The choice depends on the CPU's flags and not on a measurement, so that two
processes compute the same result, to the last bit.
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
"""The XLA compiler option that lists the kinds of operations for YNNPACK: an empty list."""

FEWEST, MOST = 3, 48
"""The smallest and the largest number of rows for which Eigen is faster without AVX-512."""

P = ParamSpec("P")
R = TypeVar("R")


class ByRows(Generic[P, R]):
    """A jitted function. On a CPU, the number of rows in its products decides how it is compiled.

    Here "rows" are the rows of the matrix products: rows of the batch times nodes of a draft.

    Args:
        function: the function; ``target`` is one of its arguments.
        rows: returns the number of rows of the target's pass, from the arguments of ``function``,
            by name.
        models: the names of the arguments that hold weights, the target first.
        settings: keyword arguments of `jax.jit`.
    """

    def __init__(
        self,
        function: Callable[P, R],
        rows: Callable[..., int],
        models: Sequence[str],
        **settings: Any,
    ) -> None:
        functools.update_wrapper(self, function)
        self._rows, self._models, self._signature = rows, models, inspect.signature(function)
        # Two functions, because JAX takes compiler options when a function is made, not per call.
        self._usual = jax.jit(function, **settings)
        self._without_ynnpack = jax.jit(function, compiler_options=WITHOUT_YNNPACK, **settings)

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        """Call the function."""
        return self._for(*arguments, **named)(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> jax.stages.Lowered:
        """Lower the function, as `jax.jit` does. The arguments may be shapes."""
        return self._for(*arguments, **named).lower(*arguments, **named)

    def _for(self, *arguments: P.args, **named: P.kwargs) -> Any:
        bound = self._signature.bind(*arguments, **named).arguments
        # A traced call becomes a part of another program, and only the outermost program has
        # compiler options.
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(bound)):
            return self._usual
        models = tuple(bound[name] for name in self._models)
        return self._without_ynnpack if avoids_ynnpack(self._rows(**bound), models) else self._usual


def by_rows(
    rows: Callable[..., int], models: Sequence[str], **settings: Any
) -> Callable[[Callable[P, R]], ByRows[P, R]]:
    """Return a decorator that makes a `ByRows` with these arguments."""
    return lambda function: ByRows(function, rows, models, **settings)


def avoids_ynnpack(rows: int, models: tuple[Any, ...]) -> bool:
    """Return whether a program of ``rows`` rows is faster without YNNPACK.

    Args:
        rows: rows of the target's pass: rows of the batch times nodes of a draft.
        models: the target, and the drafter if there is one.
    """
    target: Target = models[0]
    if not (
        FEWEST <= rows <= MOST
        and eigen_is_faster()
        and target.mesh is None
        and sharding.is_on_cpu(None)
    ):
        return False
    # Narrower weights use YNNPACK: Eigen has no int8 products, and its bfloat16 products were not
    # measured.
    return not any(leaf.ndim > 1 and leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(models))


@functools.cache
def eigen_is_faster() -> bool:
    """Return whether this CPU lacks AVX-512 and this version of XLA knows `WITHOUT_YNNPACK`."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and lacks_avx512(cpuinfo.read_text()) and is_known(WITHOUT_YNNPACK)


def lacks_avx512(cpuinfo: str) -> bool:
    """Return whether a Linux ``/proc/cpuinfo`` describes an x86 CPU without AVX-512.

    It is False for other architectures, where nothing was measured.
    """
    lines = [line for line in cpuinfo.splitlines() if line.startswith("flags")]
    flags = lines[0].split(":", 1)[1].split() if lines else []
    return "avx2" in flags and "avx512f" not in flags


def is_known(options: dict[str, str]) -> bool:
    """Return whether XLA accepts these compiler options. It raises an error for unknown options."""
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
