"""Tests of the application on an engine that computes nothing.

They check who has access, what is answered, and what happens to clients that leave.
"""

import asyncio
import json
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

import specjax
from specjax.assets import embedded
from specjax.errors import InputError
from specjax.serving.handle import Handle, RowProgress
from specjax.serving.http import app, requests, responses, run, service
from specjax.serving.http.app import make_app
from specjax.serving.http.protocol import ConnectionLimits
from specjax.serving.http.service import MAX_NAMES_LOGGED, AppOptions, Service
from specjax.serving.http.tokens import TokenTexts
from specjax.serving.statistics import PartStatistics
from specjax.text import GrowingText, load_tokenizer
from tests.serving.http.made_up import (
    CAPACITY,
    Characters,
    MadeUpEngine,
    read_more,
    running,
    serving,
    wait_until,
)
from tests.test_text import ANSWERS, ASKED, ids_of, with_marks

NO_ERRORS = {"message": str, "type": str, "param": (str, type(None)), "code": (str, type(None))}


def service_of(engine: MadeUpEngine, **options: Any) -> Service:
    all_options: dict[str, Any] = {"names": ("tiny", "other")} | options
    return Service(engine, AppOptions(**all_options))


def ask(
    service: Service | MadeUpEngine,
    path: str = "/v1/completions",
    method: str = "POST",
    headers: Any = (),
    content: Any = None,
    **body: Any,
) -> httpx2.Response:
    """Send a request without a network, and return the answer."""
    service = service if isinstance(service, Service) else service_of(service)
    base = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "ab"}
    content = (
        json.dumps({"model": "tiny"} | base | body)
        if content is None and method == "POST"
        else content
    )
    sent = {"Content-Type": "application/json", **dict(headers)}

    async def send() -> httpx2.Response:
        transport = httpx2.ASGITransport(make_app(service), raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, content=content, headers=sent)

    return asyncio.run(send())


def chat(service: Service | MadeUpEngine, **body: Any) -> httpx2.Response:
    return ask(service, "/v1/chat/completions", **body)


def refused(answer: httpx2.Response, status: int) -> dict[str, Any]:
    """Return the error object of an answer, which must have this status."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == set(NO_ERRORS)
    assert all(isinstance(error[name], kind) for name, kind in NO_ERRORS.items())
    return error


def events(answer: httpx2.Response) -> list[Any]:
    """Return the objects of a stream, which must end correctly."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *lines, last, rest = answer.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# --- answers --------------------------------------------------------------------------------------


def test_a_completion() -> None:
    engine = MadeUpEngine("The text.")
    answer = ask(engine, max_tokens=6).json()
    assert answer["choices"] == [
        {"index": 0, "finish_reason": "length", "text": "The te", "logprobs": None}
    ]
    details = {"cached_tokens": 1}
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": details,
    }
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["id"].startswith("cmpl-")
    assert "metrics" not in answer


def test_a_chat() -> None:
    engine = MadeUpEngine("The text.")
    answer = chat(engine, max_completion_tokens=4).json()
    message = {"role": "assistant", "content": "The ", "refusal": None}
    assert answer["choices"] == [
        {"index": 0, "finish_reason": "length", "message": message, "logprobs": None}
    ]
    assert (answer["object"], answer["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert answer["usage"]["prompt_tokens"] == len("user:Hi\n")


def test_a_chat_without_a_limit_goes_on_as_long_as_there_is_room() -> None:
    answer = chat(MadeUpEngine("x")).json()
    assert answer["usage"]["total_tokens"] == CAPACITY


def test_what_the_engine_is_given() -> None:
    engine = MadeUpEngine()
    ask(
        engine,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=-1,
        stop="x",
        stop_token_ids=[5],
        min_tokens=2,
        max_tokens=4,
    )
    settings = engine.submitted[0].settings
    expected = {
        **{"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "min_new_tokens": 2},
        **{"seed": 2**63 - 1, "choice": 0, "stop": ("x",), "eos_token_ids": (2, 5)},
        **{"logprobs": None, "echo": False, "prediction": None, "spans": False},
        **{"cache_salt": "", "store": True},
    }
    assert {name: settings[name] for name in expected} == expected
    ask(engine, cache_salt="mine", store=False)
    settings = engine.submitted[1].settings
    assert (settings["cache_salt"], settings["store"]) == ("mine", False)


def test_token_ids_are_returned_whole_and_in_a_stream() -> None:
    engine = MadeUpEngine("The text.")
    whole = ask(engine, max_tokens=4, n=2, return_token_ids=True).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in whole] == [[97, 98]] * 2
    assert [choice["token_ids"] for choice in whole] == [[*map(ord, "The ")]] * 2
    answer = chat(engine, max_tokens=4, return_token_ids=True).json()
    assert answer["prompt_token_ids"] == [*map(ord, "user:Hi\n")]
    assert answer["choices"][0]["token_ids"] == [*map(ord, "The ")]
    stream = {"max_tokens": 4, "stream": True, "return_token_ids": True}
    first, *chunks = events(ask(engine, **stream))
    assert first["choices"][0]["prompt_token_ids"] == [97, 98]
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == [*map(ord, "The ")]
    first, *chunks = events(chat(engine, **stream))
    assert first["prompt_token_ids"] == [*map(ord, "user:Hi\n")]
    assert "token_ids" not in ask(engine, max_tokens=4).json()["choices"][0]


def test_log_probabilities_of_the_prompt_have_ids_and_ranks() -> None:
    engine = MadeUpEngine("The text.")
    (choice,) = ask(engine, prompt="abc", max_tokens=2, prompt_logprobs=2).json()["choices"]
    assert choice["logprobs"] is None
    assert engine.submitted[0].settings["echo"] is True
    none, second, third = choice["prompt_logprobs"]
    assert none is None
    assert second == {
        "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
    }
    assert list(third) == ["99", "100"]
    answer = chat(engine, max_tokens=2, prompt_logprobs=0, logprobs=True, top_logprobs=1).json()
    assert [len(position) for position in answer["prompt_logprobs"][1:]] == [1] * 7
    content = answer["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [1, 1]
    tops = ask(engine, max_tokens=1, logprobs=1, prompt_logprobs=3).json()["choices"][0]["logprobs"]
    assert [len(top) for top in tops["top_logprobs"]] == [1]


def test_a_suffix_is_encoded_behind_the_gap() -> None:
    engine = MadeUpEngine()
    engine.tokenizer = load_tokenizer(embedded("target"))
    engine.tokenizer.add_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"])
    assert ask(engine, suffix=" + 1", prompt="x = ").status_code == 200
    (handle,) = engine.submitted
    assert engine.tokenizer.decode(handle.prompt) == (
        "<|endoftext|><fim_prefix>x = <fim_suffix> + 1<fim_middle>"
    )
    end = engine.tokenizer.convert_tokens_to_ids("<file_sep>")
    assert handle.settings["eos_token_ids"] == (2, end)
    engine.tokenizer = load_tokenizer(embedded("target"))
    assert refused(ask(engine, suffix=" + 1"), 400)["param"] == "suffix"


def test_small_answers_about_the_server() -> None:
    engine = MadeUpEngine()
    assert ask(engine, "/version", "GET").json() == {"version": specjax.__version__}
    for method in ("GET", "POST"):
        assert ask(engine, "/ping", method).status_code == 200
    closed = service_of(engine, api_keys=("a-key",))
    assert ask(closed, "/ping", "POST", content="", headers={"Content-Type": ""}).status_code == 200
    refused(ask(closed, "/version", "GET"), 401)
    tokens = ask(engine, "/tokenize", content='{"prompt": "ab é"}').json()["tokens"]
    text = ask(engine, "/detokenize", content=json.dumps({"tokens": tokens, "other": 1}))
    assert text.json() == {"prompt": "ab é"}
    assert text.headers["x-specjax-ignored"] == "other"


def test_each_api_key_is_a_tenant_unless_all_share_prefixes() -> None:
    def tenants(**options: Any) -> list[str]:
        engine = MadeUpEngine()
        service = service_of(engine, **options)
        for key in ("key-one", "key-two", "key-one"):
            ask(service, headers={"Authorization": f"Bearer {key}"}, cache_salt="same")
        return [submitted.settings["tenant"] for submitted in engine.submitted]

    keys = ("key-one", "key-two")
    first, foreign, again = tenants(api_keys=keys)
    assert first == again != foreign
    assert all(key not in first + foreign for key in keys)
    assert tenants(api_keys=keys, share_prefixes=True) == tenants() == [""] * 3


def test_a_prompt_may_come_without_special_tokens() -> None:
    engine = MadeUpEngine()
    encoded = []

    def encode(prompt: Any, _: Any = None) -> list[int]:
        encoded.append(prompt)
        return [97]

    engine.encode = encode  # pyright: ignore[reportAttributeAccessIssue]
    ask(engine, prompt="ab", add_special_tokens=False)
    ask(engine, prompt="ab", add_special_tokens=True)
    ask(engine, "/tokenize", content='{"prompt": "ab", "add_special_tokens": false}')
    assert [prompt for prompt in encoded if prompt != engine.text] == [[97, 98], "ab", [97, 98]]


def test_without_a_seed_every_request_has_another() -> None:
    engine = MadeUpEngine()
    for _ in range(5):
        ask(engine)
    seeds = {handle.settings["seed"] for handle in engine.submitted}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_without_a_seed_equal_prompts_have_texts_of_their_own() -> None:
    engine = MadeUpEngine()
    ask(engine, prompt=["a", "a"], n=2)
    settings = [handle.settings for handle in engine.submitted]
    assert len({(values["seed"], values["choice"]) for values in settings}) == 4


def test_choices_are_numbered_by_prompt_and_within_it() -> None:
    engine = MadeUpEngine()
    answer = ask(engine, prompt=["a", "bcd"], n=3, seed=7, max_tokens=2).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    settings = [
        (len(handle.prompt), handle.settings["choice"], handle.settings["seed"])
        for handle in engine.submitted
    ]
    # Each prompt has the choices that it would have alone.
    assert settings == [(length, choice, 7) for length in (1, 3) for choice in range(3)]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 12)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_a_stream_of_a_completion() -> None:
    chunks = events(ask(MadeUpEngine("abc"), max_tokens=3, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", "c", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [
        None,
        None,
        None,
        "length",
    ]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_a_stream_of_a_chat_begins_with_the_role() -> None:
    chunks = events(chat(MadeUpEngine("abc"), max_tokens=3, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {"content": "c"},
        {},
    ]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_usage_comes_last_where_it_is_asked_for() -> None:
    *chunks, last = events(
        ask(MadeUpEngine("abc"), max_tokens=3, stream=True, stream_options={"include_usage": True})
    )
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5


def test_usage_comes_with_every_chunk_where_it_is_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for answer in (
        ask(MadeUpEngine("abc"), max_tokens=3, stream=True, stream_options=options),
        chat(MadeUpEngine("abc"), max_tokens=3, stream=True, stream_options=options),
    ):
        *chunks, last = events(answer)
        prompt = last["usage"]["prompt_tokens"]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]][
            -4:
        ] == [
            1,
            2,
            3,
            3,
        ]
        assert all(
            chunk["usage"]["total_tokens"] == prompt + chunk["usage"]["completion_tokens"]
            for chunk in chunks
        )
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    chunks = events(
        ask(MadeUpEngine("abc"), max_tokens=3, n=2, stream=True, stream_options=options)
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)  # the sums of both texts
    assert counts[-1] == 6
    *chunks, last = events(
        ask(
            MadeUpEngine("abc"),
            max_tokens=3,
            stream=True,
            stream_options={"continuous_usage_stats": True},
        )
    )
    assert last["choices"] and last["usage"]["completion_tokens"] == 3


def test_a_stream_of_several_choices() -> None:
    chunks = events(ask(MadeUpEngine("abc"), prompt=["x", "y"], n=2, max_tokens=3, stream=True))
    for index in range(4):
        of_it = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in of_it) == "abc"
        assert of_it[-1]["finish_reason"] == "length"


def test_accepted_text_is_told_apart_where_it_is_asked_for() -> None:
    engine = MadeUpEngine("abc")
    chunks = events(
        ask(engine, max_tokens=3, stream=True, stream_options={"include_accepted": True})
    )
    assert [chunk["choices"][0].get("accepted") for chunk in chunks] == [
        [["a", True]],
        [["b", True]],
        [["c", True]],
        None,
    ]
    assert [chunk["choices"][0].get("tokens") for chunk in chunks] == [1, 1, 1, None]
    assert [chunk["choices"][0].get("accepted_tokens") for chunk in chunks] == [1, 1, 1, None]
    assert engine.submitted[0].settings["spans"]


def test_logprobs_of_a_completion() -> None:
    choice = ask(MadeUpEngine("abc"), max_tokens=3, logprobs=2).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}, {"c": -0.5, "d": -1.5}],
        "text_offset": [0, 1, 2],
    }


def test_the_prompt_comes_first_where_it_is_echoed() -> None:
    answer = ask(MadeUpEngine("cd"), prompt="ab", max_tokens=2, logprobs=1, echo=True)
    choice = answer.json()["choices"][0]
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]
    # The first token has no log-probability, because nothing comes before it.
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"b": -0.5}]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_the_likelihood_of_a_prompt_alone() -> None:
    answer = ask(MadeUpEngine(), prompt=[97, 98, 99], max_tokens=0, logprobs=1, echo=True).json()
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("part", ["whole", "first"])
def test_what_is_told_of_a_long_prompt_is_not_made_where_everybody_waits(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, make = [], getattr(responses.Answer, part)

    def noted(answer: responses.Answer, of: Any) -> Any:
        threads.append(threading.current_thread())
        return make(answer, of)

    monkeypatch.setattr(responses.Answer, part, noted)
    answer = ask(MadeUpEngine(), echo=True, logprobs=2, max_tokens=0, stream=part == "first")
    assert answer.status_code == 200
    assert threads and threading.current_thread() not in threads


def test_an_echo_in_a_stream() -> None:
    chunks = events(ask(MadeUpEngine("cd"), max_tokens=2, logprobs=0, echo=True, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["ab", "c", "d", ""]
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks[:-1]]
    assert offsets == [[0, 1], [2], [3]]
    chunks = events(ask(MadeUpEngine(), max_tokens=0, logprobs=0, echo=True, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["ab", ""]


def test_logprobs_of_a_chat() -> None:
    answer = chat(MadeUpEngine("é"), max_tokens=1, logprobs=True, top_logprobs=2)
    content = answer.json()["choices"][0]["logprobs"]["content"]
    likeliest = [
        {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]},
        {"token": "ê", "logprob": -1.5, "bytes": [0xC3, 0xAA]},
    ]
    assert content == [likeliest[0] | {"top_logprobs": likeliest}]
    chunks = events(chat(MadeUpEngine("ab"), max_tokens=2, logprobs=True, stream=True))
    assert [chunk["choices"][0]["logprobs"]["content"][0]["token"] for chunk in chunks[1:3]] == [
        "a",
        "b",
    ]


def test_tokens_that_are_no_text_say_their_bytes() -> None:
    texts = TokenTexts(Characters())
    assert [texts.text(token) for token in (97, 1003, 1004)] == ["a", "bytes:\\xc3", "bytes:\\xc4"]
    assert [texts.bytes_of(token) for token in (97, 1003)] == [b"a", b"\xc3"]


def test_what_of_a_prediction_was_there() -> None:
    prediction = {"type": "content", "content": "abcde"}
    usage = ask(MadeUpEngine(), max_tokens=4, prediction=prediction).json()["usage"]
    details = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 3}
    assert usage["completion_tokens_details"] == details


def test_a_prediction_is_made_into_tokens_once_for_all_texts() -> None:
    engine = MadeUpEngine()
    ask(engine, n=4, prediction={"type": "content", "content": "abcde"})
    assert [handle.prediction_length for handle in engine.submitted] == [5] * 4
    assert engine.encoded_predictions == 1


def test_how_the_drafts_of_a_text_fared() -> None:
    service = service_of(MadeUpEngine(), with_acceptance=True)
    metrics = ask(service).json()["metrics"]["speculative_decoding"]
    assert metrics == {
        "mean_acceptance_length": 1 + 7 / 5,
        "draft_acceptance_rate": 7 / 15,
        "acceptance_histogram": [1, 2, 1, 1],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 7,
        "num_draft_tokens": 15,
        "num_spec_tokens": 3,
    }
    assert ask(service, n=2).json()["metrics"] is None
    *_, last = events(ask(service, stream=True, stream_options={"include_usage": True}))
    assert last["metrics"]["speculative_decoding"] == metrics


def unknown_parameters(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines about unknown parameters, without those of other packages."""
    return [it.getMessage() for it in caplog.records if it.name == service.__name__]


def test_names_that_are_not_known_are_told_in_a_header_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = service_of(MadeUpEngine())
    many = {f"name{number}": 1 for number in range(10)} | {"top_n": 1}
    odd = {"two\r\nlines": 1, "é": 1, "x" * 65: 1, "": 1}
    for _ in range(2):
        answers = [
            ask(service, **odd, **many),
            chat(service, stream=True, stream_options={"step": 1}, **odd),
            ask(service, "/tokenize", content=json.dumps({"prompt": "a", "other.name": 1})),
        ]
        assert [answer.headers["x-specjax-ignored"] for answer in answers] == [
            ", ".join(f"name{number}" for number in range(8)),
            "stream_options.step",
            "other.name",
        ]
    assert "x-specjax-ignored" not in ask(service, user="me").headers
    assert "x-specjax-ignored" not in ask(service, **odd).headers
    logged = unknown_parameters(caplog)
    assert len(logged) == len(many) + len(odd) + 2
    assert not any("\n" in line or len(line) > 200 for line in logged)


def test_a_client_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    service = service_of(MadeUpEngine())
    for begin in (0, 200, 400):
        ask(service, **{f"name{begin + number}": 1 for number in range(200)})
    assert len(unknown_parameters(caplog)) == MAX_NAMES_LOGGED


# --- other paths ----------------------------------------------------------------------------------


def test_models() -> None:
    engine = MadeUpEngine()
    listed = ask(engine, "/v1/models", "GET").json()
    assert [(model["id"], model["max_model_len"]) for model in listed["data"]] == [
        ("tiny", CAPACITY),
        ("other", CAPACITY),
    ]
    assert ask(engine, "/v1/models/other", "GET").json()["id"] == "other"
    assert refused(ask(engine, "/v1/models/a/b", "GET"), 404)["code"] == "model_not_found"


def test_tokenize() -> None:
    engine = MadeUpEngine()
    assert ask(engine, "/tokenize", content='{"prompt": "ab"}').json() == {
        "count": 2,
        "max_model_len": CAPACITY,
        "tokens": [97, 98],
    }
    messages = [{"role": "user", "content": "a"}]
    answer = ask(engine, "/tokenize", content=json.dumps({"messages": messages}))
    assert answer.json()["count"] == len("user:a\n")


def test_the_page_comes_from_here_alone() -> None:
    answer = ask(MadeUpEngine(), "/", "GET")
    assert answer.text.startswith("<!doctype html>")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "access-control-allow-origin" not in answer.headers


def test_paths_and_methods_that_are_none() -> None:
    for path in ("/nothing", "/v1/completions/", "/v1", "/docs", "/%ff"):
        assert refused(ask(MadeUpEngine(), path, "GET"), 404)["type"] == "not_found_error"
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = ask(MadeUpEngine(), path, "GET")
        refused(answer, 405)
        assert answer.headers["allow"] == "POST"
    refused(ask(MadeUpEngine(), "/v1/models"), 405)


def metric(text: str, line: str) -> float:
    return next(
        float(sample.rpartition(" ")[2])
        for sample in text.splitlines()
        if sample.rpartition(" ")[0] == line
    )


def test_metrics() -> None:
    service = service_of(MadeUpEngine("abcdef", pause=0.02))

    async def three_texts() -> str:
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(make_app(service)), base_url="http://127.0.0.1"
        ) as client:
            for _ in range(3):
                await client.post(
                    "/v1/completions", json={"model": "tiny", "prompt": "abc", "max_tokens": 5}
                )
            return (await client.get("/metrics")).text

    text = asyncio.run(three_texts())
    of = '{model_name="tiny"}'
    expected = {
        f"specjax:engine_running{of}": 1,
        **{f"specjax:programs{of}": 5, f"specjax:programs_compiled{of}": 3},
        f"specjax:tokens_reread_total{of}": 16,
        **{
            f"vllm:num_requests_running{of}": 0,
            f"vllm:num_requests_waiting{of}": 1,
            f"vllm:kv_cache_usage_perc{of}": 0.25,
        },
        **{
            f"vllm:prompt_tokens_total{of}": 9,
            f"vllm:generation_tokens_total{of}": 15,
            f"vllm:num_preemptions_total{of}": 2,
        },
        **{
            f"specjax:grammar_forced_tokens_total{of}": 6,
            f"specjax:grammar_illegal_tokens_total{of}": 4,
            f"specjax:grammar_mask_seconds_total{of}": 0.5,
            f"specjax:grammar_restored_rows_total{of}": 3,
        },
        **{f"vllm:prefix_cache_queries_total{of}": 10, f"vllm:prefix_cache_hits_total{of}": 2},
        **{
            f"vllm:spec_decode_num_drafts_total{of}": 5,
            f"vllm:spec_decode_num_draft_tokens_total{of}": 15,
        },
        f"vllm:spec_decode_num_accepted_tokens_total{of}": 7,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="2"}': 1,
        'vllm:request_success_total{finished_reason="length",model_name="tiny"}': 3,
        'vllm:request_success_total{finished_reason="abort",model_name="tiny"}': 0,
        **{
            f"vllm:time_to_first_token_seconds_count{of}": 3,
            f"vllm:e2e_request_latency_seconds_count{of}": 3,
        },
        f"vllm:inter_token_latency_seconds_count{of}": 12,
        'specjax:draft_in_use{draft="chain:3",model_name="tiny"}': 1,
        **{
            f'specjax:spec_decode_num_{name}_per_part_total{{model_name="tiny",part="{part}"}}': it
            for part, counts in {"DraftModel": (9, 5, 3), "Suffix": (8, 4, 2)}.items()
            for name, it in zip(
                ("draft_tokens", "accepted_tokens", "accepted_only_tokens"), counts, strict=True
            )
        },
        **{
            f'specjax:{name}_total{{context_length="256",model_name="tiny",region="thinking"}}': it
            for name, it in {
                "steps": 4,
                "generation_tokens": 11,
                "spec_decode_num_drafts": 3,
                "spec_decode_num_draft_tokens": 9,
                "spec_decode_num_accepted_tokens": 6,
            }.items()
        },
    }
    assert {line: metric(text, line) for line in expected} == expected
    # Series exist from the start, as 0, and add up to those of vLLM's names.
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        samples = families[f"specjax:spec_decode_num_{name}"]
        assert len({(it.labels["region"], it.labels["context_length"]) for it in samples}) == 18
        total = metric(text, f"vllm:spec_decode_num_{name}_total{of}")
        assert sum(it.value for it in samples) == total
    between = metric(text, f"vllm:inter_token_latency_seconds_sum{of}") / 12
    assert 0.01 < between < 0.04  # the pieces come every 20 ms


def accepted_by_part(*parts: PartStatistics) -> dict[str, float]:
    """Return the samples of a counter in the metrics of an engine whose drafter has some parts."""
    engine = MadeUpEngine()
    engine.counted["parts"] = parts
    families = text_string_to_metric_families(ask(engine, "/metrics", "GET").text)
    name = "specjax:spec_decode_num_accepted_tokens_per_part"
    samples = next(family.samples for family in families if family.name == name)
    assert all(sample.labels["model_name"] == "tiny" for sample in samples)
    return {sample.labels["part"]: sample.value for sample in samples}


def test_parts_of_one_class_have_different_labels() -> None:
    numbers = {"drafted": 9, "accepted_only": 0}
    names = ("DraftModel", "Suffix", "DraftModel")
    parts = [
        PartStatistics(name, accepted=7 + place, **numbers) for place, name in enumerate(names)
    ]
    assert accepted_by_part(*parts) == {"DraftModel": 7, "Suffix": 8, "DraftModel 2": 9}


def test_a_drafter_without_parts_has_no_counters_by_part() -> None:
    assert accepted_by_part() == {}


# --- who may ask ----------------------------------------------------------------------------------


def test_with_a_key_nothing_is_answered_without_it() -> None:
    service = service_of(MadeUpEngine(), api_keys=("another-key-of-it", "a-secret-key"))
    for path, method in (
        ("/v1/models", "GET"),
        ("/v1/completions", "POST"),
        ("/metrics", "GET"),
        ("/nothing", "GET"),
    ):
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "a-secret-key"},
            {"Authorization": "Bearer "},
        ):
            answer = ask(service, path, method, headers)
            assert refused(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    for scheme in ("Bearer", "bearer"):
        right = {"Authorization": f"{scheme} a-secret-key"}
        assert ask(service, "/v1/models", "GET", right).status_code == 200
    assert not service.engine.submitted  # pyright: ignore[reportAttributeAccessIssue]
    for path in ("/", "/health"):
        assert ask(service, path, "GET").status_code == 200


ORIGIN = "https://chat.example"
PREFLIGHT = [("Origin", ORIGIN), ("Access-Control-Request-Method", "POST")]
PREFLIGHT += [("Access-Control-Request-Headers", "authorization,content-type")]


@pytest.mark.parametrize("origins", [(ORIGIN,), ("http://localhost:3000", ORIGIN), ("*",)])
def test_pages_of_an_origin_that_is_let_in_may_use_the_server_with_a_key(
    origins: tuple[str, ...],
) -> None:
    service = service_of(MadeUpEngine(), cors_origins=origins, api_keys=("key",))
    preflight = ask(service, method="OPTIONS", headers=PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] in (ORIGIN, "*")
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for headers in ([("Origin", ORIGIN)], [("Origin", ORIGIN), ("Authorization", "Bearer key")]):
        answer = ask(service, headers=headers, whatever=1)
        assert answer.headers["access-control-allow-origin"] in (ORIGIN, "*")
        assert answer.status_code == (200 if len(headers) > 1 else 401)
        assert "x-specjax-ignored" in answer.headers["access-control-expose-headers"].lower()


@pytest.mark.parametrize("origins", [(), ("http://localhost:3000",)])
def test_pages_of_other_origins_read_no_answers(origins: tuple[str, ...]) -> None:
    service = service_of(MadeUpEngine(), cors_origins=origins)
    preflight = ask(service, method="OPTIONS", headers=PREFLIGHT)
    assert preflight.status_code >= 400
    assert "access-control-allow-origin" not in preflight.headers
    assert "access-control-allow-origin" not in ask(service, headers=[("Origin", ORIGIN)]).headers


def test_health_says_how_many_programs_are_compiled() -> None:
    answer = ask(MadeUpEngine(), "/health", "GET")
    assert answer.json() == {"status": "ok", "programs": {"compiled": 3, "of": 5}}


def test_a_name_that_is_not_this_machines_own_is_refused() -> None:
    service = service_of(MadeUpEngine(), only_loopback=True)
    for host in (
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "",
        "localhost.evil",
        "[::2]",
    ):
        answer = ask(service, "/v1/models", "GET", {"Host": host})
        assert refused(answer, 403)["code"] == "host_not_allowed"
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:5", "127.1.2.3", "[::1]:8000", "[::1]"):
        assert ask(service, "/v1/models", "GET", {"Host": host}).status_code == 200
    answer = ask(service_of(MadeUpEngine()), "/v1/models", "GET", {"Host": "my.server"})
    assert answer.status_code == 200


def test_a_form_is_no_json() -> None:
    """Check content types that a web page may send to any server without permission."""
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
    ):
        refused(ask(MadeUpEngine(), headers={"Content-Type": kind}), 415)
    json_type = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert ask(MadeUpEngine(), headers=json_type).status_code == 200


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_body_that_is_too_long_is_not_read() -> None:
    service = service_of(MadeUpEngine(), max_body=1000)
    assert refused(ask(service, content=b"x" * 1001), 413)["code"] == "body_too_long"
    read = 0

    async def chunks() -> Any:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b"x" * 100

    assert refused(ask(service, content=chunks()), 413)
    assert read <= 12


def test_a_prompt_that_is_too_long() -> None:
    engine = MadeUpEngine()
    for length, more in (
        (CAPACITY, {}),
        (CAPACITY, {"max_tokens": 1}),
        (CAPACITY + 1, {"max_tokens": 1}),
    ):
        error = refused(ask(engine, prompt="a" * length, **more), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    answer = ask(engine, prompt="a" * (CAPACITY + 1), max_tokens=0, echo=True, logprobs=0)
    error = refused(answer, 400)
    assert error["code"] == "context_length_exceeded"
    error = refused(chat(engine, messages=[{"role": "user", "content": "a" * CAPACITY}]), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert not engine.submitted


def test_more_tokens_than_fit_are_as_many_as_fit() -> None:
    engine = MadeUpEngine()
    for answer in (
        ask(engine, prompt="a", max_tokens=CAPACITY),
        ask(engine, prompt="a" * 60, max_tokens=4096),
        ask(engine, prompt="a" * 60),  # the default is 16
        ask(engine, prompt=["a" * 60, "a"], max_tokens=2**31 - 1),
        chat(engine, max_tokens=4096),
        chat(engine, max_completion_tokens=4096),
    ):
        body = answer.json()
        assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
        assert body["usage"]["total_tokens"] == CAPACITY * len(body["choices"])
    *_, last = events(ask(engine, prompt="a" * 60, max_tokens=100, stream=True))
    assert last["choices"][0]["finish_reason"] == "length"
    # A prompt without new tokens may fill the whole capacity.
    answer = ask(engine, prompt="a" * CAPACITY, max_tokens=0, echo=True, logprobs=0)
    assert answer.status_code == 200


BODIES = json.loads((Path(__file__).parent / "client_bodies.json").read_text())


@pytest.mark.full
@pytest.mark.thorough_except(
    "guidellm 0.8.1, completions",
    "guidellm, older, completions",
    "guidellm 0.8.1, chats",
    "guidellm 0.8.1, chats, not streamed",
    "Continue, chat",
    "Continue, agent, its turn after a tool",
    "Continue, autocompletion",
    "Cline",
    "LiteLLM",
    "LiteLLM, an answer sent back",
    "LangChain",
    "LangChain, a stream",
    "LangChain, completions",
    "VS Code, chat",
    "VS Code, after a tool",
    "OpenAI's Python client, an answer sent back",
    "openai 3.57.0, a developer's message",
    "openai 3.57.0, an answer sent back, a stream",
    "langchain-openai 1.7.4, with a tool",
    "pydantic-ai 2.68.0, an answer sent back",
    "llama-index-llms-openai 0.1.27",
    "ai 6.0.326 with @ai-sdk/openai-compatible 2.0.92",
)
@pytest.mark.parametrize("case", BODIES, ids=[case["client"] for case in BODIES])
def test_what_real_clients_send_is_answered(case: dict[str, Any]) -> None:
    """Check bodies that are recorded, derived from a client's source, or written down.

    Tools are refused by name.
    """
    assert re.fullmatch(
        r"recorded|written down|(derived|inferred) from the source at [\d.]+", case["origin"]
    )
    engine = MadeUpEngine("The text.")
    engine.capacity = 1024  # many bodies ask for more tokens
    answer = ask(engine, case["path"], content=json.dumps(case["body"]))
    if "refused" in case:
        assert refused(answer, 400)["param"] == case["refused"]
        rest = {
            name: value
            for name, value in case["body"].items()
            if name not in ("tools", "tool_choice")
        }
        # Nothing else in the body is refused.
        assert ask(engine, case["path"], content=json.dumps(rest)).status_code == 200
        return
    assert answer.status_code == 200, answer.text
    ignored = answer.headers.get("x-specjax-ignored", "").split(", ")
    assert [name for name in ignored if name] == case["ignored"]
    if not case["body"].get("stream"):
        choice = answer.json()["choices"][0]
        text = choice["message"]["content"] if "chat" in case["path"] else choice["text"]
        assert text.startswith("The text")
        return
    chunks = events(answer)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join(
        choice["delta"].get("content", "") if "chat" in case["path"] else choice["text"]
        for choice in choices
    )
    assert text.startswith("The text")
    options = case["body"].get("stream_options", {})
    assert (chunks[-1].get("usage") is not None) == options.get("include_usage", False)
    assert all(
        "completion_tokens" in chunk["usage"]
        for chunk in chunks
        if options.get("continuous_usage_stats")
    )


def test_what_no_tokens_could_be_short_enough_for_is_not_made_into_tokens() -> None:
    engine = MadeUpEngine()
    engine.encode = None  # pyright: ignore[reportAttributeAccessIssue]
    far_too_long = "a" * (6 * CAPACITY + 1)  # the longest token has 6 characters
    assert refused(ask(engine, prompt=[far_too_long]), 400)["code"] == "context_length_exceeded"
    answer = chat(engine, messages=[{"role": "user", "content": far_too_long}])
    assert refused(answer, 400)["code"] == "context_length_exceeded"
    answer = ask(engine, "/tokenize", content=json.dumps({"prompt": far_too_long}))
    assert refused(answer, 400)["param"] == "prompt"
    calls = [
        {"function": {"name": far_too_long}},
        {"function": {"name": "f", "arguments": far_too_long}},
        {"function": {"name": "f", "arguments": {far_too_long: 1}}},
        {"function": {"name": "f", "arguments": {"a": [{"b": far_too_long}]}}},
    ]
    for message in (
        {"role": far_too_long, "content": "Hi"},
        {"role": "user", "content": "Hi", "name": far_too_long},
        {"role": "assistant", "content": "Hi", "reasoning": far_too_long},
        *({"role": "assistant", "tool_calls": [call]} for call in calls),
    ):
        assert refused(chat(engine, messages=[message]), 400)["code"] == "context_length_exceeded"
    engine = MadeUpEngine()
    ask(engine, prediction={"type": "content", "content": far_too_long})
    # The rest of a prediction cannot be used.
    assert len(engine.submitted[0].settings["prediction"]) == 6 * CAPACITY


def test_a_text_that_could_not_be_long_enough() -> None:
    assert refused(chat(MadeUpEngine(), min_tokens=CAPACITY), 400)["param"] == "min_tokens"


def test_all_texts_of_a_request_are_taken_or_none() -> None:
    engine = MadeUpEngine(pause=10.0)
    engine.room = 3
    answer = ask(engine, n=4)
    assert refused(answer, 429)["code"] == "queue_full"
    assert answer.headers["retry-after"] == "1"
    assert [handle.finish_reason for handle in engine.submitted] == ["cancelled"] * 3


def test_a_request_whose_texts_do_not_all_fit_begins_none_of_them() -> None:
    engine = MadeUpEngine(pause=0.2)
    service = service_of(engine, max_texts=5)

    async def three_requests() -> list[int]:
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(make_app(service)), base_url="http://127.0.0.1"
        ) as client:

            async def post(n: int) -> int:
                body = {"model": "tiny", "prompt": "a", "n": n, "max_tokens": 2}
                return (await client.post("/v1/completions", json=body)).status_code

            first = asyncio.ensure_future(post(3))
            while len(engine.submitted) < 3:
                await asyncio.sleep(0.01)
            answers = [await post(3)]
            assert len(engine.submitted) == 3  # no text has begun only to be cancelled
            return [*answers, await post(2), await first, await post(5)]

    assert asyncio.run(three_requests()) == [429, 200, 200, 200]
    assert {handle.finish_reason for handle in engine.submitted} == {"length"}


def test_log_probabilities_are_bounded_also_where_no_limit_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = MadeUpEngine()
    monkeypatch.setattr(service, "MAX_REQUEST_LOGPROBS", 3 * 60)
    user = [{"role": "user", "content": "a" * (CAPACITY - 60 - len("user:\n"))}]
    for more in (
        {"top_logprobs": 3},
        {"top_logprobs": 2, "n": 2},
        {"top_logprobs": 3, "max_tokens": 10**6},
    ):
        answer = chat(engine, messages=user, logprobs=True, **more)
        assert refused(answer, 400)["code"] == "too_many_logprobs"
    assert not engine.submitted
    for more in (
        {"top_logprobs": 2},
        {"top_logprobs": 2, "max_tokens": 10**6},
        {"top_logprobs": 20, "max_tokens": 8},
    ):
        assert chat(engine, messages=user, logprobs=True, **more).status_code == 200


def test_a_long_body_is_not_read_where_everybody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def noted(reader: Any) -> Any:
        def read(*arguments: Any) -> Any:
            threads.append(threading.current_thread())
            return reader(*arguments)

        return read

    for name in ("read_completion", "read_chat", "read_tokenize"):
        monkeypatch.setattr(requests, name, noted(getattr(requests, name)))
    service = service_of(MadeUpEngine())
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        body = {"model": "tiny", "metadata": "x" * app.SHORT_BODY, "prompt": "a"}
        if "chat" in path:
            body |= {"prompt": None, "messages": [{"role": "user", "content": "a"}]}
        assert ask(service, path, content=json.dumps(body)).status_code == 200
    assert len(threads) == 3
    assert threading.current_thread() not in threads


def test_more_texts_than_there_can_be_are_no_matter_of_waiting() -> None:
    service = service_of(MadeUpEngine(), max_texts=5)
    assert refused(ask(service, prompt=["a", "b", "c"], n=2), 400)["param"] == "n"
    assert ask(service, prompt=["a"], n=5).status_code == 200


def test_what_the_chat_template_refuses() -> None:
    error = refused(chat(MadeUpEngine(), messages=[{"role": "nobody", "content": "a"}]), 400)
    assert error["param"] == "messages"


def test_a_request_gives_settings_to_the_chat_template() -> None:
    engine = MadeUpEngine()
    assert chat(engine, chat_template_kwargs={"mood": "good"}).status_code == 200
    assert chat(engine).status_code == 200
    first, second = ("".join(map(chr, handle.prompt)) for handle in engine.submitted)
    assert first == second + "mood=good\n"
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "chat_template_kwargs": {"mood": "good"},
    }
    tokens = ask(engine, "/tokenize", content=json.dumps(body)).json()["tokens"]
    assert "".join(map(chr, tokens)) == first
    far_too_long = "a" * (6 * CAPACITY + 1)
    for settings in ({"mood": far_too_long}, {far_too_long: 1}):
        answer = chat(engine, chat_template_kwargs=settings)
        assert refused(answer, 400)["code"] == "context_length_exceeded"


def test_settings_that_the_template_does_not_read_are_told_in_a_header() -> None:
    engine = MadeUpEngine()
    template = "{{ messages }}{{ mood }}"
    engine.tokenizer.get_chat_template = lambda: template  # pyright: ignore
    answer = chat(engine, chat_template_kwargs={"mood": "good", "thinking": True})
    assert answer.headers["x-specjax-ignored"] == "chat_template_kwargs.thinking"
    assert "x-specjax-ignored" not in chat(engine, chat_template_kwargs={"mood": "good"}).headers


def test_an_error_about_settings_of_the_template_names_them() -> None:
    engine = MadeUpEngine()

    def encode(prompt: Any, settings: Any) -> list[int]:
        raise InputError("chat_template_kwargs: {'mood': 1} cause an error: messages: no such mood")

    engine.encode = encode  # pyright: ignore[reportAttributeAccessIssue]
    answer = chat(engine, chat_template_kwargs={"mood": 1})
    assert refused(answer, 400)["param"] == "chat_template_kwargs"


def test_a_chats_answer_is_its_final_channel_and_a_completion_is_raw() -> None:
    engine = MadeUpEngine()
    ask(engine)
    chat(engine)
    assert [handle.settings["is_chat"] for handle in engine.submitted] == [False, True]


@pytest.fixture(scope="module")
def harmony() -> Any:
    return with_marks()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("output", "answer"), ANSWERS)
def test_of_an_answer_in_channels_the_content_is_the_final_one(
    harmony, output: str, answer: str, stream: bool
) -> None:
    prompt, tokens = ids_of(harmony, ASKED), ids_of(harmony, output)
    request = SimpleNamespace(prompt_length=len(prompt), cached=0)
    growing = GrowingText(harmony, prompt, is_chat=True)
    options = {"stop_token_ids": ids_of(harmony, "<|return|><|call|>")}
    handle = Handle(lambda _: None, request, options, growing)  # pyright: ignore
    for at in range(0, max(len(tokens), 1), 2):
        new = tokens[at : at + 2]
        handle.deliver(RowProgress(new, [True] * len(new), done=at + 2 >= len(tokens)))
    engine = MadeUpEngine()
    engine.encode = lambda *_: prompt  # pyright: ignore[reportAttributeAccessIssue]
    engine.submit = lambda *_, **__: handle  # pyright: ignore[reportAttributeAccessIssue]
    stream_options = {"stream_options": {"include_usage": True}} if stream else {}
    response = chat(engine, stream=stream, **stream_options)
    if stream:
        *chunks, last = events(response)
        content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        reason, usage = chunks[-1]["choices"][0]["finish_reason"], last["usage"]
    else:
        (choice,) = response.json()["choices"]
        content, reason = choice["message"]["content"], choice["finish_reason"]
        usage = response.json()["usage"]
    assert content == answer
    assert usage["completion_tokens"] == len(tokens)
    assert reason == ("stop" if output.endswith(("<|return|>", "<|call|>")) else "length")


def test_an_engine_that_fails() -> None:
    engine = MadeUpEngine()
    service = service_of(engine)
    engine.error = RuntimeError("a secret of the device")
    error = refused(ask(service), 500)
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    assert ask(service, "/health", "GET").status_code == 200  # only this text has failed
    text = ask(service, "/metrics", "GET").text
    assert metric(text, 'specjax:engine_running{model_name="tiny"}') == 1
    engine.is_down = True
    refused(ask(service), 500)


def test_an_engine_that_has_failed_while_nobody_asked_for_anything() -> None:
    engine = MadeUpEngine()
    service = service_of(engine)
    engine.is_down = True
    assert "failed" in refused(ask(service, "/health", "GET"), 503)["message"]
    text = ask(service, "/metrics", "GET").text
    assert metric(text, 'specjax:engine_running{model_name="tiny"}') == 0
    assert engine.submitted == []


def test_an_error_in_the_middle_of_a_stream_is_said_there() -> None:
    engine = MadeUpEngine("abc")
    engine.error = RuntimeError("made up")
    answer = ask(engine, max_tokens=3, stream=True)
    assert answer.status_code == 200
    *chunks, last, rest = answer.text.split("\n\n")
    assert [json.loads(chunk[6:])["choices"][0]["text"] for chunk in chunks] == ["a", "b", "c"]
    assert json.loads(last[6:])["error"]["type"] == "server_error"
    assert rest == ""  # the stream is not marked as complete


def test_who_comes_while_it_drains() -> None:
    service = service_of(MadeUpEngine())
    service.is_draining = True
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = ask(service, path)
        assert refused(answer, 503)["code"] == "draining"
        assert (answer.headers["retry-after"], answer.headers["connection"]) == ("10", "close")
    refused(ask(service, "/health", "GET"), 503)
    assert ask(service, "/metrics", "GET").status_code == 200


# --- on a network ---------------------------------------------------------------------------------


@contextmanager
def connected(
    address: tuple[str, int], receive_buffer: int | None = None
) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(10)
        connection.connect(address)
        yield connection


def head(length: int, path: str = "/v1/completions") -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "",
        "",
    )
    return "\r\n".join(lines).encode()


def request(**body: Any) -> bytes:
    content = json.dumps({"model": "tiny", "prompt": "ab"} | body).encode()
    return head(len(content)) + content


def read_all(connection: socket.socket) -> bytes:
    """Return the bytes that come until the other side closes."""
    received = b""
    while more := connection.recv(65536):
        received += more
    return received


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_away_leaves_nothing_behind(stream: bool) -> None:
    engine = MadeUpEngine(pause=0.05)
    with serving(engine) as address:
        with connected(address) as connection:
            connection.sendall(request(stream=stream, n=3, max_tokens=60))
            wait_until(lambda: len(engine.submitted) == 3)
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        closed_at = time.perf_counter()
        wait_until(lambda: all(handle.finish_reason == "cancelled" for handle in engine.submitted))
        assert all(
            handle.cancelled_at - closed_at < 1
            for handle in engine.submitted
            if handle.cancelled_at
        )


@pytest.mark.parametrize("at_once", [True, False])
def test_a_second_request_before_the_first_is_answered_is_not_read(at_once: bool) -> None:
    engine = MadeUpEngine(pause=0.05)
    with serving(engine) as address:
        with connected(address) as connection:
            connection.sendall(request(max_tokens=4) + request() * at_once)
            wait_until(lambda: engine.submitted)
            connection.sendall(request() * (not at_once))
            received = read_all(connection)
            assert received.count(b"HTTP/1.1 200") == 1
            assert b'"total_tokens":6' in received
        with connected(address) as connection:
            connection.sendall(request(max_tokens=60) + request() * at_once)
            wait_until(lambda: len(engine.submitted) == 2)
            connection.sendall(request() * (not at_once))
        wait_until(lambda: engine.submitted[1].finish_reason == "cancelled", 1.5)
    assert len(engine.submitted) == 2


def test_who_goes_away_before_it_is_at_the_engine_leaves_nothing_behind() -> None:
    engine = MadeUpEngine(pause=10.0)
    encode, encoding = engine.encode, []

    def slow(prompt: Any, _: Any) -> list[int]:
        encoding.append(prompt)
        time.sleep(0.5)
        return encode(prompt)

    engine.encode = slow  # pyright: ignore[reportAttributeAccessIssue]
    with serving(engine) as address:
        with connected(address) as connection:
            connection.sendall(request())
            wait_until(lambda: encoding)
        time.sleep(1)
        assert all(handle.finish_reason == "cancelled" for handle in engine.submitted)


def test_a_reader_that_stops_reading_is_dropped_and_nothing_is_kept_for_it() -> None:
    engine = MadeUpEngine()
    engine.capacity = 10**9
    with (
        serving(engine, ConnectionLimits(reader_seconds=0.5)) as address,
        connected(address, receive_buffer=4096) as connection,
    ):
        connection.sendall(request(stream=True, max_tokens=50_000))  # about 10 MB of events
        reset = select.poll()
        reset.register(connection, 0)
        assert reset.poll(20_000)
        received = 0
        with pytest.raises(ConnectionError):
            while more := connection.recv(65536):
                received += len(more)
        assert received < 2_000_000


def test_a_slow_reader_is_waited_for() -> None:
    engine = MadeUpEngine("y")
    engine.capacity = 10**9
    with (
        serving(engine, ConnectionLimits(reader_seconds=0.8)) as address,
        connected(address, receive_buffer=4096) as connection,
    ):
        connection.sendall(request(stream=True, max_tokens=2_000))
        received = b""
        for _ in range(8):  # in all longer than a reader may stop
            time.sleep(0.25)
            until = len(received) + 32768
            while len(received) < until:
                received += read_more(connection, 4096)
        while b"[DONE]" not in received:
            received += read_more(connection)
    assert received.count(b'"text":"y"') == 2_000


def test_a_body_that_does_not_come() -> None:
    with serving(MadeUpEngine(), body_seconds=0.3) as address, connected(address) as connection:
        connection.sendall(head(100) + b'{"model"')
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 408")
    assert b'"code":"timeout"' in received


def test_a_head_that_does_not_come() -> None:
    with serving(MadeUpEngine(), ConnectionLimits(request_seconds=0.3)) as address:
        for beginning in (b"", b"POST /v1/comp", head(5)[:-2]):
            with connected(address) as connection:
                connection.sendall(beginning)
                with pytest.raises((ConnectionError, AssertionError)):
                    assert read_all(connection)  # closed without an answer
        with connected(address) as connection:  # also after a whole head
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            received = b""
            while not received.endswith(b"}}"):
                received += read_more(connection)
            assert b'"status":"ok"' in received
            connection.sendall(b"GET /hea")
            started = time.monotonic()
            with pytest.raises((ConnectionError, AssertionError)):
                assert read_all(connection)
            assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "sent",
    [
        *(
            b"\0\0\0\r\n\r\n",
            b"GET\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        ),
        *(
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 2_000_000 + b"\r\n\r\n",
        ),
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        (
            b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Type:"
            b" application/json\r\n\r\nz\r\n"
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length:"
            b" 5\r\nContent-Length: 6\r\n\r\nabcde"
        ),
    ],
)
def test_what_is_no_http(sent: bytes) -> None:
    with serving(MadeUpEngine(), ConnectionLimits(request_seconds=2)) as address:
        with connected(address) as connection:
            received = b""
            with suppress(OSError):  # the server may close before it has read everything
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                received = read_all(connection)
        if received:
            assert received.startswith(b"HTTP/1.1 4"), received
            assert b'{"error":{"message":' in received
        with connected(address) as connection:
            connection.sendall(
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_there_are_only_so_many_connections() -> None:
    bounds = ConnectionLimits(connections=2, trusted=("127.0.0.1",))
    with serving(MadeUpEngine(), bounds) as address, connected(address), connected(address):
        time.sleep(0.1)
        with connected(address) as third:
            third.sendall(request())
            received = read_all(third)
        assert received.startswith(b"HTTP/1.1 503")
        assert b"too many connections" in received


def test_a_long_body_is_refused_and_the_connection_goes_on() -> None:
    with serving(MadeUpEngine(), max_body=1000) as address, connected(address) as connection:
        connection.sendall(head(200_000) + b"x" * 200_000)
        received = connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 413")
        connection.sendall(request(max_tokens=2))
        received = b""
        while b'"total_tokens":4' not in received:
            received += read_more(connection)


# --- the beginning and the end --------------------------------------------------------------------


def ask_health(address: tuple[str, int]) -> bytes:
    """Return the whole answer to a request for ``/health``."""
    with connected(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return read_all(connection)


def test_before_there_is_an_engine_everybody_is_told_to_come_back() -> None:
    with run.bind("127.0.0.1", 0) as bound:
        address = bound.getsockname()
        with run.starting(bound):
            answers = [ask_health(address)]
            with connected(address) as connection:
                connection.sendall(request())
                answers.append(read_all(connection))
            # A connection that asks for nothing does not delay the start.
            idle = socket.create_connection(address)
        for answer in answers:
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 5" in answer.lower()
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "starting"
        # A connection that comes in between waits until the engine is there.
        with connected(address) as early, running(MadeUpEngine(), bound=bound):
            early.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert read_all(early).startswith(b"HTTP/1.1 200 ")
            assert ask_health(address).startswith(b"HTTP/1.1 200 ")
        idle.close()


def test_what_runs_after_sigterm_is_waited_for_only_so_long() -> None:
    engine = MadeUpEngine(pause=0.5)
    with (
        running(engine, drain_seconds=0.4) as (server, address),
        connected(address) as whole,
        connected(address) as stream,
    ):
        whole.sendall(request(max_tokens=50))
        stream.sendall(request(max_tokens=50, stream=True))
        wait_until(lambda: len(engine.submitted) == 2)
        signalled_at = time.monotonic()
        server.handle_exit(signal.SIGTERM, None)
        received = read_all(whole)
        assert received.startswith(b"HTTP/1.1 503")
        assert b"shutting down" in received
        received = read_all(stream)
        assert b"shutting down" in received
        assert b"[DONE]" not in received
        assert 0.3 < time.monotonic() - signalled_at < 4
        wait_until(lambda: not server.server_state.connections)
        assert server.status == 0
    assert [handle.finish_reason for handle in engine.submitted] == ["cancelled"] * 2


def test_a_second_signal_waits_for_nobody() -> None:
    engine = MadeUpEngine(pause=10.0)
    with running(engine, drain_seconds=60) as (server, address), connected(address) as connection:
        connection.sendall(request())
        wait_until(lambda: engine.submitted)
        server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.3)
        assert engine.submitted[0].finish_reason is None
        server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: engine.submitted[0].finish_reason == "cancelled", 2)
        assert server.status == 128 + signal.SIGTERM
