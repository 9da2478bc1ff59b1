"""Calls of tools by a real engine, over HTTP, read with the types of the openai package."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import specjax
from specjax.serving import Engine
from tests.chat.published_templates import template
from tests.serving.http.made_up import running

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "run-code.v2": {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "is_fast": {"type": "boolean"}},
        "required": ["kind"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
MESSAGES: list[Any] = [{"role": "user", "content": "Weather?"}]
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "run-code.v2"}}


@contextmanager
def client_of(name: str = "qwen3", **options: Any) -> Iterator[openai.OpenAI]:
    """Yield a client of a server of the embedded model with a published template."""
    generate = specjax.load("embedded")
    generate.tokenizer.chat_template = template(name)
    sizes: dict[str, Any] = {"rows": 4, "capacity": 1024, "page": 64, "steps": 8, "warm": False}
    with (
        Engine(
            generate.target,
            drafts=(None,),
            tokenizer=generate.tokenizer,
            grammars=True,
            **(sizes | options),
        ) as engine,
        running(engine, only_loopback=True) as (_, (host, port)),
    ):
        yield openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="x", max_retries=0)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with client_of() as made:
        yield made


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 300} | fields
    return client.chat.completions.create(**body)


def whole_of(chunks: list[ChatCompletionChunk]) -> dict[str, Any]:
    """Return the message and the finish reason that the chunks of a stream make."""
    texts: dict[str, str] = {}
    calls: dict[int, dict[str, Any]] = {}
    reason = None
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        for choice in chunk.choices:
            assert reason is None, "nothing comes behind the finish reason"
            reason = choice.finish_reason
            for name in ("content", "reasoning", "reasoning_content"):
                texts[name] = texts.get(name, "") + (getattr(choice.delta, name, None) or "")
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(calls) and call.type == "function"
                    calls[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
                assert call.index == len(calls) - 1
                calls[call.index]["arguments"] += call.function.arguments
    return texts | {"calls": list(calls.values()), "finish_reason": reason}


def parts_of(answer: ChatCompletion) -> dict[str, Any]:
    """Return the parts of a whole answer as `whole_of` returns those of a stream."""
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    choice = answer.choices[0]
    return {
        "content": choice.message.content or "",
        "reasoning": getattr(choice.message, "reasoning", None) or "",
        "reasoning_content": getattr(choice.message, "reasoning_content", None) or "",
        "calls": [
            {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
            for call in choice.message.tool_calls or ()
        ],
        "finish_reason": choice.finish_reason,
    }


def without_ids(parts: dict[str, Any]) -> dict[str, Any]:
    return parts | {"calls": [call | {"id": ""} for call in parts["calls"]]}


def check_calls(parts: dict[str, Any], least: int = 1) -> None:
    """Check that the calls are valid for the schemas of their tools."""
    assert len(parts["calls"]) >= least
    assert len({call["id"] for call in parts["calls"]}) == len(parts["calls"])
    for call in parts["calls"]:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])


def stream_and_check(client: openai.OpenAI, count: int) -> None:
    """Stream ``count`` answers that have to be calls, and compare them with the whole ones."""
    rng, called = random.Random(0), 0
    while called < count:
        choice: Any = rng.choice(["required", NAMED])
        fields: dict[str, Any] = {
            "tool_choice": choice,
            "parallel_tool_calls": rng.random() < 0.5,
            "seed": rng.randrange(2**31),
            "temperature": rng.choice([0.7, 1.0]),
            "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
        }
        streamed = whole_of(list(ask(client, stream=True, **fields)))
        if streamed["finish_reason"] == "length":
            assert without_ids(parts_of(ask(client, **fields)))["finish_reason"] == "length"
            continue
        called += 1
        check_calls(streamed)
        assert streamed["finish_reason"] == "tool_calls" and not streamed["content"]
        if choice is NAMED or not fields["parallel_tool_calls"]:
            assert len(streamed["calls"]) == 1
        if choice is NAMED:
            assert streamed["calls"][0]["name"] == "run-code.v2"
        if called % 10 == 1:
            assert without_ids(parts_of(ask(client, **fields))) == without_ids(streamed)


def test_a_hundred_calls_are_streamed(client: openai.OpenAI) -> None:
    stream_and_check(client, 100)


@pytest.mark.full
def test_a_thousand_calls_are_streamed(client: openai.OpenAI) -> None:
    stream_and_check(client, 1000)


def test_several_texts_of_a_request_have_calls_of_their_own(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tool_choice": NAMED, "n": 3, "seed": 5, "logprobs": True}
    fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = ask(client, **fields)
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert len({call.id for call in calls}) == 3
    tokens = answer.usage.completion_tokens
    assert sum(len(choice.logprobs.content) for choice in answer.choices) == tokens
    text = "".join(token.token for token in answer.choices[0].logprobs.content)
    assert "<tool_call>" in text and calls[0].function.arguments in text


def test_a_limit_inside_a_call_leaves_no_half_call(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tool_choice": NAMED, "max_tokens": 20, "seed": 1}
    fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    parts = parts_of(ask(client, **fields))
    assert (parts["calls"], parts["content"], parts["finish_reason"]) == ([], "", "length")
    streamed = whole_of(list(ask(client, stream=True, **fields)))
    assert streamed["finish_reason"] == "length" and not streamed["content"]


def test_no_choice_of_tools_makes_no_call(client: openai.OpenAI) -> None:
    parts = parts_of(ask(client, tool_choice="none", max_tokens=8, seed=1))
    assert parts["calls"] == [] and parts["finish_reason"] == "length"


def test_stop_strings_are_searched_in_calls(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tool_choice": NAMED, "seed": 1, "stop": ['"kind"']}
    fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    parts = parts_of(ask(client, **fields))
    assert (parts["calls"], parts["content"], parts["finish_reason"]) == ([], "", "stop")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format: not supported together"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"type": "object", "properties": {"a": {"not": {}}}},
                        },
                    }
                ],
            },
            "tools[0].function.parameters: ",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    client: openai.OpenAI, fields: Any, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, **fields)
    assert refusal.value.body["message"].startswith(message), refusal.value.body


def test_a_schema_that_is_not_supported_is_any_object_where_nothing_is_strict(
    client: openai.OpenAI,
) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert ask(client, tools=[tool, *TOOLS], max_tokens=4).choices[0].finish_reason == "length"
    tool["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, tools=[*TOOLS, tool], max_tokens=4)
    assert "tools[2].function.parameters: " in refusal.value.body["message"]


CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "rain"}


@pytest.mark.parametrize(
    "history",
    [
        [RESULT],
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, RESULT],
        [{"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, RESULT],
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
        [{"role": "assistant", "content": "", "tool_calls": []}, RESULT],
    ],
)
def test_a_contradictory_history_is_answered_or_refused(
    client: openai.OpenAI, history: list[Any]
) -> None:
    try:
        answer = ask(client, messages=[*MESSAGES, *history], max_tokens=4)
    except openai.BadRequestError as refusal:
        assert refusal.body["param"] == "messages"
    else:
        assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")
