"""JSON schemas in the manner of JSONSchemaBench, and the table of which of them are supported.

``python -m tests.grammars.schemas`` prints the table of docs/results/json-schemas.md.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import specjax
from specjax.errors import InputError
from specjax.grammars import CompiledGrammar, GrammarCompiler

DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object without other properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
    }


STRING, INTEGER = {"type": "string", "maxLength": 8}, {"type": "integer"}
TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": closed(
            "value",
            value=INTEGER,
            children={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
        )
    },
}

SCHEMAS: dict[str, Any] = {
    "true": True,
    "false": False,
    "type": INTEGER,
    "type: a list": {"type": ["integer", "null", "boolean"]},
    "type: any": {"type": "any"},
    "enum": {"enum": ["a", 'b"\n', 1, 2.5, None, True, [1, "x"], {"k": [{}]}]},
    "const": {"const": {"a": [1, None, "é"]}},
    "const: an integer beyond 2^53": {"const": 2**53 + 1},
    "const: a control character": {"const": "a\u0001"},
    "minimum, maximum": {"type": "integer", "minimum": -3, "maximum": 112},
    "exclusiveMinimum, exclusiveMaximum": {
        "type": "number",
        "exclusiveMinimum": 0.5,
        "exclusiveMaximum": 2,
    },
    "exclusiveMinimum: true (draft 4)": {
        "type": "integer",
        "minimum": 3,
        "maximum": 8,
        "exclusiveMinimum": True,
    },
    "minimum: beyond 2^53": {"type": "integer", "minimum": 2**53 + 1},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    "multipleOf: a fraction": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 99},
    "minLength, maxLength": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}|[0-9]{2}$", "maxLength": 9},
    "pattern: classes": {"type": "string", "pattern": r"^\w+-\d\s[^\s\d]$", "maxLength": 9},
    "pattern: look-around": {"type": "string", "pattern": "^(?!a)"},
    "pattern: word boundaries": {"type": "string", "pattern": r"\ba"},
    "pattern: an operator in a class": {"type": "string", "pattern": "^[a&&b]$"},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^n_": INTEGER, "^s_": STRING},
        "additionalProperties": False,
    },
    "patternProperties: overlapping": {"patternProperties": {"^a": INTEGER, "b$": STRING}},
    "properties, required": closed("b", b=STRING, a=INTEGER),
    "required: not in properties": {"type": "object", "required": ["x"]},
    "additionalProperties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "boolean"},
    },
    "additionalProperties: none given": {"properties": {"a": INTEGER}, "type": "object"},
    "minProperties: 1": {
        "type": "object",
        "properties": {"a": INTEGER, "b": INTEGER},
        "additionalProperties": False,
        "minProperties": 1,
    },
    "minProperties: 2": {"type": "object", "additionalProperties": INTEGER, "minProperties": 2},
    "maxProperties": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2},
    "maxProperties: with optional properties": {
        "type": "object",
        "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER},
        "maxProperties": 2,
    },
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies (draft 7)": {
        "$schema": DRAFT_7,
        "type": "object",
        "dependencies": {"a": ["b"]},
    },
    "unevaluatedProperties": closed(a=INTEGER) | {"unevaluatedProperties": False},
    "unevaluatedProperties, in draft 7": {"$schema": DRAFT_7, "unevaluatedProperties": False},
    "items": {"type": "array", "items": {"type": "boolean"}},
    "minItems, maxItems": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3},
    "prefixItems": {
        "type": "array",
        "prefixItems": [INTEGER, STRING],
        "items": False,
        "minItems": 1,
    },
    "items: a list (draft 7)": {
        "$schema": DRAFT_7,
        "type": "array",
        "items": [INTEGER, STRING],
        "additionalItems": {"type": "null"},
    },
    "prefixItems with additionalItems": {"prefixItems": [INTEGER], "additionalItems": False},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "uniqueItems: false": {"type": "array", "items": INTEGER, "uniqueItems": False},
    "contains": {"type": "array", "contains": INTEGER},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "anyOf": {"anyOf": [closed(a=INTEGER), closed(b=STRING), {"type": "null"}]},
    "anyOf: with keywords beside it": {
        "type": "object",
        "properties": {"a": INTEGER, "b": INTEGER},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "oneOf: apart by a type": {"oneOf": [INTEGER, STRING]},
    "oneOf: apart by a constant": {
        "oneOf": [closed(kind={"const": "a"}, x=INTEGER), closed(kind={"const": "b"}, y=STRING)]
    },
    "oneOf: overlapping": {"oneOf": [INTEGER, {"type": "number"}]},
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}},
            {"properties": {"a": {"maximum": 20}}, "required": ["a"]},
        ],
        "additionalProperties": False,
        "properties": {"a": True},
    },
    "allOf: in contradiction": {"allOf": [INTEGER, STRING]},
    "not": {"not": {"type": "string"}},
    "if, then, else": {"if": {"type": "string"}, "then": {"maxLength": 3}},
    "$ref, $defs": {
        "type": "array",
        "items": {"$ref": "#/$defs/pair"},
        "maxItems": 2,
        "$defs": {"pair": closed(x=INTEGER, y=INTEGER)},
    },
    "$ref: recursive": TREE,
    "$ref: with keywords beside it": {
        "$ref": "#/definitions/n",
        "maximum": 9,
        "definitions": {"n": {"type": "integer", "minimum": 0}},
    },
    "$ref: only to itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "$ref: to the network": {"$ref": "https://example.com/schema.json"},
    "$ref: by $anchor": {"$ref": "#a", "$defs": {"a": {"$anchor": "a", "type": "null"}}},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$id: within a schema with references": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$id": "b", "$ref": "#/$defs/c"}, "c": INTEGER},
    },
    "nullable (OpenAPI)": closed(a={"type": "string", "enum": ["x", None], "nullable": True}),
    "nullable: without a type": {"allOf": [INTEGER], "nullable": True},
    "nullable: no null in enum": {"type": "string", "enum": ["x"], "nullable": True},
    "divisibleBy (draft 3)": {"type": "integer", "divisibleBy": 2},
    "formatMinimum (ajv)": {"type": "string", "format": "date", "formatMinimum": "2020-01-01"},
    **{
        f"format: {name}": {"type": "string", "format": name}
        for name in (
            *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6"),
            *("uuid", "uri", "uri-reference", "iri", "json-pointer", "regex", "int64"),
        )
    },
    "format and pattern": {"type": "string", "format": "date", "pattern": "^20"},
    **{
        f"format: {name} (OpenAPI)": {"type": "integer", "format": name}
        for name in ("int32", "uint64")
    },
    "format: of a number": {"type": "number", "format": "double"},
    "title, description, default, examples": {
        **{"title": "t", "description": "d", "default": 3, "examples": [1], "$comment": "c"},
        **{"deprecated": True, "readOnly": True, "x-order": 1, "type": "integer"},
    },
    "nesting": closed(
        id={"type": "string", "format": "uuid"},
        tags={"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        owner={"anyOf": [closed(name=STRING, age=INTEGER), {"type": "null"}]},
        point={"type": "array", "prefixItems": [INTEGER, INTEGER], "minItems": 2, "maxItems": 2},
    ),
}


def byte_compiler() -> GrammarCompiler:
    """Return a compiler for a vocabulary of single bytes, whose token 255 ends a text."""
    return GrammarCompiler.of_tokens([*(bytes([b]) for b in range(255)), b""], end_id=255)


def verdict(schema: Any, compile_grammar: Callable[[Any], CompiledGrammar]) -> str:
    """Return "" if a schema is supported, and why it is refused if not."""
    try:
        compile_grammar(specjax.JsonSchema(schema))
    except InputError as error:
        return re.sub(r"^grammar=\w+\(.*?'\): ", "", str(error))
    return ""


def table() -> str:
    """Return the table of all schemas."""
    compiler = byte_compiler()
    lines = ["| schema | example | |", "|---|---|---|"]
    for name, schema in SCHEMAS.items():
        reason = verdict(schema, compiler.compile)
        example = json.dumps(schema, ensure_ascii=True)
        example = example if len(example) <= 120 else f"{example[:117]}..."
        cells = (name, f"`{example}`", f"refused: {reason}" if reason else "supported")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
