"""Tests with clients of every kind at once, over raw sockets.

A client that stays gets a whole text, and a client that leaves costs nothing afterwards.
"""

import asyncio
import json
import os
import random
import re
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.serving.http.conftest import KEY
from tests.serving.http.conftest import Server as Shared
from tests.serving.http.process import Server, serving

CLIENTS = 12
LONGEST = 24  # tokens per answer
PATIENCE = 60  # seconds per answer, while about twenty texts share four rows
SOURCE = Path(__file__).read_text()

GROWTH = 16 * 2**20
"""Bytes by which the server may grow after the first third of a run.

Allocators keep 3 MiB. Ten minutes have more than a thousand requests, so they show a leak of 20 kB
per request. Half a minute shows a leak that ends a server within half an
hour.
"""

TIES = 200
"""One repeated text in so many may differ.

Other rows beside it change the rounding, and two tokens may be almost equally likely.
"""


@dataclass
class Outcomes:
    """The outcomes of a run.

    Attributes:
        texts: the texts of each answered request, by the values that they depend on.
        ends: the number of requests that ended in each way.
        repeated: the number of requests that had been answered before.
        differing: the repeated requests whose answer was a different one.
        memory: the bytes of the server, measured again and again.
    """

    texts: dict[str, list[str]] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    repeated: int = 0
    differing: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def end(self, how: str) -> None:
        self.ends[how] = self.ends.get(how, 0) + 1

    def answer(self, request: str, texts: list[str]) -> None:
        self.end("whole")
        if request not in self.texts:
            self.texts[request] = texts
            return
        self.repeated += 1
        if self.texts[request] != texts:
            self.differing.append(f"{request}\n  {self.texts[request]}\n  {texts}")


@pytest.fixture(scope="module")
def larger(tmp_path_factory) -> Iterator[Server]:
    pair = ("--target", "embedded", "--drafter", "embedded:eagle3", "--drafts", "none", "chain:3")
    sizes = ("--rows", "4", "--capacity", "256", "--max-logprobs", "0")
    with serving(tmp_path_factory.mktemp("soak") / "log", *pair, *sizes) as running:
        yield running


@pytest.mark.thorough
def test_whoever_stays_gets_a_whole_text_and_whoever_goes_leaves_nothing(server: Shared):
    _hold(Server(server.url, server.process.pid, KEY), "tiny", 30)


@pytest.mark.thorough
def test_the_same_for_ten_minutes(larger):
    _hold(larger, "embedded", 600)


def _hold(server: Server, model: str, seconds: float) -> None:
    opened = _open_files(server)
    outcomes = asyncio.run(_soak(server, model, seconds))
    sizes = [size >> 20 for size in outcomes.memory[:: max(1, len(outcomes.memory) // 20)]]
    print(outcomes.ends, outcomes.repeated, len(outcomes.differing), sizes)

    ways = ("whole", "closed", "killed", "silent", "half")
    assert min(outcomes.ends.get(how, 0) for how in ways) >= seconds / 20
    assert outcomes.repeated >= seconds / 4
    assert len(outcomes.differing) <= outcomes.repeated / TIES, "\n".join(outcomes.differing)

    server.wait_until_idle()
    # Pages of prefixes without holders count as free.
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert _open_files(server) <= opened + 2

    third = len(outcomes.memory) // 3
    early = median(outcomes.memory[third : third + third // 2])
    late = median(outcomes.memory[-(third // 2) :])
    assert late - early < GROWTH, [size >> 20 for size in outcomes.memory]

    request, texts = next(iter(outcomes.texts.items()))
    answer = server.post("/v1/completions", json.loads(request))
    assert [choice["text"] for choice in answer["choices"]] == texts


async def _soak(server: Server, model: str, seconds: float) -> Outcomes:
    outcomes, until = Outcomes(), time.monotonic() + seconds
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    ours = random.Random(seed)
    common = [_request(ours, model) for _ in range(6)]
    clients = [
        _client(server, model, random.Random(f"{seed} {number}"), common, outcomes, until)
        for number in range(CLIENTS)
    ]
    await asyncio.gather(_watch(server, outcomes, until), *clients)
    return outcomes


async def _watch(server: Server, outcomes: Outcomes, until: float) -> None:
    while time.monotonic() < until:
        outcomes.memory.append(server.resident())
        await asyncio.sleep(0.25)


def _open_files(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process}/fd"))


def _request(rng: random.Random, model: str) -> dict[str, Any]:
    """Return the values that a text depends on."""
    start = rng.randrange(len(SOURCE) - 400)
    body = {
        "model": model,
        "prompt": SOURCE[start : start + rng.randint(1, 400)],
        "max_tokens": rng.randint(1, LONGEST),
        "temperature": rng.choice([0, 0.7, 1]),
        "top_p": rng.choice([0.9, 1]),
        "seed": rng.randrange(2**31),
        "n": rng.choice([1, 1, 1, 2, 3]),
    }
    stop = rng.choice([None, None, "\n\n", ["def ", "return"]])
    return body | ({} if stop is None else {"stop": stop})


def _presentation(rng: random.Random, request: dict[str, Any]) -> dict[str, Any]:
    """Add values that the text does not depend on."""
    more: dict[str, Any] = {}
    if rng.random() < 0.6:
        more = {
            "stream": True,
            "stream_options": {"include_usage": True, "include_accepted": rng.random() < 0.5},
        }
    if rng.random() < 0.3:
        more["prediction"] = {
            "type": "content",
            "content": request["prompt"][rng.randrange(len(request["prompt"])) :] or "x",
        }
    return request | more


async def _client(
    server: Server,
    model: str,
    rng: random.Random,
    common: list[dict[str, Any]],
    outcomes: Outcomes,
    until: float,
) -> None:
    while time.monotonic() < until:
        request = rng.choice(common) if rng.random() < 0.6 else _request(rng, model)
        body = _presentation(rng, request)
        how = rng.choices(
            ["whole", "slow", "closed", "killed", "silent", "half"], [8, 2, 3, 3, 2, 2]
        )[0]
        async with asyncio.timeout(PATIENCE):
            answer = await exchange(server, rng, json.dumps(body).encode(), how)
        if answer is None:
            outcomes.end(how)
        else:
            outcomes.answer(json.dumps(request), _texts(answer, body))


async def exchange(server: Server, rng: random.Random, body: bytes, how: str) -> bytes | None:
    """Send a request over a new connection, and return the answer; None: the client left."""
    connection = socket.socket()
    connection.setblocking(False)
    if how == "slow":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", server.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
        " application/json\r\nConnection: close\r\n"
    )
    message = (
        f"{head}Authorization: Bearer {server.key}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    try:
        if how == "half":
            writer.write(message[: rng.randrange(len(message))])
            await writer.drain()
            return None
        writer.write(message)
        await writer.drain()
        if how == "silent":  # it leaves before there is an answer
            return None
        if how in ("closed", "killed"):
            await reader.read(rng.randint(1, 1500))
            if how == "killed":  # later packets are answered with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return None
        received = b""
        while part := await reader.read(200 if how == "slow" else 65536):
            received += part
            if how == "slow":
                await asyncio.sleep(0.02)
        return received
    finally:
        writer.close()


def _texts(received: bytes, body: dict[str, Any]) -> list[str]:
    """Return the texts of an answer, which must be whole."""
    head, _, rest = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), (received, body)
    if not body.get("stream"):
        length = int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1])
        assert len(rest) == length
        answer = json.loads(rest)
        choices, usage = answer["choices"], answer["usage"]
        assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
        texts = {choice["index"]: choice["text"] for choice in choices}
    else:
        texts, usage = _streamed(_unchunked(rest))
    assert sorted(texts) == list(range(body["n"]))
    assert body["n"] <= usage["completion_tokens"] <= body["n"] * body["max_tokens"]
    return [texts[index] for index in sorted(texts)]


def _unchunked(rest: bytes) -> str:
    text = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        text, rest = text + rest[:length], rest[length + 2 :]
        if length == 0:
            assert not rest
            return text.decode()


def _streamed(events: str) -> tuple[dict[int, str], dict[str, int]]:
    *chunks, done, end = events.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    decoded = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for choice in (choice for chunk in decoded for choice in chunk["choices"]):
        index = choice["index"]
        assert index not in reasons  # nothing follows the end
        texts[index] = texts.get(index, "") + choice["text"]
        if choice.get("accepted"):
            assert "".join(text for text, _ in choice["accepted"]) == choice["text"]
        if choice["finish_reason"] is not None:
            reasons[index] = choice["finish_reason"]
    assert sorted(reasons) == sorted(texts)
    return texts, decoded[-1]["usage"]
