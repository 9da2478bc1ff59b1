"""A reader of one JSON value that arrives in pieces."""

import json
import re
from dataclasses import dataclass, field
from typing import Literal

Path = tuple[str | int, ...]
"""The keys and indices that lead from the outermost value to a value inside it."""

_SPACE = " \t\n\r"
_LITERALS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?((?<=[0-9])[eE][+-]?[0-9]*)?)?")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")

SURROGATE = re.compile("[\ud800-\udfff]")
"""A character that has no bytes in UTF-8. Encoders of JSON refuse a text with it."""

MAX_DEPTH = 100
"""The number of nested objects and arrays that is read. Readers of JSON refuse deep texts."""


MAX_KEY = 2000
"""The number of characters of the longest key. A key is read again with every piece."""


@dataclass
class _Container:
    """An object or array that is not closed.

    Attributes:
        opener: its first character.
        start: the offset of that character.
        expects: what may come next in it.
        step: the key or the index of its newest value.
        keys: the keys so far, since a key may occur once.
    """

    opener: str
    start: int
    expects: Literal["first", "key", "colon", "value", "comma"] = "first"
    step: str | int = ""
    keys: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class JsonMark:
    """The first or last character of a value inside the text.

    Attributes:
        path: where the value is in the outermost value.
        offset: the offset of its first character, or the offset behind its last one.
        is_end: whether the value ends here.
    """

    path: Path
    offset: int
    is_end: bool


class JsonReader:
    """A reader of the JSON text of an object or an array, character by character.

    It is as strict as `json.loads`, and also refuses NaN, Infinity, repeated keys of the outermost
    values, strings with lone surrogates as characters or escapes, keys of more than `MAX_KEY`
    characters, and more than `MAX_DEPTH` nested values.

    Attributes:
        length: the number of characters that were read.
        is_complete: whether the value has ended.
        is_broken: whether the next character cannot continue the value.
    """

    def __init__(self, unique_depth: int = MAX_DEPTH) -> None:
        """Start before the first character.

        Args:
            unique_depth: in how many levels of nested values a key may occur once. Below, the last
                value of a repeated key counts, as `json.loads` has it.
        """
        self._unique_depth = unique_depth
        self.is_complete = self.is_broken = False
        self._stack: list[_Container] = []
        # The newest characters, from the offset `_base` on. Only a key, a number or a literal that
        # has not ended is read again.
        self._recent, self._base, self.length = "", 0, 0
        self._token_start = -1  # the offset of the string, number or literal that is being read
        self._is_string = False
        self._escape = ""  # the escape sequence that is being read
        self._is_half = False  # the newest character is the first half of a surrogate pair
        self._is_key = False

    def push(self, piece: str) -> list[JsonMark]:
        """Read up to the end of the value, and return where values begin and end."""
        marks: list[JsonMark] = []
        self._recent += piece
        end = self._base + len(self._recent)
        while self.length < end and not (self.is_complete or self.is_broken):
            self.length = self._step(self.length, marks)
        is_needed = self._token_start >= 0 and (self._is_key or not self._is_string)
        start = self._token_start if is_needed else self.length
        self._recent, self._base = (
            self._recent[start - self._base : self.length - self._base],
            start,
        )
        return marks

    def _text(self, start: int, end: int) -> str:
        return self._recent[start - self._base : end - self._base]

    def _step(self, position: int, marks: list[JsonMark]) -> int:
        """Read at least one character, and return the offset behind it."""
        if self._is_string:
            return self._in_string(position, marks)
        character = self._recent[position - self._base]
        if self._token_start >= 0:
            if character not in ",]}" and character not in _SPACE:
                return self._in_word(position)
            if not self._end_word(position, marks):
                return position
        if character in _SPACE and self._stack:
            return position + 1
        return (
            position + 1 if self._structure(character, position, marks) else self._break(position)
        )

    def _structure(self, character: str, position: int, marks: list[JsonMark]) -> bool:
        """Read a character outside of strings, numbers and literals; False if it is not legal."""
        if not self._stack:
            return character in "{[" and self._open(character, position, marks)
        inner = self._stack[-1]
        if character in "}]":
            is_legal = inner.expects in ("first", "comma") and inner.opener + character in "{}[]"
            if is_legal:
                self._stack.pop()
                marks.append(JsonMark(self._path(), position + 1, True))
                self._value_ended()
            return is_legal
        if character == ",":
            if inner.expects != "comma":
                return False
            inner.expects = "key" if inner.opener == "{" else "value"
            return True
        if character == ":":
            if inner.expects != "colon":
                return False
            inner.expects = "value"
            return True
        if inner.opener == "{" and inner.expects in ("first", "key"):
            self._is_key = self._is_string = character == '"'
            self._token_start = position if self._is_string else -1
            return self._is_string
        return inner.expects in ("first", "value") and self._open(character, position, marks)

    def _open(self, character: str, position: int, marks: list[JsonMark]) -> bool:
        """Begin a value; False if the character begins none."""
        if self._stack and self._stack[-1].opener == "[":
            step = self._stack[-1].step
            self._stack[-1].step = step + 1 if isinstance(step, int) else 0
        if character in "{[":
            if len(self._stack) == MAX_DEPTH:
                return False
            marks.append(JsonMark(self._path(), position, False))
            self._stack.append(_Container(character, position))
            return True
        self._is_string = character == '"'
        if not (self._is_string or character in "tfn-0123456789"):
            return False
        self._token_start = position
        marks.append(JsonMark(self._path(), position, False))
        return True

    def _path(self) -> Path:
        return tuple(container.step for container in self._stack)

    def _value_ended(self) -> None:
        if self._stack:
            self._stack[-1].expects = "comma"
        else:
            self.is_complete = True

    def _in_string(self, position: int, marks: list[JsonMark]) -> int:
        if self._escape:
            return self._in_escape(position)
        if self._is_half and self._recent[position - self._base] != "\\":
            return self._break(position)
        match = _IN_STRING.match(self._recent, position - self._base)
        assert match is not None
        if (surrogate := SURROGATE.search(match[0])) is not None:
            return self._break(position + surrogate.start())
        end = self._base + match.end()
        if self._is_key and end > self._token_start + MAX_KEY:
            return self._break(max(position, self._token_start + MAX_KEY))
        if match.end() == len(self._recent):
            return end
        if self._recent[match.end()] == "\\":
            self._escape = "\\"
            return end + 1
        if self._recent[match.end()] != '"':
            return self._break(end)
        start, self._token_start, self._is_string = self._token_start, -1, False
        if self._is_key:
            self._is_key = False
            key = json.loads(self._text(start, end + 1))
            inner = self._stack[-1]
            if key in inner.keys and len(self._stack) <= self._unique_depth:
                return self._break(end)
            inner.keys.add(key)
            inner.step, inner.expects = key, "colon"
        else:
            marks.append(JsonMark(self._path(), end + 1, True))
            self._value_ended()
        return end + 1

    def _in_escape(self, position: int) -> int:
        character = self._recent[position - self._base]
        if self._escape == "\\":
            if character != "u" and (character not in _ESCAPES or self._is_half):
                return self._break(position)
            self._escape = "\\u" if character == "u" else ""
        elif character in _HEX:
            self._escape += character
            if len(self._escape) < 6:
                return position + 1
            code, self._escape = int(self._escape[2:], 16), ""
            is_second = 0xDC00 <= code < 0xE000
            if is_second is not self._is_half:
                return self._break(position)
            self._is_half = 0xD800 <= code < 0xDC00
        else:
            return self._break(position)
        return position + 1

    def _in_word(self, position: int) -> int:
        """Read a further character of a number or a literal."""
        word = self._text(self._token_start, position + 1)
        is_legal = (
            any(literal.startswith(word) for literal in _LITERALS)
            if word[0] in "tfn"
            else _NUMBER_BEGUN.fullmatch(word) is not None and len(word) <= 400
        )
        return position + 1 if is_legal else self._break(position)

    def _end_word(self, position: int, marks: list[JsonMark]) -> bool:
        """End a number or a literal before a character; False if it is not whole."""
        word = self._text(self._token_start, position)
        if word not in _LITERALS and not _NUMBER.fullmatch(word):
            self._break(position)
            return False
        self._token_start = -1
        marks.append(JsonMark(self._path(), position, True))
        self._value_ended()
        return True

    def _break(self, position: int) -> int:
        self.is_broken = True
        return position
