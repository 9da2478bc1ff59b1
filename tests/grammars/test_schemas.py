"""JSON schemas: every text of the supported ones is valid, and nothing is ignored silently."""

import datetime
import ipaddress
import json
import re
import uuid
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import numpy as np
import pytest

import specjax
from specjax.errors import InputError
from specjax.grammars import GrammarCompiler
from specjax.grammars.schema import _INTEGERS, translated_schema
from tests.grammars.schemas import DRAFT_7, SCHEMAS, byte_compiler, table, verdict
from tests.grammars.test_matcher import flags

PAGE = Path("docs/results/json-schemas.md")
CHECKER = jsonschema.FormatChecker()
FORMATS: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": lambda text: datetime.time.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text)),
    "date-time": lambda text: datetime.datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text)),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": lambda text: urlsplit(text).scheme[0],
    "email": lambda text: text.split("@")[1][0],
}
for _format, _read in FORMATS.items():
    CHECKER.checks(_format, raises=(ValueError, IndexError))(
        lambda value, read=_read: not isinstance(value, str) or read(value) is not None
    )
for _format, (_low, _high) in _INTEGERS.items():
    CHECKER.checks(_format)(
        lambda value, low=_low, high=_high: isinstance(value, str) or low <= value <= high
    )


@cache
def compiler() -> GrammarCompiler:
    return byte_compiler()


def supported() -> list[str]:
    return [name for name in SCHEMAS if not verdict(SCHEMAS[name], compiler().compile)]


def exact_number(text: str) -> Decimal | float:
    """Return a number exactly; infinity if its exponent has more digits than a Decimal takes."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def with_null(schema: dict[str, Any]) -> dict[str, Any]:
    is_nullable = schema.pop("nullable", False)
    return schema | {"type": [schema["type"], "null"]} if is_nullable else schema


def is_valid(schema: Any, text: str) -> bool:
    """Return whether jsonschema accepts a text. OpenAPI's ``nullable`` is part of the types."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal, object_hook=with_null)
    kind = jsonschema.validators.validator_for(exact, jsonschema.Draft202012Validator)
    if isinstance(exact, dict) and exact.get("exclusiveMinimum") is True:
        kind = jsonschema.Draft4Validator
    value = json.loads(text, parse_float=exact_number)
    return kind(exact, format_checker=CHECKER).is_valid(value)


def random_text(grammar: Any, rng: np.random.Generator, length: int = 400) -> str | None:
    """Return a text of random legal bytes; None if it did not end."""
    matcher, text = compiler().compile(grammar).matcher((255,)), bytearray()
    closing = np.zeros(255)
    closing[list(b'"}],:')] = 4
    closing[list(b" \n\r\t")] = -0.7
    closing[list(b"0123456789")] = 1
    closing[list(b"eE")] = -0.9
    for _ in range(length):
        legal = flags(matcher.mask(), 256)
        if legal[255] and (not legal[:255].any() or rng.random() < 0.4):
            return text.decode()
        weights = legal[:255] * (1 + closing + rng.random())
        byte = int(rng.choice(255, p=weights / weights.sum()))
        matcher.append([byte])
        text.append(byte)
    return None


@pytest.mark.parametrize("name", supported())
@pytest.mark.parametrize("whitespace", [pytest.param(True, marks=pytest.mark.full), False])
def test_every_random_text_is_valid(name, whitespace) -> None:
    schema, rng = SCHEMAS[name], np.random.default_rng(0)
    grammar = specjax.JsonSchema(schema, whitespace=whitespace)
    texts = [random_text(grammar, rng) for _ in range(12)]
    whole = [text for text in texts if text is not None]
    assert whole, texts
    for text in whole:
        assert is_valid(schema, text), text


@pytest.mark.thorough
def test_every_text_of_a_model_is_valid() -> None:
    """Generate with the embedded model for all supported schemas at once."""
    generate, names = specjax.load("embedded"), supported()
    answers = generate(
        ["answer = "] * len(names),
        grammar=[specjax.JsonSchema(SCHEMAS[name], whitespace=False) for name in names],
        max_new_tokens=64,
        temperature=1.0,
        seed=4,
    )
    whole = [(n, a.text) for n, a in zip(names, answers, strict=True) if a.grammar_completed]
    assert len(whole) > len(names) / 2
    for name, text in whole:
        assert is_valid(SCHEMAS[name], text), (name, text)


def test_the_table_of_schemas_is_that_of_the_page() -> None:
    """``python -m tests.grammars.schemas`` prints the table."""
    assert table() in PAGE.read_text()


def accepted(schema: Any, text: str) -> bool:
    matcher = compiler().compile(specjax.JsonSchema(schema, whitespace=False)).matcher((255,))
    for byte in text.encode():
        if not flags(matcher.mask(), 256)[byte]:
            return False
        matcher.append([byte])
    return matcher.is_complete


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "string", "format": "date"}, ["2024-02-29", "2000-02-29"], ["2023-02-29"]),
        ({"type": "string", "format": "date"}, ["1996-12-31"], ["1900-02-29", "0000-01-01"]),
        ({"type": "string", "format": "time"}, ["23:59:59Z", "00:00:00.5+01:30"], ["24:00:00Z"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-29T00:00:00Z"], ["2024-02-30T0"]),
        ({"type": "string", "nullable": False}, ["a"], [None]),
        ({"type": ["string", "null"], "nullable": True}, ["a", None], [1]),
        ({"type": "string", "nullable": True}, ["a", None], [1]),
        ({"type": "integer", "format": "int8"}, [-128, 127], [-129, 128]),
        ({"type": "integer", "format": "uint16", "minimum": 3}, [3, 65535], [2, 65536]),
        ({"type": "integer", "format": "int64"}, [-(2**63) + 1024, 2**63 - 1024], [2**63]),
        ({"$ref": "#/a~1b", "a/b": {"type": "integer", "nullable": True}}, [1, None], ["x"]),
        ({"$schema": DRAFT_7, "items": [{"type": "null"}], "type": "array"}, [[None]], [[1]]),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}, "nullable": True}},
            [{"a": 1, "nullable": "x"}, {"b": 1}],
            [{"a": "x"}],
        ),
    ],
)
def test_what_llguidance_ignores_is_translated(schema, inside, outside) -> None:
    for value in inside:
        assert accepted(schema, json.dumps(value, separators=(",", ":"))), value
    for value in outside:
        assert not accepted(schema, json.dumps(value, separators=(",", ":"))), value


def test_a_key_cannot_escape_its_schema_by_another_spelling() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b\n": {"type": "null"}}}
    for text in (r'{"\u0061":"x"}', r'{"b\u000a":1}', r'{"c\u0061":1}'):
        assert not accepted(schema, text)
    assert accepted(schema, '{"a":1,"b\\n":null,"c":"x"}')


def test_a_translated_schema_is_translated_into_itself() -> None:
    for name, schema in SCHEMAS.items():
        if isinstance(schema, dict):
            try:
                once = translated_schema(json.loads(json.dumps(schema)))
            except InputError:
                continue
            assert translated_schema(json.loads(json.dumps(once))) == once, name


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: Any = {"type": "null"}
    for _ in range(600):
        schema = {"items": schema}
    with pytest.raises(InputError, match="nested too deeply"):
        specjax.JsonSchema(schema)
