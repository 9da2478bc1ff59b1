"""The decoding of JSON bodies: first the names, then the value of each name as that name's type.

So every error names its parameter, and whoever reads a body decides about unknown names.
"""

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Union, get_args, get_type_hints

import msgspec
from msgspec import Meta

from specjax.serving.http.errors import RequestError, invalid

_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DECODERS: dict[Any, Callable[[Any], Any]] = {}


def read_names(body: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Return the names of a JSON object, with their values not decoded.

    Raises:
        RequestError: the body is not JSON, or no object.

    Examples:
        >>> from specjax.serving.http.bodies import read_names
        >>> list(read_names(b'{"model": "tiny", "n": 2}'))
        ['model', 'n']
    """
    try:
        return _NAMES.decode(body)
    except msgspec.ValidationError:
        raise RequestError(400, "the body must be a JSON object") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {_reason(error, bytes(body))}") from None


@cache
def types_of(kind: type) -> Mapping[str, Any]:
    """Return the type of each field of a class, with its bounds.

    Examples:
        >>> from specjax.serving.http.bodies import types_of
        >>> class Fields:
        ...     n: int
        >>> types_of(Fields)
        {'n': <class 'int'>}
    """
    return get_type_hints(kind, include_extras=True)


def read_value(name: str, raw: bytes | msgspec.Raw, kind: Any) -> Any:
    """Return the value of a parameter. It must have the type ``kind`` and be within its bounds.

    Raises:
        RequestError: it has another type, or is beyond its bounds.

    Examples:
        >>> from specjax.serving.http.bodies import read_value
        >>> read_value("n", b"2", int)
        2
    """
    try:
        return _decode(raw, kind)
    except (ValueError, RecursionError) as error:
        reason = _reason(error, bytes(raw))
    bounds = next(
        (meta for part in get_args(kind) for meta in getattr(part, "__metadata__", ())), None
    )
    if bounds is not None and (value := _unbounded(raw, kind)) is not None:
        raise invalid(name, f"{name}={shown(value)}: {_range(bounds, value)}")
    raise invalid(name, f"{name}: {reason}")


def _unbounded(raw: bytes | msgspec.Raw, kind: Any) -> Any:
    """Return the value of an optional field without checking bounds; None: it has another type."""
    types = tuple(getattr(part, "__origin__", part) for part in get_args(kind))
    bare = Union[types]  # noqa: UP007 - it is made at run time
    try:
        return _decode(raw, bare)
    except (ValueError, RecursionError):
        return None


def _range(bounds: Meta, value: Any) -> str:
    """Return the error message for a value beyond its bounds."""
    if isinstance(value, str):
        return (
            f"it has {len(value)} characters; give from {bounds.min_length} to {bounds.max_length}"
        )
    if bounds.description:
        return f"must be {bounds.description}"
    minimum, maximum = (
        str(bound) if isinstance(bound, int) else f"{bound:g}" for bound in (bounds.ge, bounds.le)
    )
    return f"must be from {minimum} to {maximum}"


def _decode(raw: bytes | msgspec.Raw, kind: Any) -> Any:
    if kind not in _DECODERS:
        _DECODERS[kind] = msgspec.json.Decoder(kind).decode
    return _DECODERS[kind](raw)


def check_neutral(name: str, raw: bytes | msgspec.Raw, neutral: Sequence[Any], reason: str) -> None:
    """Raise RequestError for a parameter, unless its value is null or one of ``neutral``.

    Examples:
        >>> from specjax.serving.http.bodies import check_neutral
        >>> check_neutral("top_a", b"0", (0,), "it is not supported")
    """
    value = read_value(name, raw, Any)
    # In Python True == 1, but JSON distinguishes them.
    if value is None or any(
        value == same and isinstance(value, bool) == isinstance(same, bool) for same in neutral
    ):
        return
    allowed = " or ".join(msgspec.json.encode(accepted).decode() for accepted in (*neutral, None))
    message = f"{name}={shown(value)}: {reason}; leave it out, or give {allowed}"
    raise invalid(name, message, code="unsupported_parameter")


# An escape in a JSON string. Two \u escapes, a high and a low surrogate, stand for a character
# beyond the first 65,536.
_ESCAPES = re.compile(rb"\\(?:u(?P<code>[0-9a-fA-F]{4})|.)", re.DOTALL)
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)


def _lone_surrogate(body: bytes) -> str | None:
    """Return the first escape in a body that is a surrogate without its other half, or None."""
    before: re.Match[bytes] | None = None  # a high surrogate, whose low one must come next
    for escape in _ESCAPES.finditer(body):
        code = int(escape["code"] or b"0", 16)
        if before is not None:
            if code in _LOW and escape.start() == before.end():
                before = None
                continue
            break
        if code in _LOW:
            before = escape
            break
        before = escape if code in _HIGH else None
    return None if before is None else before[0].decode()


def _reason(error: BaseException, body: bytes) -> str:
    """Return the reason why a decoder failed on ``body``, as a short line of valid Unicode."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 ({error.reason} at byte {error.start})"
    if (
        not isinstance(error, msgspec.ValidationError)
        and (half := _lone_surrogate(body)) is not None
    ):
        # The decoder's own message is misleading.
        return f"{half} is half of a character: its other half is missing"
    return str(error)[:200].encode(errors="replace").decode()


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 80


def shown(value: Any) -> str:
    """Return a value for an error message, shortened.

    Examples:
        >>> from specjax.serving.http.bodies import shown
        >>> shown("a")
        "'a'"
    """
    return _BRIEF.repr(value)
