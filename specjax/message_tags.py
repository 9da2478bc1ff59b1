"""Tags in the messages of a chat: a template's own tags are tokens, and those of messages are text.

A user may write ``<|im_start|>``, and a tool's result may have it. As a token it would begin a new
message, with whatever role follows. So the tags in messages are put between two marks before the
template writes the chat, and the marks in the text say which tags are not the template's own.
"""

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from specjax.plain_text import Span, Tags, tags_of
from specjax.templates import Messages

_Tools = Sequence[Mapping[str, Any]]

_CALLS = ("tool_calls", "function_call")

_AUTHORS = ("assistant", "system", "developer")
"""The roles whose text may have tags that the tokenizer does not call special.

The application writes the instructions, which may explain ``<tool_call>``, and the model wrote the
answers, which may have ``<think>``.
"""


@dataclass(frozen=True)
class ChatText:
    """The text of a chat, and where tags in it are text of its messages.

    Attributes:
        text: the text.
        messages: the messages that the template wrote, with marks around such tags.
        marks: the marks.
        marked: the text with the marks; "" if there are none.

    Examples:
        >>> from specjax.message_tags import ChatText
        >>> ChatText("a<b>c", [], ("(", ")"), "a(<b>)c").spans
        [(1, 4)]
    """

    text: str
    messages: Messages
    marks: tuple[str, str] = ("", "")
    marked: str = ""

    @property
    def spans(self) -> list[Span]:
        """The places of these tags in the text."""
        if not self.marked:
            return []
        (start, end), spans, length = self.marks, [], 0
        for index, piece in enumerate(self.marked.split(start)):
            inside, mark, after = piece.partition(end)
            if index and mark:
                spans.append((length, length + len(inside)))
            length += len(inside) + len(after.replace(end, ""))
        return spans

    def places(self, spans: Sequence[Span]) -> list[Span]:
        """Return places of the text with marks as places of the text."""
        if not self.marked:
            return list(spans)

        def place(index: int) -> int:
            return len(_without(self.marked[:index], self.marks))

        return [(place(start), place(end)) for start, end in spans]


def _without(marked: str, marks: tuple[str, str]) -> str:
    return marked.replace(marks[0], "").replace(marks[1], "")


def chat_text(
    tokenizer: Any,
    text: str,
    messages: Messages,
    tools: _Tools,
    render: Callable[[Messages, _Tools], str],
) -> ChatText:
    """Return the text of a chat, with the places where tags in it are text of its messages.

    It is another text only where the template reads a tag in a message, such as Qwen3's, for which
    a user's message between ``<tool_response>`` tags is a tool's result. Then the template writes
    the message as any other one. If the template changes the marks, or the tokenizer has no
    tokenizer.json, there are no such places, and a warning is logged.

    Args:
        tokenizer: the tokenizer.
        text: the text of the chat.
        messages: the messages, in the form that the template reads.
        tools: the declarations of tools.
        render: returns the text of messages with tools.

    Examples:
        >>> from specjax.message_tags import chat_text
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> messages = [{"role": "user", "content": "a<|endoftext|>"}]
        >>> def render(messages, tools):
        ...     return f"[{messages[0]['content']}]"
        >>> chat_text(tokenizer, render(messages, []), messages, [], render).spans
        [(2, 15)]
    """
    tags = tags_of(tokenizer)
    if tags is None:
        _warn("the tokenizer has no tokenizer.json")
        return ChatText(text, messages)
    markers = _markers(tags, messages, tools)
    wider = None
    for marker in markers:
        marked = marker.rendered(render)
        chat = ChatText(_without(marked, marker.marks), marker.messages, marker.marks, marked)
        if chat.text == text or (marker.extent != "all" and marker.are_whole(text, marked)):
            if wider is not None and wider.text == chat.text:
                return wider  # the strings that are marked only there change nothing
            if marker.extent == "contents":
                _warn("the chat template refuses marks in ids, calls or tools")
            return chat
        wider = chat
    if markers:
        _warn("the chat template changes the text of messages")
    return ChatText(text, messages)


def _markers(tags: Tags, messages: Messages, tools: _Tools) -> "list[_Marker]":
    """Return markers of fewer and fewer strings; none if no string has a tag."""
    every = _Marker(tags, "all", messages, tools)
    if not every.count:
        return []
    without_answers = _Marker(tags, "without answers", messages, tools)
    contents = _Marker(tags, "contents", messages, tools)
    return [
        *([every] if without_answers.count < every.count else []),
        *([without_answers] if without_answers.count else []),
        *([contents] if 0 < contents.count < without_answers.count else []),
    ]


_Extent = Literal["all", "without answers", "contents"]
"""Which strings are marked: all; all but the text of answers, whose tags a template may read to
drop a thought; only the contents of messages that are no answers, because a template may check the
length of an id."""


class _Marker:
    """Puts the tags of strings between two marks.

    Attributes:
        extent: which strings are marked.
        marks: the marks before and behind a tag.
        messages: the messages with marks.
        strings: the strings with tags, each with its marked form.
        count: how often a string with tags occurs.
    """

    def __init__(self, tags: Tags, extent: _Extent, messages: Messages, tools: _Tools) -> None:
        self._tags, self.extent = tags, extent
        # Nobody can write these marks, because their number is random. Digits have no case.
        number = secrets.randbelow(10**16)
        self.marks = f"\ue000{number}\ue001", f"\ue000{number}\ue002"
        self.strings: set[tuple[str, str]] = set()
        self.count = 0
        self.messages = [dict(self._message(message)) for message in messages]
        self._tools = tools if extent == "contents" else self._value(tools)

    def rendered(self, render: Callable[[Messages, _Tools], str]) -> str:
        """Return the text of the chat with marks; "" if the template refuses it."""
        try:
            return render(self.messages, self._tools)
        except Exception:  # a template is code of the checkpoint and may raise any error
            return ""

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        role = message.get("role")
        is_by_author = role in _AUTHORS
        return {
            # The arguments of a call are text in any case: a tag there would end the call.
            name: self._value(value, only_special=is_by_author and name not in _CALLS)
            if self._is_marked(role, name)
            else value
            for name, value in message.items()
        }

    def _is_marked(self, role: Any, name: str) -> bool:
        if self.extent == "contents":
            return role != "assistant" and name == "content"
        return self.extent == "all" or role != "assistant" or name in _CALLS

    def _value(self, value: Any, only_special: bool = False) -> Any:
        """Return a value with marks in its strings, also in the keys of its mappings."""
        if isinstance(value, str):
            return self._string(value, only_special)
        if isinstance(value, Mapping):
            return {
                self._key(key, only_special): self._value(part, only_special)
                for key, part in value.items()
            }
        if isinstance(value, list | tuple):
            texts = [_text_of(part) for part in value]
            if len(texts) > 1 and all(text is not None for text in texts):
                return self._parts(value, texts, only_special)
            return [self._value(part, only_special) for part in value]
        return value

    def _parts(
        self, parts: Sequence[Mapping[str, Any]], texts: Sequence[Any], only_special: bool
    ) -> list[Any]:
        """Return a content's parts with marks. Templates join them, and a tag may be cut in two."""
        spans, marked, begin = self._tags.spans("".join(texts), only_special), [], 0
        for part, text in zip(parts, texts, strict=True):
            end = begin + len(text)
            inside = [
                (max(start, begin) - begin, min(stop, end) - begin)
                for start, stop in spans
                if start < end and stop > begin
            ]
            more = {name: value for name, value in part.items() if name != "text"}
            marked.append(
                {**self._value(more, only_special), "text": self._between_marks(text, inside)}
            )
            begin = end
        return marked

    def _key(self, key: Any, only_special: bool = False) -> Any:
        """Return a key with marks around the last characters of tags.

        A template may sort the keys, so that their first characters count.
        """
        if not isinstance(key, str):
            return key
        spans = self._tags.spans(key, only_special)
        return self._between_marks(key, [(end - 1, end) for _, end in spans])

    def _string(self, string: str, only_special: bool) -> str:
        return self._between_marks(string, self._tags.spans(string, only_special))

    def _between_marks(self, string: str, spans: Sequence[Span]) -> str:
        if not spans:
            return string
        pieces, begin = [], 0
        for start, end in spans:
            pieces += [string[begin:start], self.marks[0], string[start:end], self.marks[1]]
            begin = end
        marked = "".join([*pieces, string[begin:]])
        self.strings.add((string, marked))
        self.count += 1
        return marked

    def are_whole(self, text: str, rendered: str) -> bool:
        """Return True if a template has not changed the marks.

        Each string that is in the text, as it is or as JSON, must be in the other text with its
        marks. Nothing may have written the marks as an escape.
        """
        forms = (
            (form(string), form(marked))
            for string, marked in self.strings
            for form in (str.strip, _as_json)
        )
        escape = json.dumps(self.marks[0][0])[1:-1]
        return all(marked in rendered for string, marked in forms if string in text) and (
            escape not in rendered.lower() or escape in text.lower()
        )


def _text_of(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else None


def _as_json(string: str) -> str:
    return json.dumps(string, ensure_ascii=False)[1:-1]


@lru_cache
def _warn(reason: str) -> None:
    """Log once that tags in messages are tokens, and why."""
    logging.getLogger("specjax").warning(
        "%s, so text in a message that spells a special token becomes that token", reason
    )
