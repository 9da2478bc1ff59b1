"""Read and write tensors in files, for everything that declares parameters: targets and drafters.

The declarations are a tree of `Param`; each knows its published name, its shape and its logical
axes. Everything is checked from the files' headers, before the first weight is read, and nothing is
guessed: a tensor that is missing, unexpected or of another shape is refused by name, since each of
these would change the outputs.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from specjax import sharding
from specjax.files import replacing
from specjax.models.checkpoint_files import INDEX, WEIGHTS, CheckpointFiles
from specjax.models.fields import CheckpointError, show
from specjax.models.params import Param
from specjax.models.quantization import float8, matrices_in, published, saved
from specjax.models.quantization.stored import ROLES, Rounded, StoredMatrix

_BLOCK_ROWS = 4096
"""The number of rows that are compared at once: tens of megabytes of an embedding."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_TYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
_WHOLE_NUMBERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")


def float_type(dtype: Any) -> np.dtype:
    """Return the floating-point type that ``dtype`` names.

    Raises:
        CheckpointError: It names none.
    """
    try:
        float_dtype = jnp.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # numpy parses strings such as "f4, f4"
        float_dtype = None
    if float_dtype is None or not jnp.issubdtype(float_dtype, jnp.floating):
        raise CheckpointError(
            f"dtype={show(dtype)}: must be a floating-point type such as float32 or bfloat16"
        )
    return float_dtype


def have_same_values(files: CheckpointFiles, first: str, second: str) -> bool:
    """Return True if two tensors are equal; quantized ones are compared as floats.

    They are read a block of rows at a time, up to the first block that differs.
    """
    shape = files.shapes[first]
    if shape != files.shapes[second]:
        return False
    blocks = [
        slice(start, min(start + _BLOCK_ROWS, shape[0]))
        for start in range(0, shape[0], _BLOCK_ROWS)
    ]
    rest = (slice(None),) * (len(shape) - 1)
    return all(
        np.array_equal(files.tensors[first][block, *rest], files.tensors[second][block, *rest])
        for block in blocks
    )


def stored_type(files: CheckpointFiles) -> Any:
    """Return the one type of all floating-point tensors.

    Raises:
        CheckpointError: They are of several types.
    """
    kinds = sorted({tensor.get_dtype() for tensor in files.tensors.values()} & set(_FLOATS))
    if len(kinds) != 1 or kinds[0] not in _TYPES:
        raise CheckpointError(
            f"{files.directory}: its tensors are {', '.join(kinds)}: all must be one of"
            f" {', '.join(_TYPES)}"
        )
    return jnp.dtype(_TYPES[kinds[0]])


def type_of(files: CheckpointFiles, name: str) -> Any:
    """Return the type of the tensor ``name``; bfloat16 if it is quantized or does not exist."""
    tensor = files.tensors.get(name)
    kind = "" if tensor is None or isinstance(tensor, StoredMatrix) else tensor.get_dtype()
    return jnp.dtype(_TYPES.get(kind, jnp.bfloat16))


Values = Callable[[Param, tuple[slice, ...]], np.ndarray]
"""Returns a part of a parameter, from a slice of each of its axes in use."""


def reader(
    files: CheckpointFiles,
    declared: Any,
    dtype: DTypeLike,
    what: str,
    ignored: Collection[str] = (),
) -> Values:
    """Return a function that reads any part of a parameter from a checkpoint.

    Arguments and errors are those of `load`.
    """
    dtype = float_type(dtype)
    tensors = _with_roles(files.tensors, declared, what, files.directory)
    names = {name for param in jax.tree.leaves(declared) for name in param.stored_names}
    for name in published.idle_biases(files.tensors, names):
        del tensors[name]
    _check_all(tensors, jax.tree.leaves(declared), what, ignored, files.directory)

    def read(param: Param, name: str, part: tuple[slice, ...]) -> np.ndarray:
        return np.ascontiguousarray(
            _turned(param, _without_units(param, tensors[name][param.stored_part(part)])),
            jnp.dtype(param.dtype or dtype),
        )

    def values(param: Param, part: tuple[slice, ...]) -> np.ndarray:
        if not param.stacked:
            return read(param, param.name, part)
        shape = [len(range(size)[piece]) for size, piece in zip(param.shape, part, strict=True)]
        stack = np.empty(shape, jnp.dtype(param.dtype or dtype))
        for slot, name in enumerate(param.stored_names[part[0]]):
            stack[slot] = read(param, name, part[1:])
        return stack

    return values


def _with_roles(
    tensors: Mapping[str, Any], declared: Any, what: str, directory: Path
) -> dict[str, Any]:
    """Return ``tensors`` with each declared quantized matrix replaced by its parts."""
    result = dict(tensors)
    for quantized in matrices_in(declared):
        for stored in quantized.values.stored_names:
            name = stored.removesuffix(":values")
            if name not in tensors:
                continue  # `_check_all` reports it
            matrix = tensors[name]
            *lead, groups, outputs, size = quantized.values.stored_shape
            shape = (
                (outputs, groups * size) if quantized.values.is_rows else (groups * size, outputs)
            )
            _check_tensor(name, matrix, (*lead, *shape), _FLOATS, what, directory)
            if not (isinstance(matrix, StoredMatrix) and matrix.gives(quantized.form)):
                matrix = Rounded(matrix, quantized.form, turned=not quantized.values.is_rows)
            result |= {
                f"{name}:{role}": matrix.role(role)
                for role in ROLES
                if getattr(quantized, role) is not None
            }
            result.pop(name, None)
    return result


def place(
    declared: Any, values: Values, mesh: Mesh | None = None, units: Mapping[str, int] | None = None
) -> Any:
    """Return arrays of all declared params; ``mesh`` and ``units`` as in `load`."""

    def whole(param: Param) -> jax.Array:
        if mesh is None:
            return jnp.asarray(values(param, (slice(None),) * len(param.shape)))
        return jax.make_array_from_callback(
            param.shape, param.place(mesh, units or {}), lambda part: values(param, part or ())
        )

    return jax.tree.map(whole, declared)


def load(
    files: CheckpointFiles,
    declared: Any,
    dtype: DTypeLike,
    what: str,
    ignored: Collection[str] = (),
    mesh: Mesh | None = None,
    units: Mapping[str, int] | None = None,
) -> Any:
    """Read the declared tensors; with a mesh, each device reads only its own slice of every tensor.

    Args:
        files: the files, with ``model.safetensors``, or shards and their index.
        declared: any pytree with `Param` as leaves.
        dtype: the type of the result, except for parameters with a type of their own.
        what: what the tensors should make up, for errors: "a llama model with this config.json".
        ignored: patterns (``*`` matches anything) of the names of tensors that may be left over.
        mesh: the mesh of the result; None for the default device.
        units: the number of indivisible units of each logical axis (see `sharding.partition`).

    Returns:
        Arrays, in the structure of ``declared``.

    Raises:
        CheckpointError: A file is missing or damaged; a tensor is missing, left over, or of another
            shape or type than declared. Everything is checked before any weight is read.
    """
    return place(declared, reader(files, declared, dtype, what, ignored), mesh, units)


def save(
    directory: Path,
    declared: Any,
    params: Any,
    files: Mapping[str, Any],
    dtype: DTypeLike | None = None,
) -> None:
    """Write ``params`` under their published names, and small JSON ``files``, all of it or nothing.

    Other files in the directory stay. If there are several processes, all must call this, and the
    first one writes.

    Args:
        directory: the directory, which is created if it does not exist.
        declared: the declarations, in the structure of ``params``.
        params: the arrays.
        files: the content of each file by name; "config.json" should be among them.
        dtype: the type of the file, by default that of each array; parameters with a type of their
            own keep it.

    Raises:
        CheckpointError: ``directory`` is a file, or holds a sharded checkpoint, whose index would
            hide the new weights.
        FullDiskError: There is not enough disk space.
    """
    check_writable(directory)  # before the params are gathered, which may take long
    dtype = None if dtype is None else float_type(dtype)
    params = sharding.to_host(params, sharding.mesh_of(params))
    if jax.process_index() != 0:
        return

    pieces: dict[str, list[tuple[Param, np.ndarray]]] = {}
    for param, leaf in zip(jax.tree.leaves(declared), jax.tree.leaves(params), strict=True):
        array = leaf.astype(
            jnp.dtype(param.stored_dtype or param.dtype or dtype or leaf.dtype), copy=False
        )
        for name, piece in zip(
            param.stored_names, array if param.stacked else [array], strict=True
        ):
            stored = _turned(param, piece)
            stored = stored.reshape((1,) * param.unit_axes + stored.shape)
            pieces.setdefault(name, []).append((param, stored))
    arrays = saved.compressed(
        {name: _put_together(name, parts) for name, parts in pieces.items()}, declared
    )
    with replacing(directory, sum(array.nbytes for array in arrays.values())) as scratch:
        save_file(arrays, scratch / WEIGHTS, metadata={"format": "pt"})
        (scratch / WEIGHTS).chmod(0o644)  # safetensors lets only the owner read it
        for name, content in files.items():
            (scratch / name).write_text(json.dumps(content, indent=2) + "\n")


def _turned(param: Param, array: np.ndarray) -> np.ndarray:
    """Convert between the checkpoint's order of axes and the parameter's, in either direction."""
    return np.swapaxes(array, -1, -2) if param.transposed else array


def _without_units(param: Param, array: np.ndarray) -> np.ndarray:
    """Return part of a stored tensor without its axes of size 1 in front."""
    return array.reshape(array.shape[param.unit_axes :])


def _put_together(name: str, pieces: list[tuple[Param, np.ndarray]]) -> np.ndarray:
    """Return the tensor ``name``, assembled from the stored values of its parameters."""
    param, array = pieces[-1]
    if param.within is None:
        assert len({part.within for part, _ in pieces}) == 1, (
            f"{name}: declared both as a whole and in parts"
        )
        return np.ascontiguousarray(array)
    kinds = {
        (part.stored_shape, part.within and part.within.axis, value.dtype) for part, value in pieces
    }
    assert len(kinds) == 1, f"{name}: declared in several ways: {kinds}"
    whole = np.empty(param.stored_shape, array.dtype)
    covered = np.zeros(param.within.size, int)
    for part, value in pieces:
        place = part.stored_part((slice(None),) * value.ndim)
        whole[place] = value
        covered[place[param.within.axis]] += 1
    assert (covered == 1).all(), (
        f"{name}: indices that belong to no parameter, or to several:"
        f" {np.flatnonzero(covered != 1)[:5]}"
    )
    return whole


def check_writable(directory: Path) -> None:
    """Refuse, with a `CheckpointError`, a directory in which no checkpoint can be written.

    The directory need not exist.
    """
    if directory.is_file():
        raise CheckpointError(f"{directory} is a file: save to a directory")
    if (directory / INDEX).exists():
        raise CheckpointError(f"{directory} holds a sharded checkpoint: save to another directory")


def _check_tensor(
    name: str, tensor: Any, shape: tuple[int, ...], kinds: Sequence[str], what: str, directory: Path
) -> None:
    """Refuse a tensor that does not have the ``shape``, or one of the types ``kinds``."""
    if (stored_shape := tuple(tensor.get_shape())) != shape:
        raise CheckpointError(
            f"{directory}: {name!r} has shape {stored_shape}, but in {what} it is {shape}: "
            "give the configuration and the weights of one model"
        )
    if (kind := tensor.get_dtype()) not in kinds:
        raise CheckpointError(
            f"{directory}: {name!r} is of type {kind}, but in {what} it is one of"
            f" {', '.join(kinds)}: use the unquantized checkpoint"
        )


def _check_all(
    tensors: Mapping[str, Any],
    declared: list[Param],
    what: str,
    ignored: Collection[str],
    directory: Path,
) -> None:
    names = {name for param in declared for name in param.stored_names}
    if missing := sorted(names - tensors.keys()):
        raise CheckpointError(
            f"{directory}: {missing[0]!r} of {what} is missing ({len(missing)} such tensors): is a"
            " shard lost?"
        )
    for name, param in [(name, owner) for owner in declared for name in owner.stored_names]:
        floating = param.dtype is None or jnp.issubdtype(param.dtype, jnp.floating)
        if param.dtype == "float8_e4m3fn":
            kinds = (float8.KIND,)
        elif floating:
            kinds = _FLOATS
        else:
            kinds = _WHOLE_NUMBERS
        _check_tensor(name, tensors[name], param.stored_shape, kinds, what, directory)
    extra = sorted(
        n for n in tensors.keys() - names if not any(fnmatchcase(n, pattern) for pattern in ignored)
    )
    if extra:
        raise CheckpointError(
            f"{directory}: {show(extra[0])} is no part of {what} ({len(extra)} such tensors): "
            "leaving it out would change the outputs"
        )
