"""Tests of `/v1/responses`: what it takes, and that answers have the form of OpenAI's types."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from specjax.serving.http.errors import RequestError
from specjax.serving.http.requests import Limits
from specjax.serving.http.responses_requests import read_response
from specjax.serving.http.stored_responses import StoredResponses
from tests.serving.http.interfaces import (
    ARGUMENTS,
    SCHEMA,
    TEXTS,
    as_type,
    chat_engine,
    chat_service,
    check_mutations,
    post,
    stream,
)
from tests.serving.http.made_up import serving
from tests.serving.http.test_app import ask, refused

PATH = "/v1/responses"
LIMITS = Limits(names=("tiny",), vocab_size=100, thinking_switch="enable_thinking")
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather",
    "parameters": SCHEMA,
    "strict": False,
}
NAMESPACE = {"type": "namespace", "name": "mcp", "description": "", "tools": [TOOL]}
BASE: dict[str, Any] = {"model": "tiny", "input": "Hello"}
HISTORY = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask."}]},
    {"role": "user", "content": "Go on"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
    {"type": "reasoning", "summary": [], "encrypted_content": "specjax:Hm."},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look."}],
    },
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
    {
        "type": "function_call",
        "call_id": "c2",
        "name": "get_weather",
        "arguments": "{}",
        "namespace": "mcp",
    },
    {"type": "web_search_call", "id": "w", "status": "completed"},
    {"type": "function_call_output", "call_id": "c1", "output": "5"},
    {
        "type": "function_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "6"}],
    },
    {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "+a"},
    {"type": "custom_tool_call_output", "call_id": "c3", "output": "ok"},
]


def read(limits: Limits = LIMITS, **values: Any) -> Any:
    return read_response(json.dumps(BASE | values).encode(), limits)


def refusal(**values: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(**values)
    return caught.value


# --- requests -------------------------------------------------------------------------------------


def call(call_id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"function": function, "id": call_id, "type": "function"}


def test_items_become_messages_of_a_chat() -> None:
    request = read(input=HISTORY, instructions="Be brief.")
    (messages,) = request.text.prompts
    assert messages == [
        {"role": "system", "content": "Be brief.\nAsk."},
        {"role": "user", "content": "Go on"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [call("c1", "get_weather"), call("c2", "mcp__get_weather")],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "tool", "content": "6", "tool_call_id": "c2"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("c3", "patch", '{"input":"+a"}')],
        },
        {"role": "tool", "content": "ok", "tool_call_id": "c3"},
    ]
    assert request.text.ignored == ("input.web_search_call",)


def test_tools_are_taken_flattened_or_left_out() -> None:
    tools = [TOOL, NAMESPACE, {"type": "custom", "name": "patch"}, {"type": "web_search"}]
    request = read(tools=tools, parallel_tool_calls=False, tool_choice="required")
    names = [tool["function"]["name"] for tool in request.text.tools]
    assert names == ["get_weather", "mcp__get_weather"]
    assert request.namespaces == {"mcp__get_weather": ("mcp", "get_weather")}
    assert request.text.ignored == ("tools.custom", "tools.web_search")
    assert (request.text.tool_choice.mode, request.text.parallel_tool_calls) == ("required", False)
    choice = {"type": "function", "name": "get_weather", "namespace": "mcp"}
    assert read(tools=tools, tool_choice=choice).text.tool_choice.name == "mcp__get_weather"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{**TOOL}]}
    request = read(tools=tools, tool_choice=allowed)
    assert [tool["function"]["name"] for tool in request.text.tools] == ["get_weather"]
    assert read(tools=tools[2:], tool_choice="auto").text.tools == ()
    assert refusal(tools=tools[2:], tool_choice="required").param == "tool_choice"
    long = {**NAMESPACE, "name": "n" * 60}
    assert read(tools=[long]).text.tools[0]["function"]["name"] == "get_weather"


def test_parameters_have_their_names_inside() -> None:
    neutral = {
        **{"background": False, "service_tier": "auto", "truncation": "auto", "store": False},
        **{"prompt_cache_key": "k", "metadata": {"a": "b"}, "user": "u", "top_logprobs": 0},
        **{"include": ["reasoning.encrypted_content"], "client_metadata": {}},
    }
    request = read(max_output_tokens=7, temperature=0.25, reasoning={"effort": "none"}, **neutral)
    assert (request.text.max_tokens, request.text.ignored) == (7, ())
    assert request.text.chat_template_kwargs == {"enable_thinking": False}
    assert (request.is_stored, request.text.store, request.seals_reasoning) == (False, False, True)
    schema = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    assert read(text={"format": schema}).text.grammar_name == "response_format"
    assert (
        read(text={"format": {"type": "text"}, "verbosity": "medium"}).text.params.grammar is None
    )


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"input": []}, "input: it is missing"),
        ({"input": None}, "input: "),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: 'item_reference'"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]: type='input_image' is not supported",
        ),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0]: "),
        ({"max_output_tokens": 0}, "max_output_tokens=0"),
        ({"background": True}, "background=True"),
        ({"conversation": "c"}, "conversation="),
        ({"text": {"format": {"type": "xml"}}}, "text.format: "),
        ({"text": {"verbosity": "high"}}, "text.verbosity="),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort="),
        ({"include": ["message.output_text.logprobs"]}, "include="),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice: "),
        ({"previous_response_id": "resp_1"}, "previous_response_id='resp_1'"),
    ],
)
def test_an_error_names_the_place(values: dict[str, Any], place: str) -> None:
    error = refusal(**values)
    assert error.status == (404 if "previous_response_id" in values else 400)
    assert str(error).startswith(place)
    assert error.param is not None and "[" not in error.param


# --- answers --------------------------------------------------------------------------------------


def without_ids(value: Any) -> Any:
    names = ("id", "call_id", "created_at", "completed_at")
    if isinstance(value, dict):
        return {key: without_ids(inner) for key, inner in value.items() if key not in names}
    return [*map(without_ids, value)] if isinstance(value, list) else value


def check_response(response: dict[str, Any]) -> None:
    """Check the form of a response. OpenAI's server repeats ``store``, its types do not."""
    as_type(Response, {name: value for name, value in response.items() if name != "store"})


def check_order(events: list[dict[str, Any]]) -> None:
    """Check that events are numbered, and that each item opens, grows and closes."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    is_open, texts = False, {}
    for event in events[2:-1]:
        kind = event["type"]
        assert is_open == (kind != "response.output_item.added")
        if kind == "response.output_item.added":
            is_open, item = True, event["item"]
            assert event["output_index"] == len(texts)
            texts[item["id"]] = ""
        elif kind == "response.output_item.done":
            is_open = False
            item = event["item"]
            assert texts[item["id"]] == (
                item["arguments"] if "arguments" in item else item["content"][0]["text"]
            )
        else:
            assert event["item_id"] == item["id"]
            if kind.endswith(".delta"):
                texts[item["id"]] += event["delta"]
            elif kind.endswith("text.done"):
                assert event["text"] == texts[item["id"]]
    assert not is_open


@pytest.mark.full
@pytest.mark.thorough_except(
    "1000-text", "1000-thought", "1000-call", "1000-calls", "1000-cut", "1000-broken", "40-nothing"
)
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("limit", [1000, 40])
def test_whole_responses_and_streams_are_the_same(name: str, limit: int) -> None:
    body = BASE | {"tools": [TOOL, NAMESPACE], "max_output_tokens": limit}
    body |= {"include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}}
    service = chat_service(TEXTS[name])
    whole = post(service, PATH, body).json()
    check_response(whole)
    events = stream(post(service, PATH, body | {"stream": True}))
    for event in events:
        if "response" in event:
            check_response(event["response"])
            event = event | {"response": whole_without_store(event["response"])}  # noqa: PLW2901
        as_type(ResponseStreamEvent, event)
    check_order(events)
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == events[-1]["response"]["output"]
    is_cut = len(TEXTS[name]) > limit
    assert events[-1]["type"] == ("response.incomplete" if is_cut else "response.completed")
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)


def whole_without_store(response: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in response.items() if name != "store"}


def test_a_response_has_items() -> None:
    body = BASE | {"tools": [TOOL], "include": ["reasoning.encrypted_content"]}
    response = post(chat_service(TEXTS["call"]), PATH, body).json()
    thought, message, called = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, the caf\xe9."}]
    assert thought["encrypted_content"] == "specjax:Hm, the caf\xe9."
    assert message["content"][0]["text"] == "I look."
    assert (called["name"], called["arguments"]) == ("get_weather", ARGUMENTS)
    assert (response["status"], response["usage"]["input_tokens_details"]["cached_tokens"]) == (
        "completed",
        1,
    )
    again = read(input=response["output"])
    assert again.text.prompts[0][0]["reasoning_content"] == "Hm, the caf\xe9."


def test_a_call_of_a_namespace_has_its_own_name() -> None:
    text = TEXTS["calls"].replace("get_weather", "mcp__get_weather")
    body = BASE | {"tools": [NAMESPACE]}
    first, _ = post(chat_service(text), PATH, body).json()["output"]
    assert (first["namespace"], first["name"]) == ("mcp", "get_weather")


def test_an_error_in_the_middle_of_a_stream_is_a_response_that_failed() -> None:
    engine = chat_engine("Hello")
    engine.error = RuntimeError("made up")
    events = stream(post(engine, PATH, BASE | {"stream": True}))
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    as_type(ResponseStreamEvent, events[-1] | {"response": whole_without_store(response)})
    refused(post(engine, PATH, BASE), 500)


# --- the store ------------------------------------------------------------------------------------


def test_a_conversation_goes_on_from_a_stored_response() -> None:
    engine = chat_engine(TEXTS["call"])
    service = chat_service("")
    service.engine = engine
    first = post(service, PATH, BASE | {"tools": [TOOL], "instructions": "Be brief."}).json()
    call_id = first["output"][-1]["call_id"]
    output = {"type": "function_call_output", "call_id": call_id, "output": "5"}
    more = {"previous_response_id": first["id"], "input": [output], "tools": [TOOL]}
    second = post(service, PATH, BASE | more).json()
    assert second["previous_response_id"] == first["id"]
    whole = [{"role": "user", "content": "Hello"}, *first["output"], output]
    post(service, PATH, BASE | {"input": whole, "tools": [TOOL]})
    # The instructions of a response are not those of the next one.
    assert engine.submitted[1].prompt == engine.submitted[2].prompt
    third = BASE | {"previous_response_id": second["id"], "input": "And?"}
    assert post(service, PATH, third).status_code == 200


def test_a_response_belongs_to_one_api_key_and_one_salt() -> None:
    service = chat_service("Hello", api_keys=("one", "two"), share_prefixes=True)
    first_key, second_key = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    stored = post(service, PATH, BASE | {"cache_salt": "s"}, headers=first_key).json()
    place = f"{PATH}/{stored['id']}"
    more = BASE | {"previous_response_id": stored["id"]}
    assert post(service, PATH, more | {"cache_salt": "s"}, headers=first_key).status_code == 200
    for body, headers in ((more, first_key), (more | {"cache_salt": "s"}, second_key)):
        error = refused(post(service, PATH, body, headers=headers), 404)
        assert error["param"] == "previous_response_id"
    assert ask(service, f"{place}?cache_salt=s", "GET", headers=first_key).json() == stored
    refused(ask(service, place, "GET", headers=first_key), 404)
    refused(ask(service, f"{place}?cache_salt=s", "GET", headers=second_key), 404)
    refused(ask(service, f"{place}?cache_salt=s", "DELETE", headers=second_key), 404)
    refused(ask(service, place, "GET"), 401)
    deleted = ask(service, f"{place}?cache_salt=s", "DELETE", headers=first_key).json()
    assert deleted == {"id": stored["id"], "object": "response", "deleted": True}
    refused(ask(service, f"{place}?cache_salt=s", "GET", headers=first_key), 404)


def test_what_is_not_stored_is_not_found() -> None:
    service = chat_service("Hello")
    response = post(service, PATH, BASE | {"store": False}).json()
    refused(ask(service, f"{PATH}/{response['id']}", "GET"), 404)
    streamed = stream(post(service, PATH, BASE | {"stream": True}))[-1]["response"]
    assert ask(service, f"{PATH}/{streamed['id']}", "GET").json() == streamed


def test_the_store_is_bounded_and_nobody_drives_out_who_has_less() -> None:
    store = StoredResponses(max_responses=4, max_bytes=2000)
    store.add("small", "", {"id": "s"}, [])
    for number in range(10):
        store.add("large", "", {"id": f"l{number}"}, [])
    assert [store.items("large", f"l{number}") for number in range(10)] == [None] * 7 + [[]] * 3
    assert store.items("small", "s") == []
    store.add("large", "", {"id": "huge"}, [{"text": "x" * 1900}])
    assert store.items("large", "huge") is not None
    store.add("large", "", {"id": "next"}, [{"text": "x" * 500}])
    assert store.items("large", "huge") is None
    assert store.items("large", "next") is not None
    store.add("small", "", {"id": "too large"}, [{"text": "x" * 2001}])
    assert store.items("small", "too large") is None
    assert store.items("small", "s") == []


# --- OpenAI's client ------------------------------------------------------------------------------


def test_openai_s_client_holds_a_conversation() -> None:
    engine = chat_engine(TEXTS["call"])
    with serving(engine, api_keys=("secret",)) as (host, port):
        client = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="secret", max_retries=0)
        question: Any = {"model": "tiny", "tools": [TOOL], "input": "Hello"}
        whole = client.responses.create(**question)
        with client.responses.stream(**question) as events:
            kinds = {event.type for event in events}
            final = events.get_final_response()
        assert {"response.output_text.delta", "response.reasoning_text.delta"} <= kinds
        assert "response.function_call_arguments.done" in kinds
        output = [item.to_dict() for item in whole.output]
        parsed = without_ids([item.to_dict() for item in final.output])
        for item in parsed:  # what the client has added
            item.pop("parsed_arguments", None)
            for part in item.get("content", []):
                part.pop("parsed", None)
        assert parsed == without_ids(output)
        result = {
            "type": "function_call_output",
            "call_id": final.output[-1].call_id,
            "output": "5",
        }
        engine.text = "It is 5 degrees."
        answer = client.responses.create(
            model="tiny", input=[result], previous_response_id=final.id, tools=[TOOL]
        )
        assert answer.output_text == "It is 5 degrees."
        assert client.responses.retrieve(answer.id) == answer
        client.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError, match="max_output_tokens=0"):
            client.responses.create(model="tiny", input="a", max_output_tokens=0)


# --- whatever a body is ---------------------------------------------------------------------------

FULL = BASE | {
    "input": HISTORY,
    "instructions": "Be brief.",
    "tools": [TOOL, NAMESPACE, {"type": "web_search"}],
    "tool_choice": "auto",
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "store": False,
}


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_whatever_a_body_is_it_is_answered_or_refused(count: int) -> None:
    check_mutations(FULL, PATH, count, {"error"})
