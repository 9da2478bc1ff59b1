"""The grammar of arguments that are written with a tag ``<parameter=KEY>`` around each of them.

Qwen3.5 and Qwen3-Coder write them so. A string is written as it is, and any other value as JSON.
The type of a value is not written, so `specjax.chat.calls.typed_value` decides it when a call is
read. A schema under which it could decide otherwise than the model meant is refused.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from specjax.chat.calls import typed_value
from specjax.chat.parameter_types import ParameterTypes, Types
from specjax.chat.tool_schemas import (
    alternatives,
    checked_count,
    checked_keys,
    unsupported_error,
)
from specjax.errors import InputError
from specjax.grammars import JsonSchema
from specjax.grammars.structure import Node, all_of, constant, node_of_source

_END = "</parameter>"
_CALL_END = "</tool_call>"
_KEY = r"[^<>\n]{1,64}"

MAX_WAYS = 64
"""The number of ways to write one argument: the parts of unions, and the values of enumerations."""

_OF_STRINGS = frozenset(
    (
        *("pattern", "format", "not", "if", "then", "else", "allOf", "anyOf", "oneOf"),
        *("contentEncoding", "contentMediaType", "contentSchema", "$ref"),
    )
)
"""The keywords that restrict strings, and are not supported here."""


def any_tagged_arguments() -> Node:
    """Return the node of any arguments, which are strings.

    Examples:
        >>> from specjax.chat.tagged_arguments import any_tagged_arguments
        >>> any_tagged_arguments()["min"]
        0
    """
    argument = all_of(
        constant("<parameter="), {"regex": f"/{_KEY}/"}, constant(">\n"), _free_string()
    )
    return {"repeat": argument, "min": 0, "max": None}


def tagged_arguments(schema: Mapping[str, Any]) -> Node:
    """Return the node of the arguments of a schema, in its order.

    Args:
        schema: the JSON schema of the arguments, without annotations. Its ``properties``,
            ``required`` and definitions count. There are no other arguments than these.

    Raises:
        InputError: a part of the schema is not supported.

    Examples:
        >>> from specjax.chat.tagged_arguments import tagged_arguments
        >>> node = tagged_arguments({"properties": {"city": {"type": "string"}}})
        >>> node["all"][0]["repeat"]["all"][0]
        {'text': '<parameter=city>\\n'}
    """
    properties, required = checked_keys(schema, "schema")
    arguments = _Arguments(schema)
    return all_of(
        *(
            {"repeat": arguments.node(key, part), "min": int(key in required), "max": 1}
            for key, part in properties.items()
        )
    )


class _Arguments:
    """The writer of the arguments of one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._types = root, ParameterTypes(root)
        self._shared = {key: root[key] for key in ("$defs", "definitions") if key in root}

    def node(self, key: str, schema: Any) -> Node:
        """Return the node of an argument, with its tags."""
        place = f"schema.properties.{key}"
        if not re.fullmatch(_KEY, key):
            raise InputError(f"schema.properties: {key!r} cannot be written as a tag; rename it")
        types = self._types.of(key)
        if types is None:
            if schema is True or schema == {}:
                return all_of(constant(f"<parameter={key}>\n"), _free_string())
            raise InputError(f"{place}: its type is not stated; state 'type'")
        parts = self._parts(schema, place)
        if any(map(_is_free, parts)) and any(map(_is_restricted, parts)):
            # A text that could be another value is read as that value, whatever restricts it.
            raise unsupported_error(f"{place}, a union of a string and restricted values")
        ways = [way for part in parts for way in self._ways(part, types, place)]
        if not 0 < len(ways) <= MAX_WAYS:
            raise InputError(f"{place}: it has {len(ways)} ways; give 1 to {MAX_WAYS}")
        value = ways[0] if len(ways) == 1 else {"any": ways}
        return all_of(constant(f"<parameter={key}>\n"), value)

    def _parts(self, schema: Any, place: str) -> list[Mapping[str, Any]]:
        """Return the schemas without unions and references of which a value satisfies one."""
        parts: list[Mapping[str, Any]] = []
        remaining = [schema]
        for _ in range(4 * MAX_WAYS):
            if not remaining:
                return parts
            part = remaining.pop(0)
            if not isinstance(part, Mapping):
                raise InputError(f"{place}={part!r}: not supported; give an object")
            inner = alternatives(self._root, part, place)
            if inner is not None:
                remaining = [*inner, *remaining]
            elif part not in parts:
                parts.append(part)
        raise InputError(f"{place}: it has too many unions and references; use fewer")

    def _ways(self, content: Mapping[str, Any], types: Types, place: str) -> list[Node]:
        """Return the ways to write a value of a part, each with the tag behind it."""
        values, kind = _values(content), content.get("type")
        if isinstance(values, list) and values and kind in (None, "string"):
            strings = [value for value in values if isinstance(value, str)]
            rest = [value for value in values if not isinstance(value, str) and kind is None]
            ways = [_constant(value, types, place) for value in dict.fromkeys(strings)]
            return [*ways, *([self._json({"enum": rest})] if rest else [])]
        if kind == "string":
            return [_string(content, place)]
        own_types = self._types.of_schema(content)
        if own_types is None or "string" in own_types:
            raise unsupported_error(f"{place}, whose type is not clear,")
        return [self._json(content)]

    def _json(self, schema: Mapping[str, Any]) -> Node:
        shared = self._shared if '"$ref"' in json.dumps(dict(schema)) else {}
        source = JsonSchema({**schema, **shared}).source
        return all_of(node_of_source(source), constant(f"\n{_END}\n"))


def _values(content: Mapping[str, Any]) -> Any:
    """Return the values that a part enumerates; None if it does not."""
    return content.get("enum", [content["const"]] if "const" in content else None)


def _is_free(content: Mapping[str, Any]) -> bool:
    """Return whether a part allows strings that it does not enumerate."""
    return content.get("type") == "string" and _values(content) is None


def _is_restricted(content: Mapping[str, Any]) -> bool:
    """Return whether a part restricts values that are no strings."""
    values = _values(content)
    if isinstance(values, list):
        return not all(isinstance(value, str) for value in values)
    return content.get("type") != "string" and bool(set(content) - {"type"})


def _string(schema: Mapping[str, Any], place: str) -> Node:
    """Return the node of a string."""
    least = checked_count(schema, "minLength", place) or 0
    most = checked_count(schema, "maxLength", place)
    if unsupported := sorted(set(schema) & _OF_STRINGS):
        raise unsupported_error(f"{place}.{unsupported[0]}")
    if not least and most is None:
        return _free_string()
    bounds = f"{{{least},{'' if most is None else most}}}"
    terminal = f"(/(?s:.){bounds}/ & ~/(?s:.*)(<\\/parameter>|<\\/tool_call>)(?s:.*)/)"
    return all_of({"regex": terminal}, constant(f"\n{_END}\n"))


def _free_string() -> Node:
    """Return any string, with the line break and the tag behind it."""
    # It ends at the first tag, wherever that is, because a reader ends it there, too.
    return all_of({"free": {"excludes": [_CALL_END]}}, constant(_END), constant("\n"))


def _constant(value: str, types: Types, place: str) -> Node:
    if _END in value or _CALL_END in value:
        raise InputError(f"{place}: {value!r} would end the call; rename it")
    if typed_value(value, types) != value:
        raise InputError(f"{place}: {value!r} would be read as another type; rename it")
    return all_of(constant(value), constant(f"\n{_END}\n"))
