"""The command ``specjax plan compile-training``: compile a training for other chips."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from specjax.cli.plan.options import (
    compute_on_the_cpu,
    find_model,
    is_checkpoint,
    new_console,
)
from specjax.cli.plan.programs import exchanges_of, memory_table, program_as_json
from specjax.config import load_yaml
from specjax.errors import InputError
from specjax.lowering import abstract
from specjax.lowering.compiled import compile_program
from specjax.lowering.topologies import find_mesh
from specjax.models import hub
from specjax.training.config import TrainConfig
from specjax.training.dry_run import abstract_run


@dataclass(frozen=True)
class CompileTrainingConfig:
    """Compile a training for chips that are not here: its memory, and the bytes that a step moves.

    A step and an evaluation are compiled. The memory of a run is the larger one of the two.

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
    compute_on_the_cpu()
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
    mesh, chip = find_mesh(config.chips, *config.mesh, config.slices)
    target, dtype = config.target or training.method.target, training.compute_dtype
    if not target:
        placed = None
    elif is_checkpoint(target):
        # Quantized as it is stored, because a run would load it so.
        files = hub.open_checkpoint(target, weights=False)
        placed = abstract.stored_model(files, mesh, dtype)
    else:
        placed = abstract.abstract_model(find_model("target", target), mesh, dtype)
    run = abstract_run(training, mesh, placed, lambda student: abstract.place_model(student, mesh))
    name = training.method.name
    compiled, _ = compile_program(f"a training step, {name}", run.lower(), mesh)
    evaluation, _ = compile_program(f"an evaluation, {name}", run.lower_evaluation(), mesh)
    # The optimizer's state stays in memory during an evaluation.
    arguments = evaluation.memory.arguments + abstract.bytes_of_one(run.state.optimizer)
    evaluation = replace(evaluation, memory=replace(evaluation.memory, arguments=arguments))
    peak = max(program.memory.together for program in (compiled, evaluation))
    if config.json:
        print(
            json.dumps(
                {
                    "chip": asdict(chip),
                    "chips": mesh.size,
                    "step": program_as_json(compiled),
                    "evaluation": program_as_json(evaluation),
                    "peak_bytes": peak,
                }
            )
        )
        return
    console = new_console()
    title = f"{config.train} on {mesh.size} x {chip.name}"
    console.print(memory_table(title, [compiled, evaluation], chip))
    console.out(
        f"A run takes at most {peak / 1e9:,.2f} GB of a chip's {chip.memory / 1e9:.0f}:"
        f" it {'fits' if peak <= chip.memory else 'does not fit'}."
    )
    exchanged = f"{exchanges_of(compiled)}, {compiled.collective_bytes / 1e6:,.1f} MB"
    if config.slices > 1:
        exchanged += f" in a slice, and {compiled.slice_bytes / 1e6:,.1f} MB to other slices"
    console.out(
        f"A step moves {compiled.bytes / 1e9:,.2f} GB on each chip. Exchanged: {exchanged}."
    )
