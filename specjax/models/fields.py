"""Check the small JSON files of a checkpoint field by field, before anything is built from them.

A table maps field names to a `Field`: the allowed values, and the default if the field is absent.
So a size that is a list, a rate that is text or a count of 2**63 is an error of one line, not a
traceback from deep inside.
"""

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.errors import InputError

REQUIRED: Any = object()
"""The default of a field that must be present."""


class CheckpointError(InputError):
    """A checkpoint that cannot be used; the message has the remedy."""


JsonObject = dict[str, Any]
"""The content of a JSON file such as config.json, or an object in it."""

Fields = Mapping[str, Any]
"""The values of fields, by their names. They are only read."""


@dataclass(frozen=True)
class Field:
    """The allowed values of one field.

    Attributes:
        expected: the description of the allowed values, which ends the error message.
        accepts: returns True for an allowed value.
        default: the value if the field is absent. A field with the default None may also be null.
    """

    expected: str
    accepts: Callable[[Any], bool]
    default: Any = REQUIRED


FieldTable = dict[str, Field]
"""The fields of an object, by their names."""


def whole(low: int, high: int, default: Any = REQUIRED) -> Field:
    """Return a field for an integer from ``low`` to ``high``.

    JSON's true is 1 in Python, but not allowed here.
    """
    return Field(
        f"a whole number from {low:,} to {high:,}",
        lambda v: type(v) is int and low <= v <= high,
        default,
    )


def number(low: float, high: float, default: Any = REQUIRED) -> Field:
    """Return a field for a number from ``low`` to ``high``, but not NaN or an infinity."""
    return Field(
        f"a number from {low:g} to {high:g}",
        lambda v: type(v) in (int, float) and low <= v <= high,
        default,
    )


def text(*choices: str, default: Any = REQUIRED) -> Field:
    """Return a field for one of ``choices``."""
    return Field(f"one of {', '.join(choices)}", lambda v: type(v) is str and v in choices, default)


def texts(default: Any = REQUIRED) -> Field:
    """Return a field for a list of text."""
    return Field(
        "a list of text",
        lambda v: type(v) is list and all(type(item) is str for item in v),
        default,
    )


def flag(default: Any = REQUIRED) -> Field:
    """Return a field for a truth value."""
    return Field("true or false", lambda v: type(v) is bool, default)


def always(value: bool) -> Field:
    """Return a field for a truth value that has the same value in all models of a type."""
    shown = str(value).lower()
    return Field(f"left out, or {shown}", lambda v: v is value, default=value)


def mapping(default: Any = REQUIRED) -> Field:
    """Return a field for an object, whose own fields have their own table."""
    return Field("an object", lambda v: type(v) is dict, default)


def show(value: Any) -> str:
    """Return ``value`` as it appears in an error message: on one line, and shortened."""
    return _BRIEF.repr(value)


_BRIEF = reprlib.Repr()
_BRIEF.maxdict = 2
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = 60


def check_fields(
    raw: Fields, table: Mapping[str, Field], source: str, prefix: str = ""
) -> dict[str, Any]:
    """Return the value of every field of ``table``, with defaults filled in.

    Fields that are not in the table are left out.

    Args:
        raw: the object of the file.
        table: the allowed values of each field, which are checked in this order.
        source: the file, for errors.
        prefix: the path of the object in the file, such as ``"rope_scaling."``.

    Raises:
        CheckpointError: A field is missing or has a value that is not allowed.
    """
    values = {}
    for name, field in table.items():
        value = raw.get(name, field.default)
        if value is REQUIRED:
            raise CheckpointError(
                f"{source}: {prefix}{name} is missing: it must be {field.expected}"
            )
        if value is not field.default and not field.accepts(value):
            raise CheckpointError(
                f"{source}: {prefix}{name}={show(value)}: must be {field.expected}"
            )
        values[name] = value
    return values


def read_json(path: Path) -> JsonObject:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: The file is missing, or does not hold an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: give a directory in Hugging Face format"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): give a directory in Hugging Face format"
        ) from None
    # No JSON or UTF-8, or too many digits or brackets.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object, not a {type(content).__name__}: download it again"
        )
    return content
