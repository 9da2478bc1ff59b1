"""Random regular expressions and JSON schemas, twelve kinds of them, each made from a seed."""

import json
import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema

import specjax
from specjax.grammars import Grammar

Schema = dict[str, Any]
_WORDS = ("name", "age", "city", "a", "b", "id", "tags", "x y", "größe", "is_ok", "value", "kind")


def _literal(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase + "_ ", k=rng.randint(1, 6)))


def _class(rng: random.Random) -> str:
    return rng.choice(
        ["[a-f]", "[0-9]", r"\d", "[a-zA-Z0-9_]", "[A-Z]", "[xyz_]", "[^a-m]", r"\s", "[ -/]"]
    )


def _repeated(rng: random.Random, part: str) -> str:
    low = rng.randint(0, 3)
    return part + rng.choice(
        ["*", "+", "?", f"{{{low},{low + rng.randint(1, 5)}}}", f"{{{low + 1}}}"]
    )


def alternation(rng: random.Random) -> str:
    """Return several literals, some of which begin alike."""
    words = [_literal(rng) for _ in range(rng.randint(2, 5))]
    words += [words[0] + _literal(rng)]
    return f"({'|'.join(words)}){rng.choice(['', '{1,4}', '+'])}"


def repetition(rng: random.Random) -> str:
    """Return repeated classes of characters."""
    return "".join(_repeated(rng, _class(rng)) for _ in range(rng.randint(1, 4))) + _literal(rng)


def groups(rng: random.Random) -> str:
    """Return groups in groups, with alternatives and repetition."""

    def part(depth: int) -> str:
        if depth == 0:
            return rng.choice([_literal, _class])(rng)
        inside = [part(depth - 1) for _ in range(rng.randint(1, 3))]
        return _repeated(rng, f"({rng.choice(['', '|']).join(inside)})")

    return part(rng.randint(1, 3)) + _literal(rng)


def wide(rng: random.Random) -> str:
    """Return patterns that allow nearly every token, so that free drafts are legal."""
    return rng.choice(
        [
            "(?s:.)*",
            rf"[^{rng.choice('aeiou{')}]{{{rng.randint(1, 9)},{rng.randint(10, 60)}}}",
            rf"(?s:.){{{rng.randint(3, 30)}}}{_literal(rng)}",
            rf"([^\n]{{1,{rng.randint(2, 20)}}}\n)+",
            r"[^\"]+\"[^\"]+\"",
        ]
    )


def unicode(rng: random.Random) -> str:
    """Return characters of several bytes, which many tokenizers cut."""
    scripts = ["[α-ω]", "[а-я]", "[一-龥]", "[가-힣]", "(🙂|🚀|👩‍💻)", "é|ü|ñ", "[À-ÿ]"]  # noqa: RUF001
    parts = [f"({rng.choice(scripts)})" + rng.choice(["+", "{1,3}", "?"]) for _ in range(3)]
    return "".join(parts) + _literal(rng)


def _leaf(rng: random.Random) -> Schema:
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(1, 12)},
            {"type": "integer"},
            {"type": "number"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string"},
            {"type": ["integer", "null"]},
        ]
    )


def _object(rng: random.Random, parts: Callable[[], Schema], most: int = 4) -> Schema:
    names = rng.sample(_WORDS, rng.randint(1, most))
    required = [name for name in names if rng.random() < 0.7]
    schema = {"type": "object", "properties": {name: parts() for name in names}}
    return schema | {"required": required, "additionalProperties": rng.random() < 0.2}


def objects(rng: random.Random) -> Schema:
    """Return an object of simple values."""
    return _object(rng, lambda: _leaf(rng))


def nested(rng: random.Random) -> Schema:
    """Return objects and arrays in objects."""

    def part(depth: int) -> Schema:
        if depth == 0 or rng.random() < 0.3:
            return _leaf(rng)
        if rng.random() < 0.3:
            return {"type": "array", "items": part(depth - 1), "maxItems": 3}
        return _object(rng, lambda: part(depth - 1), most=2)

    return _object(rng, lambda: part(2), most=2)


def unions(rng: random.Random) -> Schema:
    """Return alternatives of schemas."""
    choices = [_object(rng, lambda: _leaf(rng), most=2) for _ in range(2)] + [_leaf(rng)]
    return {"anyOf": rng.sample(choices, rng.randint(2, 3))}


def enumerations(rng: random.Random) -> Schema:
    """Return given values: enumerations and constants."""
    values = [_literal(rng), rng.randint(-999, 9999), None, True, [1, _literal(rng)], {"a": 1.5}]

    def part() -> Schema:
        if rng.random() < 0.3:
            return {"const": rng.choice(values)}
        return {"enum": rng.sample(values, rng.randint(1, 5))}

    return rng.choice([part(), _object(rng, part, most=3)])


def arrays(rng: random.Random) -> Schema:
    """Return arrays with bounds, and tuples."""
    low = rng.randint(0, 3)
    schema: Schema = {"type": "array", "minItems": low, "maxItems": low + rng.randint(0, 4)}
    if rng.random() < 0.3:
        leaves = [_leaf(rng) for _ in range(rng.randint(1, 3))]
        schema = {"type": "array", "prefixItems": leaves, "items": False, "minItems": len(leaves)}
    return {"items": _leaf(rng)} | schema


def bounds(rng: random.Random) -> Schema:
    """Return strings with patterns, formats and lengths, and numbers with bounds."""
    low = rng.randint(-50, 1000)
    parts: list[Schema] = [
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
        {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.randint(1, 5) / 2},
        {"type": "integer", "multipleOf": rng.choice([2, 5, 7, 10])},
        {"type": "string", "pattern": f"^{_class(rng)}{{1,4}}-{_class(rng)}?$"},
        {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4", "email"])},
        {"type": "string", "minLength": low % 5, "maxLength": low % 5 + rng.randint(0, 6)},
    ]
    return rng.choice([rng.choice(parts), _object(rng, lambda: rng.choice(parts), 3)])


def recursion(rng: random.Random) -> Schema:
    """Return schemas that contain themselves."""
    node = _object(rng, lambda: _leaf(rng), most=2)
    node["properties"]["next"] = rng.choice(
        [
            {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        ]
    )
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


KINDS = {
    "alternation": alternation,
    "repetition": repetition,
    "groups": groups,
    "wide": wide,
    "unicode": unicode,
    "objects": objects,
    "nested": nested,
    "unions": unions,
    "enumerations": enumerations,
    "arrays": arrays,
    "bounds": bounds,
    "recursion": recursion,
}
"""Five kinds of regular expressions, and seven of schemas."""

EACH = 25
"""The number of grammars of each kind: 300 in all."""


@cache
def random_grammars(kind: str) -> tuple["RandomGrammar", ...]:
    """Return `EACH` different grammars of a kind; always the same."""
    rng, grammars = random.Random(kind), dict[Grammar, RandomGrammar]()
    while len(grammars) < EACH:
        source = KINDS[kind](rng)
        if isinstance(source, str):
            grammar: Grammar = specjax.Regex(source)
        else:
            grammar = specjax.JsonSchema(source, whitespace=rng.random() < 0.4)
        grammars[grammar] = RandomGrammar(grammar, source)
    return tuple(grammars.values())


@dataclass(frozen=True)
class RandomGrammar:
    """A grammar, and the pattern or schema that it was made of.

    Attributes:
        grammar: the grammar.
        source: the regular expression, or the JSON schema.
    """

    grammar: Grammar
    source: str | Schema

    def accepts(self, text: str) -> bool:
        """Return whether Python's `re`, or `jsonschema`, accepts a text."""
        if isinstance(self.source, str):
            return re.fullmatch(self.source, text) is not None
        return _validator(self.grammar, json.dumps(self.source)).is_valid(json.loads(text))


@cache
def _validator(_: Grammar, schema: str) -> Any:
    kind = jsonschema.Draft202012Validator
    return kind(json.loads(schema), format_checker=kind.FORMAT_CHECKER)
