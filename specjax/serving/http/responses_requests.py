"""The requests of OpenAI's newer interface, ``/v1/responses``, as chats."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from specjax.serving.http.bodies import check_neutral, read_names, shown
from specjax.serving.http.errors import RequestError, invalid
from specjax.serving.http.requests import Limits, TextRequest
from specjax.serving.http.translation import (
    ChatHistory,
    converted,
    not_supported,
    read_as_chat,
    read_body,
    text_part,
    with_joined_system,
)

IGNORED = frozenset(
    [
        "client_metadata",
        "context_management",
        "max_tool_calls",
        "prompt_cache_options",
        "prompt_cache_retention",
        "stream_options",
    ]
)
"""The parameters that do not change the text. They are accepted and ignored."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "moderation": (),
    "prompt": (),
    "top_logprobs": (0,),
}
"""The unsupported parameters that would change the answer, with accepted values."""

_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
"""The names of this interface, by those of chat completions."""

SEALED = "specjax:"
"""How the ``encrypted_content`` of our reasoning items begins. The reasoning follows as it is.

Clients that do not send the text of a thought back send this back, and so the model has it again.
"""

_CALLS_ELSEWHERE = (
    "apply_patch_call",
    "code_interpreter_call",
    "compaction",
    "computer_call",
    "file_search_call",
    "image_generation_call",
    "local_shell_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "shell_call",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)
"""The items of tools that ran elsewhere. They and their outputs are left out."""


class ResponsesFields(msgspec.Struct, kw_only=True):
    """The parameters of ``/v1/responses`` that chat completions write otherwise."""

    model: str | UnsetType = UNSET
    input: str | list[dict[str, Any]] | UnsetType = UNSET
    instructions: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None


class _FunctionTool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _NamespaceTool(msgspec.Struct):
    name: str
    tools: list[dict[str, Any]]


class _CallItem(msgspec.Struct):
    call_id: str
    name: str
    arguments: str = "{}"
    namespace: str | None = None


class _CustomCallItem(msgspec.Struct):
    call_id: str
    name: str
    input: str


class _OutputItem(msgspec.Struct):
    call_id: str
    output: str | list[dict[str, Any]]


class _ReasoningItem(msgspec.Struct):
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


@dataclass(frozen=True)
class ResponsesRequest:
    """A request for a response.

    Attributes:
        text: the request for its text.
        echo: the parameters that the response repeats.
        items: the input of the conversation so far, that of earlier responses included.
        is_stored: whether the response is stored.
        seals_reasoning: whether reasoning items have their ``encrypted_content``.
        namespaces: for each tool of a namespace, by its name in the prompt, its namespace and its
            name there.

    Examples:
        >>> from specjax.serving.http.requests import Limits
        >>> from specjax.serving.http.responses_requests import read_response
        >>> limits = Limits(names=("tiny",), vocab_size=3072)
        >>> request = read_response(b'{"model": "tiny", "input": "Hello"}', limits)
        >>> request.items, request.is_stored
        (({'role': 'user', 'content': 'Hello'},), True)
    """

    text: TextRequest
    echo: Mapping[str, Any]
    items: tuple[Mapping[str, Any], ...]
    is_stored: bool = True
    seals_reasoning: bool = False
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def read_response(
    body: bytes,
    limits: Limits,
    find: Callable[[str, str], Sequence[Mapping[str, Any]] | None] = lambda _id, _salt: None,
) -> ResponsesRequest:
    """Parse the body of ``/v1/responses``.

    Args:
        body: the JSON text.
        limits: the limits of the model.
        find: returns the items of a stored response and of those before it, by the response's id
            and the cache salt; None if there is none.

    Raises:
        RequestError: the body is invalid, or there is no response of the id that it gives. The
            message names the parameter, its value and a remedy.

    Examples:
        >>> from specjax.serving.http.requests import Limits
        >>> from specjax.serving.http.responses_requests import read_response
        >>> limits = Limits(names=("tiny",), vocab_size=3072)
        >>> body = b'{"model": "tiny", "input": "Hello", "previous_response_id": "resp_1"}'
        >>> read_response(body, limits)
        Traceback (most recent call last):
        specjax.serving.http.errors.RequestError: previous_response_id='resp_1': ...
    """
    fields, shared, unknown = read_body(body, ResponsesFields, limits, {*IGNORED, *UNSUPPORTED})
    raw = read_names(body)
    for name, neutral in UNSUPPORTED.items():
        if name in raw:
            check_neutral(name, raw[name], neutral, "it is not supported")
    include = fields.include or []
    if "message.output_text.logprobs" in include:
        message = (
            "include='message.output_text.logprobs': it is not supported; leave it out, or send the"
            " request to /v1/chat/completions"
        )
        raise invalid("include", message, code="unsupported_parameter")
    salt = converted("cache_salt", msgspec.json.decode(shared.get("cache_salt", b"null")), Any)
    before = _items_before(fields.previous_response_id, salt, find)
    items = (*before, *_items(fields.input, is_needed=not before))
    tools = _Tools(fields.tools or [])
    choice, chosen = _tool_choice(fields.tool_choice, tools)
    text, reasoning = fields.text or {}, fields.reasoning or {}
    messages, left_out = _history(fields.instructions, items)
    chat = {
        **shared,
        "model": fields.model,
        "messages": messages,
        "max_tokens": fields.max_output_tokens,
        "reasoning_effort": reasoning.get("effort"),
        "response_format": _response_format(text.get("format")),
        "verbosity": text.get("verbosity"),
        "stream": fields.stream,
        "store": fields.store,
    }
    if chosen:
        chat |= {
            "tools": chosen,
            "tool_choice": choice,
            "parallel_tool_calls": fields.parallel_tool_calls,
        }
    elif choice not in (None, "auto", "none"):
        reason = "there is no tool of type 'function' to call"
        raise invalid("tool_choice", f"tool_choice={shown(fields.tool_choice)}: {reason}")
    request = read_as_chat(chat, limits, _NAMES)
    ignored = dict.fromkeys((*unknown, *tools.left_out, *left_out, *request.ignored))
    return ResponsesRequest(
        replace(request, ignored=tuple(ignored)),
        echo=_echo(fields, tools, request),
        items=items,
        is_stored=fields.store is not False,
        seals_reasoning="reasoning.encrypted_content" in include,
        namespaces=tools.namespaces,
    )


def _items_before(
    response_id: str | None,
    salt: Any,
    find: Callable[[str, str], Sequence[Mapping[str, Any]] | None],
) -> tuple[Mapping[str, Any], ...]:
    """Return the items of a stored conversation."""
    if response_id is None:
        return ()
    items = find(response_id, salt if isinstance(salt, str) else "")
    if items is None:
        message = (
            f"previous_response_id={shown(response_id)}: this server has no such response: it was"
            " never stored, or was dropped for newer ones, or belongs to another API key or"
            " cache_salt; send the whole conversation in input"
        )
        raise RequestError(
            404, message, param="previous_response_id", code="previous_response_not_found"
        )
    return tuple(items)


def _items(value: Any, *, is_needed: bool) -> Sequence[Mapping[str, Any]]:
    """Return the items of the parameter ``input``."""
    if isinstance(value, str) and value:
        return ({"role": "user", "content": value},)
    if value is UNSET or not value:
        if is_needed:
            raise invalid("input", "input: it is missing or empty; give a text or a list of items")
        return ()
    return value


def _echo(fields: ResponsesFields, tools: "_Tools", request: TextRequest) -> dict[str, Any]:
    """Return the parameters that the response repeats."""
    form = (fields.text or {}).get("format") or {"type": "text"}
    text = {"format": form}
    if (verbosity := (fields.text or {}).get("verbosity")) is not None:
        text["verbosity"] = verbosity
    return {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": (fields.reasoning or {}).get("effort"), "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.store is not False,
        "temperature": request.params.temperature,
        "text": text,
        "tool_choice": fields.tool_choice or "auto",
        "tools": tools.echo,
        "top_p": request.params.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }


# --- the conversation -----------------------------------------------------------------------------


def _history(
    instructions: str | Sequence[Mapping[str, Any]] | None, items: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of a chat, and the types of the items that are left out."""
    history, left_out = ChatHistory(), []
    if isinstance(instructions, str):
        if instructions:
            history.add("system", [text_part(instructions)])
    elif instructions:
        left_out += _add_items(history, "instructions", instructions)
    left_out += _add_items(history, "input", items)
    return with_joined_system(history.messages), left_out


def _add_items(history: ChatHistory, name: str, items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add items to a chat, and return the types of those that are left out."""
    left_out = []
    for index, item in enumerate(items):
        place, kind = f"{name}[{index}]", item.get("type") or "message"
        if kind == "message":
            _add_message(history, place, item)
        elif kind == "reasoning":
            if text := _reasoning(place, converted(place, item, _ReasoningItem)):
                history.add_reasoning(text)
        elif kind == "function_call":
            call = converted(place, item, _CallItem)
            called = _flat_name(call.namespace or "", call.name)
            history.add_call(call.call_id, called, call.arguments or "{}")
        elif kind == "custom_tool_call":
            custom = converted(place, item, _CustomCallItem)
            arguments = msgspec.json.encode({"input": custom.input}).decode()
            history.add_call(custom.call_id, custom.name, arguments)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = converted(place, item, _OutputItem)
            parts = _parts(f"{place}.output", output.output)
            history.add("tool", parts, tool_call_id=output.call_id)
        elif isinstance(kind, str) and kind.removesuffix("_output") in _CALLS_ELSEWHERE:
            left_out.append(f"{name}.{kind}")
        else:
            raise not_supported(
                f"{place}.type", shown(kind), "messages, reasoning, function calls and outputs"
            )
    return left_out


def _add_message(history: ChatHistory, place: str, item: Mapping[str, Any]) -> None:
    role = converted(f"{place}.role", item.get("role"), str)
    content = converted(f"{place}.content", item.get("content"), str | list[dict[str, Any]])
    parts = _parts(f"{place}.content", content)
    if role == "assistant":
        history.add_text(parts)
    else:
        history.add(role, parts)


def _parts(place: str, content: str | Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the parts of a content, which must be texts."""
    if isinstance(content, str):
        return [text_part(content)]
    parts = []
    for index, part in enumerate(content):
        where, kind = f"{place}[{index}]", part.get("type")
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise not_supported(
                where, f"type={shown(kind)}", "input_text; this model reads nothing else"
            )
        name = "refusal" if kind == "refusal" else "text"
        parts.append(text_part(converted(f"{where}.{name}", part.get(name), str)))
    return parts


def _reasoning(place: str, item: _ReasoningItem) -> str:
    """Return the text of a thought; empty if the item does not have it."""
    if item.content:
        return "".join(
            converted(f"{place}.content[{index}].text", part.get("text"), str)
            for index, part in enumerate(item.content)
        )
    sealed = item.encrypted_content or ""
    return sealed.removeprefix(SEALED) if sealed.startswith(SEALED) else ""


# --- tools and formats ----------------------------------------------------------------------------


def _flat_name(namespace: str, name: str) -> str:
    """Return the name in the prompt of a tool of a namespace."""
    if not namespace:
        return name
    joint = "" if namespace.endswith("_") or name.startswith("_") else "__"
    flat = f"{namespace}{joint}{name}"
    return flat if len(flat) <= 64 else name


class _Tools:
    """The tools of a request, by what becomes of them.

    Attributes:
        functions: those in the prompt, in the form of chat completions.
        echo: those in the prompt, in the form of the request.
        left_out: the parameters to report, for the types of the others.
        namespaces: as in `ResponsesRequest`.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.functions: list[dict[str, Any]] = []
        self.echo: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.namespaces: dict[str, tuple[str, str]] = {}
        for index, tool in enumerate(tools):
            self._add(f"tools[{index}]", tool)

    def _add(self, place: str, tool: Mapping[str, Any]) -> None:
        kind = tool.get("type")
        if kind == "function":
            checked = converted(place, tool, _FunctionTool)
            self._add_function(checked)
            self.echo.append(_echo_of(checked))
        elif kind == "namespace":
            space = converted(place, tool, _NamespaceTool)
            nested = []
            for index, part in enumerate(space.tools):
                if part.get("type") != "function":
                    self._leave_out(part.get("type"))
                    continue
                checked = converted(f"{place}.tools[{index}]", part, _FunctionTool)
                self._add_function(checked, space.name)
                nested.append(_echo_of(checked))
            description = str(tool.get("description") or "")
            self.echo.append(
                {
                    "type": "namespace",
                    "name": space.name,
                    "description": description,
                    "tools": nested,
                }
            )
        else:
            self._leave_out(kind)

    def _leave_out(self, kind: Any) -> None:
        self.left_out.append(f"tools.{kind}"[:64] if isinstance(kind, str) else "tools")

    def _add_function(self, tool: _FunctionTool, namespace: str = "") -> None:
        name = _flat_name(namespace, tool.name)
        if namespace:
            self.namespaces[name] = (namespace, tool.name)
        function: dict[str, Any] = {"name": name}
        for key in ("description", "parameters", "strict"):
            if (value := getattr(tool, key)) is not None:
                function[key] = value
        self.functions.append({"type": "function", "function": function})


def _echo_of(tool: _FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }


def _tool_choice(choice: Any, tools: _Tools) -> tuple[Any, list[dict[str, Any]]]:
    """Return the choice in the form of chat completions, and the tools among which it is."""
    if choice is None or isinstance(choice, str):
        return choice, tools.functions
    kind = choice.get("type")
    if kind == "function":
        return _function_choice("tool_choice", choice), tools.functions
    if kind == "allowed_tools":
        allowed = converted("tool_choice.tools", choice.get("tools"), list[dict[str, Any]])
        names = [
            _function_choice(f"tool_choice.tools[{index}]", tool)["function"]["name"]
            for index, tool in enumerate(allowed)
            if tool.get("type") == "function"
        ]
        chosen = [tool for tool in tools.functions if tool["function"]["name"] in names]
        return choice.get("mode") or "auto", chosen
    raise not_supported("tool_choice", f"type={shown(kind)}", "'auto', 'required' or a function")


def _function_choice(place: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    name = converted(f"{place}.name", choice.get("name"), str)
    namespace = converted(f"{place}.namespace", choice.get("namespace") or "", str)
    return {"type": "function", "function": {"name": _flat_name(namespace, name)}}


def _response_format(form: Any) -> Any:
    """Return ``text.format`` as the parameter ``response_format`` of chat completions."""
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return form
    schema = {name: part for name, part in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
