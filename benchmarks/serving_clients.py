"""Clients of a server, each with one request at a time, and figures of what they saw."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.serving import Engine


@dataclass(frozen=True)
class Request:
    """A request for a text.

    Attributes:
        prompt: the text of the prompt.
        max_tokens: maximum number of tokens of the answer.
        temperature: sampling temperature; 0 is greedy.
        seed: random seed.
        more: other fields of the body.
    """

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """An answer with its times, by `time.perf_counter`.

    Attributes:
        request: the request.
        sent: when it was sent.
        arrivals: when each piece of text arrived.
        pieces: the pieces of text.
        finished: when the answer was complete; None: it never was.
        usage: the usage that the server reports; None if it reports none.
    """

    request: Request
    sent: float
    arrivals: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finished: float | None = None
    usage: Mapping[str, Any] | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)

    def add(self, piece: str) -> None:
        """Add a piece that has arrived now; empty pieces are ignored."""
        if piece:
            self.arrivals.append(time.perf_counter())
            self.pieces.append(piece)


Ask = Callable[[Answer], Awaitable[None]]
"""A function that sends an answer's request and fills the answer in as it arrives."""


# --- ways to ask ----------------------------------------------------------------------------------


def over_http(port: int, model: str, common: Mapping[str, Any]) -> Ask:
    """Return a function that streams completions from a server on this machine.

    Args:
        port: the server's port.
        model: the model's name there.
        common: fields of all bodies.
    """

    async def ask(answer: Answer) -> None:
        request = answer.request
        body = {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "stream": True,
        }
        body |= {"temperature": request.temperature, "seed": request.seed, **common, **request.more}
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            content = json.dumps(body).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type:"
                " application/json\r\n"
            )
            writer.write(
                f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode()
                + content
            )
            await writer.drain()
            async for event in _events(reader):
                _take(event, answer)
        finally:
            writer.close()
        answer.finished = time.perf_counter()

    return ask


def in_process(engine: Engine) -> Ask:
    """Return a function that sends requests directly to an engine."""

    async def ask(answer: Answer) -> None:
        request = answer.request
        settings = {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
        }
        handle = engine.submit(request.prompt, **settings)
        async for piece in handle:
            answer.add(piece.text)
        answer.finished = time.perf_counter()
        answer.usage = {"completion_tokens": len(handle.tokens)}

    return ask


def _take(event: bytes, answer: Answer) -> None:
    """Process a server-sent event of a completion."""
    content = json.loads(event)
    if "error" in content:
        raise InputError(f"the server answers {str(content['error'])[:300]}")
    for choice in content.get("choices", ()):
        answer.add(choice.get("text") or "")
    answer.usage = content.get("usage") or answer.usage


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event of an answer, without the last one, ``[DONE]``."""
    status = await reader.readline()
    headers = (await reader.readuntil(b"\r\n\r\n")).lower()
    parts = _chunks(reader) if b"transfer-encoding: chunked" in headers else _rest(reader)
    if status.split()[1:2] != [b"200"]:
        content = b"".join([part async for part in parts])
        raise InputError(
            f"the server answers {status.decode().strip()}:"
            f" {content[:300].decode(errors='replace')}"
        )
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield line[6:]


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the content of a body in chunks."""
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the content of a body that ends with the connection."""
    while part := await reader.read(65536):
        yield part


# --- many of them ---------------------------------------------------------------------------------


async def for_seconds(
    ask: Ask, requests: Iterator[Request], clients: int, seconds: float, longest: float
) -> list[Answer]:
    """Run clients for ``seconds``, until each has had an answer, but at most for ``longest``.

    Then they disconnect. Incomplete answers are among those returned.
    """
    answers: list[list[Answer]] = [[] for _ in range(clients)]

    async def client(client_answers: list[Answer]) -> None:
        for request in requests:
            client_answers.append(Answer(request, time.perf_counter()))
            await ask(client_answers[-1])

    began = time.perf_counter()
    tasks = [asyncio.create_task(client(client_answers)) for client_answers in answers]
    while (spent := time.perf_counter() - began) < longest:
        if spent >= seconds and all(
            client_answers and client_answers[0].finished for client_answers in answers
        ):
            break
        done, _ = await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()  # raises
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [answer for client_answers in answers for answer in client_answers]


async def work_through(ask: Ask, requests: Sequence[Request], clients: int) -> list[Answer]:
    """Run clients that share a list of requests, in its order, until all are answered."""
    answers = [Answer(request, 0.0) for request in requests]
    waiting = iter(answers)

    async def client() -> None:
        for answer in waiting:
            answer.sent = time.perf_counter()
            await ask(answer)

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


# --- in numbers -----------------------------------------------------------------------------------


def tokens_of(answer: Answer, tokenizer: Any) -> int:
    """Return the number of tokens as the server counts them, or else as the tokenizer does."""
    if answer.usage is not None:
        return int(answer.usage["completion_tokens"])
    return len(tokenizer.encode(answer.text, add_special_tokens=False)) if answer.pieces else 0


def figures(answers: Sequence[Answer], ended: float, tokenizer: Any) -> dict[str, float]:
    """Return the figures of a run that ended at ``ended``.

    Tokens per second count all that arrived, with incomplete answers. Times are of complete
    answers, in seconds. The time between tokens is that from the first piece to the last, divided
    by the tokens less one. A pause is the time between two pieces, which may have several tokens.
    Times without a measurement are left out.
    """
    began = min(answer.sent for answer in answers)
    tokens = sum(tokens_of(answer, tokenizer) for answer in answers)
    whole = [answer for answer in answers if answer.finished is not None and answer.arrivals]
    counts = [tokens_of(answer, tokenizer) for answer in whole]
    latency = [answer.finished - answer.sent for answer in whole]  # pyright: ignore[reportOperatorIssue]
    first = [answer.arrivals[0] - answer.sent for answer in whole]
    writing = [answer.arrivals[-1] - answer.arrivals[0] for answer in whole]
    between = [
        seconds / (count - 1) for seconds, count in zip(writing, counts, strict=True) if count > 1
    ]
    pauses = [gap for answer in whole for gap in np.diff(answer.arrivals)]
    result = {"tokens_per_second": tokens / (ended - began), "requests": float(len(whole))}
    named = {
        "seconds_per_request": latency,
        "first_token": first,
        "between_tokens": between,
        "pause": pauses,
    }
    for name, values in named.items():
        for quantile in (50, 90):
            if values:
                result[f"{name}_p{quantile}"] = float(np.percentile(values, quantile))
    return result
