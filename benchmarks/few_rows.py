"""Comparison of YNNPACK and Eigen on this CPU for products with few rows, and for decoding.

    python -m benchmarks.few_rows
    python -m benchmarks.few_rows --target DIR --draft DIR --prompts FILE.jsonl --inflate 768 2048
    14

`specjax.decoding.few_rows` chooses by the CPU's flags; here both are measured. All runs are
interleaved.
"""

import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import decode
from specjax.decoding import few_rows
from specjax.drafters import Drafter
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.sampling import Sampling

LIBRARIES: dict[str, dict[str, str]] = {"YNNPACK": {}, "Eigen": few_rows.WITHOUT_YNNPACK}
"""The options of XLA for each library."""


@dataclass(frozen=True)
class FewRowsConfig:
    """Measure both libraries.

    Attributes:
        target: the target, as in `benchmarks.decode`, like all options except ``rows``
            and ``matrices``.
        draft: the draft model.
        inflate: hidden size, MLP size and layers of the target.
        prompts: JSON lines with a "text" each.
        context: prompt tokens.
        new_tokens: tokens to generate.
        methods: methods, by the beginnings of their names.
        rows: numbers of rows of the products; if empty, only decoding is timed.
        matrices: number of matrices, their inputs and their outputs. Together they should be larger
            than the CPU's caches.
        repeats: repeats of everything.
        output: JSON file for the results.
    """

    target: str = "embedded"
    draft: str = "embedded:draft"
    inflate: tuple[int, int, int] = (768, 2304, 13)
    prompts: str = ""
    context: int = 64
    new_tokens: int = 128
    methods: tuple[str, ...] = (
        "draft model, chain",
        "draft model, adaptive",
        "draft model, dynamic",
    )
    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 9, 16, 24, 32, 48, 64, 96)
    matrices: tuple[int, int, int] = (24, 768, 2304)
    repeats: int = 3
    output: str = ""


def run(config: FewRowsConfig) -> dict[str, Any]:
    """Measure products and decoding, and return the results as they are written to JSON."""
    if config.repeats < 1 or min(config.rows, default=1) < 1 or min(config.matrices) < 1:
        raise InputError(
            f"repeats={config.repeats}, rows={config.rows}, matrices={config.matrices}: each must"
            " be at least 1"
        )
    results: dict[str, Any] = {
        "machine": decode.machine() | {"eigen_is_faster": few_rows.eigen_is_faster()},
        "settings": asdict(config),
        "products": {
            rows: products(rows, *config.matrices, config.repeats) for rows in config.rows
        },
    }
    target, drafters, texts, _ = decode.load(_as_in_decode(config))
    prompts = decode.prompts_of(texts, 2, config.context)
    drafters = decode.chosen(drafters, config.methods)
    results["decoding"] = {
        name: generations(target, drafter, np.split(prompts, 2), config.new_tokens, config.repeats)
        for name, drafter in drafters.items()
    }
    if config.output:
        decode.write(results, Path(config.output))
    return results


def _as_in_decode(config: FewRowsConfig) -> decode.BenchmarkConfig:
    named = {name: getattr(config, name) for name in ("target", "draft", "inflate", "prompts")}
    return decode.BenchmarkConfig(**named, compare=False)


def products(rows: int, count: int, inputs: int, outputs: int, repeats: int) -> dict[str, float]:
    """Return gigabytes of weights per second for a sequence of products, by library."""
    keys = jax.random.split(jax.random.key(0), count)
    weights = [jax.random.normal(key, (inputs, outputs)) for key in keys]
    x = jnp.ones((rows, inputs))

    def chain(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for weight in weights:
            x = x + 1e-6 * (x @ weight)[:, :1]  # each waits for the one before
        return x

    compiled = {
        name: jax.jit(chain).lower(x, weights).compile(options or None)
        for name, options in LIBRARIES.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for repeat in range(-1, 3 * repeats):
        for name, program in compiled.items():
            started = time.perf_counter()
            jax.block_until_ready(program(x, weights))
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - started)
    return {
        name: 4e-9 * count * inputs * outputs / median(times) for name, times in seconds.items()
    }


def generations(
    target: Target,
    drafter: Drafter | None,
    prompts: list[np.ndarray],
    new_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Return tokens per second of whole calls by library, and whether all texts are the same."""
    generate = decode.ours(target, drafter, Sampling(temperature=0.0), new_tokens)
    rates: dict[str, list[float]] = {name: [] for name in LIBRARIES}
    texts = []
    order = list(LIBRARIES)
    for repeat in range(-1, repeats):  # the first compiles
        random.Random(repeat).shuffle(order)
        for name in order:
            with mock.patch.object(few_rows, "eigen_is_faster", lambda name=name: name == "Eigen"):
                runs = [generate(group) for group in prompts]
            texts.append(np.concatenate([run["tokens"][:, : run["width"]] for run in runs]))
            if repeat >= 0:
                rates[name].append(len(prompts) * new_tokens / sum(run["seconds"] for run in runs))
    measured = {
        name: {"tokens_per_second": median(runs), "spread": [min(runs), max(runs)]}
        for name, runs in rates.items()
    }
    return measured | {"same_tokens": all(np.array_equal(text, texts[0]) for text in texts)}


def main(config: FewRowsConfig) -> None:
    """Print both tables."""
    results = run(config)
    chosen = "Eigen" if results["machine"]["eigen_is_faster"] else "YNNPACK"
    console = Console(width=140)
    console.print(f"specjax takes {chosen} here, from {few_rows.FEWEST} to {few_rows.MOST} rows")
    table = Table("rows", *LIBRARIES, title="GB/s of weights")
    for rows, rates in results["products"].items():
        table.add_row(str(rows), *(f"{rates[name]:.1f}" for name in LIBRARIES))
    console.print(table)
    table = Table("method", *LIBRARIES, "Eigen over YNNPACK", "same text", title="tokens/s")
    for method, row in results["decoding"].items():
        rates = [row[name]["tokens_per_second"] for name in LIBRARIES]
        cells = (
            f"{rate:.0f} ({row[name]['spread'][0]:.0f}-{row[name]['spread'][1]:.0f})"
            for name, rate in zip(LIBRARIES, rates, strict=True)
        )
        table.add_row(method, *cells, f"{rates[1] / rates[0]:.2f}", str(row["same_tokens"]))
    console.print(table)


if __name__ == "__main__":
    try:
        main(tyro.cli(FewRowsConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
