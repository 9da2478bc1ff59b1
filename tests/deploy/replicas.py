"""Replicas behind nginx, and clients that ask again and again."""

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

STARTING = 300  # seconds; a tenth of it where nothing else runs
PATIENCE = 60  # seconds for an answer
LONGEST = 900  # seconds for which clients ask, at most
CONFIG = (DEPLOY / "nginx.conf").read_text()


def has_nginx() -> bool:
    return shutil.which("nginx", path=_PATH) is not None


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"


@contextmanager
def nginx(directory: Path, servers: Sequence[int]) -> Iterator[int]:
    """nginx with our configuration, for ``servers`` at these two ports; its own port."""
    port = free_port()
    changed = CONFIG
    for written, real in (("127.0.0.1:8001", servers[0]), ("127.0.0.1:8002", servers[1])):
        assert changed.count(f"server {written} ") == 2
        changed = changed.replace(f"server {written} ", f"server 127.0.0.1:{real} ")
    assert changed.count("listen 8080;") == 1
    (directory / "specjax.conf").write_text(
        changed.replace("listen 8080;", f"listen 127.0.0.1:{port};")
    )
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    lines = [
        "daemon off;",
        "user root;" if os.geteuid() == 0 else "",  # its own user could not write here
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
    command = [
        str(shutil.which("nginx", path=_PATH)),
        "-p",
        str(directory),
        "-c",
        str(directory / "nginx.conf"),
    ]
    command += ["-e", str(directory / "error.log")]
    tried = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert tried.returncode == 0, tried.stderr
    assert "[warn]" not in tried.stderr, tried.stderr
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
        """Begin to start."""
        command = [
            sys.executable,
            "-m",
            "specjax",
            "serve",
            "--port",
            str(self.port),
            *self._options,
        ]
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
        """As a machine ends that loses its power."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        """As a scheduler ends it; its exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def running(self) -> float:
        """How many texts it generates now."""
        status, body = ask(self.port, "/metrics")
        assert status == 200
        found = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", body, re.MULTILINE)
        assert found
        return float(found[1])


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and content of one answer."""
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
    """What became of a request.

    Attributes:
        seed: that it had.
        begun: when it was sent, in seconds.
        ended: when that was known.
        status: of the answer; 0: there was none.
        text: all of it; None: there is none, or it was cut.
        was_stream: whether it was to be streamed.
    """

    seed: int
    begun: float
    ended: float
    status: int
    text: str | None
    was_stream: bool


def complete(port: int, seed: int, stream: bool, **more: Any) -> Outcome:
    """One text at temperature 1."""
    body = {
        "model": "tiny",
        "prompt": "def f",
        "seed": seed,
        "temperature": 1,
        "ignore_eos": True,
        "stream": stream,
        **more,
    }
    begun, status, text = time.monotonic(), 0, None
    try:
        status, content = ask(port, "/v1/completions", body)
        if status == 200:
            text = _whole(content) if stream else json.loads(content)["choices"][0]["text"]
    except http.client.IncompleteRead:
        status = 200  # a stream that was cut
    except (http.client.HTTPException, OSError):
        pass
    return Outcome(seed, begun, time.monotonic(), status, text, stream)


def _whole(content: str) -> str | None:
    """The text of a stream; None where it did not end as it should."""
    *lines, last, rest = content.split("\n\n")
    if (last, rest) != ("data: [DONE]", ""):
        return None
    return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines)


class Clients:
    """Threads that ask for one text after the other, until they are told to stop or their `with` ends.

    ``kinds`` says in turn whether one is streamed.
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
            place += len(self._threads) + 1  # so that each has both kinds
            time.sleep(0.005)  # where all are refused, too, they are not very many

    def stop(self) -> list[Outcome]:
        """What became of all requests, when the last ones have ended."""
        assert time.monotonic() < self._until, "they have stopped by themselves"
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive()
        return self.outcomes
