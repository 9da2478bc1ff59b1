"""The translation of other interfaces' requests into a chat: what they have in common.

`/v1/responses` and `/v1/messages` say the same as `/v1/chat/completions` in other words. Their
bodies become the body of a chat completion, which `specjax.serving.http.requests.read_chat` checks.
So each parameter has one check, and an error names the parameter as the client wrote it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from specjax.serving.http.bodies import read_names, read_value, types_of
from specjax.serving.http.errors import RequestError, invalid
from specjax.serving.http.requests import Limits, TextRequest, check_model, read_chat

SHARED = frozenset(
    [
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "chat_template_kwargs",
        "frequency_penalty",
        "ignore_eos",
        "include_reasoning",
        "logit_bias",
        "min_p",
        "min_tokens",
        "prediction",
        "presence_penalty",
        "priority",
        "repetition_penalty",
        "seed",
        "speculation",
        "stop_token_ids",
        "store",
        "structured_outputs",
        "temperature",
        "thinking_budget",
        "thinking_token_budget",
        "top_k",
        "top_p",
    ]
)
"""The parameters that have the same names and meanings in all interfaces of chats."""


def read_body(
    body: bytes, kind: type[Any], limits: Limits, ignored: Collection[str] = ()
) -> tuple[Any, dict[str, Any], list[str]]:
    """Return the parameters of a body, its shared parameters, and the unknown names in it.

    Args:
        body: the JSON text.
        kind: the class of the interface's own parameters, with a field ``model``.
        limits: the limits of the model.
        ignored: the names that are accepted and change nothing.

    Raises:
        RequestError: the body is not a JSON object, names another model, or a value has the wrong
            type.

    Examples:
        >>> from specjax.serving.http.messages_requests import MessagesFields
        >>> from specjax.serving.http.requests import Limits
        >>> from specjax.serving.http.translation import read_body
        >>> limits = Limits(names=("tiny",), vocab_size=3072)
        >>> body = b'{"model": "tiny", "max_tokens": 5, "top_k": 2, "x": 1}'
        >>> fields, shared, unknown = read_body(body, MessagesFields, limits)
        >>> fields.max_tokens, list(shared), unknown
        (5, ['top_k'], ['x'])
    """
    raw, types = read_names(body), types_of(kind)
    model = read_value("model", raw["model"], types["model"]) if "model" in raw else msgspec.UNSET
    check_model(model, limits, may_be_left_out=False)
    shared = {name: value for name, value in raw.items() if name in SHARED}
    unknown = [name for name in raw if name not in {*types, *SHARED, *ignored}]
    fields = {name: read_value(name, raw[name], types[name]) for name in types if name in raw}
    return kind(**fields), shared, unknown


def read_as_chat(
    chat: Mapping[str, Any], limits: Limits, names: Mapping[str, str] = {}
) -> TextRequest:
    """Return the request that the body of a chat completion makes.

    Args:
        chat: the body. Names whose value is None are left out.
        limits: the limits of the model.
        names: the client's names of parameters, by those of the body, for errors.

    Raises:
        RequestError: a parameter is not valid. It has the client's name.

    Examples:
        >>> from specjax.serving.http.requests import Limits
        >>> from specjax.serving.http.translation import read_as_chat
        >>> limits = Limits(names=("tiny",), vocab_size=3072)
        >>> messages = [{"role": "user", "content": "Hello"}]
        >>> chat = {"model": "tiny", "messages": messages, "max_tokens": 0}
        >>> read_as_chat(chat, limits, {"max_tokens": "max_output_tokens"})
        Traceback (most recent call last):
        specjax.serving.http.errors.RequestError: max_output_tokens=0: must be from 1 to ...
    """
    stated = {name: value for name, value in chat.items() if value is not None}
    try:
        return read_chat(msgspec.json.encode(stated), limits)
    except RequestError as error:
        raise renamed(error, names) from None


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return an error whose parameter and message have the client's names.

    Examples:
        >>> from specjax.serving.http.errors import invalid
        >>> from specjax.serving.http.translation import renamed
        >>> str(renamed(invalid("stop", "stop='': empty"), {"stop": "stop_sequences"}))
        "stop_sequences='': empty"
    """
    param, message = error.param, error.message
    if param is not None and (name := names.get(param)) is not None:
        if message.startswith(param):
            message = name + message.removeprefix(param)
        param = _parameter_of(name)
    return RequestError(error.status, message, param=param, code=error.code, headers=error.headers)


def converted(place: str, value: Any, kind: Any) -> Any:
    """Return a decoded value as a ``kind``. ``place`` names it, such as ``input[2]``.

    Raises:
        RequestError: the value has another form.

    Examples:
        >>> from specjax.serving.http.translation import converted
        >>> converted("input[2].name", "f", str)
        'f'
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        reason = str(error)[:200]
        raise invalid(_parameter_of(place), f"{place}: {reason}") from None


def not_supported(place: str, what: str, remedy: str) -> RequestError:
    """Return the error of a part of a request that cannot be expressed as a chat of texts.

    Examples:
        >>> from specjax.serving.http.translation import not_supported
        >>> str(not_supported("input[0].content[1]", "an image", "text"))
        'input[0].content[1]: an image is not supported; give text'
    """
    message = f"{place}: {what} is not supported; give {remedy}"
    return invalid(_parameter_of(place), message, code="unsupported_parameter")


def _parameter_of(place: str) -> str:
    """Return the parameter that a place, such as ``input[2].name``, is in."""
    return place.partition("[")[0].partition(".")[0]


def text_part(text: str) -> dict[str, str]:
    """Return a text as a part of a chat message's content.

    Examples:
        >>> from specjax.serving.http.translation import text_part
        >>> text_part("Hello")
        {'type': 'text', 'text': 'Hello'}
    """
    return {"type": "text", "text": text}


class ChatHistory:
    """The messages of a chat, which are made of items or blocks in the order of the request.

    What the assistant thought, said and called without anything in between is one message, as a
    chat template expects it.

    Attributes:
        messages: the messages so far.

    Examples:
        >>> from specjax.serving.http.translation import ChatHistory
        >>> history = ChatHistory()
        >>> history.add_reasoning("Hm.")
        >>> history.add_call("call_1", "now", "{}")
        >>> history.add("tool", "12:00", tool_call_id="call_1")
        >>> [message["role"] for message in history.messages]
        ['assistant', 'tool']
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, role: str, content: Any, **fields: Any) -> None:
        """Add a message that is not the assistant's."""
        self.messages.append({"role": role, "content": content, **fields})

    def add_reasoning(self, text: str) -> None:
        """Add what the assistant thought. It begins a message."""
        message = self._assistant(is_new=("content", "tool_calls"))
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def add_text(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Add what the assistant said."""
        message = self._assistant(is_new=("tool_calls",))
        message["content"] = [*(message["content"] or []), *parts]

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of a tool. ``arguments`` is JSON text."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self, is_new: Sequence[str] = ()) -> dict[str, Any]:
        """Return the assistant's last message; a new one if it has one of the fields ``is_new``."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in is_new):
            self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]


def with_joined_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose first system and developer messages are one.

    Many chat templates take one such message, at the beginning alone.

    Examples:
        >>> from specjax.serving.http.translation import text_part, with_joined_system
        >>> first = {"role": "system", "content": [text_part("Be brief.")]}
        >>> second = {"role": "developer", "content": [text_part("Be kind.")]}
        >>> [len(message["content"]) for message in with_joined_system([first, second])]
        [2]
    """
    count = 0
    while count < len(messages) and messages[count]["role"] in ("system", "developer"):
        count += 1
    if count < 2:
        return [dict(message) for message in messages]
    parts = [part for message in messages[:count] for part in message["content"]]
    return [{"role": "system", "content": parts}, *map(dict, messages[count:])]
