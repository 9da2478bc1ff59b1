"""Servers as processes, ours and others, one of which runs at a time."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from specjax.errors import InputError

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Server:
    """A server: how to start it, and how to send requests to it.

    Attributes:
        command: the command; "{port}" in it becomes the port.
        model: the model's name in requests.
        more: fields of every request, which make the servers comparable.
        about: a description for the results.
    """

    command: tuple[str, ...]
    model: str
    more: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""


def ours(directory: Path, drafter: str, rows: int, more: Sequence[str] = ()) -> Server:
    """Return our server, ``specjax serve``, for the files of `serving_models.write_pair`."""
    command = (
        sys.executable,
        "-m",
        "specjax",
        "serve",
        "--target",
        str(directory / "target"),
        "--drafter",
        drafter,
    )
    options = (
        "--warm",
        "--rows",
        str(rows),
        "--port",
        "{port}",
        "--served-model-name",
        "pair",
        *more,
    )
    return Server(
        (*command, *options),
        "pair",
        {"stream_options": {"include_usage": True}},
        "python -m specjax serve",
    )


CONTINUOUS = "--continuous-batching"
"""The option of `transformers serve` for continuous batching.

Its first request then decides how all are sampled.
"""


def transformers(directory: Path, continuous: bool, tokens: int) -> Server:
    """Return ``transformers serve``, with one text at a time or ``continuous`` batching.

    ``tokens`` is the size of its cache. Without a size the cache takes most of the machine's
    memory.
    """
    target = str(directory / "target")
    command = (
        str(Path(sys.executable).parent / "transformers"),
        "serve",
        target,
        "--device",
        "cpu",
        "--port",
        "{port}",
    )
    blocks = (
        "--cb-block-size",
        "32",
        "--cb-num-blocks",
        str(-(-tokens // 32)),
        "--cb-max-batch-tokens",
        "64",
    )
    more = (CONTINUOUS, *blocks) if continuous else ()
    return Server((*command, *more), target, {}, " ".join(("transformers serve", *more)))


NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
"""The fields without which llama.cpp's servers would change the model's distribution."""


def llama_cpp_python(directory: Path, python: str, context: int) -> Server:
    """Return the server of llama-cpp-python, which takes one text at a time.

    It is installed for the interpreter ``python``.
    """
    threads = str(len(os.sched_getaffinity(0)))
    command = (
        python,
        "-m",
        "llama_cpp.server",
        "--model",
        str(directory / "target.gguf"),
        "--port",
        "{port}",
    )
    # Without the last one a new request ends the one that is being answered.
    options = (
        "--n_ctx",
        str(context),
        "--n_threads",
        threads,
        "--n_threads_batch",
        threads,
        "--interrupt_requests",
        "false",
    )
    command = (*command, "--model_alias", "target")
    return Server((*command, *options), "target", NEUTRAL, "python -m llama_cpp.server")


def llama_server(directory: Path, program: str, rows: int, context: int) -> Server:
    """Return llama.cpp's own server, with ``rows`` texts of ``context`` tokens together."""
    threads = str(len(os.sched_getaffinity(0)))
    options = (
        "--parallel",
        str(rows),
        "--ctx-size",
        str(rows * context),
        "--threads",
        threads,
        "--no-webui",
    )
    command = (program, "--model", str(directory / "target.gguf"), "--port", "{port}", *options)
    return Server(
        command, "target", {**NEUTRAL, "stream_options": {"include_usage": True}}, "llama-server"
    )


class Running:
    """A server's process. It is stopped with SIGSTOP while another server is measured."""

    def __init__(
        self,
        server: Server,
        log: Path,
        environment: Mapping[str, str],
        seconds: float,
        talks: bool = False,
    ) -> None:
        """Start the server and wait until it answers.

        Args:
            server: the server.
            log: the file for its output; of one that ``talks``, only for its errors.
            environment: additional environment variables.
            seconds: the maximum time to wait.
            talks: whether it reads lines and answers them, see `tell`.
        """
        self.server, self.log = server, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [part.replace("{port}", str(self.port)) for part in server.command]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else output,
                stderr=output,
                text=True,
                cwd=ROOT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        try:
            self._wait(seconds)
        except BaseException:
            self.stop()
            raise

    def _wait(self, seconds: float) -> None:
        """Wait until it has answered a request, so that work of a first request is done."""
        until = time.monotonic() + seconds
        body = {
            "model": self.server.model,
            "prompt": "import os",
            "max_tokens": 4,
            "temperature": 0.0,
        }
        content, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            try:
                url = f"http://127.0.0.1:{self.port}/v1/completions"
                with urllib.request.urlopen(
                    urllib.request.Request(url, content, headers), timeout=seconds
                ):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise InputError(
            f"{' '.join(self.server.command)}: does not answer; it printed\n{self._printed()}"
        )

    def tell(self, what: Any) -> Any:
        """Write a line of JSON to its input, and read a line of its output."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise InputError(
            f"{' '.join(self.server.command)}: has ended; it printed\n{self._printed()}"
        )

    def _printed(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def pause(self) -> None:
        """Stop the process for a while."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGCONT)
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> "Running":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
