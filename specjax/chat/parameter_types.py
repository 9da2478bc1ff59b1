"""The types that the schema of a tool allows for its parameters."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from specjax.chat.tool_schemas import resolved

MAX_STEPS = 500
"""The number of schemas that are read for one parameter. References can repeat without an end."""

MAX_NESTED = 30
"""The number of schemas that may refer to one another in a row."""

_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)

Types = frozenset[str] | None
"""Names of JSON Schema's types; None if any type is allowed."""


class ParameterTypes:
    """A reader of the types of a tool's parameters.

    It follows ``$ref`` inside of the schema, ``allOf``, ``anyOf``, ``oneOf``, ``enum`` and
    ``const``. What it does not understand allows any type.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """Take the schema of a tool's arguments."""
        self._root = parameters
        self._steps = self._depth = 0

    def of(self, name: str) -> Types:
        """Return the types that a parameter may have."""
        self._steps = self._depth = 0
        return self._with_property(self._root, name)

    def of_schema(self, schema: Any) -> Types:
        """Return the types that a value of a schema may have, which refers to this one."""
        self._steps = self._depth = 0
        return self._types(schema)

    def _with_property(self, schema: Any, name: str) -> Types:
        """Return the types of a property of the values of a schema."""
        if not self._is_readable(schema):
            return None
        properties = schema.get("properties")
        types = None
        if isinstance(properties, Mapping) and name in properties:
            types = self._types(properties[name])
        return _both(types, self._combined(schema, lambda part: self._with_property(part, name)))

    def _types(self, schema: Any) -> Types:
        """Return the types of the values of a schema."""
        if not self._is_readable(schema):
            return None
        declared = schema.get("type")
        types: Types = None
        if isinstance(declared, str):
            types = _expanded([declared])
        elif isinstance(declared, list):
            types = _expanded(name for name in declared if isinstance(name, str))
        if "const" in schema:
            types = _both(types, _expanded([_kind(schema["const"])]))
        if isinstance(schema.get("enum"), list):
            types = _both(types, _expanded(map(_kind, schema["enum"])))
        types = _both(types, self._combined(schema, self._types))
        return types | {"null"} if types is not None and schema.get("nullable") is True else types

    def _combined(self, schema: Mapping[str, Any], types_of: Callable[[Any], Types]) -> Types:
        """Return what the schemas that a schema refers to say together."""
        if self._depth == MAX_NESTED:
            return None
        self._depth += 1
        types: Types = None
        if "$ref" in schema:
            types = types_of(resolved(self._root, schema["$ref"]))
        for part in _list(schema.get("allOf")):
            types = _both(types, types_of(part))
        for union in ("anyOf", "oneOf"):
            choices = [types_of(choice) for choice in _list(schema.get(union))]
            if choices and all(choice is not None for choice in choices):
                types = _both(types, frozenset().union(*(choice or () for choice in choices)))
        self._depth -= 1
        return types

    def _is_readable(self, schema: Any) -> bool:
        self._steps += 1
        return isinstance(schema, Mapping) and self._steps <= MAX_STEPS


def _both(first: Types, second: Types) -> Types:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _expanded(names: Iterable[str]) -> frozenset[str]:
    """Return types with those that they contain: each integer is a number."""
    types = frozenset(names)
    return types | {"integer"} if "number" in types else types


def _kind(value: Any) -> str:
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
