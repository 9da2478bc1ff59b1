"""Times of decode calls while the host inserts answers of another tenant, and while it does not.

    python -m benchmarks.sorting_beside_calls

An engine decodes with a text in every row. Periods in which a thread of low priority inserts
answers into the sorted ones of another tenant alternate with periods in which it has nothing to do.
By default an answer of 1,000 tokens comes each second, which is about what eight rows write. The
time of a call is the time from its beginning to that of the next.
"""

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.suffix_index import make_text
from specjax import pipeline
from specjax.errors import InputError
from specjax.serving import Engine
from specjax.serving.device import EngineDevice
from specjax.serving.earlier_answers import EarlierAnswers
from specjax.serving.pages import Tenant


@dataclass(frozen=True)
class SortingConfig:
    """Measure the times of calls.

    Attributes:
        target: directory or hub id, or "embedded".
        tokens: number of sorted tokens, into which answers are inserted.
        answer_tokens: tokens of each answer.
        every: seconds from one answer to the next; 0 for no pause between insertions.
        rows: number of rows, all in use.
        new_tokens: tokens of each text.
        steps: steps of a call.
        periods: number of periods of each kind; they alternate.
        seed: random seed of the sorted tokens.
    """

    target: str = "embedded"
    tokens: int = 1_000_000
    answer_tokens: int = 1_000
    every: float = 1.0
    rows: int = 8
    new_tokens: int = 800
    steps: int = 1
    periods: int = 5
    seed: int = 0


class TimedDevice:
    """The device of an engine, which notes when each decode call begins.

    Attributes:
        begun: the times of the calls, in seconds.
    """

    def __init__(self, device: EngineDevice) -> None:
        """Note the calls of ``device``."""
        self._device = device
        self.begun: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def decode(self, *arguments: Any) -> Any:
        """Note the time, and decode."""
        self.begun.append(time.perf_counter())
        return self._device.decode(*arguments)


class Inserting:
    """A thread that adds answers of a tenant, each of them when those before are inserted.

    The tenant's answers have as many tokens as are kept, so that each new one takes the place of
    the oldest.

    Attributes:
        count: the number of insertions.
    """

    def __init__(self, answers: EarlierAnswers, texts: Sequence[list[int]], every: float) -> None:
        """Add all ``texts``, and sort them. Then one is added in so many seconds."""
        self._answers, self._texts, self._every = answers, texts, every
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.count = 0
        for text in texts:
            answers.add(Tenant("sorted", ""), text)
        answers.wait()

    def _run(self) -> None:
        while not self._is_over.wait(self._every):
            self._answers.add(Tenant("sorted", ""), self._texts[self.count % len(self._texts)])
            self._answers.wait()
            self.count += 1

    def __enter__(self) -> "Inserting":
        """Start."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop after the insertion that goes on."""
        self._is_over.set()
        self._thread.join()


def run_period(engine: Engine, device: TimedDevice, config: SortingConfig) -> np.ndarray:
    """Return the milliseconds of the calls of texts that begin together."""
    device.begun.clear()
    handles = [
        engine.submit(
            f"Once upon a time number {seed}",
            max_new_tokens=config.new_tokens,
            temperature=0.7,
            seed=seed,
            eos_token_ids=(),
        )
        for seed in range(config.rows)
    ]
    for handle in handles:
        handle.result()
    return 1e3 * np.diff(device.begun)


def measure(config: SortingConfig) -> tuple[dict[str, list[np.ndarray]], int]:
    """Return the milliseconds of calls, by kind and period, and the number of insertions."""
    rng = np.random.default_rng(config.seed)
    generator = pipeline.load(config.target, "suffix", generation_config=None)
    text = make_text(rng, config.tokens, generator.target.config.vocab_size).tolist()
    length = config.answer_tokens - 1  # one place is for the end of an answer
    texts = [text[begin : begin + length] for begin in range(0, len(text) - length, length)]
    times: dict[str, list[np.ndarray]] = {"without": [], "while inserting": []}
    insertions = 0
    with Engine(
        generator,
        rows=config.rows,
        widths=(config.rows,),
        steps=config.steps,
        drafts=("chain:8",),
        earlier_answers=config.tokens,
    ) as engine:
        device = TimedDevice(engine._loop.device)
        engine._loop.device = device  # pyright: ignore[reportAttributeAccessIssue]
        answers = engine._loop.answers
        assert answers is not None
        run_period(engine, device, config)  # compiles
        for _ in range(config.periods):
            times["without"].append(run_period(engine, device, config))
            with Inserting(answers, texts, config.every) as inserting:
                times["while inserting"].append(run_period(engine, device, config))
            insertions += inserting.count
    return times, insertions


def main(config: SortingConfig) -> None:
    """Print the table."""
    if min(config.rows, config.periods) < 1 or config.new_tokens < 100:
        raise InputError("rows and periods must be at least 1, new_tokens at least 100")
    if not 8 <= config.answer_tokens <= config.tokens // 2:
        raise InputError(
            f"answer_tokens={config.answer_tokens}: must be from 8 to half of tokens, that is"
            f" {config.tokens // 2}"
        )
    times, insertions = measure(config)
    title = (
        f"milliseconds of a call, {config.rows} rows, {insertions} insertions in"
        f" {config.tokens:,} tokens ({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f})"
    )
    table = Table("", "calls", "median", "90%", "99%", "99%, by period", title=title)
    for name, periods in times.items():
        together = np.concatenate(periods)
        shown = (f"{np.percentile(together, at):.1f}" for at in (50, 90, 99))
        by_period = " ".join(f"{np.percentile(period, 99):.1f}" for period in periods)
        table.add_row(name, str(len(together)), *shown, by_period)
    Console(width=110).print(table)


if __name__ == "__main__":
    try:
        main(tyro.cli(SortingConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
