"""The grammar of arguments that are written with a tag ``<parameter=KEY>`` around each of them.

Qwen3.5 and Qwen3-Coder write them so. A string is written as it is, and any other value as JSON.
What is read as which type is decided by `specjax.chat.parameter_types`.
"""

import re
from collections.abc import Mapping
from typing import Any

from specjax.chat.parameter_types import ANNOTATIONS, resolved
from specjax.errors import InputError
from specjax.grammars import JsonSchema
from specjax.grammars.structure import Node, node_of_source

_END = "</parameter>"

_CALL_END = "</tool_call>"
"""What a string cannot hold, because it would end the call."""

_KEY = r"[^<>\n]{1,64}"

_MAX_NESTED = 16
"""The number of unions and references within one another in the schema of an argument."""


def any_tagged_arguments() -> Node:
    """Return the node of any arguments, which are strings.

    Examples:
        >>> from specjax.chat.tagged_arguments import any_tagged_arguments
        >>> any_tagged_arguments()["min"]
        0
    """
    argument = _all(_text("<parameter="), {"regex": f"/{_KEY}/"}, _text(">\n"), *_free_string())
    return {"repeat": argument, "min": 0, "max": None}


def tagged_arguments(schema: Mapping[str, Any]) -> Node:
    """Return the node of the arguments of a schema, in its order.

    Args:
        schema: the JSON schema of the arguments. Its ``properties``, ``required`` and definitions
            count. There are no other arguments than these.

    Raises:
        InputError: a part of the schema is not supported.

    Examples:
        >>> from specjax.chat.tagged_arguments import tagged_arguments
        >>> node = tagged_arguments({"properties": {"city": {"type": "string"}}})
        >>> node["all"][0]["repeat"]["all"][0]
        {'text': '<parameter=city>\\n'}
    """
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        raise InputError("schema: properties must be an object, and required a list")
    if unsupported := sorted(set(schema) - _OF_ARGUMENTS - ANNOTATIONS):
        raise InputError(
            f"schema.{unsupported[0]}: not supported for arguments in tags; leave it out"
        )
    if extra := [name for name in required if name not in properties]:
        raise InputError(f"schema.required: {extra[0]!r} is not in properties; add it there")
    arguments = _Arguments(schema)
    return _all(
        *(
            {"repeat": arguments.node(key, part), "min": int(key in required), "max": 1}
            for key, part in properties.items()
        )
    )


_OF_ARGUMENTS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
)


class _Arguments:
    """The writer of the arguments of one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._shared = {key: root[key] for key in ("$defs", "definitions") if key in root}

    def node(self, key: str, schema: Any) -> Node:
        """Return the node of an argument, with its tags."""
        if not re.fullmatch(_KEY, key):
            raise InputError(f"schema.properties: {key!r} cannot be written as a tag; rename it")
        ways = self._ways(schema, f"schema.properties.{key}", 0)
        value = ways[0] if len(ways) == 1 else {"any": ways}
        return _all(_text(f"<parameter={key}>\n"), value)

    def _ways(self, schema: Any, place: str, depth: int) -> list[Node]:
        """Return the ways to write a value, each with the tag behind it."""
        if depth > _MAX_NESTED:
            raise InputError(f"{place}: it is nested too deeply; use fewer levels")
        if schema is True or (isinstance(schema, Mapping) and not set(schema) - ANNOTATIONS):
            return [_all(*_free_string())]  # what may be anything is read as a string
        if not isinstance(schema, Mapping):
            raise InputError(f"{place}={schema!r}: not supported; give an object")
        content = {key: part for key, part in schema.items() if key not in ANNOTATIONS}
        if set(content) == {"$ref"}:
            return self._ways(resolved(self._root, content["$ref"]), place, depth + 1)
        for union in ("anyOf", "oneOf"):
            if set(content) == {union} and isinstance(content[union], list) and content[union]:
                return [
                    way for part in content[union] for way in self._ways(part, place, depth + 1)
                ]
        if content.pop("nullable", False) is True:
            return [*self._ways(content, place, depth + 1), _json({"type": "null"})]
        kinds = content.get("type")
        if isinstance(kinds, list) and "string" in kinds and len(kinds) > 1:
            parts = [{**content, "type": kind} for kind in kinds]
            return [way for part in parts for way in self._ways(part, place, depth + 1)]
        values = content.get("enum", [content["const"]] if "const" in content else None)
        if isinstance(values, list) and values and kinds in (None, "string"):
            strings = [value for value in values if isinstance(value, str)]
            rest = [value for value in values if not isinstance(value, str) and kinds is None]
            ways = [_all(_text(_checked(value, place)), _text(f"\n{_END}\n")) for value in strings]
            return [*ways, *([_json({"enum": rest})] if rest else [])]
        if kinds in ("string", ["string"]):
            return [_string(content, place)]
        return [_json({**content, **self._shared})]


def _string(schema: Mapping[str, Any], place: str) -> Node:
    """Return the node of a string."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if unsupported := sorted(set(schema) - {"type", "minLength", "maxLength"}):
        raise InputError(
            f"{place}.{unsupported[0]}: not supported for a string in tags; leave it out"
        )
    if not least and most is None:
        return _all(*_free_string())
    bounds = f"{{{int(least)},{'' if most is None else int(most)}}}"
    excluded = f"(<\\/parameter>|{_CALL_END.replace('/', chr(92) + '/')})"
    terminal = f"(/(?s:.){bounds}/ & ~/(?s:.*){excluded}(?s:.*)/)"
    return _all({"regex": terminal}, _text(f"\n{_END}\n"))


def _free_string() -> tuple[Node, Node]:
    """Return any string, with the line break and the tag behind it."""
    return {"free": {"excludes": [_CALL_END]}}, _text(f"{_END}\n")


def _json(schema: Mapping[str, Any]) -> Node:
    return _all(node_of_source(JsonSchema(schema).source), _text(f"\n{_END}\n"))


def _checked(value: str, place: str) -> str:
    if _END in value or _CALL_END in value:
        raise InputError(f"{place}: {value!r} would end the call; rename it")
    return value


def _all(*nodes: Node) -> Node:
    return {"all": list(nodes)}


def _text(text: str) -> Node:
    return {"text": text}
