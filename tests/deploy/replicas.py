"""Run replicas behind nginx, and clients that send one request after the other."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.files import DEPLOY
from tests.documents import ROOT
from tests.processes import free_port

STARTING = 300  # seconds; a tenth of it on an idle machine
PATIENCE = 60  # seconds for an answer
LONGEST = 900  # seconds until clients stop by themselves
CONFIG = (DEPLOY / "nginx.conf").read_text()


def has_nginx() -> bool:
    return shutil.which("nginx", path=_PATH) is not None


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"


@contextmanager
def nginx(directory: Path, servers: Sequence[int]) -> Iterator[int]:
    """Run nginx with our configuration, for ``servers`` at these two ports, and yield its port."""
    port = free_port()
    config = CONFIG
    for address, real in (("127.0.0.1:8001", servers[0]), ("127.0.0.1:8002", servers[1])):
        assert config.count(f"server {address} ") == 2
        config = config.replace(f"server {address} ", f"server 127.0.0.1:{real} ")
    assert config.count("listen 8080;") == 1
    (directory / "specjax.conf").write_text(
        config.replace("listen 8080;", f"listen 127.0.0.1:{port};")
    )
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    lines = [
        "daemon off;",
        "user root;" if os.geteuid() == 0 else "",  # the user of nginx could not write here
        "worker_processes 2;",
        f"pid {directory}/pid;",
        f"error_log {directory}/error.log;",
        "events {}",
        "http {",
        f"access_log {directory}/access.log;",
        *(f"{kind}_temp_path {directory}/{kind};" for kind in kinds),
        f"include {directory}/specjax.conf;",
        "}",
    ]
    (directory / "nginx.conf").write_text("\n".join(lines))
    command = [str(shutil.which("nginx", path=_PATH)), "-p", str(directory)]
    command += ["-c", str(directory / "nginx.conf"), "-e", str(directory / "error.log")]
    check = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr
    assert "[warn]" not in check.stderr, check.stderr
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        _wait_for_port(port)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "nginx does not listen"
            time.sleep(0.05)


class Replica:
    """`specjax serve` at a port of its own, which can be started again."""

    def __init__(self, log: Path, *options: str) -> None:
        self.port, self._log, self._options = free_port(), log, options
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start the process, and do not wait until it is ready."""
        command = [sys.executable, "-m", "specjax", "serve", "--port", str(self.port)]
        command += self._options
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + STARTING
        while "is ready" not in self._log.read_text():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        """End the process as when its machine loses its power."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        """End the process as a scheduler does, and return its exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def running(self) -> float:
        """Return how many texts it generates now."""
        status, body = ask(self.port, "/metrics")
        assert status == 200
        match = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", body, re.MULTILINE)
        assert match
        return float(match[1])


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Send a request, and return the status and the content of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(
            "GET" if body is None else "POST", path, content, {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@dataclass(frozen=True)
class Outcome:
    """The outcome of a request.

    Attributes:
        seed: the seed of the request.
        begun: when it was sent, in seconds.
        ended: when the outcome was known.
        status: the status of the answer; 0 without an answer.
        text: the whole text; None if there is none, or if it was cut.
        was_stream: whether it was to be streamed.
    """

    seed: int
    begun: float
    ended: float
    status: int
    text: str | None
    was_stream: bool


def complete(port: int, seed: int, stream: bool, **more: Any) -> Outcome:
    """Request one text at temperature 1."""
    body = {
        "model": "tiny",
        "prompt": "def f",
        "seed": seed,
        "temperature": 1,
        "ignore_eos": True,
        "stream": stream,
        **more,
    }
    start, status, text = time.monotonic(), 0, None
    try:
        status, content = ask(port, "/v1/completions", body)
        if status == 200:
            text = _whole(content) if stream else json.loads(content)["choices"][0]["text"]
    except http.client.IncompleteRead:
        status = 200  # a stream that was cut
    except (http.client.HTTPException, OSError):
        pass
    return Outcome(seed, start, time.monotonic(), status, text, stream)


def _whole(content: str) -> str | None:
    """Return the text of a stream, or None if the stream did not end as it should."""
    *lines, last, rest = content.split("\n\n")
    if (last, rest) != ("data: [DONE]", ""):
        return None
    return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines)


class Clients:
    """Threads that request one text after the other, until they are stopped or their `with` ends.

    ``kinds`` says in turn whether a text is streamed.
    """

    def __init__(
        self, port: int, count: int, seeds: int, kinds: Sequence[bool] = (True, False), **more: Any
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._port, self._seeds, self._kinds, self._more = port, seeds, kinds, more
        self._until, self._is_over = time.monotonic() + LONGEST, threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _ask(self, number: int) -> None:
        place = number
        while not self._is_over.is_set() and time.monotonic() < self._until:
            stream = self._kinds[place % len(self._kinds)]
            self.outcomes.append(complete(self._port, place % self._seeds, stream, **self._more))
            place += len(self._threads) + 1  # so that each client requests both kinds
            time.sleep(0.005)  # so that there are not too many if all are refused

    def stop(self) -> list[Outcome]:
        """Return the outcomes of all requests, after the last ones have ended."""
        assert time.monotonic() < self._until, "they have stopped by themselves"
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive()
        return self.outcomes
