"""Checks of numeric arguments, made before anything is computed with them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.errors import InputError


def one_or_each(name: str, value: Any) -> np.ndarray:
    """Return a number, or one number per row, as an array.

    Numbers of Python, numpy and JAX are accepted, alone or in a sequence. Strings, None and
    booleans are refused, although numpy would convert some of them: ``top_k="3"`` is as likely a
    mistake as ``top_k="three"``.

    Args:
        name: the name of the argument, for the error message.
        value: one number, or one number for each of ``B`` rows.

    Returns:
        An array ``[]`` or ``[B]``: integers if all numbers are integers, otherwise floats.

    Raises:
        InputError: the value is anything else. The message has the name and the value.

    Examples:
        >>> from specjax.arguments import one_or_each
        >>> one_or_each("temperature", [0.0, 0.7])
        array([0. , 0.7])
        >>> one_or_each("temperature", "hot")
        Traceback (most recent call last):
        specjax.errors.InputError: temperature='hot': must be a number, or one number for each row
    """
    refusal = InputError(f"{name}={value!r}: must be a number, or one number for each row")
    try:
        numbers = np.asarray(value)
        # Integers beyond numpy's int64 have become objects.
        if numbers.dtype == object and all(map(is_whole, numbers.ravel())):
            numbers = numbers.astype(np.float64)
    except (ValueError, TypeError, OverflowError):
        raise refusal from None
    is_real = jnp.issubdtype(numbers.dtype, jnp.floating) or jnp.issubdtype(
        numbers.dtype, jnp.integer
    )
    has_booleans = isinstance(value, Sequence) and any(
        isinstance(item, bool | np.bool_) for item in value
    )
    if numbers.ndim > 1 or not is_real or has_booleans:
        raise refusal
    return numbers


LARGEST = 2**31 - 1
"""The largest number that fits in the device's int32 arrays."""

LARGEST_FLOAT = float(np.finfo(np.float32).max)
"""The largest number that fits in the device's float32 arrays."""


def check_size(name: str, value: Any, most: float = LARGEST) -> None:
    """Refuse numbers that do not fit in the arrays on the device.

    Args:
        name: the name of the argument, for the error message.
        value: one number, or one number per row.
        most: the largest absolute value that is allowed.

    Raises:
        InputError: a number is larger. The message has the name and the value.

    Examples:
        >>> from specjax.arguments import check_size
        >>> check_size("top_k", 2**40)
        Traceback (most recent call last):
        specjax.errors.InputError: top_k=1099511627776: must be at most 2147483647
    """
    if np.any(np.abs(one_or_each(name, value).astype(np.float64)) > most):
        raise InputError(f"{name}={value}: must be at most {most:.10g}")


def is_whole(value: Any) -> bool:
    """Return True for an integer of Python or numpy; a boolean is not one.

    Examples:
        >>> from specjax.arguments import is_whole
        >>> is_whole(3), is_whole(3.0), is_whole(True)
        (True, False, False)
    """
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
