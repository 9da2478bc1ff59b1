"""Checks of the numbers that users give, before anything is computed with them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.errors import InputError


def one_or_each(name: str, value: Any) -> np.ndarray:
    """Return one number, or one for each row, as an array.

    Numbers of Python, numpy and JAX are taken, alone or in a sequence. Strings, None and booleans are refused, though numpy
    would make numbers of some of them: ``top_k="3"`` is as likely a mistake as ``top_k="three"``.

    Args:
        name: of the argument, for the error.
        value: one number, or one for each of ``B`` rows.

    Returns:
        ``[]`` or ``[B]``, integers where all are, otherwise floats.

    Raises:
        InputError: it is something else; names it and its value.

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
        if numbers.dtype == object and all(map(is_whole, numbers.ravel())):  # larger than numpy's own integers
            numbers = numbers.astype(np.float64)
    except (ValueError, TypeError, OverflowError):
        raise refusal from None
    is_real = jnp.issubdtype(numbers.dtype, jnp.floating) or jnp.issubdtype(numbers.dtype, jnp.integer)
    has_booleans = isinstance(value, Sequence) and any(isinstance(each, bool | np.bool_) for each in value)
    if numbers.ndim > 1 or not is_real or has_booleans:
        raise refusal
    return numbers


LARGEST = 2**31 - 1
"""The largest number that the device's int32 arrays hold."""

LARGEST_FLOAT = float(np.finfo(np.float32).max)
"""The largest number that the device's float32 arrays hold."""


def check_size(name: str, value: Any, most: float = LARGEST) -> None:
    """Refuse numbers that the arrays on the device cannot hold.

    Args:
        name: of the argument, for the error.
        value: one number, or one for each row.
        most: the largest that is taken, with either sign.

    Raises:
        InputError: a number is larger; names the argument and its value.

    Examples:
        >>> from specjax.arguments import check_size
        >>> check_size("top_k", 2**40)
        Traceback (most recent call last):
        specjax.errors.InputError: top_k=1099511627776: must be at most 2147483647
    """
    if np.any(np.abs(one_or_each(name, value).astype(np.float64)) > most):
        raise InputError(f"{name}={value}: must be at most {most:.10g}")


def is_whole(value: Any) -> bool:
    """Return whether ``value`` is a whole number of Python or numpy, and no boolean.

    Examples:
        >>> from specjax.arguments import is_whole
        >>> is_whole(3), is_whole(3.0), is_whole(True)
        (True, False, False)
    """
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
