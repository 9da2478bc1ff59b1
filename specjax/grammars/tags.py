"""Grammars that begin within a text: after a string or a token, or in tags between free text."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.errors import InputError
from specjax.grammars.grammar import Grammar, JsonSchema, Lark, check_grammar
from specjax.grammars.notation import regex_terminal
from specjax.grammars.structure import Node, all_of, constant, node_of_source, structure_source

MAX_ENTRIES = 256
"""The largest number of entries of a list in a structural tag, such as its tags."""


class After(Grammar):
    """Free text up to a trigger, and texts of another grammar after it.

    The trigger may be a string, such as "Answer: ", or an added token of the tokenizer, such as
    "</think>". It may end within a token: the rest of the token then belongs to the grammar. Where
    the trigger is an added token, the same text in ordinary tokens counts too.

    Before the trigger every token is legal. The tokens that end the text are not, unless
    ``required`` is False.

    Args:
        trigger: the text after which the grammar begins, where it appears for the first time. If it
            starts with an added token and goes on, the rest has to follow wherever the token comes.
        grammar: the grammar of what follows.
        required: whether the trigger has to come. If not, the text may end without it.

    Raises:
        InputError: the trigger is not a string or is empty, or the grammar is not a `Grammar`.
            When the grammar is compiled: the trigger has text before an added token.

    Examples:
        >>> import specjax
        >>> generate = specjax.load("embedded", "embedded:eagle3")
        >>> grammar = specjax.After("= ", specjax.Regex("[0-9]{3}"))
        >>> text = generate("x = 1\\ny", grammar=grammar, max_new_tokens=48).text
        >>> before, number = text.split("= ")
        >>> len(number), number.isdigit()
        (3, True)
    """

    def __init__(self, trigger: str, grammar: Grammar, *, required: bool = True) -> None:
        """Make the grammar."""
        if not isinstance(trigger, str) or not trigger:
            raise InputError(f"trigger={trigger!r}: give the text after which the grammar begins")
        check_grammar(grammar)
        tag = {"trigger": trigger, "begin": trigger, "content": node_of_source(grammar.source)}
        self._write(
            structure_source({"free": {"tags": [tag], "is_required": required, "is_once": True}})
        )


class StructuralTag(Grammar):
    """Free text with tags in it, such as tool calls, in the form of vLLM, SGLang and XGrammar.

    Args:
        spec: the value of a request's ``structural_tag``, as a mapping or as JSON text. Either
            ``{"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers":
            [...]}``, or ``{"type": "structural_tag", "format": {...}}`` with a format of one of the
            types const_string, json_schema, regex, grammar (in the dialect of `specjax.Lark`),
            any_text, token, sequence, or, optional, star, plus, repeat, tag, triggered_tags,
            tags_with_separator and dispatch.

    Raises:
        InputError: the form is wrong, or has a part that is not supported. The message names it.
            When the grammar is compiled: what has to do with the tokenizer.

    Examples:
        >>> import specjax
        >>> spec = {
        ...     "type": "structural_tag",
        ...     "structures": [
        ...         {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"},
        ...     ],
        ...     "triggers": ["<f>"],
        ... }
        >>> grammar = specjax.StructuralTag(spec)
        >>> compiled = specjax.load("embedded").grammar_compiler.compile(grammar)
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> matcher = compiled.matcher(stop_token_ids=(0,))
        >>> matcher.append(tokenizer.encode("text<f>12</f>text", add_special_tokens=False))
        >>> matcher.is_complete
        True
        >>> matcher.append(tokenizer.encode("<f>", add_special_tokens=False))
        >>> matcher.is_complete
        False
    """

    def __init__(self, spec: Mapping[str, Any] | str) -> None:
        """Make the grammar."""
        try:
            self._write(structure_source(_parse(spec)))
        except RecursionError:
            raise InputError(
                f"structural_tag={reprlib.repr(spec)}: it is nested too deeply; use fewer levels"
            ) from None


def _parse(spec: Any) -> Node:
    """Return the node of a structural tag."""
    try:
        parsed = json.loads(spec if isinstance(spec, str) else json.dumps(spec))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"structural_tag={reprlib.repr(spec)}: not JSON: {error}") from None
    if not isinstance(parsed, dict) or parsed.get("type", "structural_tag") != "structural_tag":
        raise InputError(
            f"structural_tag={reprlib.repr(spec)}: give an object with"
            ' "type": "structural_tag" and "format", or "structures" and "triggers"'
        )
    parsed.pop("type", None)
    if "format" in parsed:
        _Fields("structural_tag", parsed, {"format"})
        return _format("structural_tag.format", parsed["format"])
    fields = _Fields("structural_tag", parsed, {"structures", "triggers"})
    tags = []
    for index, structure in enumerate(fields.objects("structures")):
        path = f"structural_tag.structures[{index}]"
        item = _Fields(path, structure, {"begin", "schema", "end"})
        content = _grammar_node(JsonSchema(item.require("schema")))
        tags.append((item.string("begin"), all_of(content, constant(item.string("end", None)))))
    return _triggered(fields, fields.strings("triggers"), tags)


class _Fields:
    """An object within a structural tag, and its place, which messages name."""

    def __init__(self, path: str, value: Any, names: set[str]) -> None:
        """Refuse what is no object, and fields of other names."""
        if not isinstance(value, dict):
            raise InputError(f"{path}={value!r}: give an object")
        unknown = sorted(set(value) - names)
        if unknown:
            raise InputError(
                f"{path}.{unknown[0]}={reprlib.repr(value[unknown[0]])}: not supported; leave it"
                " out"
            )
        self.path, self._value = path, value

    def require(self, name: str) -> Any:
        """Return a field that has to be there."""
        if name not in self._value:
            raise InputError(f"{self.path}: it has no {name!r}; add it")
        return self._value[name]

    def string(self, name: str, shortest: int | None = 1) -> str:
        """Return a string; it may be empty if ``shortest`` is None."""
        value = self.require(name)
        if not isinstance(value, str) or len(value) < (shortest or 0):
            kind = "a string" if shortest is None else "a string that is not empty"
            raise InputError(f"{self.path}.{name}={value!r}: give {kind}")
        return value

    def objects(self, name: str) -> list[Any]:
        """Return a list that is not empty."""
        value = self.require(name)
        if not isinstance(value, list) or not value:
            raise InputError(
                f"{self.path}.{name}={reprlib.repr(value)}: give a list that is not empty"
            )
        self._check_length(name, value)
        return value

    def _check_length(self, name: str, value: Sequence[Any]) -> None:
        if len(value) > MAX_ENTRIES:
            raise InputError(
                f"{self.path}.{name}: it has {len(value)} entries; give at most {MAX_ENTRIES}"
            )

    def strings(self, name: str, default: Sequence[str] | None = None) -> list[str]:
        """Return a list of strings, none of them empty."""
        value = self._value.get(name, default)
        if not isinstance(value, list) or not all(isinstance(s, str) and s for s in value):
            raise InputError(f"{self.path}.{name}={reprlib.repr(value)}: give a list of strings")
        self._check_length(name, value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a bool."""
        value = self._value.get(name, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.path}.{name}={value!r}: give true or false")
        return value

    def count(self, name: str) -> int:
        """Return a whole number."""
        value = self.require(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{self.path}.{name}={value!r}: give a whole number")
        return value

    def only(self, name: str, *values: Any) -> None:
        """Refuse a field that has any but these values."""
        value = self._value.get(name, values[0])
        if value not in values:
            raise InputError(f"{self.path}.{name}={value!r}: not supported; leave it out")


def _format(path: str, value: Any) -> Node:
    """Return the node of a format."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise InputError(
            f"{path}.type={kind!r}: not supported; give one of {', '.join(sorted(_FORMATS))}"
        )
    names, make = _FORMATS[kind]
    return make(_Fields(path, value, {"type", *names}))


def _const_string(fields: _Fields) -> Node:
    return constant(fields.string("value", None))


def _json_schema(fields: _Fields) -> Node:
    fields.only("style", "json")
    fields.only("any_order", False)
    fields.only("max_whitespace_cnt", None, 0)
    return _grammar_node(
        JsonSchema(
            fields.require("json_schema"),
            whitespace=fields._value.get("max_whitespace_cnt") is None,
        )
    )


def _regex(fields: _Fields) -> Node:
    return {"regex": regex_terminal(fields.string("pattern"))}


def _lark(fields: _Fields) -> Node:
    text = fields.string("grammar")
    if "::=" in text:
        raise InputError(
            f"{fields.path}.grammar: EBNF with ::= is not supported; write it as a Lark grammar"
        )
    return _grammar_node(Lark(text))


def _any_text(fields: _Fields) -> Node:
    fields.only("max_tokens", None)
    fields.only("max_chars", None)
    return {"free": {"excludes": fields.strings("excludes", [])}}


def _token(fields: _Fields) -> Node:
    token = fields.require("token")
    if isinstance(token, bool) or not isinstance(token, int | str):
        raise InputError(f"{fields.path}.token={token!r}: give the id or the text of a token")
    return {"token": token}


def _sequence(fields: _Fields) -> Node:
    return all_of(*_formats(fields, "elements"))


def _or(fields: _Fields) -> Node:
    return {"any": _formats(fields, "elements")}


def _repeated(least: int, most: int | None) -> Any:
    def make(fields: _Fields) -> Node:
        return {"repeat": _content(fields), "min": least, "max": most}

    return make


def _repeat(fields: _Fields) -> Node:
    least, most = fields.count("min"), fields.count("max")
    if least < 0 or (most != -1 and most < max(least, 1)):
        raise InputError(f"{fields.path}: min={least}, max={most}: give 0 <= min <= max, or max=-1")
    return {"repeat": _content(fields), "min": least, "max": None if most == -1 else most}


def _content(fields: _Fields) -> Node:
    return _format(f"{fields.path}.content", fields.require("content"))


def _formats(fields: _Fields, name: str) -> list[Node]:
    return [
        _format(f"{fields.path}.{name}[{index}]", value)
        for index, value in enumerate(fields.objects(name))
    ]


def _tag(fields: _Fields) -> Node:
    begin = fields.require("begin")
    first = constant(begin) if isinstance(begin, str) else _format(f"{fields.path}.begin", begin)
    return all_of(first, _content(fields), _end(fields))


def _end(fields: _Fields) -> Node:
    """Return what ends a tag: a string, one of several, or a token."""
    end = fields.require("end")
    if isinstance(end, str):
        return constant(end)
    if isinstance(end, dict):
        return _format(f"{fields.path}.end", end)
    ends = fields.strings("end")
    return {"any": [constant(end) for end in ends]} if ends else constant("")


def _tags(fields: _Fields) -> list[tuple[str, Node]]:
    """Return the beginning of each tag, and what follows it."""
    tags = []
    for index, value in enumerate(fields.objects("tags")):
        tag = _Fields(f"{fields.path}.tags[{index}]", value, {"type", *_TAG})
        tag.only("type", "tag")
        tags.append((tag.string("begin"), all_of(_content(tag), _end(tag))))
    return tags


def _triggered_tags(fields: _Fields) -> Node:
    return _triggered(fields, fields.strings("triggers"), _tags(fields))


def _triggered(fields: _Fields, triggers: Sequence[str], tags: Sequence[tuple[str, Node]]) -> Node:
    """Return free text with tags, each of which starts with one of the triggers."""
    nodes = []
    for begin, content in tags:
        fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
        if len(fitting) != 1:
            raise InputError(
                f"{fields.path}.triggers={list(triggers)!r}: {len(fitting)} of them start the tag"
                f" {begin!r}; give exactly one for each tag"
            )
        nodes.append({"trigger": fitting[0], "begin": begin, "content": content})
    unused = [t for t in triggers if not any(node["trigger"] == t for node in nodes)]
    if unused:
        raise InputError(f"{fields.path}.triggers: no tag starts with {unused[0]!r}; leave it out")
    first = fields.flag("at_least_one")
    return {
        "free": {
            "tags": nodes,
            "excludes": fields.strings("excludes", []),
            "tags_first": first,
            "is_required": first,
            "is_once": fields.flag("stop_after_first"),
        }
    }


def _tags_with_separator(fields: _Fields) -> Node:
    tag: Node = {"any": [all_of(constant(begin), content) for begin, content in _tags(fields)]}
    more = all_of(constant(fields.string("separator", None)), tag)
    most = 0 if fields.flag("stop_after_first") else None
    some = tag if most == 0 else all_of(tag, {"repeat": more, "min": 0, "max": most})
    return some if fields.flag("at_least_one") else {"repeat": some, "min": 0, "max": 1}


def _dispatch(fields: _Fields) -> Node:
    tags = []
    for index, rule in enumerate(fields.objects("rules")):
        path = f"{fields.path}.rules[{index}]"
        if (
            not isinstance(rule, list)
            or len(rule) != 2
            or not isinstance(rule[0], str)
            or not rule[0]
        ):
            raise InputError(f"{path}={rule!r}: give a pattern, which is not empty, and a format")
        content = _format(f"{path}[1]", rule[1])
        tags.append({"trigger": rule[0], "begin": rule[0], "content": content})
    return {
        "free": {
            "tags": tags,
            "excludes": fields.strings("excludes", []),
            "is_once": not fields.flag("loop", True),
        }
    }


def _grammar_node(grammar: Grammar) -> Node:
    return node_of_source(grammar.source)


_TAG = ("begin", "content", "end")
_TRIGGERED = ("tags", "at_least_one", "stop_after_first")
_FORMATS: dict[str, tuple[tuple[str, ...], Any]] = {
    "any_text": (("excludes", "max_tokens", "max_chars"), _any_text),
    "const_string": (("value",), _const_string),
    "dispatch": (("rules", "loop", "excludes"), _dispatch),
    "grammar": (("grammar",), _lark),
    "json_schema": (("json_schema", "style", "any_order", "max_whitespace_cnt"), _json_schema),
    "optional": (("content",), _repeated(0, 1)),
    "or": (("elements",), _or),
    "plus": (("content",), _repeated(1, None)),
    "regex": (("pattern",), _regex),
    "repeat": (("min", "max", "content"), _repeat),
    "sequence": (("elements",), _sequence),
    "star": (("content",), _repeated(0, None)),
    "tag": (_TAG, _tag),
    "tags_with_separator": ((*_TRIGGERED, "separator"), _tags_with_separator),
    "token": (("token",), _token),
    "triggered_tags": ((*_TRIGGERED, "triggers", "excludes"), _triggered_tags),
}
"""The types of formats: their fields, and the function that makes the node."""
