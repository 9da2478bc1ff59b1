"""Histories with calls and results: contradictory ones, and mutated chats with tools.

Each is answered, or refused with an error object. No one is a failure of the server.
"""

import itertools
import json
from typing import Any

import pytest

from tests.serving.http.interfaces import (
    ARGUMENTS,
    CALL,
    SCHEMA,
    chat_service,
    check_mutations,
    post_all,
)

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": ARGUMENTS},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "5 degrees"},
    {"role": "assistant", "content": "It is cold.", "reasoning": "5 is cold."},
    {"role": "user", "content": "And now?"},
]
FULL = {
    "model": "tiny",
    "messages": MESSAGES,
    "max_completion_tokens": 20,
    "tools": [TOOL, {"type": "function", "function": {"name": "now", "strict": True}}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "include_reasoning": True,
    "chat_template_kwargs": {"enable_thinking": True},
}


@pytest.mark.full
@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "auto", "stream": False},
        {"tool_choice": "none", "stream": True, "stream_options": {"include_usage": True}},
    ],
    ids=["whole", "streamed"],
)
def test_whatever_a_chat_with_tools_is_it_is_answered_or_refused(
    fields: dict[str, Any], count: int
) -> None:
    check_mutations(FULL | fields, "/v1/chat/completions", count, {"error"})


# --- contradictory histories ----------------------------------------------------------------------

# Steps of a history: the user speaks, the model speaks, calls tool 1 or 2, or tool 1 or 2 answers.
STEPS = ("user", "model", "call 1", "call 2", "result 1", "result 2")
CONTRADICTORY = {
    "a result without a call": ("user", "result 1"),
    "a result before its call": ("user", "result 1", "call 1"),
    "a result of another call": ("user", "call 1", "result 2"),
    "two results of a call": ("user", "call 1", "result 1", "result 1"),
    "a call without a result": ("user", "call 1", "user"),
    "one result of two calls": ("user", "call 1", "call 2", "result 2", "user"),
    "a call that is repeated": ("user", "call 1", "call 1", "result 1"),
    "a call at the end": ("user", "call 1"),
    "results alone": ("result 1", "result 2"),
    "a result after an answer": ("user", "call 1", "model", "user", "result 1"),
}


def chat_body(steps: tuple[str, ...]) -> dict[str, Any]:
    """Return the body of a chat completion. Calls without a message between them are of one."""
    messages: list[dict[str, Any]] = []
    for step in steps:
        kind, _, number = step.partition(" ")
        if kind == "call":
            if not messages or "tool_calls" not in messages[-1]:
                messages.append({"role": "assistant", "content": None, "tool_calls": []})
            function = {"name": "get_weather", "arguments": ARGUMENTS}
            call = {"id": f"call_{number}", "type": "function", "function": function}
            messages[-1]["tool_calls"].append(call)
        elif kind == "result":
            result = {"role": "tool", "tool_call_id": f"call_{number}", "content": "5"}
            messages.append(result)
        else:
            messages.append({"role": "user" if kind == "user" else "assistant", "content": kind})
    return {"messages": messages, "tools": [TOOL], "max_tokens": 20}


def response_body(steps: tuple[str, ...]) -> dict[str, Any]:
    """Return the body of a response."""
    items: list[dict[str, Any]] = []
    for step in steps:
        kind, _, number = step.partition(" ")
        if kind == "call":
            call = {"type": "function_call", "call_id": f"call_{number}", "name": "get_weather"}
            items.append(call | {"arguments": ARGUMENTS})
        elif kind == "result":
            result = {"type": "function_call_output", "call_id": f"call_{number}", "output": "5"}
            items.append(result)
        else:
            items.append({"role": "user" if kind == "user" else "assistant", "content": kind})
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    return {"input": items, "tools": [tool], "max_output_tokens": 20}


def message_body(steps: tuple[str, ...]) -> dict[str, Any]:
    """Return the body of a message. Adjacent blocks of one role are of one message."""
    messages: list[dict[str, Any]] = []
    for step in steps:
        kind, _, number = step.partition(" ")
        role = "assistant" if kind in ("model", "call") else "user"
        name = {"call": "tool_use", "result": "tool_result"}.get(kind, "text")
        if name == "tool_use":
            block = {"id": f"call_{number}", "name": "get_weather", "input": json.loads(ARGUMENTS)}
        elif name == "tool_result":
            block = {"tool_use_id": f"call_{number}", "content": "5"}
        else:
            block = {"text": kind}
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
        messages[-1]["content"].append({"type": name} | block)
    tool = {"name": "get_weather", "input_schema": SCHEMA}
    return {"messages": messages, "tools": [tool], "max_tokens": 20}


INTERFACES = {
    "/v1/chat/completions": (chat_body, {"error"}),
    "/v1/responses": (response_body, {"error"}),
    "/v1/messages": (message_body, {"type", "error"}),
}


def check_histories(path: str, histories: list[tuple[str, ...]], text: str) -> int:
    """Check that each history is answered or refused, and return how many are answered."""
    body_of, error_names = INTERFACES[path]
    bodies = [json.dumps({"model": "tiny"} | body_of(steps)).encode() for steps in histories]
    count = 0
    for steps, answer in zip(histories, post_all(chat_service(text), path, bodies), strict=True):
        body = answer.json()
        if answer.status_code == 200:
            count += 1
            assert "error" not in body or body["error"] is None, steps
        else:
            assert answer.status_code == 400, (steps, answer.text)
            assert set(body) == error_names and body["error"]["message"], steps
    return count


@pytest.mark.full
@pytest.mark.parametrize("path", INTERFACES)
def test_a_contradictory_history_is_answered_or_refused(path: str) -> None:
    for text in ("Hello", CALL):
        assert check_histories(path, [*CONTRADICTORY.values()], text) >= 5


@pytest.mark.thorough
@pytest.mark.parametrize("path", INTERFACES)
def test_any_order_of_calls_and_results_is_answered_or_refused(path: str) -> None:
    """Try all orders of up to four of six steps."""
    orders = [steps for n in range(1, 5) for steps in itertools.product(STEPS, repeat=n)]
    assert check_histories(path, orders, "Hello") > len(orders) / 4
