"""Tests of a server process with OpenAI's own client and the embedded pair."""

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
        float(sample.removeprefix(line))
        for sample in fetch(server, "/metrics").splitlines()
        if sample.startswith(line)
    )


def is_idle(server: Server) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(metric(server, name) for name in names) == 0


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
    assert len(chunks) > 3  # it came in pieces
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


def test_what_the_model_goes_on_writing_is_the_last_message(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "user", "content": "import sys"},
        {"role": "assistant", "content": "import os\nimport "},
    ]
    more = {"continue_final_message": True, "return_token_ids": True}
    answer = client.chat.completions.create(
        **GREEDY, messages=messages, max_tokens=8, extra_body=more
    )
    body = {"messages": messages, "continue_final_message": True}
    ids = json.loads(post_raw(client, "/tokenize", body))["tokens"]
    assert answer.model_extra["prompt_token_ids"] == ids
    text = json.loads(post_raw(client, "/detokenize", {"tokens": ids}))["prompt"]
    assert text.endswith("import os\nimport ")
    token_ids = answer.choices[0].model_extra["token_ids"]
    as_text = client.completions.create(
        **GREEDY, prompt=ids, max_tokens=8, extra_body={"return_token_ids": True}
    )
    assert as_text.choices[0].model_extra["token_ids"] == token_ids
    assert as_text.choices[0].text == answer.choices[0].message.content


def test_log_probabilities_of_a_prompt_are_those_of_an_echo(client: openai.OpenAI) -> None:
    echoed = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=0, echo=True, logprobs=2
    ).choices[0]
    scored = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=4, extra_body={"prompt_logprobs": 2}
    ).choices[0]
    assert scored.logprobs is None
    ids = json.loads(post_raw(client, "/tokenize", {"prompt": PROMPT}))["tokens"]
    none, *positions = scored.model_extra["prompt_logprobs"]
    assert none is None
    values = [
        position[str(token)]["logprob"] for token, position in zip(ids[1:], positions, strict=True)
    ]
    assert values == echoed.logprobs.token_logprobs[1:]
    assert all(2 <= len(position) <= 3 for position in positions)


def post_raw(client: openai.OpenAI, path: str, body: dict) -> str:
    url = str(client.base_url).removesuffix("/v1/") + path
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def test_a_seed_fixes_the_text_alone_in_a_list_and_in_a_crowd(client: openai.OpenAI) -> None:
    def ask(prompt: Any, seed: int = 5, n: int = 1) -> list[str]:
        completion = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=16, temperature=0.9, seed=seed, n=n
        )
        return [choice.text for choice in completion.choices]

    alone = ask(PROMPT)
    assert ask(PROMPT) == alone
    several = ask(PROMPT, n=3)
    assert several[0] == alone[0]
    assert len(set(several)) == 3
    assert ask(["class Stack:\n", PROMPT], n=3)[3:] == several
    with ThreadPoolExecutor(6) as crowd:
        texts = [text for [text] in crowd.map(lambda seed: ask(PROMPT, seed), [5, 6, 5, 7, 5, 8])]
        assert texts[::2] == alone * 3
    assert ask(PROMPT, 6) != alone


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=32).choices[0].text
    stop = whole[12:16]
    stopped = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=32, stop=["not there", stop]
    ).choices[0]
    assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(stop)], "stop")
    stream = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=32, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == stopped.text


def test_an_id_ends_the_text_too_unless_it_is_too_early(client: openai.OpenAI) -> None:
    ids = json.loads(post_raw(client, "/tokenize", {"prompt": "import os"}))["tokens"]
    more: Any = {"stop_token_ids": [ids[-1], ids[-2]]}
    stopped = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=64, extra_body=more)
    assert stopped.choices[0].finish_reason == "stop"
    longer = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=64, extra_body=more | {"min_tokens": 40}
    )
    assert longer.usage is not None and stopped.usage is not None
    assert stopped.usage.completion_tokens < 40 <= longer.usage.completion_tokens


def test_logprobs_are_the_targets_own(client: openai.OpenAI) -> None:
    choice = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=12, logprobs=3).choices[
        0
    ]
    reported: Any = choice.logprobs
    assert "".join(reported.tokens) == choice.text
    assert reported.text_offset == [
        sum(map(len, reported.tokens[:i])) for i in range(len(reported.tokens))
    ]
    for token, logprob, top in zip(
        reported.tokens, reported.token_logprobs, reported.top_logprobs, strict=True
    ):
        assert logprob == max(top.values()) == top[token]  # greedy
        assert 0 < sum(map(math.exp, top.values())) <= 1.0001
    # They are the same if the text is echoed after its prompt.
    ids = json.loads(post_raw(client, "/tokenize", {"prompt": PROMPT}))["tokens"]
    echoed = client.completions.create(
        **GREEDY, prompt=ids, max_tokens=12, logprobs=0, echo=True
    ).choices[0]
    read: Any = echoed.logprobs
    assert echoed.text == PROMPT + choice.text
    assert read.token_logprobs[0] is None
    assert read.token_logprobs[len(ids) :] == pytest.approx(reported.token_logprobs, abs=1e-4)


def test_the_likelihood_of_a_prompt(client: openai.OpenAI) -> None:
    """Check a request of lm-eval, which has everything in the prompt."""
    text = "import os\nimport sys\n"
    completion = client.completions.create(
        **GREEDY, prompt=text, max_tokens=0, logprobs=1, echo=True
    )
    longer = client.completions.create(**GREEDY, prompt=text, max_tokens=1, logprobs=1, echo=True)
    echoed = longer.choices[0].logprobs
    reported: Any = completion.choices[0].logprobs
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 0
    assert len(reported.tokens) == completion.usage.prompt_tokens
    assert echoed is not None and echoed.token_logprobs is not None
    assert reported.token_logprobs[1:] == pytest.approx(echoed.token_logprobs[1:-1], abs=1e-5)
    assert all(value <= 0 for value in reported.token_logprobs[1:])


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "import os"}]
    completion = client.chat.completions.create(
        **GREEDY, messages=messages, max_tokens=8, logprobs=True, top_logprobs=2
    )
    assert completion.choices[0].logprobs is not None
    content = completion.choices[0].logprobs.content
    assert content is not None
    assert "".join(entry.token for entry in content) == completion.choices[0].message.content
    decoded = bytes(byte for entry in content for byte in entry.bytes or []).decode()
    assert decoded == completion.choices[0].message.content
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)
    assert all(len(entry.top_logprobs) == 2 for entry in content)


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
        completion.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"]
        for completion in (plain, predicted)
    ]
    assert steps[1] <= steps[0]  # copies are used where they are the fastest


def test_speculation_changes_steps_and_no_text(client: openai.OpenAI) -> None:
    def ask(speculation: Any) -> openai.types.Completion:
        return client.completions.create(
            **GREEDY, prompt=PROMPT, max_tokens=24, extra_body={"speculation": speculation}
        )

    drafted, off, short = ask("auto"), ask("off"), ask(1)
    assert drafted.choices[0].text == off.choices[0].text == short.choices[0].text
    counts = off.model_extra["metrics"]["speculative_decoding"]
    assert counts["num_draft_tokens"] == 0
    with pytest.raises(
        openai.BadRequestError, match="give auto, off, a largest depth such as 2"
    ) as caught:
        ask("chain:99")
    assert caught.value.param == "speculation"
    with pytest.raises(openai.BadRequestError, match="speculation: Expected"):
        ask(True)


def test_how_drafts_fared_is_said_as_vllm_says_it(client: openai.OpenAI) -> None:
    completion = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=40)
    metrics = completion.model_extra["metrics"]["speculative_decoding"]
    histogram, steps = metrics["acceptance_histogram"], metrics["num_spec_steps"]
    accepted = metrics["num_accepted_draft_tokens"]
    assert sum(histogram) == steps > 0
    assert sum(j * count for j, count in enumerate(histogram)) == accepted > 0
    assert metrics["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert len(histogram) == metrics["num_spec_tokens"] + 1
    assert 40 - accepted == pytest.approx(steps, abs=1)


def test_accepted_text_in_a_stream(client: openai.OpenAI) -> None:
    more: Any = {"stream_options": {"include_accepted": True}}
    chunks = list(
        client.completions.create(
            **GREEDY, prompt=PROMPT, max_tokens=32, stream=True, extra_body=more
        )
    )
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    for choice in choices:
        assert "".join(text for text, _ in choice.model_extra["accepted"]) == choice.text
    flags = {flag for choice in choices for _, flag in choice.model_extra["accepted"]}
    assert flags == {True, False}


def bodies_by_tier() -> list[Any]:
    """Return all bodies; the second and later ones of a program are thorough."""
    programs, cases = set(), []
    for body in BODIES:
        program = body["client"].partition(",")[0]
        marks = [pytest.mark.thorough] if program in programs else []
        programs.add(program)
        cases.append(pytest.param(body, id=body["client"], marks=marks))
    return cases


@pytest.mark.parametrize("case", bodies_by_tier())
def test_what_real_clients_send_is_answered(client: openai.OpenAI, case: dict[str, Any]) -> None:
    body = dict(case["body"])
    if refused := case.get("refused"):  # by name; the rest is answered
        with pytest.raises(urllib.error.HTTPError) as caught:
            post_raw(client, case["path"], body)
        assert caught.value.code == 400
        assert refused in caught.value.read().decode()
        body = {
            name: value
            for name, value in body.items()
            if name not in (refused, "tool_choice", "parallel_tool_calls")
        }
    answer = post_raw(client, case["path"], body)
    reasons = re.findall('"finish_reason":"([a-z]+)"', answer)
    assert reasons and set(reasons) <= {"length", "stop"}
    assert answer.endswith("data: [DONE]\n\n") == bool(case["body"].get("stream"))


# --- errors ---------------------------------------------------------------------------------------


def test_errors_are_the_clients_own(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="the server does not have it"):
        client.completions.create(model="gpt-4o", prompt="a")
    with pytest.raises(openai.BadRequestError, match="suffix") as caught:
        client.completions.create(model="tiny", prompt="a", suffix="b")
    assert caught.value.param == "suffix"  # this tokenizer has no tokens that mark a gap
    with pytest.raises(openai.BadRequestError, match="length_penalty") as caught:
        client.completions.create(model="tiny", prompt="a", extra_body={"length_penalty": 2})
    assert (caught.value.param, caught.value.code) == ("length_penalty", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match=f"{CAPACITY}"):
        client.completions.create(model="tiny", prompt=[5] * CAPACITY, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], top_p=2
        )
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()
    assert [model.id for model in client.models.list()] == ["tiny", "also-tiny"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == CAPACITY
    health = json.loads(fetch(server, "/health", key=""))
    assert health["status"] == "ok"
    assert 0 < health["programs"]["compiled"] <= health["programs"]["of"]


def test_who_goes_away_frees_its_row(client: openai.OpenAI, server: Server) -> None:
    before, aborted = metric(server, "vllm:generation_tokens_total"), aborts(server)
    request: Any = GREEDY | {
        "prompt": PROMPT,
        "max_tokens": CAPACITY - 10,
        "extra_body": {"ignore_eos": True},
    }
    streams = [client.completions.create(**request, stream=True) for _ in range(2)]
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
    total = before["generation_tokens_total"] + 40
    wait_until(lambda: metric(server, "vllm:generation_tokens_total") == total)
    after = {name: metric(server, f"vllm:{name}") for name in names}
    increase = {name: after[name] - before[name] for name in names}
    assert increase["prompt_tokens_total"] == 6  # a prompt of two texts is counted once
    assert increase["time_to_first_token_seconds_count"] == 2
    assert increase["spec_decode_num_drafts_total"] > 0
    assert 0 <= metric(server, "vllm:kv_cache_usage_perc") <= 1
    metrics = fetch(server, "/metrics")
    assert 'specjax:draft_in_use{draft="chain of 3",model_name="tiny"} 1' in metrics


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.full
def test_sigterm_lets_running_texts_end_and_takes_no_new_ones(
    client: openai.OpenAI, server: Server
) -> None:
    request: Any = GREEDY | {
        "prompt": PROMPT,
        "max_tokens": CAPACITY - 10,
        "extra_body": {"ignore_eos": True},
    }
    streams = [iter(client.completions.create(**request, stream=True)) for _ in range(2)]
    for stream in streams:
        next(stream)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert server.process.poll() is None
    with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
        client.completions.create(**request)
    assert caught.value.response.headers["retry-after"] == "10"
    with pytest.raises(urllib.error.HTTPError, match="503"):
        fetch(server, "/health")
    for stream in streams:
        assert list(stream)[-1].choices[0].finish_reason == "length"
    assert server.process.wait(20) == 0
