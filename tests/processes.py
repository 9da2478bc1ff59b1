"""Start processes that work together (`jax.distributed`), and wait for them with a time limit."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Seconds; two cores take a tenth of it. Processes that wait for each other would wait for ever.
TIMEOUT = 600


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@contextmanager
def processes(module: str, directory: Path, count: int = 2) -> Iterator[list[subprocess.Popen]]:
    """Run ``python -m MODULE DIRECTORY COORDINATOR PROCESS`` in ``count`` processes.

    No process outlives the block.
    """
    coordinator = f"localhost:{free_port()}"
    command = [sys.executable, "-m", module, str(directory), coordinator]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}  # also on a machine with accelerators
    running = []
    try:
        for number in range(count):
            with (directory / f"{number}.log").open("w") as log:
                running.append(
                    subprocess.Popen(
                        [*command, str(number)],
                        cwd=Path(__file__).parents[1],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def wait(running: list[subprocess.Popen], directory: Path) -> None:
    """Wait until all processes have ended with status 0.

    A process that ends with another status fails the test at once, because the rest would wait for
    it.
    """
    deadline = time.monotonic() + TIMEOUT
    while (codes := [process.poll() for process in running]) != [0] * len(running):
        if any(codes) or time.monotonic() > deadline:
            logs = "\n".join(
                f"--- {file.name}\n{file.read_text()[-4000:]}"
                for file in sorted(directory.glob("*.log"))
            )
            pytest.fail(
                f"exit codes {codes} (None: still running after at most {TIMEOUT} s)\n{logs}"
            )
        time.sleep(0.05)


def ends_all(running: list[subprocess.Popen], lost: int) -> None:
    """Check that all processes end within 30 seconds of the ``lost`` one, none with status 0."""
    running[lost].wait(TIMEOUT)
    ended = time.monotonic()
    for process in running:
        assert process.wait(30) != 0
    assert time.monotonic() - ended < 30
