"""Two processes that decode together (`jax.distributed`) against one that decodes alone."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import tiny_target
from tests.decoding import two_processes

TIMEOUT = 240  # seconds; two cores take a tenth of it. Processes that wait for each other would wait for ever.


@contextmanager
def processes(directory: Path, count: int = 2) -> Iterator[list[subprocess.Popen]]:
    """`two_processes` at work; none of them outlives the block."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", two_processes.__name__, str(directory), coordinator]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}  # whatever else the machine has
    running = []
    try:
        for number in range(count):
            with (directory / f"{number}.log").open("w") as log:
                running.append(
                    subprocess.Popen(
                        [*command, str(number)],
                        cwd=Path(__file__).parents[2],
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
    """Until all have ended well. One that ends badly fails the test at once: the others would wait for it."""
    deadline = time.monotonic() + TIMEOUT
    while (codes := [process.poll() for process in running]) != [0] * len(running):
        if any(codes) or time.monotonic() > deadline:
            logs = "\n".join(f"--- {file.name}\n{file.read_text()[-4000:]}" for file in sorted(directory.glob("*.log")))
            pytest.fail(f"exit codes {codes} (None: still running after at most {TIMEOUT} s)\n{logs}")
        time.sleep(0.05)


def test_two_processes_find_what_one_does(tmp_path) -> None:
    """Rows over ``data`` and params over ``model``: the same tokens, streams and statistics in either process.

    The clock of process 0 calls drafting hopeless and that of process 1 calls it free: both must go by process 0's.
    """
    sizes = {"num_layers": 1, "vocab_size": 12}
    tiny_target(**sizes).save_pretrained(tmp_path / "target")
    tiny_target(**sizes, scale=22.0).save_pretrained(tmp_path / "draft")
    with processes(tmp_path) as running:
        alone = two_processes.decode(tmp_path, None, two_processes.SLOW, choose=True, look=True)
        wait(running, tmp_path)
    alone = json.loads(json.dumps(alone))
    for process in range(2):
        for mesh, found in json.loads((tmp_path / f"{process}.json").read_text()).items():
            for what, value in found.items():
                assert value == alone[what], f"{what}, mesh over {mesh}, process {process}"
    assert len(alone["stream"]) > 2
    assert next(iter(alone["speedups"])) == "None"  # plain decoding is fastest, which the clock of process 1 denies
    assert alone["survival"][0] > 0
