"""The small JSON files of a checkpoint, checked field by field before anything is built from them.

A file is described by a table, field name -> `Field`: what the field may hold, and what stands for it where it is absent.
So a size that is a list, a rate that is text or a count of 2**63 is an error of one line, not a traceback from deep inside.
"""

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.errors import InputError

REQUIRED: Any = object()
"""The default of a field that must be there."""


class CheckpointError(InputError):
    """A checkpoint that cannot be used, and what to do about it."""


@dataclass(frozen=True)
class Field:
    """What one field may hold.

    Attributes:
        expected: what it must be, in words; ends the error message.
        accepts: whether a value is that.
        default: stands for the field where it is absent. A field with the default None may also be null.
    """

    expected: str
    accepts: Callable[[Any], bool]
    default: Any = REQUIRED


def whole(low: int, high: int, default: Any = REQUIRED) -> Field:
    """A whole number from ``low`` to ``high``. JSON's true is 1 in Python, but no number here."""
    return Field(f"a whole number from {low:,} to {high:,}", lambda v: type(v) is int and low <= v <= high, default)


def number(low: float, high: float, default: Any = REQUIRED) -> Field:
    """A number from ``low`` to ``high``, which leaves out NaN and the infinities."""
    return Field(f"a number from {low:g} to {high:g}", lambda v: type(v) in (int, float) and low <= v <= high, default)


def text(*choices: str, default: Any = REQUIRED) -> Field:
    """One of ``choices``."""
    return Field(f"one of {', '.join(choices)}", lambda v: type(v) is str and v in choices, default)


def texts(default: Any = REQUIRED) -> Field:
    """A list of text."""
    return Field("a list of text", lambda v: type(v) is list and all(type(item) is str for item in v), default)


def flag(default: Any = REQUIRED) -> Field:
    """A truth value."""
    return Field("true or false", lambda v: type(v) is bool, default)


def mapping(default: Any = REQUIRED) -> Field:
    """An object, whose own fields have a table of their own."""
    return Field("an object", lambda v: type(v) is dict, default)


def show(value: Any) -> str:
    """``value`` in an error message: on one line, and cut where it is long."""
    return _BRIEF.repr(value)


_BRIEF = reprlib.Repr()
_BRIEF.maxdict = 2
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = 60


def check_fields(raw: Mapping[str, Any], table: Mapping[str, Field], source: str, prefix: str = "") -> dict[str, Any]:
    """The value of every field of ``table``, with defaults filled in. Fields that are not in the table are left out.

    Args:
        raw: the object as it was read.
        table: what each field may hold; checked in this order.
        source: the file, for errors.
        prefix: where in the file the object lies, such as ``"rope_scaling."``.

    Raises:
        CheckpointError: a field is missing or is not what the table says.
    """
    values = {}
    for name, field in table.items():
        value = raw.get(name, field.default)
        if value is REQUIRED:
            raise CheckpointError(f"{source}: {prefix}{name} is missing: it must be {field.expected}")
        if value is not field.default and not field.accepts(value):
            raise CheckpointError(f"{source}: {prefix}{name}={show(value)}: must be {field.expected}")
        values[name] = value
    return values


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `CheckpointError` when it is missing or is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: give a directory in Hugging Face format") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): give a directory in Hugging Face format") from None
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of 5,000 digits, brackets without end
        raise CheckpointError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(content).__name__}: download it again")
    return content
