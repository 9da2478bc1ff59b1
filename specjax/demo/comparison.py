"""Methods side by side on the same prompts: compiled together, then timed one after another."""

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

_COMPILERS = 2  # programs at a time: XLA by itself keeps one core busy, and a second one for half of the time


@dataclass(frozen=True)
class Measured:
    """What one method did.

    Attributes:
        speed: tokens a second, the median of its runs.
        length: acceptance length: tokens emitted a target forward.
        texts: the tokens of each prompt and what came after it.
    """

    speed: float
    length: float
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MethodComparison:
    """One target on a few prompts, one prompt after another, with one way to draw tokens.

    The prompts are padded to one width and have one limit, so a method is two programs, whatever the prompt and whoever looks
    on: one reads the prompt, one is the whole generation.

    Attributes:
        way: how tokens are drawn, in a word.
        target: the model that all methods generate from.
        tokens: ``[R, P]`` the prompts, right-padded.
        lengths: ``[R]`` of each prompt.
        options: of every generation.
    """

    way: str
    target: Target
    tokens: np.ndarray
    lengths: np.ndarray
    options: GenerationOptions

    def compile(self, drafter: Drafter | None) -> None:
        """Compile all that a generation with ``drafter`` takes, and take no step."""
        started = decoding.start(self.target, drafter, self.tokens[:1], self.lengths[:1], self.options)
        jax.block_until_ready(decoding.decode(self.target, *started, 0))

    def run(self, drafter: Drafter | None, row: int) -> decoding.Result:
        """What comes after one of the prompts."""
        part = slice(row, row + 1)
        return decoding.generate(self.target, drafter, self.tokens[part], self.lengths[part], **vars(self.options))

    def stream(self, drafter: Drafter | None, row: int) -> Iterator[decoding.Result]:
        """The same, with a look at it after every step."""
        part = slice(row, row + 1)
        return decoding.stream(self.target, drafter, self.tokens[part], self.lengths[part], **vars(self.options), steps=1)

    def measure(self, drafters: Mapping[str, Drafter | None], repeats: int) -> dict[str, Measured]:
        """Time every method on all prompts, ``repeats`` times, their runs interleaved."""
        speeds: dict[str, list[float]] = {name: [] for name in drafters}
        found = {}
        with waiting("measuring", repeats * len(drafters)) as wait:
            for repeat in range(repeats):
                for number, (name, drafter) in enumerate(drafters.items()):
                    wait.update(what=f"measuring {name}, {self.way}", done=repeat * len(drafters) + number)
                    began = time.perf_counter()
                    found[name] = [self.run(drafter, row) for row in range(len(self.tokens))]
                    emitted = sum(int(result.lengths[0]) for result in found[name]) - int(self.lengths.sum())
                    speeds[name].append(emitted / (time.perf_counter() - began))
        return {name: _summarise(speeds[name], results) for name, results in found.items()}


def _summarise(speeds: list[float], results: list[decoding.Result]) -> Measured:
    stats = jax.tree.map(lambda *rows: np.concatenate(rows), *(result.stats for result in results))
    texts = tuple(tuple(result.tokens[0, : int(result.lengths[0])].tolist()) for result in results)
    return Measured(float(np.median(speeds)), metrics.summarise(stats).acceptance_length, texts)


@contextmanager
def compiling(comparisons: Sequence[MethodComparison], drafters: Mapping[str, Drafter | None]) -> Iterator[Callable[[], None]]:
    """Compile the programs of all ``drafters`` for each comparison, in their order, while the body runs.

    XLA leaves Python to others while it compiles. The body is given a function that waits until everything is there.
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
