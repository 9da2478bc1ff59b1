"""Tool calls in the text of an answer: JSON that streams, and forms that are read when they end."""

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import regex

from specjax.chat.events import Event, RegionClosed, RegionGrew, RegionKind, RegionOpened
from specjax.chat.json_reader import SURROGATE, JsonMark, JsonReader, Path
from specjax.chat.parameter_types import ParameterTypes
from specjax.errors import InputError

Tools = Sequence[Mapping[str, Any]]
"""Declarations of tools, as chat templates and OpenAI's API take them."""


@dataclass(frozen=True)
class JsonCallForm:
    """Calls that are JSON, whose arguments stream.

    Attributes:
        arguments: where the arguments are in the JSON value of a call; () if they are the value.
        name: where the name is in it; None if the opening tag has it.
        is_list: whether the value is a list of calls.
    """

    arguments: Path
    name: Path | None
    is_list: bool = False


@dataclass(frozen=True)
class ParsedCallForm:
    """Calls in another form, which are read when their region closes.

    Attributes:
        field: the field of the response template.
    """

    field: Mapping[str, Any]

    def check(self) -> None:
        """Refuse, with an InputError, a form that the installed transformers cannot read."""
        if not _needs_transformers(self.field):
            return
        try:
            _parse_content()
        except ImportError:
            from transformers import __version__

            raise InputError(
                f"transformers {__version__}: it cannot read tool calls in the form"
                f" {self.field['content']!r}; install transformers>=5.13"
            ) from None

    def read(self, body: str, captures: Mapping[str, str], tools: Tools) -> list[tuple[str, str]]:
        """Return the name and the arguments' JSON text of each call in a region.

        Args:
            body: the text between the tags.
            captures: the named groups of the tags.
            tools: declarations, which say how to read arguments that have no types in the text.

        Raises:
            ValueError: the text is not in this form.
        """
        value = _parse(body, self.field)
        transform = self.field.get("transform")
        if transform is not None and self.field.get("transform_each"):
            items = [_fill(transform, {**captures, **item}) for item in value]
        elif transform is not None:
            items = [_fill(transform, {**captures, "content": value})]
        else:
            items = value if isinstance(value, list) else [value]
        if self.field["content"] not in _WITHOUT_TYPES:
            tools = ()
        return [_name_and_arguments(item, tools) for item in items]


CallForm = JsonCallForm | ParsedCallForm


def read_call_form(template_field: Mapping[str, Any], captures: Iterable[str] = ()) -> CallForm:
    """Return how the calls of a response template's field are read.

    ``captures`` are the named groups of the tag that opens the region.

    Raises:
        ValueError: there is no such parser.
    """
    content = template_field.get("content", "text")
    if content not in _PARSERS:
        raise ValueError(f"content={content!r}: must be one of {', '.join(sorted(_PARSERS))}")
    if content == "json" and not template_field.get("content_args"):
        is_list = bool(template_field.get("transform_each"))
        paths = _paths(template_field.get("transform"), is_list)
        if paths is not None and (paths[1] is not None or "name" in captures):
            return JsonCallForm(*paths, is_list)
    if content == "xml-inline":
        pattern = template_field.get("content_args", {}).get("tag_pattern", "")
        if not {"key", "value"} <= regex.compile(pattern).groupindex.keys():
            raise ValueError("content_args.tag_pattern: must have the groups 'key' and 'value'")
    return ParsedCallForm({"content": content, **template_field})


def _paths(transform: Any, is_list: bool) -> tuple[Path, Path | None] | None:
    """Return where a transform takes a call's arguments and name from; None if it does more."""
    root = "" if is_list else "content"
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if function == "{content}" and not is_list:
        return ("arguments",), ("name",)
    if not isinstance(function, Mapping) or function.keys() != {"name", "arguments"}:
        return None
    name, arguments = (_path(function[key], root) for key in ("name", "arguments"))
    if arguments is None:
        return None
    if name is None and not re.fullmatch(r"\{name\}", str(function["name"])):
        return None
    return arguments, name


def _path(placeholder: Any, root: str) -> Path | None:
    match = (
        re.fullmatch(r"\{(\w+(?:\.\w+)*)\}", placeholder) if isinstance(placeholder, str) else None
    )
    if match is None:
        return None
    names = match[1].split(".")
    if not root:
        return tuple(names)
    return tuple(names[1:]) if names[0] == root else None


class JsonCalls:
    """A reader of the calls in a region whose text is JSON.

    Attributes:
        is_complete: whether the JSON value has ended.
        is_broken: whether the text is not the JSON of calls.
        is_open: whether a call has begun, its name and its arguments, that has not ended.
    """

    def __init__(self, form: JsonCallForm, name: str | None, is_whole: bool = False) -> None:
        """Start at the begin of a region.

        Args:
            form: where the parts of a call are.
            name: the tool's name, if the tag has it.
            is_whole: whether a call is reported when it is complete, not while it grows.
        """
        self._form, self._tag_name, self._is_whole = form, name, is_whole
        # A call is told from other JSON by its keys. Those of its arguments are not looked at.
        self._json = JsonReader(unique_depth=form.is_list + len(form.arguments))
        self._blank = ""  # the white space before the value
        self._pieces: list[str] = []
        self._oldest = self._newest = 0  # the offsets of the first and of the last piece
        self._depth = 1 if form.is_list else 0
        self._length = 0  # the number of characters before the first fault
        self._complete_end = 0  # the offset behind the last complete call
        self.is_broken = self.is_open = self.is_complete = False
        self._begin()

    def _begin(self) -> None:
        self._name = self._tag_name
        self._is_text = False  # whether the arguments are a string that holds the JSON text
        self._start = self._end = -1  # the offsets of the arguments
        self._sent = 0
        self._arguments: str | None = None  # the text that a string of arguments holds
        self._name_start = -1

    def push(self, text: str) -> tuple[list[Event], int]:
        """Read the next characters, and return the events and how many characters were read.

        All are read unless the value ends, or is not the JSON of calls. Then those are read that
        come before the first fault, so that nothing depends on where the text is cut.
        """
        events: list[Event] = []
        before = self._json.length
        value = text if before else text.lstrip(" \t\r\n")
        blank = len(text) - len(value)
        self._blank += text[:blank]
        marks = self._json.push(value)
        self._length = self._json.length
        self._pieces.append(value[: self._length - before])
        self._newest = before
        for mark in marks:
            self._mark(mark, events)
            if self.is_broken:
                self._length = mark.offset
                break
        else:
            # What is legal before a broken character has been reported, or is now.
            self._grow(events, self._length)
            self.is_broken |= self._json.is_broken
            self.is_complete = self._json.is_complete
        return events, blank + self._length - before

    def drop(self, reason: Literal["cut", "invalid"], events: list[Event]) -> None:
        """End a call that is open, and that is no call of the answer."""
        if self.is_open and not self._is_whole:
            events.append(RegionClosed(RegionKind.TOOL_CALL, reason))
        self.is_open = False

    def rest(self) -> str:
        """Return the text behind the last complete call."""
        rest = self._slice(self._complete_end, self._length)
        return rest if self.has_calls else self._blank + rest

    @property
    def has_calls(self) -> bool:
        """True if a call is complete."""
        return self._complete_end > 0

    def _slice(self, start: int, end: int) -> str:
        if start < self._newest:
            self._pieces, self._newest = ["".join(self._pieces)], self._oldest
        return self._pieces[-1][start - self._newest : end - self._newest] if self._pieces else ""

    def _mark(self, mark: JsonMark, events: list[Event]) -> None:
        if len(mark.path) < self._depth:
            self.is_broken |= not mark.is_end and self._slice(mark.offset, mark.offset + 1) != "["
            return
        path = mark.path[self._depth :]
        if mark.is_end:
            self._ended(path, mark.offset, events)
            return
        if not path:
            self._begin()
            self.is_broken = self._slice(mark.offset, mark.offset + 1) != "{"
        if path == self._form.name:
            self._name_start = mark.offset
        elif path == self._form.arguments and not self.is_broken:
            character = self._slice(mark.offset, mark.offset + 1)
            self._is_text, self._start, self._sent = character == '"', mark.offset, mark.offset
            self.is_broken = character not in '{"'

    def _ended(self, path: Path, offset: int, events: list[Event]) -> None:
        if path == self._form.name:
            name = json.loads(self._slice(self._name_start, offset))
            self.is_broken = not isinstance(name, str) or not name
            self._name = name
        if path == self._form.arguments:
            self._end = offset
            if self._is_text:
                self._arguments = str(json.loads(self._slice(self._start, offset)))
                self.is_broken = not _is_object(self._arguments)
        if not path:
            self._grow(events, offset)
            if self.is_open and self._end >= 0:
                if self._is_whole:
                    assert self._name is not None
                    text = self._arguments or self._slice(self._start, self._end)
                    events.append(RegionOpened(RegionKind.TOOL_CALL, self._name))
                    events.append(RegionGrew(RegionKind.TOOL_CALL, text))
                events.append(RegionClosed(RegionKind.TOOL_CALL))
                self.is_open, self._complete_end = False, offset
                # What is read again of a long list is its newest call.
                self._pieces = [self._slice(offset, self._length)]
                self._oldest = self._newest = offset
            else:
                self.is_broken = True

    def _grow(self, events: list[Event], offset: int) -> None:
        """Report what there is of a call up to an offset."""
        if self._name is None or self._start < 0 or self.is_broken:
            return
        end = self._end if self._end >= 0 else offset
        if self._sent >= end or (self._is_text and self._end < 0):
            return
        if not self._is_whole:
            if not self.is_open:
                events.append(RegionOpened(RegionKind.TOOL_CALL, self._name))
            text = self._arguments or self._slice(self._sent, end)
            events.append(RegionGrew(RegionKind.TOOL_CALL, text))
        self.is_open, self._sent = True, end


def _is_object(text: str) -> bool:
    reader = JsonReader(unique_depth=0)
    reader.push(text)
    return (
        text.startswith("{") and reader.is_complete and not text[reader.length :].strip(" \t\r\n")
    )


# --- calls that are read when they end ------------------------------------------------------------

_PARSERS = frozenset(
    {"text", "int", "float", "bool", "json", "xml-inline", "kv-lines", "python-call-list"}
)
_WITHOUT_TYPES = frozenset({"xml-inline", "kv-lines"})


_READ_HERE = {
    "json": frozenset({"unquoted_keys", "string_delims"}),
    "xml-inline": frozenset({"tag_pattern"}),
}
"""The parsers that need no transformers, and the arguments that they then take."""


def _needs_transformers(template_field: Mapping[str, Any]) -> bool:
    arguments = template_field.get("content_args", {})
    readable = _READ_HERE.get(template_field["content"])
    return readable is None or not arguments.keys() <= readable


def _parse(body: str, template_field: Mapping[str, Any]) -> Any:
    content, arguments = template_field["content"], template_field.get("content_args", {})
    if _needs_transformers(template_field):
        return _parse_content()(body, content, arguments)
    if content == "xml-inline":
        return _tags(body, arguments["tag_pattern"])
    return _json(_plain_json(body, **arguments))


def _plain_json(
    text: str, unquoted_keys: bool = False, string_delims: Sequence[Sequence[str]] = ()
) -> str:
    """Return text in a dialect of JSON as JSON.

    Args:
        text: the text.
        unquoted_keys: whether keys may be words without quotes.
        string_delims: pairs of tags that may stand around a string, which has no escapes.
    """
    ends: dict[str, str] = {first: last for first, last in string_delims}  # noqa: C416
    key = [r"(?<=[{,])\s*[\w.\-]+(?=\s*:)"] if unquoted_keys else []
    begins = re.compile("|".join([*map(re.escape, ends), '"', *key]))
    pieces: list[str] = []
    position = 0
    while (match := begins.search(text, position)) is not None:
        pieces.append(text[position : match.start()])
        position = match.end()
        if match[0] in ends:
            end = text.find(ends[match[0]], position)
            if end < 0:  # a search from each string's begin to the text's end would be quadratic
                raise ValueError("a string does not end")
            pieces.append(json.dumps(text[position:end]))
            position = end + len(ends[match[0]])
        elif match[0] == '"':
            string = _STRING_REST.match(text, position)
            if string is None:
                raise ValueError("a string does not end")
            pieces.append('"' + string[0])
            position = string.end()
        else:
            pieces.append(json.dumps(match[0].strip()))
    return "".join([*pieces, text[position:]])


_STRING_REST = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def _parse_content() -> Any:
    from transformers.utils.chat_parsing.content_parsers import parse_content

    return parse_content


MAX_BODY_SECONDS = 0.25
"""The processor time that the tags of one call may take. A template's expression may be slow."""

_TEXT = re.compile(r"[^ \t\r\n]|\Z")


def _start_of_text(body: str, position: int) -> int:
    match = _TEXT.search(body, position)
    return len(body) if match is None else match.start()


def _tags(body: str, pattern: str) -> dict[str, str]:
    """Return the values of tags by key; all of the body must be tags."""
    values: dict[str, str] = {}
    tag, end = regex.compile(pattern, regex.DOTALL), len(body.rstrip(" \t\r\n"))
    deadline = time.thread_time() + MAX_BODY_SECONDS
    position = _start_of_text(body, 0)
    while position < end:
        # Tags are matched one behind the other. A search would begin again at each tag that has no
        # end, in quadratic time.
        match = tag.match(body, position, timeout=max(0.001, deadline - time.thread_time()))
        if match is None or match.end() == position:
            raise ValueError("text between the tags")
        values[match["key"]] = match["value"]
        position = _start_of_text(body, match.end())
    return values


def _fill(transform: Any, values: Mapping[str, Any]) -> Any:
    """Replace the placeholders of a transform."""
    if isinstance(transform, Mapping):
        return {key: _fill(value, values) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_fill(value, values) for value in transform]
    match = re.fullmatch(r"\{(\w+(?:\.\w+)*)\}", transform) if isinstance(transform, str) else None
    if match is None:
        return transform
    value: Any = values
    for name in match[1].split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"there is no {match[1]}")
        value = value[name]
    return value


def _name_and_arguments(value: Any, tools: Tools) -> tuple[str, str]:
    """Return a call's name and its arguments as JSON text.

    Raises:
        ValueError: the value is not a call.
    """
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError("not a call")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    if isinstance(arguments, str):
        if not _is_object(arguments):
            raise ValueError("arguments that are no object")
        return name, arguments
    if not isinstance(arguments, Mapping):
        raise ValueError("arguments that are no object")
    schemas = ParameterTypes(_parameters_of(tools, name))
    typed = {
        key: typed_value(value, schemas.of(key)) if isinstance(value, str) else value
        for key, value in arguments.items()
    }
    text = json.dumps(typed, ensure_ascii=False, allow_nan=False)
    _check_characters(name + text)
    return name, text


def _parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the schema of the arguments of the tool with a name; empty if there is none."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}
_SPELLINGS = {"True": True, "False": False, "None": None}


def typed_value(text: str, types: frozenset[str] | None) -> Any:
    """Return an argument's text as a value of a type that its schema allows, if it is one.

    A text that is a value of another allowed type is not read as a string. Where any type is
    allowed (None), the text stays a string.

    Examples:
        >>> from specjax.chat.calls import typed_value
        >>> [typed_value("5", frozenset(types)) for types in (["integer", "string"], ["string"])]
        [5, '5']
    """
    if types is None:
        return text
    try:
        value = _SPELLINGS[text.strip()] if text.strip() in _SPELLINGS else _json(text)
    except (ValueError, RecursionError):
        return text
    for name in types:
        if isinstance(value, _TYPES.get(name, ())) and (
            name == "boolean" or not isinstance(value, bool)
        ):
            return value
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return int(value)
    return text


def _json(text: str) -> Any:
    """Return a JSON value.

    Raises:
        ValueError: it is not JSON, or has NaN or a lone surrogate.
    """

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    value = json.loads(text, parse_constant=refuse)
    if "\\u" in text:
        _check_characters(json.dumps(value, ensure_ascii=False))
    return value


def _check_characters(text: str) -> None:
    """Refuse, with a ValueError, a text that has no bytes in UTF-8."""
    if SURROGATE.search(text) is not None:
        raise ValueError("a lone surrogate")


@dataclass
class RegionBody:
    """The text of a region whose calls are read when it closes.

    Attributes:
        captures: the named groups of its tags.
        pieces: its text.
    """

    captures: dict[str, str]
    pieces: list[str] = field(default_factory=list)
