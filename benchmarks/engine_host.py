"""CPU time that the engine's host needs per request and per decode call, with an instant device.

    python -m benchmarks.engine_host

While the engine's thread works, an accelerator may be idle. So the device is replaced by one that
answers at once, and only the host's work remains: from an answer to the next call, with a text in
every row. Prompts are text, and every step emits two tokens per row. With ``--real`` the small
model decodes, and whole calls are measured.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from specjax import pipeline
from specjax.decoding.rows import Progress
from specjax.decoding.stats import Stats
from specjax.errors import InputError
from specjax.serving import Engine
from specjax.serving.device import EngineDevice


@dataclass(frozen=True)
class EngineHostConfig:
    """Measure the host's work for the engine.

    Attributes:
        target: directory or hub id, or "embedded".
        drafter: as on the command line.
        rows: numbers of rows to measure, all in use.
        new_tokens: tokens of each text.
        repeats: repeats of everything; the median and the range are shown.
        real: decode with the model instead of the instant device.
        output: JSON file for the results.
    """

    target: str = "embedded"
    drafter: str = "embedded:eagle3"
    rows: tuple[int, ...] = (8, 64)
    new_tokens: int = 800
    repeats: int = 5
    real: bool = False
    output: str = ""


class InstantDevice:
    """A replacement of an engine's `EngineDevice` that answers at once.

    Each step emits two tokens per row.

    Attributes:
        gaps: seconds from the answer of a decode call to the next call, if all rows had a text in
            both.
    """

    def __init__(self, device: EngineDevice, token: int) -> None:
        """Answer ``token`` instead of ``device``, whose other methods and sizes remain."""
        self._device, self._token = device, token
        rows, self._most = device.sizes.rows, device.sizes.steps * (device.depth + 1)
        self._lengths, self._max_lengths = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self._steps, self._is_read = np.zeros(rows, np.int32), np.zeros(rows, bool)
        self._has_begun = False  # all rows were read, and not all texts are over
        self.gaps: list[float] = []
        self._answered: float | None = (
            None  # when the last call was answered, in which all rows had a text
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def is_busy(self) -> bool:
        """Return False."""
        return False

    def wait_for_reads(self) -> None:
        """Do nothing, because nothing is ever running."""

    def admit(self, row: int, words: Any, start: int, prefix_state: Any) -> None:
        """Begin a text in a row."""
        self._lengths[row], self._max_lengths[row], self._steps[row], self._is_read[row] = (
            words.length,
            words.max_length,
            0,
            False,
        )

    def read(
        self, table: Any, rows: Sequence[int], counts: Any, is_last: Sequence[bool], **options: Any
    ) -> tuple[Any, None, dict[str, Any]]:
        """Skip the computation of a chunk. After the last chunk the row decodes."""
        for row, is_read in zip(rows, is_last, strict=True):
            self._is_read[row] |= is_read
        return np.int32(0), None, {}

    def rearrange(self, order: np.ndarray) -> None:
        """Put the rows into another order."""
        for counts in (self._lengths, self._max_lengths, self._steps, self._is_read):
            counts[:] = counts[order]

    def decode(
        self, number: int, table: Any, free: np.ndarray, steps: int, *arguments: Any
    ) -> Progress:
        """Emit two tokens per step in every row that has a text."""
        now = time.perf_counter()
        starts, rows = self._lengths.copy(), len(self._lengths)
        # None goes on before all are read, so that all are there together.
        self._has_begun |= bool(self._is_read.all())
        goes_on = self._is_read & ~free & self._has_begun
        if goes_on.all() and self._answered is not None:
            self.gaps.append(now - self._answered)
        self._lengths = np.where(
            goes_on, np.minimum(starts + 2 * steps, self._max_lengths), starts
        ).astype(np.int32)
        self._is_read &= self._lengths < self._max_lengths
        self._has_begun &= bool(self._is_read.any())
        self._steps += np.where(goes_on, steps, 0).astype(np.int32)
        depth = self._device.depth
        by_depth = np.zeros((rows, depth), np.int32)
        by_depth[:, 0] = self._steps
        histogram = np.zeros((rows, depth + 2), np.int32)
        histogram[:, 2] = self._steps
        count = self._steps.copy()
        counted: list[Any] = [count, count, count, 2 * count, by_depth, by_depth, histogram]
        arrays: dict[str, Any] = {
            "tokens": np.full((rows, self._most), self._token, np.int32),
            "starts": starts,
            "lengths": self._lengths.copy(),
            "done": self._lengths >= self._max_lengths,
            "failed": np.zeros(rows, bool),
            "accepted": np.ones((rows, self._most), bool),
        }
        progress = Progress(stats=Stats(*counted), matched=None, logprobs=None, **arrays)
        progress = jax.block_until_ready(jax.device_put(progress))
        self._answered = time.perf_counter() if goes_on.all() else None
        return progress


def measure(
    generator: pipeline.TextGenerator, rows: int, config: EngineHostConfig
) -> list[dict[str, float]]:
    """Return for each repeat the milliseconds of a submission and of a decode call."""
    with Engine(generator, rows=rows, widths=(rows,), drafts=("chain:3",), capacity=1024) as engine:
        device = None
        if not config.real:
            device = InstantDevice(engine._loop.device, token=engine.encode("x")[-1])
            engine._loop.device = device  # pyright: ignore[reportAttributeAccessIssue]
        runs = [_run_texts(engine, device, config) for _ in range(config.repeats + 1)]
    return runs[1:]  # the first compiles what submissions need


def _run_texts(
    engine: Engine, device: InstantDevice | None, config: EngineHostConfig
) -> dict[str, float]:
    """Return the milliseconds of one run: each row has a text from its beginning to its end."""
    calls = engine.statistics.decode_calls
    if device is not None:
        device.gaps.clear()
    submitting = 0.0
    began = time.perf_counter()
    handles = []
    for seed in range(engine.rows):
        prompt = f"import os\n\nclass Number{seed}:\n" + "    value = 1\n" * 10
        started = time.thread_time()
        handles.append(
            engine.submit(
                prompt,
                max_new_tokens=config.new_tokens,
                temperature=0.7,
                seed=seed,
                eos_token_ids=(),
                stop=["\0"],
            )
        )
        submitting += time.thread_time() - started
    for handle in handles:
        handle.result()
    seconds = (time.perf_counter() - began) / (engine.statistics.decode_calls - calls)
    if device is not None:
        seconds = median(device.gaps)
    return {"submission": 1e3 * submitting / engine.rows, "call": 1e3 * seconds}


def main(config: EngineHostConfig) -> None:
    """Measure, print the table, and write the results."""
    if config.repeats < 1 or min(config.rows, default=0) < 1 or not 1 <= config.new_tokens <= 800:
        raise InputError(
            f"repeats={config.repeats}, rows={config.rows}, new_tokens={config.new_tokens}: at"
            " least 1, at most 700"
        )
    generator = pipeline.load(config.target, config.drafter, generation_config=None)
    table = Table(
        title=(
            "milliseconds of the host, median (range)"
            if not config.real
            else "milliseconds, median (range)"
        )
    )
    for name in ("rows", "a submission", "a decode call"):
        table.add_column(name, justify="right")
    results = []
    for rows in config.rows:
        runs = measure(generator, rows, config)
        results.append({"rows": rows, "runs": runs})
        shown = [_summary([run[name] for run in runs]) for name in ("submission", "call")]
        table.add_row(str(rows), *shown)
    Console().print(table)
    if config.output:
        Path(config.output).write_text(
            json.dumps({"config": asdict(config), "results": results}, indent=1) + "\n"
        )


def _summary(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    try:
        main(tyro.cli(EngineHostConfig))
    except InputError as error:
        sys.exit(str(error))
