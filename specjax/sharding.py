"""Where arrays live: logical axes to mesh axes, in one table.

Two mesh axes: ``data`` splits rows of the batch, ``model`` splits heads, MLP units, experts and the vocabulary
(tensor and expert parallelism). The code names logical axes only; a logical axis that the mesh does not divide evenly stays
whole.

A mesh may span several processes (`specjax.processes.join`, before the first array). Every process then makes the same
calls with the same arguments, and each has the whole result.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.errors import InputError

RULES: dict[str, str] = {
    "batch": "data",
    "vocab": "model",
    "draft_vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "shared_mlp": "model",
    "experts": "model",
}
"""Logical axis -> mesh axis. An axis that is not listed is replicated."""


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A ``data x model`` mesh over the first ``data * model`` devices.

    Raises:
        InputError: there are fewer devices than that.

    Examples:
        >>> mesh = specjax.make_mesh(data=1, model=1)
        >>> dict(mesh.shape)
        {'data': 1, 'model': 1}
        >>> specjax.make_mesh(model=1000)
        Traceback (most recent call last):
        specjax.errors.InputError: mesh data=1 x model=1000 needs 1000 devices; ...
    """
    devices = jax.devices() if devices is None else devices
    if data < 1 or model < 1:
        raise InputError(f"mesh data={data} x model={model}: each axis is at least 1")
    if data * model > len(devices):
        raise InputError(f"mesh data={data} x model={model} needs {data * model} devices; {len(devices)} are present")
    return Mesh(np.asarray(devices[: data * model]).reshape(data, model), ("data", "model"))


def mesh_for(sizes: tuple[int, int]) -> Mesh | None:
    """The mesh that a command is asked for: data and model; None: one device.

    Raises:
        InputError: there are fewer devices than that, or several processes and devices that the mesh leaves out.
    """
    if jax.process_count() > 1 and math.prod(sizes) != jax.device_count():
        raise InputError(
            f"mesh={sizes}: {jax.process_count()} processes have {jax.device_count()} devices; give a mesh of all of them"
        )
    return None if sizes == (1, 1) else make_mesh(*sizes)


def partition(mesh: Mesh, axes: Sequence[str | None], units: Mapping[str, int]) -> PartitionSpec:
    """The `PartitionSpec` of an array with these logical ``axes``.

    ``units`` gives the number of indivisible units of an axis (heads, not heads x head_dim); an axis whose units the mesh
    axis does not divide stays whole.
    """

    def mesh_axis(axis: str | None) -> str | None:
        if axis is None or axis not in RULES or axis not in units:
            return None
        return RULES[axis] if units[axis] % mesh.shape[RULES[axis]] == 0 else None

    return PartitionSpec(*map(mesh_axis, axes))


def named(mesh: Mesh, axes: Sequence[str | None], units: Mapping[str, int]) -> NamedSharding:
    """`partition` bound to its mesh."""
    return NamedSharding(mesh, partition(mesh, axes, units))


def put(value: Any, place: NamedSharding) -> jax.Array:
    """``value``, which every process has alike, laid out as ``place`` says, over several processes too."""
    if not place.mesh.is_multi_process:  # pyright: ignore[reportAttributeAccessIssue]
        return jax.device_put(value, place)
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(value), place), impl=jax.random.key_impl(value))
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return jax.jit(lambda x: x, out_shardings=place)(value)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, place, lambda part: host[part])


def to_host(arrays: Any, mesh: Mesh | None) -> Any:
    """``arrays`` as numpy arrays, wherever on the ``mesh`` they lie. Every process that the mesh spans must call this."""
    return jax.device_get(everywhere(arrays, mesh))


def spans_processes(mesh: Mesh | None) -> bool:
    """Whether the devices of ``mesh`` are those of several processes."""
    return mesh is not None and mesh.is_multi_process


def everywhere(arrays: Any, mesh: Mesh | None) -> Any:
    """``arrays`` such that each process that the ``mesh`` spans can read them whole. All of these must call this."""
    if mesh is None or not spans_processes(mesh):
        return arrays
    return _replicated(arrays, NamedSharding(mesh, PartitionSpec()))


@partial(jax.jit, static_argnames="place")
def _replicated(arrays: Any, place: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(arrays, place)


def mesh_of(arrays: Any) -> Mesh | None:
    """The mesh on which the first of ``arrays`` lies that is not on one device alone; None where there is none."""
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            mesh = leaf.sharding.mesh
            return mesh if isinstance(mesh, Mesh) else None
    return None


def is_on_cpu(mesh: Mesh | None) -> bool:
    """Whether what lies on ``mesh``, or without one on the default device, is worked on by a CPU."""
    return (jax.default_backend() if mesh is None else mesh.devices.flat[0].platform) == "cpu"


def constrain(x: jax.Array, axes: Sequence[str | None], units: Mapping[str, int], mesh: Mesh | None) -> jax.Array:
    """Pin an activation to the mesh inside ``jit``; without a mesh, ``x`` itself."""
    if mesh is None or math.prod(mesh.shape.values()) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, named(mesh, axes, {**units, "batch": x.shape[0]}))


def on_host() -> AbstractContextManager[Any]:
    """Return a context in which new arrays lie on the host's CPU.

    Small computations of the host, such as a request's random key, would wait on an accelerator for the call that runs there.

    Examples:
        >>> from specjax.sharding import on_host
        >>> with on_host():
        ...     key = jax.random.key(0)
        >>> {device.platform for device in key.devices()}
        {'cpu'}
    """
    return jax.default_device(jax.local_devices(backend="cpu")[0])
