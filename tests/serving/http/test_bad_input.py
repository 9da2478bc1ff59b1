"""Tests of invalid input: a server answers with an error object or closes, and goes on."""

import json
import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.http.conftest import KEY, Server
from tests.serving.http.made_up import wait_until
from tests.serving.http.test_openai import is_idle
from tests.serving.http.test_requests import mutated

PROMPT = "import os\nimport "
PATHS = (
    ["/v1/completions"] * 6
    + ["/v1/chat/completions", "/v1/responses", "/v1/messages"] * 4
    + ["/v1/messages/count_tokens", "/v1/responses/resp_x"] * 2
    + ["/detokenize", "/version", "/ping"]
    + ["/tokenize", "/v1/models", "/metrics", "/", "/nothing", "*", "//x", "/%00"]
)
METHODS = ["POST"] * 12 + [
    "GET",
    "PUT",
    "DELETE",
    "OPTIONS",
    "PATCH",
    "TRACE",
    "BREW",
    "post",
    "PRI",
]
NOISE = [
    b"\0",
    b"\xff\xfe",
    b"\r\n",
    b"\n",
    b" ",
    b":",
    b"\x16\x03\x01",
    b"\x80" * 50,
    b"A" * 5000,
    "é".encode(),
    b"HTTP/9.9",
]
HEADERS = [
    *(
        "Content-Length: 99999999999999999999",
        "Content-Length: -1",
        "Content-Length: x",
        "Content-Length: 3",
        "Host: evil",
    ),
    *(
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: gzip",
        "Expect: 100-continue",
        "Connection: Upgrade",
        "Upgrade: websocket",
    ),
    *(
        "Authorization: Basic eDp5",
        "Authorization: Bearer \xff",
        "Content-Type: text/plain",
        "X: " + "y" * 3000,
        "Content-Encoding: gzip",
    ),
    *(
        "Connection: close",
        "Range: bytes=0-",
        "Cookie: " + "a=b; " * 100,
        ": empty",
        "no colon",
        "A: \t",
        "\x01: x",
    ),
]


def message(rng: random.Random) -> bytes:
    """Return a request that is invalid in most cases."""
    if rng.random() < 0.1:
        more = {
            "stream": rng.random() < 0.5,
            "max_tokens": rng.choice((1, 8, 100)),
            "prompt": rng.choice((PROMPT, [PROMPT] * 3)),
        }
        return good(**more)
    body = mutated(rng)
    if rng.random() < 0.05:
        body = b'{"model": "tiny", "prompt": ' + rng.choice(
            (b"[" * 50_000, b"1" * 50_000, b'"' + b"x" * 300_000 + b'"}')
        )
    lines = [
        f"{rng.choice(METHODS)} {rng.choice(PATHS)} HTTP/1.{rng.choice('1110')}",
        "Host: localhost",
    ]
    lines += [f"Authorization: Bearer {KEY}"] * (rng.random() < 0.95)
    lines += ["Content-Type: application/json"] * (rng.random() < 0.95)
    lines += rng.sample(HEADERS, rng.choice((0, 0, 0, 1, 2)))
    if not any(line.startswith(("Content-Length", "Transfer")) for line in lines):
        lines.append(
            f"Content-Length: {max(0, len(body) + rng.choice((0, 0, 0, 0, 0, 0, 0, -1, 1, 100)))}"
        )
    raw = bytearray("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
    for _ in range(rng.choice((0, 0, 0, 0, 1, 3))):
        at = rng.randrange(len(raw))
        raw[at : at + rng.randint(0, 3)] = rng.choice(NOISE)
    return bytes(raw)


def talk(port: int, seed: int) -> bytes:
    """Send a request in one of several bad ways, and return what comes back."""
    rng = random.Random(seed)
    raw, manner, received = message(rng), rng.random(), b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(20)
        try:
            if manner < 0.1:  # a part of it
                connection.sendall(raw[: rng.randrange(len(raw))])
                if rng.random() < 0.5:
                    return b""
            elif manner < 0.15:  # a byte at a time, for a while
                for at in range(min(len(raw), 40)):
                    connection.sendall(raw[at : at + 1])
                connection.sendall(raw[40:])
            elif manner < 0.2:  # several at once
                connection.sendall(raw * 3)
            else:
                connection.sendall(raw)
            if manner > 0.95:  # without reading the answer
                return b""
            if b"Connection: close" not in raw:
                if rng.random() < 0.5:
                    connection.shutdown(socket.SHUT_WR)
                else:
                    connection.settimeout(0.5)
            while more := connection.recv(65536):
                received += more
        except OSError:
            pass  # the server waits for more or for the next request, or has closed the connection
    return received


def check(received: bytes) -> str:
    """Check that a bad request may have these answers, and return the first status."""
    statuses = re.findall(rb"HTTP/1\.1 (\d\d\d) [A-Z]", received)
    for status in statuses:
        assert status[:1] == b"4" or status in (b"200", b"100", b"503"), received[:500]
    if len(statuses) == 1 and statuses[0][:1] == b"4":
        body = received.partition(b"\r\n\r\n")[2]
        if body:  # there is none for HEAD, or for a client that has left
            # The second form is Anthropic's.
            fields = set(json.loads(body)["error"])
            assert fields in ({"message", "type", "param", "code"}, {"message", "type"})
    return statuses[0].decode() if statuses else ""


def memory(server: Server) -> int:
    """Return the resident memory of the server in bytes."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0]) * 1024


def good(**values: Any) -> bytes:
    """Return a valid request whose answer ends the connection."""
    body = json.dumps(
        {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0} | values
    ).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {KEY}",
        "Content-Type: application/json",
    )
    head = (*lines, f"Content-Length: {len(body)}", "Connection: close", "", "")
    return "\r\n".join(head).encode() + body


def good_text(server: Server) -> str:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(30)
        connection.sendall(good())
        received = b""
        while more := connection.recv(65536):
            received += more
    return json.loads(received.partition(b"\r\n\r\n")[2])["choices"][0]["text"]


@pytest.mark.full
@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_bad_requests_do_no_harm(server: Server, count: int) -> None:
    text, sizes = good_text(server), []
    statuses: dict[str, int] = {}
    with ThreadPoolExecutor(16) as clients:
        for number, status in enumerate(
            clients.map(lambda seed: check(talk(server.port, seed)), range(count))
        ):
            statuses[status] = statuses.get(status, 0) + 1
            if number % (count // 10) == 0:
                sizes.append(memory(server))
    assert statuses.get("400", 0) > count / 10
    assert statuses.get("200", 0) > count / 50  # some requests are valid
    wait_until(lambda: is_idle(server), 60)
    assert good_text(server) == text
    time.sleep(1)
    sizes.append(memory(server))
    print(statuses, [size >> 20 for size in sizes])
    assert sizes[-1] - sizes[5] < 64 * 2**20
    assert "Traceback" not in "".join(server.errors)
