"""What drafting costs by its depth, for drafters that write a block in one pass: a draft of one token and deeper ones.

    python -m benchmarks.block_drafting

Random weights: what a pass costs does not depend on them. All depths run in turn.
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

# A drafter for drafts of a depth. A block that is not causal is always as long as in training, so for each depth there is a
# drafter with blocks of that length. P-EAGLE's first token takes no pass.
MADE: dict[str, Callable[[specjax.Target, int, int], Any]] = {
    "DFlash": lambda target, depth, layers: specjax.DFlash.init(target, KEY, num_layers=layers, block_size=depth + 1),
    "JetSpec": lambda target, depth, layers: specjax.DFlash.init(
        target, KEY, num_layers=layers, block_size=33, variant={"causal": True}
    ),
    "DSpark": lambda target, depth, layers: specjax.DSpark.init(target, KEY, num_layers=layers, block_size=depth),
    "DFlash2": lambda target, depth, layers: specjax.DFlash2.init(target, KEY, num_layers=layers, block_size=depth + 1),
    "P-EAGLE": lambda target, depth, layers: specjax.PEagle.init(target, KEY, num_layers=max(1, layers - 1)),
}
KEY = jax.random.key(0)


@dataclass(frozen=True)
class BlockDraftingConfig:
    """Time drafts of several depths.

    Attributes:
        target: directory or hub id of the target.
        inflate: hidden size, MLP size and layers of the copy that is drafted for.
        layers: of the drafters; P-EAGLE has one less.
        depths: tokens of the drafts.
        rows: drafted for together.
        context: tokens that have been read.
        turns: drafts that are timed together.
        repeats: of everything.
        output: a .json file for the results; empty prints only.
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


def drafting(target: specjax.Target, drafter: Any, config: BlockDraftingConfig) -> Callable[[], float]:
    """Milliseconds of one draft, compiled."""
    rows, depth = config.rows, drafter.draft_shape.depth
    state = drafter.start(target, rows, config.context + depth + 1)
    read = jnp.full((rows,), config.context, jnp.int32)
    state = state.replace(cache=state.cache.replace(length=read)) if hasattr(state, "cache") else state.replace(length=read)
    keys = jax.random.split(KEY, (depth, rows))
    given = (drafter, target, state, jnp.zeros(rows, jnp.int32), Sampling(temperature=0.0).rows(rows), keys, read > 0)
    propose = jax.jit(type(drafter).propose).lower(*given).compile()
    jax.block_until_ready(propose(*given))

    def run() -> float:
        began = time.perf_counter()
        for _ in range(config.turns):
            jax.block_until_ready(propose(*given)[0])
        return 1e3 * (time.perf_counter() - began) / config.turns

    return run


def main(config: BlockDraftingConfig) -> None:
    """Print the table, and write it."""
    small = specjax.Target.from_pretrained(config.target, dtype=np.float32)
    hidden, mlp, layers = config.inflate
    target = inflate(small, hidden_size=hidden, intermediate_size=mlp, num_layers=layers)
    runs = {
        (name, depth): drafting(target, replace(make(target, depth, config.layers), draft=specjax.Chain(depth)), config)
        for name, make in MADE.items()
        for depth in config.depths
    }
    times: dict[tuple[str, int], list[float]] = {case: [] for case in runs}
    for _ in range(config.repeats):
        for case, run in runs.items():
            times[case].append(run())
    table = Table("drafter", *(f"{depth} tokens, ms" for depth in config.depths), f"{config.depths[-1]} / {config.depths[0]}")
    for name in MADE:
        found = [times[name, depth] for depth in config.depths]
        cells = [f"{median(each):.2f} ({min(each):.2f}-{max(each):.2f})" for each in found]
        table.add_row(name, *cells, f"{median(found[-1]) / median(found[0]):.2f}")
    Console(width=160).print(table)
    if config.output:
        written = [{"drafter": name, "depth": depth, "milliseconds": each} for (name, depth), each in times.items()]
        Path(config.output).write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(BlockDraftingConfig))
