"""Tests with the bodies that real programs have sent: each is answered, in its interface's form."""

import json
import re
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from specjax.serving.http.service import Service
from tests.clients import recording
from tests.clients.programs import PROGRAMS, ROOT
from tests.clients.scripted import ScriptedEngine, answer_to_message
from tests.serving.http.interfaces import as_type, post, stream
from tests.serving.http.test_app import service_of

FILES = {
    file.stem: json.loads(file.read_text()) for file in sorted(recording.BODIES.glob("*.json"))
}
Answer = tuple[str, list[tuple[str, Any]]]
"""The text of an answer, and the name and the arguments of each call."""


@pytest.fixture(scope="module")
def service() -> Service:
    return service_of(ScriptedEngine())


def test_each_program_is_recorded_and_documented_with_the_version_that_is_tested() -> None:
    versions = {name: file["program"] for name, file in FILES.items()}
    assert versions == {program.name: program.versions for program in PROGRAMS}
    guide = (ROOT / "docs" / "guides" / "agents.md").read_text()
    for version in re.findall(r"[=@](\d\S+)", " ".join(versions.values())):
        assert version in guide


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_what_a_program_sends_is_answered_whole_and_streamed(name: str, service: Service) -> None:
    assert FILES[name]["requests"]
    for number, request in enumerate(FILES[name]["requests"]):
        path, body = request["path"], request["body"]
        if path.endswith("count_tokens"):
            counted = as_type(MessageTokensCount, post(service, path, body).json())
            assert counted.input_tokens > 10
            continue
        body.pop("previous_response_id", None)  # no answer of this server
        plain = {key: value for key, value in body.items() if key != "stream_options"}
        whole = post(service, path, plain | {"stream": False})
        assert whole.status_code == 200, f"request {number}: {whole.text}"
        streamed = post(service, path, body | {"stream": True})
        read_whole, read_stream = READERS[path]
        assert read_whole(whole.json()) == expected_answer(body), f"request {number}"
        assert read_stream(streamed) == expected_answer(body), f"request {number}, streamed"


def expected_answer(body: dict[str, Any]) -> Answer:
    """Return the answer to the last message of a body, by the rules of the engine."""
    messages = body.get("messages") or body["input"]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    ended = (position for position, it in enumerate(messages[::-1]) if not results_of(it))
    since = messages[len(messages) - next(ended, len(messages)) :]
    results = [result for message in since for result in results_of(message)]
    text = "" if since else text_of(messages[-1]["content"])
    names = [tool.get("function", tool).get("name", "") for tool in body.get("tools", [])]
    answer = answer_to_message(text, results, names)
    if not answer.startswith("<tool_call>"):
        return answer, []
    calls = [json.loads(line) for line in answer.splitlines() if line.startswith("{")]
    return "", [(call["name"], call["arguments"]) for call in calls]


def results_of(message: dict[str, Any]) -> list[str]:
    """Return the results of tools in a message of any interface, if it ends with one."""
    if "output" in message:
        return [text_of(message["output"])]
    content = message.get("content")
    if message.get("role") == "tool":
        return [text_of(content)]
    if not isinstance(content, list) or content[-1]["type"] != "tool_result":
        return []
    return [text_of(block["content"]) for block in content if block["type"] == "tool_result"]


def text_of(content: Any) -> str:
    """Return the text of a string or of blocks."""
    if isinstance(content, str):
        return content
    return "\n".join(block["text"] for block in content if "text" in block)


# --- chat completions -----------------------------------------------------------------------------


def whole_chat(body: dict[str, Any]) -> Answer:
    message = ChatCompletion.model_validate(body, strict=True).choices[0].message
    calls = [call.function for call in message.tool_calls or []]
    return message.content or "", [(call.name, json.loads(call.arguments)) for call in calls]


def streamed_chat(answer: Any) -> Answer:
    *events, end = answer.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    text = ""
    calls: list[list[str]] = []
    for event in events:
        chunk = ChatCompletionChunk.model_validate_json(event.removeprefix("data: "))
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(calls):
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments or ""
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


# --- responses ------------------------------------------------------------------------------------


def whole_response(body: dict[str, Any]) -> Answer:
    # OpenAI's server repeats `store`, and its types do not have it.
    response = as_type(Response, {name: body[name] for name in body if name != "store"})
    calls = [item for item in response.output if item.type == "function_call"]
    return response.output_text, [(call.name, json.loads(call.arguments)) for call in calls]


def streamed_response(answer: Any) -> Answer:
    text, calls = "", []
    for event in stream(answer):
        if "response" in event:
            last = whole_response(event["response"])
            continue
        parsed = as_type(ResponseStreamEvent, event)
        if parsed.type == "response.output_text.delta":
            text += parsed.delta
        elif parsed.type == "response.output_item.done" and parsed.item.type == "function_call":
            calls.append((parsed.item.name, json.loads(parsed.item.arguments)))
    assert last == (text, calls)
    return text, calls


# --- messages -------------------------------------------------------------------------------------


def whole_message(body: dict[str, Any]) -> Answer:
    blocks = as_type(Message, body).content
    text = "".join(block.text for block in blocks if block.type == "text")
    return text, [(block.name, block.input) for block in blocks if block.type == "tool_use"]


def streamed_message(answer: Any) -> Answer:
    text = ""
    calls: list[list[str]] = []
    for event in stream(answer):
        if event["type"] == "ping":
            continue
        parsed = as_type(RawMessageStreamEvent, event)
        if parsed.type == "content_block_start" and parsed.content_block.type == "tool_use":
            calls.append([parsed.content_block.name, ""])
        elif parsed.type == "content_block_delta" and parsed.delta.type == "text_delta":
            text += parsed.delta.text
        elif parsed.type == "content_block_delta" and parsed.delta.type == "input_json_delta":
            calls[-1][1] += parsed.delta.partial_json
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


READERS: dict[str, Any] = {
    "/v1/chat/completions": (whole_chat, streamed_chat),
    "/v1/responses": (whole_response, streamed_response),
    "/v1/messages": (whole_message, streamed_message),
}


# --- the recorder ---------------------------------------------------------------------------------


def test_long_texts_are_replaced_and_all_else_stays() -> None:
    long = "A text that is Longer than 44 characters: 12 ü!\n"
    inside = json.dumps({"a": long, "n": 1.5}, separators=(",", ":"))
    value = {"b": [long, "short", None, True], "a": {"text": long}, "json": inside}
    again = recording.replaced(value)
    assert json.dumps(again).count("ngerthan") == 0
    assert list(again) == ["b", "a", "json"] and again["b"][1:] == value["b"][1:]
    replaced = again["b"][0]
    assert replaced == again["a"]["text"] == json.loads(again["json"])["a"] != long
    assert len(again["json"]) == len(inside)
    kinds = [[it.isupper(), it.isalpha(), it.isdigit(), it.isspace()] for it in long]
    assert kinds == [[it.isupper(), it.isalpha(), it.isdigit(), it.isspace()] for it in replaced]


def test_identifiers_of_installations_are_replaced() -> None:
    text = "thread_12345678-9abc-4def-8123-456789abcdef"
    again = recording.replaced(text)
    assert again != text and len(again) == len(text) and again.startswith("thread_")
