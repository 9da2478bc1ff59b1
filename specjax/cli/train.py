"""The command ``specjax train``: train a model or a drafter from a configuration file."""

import math
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from specjax.cli import interrupts
from specjax.errors import InputError
from specjax.lowering import abstract
from specjax.models import hub
from specjax.progress import say, waiting
from specjax.sharding import make_mesh
from specjax.training.config import TrainConfig

if TYPE_CHECKING:
    from specjax.training.stopping import StopRequest


def run_train(config: TrainConfig) -> int | None:
    """Run ``specjax train``. If a signal stopped it, return the status of that signal."""
    # The defaults train a model on Python's own source for hours, which is rarely intended.
    if config == TrainConfig():
        raise InputError(
            "train: no configuration; give --config FILE.yaml with a method, its target and the"
            " data (see the folder configs of the repository), or give them as options (see specjax"
            " train --help)"
        )
    if config.dry_run:
        _show_needs(config)
        return None
    from specjax.training.loop import train
    from specjax.training.memory import peak_memory
    from specjax.training.stopping import StopRequest

    stop = StopRequest()
    with interrupts.offering(lambda number: _heed(stop, number)):
        best = train(config, stop)
    if stop.stopped_after is not None:
        print(
            f"specjax: {interrupts.word_of(stop.number)} after step {stop.stopped_after:,}, which"
            " is saved; the same command continues the run",
            file=sys.stderr,
            flush=True,
        )
        return 128 + stop.number
    print(f"trained: {best}")
    peaks = ", ".join(f"{name} {value:.2f}" for name, value in peak_memory().items())
    print(f"peaks of memory: {peaks}")
    return None


def _heed(stop: "StopRequest", number: int) -> bool:
    """Let a signal stop the training after its running step. Return False if it ends at once."""
    is_first = not stop.number
    if not stop.request(number):
        return False
    if is_first:
        # In a thread, because the main thread may hold a lock that printing needs.
        line = (
            f"{interrupts.word_of(number)}: the running step is finished and saved; a second signal"
            " ends the run at once"
        )
        threading.Thread(target=say, args=(line,), daemon=True).start()
    return True


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
