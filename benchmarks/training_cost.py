"""Cost of a training step by draft length: Mixture of Attentions, HASS and EAGLE-3.

python -m benchmarks.training_cost

HASS and EAGLE-3 read a window once for every token of a draft, K times. Mixture of Attentions reads
it once, for any length of its blocks. One step with its gradient is measured, with the pass of the
frozen target, on one batch, and also the operations that the compiler counts.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import specjax
from specjax.errors import InputError
from specjax.training.contract import StudentInputs, TrainingMethod
from specjax.training.methods import Eagle3Training, HassTraining, MoATraining


@dataclass(frozen=True)
class TrainingCostConfig:
    """Time a training step of each method and length.

    Attributes:
        target: directory or hub id of the target.
        lengths: lengths of the drafts, K.
        batch: number of windows.
        window: tokens of a window.
        repeats: repeats of each, interleaved; the median counts.
    """

    target: str = "embedded"
    lengths: tuple[int, ...] = (1, 2, 4, 7, 10)
    batch: int = 8
    window: int = 256
    repeats: int = 5


def methods(length: int) -> dict[str, TrainingMethod]:
    """Return each method, trained for drafts of ``length`` tokens."""
    return {
        "MoA": MoATraining(target="here", shortest_block=length, longest_block=length),
        "MoA, TLI 1": MoATraining(
            target="here", tli=1, shortest_block=length, longest_block=length
        ),
        "HASS": HassTraining(target="here", steps=length),
        "EAGLE-3": Eagle3Training(target="here", steps=length),
    }


def compiled(
    method: TrainingMethod, target: specjax.Target, batch: dict[str, jax.Array]
) -> tuple[Callable[[], Any], float]:
    """Return a compiled step, and the floating-point operations that the compiler counts in it."""
    vocab = target.config.vocab_size
    inputs = StudentInputs(tokenizer=None, counts=np.ones(vocab), target=target)  # pyright: ignore[reportArgumentType]
    student: Any = method.init(jax.random.key(0), inputs)

    def loss(params: Any, target: specjax.Target, batch: dict[str, jax.Array]) -> jax.Array:
        return method.objective(student.replace(params=params), batch, target)[0]

    program = jax.jit(jax.grad(loss)).lower(student.params, target, batch).compile()
    counted = program.cost_analysis() or {}
    return lambda: jax.block_until_ready(program(student.params, target, batch)), float(
        counted.get("flops", 0.0)
    )


def run(config: TrainingCostConfig) -> list[dict[str, Any]]:
    """Return a row for each method: milliseconds and operations by length."""
    if config.batch < 1 or config.repeats < 1:
        raise InputError(f"batch={config.batch}, repeats={config.repeats}: must be at least 1")
    if not config.lengths or min(config.lengths) < 1 or max(config.lengths) + 2 > config.window:
        raise InputError(
            f"lengths={config.lengths}: must be from 1 to {config.window - 2}, which is window"
            " less 2"
        )
    target = specjax.Target.from_pretrained(config.target, dtype=np.float32)
    tokens = np.random.default_rng(0).integers(
        0, target.config.vocab_size, (config.batch, config.window + 1)
    )
    batch = {
        "tokens": jnp.asarray(tokens, jnp.int32),
        "segments": jnp.zeros(tokens.shape, jnp.int32),
        "loss_mask": jnp.ones((config.batch, config.window), bool),
        "key": jax.random.key(0),
        "progress": jnp.ones(()),
    }
    steps = {
        (name, length): compiled(method, target, batch)
        for length in config.lengths
        for name, method in methods(length).items()
    }
    times: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for repeat in range(config.repeats + 1):
        for key, (step, _) in steps.items():
            started = time.perf_counter()
            step()
            if repeat:  # the first one warms up
                times[key].append(time.perf_counter() - started)
    return [
        {
            "method": name,
            "milliseconds": {
                length: 1000 * median(times[name, length]) for length in config.lengths
            },
            "spread": {
                length: 1000 * (max(times[name, length]) - min(times[name, length]))
                for length in config.lengths
            },
            "gigaflops": {length: steps[name, length][1] / 1e9 for length in config.lengths},
        }
        for name in methods(1)
    ]


def main(config: TrainingCostConfig) -> None:
    """Print the table."""
    table = Table(
        "method",
        *(f"K = {length}" for length in config.lengths),
        title=f"{config.target}: ms a step (spread; GFLOP)",
    )
    for row in run(config):
        cells = zip(
            *(row[column].values() for column in ("milliseconds", "spread", "gigaflops")),
            strict=True,
        )
        table.add_row(
            row["method"],
            *(f"{ms:.0f} (±{spread / 2:.0f}; {flop:.1f})" for ms, spread, flop in cells),
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    try:
        main(tyro.cli(TrainingCostConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
