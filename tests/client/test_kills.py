"""Tests with processes over sockets with TLS that are killed at any moment.

The client must commit the target's text in every case.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from benchmarks.network import Conditions, Proxy
from specjax.client import ProvisionalEvent, RetractedEvent
from specjax.drafters import Eagle3
from specjax.serving import Engine
from tests.client import one_process
from tests.client.one_process import LENGTH, PROMPT
from tests.conftest import tiny_target

SLOW = Conditions(round_trip=0.08)
"""The network between server and client, so slow that a text takes a few seconds."""

LIMIT = 240.0
"""Seconds in which a text must grow. An idle machine needs a fiftieth of them."""


class Pair:
    """A server and a client with a network between them, which write texts while they are killed.

    Attributes:
        killed: how often each of the two was killed.
        texts: the number of finished texts.
        lives: the number of processes that the clients had.
    """

    def __init__(self, directory: Path, proxy: Proxy, port: int, expected) -> None:
        self.killed = {"server": 0, "client": 0}
        self.texts, self.lives = 0, 0
        self._directory, self._proxy, self._port, self._expected = directory, proxy, port, expected
        self._running: dict[str, subprocess.Popen] = {}

    def start(self, role: str, *arguments: int) -> None:
        port = self._port if role == "server" else self._proxy.port
        command = [
            sys.executable,
            "-m",
            "tests.client.one_process",
            role,
            str(self._directory),
            str(port),
        ]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self._directory / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.lives += role == "client"
        with (self._directory / f"{role}.log").open("a") as log:
            self._running[role] = subprocess.Popen(
                [*command, *map(str, arguments)],
                cwd=Path(__file__).parents[2],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def kill(self, role: str) -> None:
        self._running[role].send_signal(signal.SIGKILL)
        self._running[role].wait()
        self.killed[role] += 1

    def end(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def write(self, seed: int, kills: Iterator[tuple[str, float]], most: int) -> None:
        """Write a text, and kill processes at most ``most`` times.

        Each kill comes so many seconds after the text has grown.
        """
        journal, expected = self._directory / f"{seed}.json", self._expected(seed)
        self.start("client", seed)
        for _ in range(most):
            before = len(self._committed(journal, expected))
            if self._wait(lambda before=before: len(self._committed(journal, expected)) > before):
                break  # the text is finished
            roles, seconds = next(kills)
            time.sleep(seconds)
            if self._running["client"].poll() is not None:
                break
            for role in roles.split():
                self.kill(role)
            self._committed(journal, expected)
            for role in roles.split():
                self.start(role, *[seed] * (role == "client"))
        assert self._wait(lambda: False)
        assert self._committed(journal, expected) == expected
        assert self._read(seed, expected) == expected
        self.texts += 1

    def _wait(self, has_happened) -> bool:
        """Wait for a condition or the end of the text, and return whether the text has ended."""
        deadline = time.monotonic() + LIMIT
        while not has_happened():
            if (code := self._running["client"].poll()) is not None:
                assert code == 0, self._logs()
                return True
            assert self._running["server"].poll() is None, self._logs()
            assert time.monotonic() < deadline, f"nothing happens\n{self._logs()}"
            time.sleep(0.01)
        return False

    def _logs(self) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text()[-4000:]}"
            for log in sorted(self._directory.glob("*.log"))
        )

    def _committed(self, journal: Path, expected: list[int]) -> list[int]:
        """Return the committed tokens that the journal holds now."""
        if not journal.exists():
            return []
        committed = json.loads(journal.read_text())["committed"]
        assert committed == expected[: len(committed)]
        return committed

    def _read(self, seed: int, expected: list[int]) -> list[int]:
        """Return what a reader of the last process's events has committed in the end.

        At every moment every reader must have a beginning of the expected tokens.
        """
        committed: list[int] = []
        shown: list[int] = []
        events = (self._directory / f"{seed}.events").read_text()
        # The last line of a killed process may be incomplete, and "begin" then stands behind it.
        for line in events.replace("begin", "\nbegin").splitlines():
            if line == "begin":
                committed, shown = [], []
            # The line is "begin", "end", or incomplete.
            if not (line.startswith("[") and line.endswith("]")):
                continue
            name, fields = json.loads(line)
            if name == ProvisionalEvent.__name__:
                shown += fields["tokens"]
            elif name == RetractedEvent.__name__:
                assert shown[len(shown) - len(fields["tokens"]) :] == fields["tokens"]
                del shown[len(shown) - len(fields["tokens"]) :]
            else:
                assert shown[: fields["confirmed"]] == fields["tokens"][: fields["confirmed"]]
                del shown[: fields["confirmed"]]
                committed += fields["tokens"]
                assert committed == expected[: len(committed)]
        return committed


@pytest.fixture(scope="module")
def pair(tmp_path_factory, certificate) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("kills")
    target = tiny_target()
    target.save_pretrained(directory / "target")
    Eagle3.init(target, jax.random.key(5)).save_pretrained(directory / "eagle3")
    (directory / "key").write_text("a-key-of-the-tests")
    for name, file in zip(("certificate.pem", "private.pem"), certificate, strict=True):
        (directory / name).symlink_to(file)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = {"rows": 1, "widths": (1,), "capacity": one_process.CAPACITY, "page": 16, "chunk": 16}
    with Engine(target, drafts=(None,), **sizes) as engine, Proxy(port, SLOW) as proxy:

        def expected(seed: int) -> list[int]:
            options = {"max_new_tokens": LENGTH, "eos_token_ids": (), **one_process.settings(seed)}
            return list(engine.submit(list(PROMPT), **options).result(timeout=60).tokens)

        running = Pair(directory, proxy, port, expected)
        try:
            running.start("server")
            yield running
        finally:
            running.end()


@pytest.mark.thorough
def test_each_is_killed(pair: Pair) -> None:
    pair.write(0, iter([("server", 0.1), ("client", 0.1)]), most=2)
    assert pair.killed == {"client": 1, "server": 1}


@pytest.mark.thorough
def test_a_hundred_kills(pair: Pair) -> None:
    draw = random.Random(1)
    kills = iter(
        lambda: (
            draw.choice(["client", "server", "client", "server", "client server"]),
            draw.expovariate(4),
        ),
        None,
    )
    before, seed = sum(pair.killed.values()), 0
    while (done := sum(pair.killed.values()) - before) < 100:
        seed += 1
        pair.write(seed, kills, most=min(8, 100 - done))
        print(pair.killed, pair.texts, pair.lives, flush=True)
