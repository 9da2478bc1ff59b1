"""Tests of arrays as bytes: the precision that is lost, and the bytes that are refused."""

import hashlib

import msgspec
import numpy as np
import pytest

from specjax.wire import ArrayBytes, digest, pack, unpack
from specjax.wire.arrays import GROUP

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "shape", [(1,), (5,), (3, 7), (2, 64), (2, 65), (4, 3, 50), (0, 8), (3, 0), (2, 2, 2, 2)]
)
def test_what_is_lost(shape: tuple[int, ...]):
    array = RNG.normal(size=shape).astype(np.float32)
    for precision, most in (("float32", 0.0), ("float16", 2**-11), ("int8", None)):
        back = unpack(pack(array, precision))
        assert (back.shape, back.dtype) == (shape, np.float32)
        if most is not None:
            assert np.all(np.abs(back - array) <= most * np.abs(array))
            continue
        for token, returned in zip(array, back, strict=True):
            flat, flat_returned = np.ravel(token), np.ravel(returned)
            for start in range(0, flat.size, GROUP):
                group = flat[start : start + GROUP]
                error = np.abs(flat_returned[start : start + GROUP] - group)
                # Half a step of the group, and the error of the step, which is stored as float16.
                assert np.all(error <= np.abs(group).max() / 127 * (0.5 + 127 * 2**-11))


def test_bytes_of_a_number():
    array = np.zeros((4, 128))
    bytes_per_number = {
        dtype: len(pack(array, dtype).data) / 512 for dtype in ("float32", "float16", "int8")
    }
    assert bytes_per_number == {"float32": 4, "float16": 2, "int8": 1 + 2 / GROUP}


def test_numbers_that_are_too_large_or_none():
    array = np.array([[1e30, -1e30, np.inf, 3.0]])
    assert unpack(pack(array, "float16")).tolist() == [[65504.0, -65504.0, 65504.0, 3.0]]
    large = unpack(pack(array, "int8"))
    assert np.all(np.isfinite(large))
    assert large[0, :3].tolist() == [127 * 65504.0, -127 * 65504.0, 127 * 65504.0]
    assert unpack(pack(np.array([[np.nan, 127.0]]), "int8")).tolist() == [[0.0, 127.0]]
    assert unpack(pack(np.array([[1e-9, 0.0]]), "int8")).tolist() == [[0.0, 0.0]]


def test_groups_are_of_one_token():
    array = np.ones((2, 3), np.float32)
    array[1] *= 1000
    assert unpack(pack(array, "int8"))[0] == pytest.approx([1, 1, 1], rel=1e-3)


def test_tokens():
    tokens = [0, 2**31 - 1, 5]
    assert unpack(pack(tokens, "int32")).tolist() == tokens
    assert unpack(pack([0, 255], "uint8")).tolist() == [0, 255]
    with pytest.raises(ValueError, match="no axis"):
        pack(3, "int32")


@pytest.mark.parametrize(
    ("dtype", "shape", "length"),
    [
        ("int32", [2], 7),
        ("int32", [2], 9),
        ("int8", [1, 64], 64),
        ("float16", [2, 2], 16),
        ("int64", [1], 8),
        ("int32", [], 4),
    ],
)
def test_bytes_that_do_not_fit(dtype: str, shape: list[int], length: int):
    encoded = msgspec.msgpack.encode([dtype, shape, bytes(length)])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=ArrayBytes)


@pytest.mark.parametrize(
    "shape", [[-1], [2**21], [2**20, 2**20, 2**20, 2**20], [1, 1, 1, 1, 1], [2.0], ["2"]]
)
def test_shapes_that_are_none(shape: list):
    encoded = msgspec.msgpack.encode(["uint8", shape, b""])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=ArrayBytes)


def test_a_digest_is_of_little_endian_bytes():
    assert digest([1, 258]) == hashlib.sha256(bytes([1, 0, 0, 0, 2, 1, 0, 0])).digest()[:8]
    assert (
        digest(np.array([1, 258], np.int64))
        == digest(np.array([1, 258], ">i4"))
        == digest([1, 258])
    )
