"""A server in a process of its own, and raw HTTP to it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTING = 400  # seconds; a tenth of it where nothing else runs


@dataclass(frozen=True)
class Server:
    """One that runs.

    Attributes:
        address: such as ``http://127.0.0.1:8000``.
        process: its id.
        key: without which it does not answer.
    """

    address: str
    process: int
    key: str = ""

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def get(self, path: str) -> str:
        """The body that a path gives."""
        with self._open(urllib.request.Request(self.address + path)) as response:
            return response.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON that comes back."""
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with self._open(request) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error.code}: {error.read().decode()}") from None

    def _open(self, request: urllib.request.Request) -> Any:
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        return urllib.request.urlopen(request, timeout=120)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        found = re.findall(
            rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE
        )
        assert found, f"there is no {name}"
        return sum(map(float, found))

    def wait_until_idle(self, seconds: float = 10) -> None:
        """Until no text is being generated, and none waits."""
        deadline = time.monotonic() + seconds
        while self.metric("vllm:num_requests_running") or self.metric("vllm:num_requests_waiting"):
            assert time.monotonic() < deadline, self.get("/metrics")
            time.sleep(0.1)

    def resident(self) -> int:
        """Bytes of memory that it has."""
        return (
            int(
                re.search(
                    r"^VmRSS:\s+(\d+) kB",
                    Path(f"/proc/{self.process}/status").read_text(),
                    re.MULTILINE,
                )[1]
            )
            * 1024
        )


@contextmanager
def serving(log: Path, *options: str) -> Iterator[Server]:
    """``python -m specjax serve`` at a free port, until the block ends."""
    command = [sys.executable, "-m", "specjax", "serve", "--port", "0", "--warm", *options]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[3],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + STARTING
        while (found := re.search(r"(http://\S+) is ready", log.read_text())) is None:
            assert process.poll() is None, f"it ended with {process.returncode}:\n{log.read_text()}"
            assert time.monotonic() < deadline, (
                f"it was not ready after {STARTING} s:\n{log.read_text()}"
            )
            time.sleep(0.1)
        yield Server(found[1], process.pid)
        assert "Traceback" not in log.read_text()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
