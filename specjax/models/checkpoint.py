"""Tensors in files: whatever declares its parameters is read and written here, target or drafter.

The declarations are a tree of `Param`; each knows its published name, its shape and its logical axes. Every check is done on
the files' headers, before the first byte of weights is read, and nothing is guessed: a tensor that is missing, left over or of
another shape is refused by name, for each of them would change the outputs.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax import sharding
from specjax.files import replacing
from specjax.models.fields import CheckpointError, read_json, show
from specjax.models.params import Param
from specjax.models.quantization import Form, float8, matrices_in, mxfp4, published, saved
from specjax.models.quantization.stored import ROLES, Rounded, StoredMatrix
from specjax.models.torch_zip import TorchFile

WEIGHTS = "model.safetensors"
TORCH_WEIGHTS = "pytorch_model.bin"
"""Read where there are no safetensors."""
MEDUSA_WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""The names under which Medusa's heads are published."""
INDEX = "model.safetensors.index.json"
_BLOCK_ROWS = 4096
"""Rows that are compared at once: tens of megabytes of an embedding."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_TYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
_WHOLE_NUMBERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")


def float_type(dtype: Any) -> np.dtype:
    """The floating-point type that ``dtype`` names. Raises `CheckpointError` when it names none."""
    try:
        known = jnp.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # numpy reads a small language here
        known = None
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise CheckpointError(f"dtype={show(dtype)}: must be a floating-point type such as float32 or bfloat16")
    return known


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a checkpoint, by name. Reads headers only."""
    with _open_tensors(directory) as tensors:
        return {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}


def have_same_values(directory: Path, first: str, second: str) -> bool:
    """Compare the tensors of two names, a block of rows at a time up to the first that differs; quantized ones as floats."""
    with _open_tensors(directory) as tensors:
        one, other = tensors[first], tensors[second]
        shape = tuple(one.get_shape())
        if shape != tuple(other.get_shape()):
            return False
        blocks = [slice(start, min(start + _BLOCK_ROWS, shape[0])) for start in range(0, shape[0], _BLOCK_ROWS)]
        rest = (slice(None),) * (len(shape) - 1)
        return all(np.array_equal(one[block, *rest], other[block, *rest]) for block in blocks)


def stored_names(directory: Path) -> Collection[str]:
    """The names of a checkpoint's tensors; none where neither an index of the shards nor the weights are there."""
    index = directory / INDEX
    try:
        return read_json(index)["weight_map"].keys() if index.exists() else stored_shapes(directory).keys()
    except (CheckpointError, KeyError, AttributeError):
        return ()


def stored_type(directory: Path) -> Any:
    """The one data type of all floating-point tensors. Raises `CheckpointError` where they are of several."""
    with _open_tensors(directory) as tensors:
        kinds = sorted({tensor.get_dtype() for tensor in tensors.values()} & set(_FLOATS))
    if len(kinds) != 1 or kinds[0] not in _TYPES:
        raise CheckpointError(f"{directory}: its tensors are {', '.join(kinds)}: all must be one of {', '.join(_TYPES)}")
    return jnp.dtype(_TYPES[kinds[0]])


def type_of(directory: Path, name: str) -> Any:
    """The data type of the tensor ``name``; of one that is quantized, and of one that is not there, bfloat16."""
    with _open_tensors(directory) as tensors:
        is_float = name in tensors and not isinstance(tensors[name], StoredMatrix)
        kind = tensors[name].get_dtype() if is_float else ""
    return jnp.dtype(_TYPES.get(kind, jnp.bfloat16))


def stored_forms(directory: Path) -> dict[str, Form]:
    """By name, how the matrices of a checkpoint are quantized that are. Reads headers, and the smallest tensors."""
    with _open_tensors(directory) as tensors:
        return {name: tensor.form for name, tensor in tensors.items() if isinstance(tensor, StoredMatrix) and tensor.is_kept}


def stored_bytes(directory: Path) -> int:
    """The size of a checkpoint's files with weights, all of which are there."""
    return sum((directory / name).stat().st_size for name in _weight_files(directory))


Values = Callable[[Param, tuple[slice, ...]], np.ndarray]
"""Gives a part of a parameter: a slice of each of its axes, as it is used."""


@contextmanager
def reading(directory: Path, declared: Any, dtype: DTypeLike, what: str, ignored: Collection[str] = ()) -> Iterator[Values]:
    """A checkpoint that holds the tensors that ``declared`` names, from which any part of them is read when it is asked for.

    Arguments and errors are those of `load`.
    """
    dtype = float_type(dtype)
    with _open_tensors(directory) as stored:
        tensors = _with_roles(stored, declared, what, directory)
        for name in published.idle_biases(stored, {name for one in jax.tree.leaves(declared) for name in one.stored_names}):
            del tensors[name]
        _check_tensors(tensors, jax.tree.leaves(declared), what, ignored, directory)

        def one(param: Param, name: str, part: tuple[slice, ...]) -> np.ndarray:
            array = _turned(param, tensors[name][param.stored_part(part)])
            return np.ascontiguousarray(array, jnp.dtype(param.dtype or dtype))

        def values(param: Param, part: tuple[slice, ...]) -> np.ndarray:
            if not param.stacked:
                return one(param, param.name, part)
            shape = [len(range(size)[piece]) for size, piece in zip(param.shape, part, strict=True)]
            stack = np.empty(shape, jnp.dtype(param.dtype or dtype))
            for slot, name in enumerate(param.stored_names[part[0]]):
                stack[slot] = one(param, name, part[1:])
            return stack

        yield values


def _with_roles(tensors: Mapping[str, Any], declared: Any, what: str, directory: Path) -> dict[str, Any]:
    """``tensors`` with the parts of each matrix that is declared as a quantized one in place of the matrix."""
    found = dict(tensors)
    for quantized in matrices_in(declared):
        for stored in quantized.values.stored_names:
            name = stored.removesuffix(":values")
            if name not in tensors:
                continue  # which is said where all tensors are checked
            matrix = tensors[name]
            *lead, groups, outputs, size = quantized.values.stored_shape
            expected = (outputs, groups * size) if quantized.values.is_rows else (groups * size, outputs)
            _check_shape(name, matrix, (*lead, *expected), what, directory)
            _check_kind(name, matrix, _FLOATS, what, directory)
            if not (isinstance(matrix, StoredMatrix) and matrix.gives(quantized.form)):
                matrix = Rounded(matrix, quantized.form, turned=not quantized.values.is_rows)
            found |= {f"{name}:{role}": matrix.role(role) for role in ROLES if getattr(quantized, role) is not None}
            found.pop(name, None)
    return found


def place(declared: Any, values: Values, mesh: Mesh | None = None, units: Mapping[str, int] | None = None) -> Any:
    """Arrays of all the ``values`` of what is ``declared``, in its structure; ``mesh`` and ``units`` as in `load`."""

    def whole(param: Param) -> jax.Array:
        if mesh is None:
            return jnp.asarray(values(param, (slice(None),) * len(param.shape)))
        return jax.make_array_from_callback(param.shape, param.place(mesh, units or {}), lambda part: values(param, part or ()))

    return jax.tree.map(whole, declared)


def load(
    directory: Path,
    declared: Any,
    dtype: DTypeLike,
    what: str,
    ignored: Collection[str] = (),
    mesh: Mesh | None = None,
    units: Mapping[str, int] | None = None,
) -> Any:
    """Read the tensors that ``declared`` names; with a mesh, each device reads only its own slice of every tensor.

    Args:
        directory: holds ``model.safetensors``, or shards and their index.
        declared: any pytree with `Param` as leaves.
        dtype: of the result, but for parameters that have a dtype of their own.
        what: what the tensors should make up, for errors: "a llama model with this config.json".
        ignored: patterns (``*`` matches anything) of the names that may be left over.
        mesh: where to put the result; None is the default device.
        units: how many indivisible units each logical axis has (see `sharding.partition`).

    Returns:
        Arrays, in the structure of ``declared``.

    Raises:
        CheckpointError: a file is missing or damaged; a tensor is missing, left over, or of another shape or type than
            declared. All of it is checked before any weight is read.
    """
    with reading(directory, declared, dtype, what, ignored) as values:
        return place(declared, values, mesh, units)


def save(directory: Path, declared: Any, params: Any, files: Mapping[str, Any], dtype: DTypeLike | None = None) -> None:
    """Write ``params`` under their published names, and small JSON ``files`` beside them. All of it or nothing.

    Other files in the directory stay. Of several processes, which must all call this, the first one writes.

    Args:
        directory: is made where there is none.
        declared: the declarations, in the structure of ``params``.
        params: the arrays.
        files: file name -> what it holds; "config.json" should be among them.
        dtype: of the file, by default that of each array; parameters with a dtype of their own keep it.

    Raises:
        CheckpointError: ``directory`` is a file, or holds a sharded checkpoint, whose index would hide the new weights.
        FullDiskError: there is no room for it.
    """
    check_writable(directory)
    dtype = None if dtype is None else float_type(dtype)
    params = sharding.to_host(params, sharding.mesh_of(params))
    if jax.process_index() != 0:
        return

    pieces: dict[str, list[tuple[Param, np.ndarray]]] = {}
    for param, leaf in zip(jax.tree.leaves(declared), jax.tree.leaves(params), strict=True):
        array = leaf.astype(jnp.dtype(param.stored_dtype or param.dtype or dtype or leaf.dtype), copy=False)
        for name, one in zip(param.stored_names, array if param.stacked else [array], strict=True):
            pieces.setdefault(name, []).append((param, _turned(param, one)))
    arrays = saved.compressed({name: _put_together(name, found) for name, found in pieces.items()}, declared)
    with replacing(directory, sum(array.nbytes for array in arrays.values())) as scratch:
        save_file(arrays, scratch / WEIGHTS, metadata={"format": "pt"})
        (scratch / WEIGHTS).chmod(0o644)  # safetensors makes it private to its owner
        for name, content in files.items():
            (scratch / name).write_text(json.dumps(content, indent=2) + "\n")


def _turned(param: Param, array: np.ndarray) -> np.ndarray:
    """From the order of axes in the checkpoint to that of the parameter, or back."""
    return np.swapaxes(array, -1, -2) if param.transposed else array


def _put_together(name: str, pieces: list[tuple[Param, np.ndarray]]) -> np.ndarray:
    """The tensor ``name`` of the parameters that make it up, each with its value as it is stored."""
    param, array = pieces[-1]
    if param.within is None:
        assert len({one.within for one, _ in pieces}) == 1, f"{name}: declared both as a whole and in parts"
        return np.ascontiguousarray(array)
    kinds = {(one.stored_shape, one.within and one.within.axis, value.dtype) for one, value in pieces}
    assert len(kinds) == 1, f"{name}: declared in several ways: {kinds}"
    whole = np.empty(param.stored_shape, array.dtype)
    covered = np.zeros(param.within.size, int)
    for one, value in pieces:
        place = one.stored_part((slice(None),) * value.ndim)
        whole[place] = value
        covered[place[param.within.axis]] += 1
    assert (covered == 1).all(), (
        f"{name}: places that belong to no parameter, or to several: {np.flatnonzero(covered != 1)[:5]}"
    )
    return whole


def check_writable(directory: Path) -> None:
    """Refuse, with a `CheckpointError`, a ``directory`` in which no checkpoint can be written; it need not exist."""
    if directory.is_file():
        raise CheckpointError(f"{directory} is a file: save to a directory")
    if (directory / INDEX).exists():
        raise CheckpointError(f"{directory} holds a sharded checkpoint: save to another directory")


class _Slices:
    """A tensor of a safetensors file. Its slices may have steps, which those of the file have not."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        reach = tuple(slice(one.start, one.stop) for one in part)
        return self._stored[reach][tuple(slice(None, None, one.step) for one in part)]


@contextmanager
def _open_tensors(directory: Path) -> Iterator[dict[str, Any]]:
    """All tensors of a checkpoint, by name, from one file or from the shards that an index lists.

    Each has its ``get_shape()``, its ``get_dtype()``, and gives the part that a slice of each axis asks for.
    """
    tensors: dict[str, Any] = {}
    handles = []
    try:
        for name in _weight_files(directory):
            if not name.endswith(".safetensors"):
                file = TorchFile(directory / name)
                handles.append(closing(file))
                tensors |= file.tensors
                continue
            try:
                handle = safe_open(directory / name, framework="numpy")
            except (SafetensorError, OSError) as error:
                reason = " ".join(str(error).split())
                raise CheckpointError(f"{directory / name} is truncated or damaged ({reason}): download it again") from None
            handles.append(handle)
            found: dict[str, Any] = {key: _Slices(handle.get_slice(key)) for key in handle.keys()}  # noqa: SIM118 - not a dict
            quantized = [key for key, tensor in found.items() if tensor.get_dtype() == float8.KIND]
            if quantized:
                found |= float8.open_tensors(directory / name, quantized)
            if twice := sorted(found.keys() & tensors.keys()):
                raise CheckpointError(f"{directory}: two shards hold {show(twice[0])}: download the checkpoint again")
            tensors |= found
        yield mxfp4.unpacked(_with_matrices(tensors, directory), directory)
    finally:
        for handle in handles:
            handle.__exit__(None, None, None)


def _with_matrices(tensors: dict[str, Any], directory: Path) -> dict[str, Any]:
    """``tensors`` with each quantized matrix in place of the tensors that it is stored in."""
    file = directory / "config.json"
    raw = read_json(file).get("quantization_config") if file.exists() else None
    published.check_config(raw, str(file))
    matrices, used = published.matrices(tensors, raw or {}, directory)
    return {name: tensor for name, tensor in tensors.items() if name not in used} | matrices


def _weight_files(directory: Path) -> list[str]:
    """The names of the files with the weights, all of which are there."""
    files = [WEIGHTS]
    index = directory / INDEX
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(type(file) is str for file in shards.values()):
            raise CheckpointError(
                f"{index}: weight_map={show(shards)}: must give the file of every tensor: download the checkpoint again"
            )
        files = sorted(set(shards.values()))
    # A name is looked for among the directory's own files, so none can lead out of it.
    present = {file.name for file in directory.iterdir() if file.is_file()}
    if files == [WEIGHTS] and WEIGHTS not in present:
        files = [name for name in (TORCH_WEIGHTS, *MEDUSA_WEIGHTS) if name in present][:1] or files
    if missing := [name for name in files if name not in present]:
        names = ", ".join(name if name.isprintable() and len(name) <= 100 else show(name) for name in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"{directory} lacks {names}{more}: download the checkpoint again, in safetensors format")
    return files


def _check_shape(name: str, tensor: Any, expected: tuple[int, ...], what: str, directory: Path) -> None:
    if (shape := tuple(tensor.get_shape())) != expected:
        raise CheckpointError(
            f"{directory}: {name!r} has shape {shape}, but in {what} it is {expected}: "
            "give the configuration and the weights of one model"
        )


def _check_kind(name: str, tensor: Any, expected: Sequence[str], what: str, directory: Path) -> None:
    if (kind := tensor.get_dtype()) not in expected:
        raise CheckpointError(
            f"{directory}: {name!r} is of type {kind}, but in {what} it is one of {', '.join(expected)}: "
            "use the unquantized checkpoint"
        )


def _check_tensors(
    tensors: Mapping[str, Any], declared: list[Param], what: str, ignored: Collection[str], directory: Path
) -> None:
    names = {name for param in declared for name in param.stored_names}
    if missing := sorted(names - tensors.keys()):
        raise CheckpointError(
            f"{directory}: {missing[0]!r} of {what} is missing ({len(missing)} such tensors): is a shard lost?"
        )
    for name, param in [(name, one) for one in declared for name in one.stored_names]:
        _check_shape(name, tensors[name], param.stored_shape, what, directory)
        floating = param.dtype is None or jnp.issubdtype(param.dtype, jnp.floating)
        expected = (float8.KIND,) if param.dtype == "float8_e4m3fn" else _FLOATS if floating else _WHOLE_NUMBERS
        _check_kind(name, tensors[name], expected, what, directory)
    extra = sorted(n for n in tensors.keys() - names if not any(fnmatchcase(n, pattern) for pattern in ignored))
    if extra:
        raise CheckpointError(
            f"{directory}: {show(extra[0])} is no part of {what} ({len(extra)} such tensors): "
            "leaving it out would change the outputs"
        )
