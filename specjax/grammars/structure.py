"""Grammars with free text: where one begins, and which tags may interrupt the text.

`specjax.After` and `specjax.StructuralTag` describe a text as a tree of nodes in JSON. This module
writes the tree as a grammar of llguidance. That needs the tokenizer, because llguidance takes each
added token for something apart from text: free text has to name the added tokens that it may hold,
and a trigger or a constant text that is an added token is written as that token.

Nodes:
    ``{"text": str}``: a constant.
    ``{"token": int | str}``: an added token, by its id or its text.
    ``{"grammar": {...}}``: a grammar in llguidance's form.
    ``{"regex": str}``: a regular expression as a terminal of Lark.
    ``{"all": [nodes]}``, ``{"any": [nodes]}``: one after the other; one of them.
    ``{"repeat": node, "min": int, "max": int | None}``: a node several times.
    ``{"free": {...}}``: free text, with the fields of `_Free`. It ends where the constant that
    follows it appears for the first time; if none follows, it may end anywhere.
"""

import json
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from specjax.errors import InputError
from specjax.grammars.notation import quoted

Node = Mapping[str, Any]

CheckedGrammar = Callable[[Any], Mapping[str, Any]]
"""A function that returns a grammar in llguidance's form, or raises an InputError."""

_HEADER = '%llguidance {"allow_invalid_utf8": true}\n'
"""Free text is bytes: a token may begin or end within a character."""

_BYTES = r"/[\x00-\xFE]*/"
"""Any bytes but 0xFF, with which llguidance marks special tokens."""


@dataclass(frozen=True)
class AddedTokens:
    """The tokens of a tokenizer that llguidance does not take for text.

    Attributes:
        contents: the text of each added token, by its id, without the tokens that end a text.
        raw: the ids of the tokens that hold a byte 0xFF, which no text holds.

    Examples:
        >>> from specjax.grammars.structure import AddedTokens
        >>> tokens = AddedTokens({7: "<call>", 8: "<call>{"}, raw=())
        >>> tokens.split("a<call>{}")
        ['a', 8, '}']
    """

    contents: Mapping[int, str]
    raw: Sequence[int] = ()

    def split(self, text: str) -> list[str | int]:
        """Return the pieces of a text: added tokens by their ids, and what is between them."""
        pieces: list[str | int] = []
        start = 0
        for match in self._pattern.finditer(text) if self.contents else ():
            pieces += [text[start : match.start()], self._ids[match[0]]]
            start = match.end()
        return [piece for piece in [*pieces, text[start:]] if piece != ""]

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {content: token for token, content in self.contents.items()}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """An expression that finds an added token; of several that begin alike, the longest."""
        longest_first = sorted(filter(None, self._ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def content(self, token: int | str) -> str:
        """Return the text of an added token.

        Raises:
            InputError: the tokenizer has no such added token.
        """
        if isinstance(token, str) and token in self.contents.values():
            return token
        if isinstance(token, int) and token in self.contents:
            return self.contents[token]
        raise InputError(
            f"token={token!r}: the tokenizer has no such added token; give a constant text instead"
        )


@dataclass(frozen=True)
class _Free:
    """Free text, in which a tag must follow wherever a trigger appears.

    Attributes:
        tags: one object for each tag, with "trigger", "begin" (which starts with the trigger) and
            "content", the node that follows the beginning.
        excludes: strings that the text never holds.
        is_required: whether a tag has to come.
        tags_first: whether the first tag has to come at once, without text before it.
        is_once: whether only one tag may come, with no free text after it.
    """

    tags: Sequence[Node] = ()
    excludes: Sequence[str] = ()
    is_required: bool = False
    tags_first: bool = False
    is_once: bool = False


def tokenized_source(source: str, tokens: AddedTokens) -> str:
    """Return the source of a grammar as llguidance reads it, for a tokenizer.

    Args:
        source: the `Grammar.source`.
        tokens: the added tokens of the tokenizer.

    Raises:
        InputError: a trigger or a constant cannot be written for this tokenizer.
    """
    if not source.startswith('{"structure": '):
        return source
    writer = _Writer(tokens)
    try:
        start = writer.sequence([json.loads(source)["structure"]], is_last=True)
    except RecursionError:
        raise InputError("it is nested too deeply; use fewer levels") from None
    rules = "".join(f"{rule}\n" for rule in [f"start: {start}", *writer.rules])
    return json.dumps({"grammars": [{"lark_grammar": _HEADER + rules}, *writer.grammars]})


def structure_source(node: Node) -> str:
    """Return the `Grammar.source` of a tree of nodes."""
    return json.dumps({"structure": node})


def all_of(*nodes: Node) -> Node:
    """Return the node of nodes one after the other.

    Examples:
        >>> from specjax.grammars.structure import all_of, constant
        >>> all_of(constant("a"), constant("b"))
        {'all': [{'text': 'a'}, {'text': 'b'}]}
    """
    return {"all": list(nodes)}


def constant(text: str) -> Node:
    """Return the node of a constant text.

    Examples:
        >>> from specjax.grammars.structure import constant
        >>> constant("a")
        {'text': 'a'}
    """
    return {"text": text}


def node_of_source(source: str) -> Node:
    """Return a node for the `Grammar.source` of another grammar."""
    parsed = json.loads(source)
    return parsed.get("structure") or {"grammar": parsed["grammars"][0]}


def checked_node(value: Any, checked_grammar: CheckedGrammar) -> Node:
    """Return a node that comes from a client, if this module's writers could have made it.

    Args:
        value: the node.
        checked_grammar: returns a grammar within a node, in llguidance's form, as it may be used.

    Raises:
        InputError: it is not a node, or ``checked_grammar`` raises it.

    Examples:
        >>> from specjax.grammars.structure import checked_node
        >>> checked_node({"all": [{"text": "a"}, {"regex": "/[0-9]/"}]}, checked_grammar=dict)
        {'all': [{'text': 'a'}, {'regex': '/[0-9]/'}]}
        >>> checked_node({"regex": '/a/ "b" /c/'}, checked_grammar=dict)
        Traceback (most recent call last):
        specjax.errors.InputError: regex='/a/ "b" /c/': not one regular expression between slashes
    """
    match value:
        case {"all": list(parts)} | {"any": list(parts)} if len(value) == 1:
            (kind,) = value
            return {kind: [checked_node(part, checked_grammar) for part in parts]}
        case {"repeat": part, "min": int(least), "max": int() | None as most} if len(value) == 3:
            if least < 0 or (most is not None and most < max(least, 1)):
                raise InputError(f"min={least}, max={most}: they must be 0 <= min <= max")
            return {"repeat": checked_node(part, checked_grammar), "min": least, "max": most}
        case {"free": dict(text)} if len(value) == 1:
            return {"free": _checked_free(text, checked_grammar)}
        case {"grammar": grammar} if len(value) == 1:
            return {"grammar": checked_grammar(grammar)}
        case {"regex": str(terminal)} if len(value) == 1:
            _check_terminal(terminal)
            return {"regex": terminal}
        case {"text": str()} | {"token": int() | str()} if len(value) == 1:
            return value
    raise InputError(f"{reprlib.repr(value)}: not a node of a structural tag")


def _check_terminal(terminal: str) -> None:
    """Raise InputError if something would follow the end of a regular expression."""
    if terminal != '""' and not re.fullmatch(r"/(\\[^\n]|[^\\/\n])+/", terminal):
        raise InputError(
            f"regex={reprlib.repr(terminal)}: not one regular expression between slashes"
        )


def _checked_free(text: Mapping[str, Any], checked_grammar: CheckedGrammar) -> Node:
    """Return the fields of `_Free`, if a value has these alone."""
    flags = {name: text.get(name, False) for name in ("is_required", "tags_first", "is_once")}
    excludes, tags = text.get("excludes", []), []
    if not set(text) <= {*flags, "excludes", "tags"} or not (
        all(isinstance(flag, bool) for flag in flags.values())
        and isinstance(excludes, list)
        and all(isinstance(exclude, str) and exclude for exclude in excludes)
        and isinstance(text.get("tags", []), list)
    ):
        raise InputError(f"free={reprlib.repr(text)}: not free text")
    for tag in text.get("tags", []):
        match tag:
            case {"trigger": str(trigger), "begin": str(begin), "content": content} if (
                len(tag) == 3 and trigger and begin.startswith(trigger)
            ):
                content = checked_node(content, checked_grammar)
                tags.append({"trigger": trigger, "begin": begin, "content": content})
            case _:
                raise InputError(f"tags: {reprlib.repr(tag)}: not a tag of free text")
    return {"tags": tags, "excludes": excludes, **flags}


def grammar_parts(source: str) -> list[Mapping[str, Any]]:
    """Return the grammars of a `Grammar.source`, and what holds them together, in JSON or Lark.

    Examples:
        >>> import specjax
        >>> from specjax.grammars.structure import grammar_parts
        >>> [list(part) for part in grammar_parts(specjax.After("x", specjax.Regex("a")).source)]
        [['lark_grammar'], ['structure']]
    """
    parsed = json.loads(source)
    if "structure" not in parsed:
        return parsed["grammars"]
    parts: list[Mapping[str, Any]] = []

    def visit(node: Any) -> Any:
        """Collect the grammars, and return the node without them."""
        if isinstance(node, list):
            return [visit(part) for part in node]
        if not isinstance(node, dict):
            return node
        if "grammar" in node:
            parts.append(node["grammar"])
        if "regex" in node:
            parts.append({"lark_grammar": node["regex"]})
        return {k: visit(v) for k, v in node.items() if k not in ("grammar", "regex")}

    rest = visit(parsed["structure"])
    return [*parts, {"structure": rest}]


@dataclass
class _Writer:
    """Writes nodes as expressions of Lark, and collects the rules and grammars that they need."""

    tokens: AddedTokens
    rules: list[str] = field(default_factory=lambda: [f"BYTES: {_BYTES}"])
    grammars: list[Mapping[str, Any]] = field(default_factory=list)

    def rule(self, prefix: str, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"{prefix}{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def reference(self, grammar: Mapping[str, Any]) -> str:
        """Add a grammar and return the reference to it."""
        name = f"g{len(self.grammars)}"
        self.grammars.append({"name": name, **grammar})
        return f"@{name}"

    def literal(self, text: str) -> str:
        """Return a constant text. Added tokens in it are written as tokens."""
        pieces = self.tokens.split(text)
        return " ".join(quoted(p) if isinstance(p, str) else f"<[{p}]>" for p in pieces)

    def sequence(self, nodes: Sequence[Node], *, is_last: bool) -> str:
        """Return the nodes one after the other.

        Args:
            nodes: the nodes.
            is_last: whether the text may end after them.
        """
        rest, parts = list(self._flat(nodes)), []
        while rest:
            node = rest.pop(0)
            if "free" in node:
                ends = _constants(rest[0]) if rest else []
                del rest[: 1 if ends else 0]
                parts.append(self.free(_Free(**node["free"]), ends, is_last and not rest))
            elif "regex" in node:
                # One terminal for both, or the expression would swallow the constant.
                ends = _constants(rest[0]) if rest else []
                has_text = len(ends) == 1 and isinstance(self.tokens.split(ends[0])[0], str)
                parts.append(self.regex(node["regex"], rest.pop(0)["text"] if has_text else ""))
            else:
                parts.append(self.part(node))
        return " ".join(filter(None, parts)) or '""'

    def _flat(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes of nested sequences, with tokens as constants, without empty ones."""
        flat: list[Node] = []
        for node in nodes:
            if "all" in node:
                flat += self._flat(node["all"])
            elif "token" in node:
                flat.append({"text": self.tokens.content(node["token"])})
            elif node != {"text": ""}:
                flat.append(node)
        return flat

    def part(self, node: Node) -> str:
        """Return a node that is not free text."""
        if "text" in node:
            return self.literal(node["text"])
        if "grammar" in node:
            return self.reference(node["grammar"])
        if "any" in node:
            return _one_of([self.sequence([part], is_last=False) for part in node["any"]])
        most = "" if node["max"] is None else node["max"]
        return f"({self.sequence([node['repeat']], is_last=False)}){{{node['min']},{most}}}"

    def regex(self, terminal: str, text: str) -> str:
        """Return a regular expression and the plain text that follows it."""
        pieces = self.tokens.split(text)
        first = pieces[0] if pieces and isinstance(pieces[0], str) else ""
        body = f"{terminal} {quoted(first)}" if first else terminal
        reference = self.reference({"lark_grammar": f"start: TEXT\nTEXT: {body}"})
        return f"{reference} {self.literal(text[len(first) :])}".strip()

    def free(self, text: _Free, ends: Sequence[str], is_last: bool) -> str:
        """Return free text, with its tags, up to and with one of ``ends``."""
        has_tail = not (text.is_once and (text.is_required or text.tags_first))
        if has_tail and not ends and not is_last:
            raise InputError(
                "free text must be the last part, or a constant text must follow, where it ends"
            )
        writer = _FreeWriter(self, text, ends)
        is_body_last = text.is_once and is_last and not ends
        bodies = [
            self.rule("body", self.sequence([tag["content"]], is_last=is_body_last))
            for tag in text.tags
        ]
        tags = [(t["trigger"], t["begin"], body) for t, body in zip(text.tags, bodies, strict=True)]
        end = _one_of([self.literal(end) for end in ends])
        tail = writer.up_to([(end, end, "") for end in ends]) if ends else writer.to_anywhere()
        if not tags:
            return tail
        interrupted = writer.up_to(tags)
        first = _one_of([f"{self.literal(begin)} {body}" for _, begin, body in tags])
        if not text.is_once:
            more = "+" if text.is_required and not text.tags_first else "*"
            return f"{first if text.tags_first else ''} {interrupted}{more} {tail}"
        if text.tags_first or text.is_required:
            return f"{first if text.tags_first else interrupted} {end}"
        return f"({interrupted} {end} | {tail})"


class _FreeWriter:
    """Writes one free text: what it may hold, and where it is interrupted."""

    def __init__(self, writer: _Writer, text: _Free, ends: Sequence[str]) -> None:
        """Decide which added tokens the text may hold, and exclude strings from it."""
        self._writer = writer
        begins = [(tag["trigger"], tag["begin"]) for tag in text.tags]
        begins += [(end, end) for end in ends]
        excludes = [exclude for exclude in text.excludes if exclude not in ends]
        stops = [*dict.fromkeys(trigger for trigger, _ in begins), *excludes]
        _check_stops(stops, begins, writer.tokens)
        heads = [self._head(begin) for _, begin in begins]
        contents = writer.tokens.contents.items()
        legal = [
            token
            for token, content in contents
            if token not in heads and not any(stop in content for stop in stops)
        ]
        self._chunk = "BYTES"
        if excludes:
            without = "".join(f" & ~(BYTES {quoted(exclude)} BYTES)" for exclude in excludes)
            self._chunk = writer.rule("CHUNK", f"BYTES{without}")
        ids = ",".join(map(str, sorted({*legal, *writer.tokens.raw})))
        self._before = writer.rule("before", f"({self._chunk} <[{ids}]>)*") if ids else ""

    def _head(self, begin: str) -> int | None:
        """Return the added token with which ``begin`` starts; None if text starts it."""
        first = self._writer.tokens.split(begin)[0]
        return None if isinstance(first, str) else first

    def to_anywhere(self) -> str:
        """Return free text that may end anywhere."""
        return f"{self._before} {self._chunk}"

    def up_to(self, ways: Sequence[tuple[str, str, str]]) -> str:
        """Return free text up to one of several triggers, and what follows each of them.

        Args:
            ways: a trigger, a constant that starts with it, and the rule after the constant.
        """
        by_trigger: dict[str, list[str]] = {}
        by_token: dict[int, list[str]] = {}
        writer = self._writer
        for trigger, begin, body in ways:
            rest = writer.literal(begin[len(trigger) :])
            by_trigger.setdefault(trigger, []).append(f"{rest} {body}")
            head = self._head(begin)
            if head is not None:
                rest = writer.literal(begin[len(writer.tokens.contents[head]) :])
                by_token.setdefault(head, []).append(f"{rest} {body}")
        as_text = [
            f"{self._before} {writer.rule('upto', f'{self._chunk} {quoted(trigger)}', '[lazy]')}"
            f" {_one_of(rests)}"
            for trigger, rests in by_trigger.items()
        ]
        as_tokens = [
            f"{self.to_anywhere()} <[{head}]> {_one_of(rests)}" for head, rests in by_token.items()
        ]
        return _one_of([*as_text, *as_tokens])


def _one_of(ways: Sequence[str]) -> str:
    """Return an expression for one of several; nothing if there are none."""
    stripped = [way.strip() or '""' for way in ways]
    return f"({' | '.join(stripped)})" if stripped else ""


def _constants(node: Node) -> list[str]:
    """Return the constants of which a node is one; none if it is something else."""
    if "text" in node:
        return [node["text"]]
    parts = [_constants(part) for part in node.get("any", ())]
    return [text for part in parts for text in part] if all(parts) else []


def _check_stops(
    stops: Sequence[str], begins: Sequence[tuple[str, str]], tokens: AddedTokens
) -> None:
    """Raise InputError if triggers, ends and excluded strings get in each other's way."""
    for index, stop in enumerate(stops):
        for place, shorter in enumerate(stops):
            if index != place and shorter in stop:
                raise InputError(
                    f"{stop!r} contains {shorter!r}, which comes first; leave one of them out"
                )
    for trigger, begin in begins:
        first = tokens.split(begin)[0]
        if isinstance(first, str) and len(first) < len(trigger):
            raise InputError(
                f"{trigger!r}: {first!r} comes before an added token of the tokenizer; give only"
                " what is before it, or the token alone"
            )
