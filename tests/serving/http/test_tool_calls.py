"""Calls of tools by a real engine, over HTTP, read with the packages openai and anthropic."""

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

import specjax
from specjax.serving import Engine
from tests.chat.published_templates import template
from tests.serving.http.interfaces import as_type
from tests.serving.http.made_up import running

pytestmark = pytest.mark.full

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
NO_THOUGHT: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "run-code.v2"}}


@contextmanager
def client_of(name: str = "qwen3", **options: Any) -> Iterator[openai.OpenAI]:
    """Yield a client of a server of the embedded model with a published template."""
    generate = specjax.load("embedded")
    generate.tokenizer.chat_template = template(name)
    sizes: dict[str, Any] = {"rows": 4, "capacity": 1024, "page": 64, "max_logprobs": 1}
    with (
        Engine(
            generate.target,
            drafts=(None,),
            tokenizer=generate.tokenizer,
            grammars=True,
            warm=False,
            **(sizes | options),
        ) as engine,
        running(engine, only_loopback=True) as (_, (host, port)),
    ):
        yield openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="x", max_retries=0)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with client_of() as opened:
        yield opened


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 160} | fields
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
            delta: Any = choice.delta
            for call in delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(calls) and call.type == "function"
                    calls[call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
                assert call.index == len(calls) - 1
                calls[call.index]["arguments"] += call.function.arguments
    return texts | {"calls": list(calls.values()), "finish_reason": reason}


def parts_of(answer: ChatCompletion) -> dict[str, Any]:
    """Return the parts of a whole answer as `whole_of` returns those of a stream."""
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    choice: Any = answer.choices[0]
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


def check_calls(parts: dict[str, Any], least: int = 1) -> None:
    """Check that the calls are valid for the schemas of their tools."""
    assert len(parts["calls"]) >= least
    assert len({call["id"] for call in parts["calls"]}) == len(parts["calls"])
    for call in parts["calls"]:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])


@dataclass(frozen=True)
class Wish:
    """The wish of one request: which tool must be called, and how tokens are drawn."""

    name: str
    is_parallel: bool
    seed: int
    temperature: float


@dataclass(frozen=True)
class Called:
    """The calls of an answer, and whether the answer came to its end."""

    calls: tuple[tuple[str, str], ...]
    is_whole: bool


def by_chat(client: openai.OpenAI, wish: Wish, stream: bool) -> Called:
    fields: dict[str, Any] = {
        "tool_choice": NAMED if wish.name else "required",
        "parallel_tool_calls": wish.is_parallel,
        "seed": wish.seed,
        "temperature": wish.temperature,
        "extra_body": NO_THOUGHT,
    }
    answer = ask(client, stream=stream, **fields)
    parts = whole_of(list(answer)) if stream else parts_of(answer)
    assert not parts["content"] and not parts["reasoning"]
    assert parts["finish_reason"] in ("tool_calls", "length")
    is_whole = parts["finish_reason"] == "tool_calls"
    calls = [(call["name"], call["arguments"]) for call in parts["calls"]]
    return Called(without_cut(calls, is_whole), is_whole)


def by_responses(client: Any, wish: Wish, stream: bool) -> Called:
    choice: Any = {"type": "function", "name": wish.name} if wish.name else "required"
    answer: Any = client.responses.create(
        model="tiny",
        input="Weather?",
        tools=[{"type": "function", **tool["function"], "strict": False} for tool in TOOLS],
        tool_choice=choice,
        parallel_tool_calls=wish.is_parallel,
        max_output_tokens=160,
        temperature=wish.temperature,
        stream=stream,
        extra_body={"seed": wish.seed, **NO_THOUGHT},
    )
    if stream:
        events = list(answer)
        for event in events:
            as_type(ResponseStreamEvent, without_store(event.to_dict(mode="json")))
        answer = events[-1].response
        pieces: dict[str, str] = {}
        for event in events:
            if event.type == "response.function_call_arguments.delta":
                pieces[event.item_id] = pieces.get(event.item_id, "") + event.delta
        for item in answer.output:
            if item.type == "function_call" and item.status == "completed":
                assert pieces[item.id] == item.arguments
    else:
        as_type(Response, without_store(answer.to_dict(mode="json")))
    calls = tuple(
        (item.name, item.arguments)
        for item in answer.output
        if item.type == "function_call" and item.status == "completed"
    )
    return Called(calls, answer.status == "completed")


def by_messages(client: Any, wish: Wish, stream: bool) -> Called:
    choice: Any = {"type": "tool", "name": wish.name} if wish.name else {"type": "any"}
    options: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 160,
        "messages": MESSAGES,
        "tools": [
            {"name": name, "description": "x", "input_schema": schema}
            for name, schema in SCHEMAS.items()
        ],
        "tool_choice": choice | {"disable_parallel_tool_use": not wish.is_parallel},
        "extra_body": {"seed": wish.seed, "temperature": wish.temperature, **NO_THOUGHT},
    }
    if not stream:
        answer = client.messages.create(**options)
        as_type(Message, answer.to_dict(mode="json"))
        calls = tuple(
            (block.name, json.dumps(block.input))
            for block in answer.content
            if block.type == "tool_use"
        )
        return Called(calls, answer.stop_reason == "tool_use")
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    reason = None
    for event in client.messages.create(stream=True, **options):
        as_type(RawMessageStreamEvent, event.to_dict(mode="json"))
        if event.type == "content_block_start":
            assert event.content_block.type == "tool_use"
            names[event.index], arguments[event.index] = event.content_block.name, ""
        elif event.type == "content_block_delta":
            arguments[event.index] += event.delta.partial_json
        elif event.type == "message_delta":
            reason = event.delta.stop_reason
    is_whole = reason == "tool_use"
    complete = without_cut([(name, arguments[index]) for index, name in names.items()], is_whole)
    calls = tuple((name, json.dumps(json.loads(text))) for name, text in complete)
    return Called(calls, is_whole)


def without_cut(calls: Sequence[tuple[str, str]], is_whole: bool) -> tuple[tuple[str, str], ...]:
    """Return streamed calls without the last one if a limit has cut it within its JSON."""
    try:
        json.loads(calls[-1][1] if calls else "{}")
    except ValueError:
        assert not is_whole
        return tuple(calls[:-1])
    return tuple(calls)


def without_store(value: Any) -> Any:
    """Return an object without ``store``, which OpenAI's server repeats and its types lack."""
    if not isinstance(value, dict):
        return value
    return {name: without_store(part) for name, part in value.items() if name != "store"}


def stream_and_check(url: str, count: int) -> None:
    """Stream ``count`` answers that have to be calls, and compare some with the whole ones."""
    by_openai: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    by_anthropic: Any = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)
    interfaces = [(by_chat, by_openai), (by_responses, by_openai), (by_messages, by_anthropic)]

    def check(number: int) -> bool:
        rng = random.Random(number)
        wish = Wish(
            rng.choice(["", "run-code.v2"]),
            rng.random() < 0.5,
            rng.randrange(2**31),
            rng.choice([0.5, 0.8]),
        )
        called, client = interfaces[number % 3]
        streamed = called(client, wish, stream=True)
        if number % 10 < 3:
            whole = called(client, wish, stream=False)
            assert whole.is_whole == streamed.is_whole
            # A limit may come between the end of the arguments and that of the call.
            count = len(whole.calls)
            assert whole.calls == streamed.calls[:count]
            assert len(streamed.calls) - count <= (0 if whole.is_whole else 1)
        for name, arguments in streamed.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        if streamed.is_whole:
            assert streamed.calls
            assert len(streamed.calls) == 1 or (wish.is_parallel and not wish.name)
            assert not wish.name or streamed.calls[0][0] == wish.name
        return streamed.is_whole

    with ThreadPoolExecutor(4) as threads:
        whole = sum(threads.map(check, range(count)))
    print(f"{whole} of {count} texts ended with a call, {count - whole} at the limit")
    assert whole > 0.4 * count


@pytest.mark.parametrize("count", [6, pytest.param(1000, marks=pytest.mark.thorough)])
def test_calls_are_streamed_over_all_interfaces(client: openai.OpenAI, count: int) -> None:
    stream_and_check(str(client.base_url).removesuffix("/v1/"), count)


def test_several_texts_of_a_request_have_calls_of_their_own(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tool_choice": NAMED, "n": 3, "seed": 5, "logprobs": True}
    fields["extra_body"] = NO_THOUGHT
    answer = ask(client, **fields)
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert len({call.id for call in calls}) == 3
    tokens = answer.usage.completion_tokens
    assert sum(len(choice.logprobs.content) for choice in answer.choices) == tokens
    text = "".join(token.token for token in answer.choices[0].logprobs.content)
    assert "<tool_call>" in text and calls[0].function.arguments in text


def test_a_limit_inside_a_call_leaves_no_half_call(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tool_choice": NAMED, "max_tokens": 20, "seed": 1}
    fields["extra_body"] = NO_THOUGHT
    parts = parts_of(ask(client, **fields))
    assert (parts["calls"], parts["content"], parts["finish_reason"]) == ([], "", "length")
    streamed = whole_of(list(ask(client, stream=True, **fields)))
    assert streamed["finish_reason"] == "length" and not streamed["content"]


def test_no_choice_of_tools_makes_no_call(client: openai.OpenAI) -> None:
    parts = parts_of(ask(client, tool_choice="none", max_tokens=8, seed=1))
    assert parts["calls"] == [] and parts["finish_reason"] == "length"


def test_stop_strings_are_searched_in_calls(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tool_choice": NAMED, "seed": 1, "stop": ['"kind"']}
    fields["extra_body"] = NO_THOUGHT
    parts = parts_of(ask(client, **fields))
    assert (parts["calls"], parts["content"], parts["finish_reason"]) == ([], "", "stop")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format: ",
        ),
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
    body: Any = refusal.value.body
    assert body["message"].startswith(message), body


def test_a_schema_that_is_not_supported_is_any_object_where_nothing_is_strict(
    client: openai.OpenAI,
) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert ask(client, tools=[tool, *TOOLS], max_tokens=4).choices[0].finish_reason == "length"
    tool["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, tools=[*TOOLS, tool], max_tokens=4)
    body: Any = refusal.value.body
    assert "tools[2].function.parameters: " in body["message"]


def test_a_format_of_the_answer_leaves_calls_possible(client: openai.OpenAI) -> None:
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    schema: dict[str, Any] = {"type": "object", "properties": {"n": number}}
    schema |= {"required": ["n"], "additionalProperties": False}
    fields: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "parallel_tool_calls": False,
        "extra_body": NO_THOUGHT,
    }
    for seed in range(4):
        for choice in ("auto", "none"):
            parts = parts_of(ask(client, tool_choice=choice, seed=seed, **fields))
            if parts["finish_reason"] == "stop":
                jsonschema.validate(json.loads(parts["content"]), schema)
            else:
                check_calls(parts, least=int(parts["finish_reason"] == "tool_calls"))
            assert choice == "auto" or parts["finish_reason"] != "tool_calls"
    required = parts_of(ask(client, tool_choice="required", seed=1, **fields))
    check_calls(required)
