"""Numbers of 4 and 8 bits, several in an int32."""

import numpy as np

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ has each of eight neighbouring numbers, counted from the lowest bits."""


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """The numbers in ``packed [rows, words]`` int32, from the lowest bits on: int32 ``[rows, words * 32 / bits]``, from 0.

    Examples:
        >>> from specjax.models.narrow.packing import packed, unpacked
        >>> unpacked(np.array([[0x76543210]], np.int32), 4).tolist()
        [[0, 1, 2, 3, 4, 5, 6, 7]]
        >>> packed(np.arange(8)[None], 4).tolist() == [[0x76543210]]
        True
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = packed.astype(np.int32).view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return numbers.reshape(*packed.shape[:-1], -1).astype(np.int32)


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """``numbers [rows, n]`` from 0, in as few int32 as they need: the last one is filled up with zeros."""
    count = 32 // bits
    filled = np.pad(numbers.astype(np.uint32), ((0, 0), (0, -numbers.shape[1] % count)))
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = (filled.reshape(len(filled), -1, count) << shifts).sum(axis=-1, dtype=np.uint32)
    return words.view(np.int32)
