"""Cost of drafting by depth, for drafters that write a block in one pass.

    python -m benchmarks.block_drafting

The weights are random, because the cost does not depend on them. All depths run in turn.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import specjax
from specjax.demo import inflate
from specjax.sampling import Sampling

# A drafter for each depth of draft, because a block that is not causal is always as long as in
# training. P-EAGLE drafts its first token without a pass.
MADE: dict[str, Callable[[specjax.Target, int, int], Any]] = {
    "DFlash": lambda target, depth, layers: specjax.DFlash.init(
        target, KEY, num_layers=layers, block_size=depth + 1
    ),
    "JetSpec": lambda target, depth, layers: specjax.DFlash.init(
        target, KEY, num_layers=layers, block_size=33, variant={"causal": True}
    ),
    "DSpark": lambda target, depth, layers: specjax.DSpark.init(
        target, KEY, num_layers=layers, block_size=depth
    ),
    "DFlash2": lambda target, depth, layers: specjax.DFlash2.init(
        target, KEY, num_layers=layers, block_size=depth + 1
    ),
    "P-EAGLE": lambda target, depth, layers: specjax.PEagle.init(
        target, KEY, num_layers=max(1, layers - 1)
    ),
}
KEY = jax.random.key(0)


@dataclass(frozen=True)
class BlockDraftingConfig:
    """Time drafts of several depths.

    Attributes:
        target: directory or hub id of the target.
        inflate: hidden size, MLP size and layers of the inflated target.
        layers: layers of the drafters; P-EAGLE has one less.
        depths: tokens of the drafts.
        rows: number of rows.
        context: tokens in the caches.
        turns: drafts that are timed together.
        repeats: repeats of everything.
        output: .json file for the results; if empty, they are only printed.
    """

    target: str = "embedded"
    inflate: tuple[int, int, int] = (768, 2304, 13)
    layers: int = 5
    depths: tuple[int, ...] = (1, 2, 4, 8, 16)
    rows: int = 1
    context: int = 256
    turns: int = 20
    repeats: int = 5
    output: str = ""


def drafting(
    target: specjax.Target, drafter: Any, config: BlockDraftingConfig
) -> Callable[[], float]:
    """Return a compiled function that measures the milliseconds of a draft."""
    rows, depth = config.rows, drafter.draft_shape.depth
    state = drafter.start(target, rows, config.context + depth + 1)
    read = jnp.full((rows,), config.context, jnp.int32)
    state = (
        state.replace(cache=state.cache.replace(length=read))
        if hasattr(state, "cache")
        else state.replace(length=read)
    )
    keys = jax.random.split(KEY, (depth, rows))
    arguments = (
        drafter,
        target,
        state,
        jnp.zeros(rows, jnp.int32),
        Sampling(temperature=0.0).rows(rows),
        keys,
        read > 0,
    )
    propose = jax.jit(type(drafter).propose).lower(*arguments).compile()
    jax.block_until_ready(propose(*arguments))

    def run() -> float:
        began = time.perf_counter()
        for _ in range(config.turns):
            jax.block_until_ready(propose(*arguments)[0])
        return 1e3 * (time.perf_counter() - began) / config.turns

    return run


def main(config: BlockDraftingConfig) -> None:
    """Print and write the table."""
    small = specjax.Target.from_pretrained(config.target, dtype=np.float32)
    hidden, mlp, layers = config.inflate
    target = inflate(small, hidden_size=hidden, intermediate_size=mlp, num_layers=layers)
    runs = {
        (name, depth): drafting(
            target, replace(make(target, depth, config.layers), draft=specjax.Chain(depth)), config
        )
        for name, make in MADE.items()
        for depth in config.depths
    }
    times: dict[tuple[str, int], list[float]] = {case: [] for case in runs}
    for _ in range(config.repeats):
        for case, run in runs.items():
            times[case].append(run())
    table = Table(
        "drafter",
        *(f"{depth} tokens, ms" for depth in config.depths),
        f"{config.depths[-1]} / {config.depths[0]}",
    )
    for name in MADE:
        times_of_depths = [times[name, depth] for depth in config.depths]
        cells = [f"{median(ms):.2f} ({min(ms):.2f}-{max(ms):.2f})" for ms in times_of_depths]
        table.add_row(
            name, *cells, f"{median(times_of_depths[-1]) / median(times_of_depths[0]):.2f}"
        )
    Console(width=160).print(table)
    if config.output:
        results = [
            {"drafter": name, "depth": depth, "milliseconds": ms}
            for (name, depth), ms in times.items()
        ]
        Path(config.output).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(BlockDraftingConfig))
