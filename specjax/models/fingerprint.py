"""Short hashes by which two machines compare their weights.

A fingerprint is computed from the configuration and some rows of every tensor. It guards against
mistakes, such as a model that was trained further or another one of the same sizes, but not against
an attacker. All numbers are rounded to bfloat16 first, so a checkpoint has one fingerprint, whether
loaded in float32 or in bfloat16.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import sharding
from specjax.models.params import Param, Params

ROWS = 4
"""The number of consecutive rows sampled from the middle of each matrix, and of experts."""


def of_params(params: Any, config: Any, mesh: Mesh | None = None) -> str:
    """Return the fingerprint of a target's or a drafter's params.

    On a mesh of several processes every process must call this.

    Args:
        params: any pytree of arrays.
        config: a frozen dataclass; fields with their default values do not count.
        mesh: the mesh of the params.

    Examples:
        >>> from specjax.models import fingerprint
        >>> drafter = specjax.Medusa.init(target, jax.random.key(1), heads=2, draft=2)
        >>> len(fingerprint.of_params(drafter.params, drafter.config))
        32
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    samples = sharding.to_host([_sample(leaf) for _, leaf in leaves], mesh)
    return _digest(
        config,
        ((path, leaf.shape, sample) for (path, leaf), sample in zip(leaves, samples, strict=True)),
    )


def of_stored(
    declared: Params, values: Callable[[Param, tuple[slice, ...]], np.ndarray], config: Any
) -> str:
    """Return the fingerprint that `of_params` returns after loading; only the samples are read.

    Args:
        declared: the declarations of all params.
        values: returns any part of a param, as the result of `specjax.models.checkpoint.reader`.
        config: as in `of_params`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(declared)
    return _digest(
        config, ((path, param.shape, values(param, sampled(param.shape))) for path, param in leaves)
    )


def sampled(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the part of an array that a fingerprint is computed from; all of a vector.

    Matrices are ``(in, out)`` here and ``(out, in)`` in a checkpoint: columns here are consecutive
    rows of the file.
    """
    if len(shape) < 2:
        return tuple(slice(0, size) for size in shape)
    cut_axes = {len(shape) - 1} if len(shape) == 2 else {0, len(shape) - 1}
    return tuple(
        _middle(size) if axis in cut_axes else slice(0, size) for axis, size in enumerate(shape)
    )


def _middle(size: int) -> slice:
    start = max(size // 2 - ROWS // 2, 0)
    return slice(start, min(start + ROWS, size))


def stated(value: Any) -> Any:
    """Return ``value`` without the fields of dataclasses that have their defaults.

    So a field that a later version adds, and that leaves a model as it was, changes nothing. Fields
    that are excluded from comparison are left out, too.
    """
    if dataclasses.is_dataclass(value):
        fields = (
            (field, getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.compare
        )
        return {
            field.name: stated(content) for field, content in fields if content != field.default
        }
    return [stated(item) for item in value] if isinstance(value, tuple) else value


@jax.jit
def _sample(leaf: jax.Array) -> jax.Array:
    return leaf[sampled(leaf.shape)]


def _digest(config: Any, samples: Iterable[tuple[Any, tuple[int, ...], np.ndarray]]) -> str:
    """Return the hash of the path, the whole shape, and the sample of every param."""
    digest = hashlib.sha256(json.dumps(stated(config), sort_keys=True).encode())
    for path, shape, sample in samples:
        digest.update(f"{jax.tree_util.keystr(path)} {tuple(shape)}\n".encode())
        digest.update(np.ascontiguousarray(_rounded(sample)).tobytes())
    return digest.hexdigest()[:32]


def _rounded(sample: np.ndarray) -> np.ndarray:
    """Return a sample in bfloat16.

    Integers stay as they are, except those of 4 bits, which a CPU stores in 8.
    """
    if sample.dtype == jnp.int4:
        return sample.astype(np.int8)
    with np.errstate(over="ignore"):
        return sample.astype(jnp.bfloat16) if jnp.issubdtype(sample.dtype, jnp.floating) else sample
