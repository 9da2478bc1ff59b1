"""Read PyTorch's own files (``pytorch_model.bin``) without PyTorch, and without running their code.

Such a file is a zip archive: ``data.pkl`` is a pickle that describes the tensors, and each storage,
a flat array of numbers, is a member of its own. A pickle is a small program and may call any
function. The reader here knows the names of tensors and their containers, which are harmless, and
refuses every other. Files older than PyTorch 1.6 are plain pickles, and are refused.
"""

import collections
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.models.fields import CheckpointError, show

# PyTorch's name -> the name in a safetensors header, numpy's type.
_STORAGES: dict[str, tuple[str, Any]] = {
    "DoubleStorage": ("F64", np.float64),
    "FloatStorage": ("F32", np.float32),
    "HalfStorage": ("F16", np.float16),
    "BFloat16Storage": ("BF16", jnp.bfloat16),
    "LongStorage": ("I64", np.int64),
    "IntStorage": ("I32", np.int32),
    "ShortStorage": ("I16", np.int16),
    "CharStorage": ("I8", np.int8),
    "ByteStorage": ("U8", np.uint8),
    "BoolStorage": ("BOOL", np.bool_),
}


class TorchFile:
    """The tensors of a file, which are read one by one.

    Raises:
        CheckpointError: The file is not a PyTorch file, is damaged, or its description asks for
            anything but tensors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._archive = zipfile.ZipFile(path)
            (description,) = [
                name for name in self._archive.namelist() if name.endswith("/data.pkl")
            ]
            self._root = description.removesuffix("data.pkl")
            content = _Unpickler(io.BytesIO(self._archive.read(description)), path).load()
        except CheckpointError:
            raise
        except Exception as error:  # a damaged zip or pickle can raise almost anything
            raise CheckpointError(
                f"{path} is not a PyTorch file of version 1.6 or newer, or is damaged"
                f" ({type(error).__name__}): convert it to safetensors, or download it again"
            ) from None
        # `dict.items`: a pickle may give its dictionary attributes, such as one called "items".
        named = dict(dict.items(content)) if isinstance(content, dict) else None
        if named is None or not all(
            type(name) is str and isinstance(tensor, _Tensor) for name, tensor in named.items()
        ):
            raise CheckpointError(
                f"{path} holds a {type(content).__name__}, not tensors by name: save"
                " model.state_dict()"
            )
        self._named = named

    @property
    def tensors(self) -> "dict[str, TorchTensor]":
        """The tensors by name. The file stays open while one of them is in use."""
        return {name: TorchTensor(self, tensor) for name, tensor in self._named.items()}

    def storage(self, number: str, kind: str) -> np.ndarray:
        """Return all numbers of a storage."""
        try:
            return np.frombuffer(
                self._archive.read(f"{self._root}data/{number}"), _STORAGES[kind][1]
            )
        except Exception as error:
            raise CheckpointError(
                f"{self._path} is damaged ({type(error).__name__}): download it again"
            ) from None


class TorchTensor:
    """One tensor, with the methods of a slice of a safetensors file."""

    def __init__(self, file: TorchFile, tensor: "_Tensor") -> None:
        self._file, self._tensor = file, tensor

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return the type, by its name in safetensors."""
        return _STORAGES[self._tensor.storage.kind][0]

    def __getitem__(self, part: Any) -> np.ndarray:
        tensor = self._tensor
        numbers = self._file.storage(*tensor.storage)
        reach = (
            tensor.offset
            + sum(
                (size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True)
            )
            + 1
        )
        if 0 in tensor.shape or reach > len(numbers):
            raise CheckpointError(
                "a tensor reaches beyond its storage: the PyTorch file is damaged; download it"
                " again"
            )
        strides = [step * numbers.itemsize for step in tensor.strides]
        stored = numbers[tensor.offset :]
        return np.lib.stride_tricks.as_strided(stored, tensor.shape, strides)[part]


# These are tuples, so that a pickle cannot change them after they are checked.


class _Storage(NamedTuple):
    """The description of a storage in a pickle."""

    number: str
    kind: str


class _Tensor(NamedTuple):
    """The description of a tensor in a pickle."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    shape, strides = tuple(shape), tuple(strides)
    numbers = [offset, *shape, *strides]
    whole = all(type(n) is int and 0 <= n < 2**48 for n in numbers)
    if type(storage) is not _Storage or not whole or len(shape) != len(strides):
        raise CheckpointError(
            "a tensor of the PyTorch file has an invalid description: download the file again"
        )
    return _Tensor(storage, offset, shape, strides)


class _StorageKind(str):
    """The name of a storage's class, in place of that class."""

    __slots__ = ()


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows tensors and their containers, and nothing else."""

    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        # New functions every time: a pickle may set attributes of the functions that it receives,
        # and those of the module must not change.
        def tensor(*arguments: Any) -> _Tensor:
            return _tensor(*arguments)

        def parameter(tensor: Any, *_: Any) -> Any:
            return tensor

        allowed = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): tensor,
            ("torch._utils", "_rebuild_parameter"): parameter,
        }
        if (module, name) in allowed:
            return allowed[module, name]
        if module == "torch" and name in _STORAGES:
            return _StorageKind(name)
        raise CheckpointError(
            f"{self._path} asks for {show(f'{module}.{name}')}, which is not a tensor: such a file"
            " could run any code"
        )

    def persistent_load(self, pid: Any) -> Any:
        if (
            not isinstance(pid, tuple)
            or len(pid) < 3
            or pid[0] != "storage"
            or type(pid[1]) is not _StorageKind
        ):
            raise CheckpointError(
                f"{self._path} holds something that is not a tensor: save model.state_dict()"
            )
        return _Storage(str(pid[2]), str(pid[1]))
