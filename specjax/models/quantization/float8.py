"""FP8 tensors, of type F8_E4M3, in safetensors files.

These 8-bit floats (Micikevicius et al. 2022, arXiv 2209.05433) have 4 bits of exponent, 3 bits of
mantissa, and no infinities.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

KIND = "F8_E4M3"
"""The type's name in a safetensors header."""


class Float8Tensor:
    """A tensor of a safetensors file whose slices are read as ``float8_e4m3fn``.

    The slices of safetensors do not support this type.

    Args:
        numbers: the tensor, in a map of the file.
        path: the path of the file, for errors.
    """

    def __init__(self, numbers: np.ndarray, path: Path) -> None:
        self._numbers, self.path = numbers, path

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._numbers.shape)

    def get_dtype(self) -> str:
        """Return the type as a header names it."""
        return KIND

    def __getitem__(self, part: Any) -> np.ndarray:
        return np.asarray(self._numbers[part])


def open_tensors(path: Path, names: Sequence[str]) -> dict[str, Float8Tensor]:
    """Open the FP8 tensors ``names`` of a safetensors file that has been checked.

    No weights are read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    # One map for all: each costs a file handle.
    mapped = np.memmap(path, np.uint8, "r")[8 + length :]

    def numbers(name: str) -> np.ndarray:
        shape, (start, stop) = header[name]["shape"], header[name]["data_offsets"]
        return mapped[start:stop].view(jnp.float8_e4m3fn).reshape(shape)

    return {name: Float8Tensor(numbers(name), path) for name in names}
