"""The command ``specjax plan compile-training``: compile a training step for other chips."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from specjax.cli.plan.options import find_model, new_console
from specjax.cli.plan.programs import exchanges_of, memory_table, program_as_json
from specjax.config import load_yaml
from specjax.errors import InputError
from specjax.lowering import abstract
from specjax.lowering.compiled import compile_program
from specjax.lowering.topologies import find_mesh
from specjax.models import config_json, hub
from specjax.training.config import TrainConfig
from specjax.training.dry_run import abstract_run


@dataclass(frozen=True)
class CompileTrainingConfig:
    """Compile a training step for chips that are not here: its memory, and the bytes that it moves.

    It needs specjax[compile], and for h100 specjax[compile-cuda].

    Attributes:
        chips: chips to compile for: h100, or TPUs such as v5e:2x4, v5p:2x2x2, v6e:2x4.
        slices: number of such TPU slices, connected by the network of the data center.
        mesh: number of devices of each mesh axis: data (splits the rows) and model (splits the
            weights).
        train: configuration file of the training, as for train.
        target: the target, instead of that in the configuration: a published model such as
            llama-3.1-8b, a directory or a hub id.
        json: print JSON instead of a table.
    """

    chips: str = ""
    slices: int = 1
    mesh: tuple[int, int] = (1, 1)
    train: str = ""
    target: str = ""
    json: bool = False


def run_compile_training(config: CompileTrainingConfig) -> None:
    """Run ``specjax plan compile-training``."""
    if not Path(config.train).is_file():
        raise InputError(
            f"train={config.train!r}: no such file; give the configuration file of a training"
        )
    training = replace(load_yaml(TrainConfig, config.train), mesh=config.mesh)
    data, model = config.mesh
    if data < 1 or training.data.batch % data:
        raise InputError(
            f"mesh={data} {model}: data must divide the {training.data.batch} rows of data.batch in"
            f" {config.train!r}"
        )
    target = find_model("target", config.target) if config.target else None
    if target is None and training.method.target:
        target = config_json.read_config(hub.open_checkpoint(training.method.target, weights=False))

    mesh, chip = find_mesh(config.chips, *config.mesh, config.slices)
    placed = (
        None if target is None else abstract.abstract_model(target, mesh, training.compute_dtype)
    )
    run = abstract_run(training, mesh, placed, lambda student: abstract.place_model(student, mesh))
    compiled, _ = compile_program(f"a training step, {training.method.name}", run.lower(), mesh)
    if config.json:
        print(
            json.dumps(
                {"chip": asdict(chip), "chips": mesh.size, "step": program_as_json(compiled)}
            )
        )
        return
    console = new_console()
    console.print(memory_table(f"{config.train} on {mesh.size} x {chip.name}", [compiled], chip))
    exchanged = f"{exchanges_of(compiled)}, {compiled.collective_bytes / 1e6:,.1f} MB"
    if config.slices > 1:
        exchanged += f" in a slice, and {compiled.slice_bytes / 1e6:,.1f} MB to other slices"
    console.out(
        f"A step moves {compiled.bytes / 1e9:,.2f} GB on each chip. Exchanged: {exchanged}."
    )
