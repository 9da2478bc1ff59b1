"""The tools of a request: ``tools`` and ``tool_choice``, checked."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specjax.errors import did_you_mean
from specjax.serving.http.bodies import shown
from specjax.serving.http.errors import RequestError, invalid

MAX_TOOLS = 128
"""The largest number of tools of a request."""

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The schema of a tool that states none: it takes no arguments."""


@dataclass(frozen=True)
class ToolChoice:
    """The calls that an answer may have.

    Attributes:
        mode: "none": no calls; "auto": text, calls, or both; "required": calls alone.
        name: the only tool that may be called, once; empty: any of the tools.

    Examples:
        >>> from specjax.serving.http.tools import ToolChoice
        >>> ToolChoice("required", "get_weather").name
        'get_weather'
    """

    mode: Literal["none", "auto", "required"] = "none"
    name: str = ""


def read_tools(tools: Sequence[Any] | None, *, takes_tools: bool) -> tuple[dict[str, Any], ...]:
    """Return the tools of a request in OpenAI's form, after a check.

    Each has a type and a function with a name, parameters and, where they are stated, a description
    and ``strict``.

    Args:
        tools: the parameter; None: there is none.
        takes_tools: whether the model's chat template writes tools into a prompt.

    Raises:
        RequestError: a tool is not valid, or the model takes none.

    Examples:
        >>> from specjax.serving.http.tools import read_tools
        >>> tool = {"type": "function", "function": {"name": "now"}}
        >>> read_tools([tool], takes_tools=True)[0]["function"]["parameters"]
        {'type': 'object', 'properties': {}}
    """
    if not tools:
        return ()
    if not takes_tools:
        message = (
            "tools: the model's chat template takes no tools; leave them out, or describe them in a"
            " message"
        )
        raise invalid("tools", message, code="unsupported_parameter")
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools: there are {len(tools)}; give at most {MAX_TOOLS}")
    checked = tuple(_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in checked]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(
                "tools", f"tools[{index}].function.name={name!r}: a tool before has it; rename one"
            )
    return checked


def _tool(place: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise invalid("tools", f"{place}: it must be an object with type and function")
    kind, function = tool.get("type", "function"), tool.get("function")
    if kind != "function":
        message = f"{place}.type={shown(kind)}: not supported; give 'function'"
        raise invalid("tools", message, code="unsupported_parameter")
    if not isinstance(function, Mapping):
        raise invalid("tools", f"{place}.function: it is missing; give an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = (
            f"{place}.function.name={shown(name)}: give 1 to 64 letters, digits, underscores,"
            " dots or hyphens"
        )
        raise invalid("tools", message)
    description = _optional(place, function, "description", str, "a text")
    strict = _optional(place, function, "strict", bool, "true or false")
    parameters = _optional(place, function, "parameters", Mapping, "a JSON schema, an object")
    # In this order, which is OpenAI's: templates write the object as it is.
    result: dict[str, Any] = {"name": name}
    if description is not None:
        result["description"] = description
    result["parameters"] = dict(parameters or _PARAMETERS)
    if strict is not None:
        result["strict"] = strict
    return {"type": "function", "function": result}


def _optional(place: str, function: Mapping[str, Any], name: str, kind: Any, remedy: str) -> Any:
    value = function.get(name)
    if value is not None and not isinstance(value, kind):
        raise invalid("tools", f"{place}.function.{name}={shown(value)}: give {remedy}")
    return value


def read_tool_choice(
    choice: Any, tools: Sequence[Mapping[str, Any]], *, can_require: bool = True
) -> ToolChoice:
    """Return the choice of tools of a request, after a check.

    Args:
        choice: the parameter ``tool_choice``; None: "auto" if there are tools.
        tools: the tools, checked.
        can_require: whether calls can be required: by a grammar of the model's form of calls.

    Raises:
        RequestError: the choice is not valid, or names a tool that does not exist, or calls cannot
            be required.

    Examples:
        >>> from specjax.serving.http.tools import read_tool_choice
        >>> read_tool_choice(None, [])
        ToolChoice(mode='none', name='')
    """
    names = [tool["function"]["name"] for tool in tools]
    if choice is None or choice == "auto":
        return ToolChoice("auto" if tools else "none")
    if choice == "none":
        return ToolChoice()
    if not can_require:
        message = (
            f"tool_choice={shown(choice)}: this server has no grammar for calls of this"
            " model; give 'auto' or 'none'"
        )
        raise invalid("tool_choice", message, code="unsupported_parameter")
    if not isinstance(choice, Mapping):
        if choice != "required":
            raise _wrong_choice(choice)
        if not tools:
            raise invalid(
                "tool_choice", "tool_choice='required': there are no tools; give tools, or 'none'"
            )
        return ToolChoice("required")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise _wrong_choice(choice)
    if name not in names:
        message = (
            f"tool_choice.function.name={shown(name)}: no tool has this name"
            f"{did_you_mean(name, names)}; give the name of one of the tools"
        )
        raise invalid("tool_choice", message)
    return ToolChoice("required", name)


def _wrong_choice(choice: Any) -> RequestError:
    message = (
        f"tool_choice={shown(choice)}: give 'none', 'auto', 'required' or"
        ' {"type": "function", "function": {"name": ...}}'
    )
    return invalid("tool_choice", message)


def rendered_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as a chat template writes them, without ``strict``, which no model was taught.

    Examples:
        >>> from specjax.serving.http.tools import read_tools, rendered_tools
        >>> function = {"name": "now", "strict": True}
        >>> tools = read_tools([{"type": "function", "function": function}], takes_tools=True)
        >>> sorted(rendered_tools(tools)[0]["function"])
        ['name', 'parameters']
    """
    return [
        {
            "type": "function",
            "function": {key: part for key, part in tool["function"].items() if key != "strict"},
        }
        for tool in tools
    ]
