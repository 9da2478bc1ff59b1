"""Grammars that try to cost a server time or memory, made from a seed.

Each kind has a generator. Some of its grammars are wrong, some are huge, and some only look
dangerous: the server must refuse each by a message, or serve it within its bounds.
"""

import json
import random
from collections.abc import Callable
from typing import Any

import specjax
from specjax.grammars import Grammar

Random = random.Random


def hostile_grammar(seed: int) -> tuple[str, Callable[[], Grammar]]:
    """Return the kind of grammar number ``seed``, and a function that makes it.

    The function raises `specjax.errors.InputError` where the grammar is refused at once.
    """
    kinds = sorted(_KINDS)
    kind = kinds[seed % len(kinds)]
    return kind, lambda: _KINDS[kind](random.Random(seed))


def _schema(make: Callable[[Random], Any]) -> Callable[[Random], Grammar]:
    def grammar(rng: Random) -> Grammar:
        return specjax.JsonSchema(make(rng), whitespace=rng.random() < 0.5)

    return grammar


def _regex(make: Callable[[Random], str]) -> Callable[[Random], Grammar]:
    return lambda rng: specjax.Regex(make(rng))


def _lark(make: Callable[[Random], str]) -> Callable[[Random], Grammar]:
    return lambda rng: specjax.Lark(make(rng))


def _size(rng: Random, most: int) -> int:
    """Return a number up to ``most``, of every order of magnitude."""
    return max(1, int(most ** rng.random()))


def _nested(rng: Random, inner: Any, depth: int) -> str:
    """Return JSON text: ``inner`` in this many objects or arrays of one kind."""
    start, end = rng.choice(
        [
            ('{"type":"array","items":', "}"),
            ('{"type":"object","properties":{"a":', "}}"),
            ('{"anyOf":[', "]}"),
            ('{"allOf":[', "]}"),
            ('{"type":"array","prefixItems":[', "]}"),
            ('{"additionalProperties":', "}"),
            ("[", "]"),
        ]
    )
    return start * depth + json.dumps(inner) + end * depth


def _exponential(rng: Random) -> Any:
    """Return a schema whose branches multiply: unions in intersections, or in unions."""
    keyword, other = rng.choice(["anyOf", "oneOf"]), rng.choice(["anyOf", "oneOf", "allOf"])
    count, width = _size(rng, 24), rng.randint(2, 4)

    def union(index: int) -> Any:
        parts = [
            {"type": "object", "properties": {f"{name}{index}": {"type": "string"}}}
            if rng.random() < 0.5
            else {"properties": {"k": {"pattern": f"^{name}{index}"}}}
            for name in "abcd"[:width]
        ]
        return {keyword: parts}

    if rng.random() < 0.5:
        return {"allOf": [union(index) for index in range(count)]}
    schema = union(0)
    for index in range(1, count):
        schema = {other: [schema, union(index)]}
    return schema


def _laughs(rng: Random) -> Any:
    """Return definitions that each use the next one several times."""
    depth, width = _size(rng, 200), rng.randint(2, 6)
    keyword = rng.choice(["anyOf", "allOf", "prefixItems", "properties", "oneOf"])

    def uses(index: int) -> Any:
        references = [{"$ref": f"#/$defs/d{index + 1}"} for _ in range(width)]
        if keyword == "properties":
            return {"type": "object", "properties": dict(zip("abcdef", references, strict=False))}
        return {keyword: references}

    definitions = {f"d{index}": uses(index) for index in range(depth)}
    definitions[f"d{depth}"] = {"type": rng.choice(["string", "integer", "null"])}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _cycles(rng: Random) -> Any:
    references = [{"$ref": f"#/$defs/{name}"} for name in "abc"]
    wrappers: list[Callable[[Any], Any]] = [
        lambda schema: schema,
        lambda schema: {"anyOf": [schema, {"type": "null"}]},
        lambda schema: {"allOf": [schema, {"type": "object"}]},
        lambda schema: {"oneOf": [schema, schema]},
        lambda schema: {"type": "array", "items": schema, "minItems": rng.randint(0, 3)},
        lambda schema: {"properties": {"x": schema}, "required": ["x"]},
        lambda schema: {"not": schema},
        lambda schema: {"additionalProperties": schema},
    ]
    definitions = {name: rng.choice(wrappers)(rng.choice(references)) for name in "abc"}
    start = rng.choice([{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, *references])
    return {"$defs": definitions} | start


def _huge(rng: Random) -> Any:
    count = _size(rng, 30_000)
    names = [f"{rng.getrandbits(40):x}" for _ in range(count)]
    kind = rng.randrange(6)
    if kind == 0:
        return {"enum": names}
    if kind == 1:
        return {"enum": list(range(count))}
    if kind == 2:
        return {"properties": {name: {"type": "integer"} for name in names}, "required": names}
    if kind == 3:
        return {"properties": {name: {"enum": names[:20]} for name in names[:2000]}}
    if kind == 4:
        return {"const": "\\" * count + "ä" * count}
    return {"anyOf": [{"properties": {name: {"const": name}}} for name in names[:3000]]}


def _counts(rng: Random) -> Any:
    """Return a schema with huge lengths and bounds."""
    low, high = _size(rng, 10**9), rng.choice([10**3, 10**5, 10**9, 10**30, 1e308, -1, 0.5])
    item: Any = {"type": rng.choice(["string", "integer", "boolean"])}
    return rng.choice(
        [
            {"type": "array", "items": item, "minItems": low, "maxItems": high},
            {"type": "array", "prefixItems": [item] * 50, "minItems": low},
            {"type": "string", "minLength": low, "maxLength": high},
            {"type": "string", "pattern": "^(a|b)*$", "minLength": low},
            {"type": "integer", "minimum": -high, "maximum": low},
            {"type": "number", "exclusiveMinimum": -1e-300, "maximum": high},
            {"type": "object", "minProperties": low, "maxProperties": high},
            {"type": "number", "minimum": low, "maximum": low, "multipleOf": 0.1},
        ]
    )


_PRIMES = [7, 97, 997, 1009, 4999, 9973, 10007, 65537, 999983]


def _products(rng: Random) -> Any:
    """Return numbers that are multiples of several primes, whose automaton has their product."""
    kind = rng.choice(["integer", "number"])
    factors = [rng.choice(_PRIMES[: rng.randint(2, 9)]) for _ in range(rng.randint(1, 4))]
    scale = rng.choice([1, 1, 0.01, 1e-9])
    parts: list[Any] = [{"type": kind, "multipleOf": factor * scale} for factor in factors]
    if rng.random() < 0.3:
        parts.append({"minimum": rng.randint(-(10**12), 10**12)})
    return {"allOf": parts}


_VALUES = [None, True, -1, 0, 1.5, 10**40, 1e308, "", "a", "\ud800", "(", [], [[]], {}, {"a": {}}]
_KEYWORDS = [
    "type",
    "enum",
    "const",
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "else",
    "$ref",
    "$defs",
    "$id",
    "$anchor",
    "$dynamicRef",
    "dependentRequired",
    "dependentSchemas",
    "uniqueItems",
    "contains",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
    "x-guidance",
    "nullable",
    "definitions",
]


def _wrong_types(rng: Random) -> Any:
    """Return a schema whose keywords have values of any type."""
    keywords = rng.sample(_KEYWORDS, rng.randint(1, 6))
    schema: dict[str, Any] = {keyword: rng.choice(_VALUES) for keyword in keywords}
    if rng.random() < 0.5:
        schema["type"] = rng.choice(["object", "array", "string", "number", "nothing", 3])
    return {"type": "object", "properties": {"a": schema}} if rng.random() < 0.5 else schema


_PATTERNS = [
    "(",
    ")",
    "[",
    "a{2,1}",
    "*a",
    "(?P<n",
    r"\1(a)",
    "(?=a)b",
    "(?<!a)b",
    r"\p{NoSuchClass}",
    "\\",
    "a**",
    "[z-a]",
    "(?i",
    r"\x{110000}",
    "(a+)+b",
    "(a*)*",
    "(a|aa)+c",
    "(.*.*.*)=.*",
    "(x+x+)+y",
    r"([a-zA-Z]+)*\d",
    "((a?){30}){30}",
    r"^(([a-z])+.)+[A-Z]([a-z])+$",
    r"(\w+\s*)+:",
    r"\p{L}{1,300}\p{N}*",
    "(.|\n)*(.|\n)*x",
    "[^a]{1,1000}[^b]{1,1000}",
]


def _pattern(rng: Random) -> str:
    """Return a regular expression that is wrong, or whose automaton is large."""
    n, m = _size(rng, 100_000), _size(rng, 2000)
    choices = [
        *rng.sample(_PATTERNS, 3),
        f"[ab]{{1,{n}}}",
        f"(a{{{m}}}){{{m}}}",
        f".*a.{{{min(m, 60)}}}",
        f"(.*a.{{{rng.randint(1, 30)}}}b|.*b.{{{rng.randint(1, 30)}}}a)*",
        f"(a?){{{m}}}a{{{m}}}",
        f"(\\w|[0-9a-f]{{2}}){{{m}}}",
        f"((ab|ba){{1,{m}}}c){{1,{m}}}",
        "(" * m + "a" + ")" * m,
        "(" * min(m, 40) + "a" + ")*" * min(m, 40),
        "|".join(f"{rng.getrandbits(64):x}.*{index}" for index in range(m)),
        "".join(f"(a|b{index})*" for index in range(m)),
        "&".join(["(?:.*)"] * 5),
    ]
    return rng.choice(choices)


def _patterns_in_schema(rng: Random) -> Any:
    """Return strings that must match several patterns, formats and lengths together."""
    formats = ["date-time", "email", "uri", "ipv6", "hostname", "uuid", "duration", "time"]
    parts: list[Any] = [{"type": "string"}]
    for _ in range(rng.randint(1, 4)):
        part = rng.choice(
            [
                {"pattern": _pattern(rng)},
                {"format": rng.choice(formats)},
                {"minLength": _size(rng, 500)},
                {"maxLength": _size(rng, 5000)},
                {"pattern": f"^[a-z]{{{_size(rng, 300)}}}|.*{rng.choice('xyz')}.{{9}}$"},
            ]
        )
        parts.append(part)
    schema = {"allOf": parts}
    if rng.random() < 0.3:
        return {"patternProperties": {_pattern(rng): schema, _pattern(rng): {"type": "null"}}}
    return schema


def _recursion(rng: Random) -> str:
    """Return a Lark grammar that is recursive on the left, on the right, or in a circle."""
    return rng.choice(
        [
            'start: start "a" | "a"',
            'start: "a" start | "a"',
            "start: a\na: b\nb: a",
            'start: a\na: b a | ""\nb: a b | ""',
            "start: start start",
            "start: start",
            'start: a b\na: "x" b?\nb: "y" a?',
            'start: "(" start ")" | "[" start "]" | ""',
            "start: undefined_rule",
            'start: a a a a\na: ("x" | "y" a)*',
        ]
    )


def _ambiguous(rng: Random) -> str:
    """Return a Lark grammar in which a text has more and more derivations."""
    letters = rng.choice(['"a"', '"a" | "b"', "/[ab]/", "/[a-z ]/", "/./", "/[a-z]+/"])
    size = rng.randint(2, 12)
    names = [f"r{index}" for index in range(size)]
    body = rng.choice(
        [
            f"start: start start | {letters}",
            f"start: start start start | start start | {letters}",
            f'start: start start start | start start | {letters} | ""',
            f"start: x start x | x\nx: {letters}",
            f"start: x* x* x* x* x*\nx: {letters}",
            "start: s\n" + "s: " + " | ".join(f"{a} {b}" for a in names for b in names) + "\n"
            "" + "\n".join(f"{name}: s {name} | {letters}" for name in names),
            f"start: s\ns: s s | t\nt: t t | s | {letters}",
            f"start: (start? start? start? {letters.split('|')[0]})*",
        ]
    )
    return body


def _quantifiers(rng: Random) -> str:
    """Return a Lark grammar with quantifiers inside quantifiers."""
    inner = rng.choice(['"a"', "/a?/", "/[a-z]*/", '("a" | "b")', "/./"])
    for _ in range(_size(rng, 60)):
        low, high = _size(rng, 100), _size(rng, 5000)
        suffix = rng.choice(["*", "+", "?", f"{{{low},{low + high}}}", f"{{0,{high}}}"])
        inner = f"({inner}){suffix}"
    return f"start: {inner}"


def _many_rules(rng: Random) -> str:
    """Return a Lark grammar with very many rules, terminals or alternatives."""
    count = _size(rng, 8000)
    rules = rng.choice(
        [
            [f"r{i}: r{i + 1} r{i + 1}?" for i in range(count)] + [f'r{count}: "x"'],
            [f'r{i}: "{i}" r{rng.randrange(count)} | ""' for i in range(count)],
            ["r0: " + " | ".join(f"/{i}[a-z]*/" for i in range(count))],
            ["r0: " + " | ".join(f'"{rng.getrandbits(30):x}"' for _ in range(count))],
            ["r0: " + " ".join(f"/[ab]{{0,{i}}}/" for i in range(min(count, 500)))],
        ]
    )
    return "start: r0\n" + "\n".join(rules)


def _terminals(rng: Random) -> str:
    """Return a Lark grammar with operations on terminals: "and", "not", JSON inside."""
    pattern, other = (_pattern(rng).replace("/", "").replace("\n", r"\n") for _ in range(2))
    options = [
        f"start: A\nA: /{pattern}/ & /{other}/",
        f"start: A\nA: ~/{pattern}/",
        f"start: A\nA: ~/{pattern}/ & ~/{other}/ & /.{{0,{_size(rng, 2000)}}}/",
        'start: %json {"x-guidance": {"lenient": true}, "not": {}}',
        'start: %json {"x\\u002dguidance": {"lenient": true}, "not": {}}',
        "start: %json " + json.dumps(_products(rng)),
        "start: %json " + json.dumps(_exponential(rng)),
        "%llguidance {}\nstart: /a/",
        'start: %regex {"substring_chars": "' + "abcdefgh " * _size(rng, 3000) + '"}',
        'start: %regex {"substring_words": "' + "ab c " * _size(rng, 3000) + '"}',
        "start[max_tokens=3]: /.*/ start | /b/",
        'start[temperature=0.1]: "a"',
        "start: <[0-100000000]>",
        "start: <nothing> | <s>",
        "start: T\nT[lazy]: " + f"/.*{rng.choice('xyz')}.{{{_size(rng, 400)}}}/",
        'start[capture="x", stop=/a+b/]: /(.|\\n)*/',
        "start: @grammar",
        "%import common.JSON\nstart: JSON",
        "start: a\n" + "%ignore /(a|b)*c/\n" * _size(rng, 100) + 'a: "x" a | ""',
    ]
    return rng.choice(options)


def _broken_text(rng: Random) -> Grammar:
    """Return a grammar of which some characters are replaced, swapped or repeated."""
    text = rng.choice(
        [
            json.dumps(_cycles(rng)),
            json.dumps(_patterns_in_schema(rng)),
            json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}),
            _ambiguous(rng),
            _terminals(rng),
        ]
    )
    characters = list(text[:5000])
    for _ in range(_size(rng, 20)):
        place = rng.randrange(len(characters))
        characters[place] = rng.choice([*'{}[]",:|()*\\/&~<>', "\0", "\ud83d", "é", "\u202e", ""])
    text = "".join(characters)
    return rng.choice([specjax.JsonSchema, specjax.Lark, specjax.Regex])(text)


def _words(rng: Random) -> Grammar:
    """Return a choice of very many, very long, or strange words."""
    count = _size(rng, 10_000)
    words = rng.choice(
        [
            [f"{rng.getrandbits(50):x}" for _ in range(count)],
            ["a" * index for index in range(1, min(count, 600) + 1)],
            ["\U0010ffff" * count, "\0", "\ud800", "\r\n"],
            ["a" * count, "a" * count + "b"],
        ]
    )
    return specjax.Choice(words)


def _deep(rng: Random) -> Grammar:
    inner: Any = {"type": rng.choice(["string", "null"])}
    return specjax.JsonSchema(_nested(rng, inner, _size(rng, 50_000)))


def _random_schema(rng: Random, depth: int = 4) -> Any:
    """Return a schema of keywords that are used as they should be, in odd combinations."""
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(
            [True, False, {"type": "integer"}, {"type": "string", "pattern": "a.*b"}, {"const": 1}]
        )

    def inner() -> Any:
        return _random_schema(rng, depth - 1)

    parts: dict[str, Callable[[], Any]] = {
        "type": lambda: rng.choice(["object", "array", ["object", "string", "null"], "number"]),
        "properties": lambda: {name: inner() for name in "abcd"[: rng.randint(0, 4)]},
        "patternProperties": lambda: {rng.choice(["^a", "b$", ".*", "^.{3}$"]): inner()},
        "additionalProperties": inner,
        "required": lambda: rng.sample("abcde", rng.randint(0, 3)),
        "items": inner,
        "prefixItems": lambda: [inner() for _ in range(rng.randint(1, 3))],
        "anyOf": lambda: [inner() for _ in range(rng.randint(1, 5))],
        "oneOf": lambda: [inner() for _ in range(rng.randint(1, 3))],
        "allOf": lambda: [inner() for _ in range(rng.randint(1, 3))],
        "enum": lambda: [rng.choice(_VALUES[:9]) for _ in range(rng.randint(1, 9))],
        "$ref": lambda: rng.choice(["#", "#/$defs/x", "#/properties/a", "http://host/x", "//"]),
        "minItems": lambda: rng.randint(0, 9),
        "maxLength": lambda: rng.randint(0, 99),
        "format": lambda: rng.choice(["date", "email", "uuid", "no-such-format"]),
    }
    chosen = rng.sample(sorted(parts), rng.randint(1, 5))
    return {keyword: parts[keyword]() for keyword in chosen} | {
        "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}}}
    }


_KINDS: dict[str, Callable[[Random], Grammar]] = {
    "ambiguous": _lark(_ambiguous),
    "broken text": _broken_text,
    "counts": _schema(_counts),
    "cycles": _schema(_cycles),
    "deep": _deep,
    "exponential": _schema(_exponential),
    "huge": _schema(_huge),
    "laughs": _schema(_laughs),
    "many rules": _lark(_many_rules),
    "pattern": _regex(_pattern),
    "patterns in a schema": _schema(_patterns_in_schema),
    "products": _schema(_products),
    "quantifiers": _lark(_quantifiers),
    "random schema": _schema(_random_schema),
    "recursion": _lark(_recursion),
    "terminals": _lark(_terminals),
    "words": _words,
    "wrong types": _schema(_wrong_types),
}
