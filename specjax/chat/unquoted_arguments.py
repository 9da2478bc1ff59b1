"""The grammar of arguments in Gemma 4's notation: JSON with bare keys and its own quotes.

An example is ``{city:<|"|>Oslo<|"|>,days:3}``. Keys are sorted, as the chat template writes them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.chat.tool_schemas import (
    alternatives,
    checked_count,
    checked_keys,
    unsupported_error,
)
from specjax.errors import InputError
from specjax.grammars import JsonSchema
from specjax.grammars.structure import Node, all_of, constant, node_of_source

_QUOTE = '<|"|>'
_CALL_END = "<tool_call|>"
"""What a string cannot hold, because it would end the call."""

_KEY = r"[A-Za-z0-9_.\-]{1,64}"
_MAX_NESTED = 16
_MAX_KEYS = 40
_MAX_SCHEMAS = 500
"""The number of schemas that are read for one tool. References can repeat without an end."""
_SCALARS = ("integer", "number", "boolean", "null")


def unquoted_arguments(schema: Mapping[str, Any] | None) -> Node:
    """Return the node of the arguments of a schema; None: of any arguments, of two levels at most.

    The schema is without annotations.

    Raises:
        InputError: a part of the schema is not supported.

    Examples:
        >>> from specjax.chat.unquoted_arguments import unquoted_arguments
        >>> unquoted_arguments({"properties": {}})
        {'text': '{}'}
    """
    if schema is None:
        return _any_object()
    return _Values(schema).object(schema, "schema", 0)


class _Values:
    """The writer of the values of one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._steps = root, 0

    def node(self, schema: Any, place: str, depth: int) -> Node:
        """Return the node of a value."""
        self._steps += 1
        if depth > _MAX_NESTED or self._steps > _MAX_SCHEMAS:
            raise InputError(f"{place}: it has too many levels, unions or references; use fewer")
        if schema is not True and not isinstance(schema, Mapping):
            raise InputError(f"{place}={schema!r}: not supported; give an object")
        content = {} if schema is True else schema
        if not content:
            return _any_value()
        if (parts := alternatives(self._root, content, place)) is not None:
            return {"any": [self.node(part, place, depth + 1) for part in parts]}
        values = content.get("enum", [content["const"]] if "const" in content else None)
        if isinstance(values, list) and values:
            return {"any": [_constant(value, place) for value in values]}
        kind = content.get("type", "object" if "properties" in content else None)
        if kind == "string":
            return _string(content, place)
        if kind == "array":
            return self._array(content, place, depth)
        if kind == "object":
            return self.object(content, place, depth)
        if kind in _SCALARS:
            return _json(content)
        raise InputError(f"{place}.type={kind!r}: not supported for this model; state one type")

    def object(self, schema: Mapping[str, Any], place: str, depth: int) -> Node:
        """Return the node of an object with the declared keys."""
        properties, required = checked_keys(schema, place)
        if not properties and depth and schema.get("additionalProperties") is not False:
            return _any_object()
        if len(properties) > _MAX_KEYS:
            raise InputError(f"{place}.properties: there are {len(properties)}; use {_MAX_KEYS}")
        pairs: list[Node] = []
        for key in sorted(properties):
            if not re.fullmatch(_KEY, key):
                raise InputError(f"{place}.properties: {key!r} needs quotes; rename it")
            value = self.node(properties[key], f"{place}.properties.{key}", depth + 1)
            pairs.append(all_of(constant(f"{key}:"), value))
        is_required = [key in required for key in sorted(properties)]
        return (
            all_of(constant("{"), _listed(pairs, is_required), constant("}"))
            if pairs
            else constant("{}")
        )

    def _array(self, schema: Mapping[str, Any], place: str, depth: int) -> Node:
        if unsupported := sorted(set(schema) - {"type", "items", "minItems", "maxItems"}):
            raise InputError(
                f"{place}.{unsupported[0]}: not supported for this model; leave it out"
            )
        item = self.node(schema.get("items", True), f"{place}.items", depth + 1)
        least = checked_count(schema, "minItems", place) or 0
        most = checked_count(schema, "maxItems", place)
        if most == 0:
            return constant("[]")
        more = {
            "repeat": all_of(constant(","), item),
            "min": max(0, least - 1),
            "max": None if most is None else max(most, least) - 1,
        }
        some = all_of(item, more)
        items = some if least else {"repeat": some, "min": 0, "max": 1}
        return all_of(constant("["), items, constant("]"))


def _listed(pairs: Sequence[Node], is_required: Sequence[bool]) -> Node:
    """Return pairs with commas between those that are there."""

    def rest(start: int) -> list[Node]:
        return [
            {"repeat": all_of(constant(","), pair), "min": int(needed), "max": 1}
            for pair, needed in zip(pairs[start:], is_required[start:], strict=True)
        ]

    ways: list[Node] = []
    for index, pair in enumerate(pairs):
        ways.append(all_of(pair, *rest(index + 1)))
        if is_required[index]:
            return {"any": ways}
    return {"any": [*ways, constant("")]}


def _string(schema: Mapping[str, Any], place: str) -> Node:
    least = checked_count(schema, "minLength", place) or 0
    most = checked_count(schema, "maxLength", place)
    if unsupported := sorted(set(schema) - {"type", "minLength", "maxLength"}):
        raise unsupported_error(f"{place}.{unsupported[0]}")
    if not least and most is None:
        return all_of(constant(_QUOTE), {"free": {"excludes": [_CALL_END]}}, constant(_QUOTE))
    bounds = f"{{{least},{'' if most is None else most}}}"
    excluded = '(<\\|"\\|>|<tool_call\\|>)'
    terminal = f"(/(?s:.){bounds}/ & ~/(?s:.*){excluded}(?s:.*)/)"
    return all_of(constant(_QUOTE), {"regex": terminal}, constant(_QUOTE))


def _constant(value: Any, place: str) -> Node:
    if isinstance(value, str):
        if _QUOTE in value or _CALL_END in value:
            raise InputError(f"{place}: {value!r} would end the string; rename it")
        return constant(f"{_QUOTE}{value}{_QUOTE}")
    if isinstance(value, list | Mapping):
        raise InputError(
            f"{place}: {value!r}: only strings, numbers, booleans and null may be values"
        )
    return _json({"enum": [value]})


def _any_value(depth: int = 2) -> Node:
    """Return any value with at most so many levels of arrays and objects."""
    scalars = [_string({}, ""), _json({"type": ["number", "boolean", "null"]})]
    if not depth:
        return {"any": scalars}
    items = _any_number_of(_any_value(depth - 1))
    return {"any": [*scalars, all_of(constant("["), items, constant("]")), _any_object(depth)]}


def _any_object(depth: int = 2) -> Node:
    pair = all_of({"regex": f"/{_KEY}/"}, constant(":"), _any_value(depth - 1))
    return all_of(constant("{"), _any_number_of(pair), constant("}"))


def _any_number_of(part: Node) -> Node:
    """Return a part any number of times, with commas between."""
    more: Node = {"repeat": all_of(constant(","), part), "min": 0, "max": None}
    return {"repeat": all_of(part, more), "min": 0, "max": 1}


def _json(schema: Mapping[str, Any]) -> Node:
    return node_of_source(JsonSchema(schema).source)
