"""Comparison of methods on the same prompts: compiled together, then timed one after another."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np

from specjax import decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import Drafter
from specjax.evaluation import metrics
from specjax.models.transformer import Target
from specjax.progress import track, waiting

_COMPILERS = (
    2  # programs at a time: XLA alone keeps one core busy, and a second core for half of the time
)


@dataclass(frozen=True)
class Measured:
    """The measurements of one method.

    Attributes:
        speed: tokens per second, the median over the runs.
        length: acceptance length, the tokens emitted per forward pass of the target.
        texts: the tokens of each prompt and its output.
    """

    speed: float
    length: float
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MethodComparison:
    """A comparison of methods on a few prompts, one prompt after another, with one way to sample.

    The prompts are padded to the same width and have the same limit. So each method needs only two
    programs for all prompts: one for the prefill and one for the generation.

    Attributes:
        way: the way to sample, in a word.
        target: the target of all methods.
        tokens: ``[R, P]`` the prompts, right-padded.
        lengths: ``[R]`` the length of each prompt.
        options: the options of every generation.
    """

    way: str
    target: Target
    tokens: np.ndarray
    lengths: np.ndarray
    options: GenerationOptions

    def compile(self, drafter: Drafter | None) -> None:
        """Compile everything for a generation with a drafter, without taking a step."""
        started = decoding.start(
            self.target, drafter, self.tokens[:1], self.lengths[:1], self.options
        )
        jax.block_until_ready(decoding.decode(self.target, *started, 0))

    def run(self, drafter: Drafter | None, row: int) -> decoding.Result:
        """Return the result of one prompt."""
        part = slice(row, row + 1)
        return decoding.generate(
            self.target, drafter, self.tokens[part], self.lengths[part], **vars(self.options)
        )

    def stream(self, drafter: Drafter | None, row: int) -> Iterator[decoding.Result]:
        """Yield the result of one prompt so far, after every step."""
        part = slice(row, row + 1)
        return decoding.stream(
            self.target,
            drafter,
            self.tokens[part],
            self.lengths[part],
            **vars(self.options),
            steps=1,
        )

    def measure(self, drafters: Mapping[str, Drafter | None], repeats: int) -> dict[str, Measured]:
        """Time every method on all prompts ``repeats`` times, in alternation."""
        speeds: dict[str, list[float]] = {name: [] for name in drafters}
        results_by_method = {}
        with waiting("measuring", repeats * len(drafters)) as wait:
            for repeat in range(repeats):
                for index, (name, drafter) in enumerate(drafters.items()):
                    wait.update(
                        what=f"measuring {name}, {self.way}", done=repeat * len(drafters) + index
                    )
                    started = time.perf_counter()
                    results_by_method[name] = [
                        self.run(drafter, row) for row in range(len(self.tokens))
                    ]
                    emitted = sum(
                        int(result.lengths[0]) for result in results_by_method[name]
                    ) - int(self.lengths.sum())
                    speeds[name].append(emitted / (time.perf_counter() - started))
        return {
            name: _summarise(speeds[name], results) for name, results in results_by_method.items()
        }


def _summarise(speeds: list[float], results: list[decoding.Result]) -> Measured:
    stats = jax.tree.map(lambda *rows: np.concatenate(rows), *(result.stats for result in results))
    texts = tuple(tuple(result.tokens[0, : int(result.lengths[0])].tolist()) for result in results)
    return Measured(float(np.median(speeds)), metrics.summarise(stats).acceptance_length, texts)


@contextmanager
def compiling(
    comparisons: Sequence[MethodComparison], drafters: Mapping[str, Drafter | None]
) -> Iterator[Callable[[], None]]:
    """Compile the programs of all drafters for each comparison, in order, while the block runs.

    XLA releases Python's lock while it compiles. The block receives a function that waits until all
    programs are compiled.
    """
    pool = ThreadPoolExecutor(_COMPILERS)
    try:
        programs = {
            f"{name}, {comparison.way}": pool.submit(comparison.compile, drafter)
            for comparison in comparisons
            for name, drafter in drafters.items()
        }

        def wait_for_all() -> None:
            for name in track(list(programs), "compiling {}"):
                programs[name].result()

        yield wait_for_all
    finally:
        pool.shutdown(cancel_futures=True)
