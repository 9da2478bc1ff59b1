"""Arrays in bytes, little-endian, whole or with fewer digits.

Numbers of the target's hidden states come down for every token, and most of a connection's bytes are theirs. As ``int8`` they
take a quarter of what ``float32`` takes, and a scale is kept for each 64 numbers of a token. One scale a channel, which holds
over all tokens, would be kinder to channels that are always large. But a verdict has a handful of tokens: so many scales would
weigh as much as the numbers themselves, and those of an earlier message cannot be counted on.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np

GROUP = 64
"""Numbers of a token that share a scale, where they are sent as int8."""

MOST_ARRAY = 2**24
"""Bytes of an array."""

Precision = Literal["float32", "float16", "int8"]
"""How the numbers that a drafter is told may be sent."""

DType = Literal["int32", "uint8", "float32", "float16", "int8"]
_BYTES = {"int32": 4, "uint8": 1, "float32": 4, "float16": 2, "int8": 1}
_LITTLE = {"int32": "<i4", "uint8": "u1", "float32": "<f4", "float16": "<f2", "int8": "i1"}
_LARGEST = float(np.finfo(np.float16).max)

PRECISIONS: tuple[str, ...] = get_args(Precision)
"""The words for it."""


class ArrayBytes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array in bytes.

    Attributes:
        dtype: how a number is written.
        shape: of the array, at most four axes.
        data: the numbers, row after row. As ``int8`` the scales of their groups follow, float16, those of a token together.

    Examples:
        >>> from specjax.wire import ArrayBytes, unpack
        >>> unpack(ArrayBytes("int32", (2,), bytes([7, 0, 0, 0, 8, 0, 0, 0]))).tolist()
        [7, 8]
    """

    dtype: DType
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=2**20)], ...], msgspec.Meta(min_length=1, max_length=4)]
    data: Annotated[bytes, msgspec.Meta(max_length=MOST_ARRAY)]

    def __post_init__(self) -> None:
        """Refuse data of another length than the shape says."""
        if len(self.data) != (expected := _length(self.dtype, self.shape)):
            raise ValueError(f"{len(self.data)} bytes of {self.dtype} {list(self.shape)}, which takes {expected}")


def _length(dtype: str, shape: Sequence[int]) -> int:
    """Bytes that an array takes."""
    scales = shape[0] * _groups(shape) * 2 if dtype == "int8" else 0
    return math.prod(shape) * _BYTES[dtype] + scales


def _groups(shape: Sequence[int]) -> int:
    """Groups of numbers that a token has."""
    return -(-math.prod(shape[1:]) // GROUP)


def pack(array: Any, dtype: DType) -> ArrayBytes:
    """An array in bytes.

    Args:
        array: ``[T, ...]`` numbers, token after token. What is too large for ``dtype`` becomes the largest that it has.
        dtype: how a number is written: ``int32`` or ``uint8`` for tokens and parents, a `Precision` for what a drafter is told.

    Raises:
        ValueError: the array has no axis.

    Examples:
        >>> from specjax.wire import pack, unpack
        >>> pack([3, 1, 2], "int32").data.hex()
        '030000000100000002000000'
        >>> unpack(pack([[0.5, -1e6]], "float16")).tolist()  # no infinity
        [[0.5, -65504.0]]
    """
    array = np.asarray(array)
    if not array.ndim:
        raise ValueError("array: has no axis; give at least one token")
    if dtype == "int8":
        return ArrayBytes(dtype, array.shape, _as_int8(array.astype(np.float32)))
    if dtype == "float16":
        array = np.clip(array.astype(np.float32), -_LARGEST, _LARGEST)
    return ArrayBytes(dtype, array.shape, array.astype(_LITTLE[dtype]).tobytes())


def _as_int8(array: np.ndarray) -> bytes:
    """Numbers from -127 to 127, and behind them the scales: of each group a 127th of its largest number.

    A number is divided by the scale as it is sent, which float16 has rounded.
    """
    tokens, groups = len(array), _groups(array.shape)
    flat = np.nan_to_num(array.reshape(tokens, math.prod(array.shape[1:])))
    padded = np.zeros((tokens, groups * GROUP), np.float32)
    padded[:, : flat.shape[1]] = flat
    grouped = padded.reshape(tokens, groups, GROUP)
    scales = np.minimum(np.abs(grouped).max(-1, initial=0) / 127, _LARGEST).astype("<f2")
    divisor = np.where(scales == 0, np.inf, scales).astype(np.float32)
    numbers = np.clip(np.rint(grouped / divisor[..., None]), -127, 127).astype(np.int8)
    return numbers.reshape(tokens, groups * GROUP)[:, : flat.shape[1]].tobytes() + scales.tobytes()


def unpack(packed: ArrayBytes) -> np.ndarray:
    """The array: int32, uint8, and float32 for what was sent as any `Precision`. It may not be written to.

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
    scales = np.frombuffer(packed.data, "<f2", offset=count).reshape(tokens, _groups(packed.shape)).astype(np.float32)
    each = np.repeat(scales, GROUP, axis=1)[:, : math.prod(packed.shape[1:])]
    return numbers * each.reshape(packed.shape)


def digest(tokens: Any) -> bytes:
    """Eight bytes that tell a text from others: the first of SHA-256 over its token ids, int32 and little-endian.

    Args:
        tokens: ``[T]`` token ids; quickest as an array.

    Examples:
        >>> from specjax.wire import digest
        >>> digest([1, 2, 3]).hex()
        '4636993d3e1da4e9'
    """
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).digest()[:8]
