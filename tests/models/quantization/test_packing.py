"""Numbers in int32: against shifts, one by one."""

import numpy as np
import pytest

from specjax.models.quantization.packing import packed, unpacked


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 32])
def test_numbers_are_where_shifts_put_them(bits, count) -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << bits, (3, count))
    words = [[0] * -(-count * bits // 32) for _ in numbers]
    for row, place in np.ndindex(*numbers.shape):
        words[row][place * bits // 32] |= int(numbers[row, place]) << place * bits % 32
    found = packed(numbers, bits)
    assert found.dtype == np.int32 and found.view(np.uint32).tolist() == words
    for one in (found, np.asfortranarray(found)):
        np.testing.assert_array_equal(unpacked(one, bits)[:, :count], numbers)
        assert not unpacked(one, bits)[:, count:].any()
