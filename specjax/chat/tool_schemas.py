"""The schemas of tools' arguments: what of them restricts values, and checks of their parts."""

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.errors import InputError

ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "$comment", "$schema")
)
"""The keywords of a schema that restrict no value."""


_OF_OBJECTS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
)


def without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without the descriptions and titles in it, which restrict no value.

    Examples:
        >>> from specjax.chat.tool_schemas import without_annotations
        >>> without_annotations({"properties": {"title": {"type": "string", "title": "Title"}}})
        {'properties': {'title': {'type': 'string'}}}
    """
    return {key: _plain(key, part) for key, part in schema.items() if key not in ANNOTATIONS}


def _plain(key: str, part: Any) -> Any:
    """Return the value of a keyword without annotations."""
    if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(
        part, Mapping
    ):
        return {name: _inner(schema) for name, schema in part.items()}
    if key in ("anyOf", "allOf", "oneOf", "prefixItems", "items") and isinstance(part, list):
        return [_inner(schema) for schema in part]
    if key in ("items", "additionalProperties", "not", "if", "then", "else", "contains"):
        return _inner(part)
    return part


def _inner(schema: Any) -> Any:
    return without_annotations(schema) if isinstance(schema, Mapping) else schema


def resolved(root: Mapping[str, Any], reference: Any) -> Any:
    """Return what a reference inside of a schema points to; None if there is nothing.

    Args:
        root: the whole schema.
        reference: the value of ``$ref``.

    Examples:
        >>> from specjax.chat.tool_schemas import resolved
        >>> resolved({"$defs": {"n": {"type": "integer"}}}, "#/$defs/n")
        {'type': 'integer'}
    """
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    value: Any = root
    for escaped in reference.split("/")[1:]:
        part = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return None
    return value


def checked_keys(schema: Mapping[str, Any], place: str) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return the properties of an object's schema, and the names of the required ones.

    Raises:
        InputError: they are not an object and a list of its keys, or the schema says more of an
            object than which keys it has.

    Examples:
        >>> from specjax.chat.tool_schemas import checked_keys
        >>> checked_keys({"properties": {"a": {}}, "required": ["a"]}, "schema")
        ({'a': {}}, ['a'])
    """
    if unsupported := sorted(set(schema) - _OF_OBJECTS):
        raise unsupported_error(f"{place}.{unsupported[0]}")
    if isinstance(schema.get("additionalProperties"), Mapping):
        raise unsupported_error(f"{place}.additionalProperties")
    properties, required = schema.get("properties"), schema.get("required")
    properties = {} if properties is None else properties
    required = [] if required is None else required
    if not isinstance(properties, Mapping):
        raise InputError(f"{place}.properties={properties!r}: give an object")
    if not isinstance(required, list | tuple) or not all(isinstance(it, str) for it in required):
        raise InputError(f"{place}.required={required!r}: give a list of names")
    if missing := [name for name in required if name not in properties]:
        raise InputError(f"{place}.required: {missing[0]!r} is not in properties; add it there")
    return properties, required


def checked_count(schema: Mapping[str, Any], name: str, place: str) -> int | None:
    """Return a bound of a schema, such as ``maxLength``; None if it has none.

    Raises:
        InputError: it is not a whole number of at least 0.

    Examples:
        >>> from specjax.chat.tool_schemas import checked_count
        >>> checked_count({"maxLength": 3}, "maxLength", "schema")
        3
    """
    value = schema.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100_000:
        raise InputError(f"{place}.{name}={value!r}: give a whole number from 0 to 100000")
    return value


def checked_reference(root: Mapping[str, Any], reference: Any, place: str) -> Any:
    """Return what a reference points to.

    Raises:
        InputError: there is nothing.

    Examples:
        >>> from specjax.chat.tool_schemas import checked_reference
        >>> checked_reference({"$defs": {"n": {"type": "integer"}}}, "#/$defs/n", "schema")
        {'type': 'integer'}
    """
    target = resolved(root, reference)
    if target is None:
        raise InputError(f"{place}.$ref={reference!r}: the schema has no such part; correct it")
    return target


def alternatives(
    root: Mapping[str, Any], schema: Mapping[str, Any], place: str
) -> list[Any] | None:
    """Return the schemas of which a value satisfies one; None if a schema is no union.

    A reference, ``nullable`` and a list of types are unions, too.

    Args:
        root: the whole schema.
        schema: a schema in it, without annotations.
        place: where it is, for errors.

    Raises:
        InputError: a reference points to nothing.

    Examples:
        >>> from specjax.chat.tool_schemas import alternatives
        >>> alternatives({}, {"type": ["string", "null"]}, "schema")
        [{'type': 'string'}, {'type': 'null'}]
        >>> alternatives({}, {"type": "string"}, "schema") is None
        True
    """
    if set(schema) == {"$ref"}:
        return [checked_reference(root, schema["$ref"], place)]
    for union in ("anyOf", "oneOf"):
        if set(schema) == {union} and isinstance(schema[union], list) and schema[union]:
            return schema[union]
    if set(schema) == {"allOf"} and isinstance(schema["allOf"], list):
        (*rest, part) = schema["allOf"] or [None]
        return None if rest or part is None else [part]
    if schema.get("nullable") is True:
        rest = {key: part for key, part in schema.items() if key != "nullable"}
        return [rest, {"type": "null"}]
    kinds = schema.get("type")
    if isinstance(kinds, list) and kinds:
        return [{**schema, "type": kind} for kind in kinds]
    return None


def unsupported_error(place: str) -> InputError:
    """Return the error for a part of a schema that a model's form of arguments cannot hold.

    Examples:
        >>> from specjax.chat.tool_schemas import unsupported_error
        >>> str(unsupported_error("schema.not"))
        'schema.not: not supported in arguments for this model; leave it out'
    """
    return InputError(f"{place}: not supported in arguments for this model; leave it out")
