"""Placement of arrays on a mesh: one table maps logical axes to mesh axes.

There are two mesh axes. ``data`` splits the rows of the batch. ``model`` splits heads, MLP units,
experts and the vocabulary (tensor and expert parallelism). The code names logical axes only. A
logical axis that the mesh axis does not divide evenly is replicated.

A mesh may span several processes (call `specjax.processes.join` before the first array). Then every
process makes the same calls with the same arguments, and every process has the whole result.
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
"""Logical axis -> mesh axis. Axes that are not listed are replicated."""


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make a ``data x model`` mesh from the first ``data * model`` devices.

    Raises:
        InputError: there are too few devices.

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
        raise InputError(f"mesh data={data} x model={model}: each axis must be at least 1")
    if data * model > len(devices):
        raise InputError(
            f"mesh data={data} x model={model} needs {data * model} devices; {len(devices)} are"
            " present"
        )
    return Mesh(np.asarray(devices[: data * model]).reshape(data, model), ("data", "model"))


def mesh_for(sizes: tuple[int, int]) -> Mesh | None:
    """Return the mesh for a command's option ``--mesh DATA MODEL``; None means a single device.

    Raises:
        InputError: there are too few devices, or several processes run and the mesh leaves out some
            of their devices.
    """
    if jax.process_count() > 1 and math.prod(sizes) != jax.device_count():
        raise InputError(
            f"mesh={sizes}: {jax.process_count()} processes have {jax.device_count()} devices; give"
            " a mesh of all of them"
        )
    return None if sizes == (1, 1) else make_mesh(*sizes)


def partition(mesh: Mesh, axes: Sequence[str | None], units: Mapping[str, int]) -> PartitionSpec:
    """Return the `PartitionSpec` of an array with these logical axes.

    ``units`` has the number of indivisible units of each axis (heads, not heads x head_dim). An
    axis whose units the mesh axis does not divide is replicated.
    """

    def mesh_axis(axis: str | None) -> str | None:
        if axis is None or axis not in RULES or axis not in units:
            return None
        return RULES[axis] if units[axis] % mesh.shape[RULES[axis]] == 0 else None

    return PartitionSpec(*map(mesh_axis, axes))


def named(mesh: Mesh, axes: Sequence[str | None], units: Mapping[str, int]) -> NamedSharding:
    """Return `partition` as a sharding of its mesh."""
    return NamedSharding(mesh, partition(mesh, axes, units))


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """Place a value on a mesh. If it spans several processes, all must pass the same value."""
    if not sharding.mesh.is_multi_process:  # pyright: ignore[reportAttributeAccessIssue]
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            put(jax.random.key_data(value), sharding), impl=jax.random.key_impl(value)
        )
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return jax.jit(lambda x: x, out_shardings=sharding)(value)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def to_host(arrays: Any, mesh: Mesh | None) -> Any:
    """Return arrays as numpy arrays. Every process that the mesh spans must call this."""
    return jax.device_get(everywhere(arrays, mesh))


def spans_processes(mesh: Mesh | None) -> bool:
    """Return True if the devices of a mesh belong to several processes."""
    return mesh is not None and mesh.is_multi_process


def of_processes(values: np.ndarray, mesh: Mesh) -> dict[int, np.ndarray]:
    """Return the values of each process of a mesh by its number, the first device's first.

    Every process that the mesh spans must call this, with an array of the same shape and type.

    Examples:
        >>> from specjax.sharding import of_processes
        >>> of_processes(np.array([3, 4], np.int32), specjax.make_mesh())
        {0: array([3, 4], dtype=int32)}
    """
    by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    local = values[None]
    shape = mesh.size, *values.shape
    stacked = to_host(jax.make_array_from_callback(shape, by_device, lambda _: local), mesh)
    numbers = [device.process_index for device in mesh.devices.flat]
    return {number: stacked[numbers.index(number)] for number in dict.fromkeys(numbers)}


def everywhere(arrays: Any, mesh: Mesh | None) -> Any:
    """Replicate arrays to all processes of a mesh. Every one of these processes must call this."""
    if mesh is None or not spans_processes(mesh):
        return arrays
    return _replicated(arrays, NamedSharding(mesh, PartitionSpec()))


@partial(jax.jit, static_argnames="sharding")
def _replicated(arrays: Any, sharding: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(arrays, sharding)


def mesh_of(arrays: Any) -> Mesh | None:
    """Return the mesh of the first sharded array in a pytree; None if no array is sharded."""
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            mesh = leaf.sharding.mesh
            return mesh if isinstance(mesh, Mesh) else None
    return None


def is_on_cpu(mesh: Mesh | None) -> bool:
    """Return True if the devices of a mesh, or the default device without a mesh, are CPUs."""
    return (jax.default_backend() if mesh is None else mesh.devices.flat[0].platform) == "cpu"


def constrain(
    x: jax.Array, axes: Sequence[str | None], units: Mapping[str, int], mesh: Mesh | None
) -> jax.Array:
    """Constrain the sharding of an activation inside ``jit``; do nothing without a mesh."""
    if mesh is None or math.prod(mesh.shape.values()) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, named(mesh, axes, {**units, "batch": x.shape[0]}))


def on_host() -> AbstractContextManager[Any]:
    """Return a context in which new arrays are placed on the host's CPU.

    On an accelerator, small computations of the host, such as a request's random key, would wait
    for the call that is running there.

    Examples:
        >>> from specjax.sharding import on_host
        >>> with on_host():
        ...     key = jax.random.key(0)
        >>> {device.platform for device in key.devices()}
        {'cpu'}
    """
    return jax.default_device(jax.local_devices(backend="cpu")[0])
