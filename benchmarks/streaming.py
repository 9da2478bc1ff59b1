"""CPU time of the server for streamed chats, outside of the engine's calls, and of its parts.

    python -m benchmarks.streaming --checkouts . /another/checkout

An engine that computes nothing gives each of some clients a token at a fixed rate
(`benchmarks.streaming_server`). What remains is the work of the host: detokenizing, regions, JSON,
events and HTTP. Several checkouts of specjax are measured in turn, so that a slow minute of the
machine slows all of them. The totals are measured without clocks in the parts, in runs of their
own.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from specjax.errors import InputError

TEXTS = ("plain", "regions")


@dataclass(frozen=True)
class StreamingConfig:
    """Measure the CPU time of streaming.

    Attributes:
        checkouts: directories with a checkout of specjax each.
        clients: the number of clients that read a text at the same time.
        tokens: the tokens of each text.
        step: milliseconds between two tokens of a text.
        repeats: repeats of everything; the median and the range are shown.
        output: JSON file for the results.
    """

    checkouts: tuple[str, ...] = (".",)
    clients: int = 8
    tokens: int = 1000
    step: float = 4.0
    repeats: int = 7
    output: str = ""


class Server:
    """A server of one checkout."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.port = self._read()["port"]

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command, and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the server has ended; its error is above")
        return json.loads(line)


@contextmanager
def serving(checkout: str, step: float) -> Iterator[Server]:
    """Start the server of a checkout, and end it."""
    script = Path(__file__).with_name("streaming_server.py")
    environment = os.environ | {"PYTHONPATH": str(Path(checkout).resolve())}
    process = subprocess.Popen(
        [sys.executable, script, str(step / 1000)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    try:
        yield Server(process)
    finally:
        process.terminate()
        process.wait()


def stream(port: int, with_tools: bool) -> tuple[str, int]:
    """Read a streamed chat, and return its text and the number of its events."""
    body: dict[str, Any] = {"model": "paced", "stream": True}
    body["messages"] = [{"role": "user", "content": "Tell a story."}]
    if with_tools:
        body["tools"] = [{"type": "function", "function": {"name": "look"}}]
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + data)
        received = bytearray()
        while part := connection.recv(65536):
            received += part
    return _text_of(bytes(received))


def _text_of(answer: bytes) -> tuple[str, int]:
    """Return the text of an answer in chunks, and the number of its events."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise RuntimeError(answer[:500].decode())
    body = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    *events, done, empty = body.decode().split("\n\n")
    if (done, empty) != ("data: [DONE]", ""):
        raise RuntimeError(f"the stream is not complete: {done[:200]}")
    pieces = []
    for event in events:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            delta = choice["delta"]
            pieces += [delta.get("reasoning") or "", delta.get("content") or ""]
            pieces += [call["function"]["arguments"] for call in delta.get("tool_calls", ())]
    return "".join(pieces), len(events)


def measure(
    server: Server, config: StreamingConfig, text: str, *, parts: bool = False
) -> dict[str, Any]:
    """Return the milliseconds of CPU time for 1,000 streamed tokens."""
    whole = server.ask(do="begin", text=text, tokens=config.tokens, parts=parts)["text"]
    with ThreadPoolExecutor(config.clients) as pool:
        read = partial(stream, server.port)
        streams = [*pool.map(read, [text == "regions"] * config.clients)]
    counts = server.ask(do="end")
    texts = {streamed for streamed, _ in streams}
    if len(texts) != 1:
        raise RuntimeError(f"{len(texts)} different texts: they must be the same")
    if text == "plain" and texts != {whole}:
        raise RuntimeError("the streamed text is not the text of the tokens")
    scale = 1000 * 1000 / (config.clients * config.tokens)
    result: dict[str, Any] = {name: scale * counts[name] for name in ("loop", "engine", "process")}
    result["total"] = result["loop"] + result["engine"]
    result["events"] = sum(count for _, count in streams) / (config.clients * config.tokens)
    if parts:
        result["parts"] = {name: scale * spent for name, spent in counts["parts"].items()}
    return result


def run_all(config: StreamingConfig) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the results of each repeat, by text and checkout."""
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with ExitStack() as stack:
        servers = {it: stack.enter_context(serving(it, config.step)) for it in config.checkouts}
        for text in TEXTS:
            results[text] = {name: [] for name in servers}
            for repeat in range(config.repeats + 1):
                for name, server in servers.items():
                    counts = measure(server, config, text)
                    parts = measure(server, config, text, parts=True)["parts"]
                    parts["event loop and the rest"] = counts["total"] - sum(parts.values())
                    counts["parts"] = parts
                    if repeat:  # the first one warms up
                        results[text][name].append(counts)
    return results


def show(config: StreamingConfig, results: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Print a table for each text."""
    for text, by_checkout in results.items():
        title = f"{text}: ms of CPU time for 1,000 tokens, {config.clients} clients, median (range)"
        table = Table(title=title)
        table.add_column("part")
        for name in by_checkout:
            table.add_column(name, justify="right")
        runs = [*by_checkout.values()]
        for part in sorted({part for run in runs[0] for part in run["parts"]}):
            table.add_row(part, *(_summary([it["parts"].get(part, 0.0) for it in r]) for r in runs))
        table.add_section()
        for total in ("loop", "engine", "total", "events"):
            table.add_row(total, *(_summary([it[total] for it in run]) for run in runs))
        Console().print(table)


def _summary(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main(config: StreamingConfig) -> None:
    """Measure, print the tables, and write the results."""
    if min(config.clients, config.tokens, config.repeats) < 1 or config.tokens < 100:
        raise InputError(
            f"clients={config.clients}, tokens={config.tokens}, repeats={config.repeats}: give at"
            " least 1 client, 100 tokens and 1 repeat"
        )
    results = run_all(config)
    show(config, results)
    if config.output:
        text = json.dumps({"config": asdict(config), "results": results}, indent=1)
        Path(config.output).write_text(text + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(StreamingConfig))
    except InputError as error:
        sys.exit(str(error))
