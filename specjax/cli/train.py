"""The command ``specjax train``: train a model or a drafter from a configuration file."""

import math
from contextlib import suppress
from functools import partial

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from specjax.errors import InputError
from specjax.lowering import abstract
from specjax.models import hub
from specjax.progress import waiting
from specjax.sharding import make_mesh
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


def _mesh_of(config: TrainConfig) -> Mesh | None:
    """Return the mesh of a dry run; None for one device, or if too few devices can be had.

    If the accelerators here are too few, the devices are CPUs, of which JAX can simulate any
    number.
    """
    count = math.prod(config.mesh)
    if config.mesh == (1, 1):
        return None
    if count > 1:
        with suppress(RuntimeError):  # the number of devices is already fixed
            jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices() if len(jax.devices()) >= count else jax.devices("cpu")
    return make_mesh(*config.mesh, devices) if len(devices) >= count else None


def _show_needs(config: TrainConfig) -> None:
    from specjax.training.dry_run import needs

    mesh = _mesh_of(config)
    target, place = None, lambda student: student
    if mesh is not None:
        if config.method.target:
            files = hub.open_checkpoint(config.method.target, weights=False)
            target = abstract.stored_model(files, mesh, config.compute_dtype)
        place = partial(abstract.place_model, mesh=mesh)
    with waiting("compiling a step and an evaluation to measure their memory"):
        needed = needs(config, mesh, target, place)
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
    backend = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    devices = "on one device" if needed.devices == 1 else f"on each of {needed.devices} devices"
    tables = {
        f"memory, {devices}, as compiled for {backend}": {
            **needed.memory,
            **needed.inner,
            "at most": needed.peak,
        },
        "disk": {**needed.disk, "together": sum(needed.disk.values())},
    }
    for title, parts in tables.items():
        table = Table(title, "MB")
        table.columns[1].justify = "right"
        for name, size in parts.items():
            table.add_row(name, f"{size / 1e6:,.1f}")
        console.print(table)
    if needed.devices != math.prod(config.mesh):
        console.print(
            f"mesh={list(config.mesh)}: there are too few devices here, so this is for one that has"
            " all of it."
        )
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
