"""Short hashes by which two machines can tell whether they hold the same weights.

A fingerprint is taken of what the configuration states and of some rows of every tensor: it guards against mistakes, a model
that was trained on or another one of the same sizes, and not against somebody who wants to deceive. All numbers are rounded to
bfloat16 first: a checkpoint has one fingerprint, whether it was loaded in float32 or in bfloat16.
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
"""So many neighbouring rows of each matrix, from its middle, are looked at; and of so many experts."""


def of_params(params: Any, config: Any, mesh: Mesh | None = None) -> str:
    """The fingerprint of a target's or a drafter's params. On a mesh of several processes every one of them must call this.

    Args:
        params: any pytree of arrays.
        config: a frozen dataclass; its fields that have their defaults do not count.
        mesh: where the params live.

    Examples:
        >>> from specjax.models import fingerprint
        >>> drafter = specjax.Medusa.init(target, jax.random.key(1), heads=2, draft=2)
        >>> len(fingerprint.of_params(drafter.params, drafter.config))
        32
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    samples = sharding.to_host([_sample(leaf) for _, leaf in leaves], mesh)
    return _digest(config, ((path, leaf.shape, each) for (path, leaf), each in zip(leaves, samples, strict=True)))


def of_stored(declared: Params, values: Callable[[Param, tuple[slice, ...]], np.ndarray], config: Any) -> str:
    """What `of_params` says of a checkpoint's params once they are loaded. Reads no more than the rows in question.

    Args:
        declared: the declarations of all of its params.
        values: gives any part of a param, as `specjax.models.checkpoint.reader` returns it.
        config: as in `of_params`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(declared)
    return _digest(config, ((path, param.shape, values(param, sampled(param.shape))) for path, param in leaves))


def sampled(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The part of an array that a fingerprint is taken of. Vectors are looked at as a whole.

    Matrices lie ``(in, out)`` here and ``(out, in)`` in a checkpoint: what are columns here are neighbouring rows of the file.
    """
    if len(shape) < 2:
        return tuple(slice(0, size) for size in shape)
    cut = {len(shape) - 1} if len(shape) == 2 else {0, len(shape) - 1}
    return tuple(_middle(size) if axis in cut else slice(0, size) for axis, size in enumerate(shape))


def _middle(size: int) -> slice:
    start = max(size // 2 - ROWS // 2, 0)
    return slice(start, min(start + ROWS, size))


def stated(value: Any) -> Any:
    """``value`` without the fields of dataclasses in it that have their defaults: a field that a later version adds, and that
    leaves a model as it was, changes nothing here. Nor do fields by which they are not compared."""
    if dataclasses.is_dataclass(value):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare)
        return {field.name: stated(each) for field, each in fields if each != field.default}
    return [stated(each) for each in value] if isinstance(value, tuple) else value


@jax.jit
def _sample(leaf: jax.Array) -> jax.Array:
    return leaf[sampled(leaf.shape)]


def _digest(config: Any, samples: Iterable[tuple[Any, tuple[int, ...], np.ndarray]]) -> str:
    """Of the path, the whole shape, and the sample of every param."""
    digest = hashlib.sha256(json.dumps(stated(config), sort_keys=True).encode())
    for path, shape, sample in samples:
        digest.update(f"{jax.tree_util.keystr(path)} {tuple(shape)}\n".encode())
        digest.update(np.ascontiguousarray(_rounded(sample)).tobytes())
    return digest.hexdigest()[:32]


def _rounded(sample: np.ndarray) -> np.ndarray:
    """In bfloat16; whole numbers as they are, but those of 4 bits, which a CPU holds in 8."""
    if sample.dtype == jnp.int4:
        return sample.astype(np.int8)
    with np.errstate(over="ignore"):
        return sample.astype(jnp.bfloat16) if jnp.issubdtype(sample.dtype, jnp.floating) else sample
