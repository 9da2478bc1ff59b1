"""Records of data sets as documents: texts, and conversations in all usual forms.

A conversation is a list of messages, ``{"role": …, "content": …}``, whatever its stored form. A
message may also have ``thinking``, the reasoning before the answer; ``tool_calls``,
``tool_call_id`` and ``name``, as in OpenAI's API; and ``weight`` 0, if it is not to be learnt.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from specjax.text import REASONING_FIELDS
from specjax.training import written
from specjax.training.unusable import UnusableRecordError
from specjax.training.written import WrittenTokens

Message = dict[str, Any]

_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""The role names of ShareGPT, OpenAI and others, and the role that each stands for."""

_CALL_ROLES = {"function_call", "tool_call"}
"""Roles of ShareGPT's messages whose content is the JSON text of tool calls."""

_MESSAGE_FIELDS = {
    *("role", "from", "content", "value", "weight", "name", "id", "tool_call_id"),
    *("tool_calls", "function_call", *REASONING_FIELDS),
}
"""The fields of messages that are understood."""

_PICTURES = ("image", "images", "video", "videos", "audio", "audios")

REGENERATED_FROM = "regenerated_from"
"""The field in which ``specjax regenerate`` stores the `find_origin` of a record's source."""


@dataclass(frozen=True)
class Document:
    """A text or a conversation.

    Attributes:
        name: the place of the record, for messages, or its origin.
        text: the text; None for a conversation.
        messages: the conversation; None for a text.
        origin: the value of the field `REGENERATED_FROM`; None if the record lacks it.
        written: the tokens that a target generated, if the record has them.
        tools: the declarations of tools of a conversation, as in OpenAI's API.
        where: the place of the record: its file and its line.
    """

    name: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    origin: str | None = None
    written: WrittenTokens | None = field(default=None, compare=False)
    tools: tuple[Mapping[str, Any], ...] = ()
    where: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        """The place of the record, for messages."""
        return self.where or self.name


def parse_record(record: Any, where: str, ignored: Counter[str] | None = None) -> Document:
    """Parse a record as a document.

    Args:
        record: a mapping with ``text``, or a conversation: ``messages`` or ``conversations`` in the
            form of OpenAI (role, content) or ShareGPT (from, value), the ``chosen`` side of a
            preference, UltraChat's ``data``, or Alpaca's ``instruction`` and ``output``. It may
            also have ``system``, ``tools``, and the tokens that a target generated
            (`specjax.training.written`).
        where: the place of the record, for messages. It is the name of the document unless the
            record has `REGENERATED_FROM`.
        ignored: counts the fields of messages that are not understood.

    Raises:
        UnusableRecordError: The record is not a document, or its tokens are damaged.

    Examples:
        >>> from specjax.training.records import parse_record
        >>> record = {"instruction": "Add.", "input": "2 and 2", "output": "4"}
        >>> [message["content"] for message in parse_record(record, "file:1").messages]
        ['Add.\\n\\n2 and 2', '4']
    """
    counts = Counter() if ignored is None else ignored
    try:
        if not isinstance(record, Mapping):
            raise _UnusableError(
                f"it has {type(record).__name__}; a record is an object with fields"
            )
        origin = record[REGENERATED_FROM] if isinstance(record.get(REGENERATED_FROM), str) else None
        stored = _conversation(record)
        if stored is not None:
            messages, tools, text = _messages(stored, record, counts), _tools(record), None
        elif isinstance(record.get("text"), str):
            messages, tools, text = None, (), str(record["text"])
        else:
            raise _UnusableError(
                f"it has {', '.join(map(str, record)) or 'no fields'}; a record needs text, or"
                " messages or conversations, a list of messages"
            )
        _check_unicode([text, messages, tools, origin])
    except _UnusableError as error:
        raise UnusableRecordError(where, str(error)) from None
    tokens = written.parse(record, where)
    return Document(origin or where, text, messages, origin, tokens, tools, where)


class _UnusableError(Exception):
    """The reason why a record cannot be used."""


# --- forms of conversations -----------------------------------------------------------------------


def _conversation(record: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return a record's messages, in the form of OpenAI or ShareGPT; None for a text."""
    for kind in ("messages", "conversations", "conversation"):
        if _is_list(record.get(kind)):
            return record[kind]
    forms: tuple[Callable[[Mapping[str, Any]], Sequence[Any] | None], ...] = (
        _preferred,
        _ultrachat,
        _alpaca,
    )
    return next((stored for form in forms if (stored := form(record)) is not None), None)


_HUMAN_OR_ASSISTANT = re.compile(r"\n\n(Human|Assistant):")


def _preferred(record: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the conversation with the chosen answer of a preference, or with a completion.

    The prompt may be a text or messages, and so may the answer. In Anthropic's hh-rlhf both are one
    text with the marks "Human:" and "Assistant:".
    """
    chosen = record.get("chosen")
    if chosen is None and _is_list(record.get("completion")):
        chosen = record["completion"]
    if isinstance(chosen, Mapping):
        chosen = [chosen]
    if not isinstance(chosen, str) and not _is_list(chosen):
        return None
    prompt = next(
        (record[name] for name in ("prompt", "question", "instruction") if record.get(name)), None
    )
    if isinstance(chosen, str):
        pieces = _HUMAN_OR_ASSISTANT.split(chosen)
        if prompt is None and len(pieces) > 1 and not pieces[0].strip():
            return [
                {"role": "user" if who == "Human" else "assistant", "content": content.strip()}
                for who, content in zip(pieces[1::2], pieces[2::2], strict=True)
            ]
        if prompt is None:
            raise _UnusableError("chosen: it is a text without a prompt; add prompt to the record")
        chosen = [{"role": "assistant", "content": chosen}]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    has_prompt = any(_role(message) == "user" for message in chosen)
    return chosen if prompt is None or has_prompt or not _is_list(prompt) else [*prompt, *chosen]


def _ultrachat(record: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the conversation of UltraChat's ``data``: questions and answers in turn."""
    texts = record.get("data")
    if not _is_list(texts) or not all(isinstance(text, str) for text in texts):
        return None
    return [
        {"role": "assistant" if index % 2 else "user", "content": text}
        for index, text in enumerate(texts)
    ]


def _alpaca(record: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the conversation of an instruction, its input and its output, after its history."""
    instruction, output = record.get("instruction"), record.get("output")
    if not isinstance(instruction, str) or not isinstance(output, str):
        return None
    history = record.get("history") or []
    if not _is_list(history) or not all(_is_list(turn) and len(turn) == 2 for turn in history):
        raise _UnusableError("history: must be a list of pairs of question and answer")
    extra = record.get("input") or ""
    if not isinstance(extra, str):
        raise _UnusableError(f"input: must be text, not {type(extra).__name__}")
    question = "\n\n".join(part for part in (instruction, extra) if part)
    turns = [*history, (question, output)]
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]


def _role(message: Any) -> str | None:
    """Return the role that the role name of a stored message stands for."""
    if not isinstance(message, Mapping):
        return None
    name = message.get("role") or message.get("from")
    return _ROLES.get(name.lower()) if isinstance(name, str) else None


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


# --- messages -------------------------------------------------------------------------------------


def _messages(
    stored: Sequence[Any], record: Mapping[str, Any], ignored: Counter[str]
) -> tuple[Message, ...]:
    """Return the messages of a record in one form."""
    for name in _PICTURES:
        if record.get(name):
            raise _UnusableError(f"it has {name}; only texts can be learnt")
    if not stored:
        raise _UnusableError("it has no messages")
    messages = tuple(_message(entry, ignored) for entry in stored)
    system = record.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system}, *messages)
    return messages


def _message(entry: Any, ignored: Counter[str]) -> Message:
    name = entry.get("role") or entry.get("from") if isinstance(entry, Mapping) else None
    if not isinstance(name, str):
        raise _UnusableError("a message needs role and content, or from and value")
    role = _role(entry)
    if role is None:
        raise _UnusableError(
            f"role {name[:80]!r}: it must be user, assistant, system, developer or tool, or a usual"
            " name of one, such as human or gpt"
        )
    content, thinking = _content(entry, role)
    message: Message = {"role": role}
    calls = []
    if role == "assistant":
        if name.lower() in _CALL_ROLES:
            content, calls = None, _calls(content)
        else:
            calls = _calls(entry.get("tool_calls")) + _calls(entry.get("function_call"))
        thinking = thinking or next(
            (entry[key] for key in REASONING_FIELDS if isinstance(entry.get(key), str)), ""
        )
    if content is None and not calls and not thinking:
        raise _UnusableError("a message has no content: it is missing or null")
    message["content"] = content or ""
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    if role == "tool":
        message |= {
            key: entry[key] for key in ("name", "tool_call_id") if isinstance(entry.get(key), str)
        }
    if role == "assistant" and not _is_learnt(entry):
        message["weight"] = 0
    ignored.update(
        str(key)
        for key, value in entry.items()
        if value is not None
        and value != []
        and (key not in _MESSAGE_FIELDS or (key in REASONING_FIELDS and not thinking and value))
    )
    return message


def _content(entry: Mapping[str, Any], role: str) -> tuple[str | None, str]:
    """Return the text of a message and the reasoning in it. Parts of text become lines."""
    content = entry.get("content")
    content = entry.get("value") if content is None else content
    if content is None or isinstance(content, str):
        return content, ""
    if _is_list(content):
        parts = [{"text": part} if isinstance(part, str) else part for part in content]
        texts = [_part(part, "text", ("text",)) for part in parts]
        thoughts = [_part(part, "thinking", REASONING_FIELDS) for part in parts]
        for part, text, thought in zip(parts, texts, thoughts, strict=True):
            if text is None and thought is None:
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise _UnusableError(f"content: a part has type {kind!r}; only text can be learnt")
        thinking = "\n".join(thought for thought in thoughts if thought)
        return "\n".join(text for text in texts if text is not None), thinking
    if role == "tool" and isinstance(content, Mapping):  # the result of a tool as an object
        return json.dumps(content, ensure_ascii=False, default=str), ""
    raise _UnusableError(f"content: must be text, not {type(content).__name__}")


def _part(part: Any, kind: str, fields: Iterable[str]) -> str | None:
    """Return the text of a part of a content if it is of this kind, else None."""
    if not isinstance(part, Mapping) or part.get("type", "text") not in (kind, *fields):
        return None
    return next((part[name] for name in fields if isinstance(part.get(name), str)), None)


def _is_learnt(entry: Mapping[str, Any]) -> bool:
    weight = entry.get("weight")
    if weight is None:
        return True
    if not isinstance(weight, int | float) or weight not in (0, 1):
        raise _UnusableError(f"weight {weight!r:.40}: must be 0 or 1")
    return bool(weight)


# --- tools ----------------------------------------------------------------------------------------


def _calls(stored: Any) -> list[Mapping[str, Any]]:
    """Return tool calls in the form of OpenAI's API, from that form, a bare call, or JSON text."""
    if stored is None:
        return []
    value = _from_json(stored, "tool_calls")
    calls = []
    for call in value if _is_list(value) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _UnusableError("tool_calls: a call needs the name of a function")
        arguments = function.get("arguments", function.get("parameters"))
        named = {key: call[key] for key in ("id",) if isinstance(call.get(key), str)}
        named_function = {"name": function["name"], "arguments": arguments or {}}
        calls.append({**named, "type": "function", "function": named_function})
    return calls


def _tools(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the declarations of tools of a record, in the form of OpenAI's API."""
    stored = record.get("tools") or record.get("functions")
    if not stored:
        return ()
    value = _from_json(stored, "tools")
    if not _is_list(value) or not all(isinstance(tool, Mapping) for tool in value):
        raise _UnusableError("tools: must be a list of declarations of functions")
    return tuple(
        tool if "function" in tool else {"type": "function", "function": tool} for tool in value
    )


def _from_json(value: Any, name: str) -> Any:
    """Return the value of a JSON text; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else []
    except (ValueError, RecursionError):
        raise _UnusableError(f"{name}: the text is not JSON") from None


def _check_unicode(parts: Any) -> None:
    try:
        json.dumps(parts, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        character = f"\\u{ord(error.object[error.start]):04x}"
        raise _UnusableError(
            f"it has half of a surrogate pair, {character}, which is no character"
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise _UnusableError(f"it cannot be read ({type(error).__name__})") from None
