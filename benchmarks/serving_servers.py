"""Servers as processes: ours, and those of others, one of which runs at a time."""

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
    """How to start a server, and how to talk to it.

    Attributes:
        command: that starts it; "{port}" in it becomes the port.
        model: what requests call the model.
        more: fields of every request: what switches off, or on, what the others do not do.
        about: what it is, for the results.
    """

    command: tuple[str, ...]
    model: str
    more: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""


def ours(directory: Path, drafter: str, rows: int, more: Sequence[str] = ()) -> Server:
    """``python -m specjax serve``, with what `serving_models.write_pair` wrote into ``directory``."""
    command = (sys.executable, "-m", "specjax", "serve", "--target", str(directory / "target"), "--drafter", drafter)
    options = ("--warm", "--rows", str(rows), "--port", "{port}", "--served-model-name", "pair", *more)
    return Server((*command, *options), "pair", {"stream_options": {"include_usage": True}}, "python -m specjax serve")


CONTINUOUS = "--continuous-batching"
"""The option of `transformers serve`. Its first request then decides whether and how all are drawn."""


def transformers(directory: Path, continuous: bool, tokens: int) -> Server:
    """``transformers serve``, which takes one text at a time, or, ``continuous``, many, in a cache of so many ``tokens``.

    Without a size the cache takes most of the machine's memory.
    """
    target = str(directory / "target")
    command = (str(Path(sys.executable).parent / "transformers"), "serve", target, "--device", "cpu", "--port", "{port}")
    blocks = ("--cb-block-size", "32", "--cb-num-blocks", str(-(-tokens // 32)), "--cb-max-batch-tokens", "64")
    more = (CONTINUOUS, *blocks) if continuous else ()
    return Server((*command, *more), target, {}, " ".join(("transformers serve", *more)))


NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
"""What llama.cpp's servers must be told, or they draw from something else than the model's distribution."""


def llama_cpp_python(directory: Path, python: str, context: int) -> Server:
    """The server of llama-cpp-python, which takes one text at a time, installed for the interpreter ``python``."""
    threads = str(len(os.sched_getaffinity(0)))
    command = (python, "-m", "llama_cpp.server", "--model", str(directory / "target.gguf"), "--port", "{port}")
    # Without the last one a new request ends the one that is being answered.
    options = ("--n_ctx", str(context), "--n_threads", threads, "--n_threads_batch", threads, "--interrupt_requests", "false")
    command = (*command, "--model_alias", "target")
    return Server((*command, *options), "target", NEUTRAL, "python -m llama_cpp.server")


def llama_server(directory: Path, program: str, rows: int, context: int) -> Server:
    """llama.cpp's own server, ``program``, which decodes ``rows`` texts of ``context`` tokens together."""
    threads = str(len(os.sched_getaffinity(0)))
    options = ("--parallel", str(rows), "--ctx-size", str(rows * context), "--threads", threads, "--no-webui")
    command = (program, "--model", str(directory / "target.gguf"), "--port", "{port}", *options)
    return Server(command, "target", {**NEUTRAL, "stream_options": {"include_usage": True}}, "llama-server")


class Running:
    """A server's process. It is stopped with SIGSTOP while it is not used, so that the one that is has the machine."""

    def __init__(self, server: Server, log: Path, environment: Mapping[str, str], seconds: float, talks: bool = False) -> None:
        """Start it and wait until it answers.

        Args:
            server: what to start.
            log: where what it prints goes; of one that ``talks``, its errors alone.
            environment: beside this process's own.
            seconds: to wait, at most.
            talks: it can be told things, and answers, see `tell`.
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
        """Until it has answered a request, so that whatever it does only then is done."""
        until = time.monotonic() + seconds
        body = {"model": self.server.model, "prompt": "import os", "max_tokens": 4, "temperature": 0.0}
        content, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            try:
                url = f"http://127.0.0.1:{self.port}/v1/completions"
                with urllib.request.urlopen(urllib.request.Request(url, content, headers), timeout=seconds):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise InputError(f"{' '.join(self.server.command)}: does not answer; it printed\n{self._printed()}")

    def tell(self, what: Any) -> Any:
        """Write a line of JSON to its input, and read one from its output."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise InputError(f"{' '.join(self.server.command)}: has ended; it printed\n{self._printed()}")

    def _printed(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def pause(self) -> None:
        """Keep it from using the machine."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it."""
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
