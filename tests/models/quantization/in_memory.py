"""Tensors of a checkpoint that are in memory."""

from typing import Any

import numpy as np


class Numbers:
    """A tensor in memory that counts the bytes that are read of it."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers, self.read = numbers, 0

    def get_shape(self) -> list[int]:
        return list(self.numbers.shape)

    def __getitem__(self, part: Any) -> np.ndarray:
        self.read += self.numbers[part].nbytes
        return self.numbers[part]
