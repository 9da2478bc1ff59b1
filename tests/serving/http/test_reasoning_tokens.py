"""Check the number of tokens of the reasoning in the usage of each interface."""

from typing import Any

import pytest

from specjax.assets import embedded
from specjax.chat import family_form
from specjax.serving.http.regions import AnswerRegions
from specjax.serving.http.service import Service
from specjax.text import count_tokens, encode_continuation, load_tokenizer
from tests.serving.http.interfaces import TEXTS, chat_service, post, stream
from tests.serving.http.test_app import events

QUESTION = [{"role": "user", "content": "Hello"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION, "max_tokens": 1000},
    RESPONSES: {"input": QUESTION, "max_output_tokens": 1000},
    MESSAGES: {"messages": QUESTION, "max_tokens": 1000},
}


def reasoning_tokens(usage: dict[str, Any]) -> int:
    """Return the number in a usage, under the name of its interface."""
    details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return (
        details["thinking_tokens"] if "thinking_tokens" in details else details["reasoning_tokens"]
    )


def counted(service: Service, path: str, **values: Any) -> int:
    """Return the number in the usage of an answer, which must be the same whole and streamed."""
    body = BODIES[path] | values
    whole = reasoning_tokens(post(service, path, body).json()["usage"])
    if path == CHAT:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        usage = events(post(service, path, body | options))[-1]["usage"]
    else:
        *_, before, last = stream(post(service, path, body | {"stream": True}))
        usage = before["usage"] if path == MESSAGES else last["response"]["usage"]
    assert reasoning_tokens(usage) == whole
    return whole


@pytest.mark.parametrize("path", BODIES)
def test_the_usage_has_the_tokens_of_the_reasoning(path) -> None:
    service = chat_service(TEXTS["thought"])
    expected = len(encode_continuation(service.engine.tokenizer, "Hm, the caf\xe9."))
    assert expected > 3
    assert counted(service, path) == expected
    assert counted(service, path, include_reasoning=False) == expected
    assert counted(chat_service(TEXTS["text"]), path) == 0


def test_the_texts_of_a_request_are_counted_together() -> None:
    service = chat_service(TEXTS["thought"])
    assert counted(service, CHAT, n=3) == 3 * counted(service, CHAT)


def test_a_prediction_is_counted_beside_it() -> None:
    service = chat_service(TEXTS["thought"])
    prediction = {"type": "content", "content": "It is late."}
    details = post(service, CHAT, BODIES[CHAT] | {"prediction": prediction}).json()["usage"]
    assert set(details["completion_tokens_details"]) == {
        *("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    }


def test_a_text_has_no_more_tokens_of_reasoning_than_tokens() -> None:
    regions = AnswerRegions(family_form("qwen3"), count_tokens=len)
    regions.push("<think>Hm.")
    regions.finish("length")
    assert (regions.reasoning_tokens(100), regions.reasoning_tokens(2)) == (3, 2)


@pytest.mark.parametrize("limit", [None, {"max_length": 2, "strategy": "longest_first"}])
def test_tokens_are_counted_as_the_tokenizer_encodes(limit) -> None:
    tokenizer = load_tokenizer(embedded("target"))
    if limit is not None:
        tokenizer.backend_tokenizer.enable_truncation(**limit)
    text = "class Stack:\n    def push(self, caf\xe9): <|endoftext|> \U0001f600\n"
    assert count_tokens(tokenizer, text) == len(encode_continuation(tokenizer, text)) > 10
