"""The tools of a request: how they are read, and what is refused."""

import json
from typing import Any

import pytest

from specjax.serving.http.errors import RequestError
from specjax.serving.http.requests import Limits, TextRequest, read_chat, read_completion
from specjax.serving.http.tools import ToolChoice, rendered_tools

LIMITS = Limits(names=("tiny",), vocab_size=1024)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
}


def read(limits: Limits = LIMITS, **fields: Any) -> TextRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return read_chat(json.dumps(body).encode(), limits)


def refused(limits: Limits = LIMITS, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as refusal:
        read(limits, **fields)
    assert refusal.value.status == 400
    return refusal.value


def test_tools_are_read_in_one_form() -> None:
    function = {"name": "now", "description": None, "more": 1, "strict": True}
    request = read(tools=[TOOL, {"type": "function", "function": function}])
    empty = {"type": "object", "properties": {}}
    assert request.tools == (
        TOOL,
        {"type": "function", "function": {"name": "now", "parameters": empty, "strict": True}},
    )
    assert "strict" not in rendered_tools(request.tools)[1]["function"]
    assert request.tool_choice == ToolChoice("auto") and request.parallel_tool_calls
    assert read().tool_choice == read(tools=[]).tool_choice == ToolChoice("none")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("required", "f")),
    ],
)
def test_a_choice_of_tools(choice: Any, expected: ToolChoice) -> None:
    assert read(tools=[TOOL], tool_choice=choice).tool_choice == expected
    without = Limits(names=("tiny",), vocab_size=1024, can_require_calls=False)
    if expected.mode == "required":
        assert refused(without, tools=[TOOL], tool_choice=choice).param == "tool_choice"
        assert refused(tool_choice=choice).param == "tool_choice"
    else:
        assert read(without, tools=[TOOL], tool_choice=choice).tool_choice == expected


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("tools", "place"),
    [
        ([1], "tools[0]"),
        ([TOOL, {"type": "custom", "custom": {}}], "tools[1].type='custom'"),
        ([{"type": "function"}], "tools[0].function"),
        ([named("")], "tools[0].function.name=''"),
        ([named("a b")], "tools[0].function.name='a b'"),
        ([named("a" * 65)], "tools[0].function.name="),
        ([named("é")], "tools[0].function.name="),
        ([named("f\n")], "tools[0].function.name="),
        ([named(7)], "tools[0].function.name=7"),
        ([TOOL, TOOL], "tools[1].function.name='f'"),
        ([{"function": {"name": "f", "parameters": []}}], "tools[0].function.parameters=[]"),
        ([{"function": {"name": "f", "strict": 1}}], "tools[0].function.strict=1"),
        ([named(f"f{index}") for index in range(129)], "tools: there are 129"),
    ],
)
def test_a_wrong_tool_is_refused_by_its_place(tools: list[Any], place: str) -> None:
    error = refused(tools=tools)
    assert error.param == "tools" and error.message.startswith(place)


@pytest.mark.parametrize(
    "choice", ["any", {}, {"type": "function"}, named("g"), {"type": "allowed_tools"}]
)
def test_a_wrong_choice_is_refused(choice: Any) -> None:
    assert refused(tools=[TOOL], tool_choice=choice).param == "tool_choice"


def test_a_template_without_tools_takes_none() -> None:
    limits = Limits(names=("tiny",), vocab_size=1024, takes_tools=False)
    assert "takes no tools" in refused(limits, tools=[TOOL]).message
    assert read(limits, tools=[]).tools == ()


def test_completions_have_no_tools() -> None:
    for values in ({"tools": [TOOL]}, {"tool_choice": "required"}, {"reasoning_effort": "low"}):
        with pytest.raises(RequestError):
            read_completion(json.dumps({"model": "tiny", "prompt": "a"} | values).encode(), LIMITS)


def test_an_effort_is_what_the_template_reads() -> None:
    reads = Limits(names=("t",), vocab_size=9, template_names=frozenset(["reasoning_effort"]))
    switch = Limits(names=("t",), vocab_size=9, thinking_switch="thinking")
    body: dict[str, Any] = {"model": "t", "reasoning_effort": "low"}
    assert read(reads, **body).chat_template_kwargs == {"reasoning_effort": "low"}
    assert read(switch, **body).chat_template_kwargs == {"thinking": True}
    body["reasoning_effort"] = "none"
    assert read(switch, **body).chat_template_kwargs == {"thinking": False}
    both = refused(switch, **body, chat_template_kwargs={"thinking": True})
    assert both.param == "reasoning_effort" and "give one of them" in both.message
    assert refused(reasoning_effort="low").param == "reasoning_effort"
    assert "give one of none, minimal" in refused(reads, model="t", reasoning_effort="x").message
