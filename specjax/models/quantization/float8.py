"""Tensors of bytes in safetensors files: FP8, of type F8_E4M3, and packed numbers, of type U8.

These 8-bit floats (Micikevicius et al. 2022, arXiv 2209.05433) have 4 bits of exponent, 3 bits of
mantissa, and no infinities. The slices of safetensors do not support them. And a slice of bytes
becomes more bytes in memory, so a file's own pages should not stay there beside it: each slice is
copied, and its pages are given back.
"""

import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

KIND = "F8_E4M3"
"""The type's name in a safetensors header."""
TYPES = {KIND: jnp.float8_e4m3fn, "U8": np.uint8}
"""The types of the tensors that are read here, by their names in a header."""
_AROUND = 2**20
"""More bytes than Linux maps around a page that is read, if it has them in its cache."""


class MappedTensor:
    """A tensor of bytes in a safetensors file.

    Args:
        mapped: the map of the file.
        path: the path of the file, for errors.
        kind: the type's name in the header.
        shape: the shape.
        start: where the first byte is in the file.
    """

    def __init__(
        self, mapped: mmap.mmap, path: Path, kind: str, shape: Sequence[int], start: int
    ) -> None:
        self._map, self.path, self._kind, self._start = mapped, path, kind, start
        self._shape = tuple(shape)

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return the type as a header names it."""
        return self._kind

    def __getitem__(self, part: Any) -> np.ndarray:
        size = int(np.prod(self._shape))
        stored = np.frombuffer(self._map, TYPES[self._kind], size, self._start)
        result = np.array(stored.reshape(self._shape)[part])
        self._give_back(part, size)
        return result

    def _give_back(self, part: Any, size: int) -> None:
        """Let the system drop the pages that a slice was read from; it may keep them in its cache.

        The pages between the first and the last index of the first axis are dropped, and those that
        came with them: with small experts, these would be a large part of the file.
        """
        if not hasattr(mmap, "MADV_DONTNEED") or not size:
            return
        first, stop = 0, size
        if self._shape and isinstance(part, tuple) and isinstance(part[0], slice):
            rows = range(self._shape[0])[part[0]]
            if not rows:
                return
            row = size // self._shape[0]
            first, stop = min(rows[0], rows[-1]) * row, (max(rows[0], rows[-1]) + 1) * row
        begin = max(self._start + first - _AROUND, 0) // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(self._start + stop + _AROUND, len(self._map))
        self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def open_tensors(path: Path, names: Sequence[str]) -> dict[str, MappedTensor]:
    """Open the tensors ``names``, of `TYPES`, of a safetensors file that has been checked.

    No weights are read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        # One map for all: each costs a file handle.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def tensor(name: str) -> MappedTensor:
        stored = header[name]
        start = 8 + length + stored["data_offsets"][0]
        return MappedTensor(mapped, path, stored["dtype"], stored["shape"], start)

    return {name: tensor(name) for name in names}
