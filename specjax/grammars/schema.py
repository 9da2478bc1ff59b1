"""JSON schemas, changed so that llguidance reads them as their authors meant them.

llguidance refuses most keywords that it does not support. Some it ignores, or reads in another way.
These are translated here, or refused.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from specjax.errors import InputError
from specjax.grammars.notation import check_regex

_IGNORED = (
    *("divisibleBy", "disallow", "extends"),  # draft 3
    *("formatMinimum", "formatMaximum", "formatExclusiveMinimum", "formatExclusiveMaximum"),
    *("patternRequired", "uniqueItemProperties", "regexp", "range", "exclusiveRange"),
    *("allRequired", "anyRequired", "oneRequired", "prohibited"),
)
"""Keywords that restrict texts in an old draft or in a widespread extension."""

_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not"),
    *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
"""Keywords whose values hold other schemas."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
"""Patterns of dates that exist. llguidance's own take February 29 in every year."""

_INTEGERS = {
    f"{sign}int{bits}": (0 if sign else -(2 ** (bits - 1)), 2 ** (bits if sign else bits - 1) - 1)
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
"""The ranges of OpenAPI's formats of integers."""


def translated_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema for llguidance. A translated schema is not changed again.

    - ``nullable`` becomes another type. Dates exist. OpenAPI's formats of integers are bounds.
    - ``$schema`` is dropped, so that the keywords of every draft are known.

    Args:
        schema: the schema, which is changed in place. No two of its parts are the same object.

    Raises:
        InputError: a part would be ignored, or read in another way. The message has its place.

    Examples:
        >>> from specjax.grammars.schema import translated_schema
        >>> translated_schema({"type": "string", "nullable": True})
        {'type': ['string', 'null']}
        >>> translated_schema({"type": "integer", "divisibleBy": 2})
        Traceback (most recent call last):
        specjax.errors.InputError: schema.divisibleBy=2: not supported; leave it out
    """
    try:
        _Translator(schema).visit(schema, "schema")
    except RecursionError:
        raise InputError("schema: it is nested too deeply; use fewer levels") from None
    return schema


class _Translator:
    """Visits the schemas within a schema, each of them once."""

    def __init__(self, root: dict[str, Any]) -> None:
        """Start with nothing visited."""
        self._root, self._has_references = root, '"$ref"' in json.dumps(root)
        self._visited: set[int] = set()

    def visit(self, schema: Any, place: str) -> None:
        """Translate a schema and those within it."""
        if not isinstance(schema, dict) or id(schema) in self._visited:
            return  # true or false; llguidance refuses other values
        self._visited.add(id(schema))
        schema.pop("$schema", None)
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        _refuse(schema, place)
        if schema is not self._root and "$id" in schema and self._has_references:
            raise InputError(f"{place}.$id: only the whole schema may have it; leave it out")
        _translate_nullable(schema, place)
        _translate_format(schema)
        self._visit_parts(schema, place)

    def _visit_parts(self, schema: dict[str, Any], place: str) -> None:
        for key in _MAPPINGS:
            if isinstance(parts := schema.get(key), dict):
                for name, part in parts.items():
                    self.visit(part, f"{place}.{key}.{_short(name)}")
        for key in _LISTS:
            if isinstance(parts := schema.get(key), list):
                for index, part in enumerate(parts):
                    self.visit(part, f"{place}.{key}[{index}]")
        for key in _SINGLE:
            self.visit(schema.get(key), f"{place}.{key}")
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            self.visit(self._target(reference), reference)

    def _target(self, reference: str) -> Any:
        """Return what a reference points at; None if there is nothing, which llguidance refuses."""
        target: Any = self._root
        steps = unquote(reference[2:]).split("/")
        for step in (step.replace("~1", "/").replace("~0", "~") for step in steps):
            if isinstance(target, dict):
                target = target.get(step)
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                return None
        return target


def _refuse(schema: Mapping[str, Any], place: str) -> None:
    """Raise InputError if llguidance would ignore a part of a schema, or read it in another way."""
    for key in _IGNORED:
        if key in schema:
            raise InputError(
                f"{place}.{key}={reprlib.repr(schema[key])}: not supported; leave it out"
            )
    if "prefixItems" in schema and (
        "additionalItems" in schema or isinstance(schema.get("items"), list)
    ):
        raise InputError(
            f"{place}.prefixItems: it cannot be combined with additionalItems or with a list of"
            " items, which are of older drafts; use items for the other elements"
        )
    patterns = schema.get("patternProperties")
    for pattern in [schema.get("pattern"), *(patterns if isinstance(patterns, dict) else ())]:
        if isinstance(pattern, str):
            try:
                check_regex(pattern)
            except InputError as error:
                raise InputError(f"{place}: {error}") from None
    for key in (*_BOUNDS, "const", "enum"):
        _check_value(schema.get(key), f"{place}.{key}")
    least, required = schema.get("minProperties"), schema.get("required")
    count = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least - count > 1:
        raise InputError(
            f"{place}.minProperties={least}: a key may come twice, so at most one more than the"
            f" {count} required keys can be counted; require the keys by name"
        )


def _short(name: str) -> str:
    """Return a key as a part of a place in a message: short, and valid Unicode."""
    shown = name if len(name) <= 40 else f"{name[:37]}..."
    return shown.encode(errors="replace").decode()


def _check_value(value: Any, place: str) -> None:
    """Raise InputError if a value cannot be written, or changes as a 64-bit float."""
    if isinstance(value, dict):
        for key, part in value.items():
            _check_value(part, f"{place}.{_short(key)}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            _check_value(part, f"{place}[{index}]")
    elif isinstance(value, str):
        if any((c < " " and c not in "\b\f\n\r\t") or c == "\x7f" for c in value):
            raise InputError(f"{place}={reprlib.repr(value)}: control characters are not supported")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{place}={value!r}: JSON has no such number")
    elif isinstance(value, int) and (abs(value) > 2**1000 or int(float(value)) != value):
        raise InputError(
            f"{place}={reprlib.repr(value)}: not supported, because a floating-point number of 64"
            " bits cannot hold it; use a smaller one, or a string"
        )


def _translate_nullable(schema: dict[str, Any], place: str) -> None:
    """Replace OpenAPI's ``nullable`` by the type null."""
    if "nullable" not in schema:
        return
    is_nullable = schema.pop("nullable")
    if is_nullable is False:
        return
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    values = schema.get("enum", [schema["const"]] if "const" in schema else [None])
    has_null = isinstance(values, list) and None in values
    if is_nullable is not True or not isinstance(types, list) or not has_null:
        raise InputError(
            f"{place}.nullable={is_nullable!r}: it needs a type, and null among the values of enum;"
            ' use anyOf with {"type": "null"}'
        )
    schema["type"] = types if "null" in types else [*types, "null"]


def _translate_format(schema: dict[str, Any]) -> None:
    """Replace formats that llguidance ignores or reads too widely."""
    name = schema.get("format")
    if not isinstance(name, str):
        return  # llguidance refuses it
    if name in _FORMATS:
        del schema["format"]
        pattern = f"^{_FORMATS[name]}$"
        if "pattern" not in schema:
            schema["pattern"] = pattern
        elif isinstance(schema.setdefault("allOf", []), list):
            schema["allOf"].append({"pattern": pattern})
    types = schema.get("type")
    listed = types if isinstance(types, list) else [types]
    types = {name for name in listed if isinstance(name, str)}
    if name in _INTEGERS and "integer" in types and not types & {"string", "number"}:
        del schema["format"]
        # The bounds of 64 bits are no floating-point numbers; their neighbours are.
        low, high = (
            bound if abs(bound) < 2**53 else int(math.nextafter(float(bound), 0))
            for bound in _INTEGERS[name]
        )
        schema["minimum"] = max(low, _number(schema.get("minimum"), low))
        schema["maximum"] = min(high, _number(schema.get("maximum"), high))


def _number(value: Any, default: int) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
