"""The requests of Anthropic's interface, ``/v1/messages``, as chats."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from specjax.serving.http.bodies import shown
from specjax.serving.http.errors import invalid
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
        "anthropic_beta",
        "anthropic_version",
        "betas",
        "cache_control",
        "container",
        "context_management",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
    ]
)
"""The parameters that do not change the text. They are accepted and ignored."""

_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_budget": "thinking.budget_tokens",
}
"""The names of this interface, by those of chat completions."""

_BILLING = "x-anthropic-billing-header"
"""How a system block of Claude Code begins that is no text for the model.

It differs in each request, so with it no request would share a prefix with another.
"""


_ERRORS = ("error", "<tool_use_error>")
"""How the text of a result begins that says itself that a tool has failed, in lower case."""


class MessagesFields(msgspec.Struct, kw_only=True):
    """The parameters of ``/v1/messages`` that chat completions write otherwise."""

    model: str | UnsetType = UNSET
    messages: list[dict[str, Any]] | UnsetType = UNSET
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    mcp_servers: list[Any] | None = None
    stream: bool | None = None


class _ThinkingBlock(msgspec.Struct):
    thinking: str


class _ToolUseBlock(msgspec.Struct):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResultBlock(msgspec.Struct):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class _AnthropicTool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


def read_messages(body: bytes, limits: Limits, *, is_count: bool = False) -> TextRequest:
    """Parse the body of ``/v1/messages``.

    Args:
        body: the JSON text.
        limits: the limits of the model.
        is_count: whether it is the body of ``/v1/messages/count_tokens``, without ``max_tokens``.

    Raises:
        RequestError: the body is invalid. The message names the parameter, its value and a remedy.

    Examples:
        >>> from specjax.serving.http.messages_requests import read_messages
        >>> from specjax.serving.http.requests import Limits
        >>> limits = Limits(names=("tiny",), vocab_size=3072)
        >>> messages = b'[{"role": "user", "content": "Hello"}]'
        >>> body = b'{"model": "tiny", "max_tokens": 5, "messages": ' + messages + b"}"
        >>> request = read_messages(body, limits)
        >>> request.prompts, request.max_tokens
        (([{'role': 'user', 'content': 'Hello'}],), 5)
    """
    fields, shared, unknown = read_body(body, MessagesFields, limits, IGNORED)
    if fields.max_tokens is None and not is_count:
        raise invalid("max_tokens", "max_tokens: it is missing; give the largest number of tokens")
    if fields.messages is UNSET:
        raise invalid("messages", "messages: it is missing or empty; give at least one message")
    messages = _history(fields.system, fields.messages)
    tools, left_out = _tools(fields.tools or [])
    left_out += ["mcp_servers"] * bool(fields.mcp_servers)
    choice, is_parallel = _tool_choice(fields.tool_choice)
    last = messages[-1] if messages else {}
    goes_on = last.get("role") == "assistant" and last["content"] and "tool_calls" not in last
    chat = {
        **shared,
        "model": fields.model,
        "messages": messages,
        "max_tokens": fields.max_tokens,
        "stop": fields.stop_sequences,
        "stream": fields.stream,
        "continue_final_message": True if goes_on else None,
        **_output(fields.output_config, fields.output_format, limits),
        **_thinking(fields.thinking, shared, limits),
    }
    if tools:
        chat |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": is_parallel}
    elif choice not in (None, "auto", "none"):
        raise invalid(
            "tool_choice", f"tool_choice={shown(fields.tool_choice)}: there are no tools to call"
        )
    # A shared parameter has its name from the client.
    names = {name: _NAMES[name] for name in _NAMES if name not in shared}
    request = read_as_chat(chat, limits, names)
    return replace(request, ignored=(*unknown, *left_out, *request.ignored))


# --- messages -------------------------------------------------------------------------------------


def _history(
    system: str | list[dict[str, Any]] | None, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages of a chat, the system prompt first."""
    history = ChatHistory()
    if system:
        texts = _texts("system", system)
        parts = [text_part(text) for text in texts if not text.startswith(_BILLING)]
        if parts:
            history.add("system", parts)
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        role = converted(f"{place}.role", message.get("role"), str)
        content = converted(f"{place}.content", message.get("content"), str | list[dict[str, Any]])
        if role == "assistant":
            _add_assistant(history, place, content)
        else:
            _add_message(history, place, role, content)
    return with_joined_system(history.messages)


def _add_assistant(history: ChatHistory, place: str, content: Any) -> None:
    """Add a message of the assistant. Blocks of tools that ran elsewhere are left out."""
    if isinstance(content, str):
        history.add_text([text_part(content)])
        return
    for index, block in enumerate(content):
        where, kind = f"{place}.content[{index}]", block.get("type")
        if kind == "text":
            history.add_text([text_part(_text(where, block))])
        elif kind == "thinking":
            history.add_reasoning(converted(where, block, _ThinkingBlock).thinking)
        elif kind == "tool_use":
            call = converted(where, block, _ToolUseBlock)
            history.add_call(call.id, call.name, msgspec.json.encode(call.input).decode())
        elif not (kind == "redacted_thinking" or _is_of_server(kind)):
            raise not_supported(where, f"type={shown(kind)}", "text, thinking or tool_use")


def _add_message(history: ChatHistory, place: str, role: str, content: Any) -> None:
    """Add a message of the user, with the results of tools in it as messages of their own."""
    if isinstance(content, str):
        history.add(role, [text_part(content)])
        return
    parts: list[dict[str, str]] = []
    is_empty = True
    for index, block in enumerate(content):
        where, kind = f"{place}.content[{index}]", block.get("type")
        if kind == "tool_result":
            result = converted(where, block, _ToolResultBlock)
            if parts:
                history.add(role, parts)
                parts = []
            texts = _texts(f"{where}.content", result.content or "")
            if result.is_error:
                texts = _as_error(texts)
            history.add("tool", [*map(text_part, texts)], tool_call_id=result.tool_use_id)
            is_empty = False
        else:
            parts.append(text_part(_text(where, block)))
    if parts or is_empty:
        history.add(role, parts)


def _as_error(texts: Sequence[str]) -> list[str]:
    """Return the texts of a tool's result that says that the tool has failed.

    No chat template has a place for that, so the text says it, unless it does so already.
    """
    first, *later = texts or [""]
    if first.lstrip().lower().startswith(_ERRORS):
        return [first, *later]
    return [f"Error: {first}" if first else "Error", *later]


def _texts(place: str, content: str | Sequence[Any]) -> list[str]:
    """Return the texts of a content."""
    if isinstance(content, str):
        return [content]
    return [
        _text(f"{place}[{index}]", converted(f"{place}[{index}]", block, dict[str, Any]))
        for index, block in enumerate(content)
    ]


def _text(place: str, block: Mapping[str, Any]) -> str:
    """Return the text of a block: its own, or that of a document of plain text."""
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return converted(f"{place}.text", block.get("text"), str)
    if kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return converted(f"{place}.source.data", source.get("data"), str)
    if kind == "search_result":
        texts = _texts(f"{place}.content", converted(place, block.get("content"), list[Any]))
        return "\n".join([str(block.get("title", "")), *texts])
    if kind == "tool_reference":
        return converted(f"{place}.tool_name", block.get("tool_name"), str)
    raise not_supported(place, f"type={shown(kind)}", "text; this model reads nothing else")


def _is_of_server(kind: Any) -> bool:
    """Return whether a block is a call, or the result, of a tool that ran elsewhere."""
    return isinstance(kind, str) and (
        kind in ("server_tool_use", "mcp_tool_use", "container_upload", "compaction")
        or kind.endswith("_tool_result")
    )


# --- tools ----------------------------------------------------------------------------------------


def _tools(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tools in OpenAI's form, and the names of those that are left out."""
    chat_tools, left_out = [], []
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            left_out.append(f"tools.{kind}"[:64] if isinstance(kind, str) else "tools")
            continue
        checked = converted(f"tools[{index}]", tool, _AnthropicTool)
        function: dict[str, Any] = {"name": checked.name, "parameters": checked.input_schema}
        if checked.description is not None:
            function["description"] = checked.description
        if checked.strict is not None:
            function["strict"] = checked.strict
        chat_tools.append({"type": "function", "function": function})
    return chat_tools, left_out


def _tool_choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool]:
    """Return the choice in OpenAI's form, and whether there may be several calls."""
    if choice is None:
        return None, True
    kind = choice.get("type")
    names = {"auto": "auto", "any": "required", "none": "none"}
    is_parallel = not converted(
        "tool_choice.disable_parallel_tool_use",
        choice.get("disable_parallel_tool_use") or False,
        bool,
    )
    if kind == "tool":
        name = converted("tool_choice.name", choice.get("name"), str)
        return {"type": "function", "function": {"name": name}}, is_parallel
    if not isinstance(kind, str) or kind not in names:
        raise invalid(
            "tool_choice",
            f"tool_choice.type={shown(kind)}: give 'auto', 'any', 'tool' or 'none'",
        )
    return names[kind], is_parallel


# --- thinking and output --------------------------------------------------------------------------


def _thinking(
    thinking: Mapping[str, Any] | None, shared: Mapping[str, Any], limits: Limits
) -> dict[str, Any]:
    """Return the parameters of a chat that switch its reasoning and limit it.

    Clients ask for thoughts of any model. So a model that has no switch, and one whose thoughts are
    unknown, answers as it does without the parameter: a budget is a bound, and no promise.
    """
    if thinking is None:
        return {}
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise invalid(
            "thinking", f"thinking.type={shown(kind)}: give 'enabled', 'disabled' or 'adaptive'"
        )
    parameters: dict[str, Any] = {}
    switch = limits.thinking_switch
    if switch is not None and "chat_template_kwargs" not in shared:
        parameters["chat_template_kwargs"] = {switch: kind != "disabled"}
    budget = thinking.get("budget_tokens")
    if kind == "enabled" and budget is not None:
        count = converted("thinking.budget_tokens", budget, int)
        if count < 1:
            raise invalid("thinking", f"thinking.budget_tokens={count}: must be at least 1")
        if limits.has_thoughts and not {"thinking_budget", "thinking_token_budget"} & {*shared}:
            parameters["thinking_budget"] = count
    return parameters


def _output(
    config: Mapping[str, Any] | None, output_format: Mapping[str, Any] | None, limits: Limits
) -> dict[str, Any]:
    """Return the parameters of a chat for the form of the answer, and for the effort."""
    config = config or {}
    parameters: dict[str, Any] = {}
    form = config.get("format") or output_format
    if form is not None:
        form = converted("output_config.format", form, dict[str, Any])
        if form.get("type") != "json_schema" or "schema" not in form:
            message = "output_config.format: give type 'json_schema' and a schema"
            raise invalid("output_config", message)
        named = {"name": "output", "schema": form["schema"]}
        parameters["response_format"] = {"type": "json_schema", "json_schema": named}
    effort = config.get("effort")
    if effort is not None and "reasoning_effort" in (limits.template_names or ()):
        effort = converted("output_config.effort", effort, str)
        parameters["reasoning_effort"] = "high" if effort == "max" else effort
    return parameters
