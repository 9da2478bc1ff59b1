"""A one-line repr for objects with arrays. It shows sizes instead of values."""

import dataclasses
from collections.abc import Sequence
from typing import Any

_SHOWN_NUMBERS = 8
"""The largest array that is printed in full, in numbers."""


class OneLine:
    """Base class of dataclasses whose repr is one line, ``Name(field=value, …)``.

    An array is shown by its type and shape. Another value that holds arrays is shown by the count
    of their numbers, and the field ``config`` by its class. Fields that are None are left out.

    Examples:
        >>> import dataclasses
        >>> from specjax.reprs import OneLine
        >>> @dataclasses.dataclass
        ... class Model(OneLine):
        ...     params: dict
        ...     ends: tuple = (1, 2)
        >>> Model({"a": jnp.zeros((2, 50)), "b": jnp.zeros(3)})
        Model(params=<2 arrays, 103 numbers, float32>, ends=(1, 2))
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = OneLine.__repr__  # else dataclasses.dataclass adds its own

    def __repr__(self) -> str:
        shown = (
            f"{key}={_show(key, value)}"
            for key, value in self.shown_fields().items()
            if value is not None
        )
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def shown_fields(self) -> dict[str, Any]:
        """Return the fields that the repr shows, by name."""
        return _fields_of(self)


def _fields_of(instance: Any) -> dict[str, Any]:
    return {
        field.name: getattr(instance, field.name, None)
        for field in dataclasses.fields(instance)
        if field.repr
    }


def _show(key: str, value: Any) -> str:
    if key == "config" and dataclasses.is_dataclass(value):
        return f"{type(value).__qualname__}(…)"
    if isinstance(value, type):
        return value.__qualname__
    if _is_array(value):
        return _show_array(value)
    if isinstance(value, tuple) and value and all(isinstance(item, OneLine) for item in value):
        return f"({', '.join(map(repr, value))}{',' if len(value) == 1 else ''})"
    arrays = [] if isinstance(value, OneLine) else _arrays_in(value)
    if not arrays:
        return " ".join(repr(value).split())
    if dataclasses.is_dataclass(value):
        shown = (
            f"{name}={_show(name, item)}"
            for name, item in _fields_of(value).items()
            if item is not None
        )
        return f"{type(value).__qualname__}({', '.join(shown)})"
    types = sorted({str(array.dtype) for array in arrays})
    numbers = sum(int(array.size) for array in arrays)
    return (
        f"<{len(arrays)} array{'s' if len(arrays) > 1 else ''}, {numbers:,} numbers,"
        f" {' and '.join(types)}>"
    )


def _is_array(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("shape", "dtype", "size"))


def _arrays_in(value: Any) -> Sequence[Any]:
    import jax

    return [leaf for leaf in jax.tree.leaves(value) if _is_array(leaf)]


def _show_array(array: Any) -> str:
    import numpy as np

    if isinstance(array, np.ndarray) and array.size <= _SHOWN_NUMBERS:
        return str(array.tolist())
    return f"{array.dtype}{list(array.shape)}"
