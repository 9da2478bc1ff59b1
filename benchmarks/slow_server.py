"""``specjax serve`` whose target takes longer: what a large model on another machine is like, for a benchmark on a small one.

    python -m benchmarks.slow_server 25 busy.json serve --target TARGET --drafts clients

Every pass of the target, over drafts, in a step of decoding or over a piece of a prompt, waits for so many milliseconds beside
what it takes itself. Meanwhile the processor is free, as it would be if the target were on another machine. What is drafted on
the server takes what it takes. The file has, at all times, the seconds that the target was busy, and its passes.
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
        seconds: of each pass.
        busy: that it has worked and waited so far, drafting on the server included.
        passes: so far.
    """

    def __init__(self, seconds: float, file: Path) -> None:
        """What it comes to is kept in ``file``."""
        self.seconds, self.busy, self.passes = seconds, 0.0, 0
        self._file = file

    def wait(self, started: float, passes: int) -> None:
        """So many passes have begun at a time, as `time.perf_counter` has it."""
        time.sleep(self.seconds * passes)
        self.busy += time.perf_counter() - started
        self.passes += passes
        beside = self._file.with_name(self._file.name + ".new")
        beside.write_text(json.dumps({"busy": self.busy, "passes": self.passes}))
        beside.replace(self._file)

    def once(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, which is a pass, slower."""

        def slow(device: EngineDevice, *given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            found = jax.block_until_ready(call(device, *given, **named))
            self.wait(started, 1)
            return found

        return slow

    def steps(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, which is as many passes as its rows have made steps, slower."""

        def slow(device: EngineDevice, *given: Any, **named: Any) -> Any:
            started, before = time.perf_counter(), np.asarray(device.state.stats.steps)
            progress = jax.block_until_ready(call(device, *given, **named))
            made = np.asarray(progress.stats.steps) - before
            self.wait(started, int(made.max()))
            return progress

        return slow


def slow_down(slow: Slow) -> None:
    """From now on the target of every engine in this process waits in each pass."""
    EngineDevice.verify, EngineDevice.read = slow.once(EngineDevice.verify), slow.once(EngineDevice.read)
    EngineDevice.decode = slow.steps(EngineDevice.decode)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("slow_server: error: give MILLISECONDS FILE.json serve ...")
    slow_down(Slow(float(sys.argv[1]) / 1e3, Path(sys.argv[2])))
    sys.exit(main(sys.argv[3:]))
