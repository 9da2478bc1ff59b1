"""Gain of more actors for `specjax.ray.Generate` in Ray, with one core each.

    python -m benchmarks.regenerate_with_ray --output with_ray.json
    python -m benchmarks.regenerate_with_ray --actors 1 2 4 --prompts-per-actor 512

Every actor has the same number of prompts, so all runs would take equally long if actors were free.
The time runs from when all actors are ready, with the model loaded and everything compiled, to the
last text. The numbers of actors are interleaved. Ray itself runs on the actors' cores, and its work
is part of the figures.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.decode import machine, prompts_of, read_texts
from specjax import text
from specjax.errors import InputError
from specjax.models import hub
from specjax.ray import Generate


@dataclass(frozen=True)
class WithRayConfig:
    """Measure actors.

    Attributes:
        target: directory or hub id of the target.
        drafter: as for `specjax generate`; "none" is plain decoding.
        actors: numbers of actors, compared with the first of them.
        prompts_per_actor: prompts per actor, several batches.
        batch: prompts of a batch.
        rows: rows of an actor.
        context: tokens of a prompt.
        max_new_tokens: maximum number of tokens of an answer.
        repeats: repeats of every number of actors.
        output: .json file for the results; if empty, they are only printed.
    """

    target: str = "embedded"
    drafter: str = "none"
    actors: tuple[int, ...] = (1, 2)
    prompts_per_actor: int = 256
    batch: int = 64
    rows: int = 16
    context: int = 16
    max_new_tokens: int = 64
    repeats: int = 3
    output: str = ""


class OnOneCore(Generate):
    """An actor on its own core that waits for the other actors and notes the times of batches."""

    def __init__(self, folder: str, actors: int, **settings: Any) -> None:
        core = next(
            core for core in sorted(os.sched_getaffinity(0)) if _take(Path(folder) / f"core{core}")
        )
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core})
        super().__init__(**settings)
        (Path(folder) / f"ready{core}").touch()
        while len(list(Path(folder).glob("ready*"))) < actors:
            time.sleep(0.01)

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Return the number of new tokens in each row, and when the batch started and ended."""
        started = time.time()
        result = super().__call__(batch)
        count = len(batch[self.column])
        new = [spans[0][1] - spans[0][0] for spans in result["loss_spans"]]
        return {
            "new": np.array(new),
            "begun": np.full(count, started),
            "ended": np.full(count, time.time()),
        }


def _take(file: Path) -> bool:
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def measure(config: WithRayConfig, actors: int) -> float:
    """Return the tokens per second."""
    import ray

    target = hub.locate(config.target)
    tokenizer = text.load_tokenizer(target)
    texts = [np.asarray(text.encode(tokenizer, sample)) for sample in read_texts("")]
    prompts = prompts_of(texts, config.prompts_per_actor * actors, config.context).tolist()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "target": str(target),
            "drafter": config.drafter,
            "rows": config.rows,
            "max_new_tokens": config.max_new_tokens,
            "capacity": config.context + config.max_new_tokens,
        }
        dataset = ray.data.from_items(
            [{"prompt": prompt} for prompt in prompts],
            override_num_blocks=len(prompts) // config.batch,
        )
        rows = dataset.map_batches(
            OnOneCore,
            fn_constructor_kwargs={"folder": folder, "actors": actors, **settings},
            batch_size=config.batch,
            compute=ray.data.ActorPoolStrategy(size=actors),
            num_cpus=1,
        ).take_all()
    seconds = max(row["ended"] for row in rows) - min(row["begun"] for row in rows)
    return sum(row["new"] for row in rows) / seconds


def run(config: WithRayConfig) -> dict[str, Any]:
    """Run every number of actors ``repeats`` times, interleaved."""
    import ray

    cores = len(os.sched_getaffinity(0))
    if max(config.actors) > cores:
        raise InputError(f"actors={config.actors}: there are {cores} cores, and each takes one")
    if config.prompts_per_actor % config.batch:
        raise InputError(
            f"prompts_per_actor={config.prompts_per_actor}: must be a multiple of"
            f" batch={config.batch}"
        )
    environment = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "JAX_PLATFORMS": "cpu"}
    speeds: dict[int, list[float]] = {actors: [] for actors in config.actors}
    options: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": False,
        "runtime_env": {"env_vars": environment},
    }
    for _ in range(config.repeats):
        for actors in config.actors:
            ray.init(num_cpus=max(config.actors), **options)  # anew: with processes of its own
            speeds[actors].append(measure(config, actors))
            ray.shutdown()
    first = speeds[config.actors[0]]
    gains = {
        actors: [rate / base for rate, base in zip(rates, first, strict=True)]
        for actors, rates in speeds.items()
    }
    return {
        "machine": machine(),
        "ray": ray.__version__,
        "config": asdict(config),
        "cases": [
            {
                "actors": actors,
                "tokens_per_second": median(rates),
                "spread": [min(rates), max(rates)],
                "speedup": median(gains[actors]),
                "speedup_spread": [min(gains[actors]), max(gains[actors])],
            }
            for actors, rates in speeds.items()
        ],
    }


def main(config: WithRayConfig) -> None:
    """Print and write the table."""
    results = run(config)
    table = Table(
        "actors",
        "tokens/s",
        "spread",
        "times the first",
        "spread",
        title=f"{config.target}, {config.repeats} runs",
    )
    for case in results["cases"]:
        table.add_row(
            str(case["actors"]),
            f"{case['tokens_per_second']:,.0f}",
            "{:,.0f}-{:,.0f}".format(*case["spread"]),
            f"{case['speedup']:.2f}x",
            "{:.2f}-{:.2f}".format(*case["speedup_spread"]),
        )
    Console(width=120).print(table)
    if config.output:
        Path(config.output).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(WithRayConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
