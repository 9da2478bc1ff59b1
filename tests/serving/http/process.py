"""A server in a process of its own, and requests to it."""

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

STARTING = 400  # seconds; an idle machine needs a tenth of them


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        address: its address, such as ``http://127.0.0.1:8000``.
        process: the id of its process.
        key: the API key, if it needs one.
    """

    address: str
    process: int
    key: str = ""

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def get(self, path: str) -> str:
        """Return the body of the answer to a GET request."""
        with self._open(urllib.request.Request(self.address + path)) as response:
            return response.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON body, and return the JSON object of the answer."""
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
        """Return the sum of a metric's samples."""
        samples = re.findall(
            rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE
        )
        assert samples, f"there is no {name}"
        return sum(map(float, samples))

    def wait_until_idle(self, seconds: float = 10) -> None:
        """Wait until no text runs or waits."""
        deadline = time.monotonic() + seconds
        while self.metric("vllm:num_requests_running") or self.metric("vllm:num_requests_waiting"):
            assert time.monotonic() < deadline, self.get("/metrics")
            time.sleep(0.1)

    def resident(self) -> int:
        """Return the resident memory of the process in bytes."""
        status = Path(f"/proc/{self.process}/status").read_text()
        return int(re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024


@contextmanager
def serving(log: Path, *options: str, is_warm: bool = True) -> Iterator[Server]:
    """Run ``python -m specjax serve`` at a free port until the block ends.

    If it ``is_warm``, everything is compiled before it answers.
    """
    command = [sys.executable, "-m", "specjax", "serve", "--port", "0", *options]
    command += ["--warm"] * is_warm
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
        while (match := re.search(r"(http://\S+) is ready", log.read_text())) is None:
            assert process.poll() is None, f"it ended with {process.returncode}:\n{log.read_text()}"
            assert time.monotonic() < deadline, (
                f"it was not ready after {STARTING} s:\n{log.read_text()}"
            )
            time.sleep(0.1)
        yield Server(match[1], process.pid)
        assert "Traceback" not in log.read_text()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
