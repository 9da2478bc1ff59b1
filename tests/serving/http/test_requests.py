"""Tests of reading requests: every name and value is known, or refused by its name."""

import dataclasses
import json
import random
import string
from typing import Any

import msgspec
import pytest

from specjax.sampling import SAMPLING_NAMES, Sampling
from specjax.serving.http import requests
from specjax.serving.http.errors import RequestError
from specjax.serving.http.requests import (
    IGNORED,
    UNSUPPORTED,
    Limits,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)

LIMITS = Limits(names=("tiny", "other"), vocab_size=100, eos_token_ids=(2, 3))
COMPLETION = {"model": "tiny", "prompt": "import os"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
READERS = {"completion": (read_completion, COMPLETION), "chat": (read_chat, CHAT)}
both = pytest.mark.parametrize("kind", READERS)


def read(kind: str = "completion", limits: Limits = LIMITS, **values: Any) -> Any:
    reader, base = READERS[kind]
    return reader(json.dumps(base | values).encode(), limits)


def refusal(kind: str = "completion", limits: Limits = LIMITS, **values: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(kind, limits, **values)
    return caught.value


# --- settings of the chat template ----------------------------------------------------------------


def test_what_a_template_reads_is_given_to_it_and_the_rest_is_told() -> None:
    limits = dataclasses.replace(LIMITS, template_names=frozenset(["messages", "enable_thinking"]))
    settings = {"enable_thinking": False, "thinking": True, "tools": None}
    request = read("chat", limits, chat_template_kwargs=settings, unknown=1)
    assert request.chat_template_kwargs == {"enable_thinking": False, "thinking": True}
    assert request.ignored == ("unknown", "chat_template_kwargs.thinking")
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": settings}
    tokens = read_tokenize(json.dumps(body).encode(), limits)
    assert tokens.chat_template_kwargs == request.chat_template_kwargs
    assert tokens.ignored == request.ignored[1:]
    # Without the names that the template reads, nothing is reported.
    assert read("chat", chat_template_kwargs=settings).ignored == ()
    for nothing in (None, {}):
        assert read("chat", chat_template_kwargs=nothing) == read("chat")


def test_where_there_is_no_template_its_settings_change_nothing() -> None:
    assert read(chat_template_kwargs={"a": 1}).ignored == ("chat_template_kwargs",)
    tokens = read_tokenize(
        json.dumps({"prompt": "a", "chat_template_kwargs": {"a": 1}}).encode(), LIMITS
    )
    assert (tokens.chat_template_kwargs, tokens.ignored) == ({}, ("chat_template_kwargs",))


@pytest.mark.parametrize(
    "settings",
    [1, "a", [1], {"tools": [1]}, {"messages": []}, {"continue_final_message": True}],
    ids=str,
)
def test_settings_that_are_none_are_refused_by_their_name(settings: Any) -> None:
    error = refusal("chat", chat_template_kwargs=settings)
    assert (error.status, error.param) == (400, "chat_template_kwargs")


# --- what is taken --------------------------------------------------------------------------------


def test_what_is_not_given_has_openais_defaults() -> None:
    request = read()
    assert (request.prompts, request.n, request.max_tokens) == (("import os",), 1, 16)
    assert (request.seed, request.stop) == (None, ())
    sampling = {name: getattr(request.params, name) for name in SAMPLING_NAMES}
    assert sampling == vars(Sampling(temperature=1.0))
    assert (request.params.eos_token_ids, request.logprobs) == (None, None)
    assert not (request.stream or request.echo or request.include_usage)
    assert read("chat").max_tokens is None  # as many as fit


@both
def test_null_is_as_good_as_nothing(kind: str) -> None:
    names = (
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
        "ignore_eos",
    )
    more = ("prediction", "logprobs", "max_tokens", "min_tokens", "best_of", *UNSUPPORTED, *IGNORED)
    assert read(kind, **dict.fromkeys((*names, *more))) == read(kind)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ("text",)),
        (["one", "two"], ("one", "two")),
        ([1, 2, 3], ([1, 2, 3],)),
        ([[1, 2], [3]], ([1, 2], [3])),
        (["one"], ("one",)),
        ("\0 \U0001f389 é", ("\0 \U0001f389 é",)),
    ],
)
def test_prompts(prompt: Any, prompts: tuple) -> None:
    assert read(prompt=prompt).prompts == prompts


CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
EXTRAS: dict[str, list[Any]] = {
    "annotations": [None, [], [{"type": "url_citation"}]],
    "audio": [None, {"id": "audio_1"}],
    "refusal": [None, "", "no"],
    "reasoning_details": [None, [{"type": "reasoning.text", "text": "hm"}]],
    "reasoning": [None, "", {"effort": "low"}],
    "tool_calls": [None, []],
    "function_call": [None],
    "id": ["msg_1", 5],
    "cache_control": [{"type": "ephemeral"}],
    "unknown": [None, 5, ["x"], {"a": [1]}],
}


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_an_answer_s_message_can_be_sent_back(role: str, name: str) -> None:
    message = {"role": role, "content": "Hello"}
    for value in EXTRAS[name]:
        assert read("chat", messages=[message | {name: value}]).prompts == ([message],)


@pytest.mark.parametrize(
    ("message", "replaced"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, None),
        (
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ),
        ({"role": "assistant", "content": "", "tool_calls": [CALL | {"index": 0}]}, None),
        ({"role": "assistant", "content": "I read.", "tool_calls": [CALL, CALL]}, None),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}],
            },
            None,
        ),
        (
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "f", "arguments": "{}"},
            },
            None,
        ),
        ({"role": "assistant", "content": None}, None),
        ({"role": "tool", "content": "7", "tool_call_id": "1", "name": "read"}, None),
        (
            {"role": "tool", "content": [{"type": "text", "text": "7"}]},
            {"role": "tool", "content": "7"},
        ),
        (
            {"role": "tool", "tool_call_id": "1"},
            {"role": "tool", "content": None, "tool_call_id": "1"},
        ),
        ({"role": "function", "content": None, "name": "f"}, None),
        *(
            ({"role": "assistant", "content": "7", name: "hm"}, None)
            for name in ("reasoning_content", "reasoning", "thinking")
        ),
    ],
)
def test_what_templates_read_of_a_message_is_kept(message: dict, replaced: dict | None) -> None:
    expected = {
        name: value for name, value in (replaced or message).items() if name != "tool_calls"
    }
    if "tool_calls" in message:  # without the index, which templates do not read
        expected["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"}
            for call in message["tool_calls"]
        ]
    assert read("chat", messages=[message]).prompts == ([expected],)


def test_messages_are_text_or_parts_of_text() -> None:
    parts = [
        {"type": "text", "text": "one"},
        {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}},
    ]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": parts, "name": "me"},
    ]
    joined = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo", "name": "me"},
    ]
    assert read("chat", messages=messages).prompts == (joined,)


def test_the_newer_name_of_the_limit_wins() -> None:
    for kind in READERS:
        assert read(kind, max_tokens=5).max_tokens == 5
        assert read(kind, max_tokens=5, max_completion_tokens=7).max_tokens == 7
        # The value of the older name is not read.
        assert read(kind, max_tokens=-1, max_completion_tokens=7).max_tokens == 7
        assert refusal(kind, max_completion_tokens=0).param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("number", "seed"), [(0, 0), (7, 7), (2**63 - 1, 2**63 - 1), (-1, 2**63 - 1), (-(2**63), 0)]
)
def test_every_integer_of_64_bits_is_a_seed(number: int, seed: int) -> None:
    assert read(seed=number).seed == seed


def test_no_limit_on_candidates_has_two_names() -> None:
    assert read(top_k=-1).params.top_k == read(top_k=0).params.top_k == 0
    assert read(top_k=5).params.top_k == 5


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ({}, None),
        ({"stop_token_ids": [5, 5]}, (2, 3, 5)),
        ({"ignore_eos": True}, ()),
        ({"ignore_eos": True, "stop_token_ids": [2, 7]}, (2, 7)),
        ({"stop_token_ids": []}, None),
    ],
)
def test_ids_that_end_a_text(values: dict, ends: Any) -> None:
    assert read(**values).params.eos_token_ids == ends


def test_logprobs_are_a_number_here_and_a_switch_with_a_number_there() -> None:
    assert read(logprobs=0).logprobs == 0
    assert read(logprobs=20).logprobs == 20
    assert read("chat", logprobs=True).logprobs == 0
    assert read("chat", logprobs=True, top_logprobs=3).logprobs == 3
    assert read("chat", logprobs=False).logprobs is None
    assert read("chat", logprobs=False, top_logprobs=0).logprobs is None


def test_the_prompt_alone_may_be_asked_about() -> None:
    request = read(echo=True, max_tokens=0, logprobs=1)
    assert (request.max_tokens, request.echo, request.logprobs) == (0, True, 1)


@both
def test_a_prediction_is_text_or_parts_of_text(kind: str) -> None:
    assert read(kind, prediction={"type": "content", "content": "abc"}).prediction == "abc"
    parts = [{"type": "text", "text": "abc"}]
    assert read(kind, prediction={"type": "content", "content": parts}).prediction == "abc"
    assert read(kind, prediction={"type": "content", "content": ""}).prediction is None


@both
def test_penalties_biases_and_banned_words_are_read(kind: str) -> None:
    params = read(
        kind,
        presence_penalty=0.5,
        frequency_penalty=-2,
        repetition_penalty=1.1,
        logit_bias={"7": 150, "3": -1},
        allowed_token_ids=[3, 7, 8],
        bad_words=["one", "two words"],
    ).params
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    assert penalties == (0.5, -2, 1.1)
    assert params.logit_bias == ((3, -1.0), (7, 100.0))  # restricted as in vLLM
    assert (params.allowed_token_ids, params.bad_words) == ((3, 7, 8), ("one", "two words"))
    neutral = {"presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "bad_words": []}
    assert read(kind, **neutral, allowed_token_ids=[]) == read(kind)


@both
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.5),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("logit_bias", {"100": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": "a"}),
        ("logit_bias", {str(number): 0 for number in range(1025)}),
        ("logit_bias", [1]),
        ("allowed_token_ids", [100]),
        ("allowed_token_ids", ["1"]),
        ("bad_words", [""]),
        ("bad_words", "a"),
        ("bad_words", ["a" * 257]),
        ("bad_words", ["a"] * 33),
    ],
)
def test_a_wrong_penalty_or_bias_is_refused_by_name(kind: str, name: str, value: Any) -> None:
    error = refusal(kind, **{name: value})
    assert (error.status, error.param) == (400, name)
    assert error.message.startswith(name)


@both
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_may_have_its_neutral_values_alone(kind: str, name: str) -> None:
    for neutral in UNSUPPORTED[name]:
        assert read(kind, **{name: neutral}) == read(kind)
    error = refusal(kind, **{name: "something else" if name != "chat_template" else "{{ 1 }}"})
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
    assert name in error.message


@both
@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_does_not_change_the_text_is_not_read(kind: str, name: str) -> None:
    assert read(kind, **{name: {"any": ["thing", 1]}}) == read(kind)


@both
def test_names_that_are_not_known_are_told_and_change_nothing(kind: str) -> None:
    odd = {"unknown": 0, "Another-One": None, "é\n": {"a": [1]}, "thinking_mode": "x"}
    request = read(kind, **odd)
    assert request.ignored == tuple(odd)
    assert dataclasses.replace(request, ignored=()) == read(kind)
    tokens = read_tokenize(json.dumps({"prompt": "a", "max_tokens": 5}).encode(), LIMITS)
    assert tokens.ignored == ("max_tokens",)


@both
def test_so_are_those_within_an_object(kind: str) -> None:
    request = read(
        kind,
        stream=True,
        stream_options={"step": 1},
        prediction={"type": "content", "content": "a", "id": 1},
    )
    assert set(request.ignored) == {"stream_options.step", "prediction.id"}
    assert request.prediction == "a"


@both
def test_the_usage_may_come_with_every_chunk(kind: str) -> None:
    request = read(
        kind, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    assert request.include_usage and request.continuous_usage
    request = read(kind, stream=True, stream_options={"continuous_usage_stats": False})
    assert not request.continuous_usage


def test_special_tokens_may_be_left_out_of_a_prompt_and_are_a_template_s_in_a_chat() -> None:
    assert read().add_special_tokens is True
    assert read(add_special_tokens=False).add_special_tokens is False
    assert read("chat", add_special_tokens=False) == read("chat")
    assert refusal("chat", add_special_tokens=True).param == "add_special_tokens"


def test_the_end_of_a_chat_is_read() -> None:
    assert read("chat").chat_end == "answer"
    assert read("chat", add_generation_prompt=True).chat_end == "answer"
    assert read("chat", add_generation_prompt=False).chat_end == "messages"
    assert read("chat", continue_final_message=True).chat_end == "last message"
    both_of_them = {"continue_final_message": True, "add_generation_prompt": False}
    assert read("chat", **both_of_them).chat_end == "last message"
    error = refusal("chat", continue_final_message=True, add_generation_prompt=True)
    assert error.param == "continue_final_message"
    body = {"messages": CHAT["messages"], "continue_final_message": True}
    assert read_tokenize(json.dumps(body).encode(), LIMITS).chat_end == "last message"
    assert refusal(continue_final_message=True).param == "continue_final_message"
    assert refusal(add_generation_prompt=False).param == "add_generation_prompt"


@both
def test_log_probabilities_of_the_prompt_are_read(kind: str) -> None:
    request = read(kind, prompt_logprobs=3)
    assert (request.prompt_logprobs, request.logprobs, request.top_count) == (3, None, 3)
    assert request.scores_prompt
    more = {"logprobs": 5} if kind == "completion" else {"logprobs": True, "top_logprobs": 5}
    assert read(kind, prompt_logprobs=0, **more).top_count == 5
    assert not read(kind, **more).scores_prompt
    assert "a stream has none" in refusal(kind, prompt_logprobs=1, stream=True).message
    if kind == "completion":
        assert read(max_tokens=0, prompt_logprobs=1).max_tokens == 0
        assert refusal(max_tokens=0, echo=True).param == "max_tokens"
    bare = dataclasses.replace(LIMITS, max_logprobs=0)
    assert refusal(kind, limits=bare, prompt_logprobs=0).param == "prompt_logprobs"


def test_a_suffix_needs_a_text_and_no_echo() -> None:
    assert read(suffix=" end").suffix == " end"
    assert (read().suffix, read(suffix="").suffix, read(suffix=None).suffix) == ("", "", "")
    assert read(suffix=" end", prompt="").prompts == ("",)
    for wrong in ({"echo": True}, {"prompt": [1, 2]}, {"prompt": [[1], [2]]}, {"prompt": ["a"]}):
        assert refusal(suffix=" end", **wrong).param == "suffix"
    assert refusal("chat", suffix=" end").param == "suffix"


@pytest.mark.parametrize("tokens", [None, "a", [100], [-1], [0.5], 5])
def test_what_has_no_text_is_refused(tokens: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read_detokenize(json.dumps({"tokens": tokens}).encode(), LIMITS)
    assert (caught.value.status, caught.value.param) == (400, "tokens")


@both
def test_a_salt_a_priority_and_store_are_read(kind: str) -> None:
    assert (read(kind).cache_salt, read(kind, cache_salt="mine").cache_salt) == ("", "mine")
    assert [read(kind, store=store).store for store in (None, True, False)] == [True, True, False]
    assert read(kind, priority=0) == read(kind)
    assert read(kind, priority=-7).priority == -7


@both
def test_as_many_stop_strings_as_clients_send(kind: str) -> None:
    stop = [f"<{number}>" for number in range(64)]
    assert read(kind, stop=stop).stop == tuple(stop)


# --- what is refused ------------------------------------------------------------------------------

WRONG = [
    ("n", [0, 17, -1, 2**70, 1.5, "1", True, []]),
    ("best_of", [2, 0, "1"]),
    ("max_tokens", [-1, 2**31, 1e30, "5", 0]),
    ("min_tokens", [-1, 17, "1"]),
    ("temperature", [-0.1, 1e39, "1", [], True]),
    ("top_p", [0, 1.1, -1, "1"]),
    ("top_k", [-2, 2**31, 1.5, "1"]),
    ("min_p", [-0.1, 1.1, "1"]),
    ("seed", [2**63, -(2**63) - 1, 1.5, "1", 2**200]),
    ("stop", [[""], "", ["x"] * 65, "x" * 257, 5, [5], {"a": 1}]),
    ("stop_token_ids", [[100], [-1], [0.5], list(range(10, 17)), "1", [1] * 1000]),
    ("stream", [1, "true", []]),
    ("stream_options", [{"include_usage": True}, []]),
    ("ignore_eos", [1, "yes"]),
    ("cache_salt", ["", "x" * 257, 5, ["a"]]),
    ("priority", [2**31, "0", False, 0.5]),
    ("prompt_logprobs", [-1, 21, "1", True]),
    ("return_token_ids", [1, "yes"]),
    (
        "prediction",
        [
            {"type": "content"},
            {"type": "other", "content": "a"},
            "a",
            {"type": "content", "content": 5},
        ],
    ),
    ("model", [5, [], {}]),
]


@both
@pytest.mark.parametrize(("name", "values"), WRONG, ids=[name for name, _ in WRONG])
def test_an_error_names_the_parameter_and_its_value(kind: str, name: str, values: list) -> None:
    for value in values:
        if kind == "chat" and (name, value) == ("min_tokens", 17):
            continue  # a chat without max_tokens has no limit to exceed
        error = refusal(kind, **{name: value})
        assert (error.status, error.param) == (400, name), value
        assert error.message.startswith(name) or name in error.message
        assert len(error.message) < 400


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        [1, "a"],
        [[1], "a"],
        [100],
        [-1],
        [[1, 100]],
        ["a"] * 65,
        None,
        5,
        {},
        [1.5],
        [True],
        [[[1]]],
        [None],
    ],
)
def test_prompts_that_are_none(prompt: Any) -> None:
    error = refusal(prompt=prompt)
    assert (error.status, error.param) == (400, "prompt")


@pytest.mark.parametrize(
    "messages",
    [
        *(
            [],
            None,
            "text",
            [5],
            [{}],
            [{"role": "user"}],
            [{"role": 5, "content": "a"}],
            [{"role": "user", "content": None}],
        ),
        [{"role": "system", "content": None}],
        [{"role": "user", "tool_calls": [CALL]}],
        *(
            [{"role": "assistant", "tool_calls": calls}]
            for calls in ("x", [5], [{}], [{"id": "1"}], [{"function": {}}])
        ),
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
        [{"role": "assistant", "function_call": "f"}],
        [{"role": "tool", "content": "a", "tool_call_id": 5}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "audio", "text": "x"}]}],
        [{"role": "user", "content": "a"}] * 1025,
    ],
)
def test_messages_that_are_none(messages: Any) -> None:
    error = refusal("chat", messages=messages)
    assert (error.status, error.param) == (400, "messages")


def test_lists_that_are_too_long_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = dataclasses.replace(LIMITS, capacity=10)
    assert read(limits=short, prompt=[5] * 10).prompts == ([5] * 10,)
    assert len(read(limits=short, prompt=[[5] * 10] * 64).prompts) == 64
    assert read(limits=short, prompt=["a,b" * 1000] * 2).prompts == ("a,b" * 1000,) * 2
    monkeypatch.setattr(requests, "read_value", None)  # no value is converted
    for prompt in ([5] * 11, [[5] * 10] * 65, [[]] * 641, [-1] * 11):
        error = refusal(limits=short, prompt=prompt)
        assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert refusal(limits=short, stop_token_ids=[5] * 129).param == "stop_token_ids"


def test_what_is_refused_for_what_else_was_given() -> None:
    assert refusal(prompt=["a"] * 64, n=3).param == "n"
    assert refusal(max_tokens=0, echo=True).param == "max_tokens"
    assert refusal("chat", max_tokens=0).param == "max_tokens"
    assert refusal("chat", top_logprobs=2).param == "top_logprobs"
    assert refusal(logprobs=21).param == "logprobs"
    assert refusal(logprobs=True).param == "logprobs"
    assert refusal("chat", logprobs=5).param == "logprobs"


def test_what_is_of_another_path_is_refused_unless_it_says_nothing() -> None:
    for kind, wrong in (
        ("chat", {"prompt": "a"}),
        ("chat", {"echo": True}),
        ("completion", {"messages": []}),
    ):
        error = refusal(kind, **wrong)
        assert (error.code, error.param) == ("unsupported_parameter", *wrong)
    assert refusal(top_logprobs=1).param == "top_logprobs"
    assert read("chat", echo=False, prompt=None) == read("chat")
    assert read(top_logprobs=0, messages=None) == read()


def test_what_the_server_was_not_started_for() -> None:
    bare = Limits(names=("tiny",), vocab_size=100, max_logprobs=0, max_prediction=0)
    assert refusal(limits=bare, logprobs=0).param == "logprobs"
    assert refusal("chat", limits=bare, logprobs=True).param == "logprobs"
    prediction = {"type": "content", "content": "a"}
    assert refusal(limits=bare, prediction=prediction).param == "prediction"
    error = refusal("chat", limits=Limits(names=("tiny",), vocab_size=100, has_chat=False))
    assert (error.code, "/v1/completions" in error.message) == ("no_chat_template", True)


def test_another_model_is_not_found() -> None:
    error = refusal(model="gpt-4o")
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert refusal(model="gpt-4o", n=0).status == 404  # the other error is not reported
    assert read(model="other").model == "other"
    with pytest.raises(RequestError, match="missing"):
        read_completion(b'{"prompt": "a"}', LIMITS)


DEEP = b'{"model": "tiny", "prompt": "a", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"",
            b"null",
            b"[]",
            b"5",
            b'"text"',
            b"{",
            b"{}",
            b"\xff\xfe",
            b'{"model": "tiny", "prompt": "\xff"}',
            b'{"\xff": 1}',
        ),
        *(
            b'{"model": "tiny", "prompt": "\\ud800"}',
            b'{"model": "tiny", "prompt": "a"} trailing',
            b"\xef\xbb\xbf{}",
            b"{'a': 1}",
        ),
        *(
            b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
            b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        ),
        *(
            b'{"model": "tiny", "prompt": "a", "n": ' + b"1" * 100_000 + b"}",
            DEEP,
            DEEP[:-2],
            b"[" * 1_000_000,
        ),
        json.dumps(COMPLETION).encode("utf-16"),
    ],
)
def test_bodies_that_are_none(body: bytes) -> None:
    # read_tokenize does not read these two values.
    is_for_tokenize = b'"temperature": 1e999' not in body and b'"n": 1' not in body
    for reader in (read_completion, read_chat, *([read_tokenize] if is_for_tokenize else [])):
        with pytest.raises(RequestError) as caught:
            reader(body, LIMITS)
        assert caught.value.status in (400, 404)
        msgspec.json.encode(caught.value.object)  # the error can be sent


@pytest.mark.parametrize(
    "half",
    [
        "\\ud800",
        "\\uDBFF",
        "\\udc00",
        "\\ud800\\u0041",
        "\\ud800\\n",
        "\\ud83d\\ude00\\ud83d",
        "\\ud800\\ud800\\udc00",
    ],
)
@pytest.mark.parametrize("rest", ["", " and more text", "\\n"])
def test_half_of_a_character_is_called_that_wherever_it_stands(half: str, rest: str) -> None:
    for template in (
        '{"model": "tiny", "prompt": "%s"}',
        '{"model": "tiny", "prompt": "%s", "max_tokens": 5}',
        '{"model": "tiny", "prompt": "a", "stop": ["\\\\", "%s"]}',
        '{"model": "tiny", "prompt": "a", "%s": 1}',
        '{"model": "%s"}',
    ):
        with pytest.raises(RequestError, match="is half of a character"):
            read_completion((template % (half + rest)).encode(), LIMITS)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"model": "tiny", "prompt": "a', "truncated"),
        (b'{"model": "tiny", "prompt": "\\\\ud800', "truncated"),  # a backslash, and then letters
        (b'{"model": "tiny", "prompt": "\\ud8', "truncated"),
        (b'{"model": "tiny", "prompt": 5, "stop": "\\ud83d\\ude00"}', "Expected"),
    ],
)
def test_what_is_wrong_otherwise_is_called_what_it_is(body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_completion(body, LIMITS)
    prompt = "\U0001f600\\ud800"  # json.dumps escapes both characters
    assert read(prompt=prompt).prompts == (prompt,)


def test_tokenize() -> None:
    assert read_tokenize(b'{"prompt": "a", "model": "tiny"}', LIMITS).prompt == "a"
    body = json.dumps({"messages": CHAT["messages"]}).encode()
    assert read_tokenize(body, LIMITS).param == "messages"
    for body in (
        b"{}",
        b'{"prompt": "a", "messages": []}',
        b'{"prompt": 5}',
        b'{"prompt": ["a"]}',
        b'{"prompt": ""}',
    ):
        with pytest.raises(RequestError, match=r"prompt"):
            read_tokenize(body, LIMITS)


# --- mutations ------------------------------------------------------------------------------------

SCALARS = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**30,
    0.5,
    -0.0,
    1e308,
    "",
    "a",
    "\0",
    "é" * 300,
    "tiny",
]
NAMES = [
    *COMPLETION,
    *CHAT,
    "n",
    "stop",
    "seed",
    "stream",
    "logprobs",
    "echo",
    "max_tokens",
    "prediction",
    "stream_options",
]
NAMES += [
    "temperature",
    "top_k",
    "stop_token_ids",
    "min_tokens",
    *list(UNSUPPORTED)[:8],
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json",
    "schema",
    "json_schema",
    "regex",
    "choice",
    "role",
    "content",
    "type",
    "text",
    "x",
]


def value(rng: random.Random, depth: int = 0) -> Any:
    """Return any JSON value."""
    kind = rng.random()
    if depth > 3 or kind < 0.6:
        return rng.choice(SCALARS)
    if kind < 0.8:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return {rng.choice(NAMES): value(rng, depth + 1) for _ in range(rng.randint(0, 4))}


def mutated(rng: random.Random) -> bytes:
    """Return a valid body with values exchanged, names added or bytes changed."""
    body = dict(rng.choice((COMPLETION, CHAT)))
    for _ in range(rng.randint(0, 3)):
        body[rng.choice(NAMES)] = value(rng)
    raw = bytearray(json.dumps(body).encode())
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw))
            raw[at : at + rng.randint(0, 2)] = rng.choice(
                (b"", bytes([rng.randrange(256)]), rng.choice(string.punctuation).encode())
            )
            raw = raw or bytearray(b"x")
    return bytes(raw)


@pytest.mark.full
@pytest.mark.thorough_except("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_body_is_it_is_taken_or_refused(seed: int) -> None:
    rng, accepted = random.Random(seed), 0
    for _ in range(200):
        body = mutated(rng)
        for reader in (read_completion, read_chat, read_tokenize):
            try:
                request = reader(body, LIMITS)
                accepted += 1
                assert all(request.prompts) if hasattr(request, "prompts") else request.prompt
            except RequestError as error:
                assert error.status in (400, 404)
                msgspec.json.encode(error.object)
    assert accepted > 10
