"""The tools of a request: how they are read, what is refused, and how an answer has calls."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import specjax
from specjax.serving.handle import Piece
from specjax.serving.http.errors import RequestError
from specjax.serving.http.requests import Limits, TextRequest, read_chat, read_completion
from specjax.serving.http.tools import ToolChoice, rendered_tools
from tests.chat.published_templates import template
from tests.serving.http.interfaces import (
    ARGUMENTS,
    CALL,
    SCHEMA,
    TEXTS,
    chat_engine,
    chat_service,
    post,
)
from tests.serving.http.test_app import service_of

LIMITS = Limits(names=("tiny",), vocab_size=1024)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
}

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}


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


# --- answers --------------------------------------------------------------------------------------


def whole_and_streamed(text: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the message of an answer, the same put together from a stream, and why it ended."""
    body = {"messages": [{"role": "user", "content": "Weather?"}], "seed": 1} | fields
    answer = post(chat_service(text), "/v1/chat/completions", body)
    choice = ChatCompletion.model_validate(answer.json(), strict=True).choices[0]
    stream = post(chat_service(text), "/v1/chat/completions", body | {"stream": True})
    *events, done = stream.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    streamed: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    reasons = []
    for event in events:
        chunk = json.loads(event.removeprefix("data: "))
        part = ChatCompletionChunk.model_validate(chunk, strict=True).choices[0]
        reasons += [part.finish_reason] if part.finish_reason else []
        streamed["content"] += part.delta.content or ""
        streamed["reasoning"] += getattr(part.delta, "reasoning", None) or ""
        for call in part.delta.tool_calls or []:
            if call.index == len(streamed["tool_calls"]):
                assert call.id and call.type == "function"
                streamed["tool_calls"].append([call.function.name, ""])
            streamed["tool_calls"][call.index][1] += call.function.arguments or ""
    message = choice.message
    whole = {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning", None) or "",
        "tool_calls": [
            [call.function.name, call.function.arguments] for call in message.tool_calls or []
        ],
    }
    assert reasons == [choice.finish_reason]
    return whole, streamed, choice.finish_reason


@pytest.mark.parametrize(
    ("name", "content", "reasoning", "calls", "reason"),
    [
        ("text", "Hello there.", "", 0, "stop"),
        ("thought", "It is late.", "Hm, the caf\xe9.", 0, "stop"),
        ("call", "I look.", "Hm, the caf\xe9.", 1, "tool_calls"),
        ("calls", "", "", 2, "tool_calls"),
        ("broken", TEXTS["broken"], "", 0, "stop"),
    ],
)
def test_a_chats_answer_has_reasoning_and_calls(
    name: str, content: str, reasoning: str, calls: int, reason: str
) -> None:
    whole, streamed, ended = whole_and_streamed(TEXTS[name], tools=[WEATHER])
    assert whole == streamed and ended == reason
    assert (whole["content"], whole["reasoning"]) == (content, reasoning)
    assert whole["tool_calls"] == [["get_weather", ARGUMENTS]] * calls


def test_the_accepted_parts_of_a_chat_are_those_of_its_reasoning_and_content() -> None:
    engine: Any = chat_engine("01234")
    steps = ["<think>\nH", "m.", "</think>\n\nI l", "ook.\n" + CALL[:30], CALL[30:]]

    def piece(token: int, settings: dict[str, Any]) -> Piece:
        step = steps[int(chr(token))]
        begin, end = step[:-1], step[-1]
        return Piece(step, (token, token), (False, True), (), ((begin, False), (end, True)))

    engine._piece = piece
    body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER]}
    body |= {"stream": True, "stream_options": {"include_accepted": True}}
    *events, _ = post(service_of(engine), "/v1/chat/completions", body).text.strip().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    parts: list[list[Any]] = []
    for chunk in chunks[1:-1]:
        ((name, text), *_) = chunk["delta"].items()
        spans = chunk["accepted"]
        assert name == "tool_calls" or "".join(part for part, _ in spans) == text
        parts += [[name, *span] for span in spans]
    assert parts == [
        ["reasoning", "H", True],
        ["reasoning", "m", False],
        ["reasoning", ".", True],
        ["content", "I", False],
        ["content", " l", True],
        ["content", "ook.", False],
    ]
    assert sum(chunk.get("tokens", 0) for chunk in chunks) == 2 * len(steps)
    assert sum(chunk.get("accepted_tokens", 0) for chunk in chunks) == len(steps)
    assert [bool(chunk["delta"].get("tool_calls")) for chunk in chunks].count(True) == 2


def test_without_tools_a_call_is_content_and_reasoning_may_be_left_out() -> None:
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        whole, streamed, ended = whole_and_streamed(TEXTS["call"], **fields)
        assert whole == streamed and ended == "stop" and not whole["tool_calls"]
        assert whole["content"].endswith(CALL)
    whole, streamed, _ = whole_and_streamed(TEXTS["thought"], include_reasoning=False)
    assert whole == streamed == {"content": "It is late.", "reasoning": "", "tool_calls": []}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Hm.</think>\n\n{"a": "<think>b</think>"}', ('{"a": "<think>b</think>"}', "Hm.")),
        ("Hm.</think><tool_call>", ("<tool_call>", "Hm.")),
        ("Hm.", ("", "Hm.")),
    ],
)
def test_the_content_that_a_grammar_describes_has_no_tags(text: str, expected) -> None:
    service = chat_service("")
    request = read(service.limits)
    request = replace(request, params=replace(request.params, grammar=specjax.Regex(".*")))
    prompt = service.engine.tokenizer.encode("<|im_start|>assistant\n<think>\n")
    for cut in range(len(text) + 1):
        (regions,) = service.regions(request, [prompt])
        regions.push(text[:cut])
        regions.push(text[cut:])
        regions.finish("stop")
        assert (regions.content, regions.reasoning) == expected


def test_calls_of_mistral_have_ids_that_its_template_takes() -> None:
    engine: Any = chat_engine('[TOOL_CALLS][{"name": "get_weather", "arguments": {}}]')
    engine.tokenizer.chat_template = template("mistral_nemo")
    service = service_of(engine)
    chat: list[Any] = [{"role": "user", "content": "Weather?"}]
    body = {"messages": chat, "tools": [WEATHER], "max_tokens": 90}
    message = post(service, "/v1/chat/completions", body).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert len(call["id"]) == 9
    for name in (call["id"], "call_1", "toolu_01A-long_id"):
        result = {"role": "tool", "tool_call_id": name, "content": "rain"}
        called = {**message, "content": "", "tool_calls": [{**call, "id": name}]}
        answer = post(service, "/v1/chat/completions", body | {"messages": [*chat, called, result]})
        assert answer.status_code == 200, answer.text
    text = engine.tokenizer.decode(engine.submitted[-1].prompt)
    assert len(re.findall(r'"(?:id|call_id)": "[A-Za-z0-9]{9}"', text)) == 2
    assert "toolu_" not in text
