"""Numbers packed into int32, against shifts one by one."""

import numpy as np
import pytest

from specjax.models.quantization.packing import packed, unpacked


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 32])
def test_numbers_are_where_shifts_put_them(bits, count) -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << bits, (3, count))
    words = [[0] * -(-count * bits // 32) for _ in numbers]
    for row, index in np.ndindex(*numbers.shape):
        words[row][index * bits // 32] |= int(numbers[row, index]) << index * bits % 32
    result = packed(numbers, bits)
    assert result.dtype == np.int32 and result.view(np.uint32).tolist() == words
    for array in (result, np.asfortranarray(result)):
        np.testing.assert_array_equal(unpacked(array, bits)[:, :count], numbers)
        assert not unpacked(array, bits)[:, count:].any()
