"""Check which values count as numbers, and that others are refused by name."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.arguments import one_or_each
from specjax.errors import InputError

NO_NUMBERS = [
    *("3", "hot", b"3", None, True, np.True_, 1j, {}, {1}, Ellipsis),
    *([0.5, "x"], [1, None], [True, 2], (np.False_,), [[1.0]], [1, [2]], [{}], [1j], 10**400),
    *(np.array("x"), np.array(["1"]), np.array([None]), np.array([True])),
]
"""Values that numpy does not take for numbers, and values that it takes though they are none."""


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number_is_refused_by_name(value) -> None:
    with pytest.raises(InputError) as refused:
        one_or_each("size", value)
    assert str(refused.value) == f"size={value!r}: must be a number, or one number for each row"


@pytest.mark.parametrize(
    "value",
    [3, 2.5, np.int8(3), np.float32(2), jnp.float32(2), jnp.bfloat16(2), np.array(4), 10**30],
)
def test_one_number_has_no_axis(value) -> None:
    array = one_or_each("size", value)
    assert array.shape == () and float(array) == float(value)


@pytest.mark.parametrize(
    "value",
    [[1, 2], (0.5, 2), np.array([1, 2]), jnp.array([0.5, 2.0]), [np.int64(1), 2.5], [1, 10**30]],
)
def test_one_number_a_row_has_one_axis(value) -> None:
    array = one_or_each("size", value)
    assert array.shape == (2,) and array.astype(float).tolist() == [
        float(number) for number in value
    ]
