"""A test of a thousand mixed requests to a busy server.

Each is answered as by a server that does nothing else and drafts nothing.
"""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.http.process import Server, serving
from tests.serving.http.test_soak import SOURCE, exchange

REQUESTS = 1000
CLIENTS = 16
CAPACITY = 256
LOGPROB_TOLERANCE = 2e-3
"""A batch adds numbers in another order than one row, so log-probabilities differ a little."""


@pytest.fixture(scope="module")
def busy(tmp_path_factory) -> Iterator[Server]:
    """Yield a server with chains and trees, whose memory holds half of what its rows may need.

    So texts are preempted.
    """
    pair = ("--target", "embedded", "--drafter", "embedded:eagle3")
    drafts = ("--drafts", "none", "chain:3", "complete:2,2", "dynamic:3,3,6")
    sizes = ("--rows", "4", "--capacity", str(CAPACITY), "--page", "16", "--cache-gb", "0.0033")
    with serving(tmp_path_factory.mktemp("busy") / "log", *pair, *drafts, *sizes) as running:
        yield running


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Iterator[Server]:
    """Yield a server with one row that drafts nothing."""
    options = ("--target", "embedded", "--rows", "1", "--capacity", str(CAPACITY))
    with serving(tmp_path_factory.mktemp("alone") / "log", *options) as running:
        yield running


@pytest.mark.thorough
def test_a_thousand_mixed_requests_are_answered_as_each_is_alone(busy, alone):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    requests = [_request(rng) for _ in range(REQUESTS)]
    answers = asyncio.run(_answer_all(busy, requests, rng))
    names = ("num_preemptions_total", "spec_decode_num_accepted_tokens_total")
    print({name: busy.metric(f"vllm:{name}") for name in names})
    assert busy.metric("vllm:num_preemptions_total") > REQUESTS / 100

    differences = []
    for request, answer in zip(requests, answers, strict=True):
        plain = {name: value for name, value in request.items() if name != "prediction"}
        reference = alone.post("/v1/completions", plain)
        for choice, expected in zip(answer["choices"], reference["choices"], strict=True):
            if difference := _difference(choice, expected):
                differences.append(f"{json.dumps(request)}\n  {difference}")
    assert not differences, f"{len(differences)} of {REQUESTS}\n" + "\n".join(differences)


def _request(rng: random.Random) -> dict[str, Any]:
    """Return a request with some of everything that a request may ask for."""
    start = rng.randrange(len(SOURCE) - 500)
    body = {
        "model": "embedded",
        "prompt": SOURCE[start : start + rng.randint(1, 500)],
        "max_tokens": rng.choice([1, 2, 8, 24, 48]),
        "temperature": rng.choice([0, 0.7, 1]),
        "top_p": rng.choice([0.9, 1]),
        "top_k": rng.choice([0, 20]),
        "seed": rng.randrange(2**31),
        "n": rng.choice([1, 1, 1, 2]),
    }
    if rng.random() < 0.3:
        body["logprobs"] = rng.choice([0, 3])
    if rng.random() < 0.2:
        body |= {"echo": True, "max_tokens": rng.choice([0, 8]), "n": 1, "logprobs": 2}
    if rng.random() < 0.3:
        body["stop"] = rng.choice(["\n\n", ["def ", "return"]])
    if rng.random() < 0.2:
        body["min_tokens"] = min(body["max_tokens"], 4)
    if rng.random() < 0.3 and body["max_tokens"]:
        body["prediction"] = {"type": "content", "content": SOURCE[start + 200 : start + 400]}
    return body


async def _answer_all(
    server: Server, requests: list[dict[str, Any]], rng: random.Random
) -> list[dict[str, Any]]:
    """Return an answer for each request. Meanwhile other clients send requests and leave."""
    answers: list[dict[str, Any]] = [{}] * len(requests)
    places = iter(range(len(requests)))

    async def patient() -> None:
        for place in places:
            body = await exchange(server, rng, json.dumps(requests[place]).encode(), "whole")
            assert body is not None
            head, _, rest = body.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), (requests[place], body)
            answers[place] = json.loads(rest)

    async def impatient() -> None:
        while True:
            how = rng.choice(["closed", "killed", "silent", "half"])
            await exchange(server, rng, json.dumps(_request(rng) | {"stream": True}).encode(), how)
            await asyncio.sleep(rng.random() / 2)

    leaving = [asyncio.create_task(impatient()) for _ in range(3)]
    await asyncio.gather(*(patient() for _ in range(CLIENTS)))
    for task in leaving:
        assert not task.done()
        task.cancel()
    return answers


def _difference(choice: dict[str, Any], expected: dict[str, Any]) -> str:
    """Return what differs between two choices, or an empty string."""
    for name in ("text", "finish_reason"):
        if choice[name] != expected[name]:
            return f"{name}: {choice[name]!r}, alone {expected[name]!r}"
    if (ours := choice.get("logprobs")) is None:
        return "" if expected.get("logprobs") is None else "log-probabilities are missing"
    theirs = expected["logprobs"]
    if ours["tokens"] != theirs["tokens"] or ours["text_offset"] != theirs["text_offset"]:
        return f"tokens: {ours['tokens']}, alone {theirs['tokens']}"
    for value, reference in zip(ours["token_logprobs"], theirs["token_logprobs"], strict=True):
        if (value is None) != (reference is None) or (
            value is not None and abs(value - reference) > LOGPROB_TOLERANCE
        ):
            return f"log-probability: {value}, alone {reference}"
    return ""
