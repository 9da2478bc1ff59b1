"""Acceptance length and speed of trained drafters, as chain and tree, at two temperatures.

python -m benchmarks.drafters --target TARGET --runs "EAGLE-1=runs/eagle1_*/best"
"EAGLE-3=runs/eagle3_*/best"

A name stands for several trainings with different seeds. Acceptance is counted on the target
itself, over many prompts in one batch; "first token" is how often a step accepted the token that
was drafted first. Speed is measured on an inflated copy of the target, one row at a time, with
plain decoding between the drafters. The drafters stay as they are (`specjax.demo.OnInflated`).
"""

import glob
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import specjax
from benchmarks.decode import prompts_of, read_texts
from specjax import text
from specjax.demo import OnInflated, inflate
from specjax.drafters import Drafter
from specjax.drafters.registry import load_drafter
from specjax.drafts.published import EAGLE_TREE
from specjax.drafts.shapes import Chain, DraftShape, DynamicTree, StaticTree
from specjax.errors import InputError
from specjax.evaluation import metrics
from specjax.models import hub
from specjax.progress import show_waits, track

SHAPES: dict[str, DraftShape] = {
    "chain of 5": Chain(5),
    "static of 26": StaticTree(EAGLE_TREE),
    "dynamic of 26": DynamicTree(top_k=4, depth=5, nodes=26),
}


@dataclass(frozen=True)
class DraftersConfig:
    """Compare trained drafters of one target.

    Attributes:
        target: directory or hub id of the target.
        runs: "NAME=GLOB" each; the directories of a glob are runs of one method with different
            seeds.
        inflate: hidden size, MLP size and layers of the copy on which speed is measured.
        prompts: JSON lines with "text"; by default the source of standard modules.
        count: number of prompts for acceptance.
        context: tokens of a prompt.
        new_tokens: tokens to generate per prompt.
        timed: number of prompts for speed; 0 leaves speed out.
        temperature: temperatures; 0 is greedy.
        repeats: timed runs of every drafter.
        output: .json file for the results; if empty, they are only printed.
    """

    target: str = "embedded"
    runs: tuple[str, ...] = ("draft model=embedded:draft",)
    inflate: tuple[int, int, int] = (768, 2304, 13)
    prompts: str = ""
    count: int = 32
    context: int = 32
    new_tokens: int = 128
    timed: int = 2
    temperature: tuple[float, ...] = (0.0, 1.0)
    repeats: int = 3
    output: str = ""


def load(runs: Sequence[str], target: specjax.Target) -> dict[str, list[Drafter]]:
    """Load the drafters of each name, one per seed."""
    drafters: dict[str, list[Drafter]] = {}
    for run in runs:
        name, equals, where = run.partition("=")
        places = sorted(glob.glob(where)) or ([where] if where.startswith("embedded") else [])
        if not equals or not places:
            raise InputError(f"runs={run!r}: write NAME=GLOB, of directories that are there")
        drafters[name] = [load_drafter(place, None, target.config, np.float32) for place in places]
    return drafters


def acceptance(
    target: specjax.Target, drafter: Drafter, prompts: np.ndarray, tokens: int, temperature: float
) -> metrics.Acceptance:
    """Return the acceptance over all prompts."""
    sampling = specjax.Sampling(temperature=temperature)
    result = specjax.generate(
        target, drafter, prompts, max_new_tokens=tokens, sampling=sampling, key=jax.random.key(0)
    )
    return metrics.summarise(result.stats)


def speeds(
    target: specjax.Target,
    drafters: dict[str, Drafter | None],
    prompts: np.ndarray,
    config: DraftersConfig,
    temperature: float,
) -> dict[str, list[float]]:
    """Return the tokens per second of each drafter in every repeat, interleaved."""
    sampling = specjax.Sampling(temperature=temperature)

    def run(drafter: Drafter | None) -> float:
        started, emitted = time.perf_counter(), 0
        for number, prompt in enumerate(prompts):
            result = specjax.generate(
                target,
                drafter,
                prompt[None],
                max_new_tokens=config.new_tokens,
                sampling=sampling,
                key=jax.random.key(number),
            )
            emitted += int(result.lengths[0]) - len(prompt)
        return emitted / (time.perf_counter() - started)

    rates: dict[str, list[float]] = {name: [] for name in drafters}
    for drafter in drafters.values():
        run(drafter)  # compiles
    for _ in range(config.repeats):
        for name, drafter in drafters.items():
            rates[name].append(run(drafter))
    return rates


def run(config: DraftersConfig) -> list[dict[str, Any]]:
    """Return a row for each name, shape and temperature."""
    target = specjax.Target.from_pretrained(config.target, dtype=np.float32)
    tokenizer = text.load_tokenizer(hub.locate(config.target))
    drafters = load(config.runs, target)
    texts = [np.asarray(text.encode(tokenizer, sample)) for sample in read_texts(config.prompts)]
    prompts = prompts_of(texts, config.count, config.context)
    hidden, mlp, layers = config.inflate
    inflated = (
        inflate(target, hidden_size=hidden, intermediate_size=mlp, num_layers=layers)
        if config.timed
        else target
    )
    rows = []
    settings = {
        f"{shape}, T = {temperature:g}": (temperature, shape)
        for temperature in config.temperature
        for shape in SHAPES
    }
    for setting in track(list(settings), "measuring all drafters: {}"):
        temperature, shape_name = settings[setting]
        shape = SHAPES[shape_name]
        shaped = {
            name: [replace(drafter, draft=shape) for drafter in seeds]  # pyright: ignore[reportArgumentType]
            for name, seeds in drafters.items()
        }
        timed: dict[str, Drafter | None] = {"plain": None}
        timed |= {
            f"{name}/{seed}": OnInflated.of(drafter, target)
            for name, seeds in shaped.items()
            for seed, drafter in enumerate(seeds)
        }
        measured = (
            speeds(inflated, timed, prompts[: config.timed], config, temperature)
            if config.timed
            else {}
        )
        for name, seeds in shaped.items():
            counted = [
                acceptance(target, drafter, prompts, config.new_tokens, temperature)
                for drafter in seeds
            ]
            lengths = [result.acceptance_length for result in counted]
            of_seeds = (
                [median(measured[f"{name}/{seed}"]) for seed in range(len(seeds))]
                if measured
                else []
            )
            rows.append(
                {
                    "method": name,
                    "draft": shape_name,
                    "temperature": temperature,
                    "seeds": len(seeds),
                    "acceptance_length": mean(lengths),
                    "lengths": lengths,
                    "first": mean(result.by_position[0] or 0.0 for result in counted),
                    "tokens_per_second": mean(of_seeds) if measured else None,
                    "speeds": of_seeds,
                    "speedup": mean(of_seeds) / median(measured["plain"]) if measured else None,
                }
            )
    return rows


def main(config: DraftersConfig) -> None:
    """Print and write the table."""
    rows = run(config)
    table = Table(
        "method",
        "draft",
        "T",
        "acceptance length",
        "of each seed",
        "first token",
        "tokens/s",
        "speed-up",
        title=config.target,
    )
    for row in rows:
        table.add_row(
            row["method"],
            row["draft"],
            f"{row['temperature']:g}",
            f"{row['acceptance_length']:.2f}",
            " ".join(f"{length:.2f}" for length in row["lengths"]),
            f"{row['first']:.2f}",
            *(
                (f"{row['tokens_per_second']:.0f}", f"{row['speedup']:.2f}x")
                if row["speeds"]
                else ("-", "-")
            ),
        )
    Console(width=140).print(table)
    if config.output:
        Path(config.output).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    show_waits()
    try:
        main(tyro.cli(DraftersConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
