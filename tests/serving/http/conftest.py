"""A process of `specjax serve` with the embedded pair."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specjax.assets import embedded

KEY = "a-key-of-the-tests"
TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
CAPACITY = 256


@dataclass
class Server:
    """A running server.

    Attributes:
        url: its address.
        port: the port in the address.
        process: its process.
        errors: the lines that it has printed to its standard error.
    """

    url: str
    port: int
    process: subprocess.Popen
    errors: list[str]


def start_server(directory: Path, *options: str) -> Server:
    """Start a server of the embedded pair, with a chat template and a key, and wait for it."""
    target = directory / "target"
    if not target.exists():
        target.mkdir()
        for file in embedded("target").iterdir():
            (target / file.name).symlink_to(file)
        (target / "chat_template.jinja").write_text(TEMPLATE)
        (directory / "key").write_text(f"{KEY}\n")
    line = [
        "--target",
        str(target),
        "--drafter",
        "embedded:eagle3",
        "--served-model-name",
        "tiny",
        "also-tiny",
    ]
    line += ["--drafts", "chain:3", "--rows", "2", "--capacity", str(CAPACITY), "--warm"]
    line += ["--port", "0", "--api-key-file", str(directory / "key")]
    line += ["--per-request-spec-decode-metrics", *options]
    command = [sys.executable, "-m", "specjax", "serve", *line]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    errors: list[str] = []
    threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True).start()
    assert process.stdout is not None
    ready = process.stdout.readline()
    assert "is ready" in ready, "".join(errors)
    url = ready.split()[0]
    return Server(url, int(url.rpartition(":")[2]), process, errors)


@pytest.fixture(scope="package")
def _servers(tmp_path_factory) -> Iterator[list[Server]]:
    """Yield the list of started servers, and end them after the tests.

    Each must end when it is asked to, and must not have printed a traceback.
    """
    started: list[Server] = []
    yield started
    for server in started:
        server.process.terminate()
        assert server.process.wait(30) == 0
        assert "Traceback" not in "".join(server.errors)


@pytest.fixture
def server(_servers: list[Server], tmp_path_factory) -> Server:
    """Return the server of all tests, or a new one if a test has ended it."""
    if not _servers or _servers[-1].process.poll() is not None:
        # VS Code sends a thinking budget, which is refused if the model's thoughts are unknown.
        thoughts = ("--thought-tokens", "<think>", "</think>")
        _servers.append(start_server(tmp_path_factory.mktemp("served"), *thoughts))
    return _servers[-1]
