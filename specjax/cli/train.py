"""``specjax train``: a model or a drafter from a configuration file."""

import jax
from rich.console import Console
from rich.table import Table

from specjax.errors import InputError
from specjax.progress import waiting
from specjax.training.config import TrainConfig


def run_train(config: TrainConfig) -> None:
    """``specjax train``."""
    if config == TrainConfig():  # it takes hours, and trains a model on Python's own source, which few mean
        raise InputError(
            "train: nothing says what to train; give --config FILE.yaml, which names a method, its target and the data (as "
            "those in the folder configs of the repository do), or these as options, which specjax train --help lists"
        )
    if config.dry_run:
        _show_needs(config)
        return
    from specjax.training.loop import train

    print(f"trained: {train(config)}")


def _show_needs(config: TrainConfig) -> None:
    from specjax.training.dry_run import needs

    with waiting("compiling a step, to see what it needs"):
        found = needs(config)
    console = Console()
    table = Table("parameter", "shape", "", title=f"what is trained: {config.method.name}, {found.parameters:,} parameters")
    for name, shape in found.student.items():
        table.add_row(name, " x ".join(map(str, shape)), "frozen" if name in found.frozen else "")
    console.print(table)
    if found.target_parameters:
        console.print(f"target: {config.method.target}, {found.target_parameters:,} parameters, in {config.compute_dtype}")
    console.print("a batch: " + "; ".join(f"{name} {list(shape)}" for name, shape in found.batch.items() if shape))
    for title, parts in (("memory, on one device", found.memory), ("disk", found.disk)):
        table = Table(title, "MB")
        table.columns[1].justify = "right"
        for name, size in {**parts, "together": sum(parts.values())}.items():
            table.add_row(name, f"{size / 1e6:,.1f}")
        console.print(table)
    rows, width, steps = config.data.batch, config.data.window, config.steps
    console.print(f"{steps:,} steps of {rows} x {width} tokens, {steps * rows * width:,} in all. Nothing was trained.")
    if jax.default_backend() == "cpu":
        console.print(
            "An accelerator's inner values can be several times smaller: specjax plan compile-training asks its compiler."
        )
