"""The server as OpenAI's own client sees it: a process with the embedded pair."""

import json
import math
import re
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serving.http.conftest import CAPACITY, KEY, Server
from tests.serving.http.made_up import wait_until
from tests.serving.http.test_app import BODIES

pytestmark = pytest.mark.full  # the server compiles for half a minute

PROMPT = "import os\nimport "
GREEDY = {"model": "tiny", "temperature": 0.0}


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def fetch(server: Server, path: str, key: str = KEY) -> str:
    request = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def metric(server: Server, name: str) -> float:
    return sum(
        float(line.split()[-1])
        for line in fetch(server, "/metrics").splitlines()
        if line.split("{")[0] == name
    )


def aborts(server: Server) -> float:
    line = 'vllm:request_success_total{finished_reason="abort",model_name="tiny"} '
    return next(
        float(each.removeprefix(line))
        for each in fetch(server, "/metrics").splitlines()
        if each.startswith(line)
    )


def is_idle(server: Server) -> bool:
    return (
        metric(server, "vllm:num_requests_running") + metric(server, "vllm:num_requests_waiting")
        == 0
    )


# --- texts ----------------------------------------------------------------------------------------


def test_a_completion_and_its_stream_are_the_same(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=24)
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert len(choice.text) > 20
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.usage.prompt_tokens) == (24, 6)
    stream = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == choice.text
    assert len(chunks) > 3  # it did not come at once
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_a_chat_and_its_stream_are_the_same(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "os"},
        {"role": "user", "content": [{"type": "text", "text": "import sys"}]},
    ]
    whole = client.chat.completions.create(**GREEDY, messages=messages, max_completion_tokens=20)
    assert whole.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=20, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    ids = json.loads(post_raw(client, "/tokenize", {"messages": messages}))["tokens"]
    as_text = client.completions.create(**GREEDY, prompt=ids, max_tokens=20)
    assert as_text.choices[0].text == whole.choices[0].message.content


def post_raw(client: openai.OpenAI, path: str, body: dict) -> str:
    url = str(client.base_url).removesuffix("/v1/") + path
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def test_a_seed_fixes_the_text_alone_in_a_list_and_in_a_crowd(client: openai.OpenAI) -> None:
    def ask(prompt: Any, seed: int = 5, n: int = 1) -> list[str]:
        made = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=16, temperature=0.9, seed=seed, n=n
        )
        return [choice.text for choice in made.choices]

    alone = ask(PROMPT)
    assert ask(PROMPT) == alone
    several = ask(PROMPT, n=3)
    assert several[0] == alone[0]
    assert len(set(several)) == 3
    assert ask(["class Stack:\n", PROMPT], n=3)[3:] == several
    with ThreadPoolExecutor(6) as crowd:
        assert [text for [text] in crowd.map(lambda seed: ask(PROMPT, seed), [5, 6, 5, 7, 5, 8])][
            ::2
        ] == alone * 3
    assert ask(PROMPT, 6) != alone


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=32).choices[0].text
    stop = whole[12:16]
    made = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=32, stop=["not there", stop]
    ).choices[0]
    assert (made.text, made.finish_reason) == (whole[: whole.index(stop)], "stop")
    stream = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=32, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == made.text


def test_an_id_ends_the_text_too_unless_it_is_too_early(client: openai.OpenAI) -> None:
    ids = json.loads(post_raw(client, "/tokenize", {"prompt": "import os"}))["tokens"]
    more: Any = {"stop_token_ids": [ids[-1], ids[-2]]}
    made = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=64, extra_body=more)
    assert made.choices[0].finish_reason == "stop"
    longer = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=64, extra_body=more | {"min_tokens": 40}
    )
    assert longer.usage is not None and made.usage is not None
    assert made.usage.completion_tokens < 40 <= longer.usage.completion_tokens


def test_logprobs_are_the_targets_own(client: openai.OpenAI) -> None:
    made = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=12, logprobs=3).choices[0]
    said: Any = made.logprobs
    assert "".join(said.tokens) == made.text
    assert said.text_offset == [sum(map(len, said.tokens[:i])) for i in range(len(said.tokens))]
    for token, logprob, top in zip(
        said.tokens, said.token_logprobs, said.top_logprobs, strict=True
    ):
        assert logprob == max(top.values()) == top[token]  # greedy
        assert 0 < sum(map(math.exp, top.values())) <= 1.0001
    # The same, read as a prompt.
    ids = json.loads(post_raw(client, "/tokenize", {"prompt": PROMPT}))["tokens"]
    drawn = client.completions.create(
        **GREEDY, prompt=ids, max_tokens=12, logprobs=0, echo=True
    ).choices[0]
    read: Any = drawn.logprobs
    assert drawn.text == PROMPT + made.text
    assert read.token_logprobs[0] is None
    assert read.token_logprobs[len(ids) :] == pytest.approx(said.token_logprobs, abs=1e-4)


def test_the_likelihood_of_a_prompt(client: openai.OpenAI) -> None:
    """As lm-eval asks for it: everything is in the prompt."""
    text = "import os\nimport sys\n"
    asked = client.completions.create(**GREEDY, prompt=text, max_tokens=0, logprobs=1, echo=True)
    one = (
        client.completions.create(**GREEDY, prompt=text, max_tokens=1, logprobs=1, echo=True)
        .choices[0]
        .logprobs
    )
    said: Any = asked.choices[0].logprobs
    assert asked.usage is not None
    assert asked.usage.completion_tokens == 0
    assert len(said.tokens) == asked.usage.prompt_tokens
    assert one is not None and one.token_logprobs is not None
    assert said.token_logprobs[1:] == pytest.approx(one.token_logprobs[1:-1], abs=1e-5)
    assert all(value <= 0 for value in said.token_logprobs[1:])


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "import os"}]
    made = client.chat.completions.create(
        **GREEDY, messages=messages, max_tokens=8, logprobs=True, top_logprobs=2
    )
    assert made.choices[0].logprobs is not None
    content = made.choices[0].logprobs.content
    assert content is not None
    assert "".join(each.token for each in content) == made.choices[0].message.content
    assert (
        bytes(byte for each in content for byte in each.bytes or []).decode()
        == made.choices[0].message.content
    )
    assert all(
        each.top_logprobs[0].token == each.token and len(each.top_logprobs) == 2 for each in content
    )


def test_a_prediction_saves_steps_and_changes_nothing(client: openai.OpenAI) -> None:
    plain = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=48)
    text = plain.choices[0].text
    more = {"prediction": {"type": "content", "content": text}}
    predicted = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=48, extra_body=more)
    assert predicted.choices[0].text == text
    assert predicted.usage is not None
    details: Any = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 30
    assert details.rejected_prediction_tokens >= 0
    steps = [
        each.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"]
        for each in (plain, predicted)
    ]  # pyright: ignore
    assert steps[1] <= steps[0]  # it is copied from where that is the fastest


def test_how_drafts_fared_is_said_as_vllm_says_it(client: openai.OpenAI) -> None:
    made = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=40)
    said = made.model_extra["metrics"]["speculative_decoding"]  # pyright: ignore[reportOptionalSubscript]
    assert sum(said["acceptance_histogram"]) == said["num_spec_steps"] > 0
    assert (
        sum(j * count for j, count in enumerate(said["acceptance_histogram"]))
        == said["num_accepted_draft_tokens"]
        > 0
    )
    assert said["mean_acceptance_length"] == pytest.approx(
        1 + said["num_accepted_draft_tokens"] / said["num_spec_steps"]
    )
    assert len(said["acceptance_histogram"]) == said["num_spec_tokens"] + 1
    assert 40 - said["num_accepted_draft_tokens"] == pytest.approx(said["num_spec_steps"], abs=1)


def test_accepted_text_in_a_stream(client: openai.OpenAI) -> None:
    more: Any = {"stream_options": {"include_accepted": True}}
    chunks = list(
        client.completions.create(
            **GREEDY, prompt=PROMPT, max_tokens=32, stream=True, extra_body=more
        )
    )
    spans = [
        (chunk.choices[0].text, chunk.choices[0].model_extra["accepted"]) for chunk in chunks[:-1]
    ]  # pyright: ignore
    assert all("".join(text for text, _ in said) == text for text, said in spans)
    assert {accepted for _, said in spans for _, accepted in said} == {True, False}


@pytest.mark.parametrize("case", BODIES, ids=[case["client"] for case in BODIES])
def test_what_real_clients_send_is_answered(client: openai.OpenAI, case: dict[str, Any]) -> None:
    body = dict(case["body"])
    if refused := case.get("refused"):  # named, and what is left is answered
        with pytest.raises(urllib.error.HTTPError) as caught:
            post_raw(client, case["path"], body)
        assert caught.value.code == 400
        assert refused in caught.value.read().decode()
        body = {
            name: value
            for name, value in body.items()
            if name not in (refused, "tool_choice", "parallel_tool_calls")
        }
    said = post_raw(client, case["path"], body)
    reasons = re.findall('"finish_reason":"([a-z]+)"', said)
    assert reasons and set(reasons) <= {"length", "stop"}
    assert said.endswith("data: [DONE]\n\n") == bool(case["body"].get("stream"))


# --- errors ---------------------------------------------------------------------------------------


def test_errors_are_the_clients_own(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="the server does not have it"):
        client.completions.create(model="gpt-4o", prompt="a")
    with pytest.raises(openai.BadRequestError, match="frequency_penalty") as caught:
        client.completions.create(model="tiny", prompt="a", frequency_penalty=0.5)
    assert (caught.value.param, caught.value.code) == ("frequency_penalty", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match=f"{CAPACITY}"):
        client.completions.create(model="tiny", prompt=[5] * CAPACITY, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], top_p=2
        )
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()
    assert [model.id for model in client.models.list()] == ["tiny", "also-tiny"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == CAPACITY  # pyright: ignore
    health = json.loads(fetch(server, "/health", key=""))
    assert health["status"] == "ok"
    assert 0 < health["programs"]["compiled"] <= health["programs"]["of"]


def test_who_goes_away_frees_its_row(client: openai.OpenAI, server: Server) -> None:
    before, aborted = metric(server, "vllm:generation_tokens_total"), aborts(server)
    asked: Any = GREEDY | {
        "prompt": PROMPT,
        "max_tokens": CAPACITY - 10,
        "extra_body": {"ignore_eos": True},
    }
    streams = [client.completions.create(**asked, stream=True) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
        stream.close()
    wait_until(lambda: is_idle(server))
    assert metric(server, "vllm:generation_tokens_total") - before < 2 * (CAPACITY - 10)
    assert aborts(server) == aborted + 2


def test_what_is_counted(client: openai.OpenAI, server: Server) -> None:
    names = (
        "prompt_tokens_total",
        "generation_tokens_total",
        "spec_decode_num_drafts_total",
        "time_to_first_token_seconds_count",
    )
    before = {name: metric(server, f"vllm:{name}") for name in names}
    client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=20, n=2)
    wait_until(
        lambda: (
            metric(server, "vllm:generation_tokens_total") == before["generation_tokens_total"] + 40
        )
    )
    after = {name: metric(server, f"vllm:{name}") for name in names}
    assert (
        after["prompt_tokens_total"] - before["prompt_tokens_total"] == 6
    )  # of a prompt with two texts
    assert (
        after["time_to_first_token_seconds_count"] - before["time_to_first_token_seconds_count"]
        == 2
    )
    assert after["spec_decode_num_drafts_total"] > before["spec_decode_num_drafts_total"]
    assert 0 <= metric(server, "vllm:kv_cache_usage_perc") <= 1
    assert 'specjax:draft_in_use{draft="chain of 3",model_name="tiny"} 1' in fetch(
        server, "/metrics"
    )


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.full
def test_sigterm_lets_running_texts_end_and_takes_no_new_ones(
    client: openai.OpenAI, server: Server
) -> None:
    asked: Any = GREEDY | {
        "prompt": PROMPT,
        "max_tokens": CAPACITY - 10,
        "extra_body": {"ignore_eos": True},
    }
    streams = [iter(client.completions.create(**asked, stream=True)) for _ in range(2)]
    for stream in streams:
        next(stream)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert server.process.poll() is None
    with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
        client.completions.create(**asked)
    assert caught.value.response.headers["retry-after"] == "10"
    with pytest.raises(urllib.error.HTTPError, match="503"):
        fetch(server, "/health")
    for stream in streams:
        assert list(stream)[-1].choices[0].finish_reason == "length"
    assert server.process.wait(20) == 0
