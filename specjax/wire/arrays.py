"""Arrays as little-endian bytes, in full precision or quantized.

The server sends hidden states of the target for every token, and they are most of a connection's
bytes. ``int8`` takes a quarter of the bytes of ``float32``; each group of 64 numbers of a token has
a scale. One scale per channel, shared by all tokens, would have a smaller error for channels that
are always large. But a verdict has only a handful of tokens, so one scale per channel would take as
many bytes as the numbers themselves, and the scales of an earlier message may not have arrived.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np

GROUP = 64
"""The count of numbers of a token that share a scale in ``int8``."""

MOST_ARRAY = 2**24
"""The maximum size of an array in bytes."""

Precision = Literal["float32", "float16", "int8"]
"""The number formats in which hidden states may be sent."""

DType = Literal["int32", "uint8", "float32", "float16", "int8"]
_BYTES = {"int32": 4, "uint8": 1, "float32": 4, "float16": 2, "int8": 1}
_LITTLE = {"int32": "<i4", "uint8": "u1", "float32": "<f4", "float16": "<f2", "int8": "i1"}
_LARGEST = float(np.finfo(np.float16).max)

PRECISIONS: tuple[str, ...] = get_args(Precision)
"""The names of the precisions."""


class ArrayBytes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array as bytes.

    Attributes:
        dtype: the format of a number.
        shape: the shape of the array, with one to four axes.
        data: the numbers in row-major order. For ``int8``, the scales of all groups follow as
            float16, token after token.

    Examples:
        >>> from specjax.wire import ArrayBytes, unpack
        >>> unpack(ArrayBytes("int32", (2,), bytes([7, 0, 0, 0, 8, 0, 0, 0]))).tolist()
        [7, 8]
    """

    dtype: DType
    shape: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=2**20)], ...],
        msgspec.Meta(min_length=1, max_length=4),
    ]
    data: Annotated[bytes, msgspec.Meta(max_length=MOST_ARRAY)]

    def __post_init__(self) -> None:
        """Raise ValueError if the length of the data does not fit the shape."""
        if len(self.data) != (expected := _length(self.dtype, self.shape)):
            raise ValueError(
                f"{len(self.data)} bytes of {self.dtype} {list(self.shape)}, which takes {expected}"
            )


def _length(dtype: str, shape: Sequence[int]) -> int:
    """Return how many bytes an array takes."""
    scales = shape[0] * _groups(shape) * 2 if dtype == "int8" else 0
    return math.prod(shape) * _BYTES[dtype] + scales


def _groups(shape: Sequence[int]) -> int:
    """Return how many groups of numbers a token has."""
    return -(-math.prod(shape[1:]) // GROUP)


def pack(array: Any, dtype: DType) -> ArrayBytes:
    """Convert an array to bytes.

    Args:
        array: ``[T, ...]`` numbers, token after token. Numbers too large for ``dtype`` are clipped
            to its largest number.
        dtype: the format of a number: ``int32`` or ``uint8`` for tokens and parents, a `Precision`
            for hidden states.

    Raises:
        ValueError: The array has no axis.

    Examples:
        >>> from specjax.wire import pack, unpack
        >>> pack([3, 1, 2], "int32").data.hex()
        '030000000100000002000000'
        >>> unpack(pack([[0.5, -1e6]], "float16")).tolist()  # no infinity
        [[0.5, -65504.0]]
    """
    array = np.asarray(array)
    if not array.ndim:
        raise ValueError("array: it has no axis; give at least one token")
    if dtype == "int8":
        return ArrayBytes(dtype, array.shape, _as_int8(array.astype(np.float32)))
    if dtype == "float16":
        array = np.clip(array.astype(np.float32), -_LARGEST, _LARGEST)
    return ArrayBytes(dtype, array.shape, array.astype(_LITTLE[dtype]).tobytes())


def _as_int8(array: np.ndarray) -> bytes:
    """Quantize an array to numbers from -127 to 127, followed by the scale of each group.

    A scale is the largest absolute number of its group, divided by 127.
    """
    tokens, groups = len(array), _groups(array.shape)
    flat = np.nan_to_num(array.reshape(tokens, math.prod(array.shape[1:])))
    padded = np.zeros((tokens, groups * GROUP), np.float32)
    padded[:, : flat.shape[1]] = flat
    grouped = padded.reshape(tokens, groups, GROUP)
    scales = np.minimum(np.abs(grouped).max(-1, initial=0) / 127, _LARGEST).astype("<f2")
    # The receiver multiplies by the scale that float16 has rounded, so divide by the same number.
    divisor = np.where(scales == 0, np.inf, scales).astype(np.float32)
    numbers = np.clip(np.rint(grouped / divisor[..., None]), -127, 127).astype(np.int8)
    return numbers.reshape(tokens, groups * GROUP)[:, : flat.shape[1]].tobytes() + scales.tobytes()


def unpack(packed: ArrayBytes) -> np.ndarray:
    """Convert bytes back to an array of int32, uint8, or, for each `Precision`, float32.

    The array may be read-only.

    Examples:
        >>> from specjax.wire import pack, unpack
        >>> unpack(pack(np.array([[1.0, 2.0, 127.0]]), "int8")).tolist()
        [[1.0, 2.0, 127.0]]
    """
    count = math.prod(packed.shape)
    numbers = np.frombuffer(packed.data, _LITTLE[packed.dtype], count).reshape(packed.shape)
    if packed.dtype in ("int32", "uint8"):
        return numbers.astype(packed.dtype, copy=False)
    if packed.dtype != "int8":
        return numbers.astype(np.float32)
    tokens = packed.shape[0]
    scales = (
        np.frombuffer(packed.data, "<f2", offset=count)
        .reshape(tokens, _groups(packed.shape))
        .astype(np.float32)
    )
    scale_of_number = np.repeat(scales, GROUP, axis=1)[:, : math.prod(packed.shape[1:])]
    return numbers * scale_of_number.reshape(packed.shape)


def digest(tokens: Any) -> bytes:
    """Return the first eight bytes of the SHA-256 hash of a text's token ids.

    The ids are hashed as little-endian int32.

    Args:
        tokens: ``[T]`` token ids. An array is faster than a list.

    Examples:
        >>> from specjax.wire import digest
        >>> digest([1, 2, 3]).hex()
        '4636993d3e1da4e9'
    """
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).digest()[:8]
