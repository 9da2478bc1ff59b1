"""Weights in FP8 with one scale for each block of 128 x 128, as DeepSeek-V3 has them (arXiv 2412.19437, section 3.3).

A matrix NAME is of type F8_E4M3 and NAME_scale_inv holds ``[ceil(rows / 128), ceil(columns / 128)]`` scales: a weight is the
stored number times the scale of its block. The matrices are dequantised when they are read; there are no FP8 products here.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

KIND = "F8_E4M3"
"""The type's name in a safetensors header."""
BLOCK = 128
"""Rows and columns of a block."""


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


def scale_name(name: str) -> str:
    """The name of the tensor with the scales of the matrix ``name``."""
    return f"{name}_scale_inv"


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """How many blocks a matrix of that shape has along each axis."""
    return tuple(-(-size // BLOCK) for size in shape)


def dequantise(stored: Any, scales: Any, part: tuple[slice, ...]) -> np.ndarray:
    """A ``part`` of a matrix, float32; reads no more of the file than that.

    Args:
        stored: the matrix in FP8, of which slices can be taken.
        scales: those of all of its blocks, likewise.
        part: a slice of each axis.
    """
    ranges = [range(size)[piece] for size, piece in zip(stored.get_shape(), part, strict=True)]
    blocks = tuple(slice(one.start // BLOCK, -(-one.stop // BLOCK)) for one in ranges)
    of_blocks = np.asarray(scales[blocks], np.float32)
    rows, columns = (np.asarray(one, np.intp) // BLOCK - of.start for one, of in zip(ranges, blocks, strict=True))
    return stored[part].astype(np.float32) * of_blocks[rows][:, columns]
