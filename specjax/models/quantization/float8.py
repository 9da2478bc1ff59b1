"""Tensors of type F8_E4M3 in a safetensors file: 8-bit floats of 4 bits exponent and 3 bits mantissa, without infinities
(Micikevicius et al. 2022, arXiv 2209.05433)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

KIND = "F8_E4M3"
"""The type's name in a safetensors header."""


class Float8Tensor:
    """A tensor of a safetensors file, of which slices are read as ``float8_e4m3fn``. safetensors' own slices do not know it."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers

    def get_shape(self) -> list[int]:
        """The shape."""
        return list(self._numbers.shape)

    def get_dtype(self) -> str:
        """The type as a header names it."""
        return KIND

    def __getitem__(self, part: Any) -> np.ndarray:
        return np.asarray(self._numbers[part])


def open_tensors(path: Path, names: Sequence[str]) -> dict[str, Float8Tensor]:
    """The FP8 tensors ``names`` of the safetensors file ``path``, which has been checked. Reads no weights."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    mapped = np.memmap(path, np.uint8, "r")[8 + length :]  # once a file: every map costs a file handle

    def numbers(name: str) -> np.ndarray:
        shape, (start, stop) = header[name]["shape"], header[name]["data_offsets"]
        return mapped[start:stop].view(jnp.float8_e4m3fn).reshape(shape)

    return {name: Float8Tensor(numbers(name)) for name in names}
