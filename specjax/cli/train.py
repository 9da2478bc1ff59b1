"""The command ``specjax train``: train a model or a drafter from a configuration file."""

import jax
from rich.console import Console
from rich.table import Table

from specjax.errors import InputError
from specjax.progress import waiting
from specjax.training.config import TrainConfig


def run_train(config: TrainConfig) -> None:
    """Run ``specjax train``."""
    # The defaults train a model on Python's own source for hours, which is rarely intended.
    if config == TrainConfig():
        raise InputError(
            "train: no configuration; give --config FILE.yaml with a method, its target and the"
            " data (see the folder configs of the repository), or give them as options (see specjax"
            " train --help)"
        )
    if config.dry_run:
        _show_needs(config)
        return
    from specjax.training.loop import train
    from specjax.training.memory import peak_memory

    print(f"trained: {train(config)}")
    peaks = ", ".join(f"{name} {value:.2f}" for name, value in peak_memory().items())
    print(f"peaks of memory: {peaks}")


def _show_needs(config: TrainConfig) -> None:
    from specjax.training.dry_run import needs

    with waiting("compiling a step to measure its memory"):
        needed = needs(config)
    console = Console()
    table = Table(
        "parameter",
        "shape",
        "",
        title=f"what is trained: {config.method.name}, {needed.parameters:,} parameters",
    )
    for name, shape in needed.student.items():
        table.add_row(name, " x ".join(map(str, shape)), "frozen" if name in needed.frozen else "")
    console.print(table)
    if needed.target_parameters:
        console.print(
            f"target: {config.method.target}, {needed.target_parameters:,} parameters, in"
            f" {config.compute_dtype}"
        )
    console.print(
        "a batch: "
        + "; ".join(f"{name} {list(shape)}" for name, shape in needed.batch.items() if shape)
    )
    for title, parts in (("memory, on one device", needed.memory), ("disk", needed.disk)):
        table = Table(title, "MB")
        table.columns[1].justify = "right"
        for name, size in {**parts, "together": sum(parts.values())}.items():
            table.add_row(name, f"{size / 1e6:,.1f}")
        console.print(table)
    rows, width, steps = config.data.batch, config.data.window, config.steps
    console.print(
        f"{steps:,} steps of {rows} x {width} tokens, {steps * rows * width:,} in total. Nothing"
        " was trained."
    )
    if jax.default_backend() == "cpu":
        console.print(
            "An accelerator may need several times less temporary memory: see specjax plan"
            " compile-training."
        )
