"""Grammars as users give them, before they meet a tokenizer."""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from specjax.errors import InputError
from specjax.grammars.notation import quoted, regex_terminal
from specjax.grammars.schema import translated_schema
from specjax.grammars.structure import checked_node, structure_source

WHITESPACE = r"[ \n\r\t]{0,32}"
"""The whitespace that JSON may have between its parts. Small models repeat unbounded whitespace."""

_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
"""Only one way to spell each string: a key that is spelled in another way escapes its schema."""

_FLEXIBLE, _COMPACT = (
    {"whitespace_pattern": WHITESPACE} | _ESCAPES,
    {"whitespace_flexible": False} | _ESCAPES,
)
"""The options of llguidance in the source of a `JsonSchema`, with whitespace and without."""


@dataclass(frozen=True, init=False, repr=False)
class Grammar:
    """A set of texts.

    Use a subclass: `JsonSchema`, `JsonObject`, `Regex`, `Choice`, `Lark`, `After` or
    `StructuralTag`.

    Equal grammars are equal objects, so that each is compiled once.

    Attributes:
        source: the grammar in the form that llguidance reads: its JSON text.

    Examples:
        >>> import specjax
        >>> specjax.Regex("a|b") == specjax.Regex("a|b")
        True
        >>> specjax.Regex("a|b").source
        '{"grammars": [{"lark_grammar": "start: /a|b/"}]}'
    """

    source: str

    @staticmethod
    def of_source(source: str) -> "Grammar":
        """Return the grammar of a `source`, which may come from a client.

        Only what the subclasses make is accepted, so that no option of llguidance comes with it.

        Raises:
            InputError: none of the subclasses makes such a source.

        Examples:
            >>> import specjax
            >>> grammar = specjax.JsonSchema({"type": "integer"}, whitespace=False)
            >>> specjax.grammars.Grammar.of_source(grammar.source) == grammar
            True
            >>> specjax.grammars.Grammar.of_source(specjax.Regex("a|b").source)
            Lark('{"grammars": [{"lark_grammar": "start: /a|b/"}]}')
        """
        try:
            parsed = json.loads(source)
            if list(parsed) == ["structure"]:
                return _Structured(parsed["structure"])
            (part,) = parsed["grammars"]
            ((kind, content),) = part.items()
            if kind == "lark_grammar":
                return Lark(content)
            if kind == "json_schema" and content["x-guidance"] in (_FLEXIBLE, _COMPACT):
                return JsonSchema(content, whitespace=content["x-guidance"] == _FLEXIBLE)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            pass
        raise InputError(
            f"grammar={reprlib.repr(source)}: it is not the source of a specjax grammar"
        )

    def __repr__(self) -> str:
        """Return the class and the beginning of the source."""
        start = self.source if len(self.source) <= 60 else f"{self.source[:57]}..."
        return f"{type(self).__name__}({start!r})"

    def _set_source(self, **grammar: str | Mapping[str, Any]) -> None:
        self._write(json.dumps({"grammars": [grammar]}))

    def _write(self, source: str) -> None:
        object.__setattr__(self, "source", source)


def check_grammar(grammar: Any) -> None:
    """Raise InputError if a value is not a `Grammar`."""
    if not isinstance(grammar, Grammar):
        raise InputError(
            f"grammar={grammar!r}: give specjax.JsonSchema(...), Regex, Choice, Lark or JsonObject"
        )


class _Structured(Grammar):
    """Free text with tags, as a client states it: the source of an `After` or `StructuralTag`."""

    def __init__(self, node: Any) -> None:
        """Make the grammar."""

        def checked_part(part: Any) -> Any:
            grammar = Grammar.of_source(json.dumps({"grammars": [part]}))
            return json.loads(grammar.source)["grammars"][0]

        self._write(structure_source(checked_node(node, checked_part)))


class JsonSchema(Grammar):
    """The JSON texts that a JSON schema accepts.

    Keys come in the order of the schema. Numbers of type "integer" have no decimal point, and
    strings have no ``\\u`` escapes for letters. There is no whitespace around the text.

    Args:
        schema: the schema as a mapping, a bool or JSON text; a Pydantic model; or a type that
            msgspec describes, such as a dataclass or a TypedDict.
        whitespace: whether there may be whitespace between the parts, at most 32 characters at a
            place. Without it the text is compact, and more of it is forced, which is faster.

    Raises:
        InputError: the schema is not a schema. Keywords that are not supported are refused when
            the grammar is compiled.

    Examples:
        >>> import specjax
        >>> specjax.JsonSchema({"type": "object", "properties": {"n": {"type": "integer"}}})
        JsonSchema('{"grammars": [{"json_schema": {"type": "object", "propert...')
        >>> specjax.JsonSchema("[1, 2]")
        Traceback (most recent call last):
        specjax.errors.InputError: schema='[1, 2]': a JSON schema is an object, true or false
    """

    def __init__(self, schema: Any, *, whitespace: bool = True) -> None:
        """Convert ``schema`` to llguidance's form."""
        parsed = _parse_schema(schema)
        options = _FLEXIBLE if whitespace else _COMPACT
        if isinstance(parsed, bool):
            parsed = {} if parsed else {"enum": []}
        else:
            parsed = translated_schema(parsed)
        self._set_source(json_schema=parsed | {"x-guidance": options})


class JsonObject(JsonSchema):
    """The JSON texts that are an object, such as ``{"a": [1, 2]}``.

    Examples:
        >>> import specjax
        >>> specjax.JsonObject() == specjax.JsonSchema({"type": "object"})
        False
        >>> specjax.JsonObject().source == specjax.JsonSchema({"type": "object"}).source
        True
    """

    def __init__(self, *, whitespace: bool = True) -> None:
        """Make the grammar."""
        super().__init__({"type": "object"}, whitespace=whitespace)


class Regex(Grammar):
    """The texts that a regular expression matches as a whole.

    The syntax is that of Rust's regex crate, without look-around and back references.

    Examples:
        >>> import specjax
        >>> specjax.Regex(r"[0-9]{4}-[0-9]{2}")
        Regex('{"grammars": [{"lark_grammar": "start: /[0-9]{4}-[0-9]{2}...')
    """

    def __init__(self, pattern: str) -> None:
        """Make the grammar.

        Raises:
            InputError: the pattern is not a string.
        """
        if not isinstance(pattern, str):
            raise InputError(f"pattern={pattern!r}: give a regular expression as a string")
        self._set_source(lark_grammar=f"start: {regex_terminal(pattern)}")


class Choice(Grammar):
    """One of several texts.

    Examples:
        >>> import specjax
        >>> specjax.Choice(["yes", "no"])
        Choice(...yes...)
    """

    def __init__(self, words: Sequence[str]) -> None:
        """Make the grammar.

        Raises:
            InputError: there are no words, or one is not a string or is empty.
        """
        is_list = isinstance(words, Sequence) and not isinstance(words, str | bytes)
        if not is_list or not words or not all(isinstance(word, str) and word for word in words):
            raise InputError(f"words={words!r}: give a list of strings, none of them empty")
        # As one terminal, whose automaton takes the same time for any number of words.
        alternatives = " | ".join(map(quoted, words))
        self._set_source(lark_grammar=f"start: WORD\nWORD: {alternatives}")


class Lark(Grammar):
    """A context-free grammar in llguidance's dialect of Lark. Its rule ``start`` is the text.

    Examples:
        >>> import specjax
        >>> specjax.Lark('start: "a" start "b" | "c"')
        Lark(...start...)
    """

    def __init__(self, text: str) -> None:
        """Make the grammar.

        Raises:
            InputError: the text is not a string, or has options of llguidance that would change
                which tokens are legal, or how they are drawn.
        """
        if not isinstance(text, str):
            raise InputError(f"text={text!r}: give a Lark grammar as a string")
        # JSON inside the grammar may write any character of a name as an escape.
        unescaped = re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), text)
        for name, pattern in _LARK_OPTIONS.items():
            if re.search(pattern, text) or re.search(pattern, unescaped):
                raise InputError(f"text: {name} is not supported; leave it out")
        self._set_source(lark_grammar=text)


_LARK_OPTIONS = {
    "%llguidance": r"%llguidance",
    "x-guidance": r"x-guidance",
    "the attribute temperature": r"\[[^]\n]*\btemperature\s*=",
    "the attribute max_tokens": r"\[[^]\n]*\bmax_tokens\s*=",
    "the attribute stop": r"\[[^]\n]*\bstop(_capture)?\s*=",
}
"""Options of llguidance in a Lark grammar that are refused, with a pattern for each."""


def _parse_schema(schema: Any) -> dict[str, Any] | bool:
    """Return a schema as an object or a bool, without llguidance's own options.

    Raises:
        InputError: it is not a JSON schema.
    """
    if hasattr(schema, "model_json_schema"):  # a Pydantic model
        schema = schema.model_json_schema()
    elif isinstance(schema, type) and (is_dataclass(schema) or not issubclass(schema, str)):
        schema = _schema_of_type(schema)
    try:
        # Through JSON text and back: a schema in Python may hold tuples, and is copied.
        parsed = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        json.dumps(parsed)  # nested too deeply to be written again
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"schema={reprlib.repr(schema)}: not a JSON schema: {error}") from None
    if isinstance(parsed, bool):
        return parsed
    if not isinstance(parsed, dict):
        raise InputError(
            f"schema={reprlib.repr(schema)}: a JSON schema is an object, true or false"
        )
    # llguidance reads its own options at the top alone.
    return {key: value for key, value in parsed.items() if key != "x-guidance"}


def _schema_of_type(kind: type) -> dict[str, Any]:
    """Return the JSON schema of a type such as a dataclass."""
    import msgspec

    try:
        return msgspec.json.schema(kind)
    except TypeError as error:
        raise InputError(
            f"schema={kind!r}: no JSON schema can be made of it ({error}); give the schema itself"
        ) from None
