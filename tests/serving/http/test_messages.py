"""Tests of `/v1/messages`: what it takes, and that answers have the form of Anthropic's types."""

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent

from specjax.serving.http.errors import RequestError
from specjax.serving.http.messages_requests import read_messages
from specjax.serving.http.requests import Limits
from tests.serving.http.interfaces import (
    CALL,
    SCHEMA,
    TEXTS,
    as_type,
    chat_engine,
    chat_service,
    check_mutations,
    extras,
    post,
    stream,
)
from tests.serving.http.made_up import MadeUpEngine, serving

PATH = "/v1/messages"
LIMITS = Limits(names=("tiny",), vocab_size=100, thinking_switch="enable_thinking")
TOOL = {"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}
BASE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 1000,
    "messages": [{"role": "user", "content": "Hello"}],
}
HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "Go"}, {"type": "text", "text": "on"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Oslo"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [{"type": "text", "text": "5"}],
            },
            {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]


def read(limits: Limits = LIMITS, **values: Any) -> Any:
    return read_messages(json.dumps(BASE | values).encode(), limits)


def refusal(**values: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(**values)
    return caught.value


# --- requests -------------------------------------------------------------------------------------


def test_blocks_become_messages_of_a_chat() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=a1b2;"},
        {"type": "text", "text": "Be brief."},
    ]
    (messages,) = read(messages=HISTORY, system=system).prompts
    function = {"name": "get_weather", "arguments": '{"city":"Oslo"}'}
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go\non"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"function": function, "id": "t1", "type": "function"}],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "5", "tool_call_id": "t1"},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    ("content", "plain", "failed"),
    [
        ("no such file", "no such file", "Error: no such file"),
        (
            [{"type": "text", "text": "Exit 1"}, {"type": "text", "text": "b"}],
            "Exit 1\nb",
            "Error: Exit 1\nb",
        ),
        ("Error: no such file", "Error: no such file", "Error: no such file"),
        (" error 5", " error 5", " error 5"),
        (*["<tool_use_error>a</tool_use_error>"] * 3,),
        ("", "", "Error"),
        (None, "", "Error"),
        ([], "", "Error"),
    ],
)
def test_the_result_of_a_tool_that_has_failed_says_so_in_its_text(content, plain, failed) -> None:
    def result(**fields: Any) -> Any:
        block = {"type": "tool_result", "tool_use_id": "t1", "content": content, **fields}
        messages = [*HISTORY[:2], {"role": "user", "content": [block]}]
        return read(messages=messages).prompts[0][-1]["content"]

    assert result() == result(is_error=False) == plain
    assert result(is_error=True) == failed


def test_tools_have_one_form_inside_and_those_of_servers_are_left_out() -> None:
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124"}]
    request = read(tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    (tool,) = request.tools
    assert tool["function"] == {
        "name": "get_weather",
        "description": "The weather",
        "parameters": SCHEMA,
    }
    assert (request.tool_choice.mode, request.parallel_tool_calls) == ("required", False)
    assert request.ignored == ("tools.web_search_20250305", "tools.bash_20250124")
    named = read(tools=tools, tool_choice={"type": "tool", "name": "get_weather"})
    assert named.tool_choice.name == "get_weather"
    assert read(tools=tools, tool_choice={"type": "none"}).tool_choice.mode == "none"
    assert read(tools=tools[1:], tool_choice={"type": "auto"}).tools == ()
    assert refusal(tools=tools[1:], tool_choice={"type": "any"}).param == "tool_choice"


def test_parameters_have_their_names_inside() -> None:
    request = read(stop_sequences=["a", "b"], top_k=3, top_p=0.5, temperature=0.25, x=1)
    assert (request.stop, request.max_tokens, request.ignored) == (("a", "b"), 1000, ("x",))
    params = request.params
    assert (params.top_k, params.top_p, params.temperature) == (3, 0.5, 0.25)
    assert read(metadata={"user_id": "u"}, service_tier="auto", cache_control={}).ignored == ()
    prefilled = [*BASE["messages"], {"role": "assistant", "content": "The answer is"}]
    assert read(messages=prefilled).chat_end == "last message"


def test_thinking_is_switched_and_bounded_where_the_model_can() -> None:
    def thinking(limits: Limits = LIMITS, **values: Any) -> tuple[Any, Any]:
        request = read(limits, thinking=values)
        return dict(request.chat_template_kwargs), request.params.thinking_budget

    assert thinking(type="disabled") == ({"enable_thinking": False}, None)
    assert thinking(type="adaptive") == ({"enable_thinking": True}, None)
    budget = {"type": "enabled", "budget_tokens": 2048}
    assert thinking(**budget) == ({"enable_thinking": True}, None)
    able = Limits(names=("tiny",), vocab_size=100, has_thoughts=True)
    assert thinking(able, **budget) == ({}, 2048)
    assert refusal(thinking={"type": "much"}).param == "thinking"


def test_a_schema_of_the_output_is_a_grammar() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    assert read(output_config={"format": form}).grammar_name == "response_format"
    assert read(output_format=form).grammar_name == "response_format"
    assert "output_config" in str(refusal(output_config={"format": {"type": "xml"}}))


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"max_tokens": None}, "max_tokens: it is missing"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": 1, "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]: type='image' is not supported",
        ),
        ({"stop_sequences": [""]}, "stop_sequences="),
        ({"temperature": -1}, "temperature=-1"),
        ({"tools": [{"name": "a"}]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens"),
    ],
)
def test_an_error_names_the_place(values: dict[str, Any], place: str) -> None:
    error = refusal(**values)
    assert error.status == 400
    assert str(error).startswith(place)
    assert error.param is not None and "[" not in error.param


# --- answers --------------------------------------------------------------------------------------


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a stream adds up to."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    from anthropic.lib.streaming._messages import accumulate_event

    for event in events:
        if event["type"] != "ping":
            parsed = as_type(RawMessageStreamEvent, event)
            snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot.to_dict(mode="json")


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(inner) for name, inner in value.items() if name != "id"}
    return [*map(without_ids, value)] if isinstance(value, list) else value


@pytest.mark.full
@pytest.mark.thorough_except(
    "1000-text", "1000-thought", "1000-call", "1000-calls", "1000-cut", "1000-broken", "40-nothing"
)
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("limit", [1000, 40])
def test_whole_messages_and_streams_are_the_same(name: str, limit: int) -> None:
    service = chat_service(TEXTS[name])
    body = BASE | {"tools": [TOOL], "max_tokens": limit}
    whole = post(service, PATH, body).json()
    as_type(Message, whole)
    events = stream(post(service, PATH, body | {"stream": True}))
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert without_ids(accumulated(events)) == without_ids(whole)


def test_a_message_has_blocks() -> None:
    message = post(chat_service(TEXTS["call"]), PATH, BASE | {"tools": [TOOL]}).json()
    thinking, text, call = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm, the caf\xe9.", "signature": "unsigned"}
    assert text == {"type": "text", "text": "I look."}
    assert (call["name"], call["input"]["city"]) == ("get_weather", "Zo\xeb")
    assert message["stop_reason"] == "tool_use"
    usage = message["usage"]
    assert usage["cache_read_input_tokens"] == 1
    assert usage["output_tokens"] == len(TEXTS["call"])
    large = CALL.replace("14", "1" * 900)
    answer = post(chat_service(large), PATH, BASE | {"tools": [TOOL], "max_tokens": 2000})
    assert "1" * 900 in answer.text  # as the model has written it
    cut = post(chat_service(TEXTS["call"]), PATH, BASE | {"max_tokens": 10}).json()
    assert cut["stop_reason"] == "max_tokens"


def test_without_tools_what_looks_like_a_call_is_text() -> None:
    message = post(chat_service(CALL), PATH, BASE).json()
    assert [block["type"] for block in message["content"]] == ["text"]
    assert message["stop_reason"] == "end_turn"


def test_the_stop_sequence_that_ended_a_text_is_told() -> None:
    engine = chat_engine("Hello")
    submit = engine.submit

    def submit_stopped(*arguments: Any, **options: Any) -> Any:
        handle = submit(*arguments, **options)
        handle.is_at_stop_string, handle.stop_string = True, "END"
        return handle

    engine.submit = submit_stopped  # pyright: ignore[reportAttributeAccessIssue]
    message = post(engine, PATH, BASE | {"stop_sequences": ["END"]}).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


def test_tokens_are_counted_as_they_are_read() -> None:
    service = chat_service("Hello")
    body = {"messages": HISTORY, "tools": [TOOL], "system": "Be brief."}
    count = post(service, f"{PATH}/count_tokens", body).json()
    as_type(MessageTokensCount, count)
    message = post(service, PATH, BASE | body).json()
    usage = message["usage"]
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


# --- errors and access ----------------------------------------------------------------------------


def check_error(answer: Any, status: int, kind: str) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}


def test_errors_have_the_form_of_the_interface() -> None:
    service = chat_service("Hello", api_keys=("secret",), max_body=2000)
    good = {"x-api-key": "secret"}
    check_error(post(service, PATH, BASE), 401, "authentication_error")
    assert post(service, PATH, BASE, headers=good).status_code == 200
    assert post(service, PATH, BASE, headers={"Authorization": "Bearer secret"}).status_code == 200
    check_error(post(service, PATH, b"{", headers=good), 400, "invalid_request_error")
    unknown = BASE | {"model": "x"}
    check_error(post(service, PATH, unknown, headers=good), 404, "not_found_error")
    long = BASE | {"system": "x" * 2000}
    check_error(post(service, PATH, long, headers=good), 413, "request_too_large")
    check_error(post(service, f"{PATH}/batches", BASE, headers=good), 404, "not_found_error")
    check_error(post(service, PATH, BASE, method="PUT", headers=good), 405, "invalid_request_error")
    full = service_of_full()
    answer = post(full, PATH, BASE)
    check_error(answer, 429, "rate_limit_error")
    assert answer.headers["retry-after"] == "1"
    service.drain()
    answer = post(service, PATH, BASE, headers=good)
    check_error(answer, 503, "overloaded_error")
    assert answer.headers["retry-after"] == "10"


def service_of_full() -> Any:
    engine = chat_engine("Hello")
    engine.room = 0
    return engine


def test_an_error_in_the_middle_of_a_stream_is_an_event() -> None:
    engine = chat_engine("Hello")
    engine.error = RuntimeError("made up")
    events = stream(post(engine, PATH, BASE | {"stream": True}))
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    check_error(post(engine, PATH, BASE), 500, "api_error")


# --- Anthropic's client ---------------------------------------------------------------------------


def test_anthropic_s_client_holds_a_conversation() -> None:
    engine = chat_engine(TEXTS["call"])
    with serving(engine, api_keys=("secret",)) as (host, port):
        client = anthropic.Anthropic(
            base_url=f"http://{host}:{port}", api_key="secret", max_retries=0
        )
        question: Any = {"model": "tiny", "max_tokens": 1000, "tools": [TOOL]}
        messages: list[Any] = [{"role": "user", "content": "Hello"}]
        whole = client.messages.create(**question, messages=messages)
        with client.messages.stream(**question, messages=messages) as events:
            kinds = {event.type for event in events}
            final = events.get_final_message()
        assert {"text", "thinking", "input_json", "signature", "message_stop"} <= kinds
        assert without_ids(final.to_dict()) == without_ids(whole.to_dict())
        result = {"type": "tool_result", "tool_use_id": final.content[-1].id, "content": "5"}
        messages += [
            {"role": "assistant", "content": final.content},
            {"role": "user", "content": [result]},
        ]
        engine.text = "It is 5 degrees."
        answer = client.messages.create(**question, messages=messages)
        assert answer.content[0].text == "It is 5 degrees."
        assert client.messages.count_tokens(model="tiny", messages=messages).input_tokens > 20
        with pytest.raises(anthropic.BadRequestError, match="max_tokens=0"):
            client.messages.create(**question | {"max_tokens": 0}, messages=messages)
        wrong = anthropic.Anthropic(base_url=f"http://{host}:{port}", api_key="x", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(**question, messages=messages)


# --- whatever a body is ---------------------------------------------------------------------------

FULL = BASE | {
    "messages": HISTORY,
    "system": "Be brief.",
    "tools": [TOOL],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "stop_sequences": ["END"],
    "metadata": {"user_id": "u"},
    "output_config": {"effort": "low"},
}


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_whatever_a_body_is_it_is_answered_or_refused(count: int) -> None:
    check_mutations(FULL, PATH, count, {"type", "error"})


# --- models ---------------------------------------------------------------------------------------


def test_models_have_the_form_of_the_client_that_asks() -> None:
    engine = MadeUpEngine()
    with serving(engine, names=("tiny", "other")) as (host, port):
        address = f"http://{host}:{port}"
        with anthropic.Anthropic(base_url=address, api_key="none") as client:
            page = client.models.list()
            assert [model.id for model in page] == ["tiny", "other"]
            model = client.models.retrieve("other")
            strict = ModelInfo.model_validate_json(model.to_json(), strict=True)
            assert (strict.max_tokens, extras(strict)) == (engine.capacity, [])
            with pytest.raises(anthropic.NotFoundError) as caught:
                client.models.retrieve("third")
            assert caught.value.body["error"]["type"] == "not_found_error"
