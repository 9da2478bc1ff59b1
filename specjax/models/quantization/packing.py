"""Numbers of 4 and 8 bits, several in one int32."""

import numpy as np

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each of eight neighbouring numbers in AWQ's int32, from the lowest bits."""


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers in ``packed [rows, words]`` int32 as uint8 ``[rows, words * 32 / bits]``.

    The first number is in the lowest bits.

    Examples:
        >>> from specjax.models.quantization.packing import packed, unpacked
        >>> unpacked(np.array([[0x76543210]], np.int32), 4).tolist()
        [[0, 1, 2, 3, 4, 5, 6, 7]]
        >>> packed(np.arange(8)[None], 4).tolist() == [[0x76543210]]
        True
    """
    octets = (
        np.ascontiguousarray(packed, "<i4").view(np.uint8).reshape(len(packed), 4 * packed.shape[1])
    )
    if bits == 8:
        return octets
    assert bits == 4, bits
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(octets), 2 * octets.shape[1])


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack ``numbers [rows, n]`` from 0 into as few int32 as possible; pad the last with zeros."""
    filled = np.pad(numbers.astype(np.uint8), ((0, 0), (0, -numbers.shape[1] % (32 // bits))))
    octets = filled if bits == 8 else filled[:, ::2] | filled[:, 1::2] << 4
    return np.ascontiguousarray(octets).view("<i4").astype(np.int32, copy=False)
