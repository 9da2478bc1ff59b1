"""A ``specjax serve`` whose target is slow, like a large model on another machine.

    python -m benchmarks.slow_server 25 busy.json serve --target TARGET --drafts clients

Every pass of the target waits some milliseconds, in a decoding step, in the scoring of a draft or
in a chunk of a prompt. Meanwhile the processor is free, as if the target were on another machine.
Drafting on the server takes its own time. The file always has the seconds that the target was busy,
and its number of passes.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.cli.main import main
from specjax.serving.device import EngineDevice


class Slow:
    """A target that waits.

    Attributes:
        seconds: seconds that each pass waits.
        busy: seconds of work and waiting so far, with drafting on the server.
        passes: number of passes so far.
    """

    def __init__(self, seconds: float, file: Path) -> None:
        """Write the figures to ``file``."""
        self.seconds, self.busy, self.passes = seconds, 0.0, 0
        self._file = file

    def wait(self, started: float, passes: int) -> None:
        """Wait for a number of passes that started at a time of `time.perf_counter`."""
        time.sleep(self.seconds * passes)
        self.busy += time.perf_counter() - started
        self.passes += passes
        beside = self._file.with_name(self._file.name + ".new")
        beside.write_text(json.dumps({"busy": self.busy, "passes": self.passes}))
        beside.replace(self._file)

    def once(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Slow down ``call``, which is one pass."""

        def slow(device: EngineDevice, *arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = jax.block_until_ready(call(device, *arguments, **named))
            self.wait(started, 1)
            return result

        return slow

    def steps(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Slow down ``call``, which is as many passes as its rows made steps."""

        def slow(device: EngineDevice, *arguments: Any, **named: Any) -> Any:
            started, before = time.perf_counter(), np.asarray(device.state.stats.steps)
            progress = jax.block_until_ready(call(device, *arguments, **named))
            new_steps = np.asarray(progress.stats.steps) - before
            self.wait(started, int(new_steps.max()))
            return progress

        return slow


def slow_down(slow: Slow) -> None:
    """Slow down the target of every engine in this process from now on."""
    EngineDevice.verify, EngineDevice.read = (
        slow.once(EngineDevice.verify),
        slow.once(EngineDevice.read),
    )
    EngineDevice.decode = slow.steps(EngineDevice.decode)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("slow_server: error: give MILLISECONDS FILE.json serve ...")
    slow_down(Slow(float(sys.argv[1]) / 1e3, Path(sys.argv[2])))
    sys.exit(main(sys.argv[3:]))
