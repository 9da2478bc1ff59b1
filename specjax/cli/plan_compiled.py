"""``specjax plan --compile``: programs compiled for chips that need not be there, and what they would take."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specjax.chips import Chip
from specjax.cli.plan_options import PlanConfig, find_shape, refuse_unread
from specjax.config import load_yaml
from specjax.errors import InputError
from specjax.models import huggingface
from specjax.planning import abstract, theory
from specjax.planning.compiled import Compiled, Setup, Step, TurnCosts, compile_program, compile_step
from specjax.planning.topologies import find_mesh
from specjax.reports.tables import table_of_numbers
from specjax.sampling import Sampling
from specjax.training.config import TrainConfig
from specjax.training.dry_run import abstract_run
from specjax.tree import Chain, parse_shape

_UNREAD = ("cost", "operations", "draft_cache", "chip", "longest", "plot", "measure", "prompts", "rule", "contexts", "budgets")


def plan_compiled(console: Console, config: PlanConfig) -> None:
    """What decoding, or a step of training, would take on the chips of ``compile``."""
    refuse_unread(config, "with --compile", *_UNREAD)
    if config.train:
        refuse_unread(config, "with --train", "drafter", "draft", "context", "batch", "temperature", "alpha")
        _plan_training(console, config)
    else:
        _plan_decoding(console, config)


def _plan_decoding(console: Console, config: PlanConfig) -> None:
    """Compile plain decoding, and decoding with the drafter, and print what each takes."""
    # What is refused is refused before any compiler is asked for.
    if not config.target:
        raise InputError("target='': name the model to compile, such as llama-3.1-8b")
    names = ["none"] if config.drafter in ("", "none") else ["none", config.drafter]
    if len(names) == 1:
        refuse_unread(config, "without --drafter", "draft", "alpha")
    theory.expected_tokens(config.alpha, 1)
    sampling = Sampling(temperature=config.temperature)
    sampling.rows(1)
    if len(config.batch) != 1:
        raise InputError(f"batch={config.batch}: with --compile give one number of rows, such as --batch 8")
    (batch,), draft = config.batch, parse_shape(config.draft) if config.draft else None
    shape = find_shape("target", config.target)

    mesh, chip = find_mesh(config.compile, *config.mesh)
    target = abstract.abstract_model(shape, mesh)
    setup = Setup(target, mesh, chip, batch, config.context, sampling=sampling)
    drafters = [abstract.abstract_drafter(name, None if name == "none" else draft, target) for name in names]
    steps = []
    for name, drafter in zip(names, drafters, strict=True):
        title = "plain" if name == "none" else name
        if not config.json:
            console.out(f"compiling {title} for {mesh.size} x {chip.name} ...")
        steps.append(compile_step(setup, drafter, title))
    if config.json:
        print(json.dumps({"chip": asdict(chip), "chips": mesh.size, "steps": [_as_json(s, chip, mesh.size) for s in steps]}))
        return
    where = f"{config.target} on {mesh.size} x {chip.name}, {batch} rows, context of {config.context:,} tokens"
    console.print(_memory_table(where, [program for step in steps for program in (step.prefill, step.decode)], chip))
    console.print(_step_table(steps, chip, mesh.size))
    console.print(_loop_table(steps[-1].decode))
    if len(steps) > 1:
        alpha = config.alpha if isinstance(drafters[-1].draft, Chain) else None
        _say_gain(console, steps[0], steps[1], chip, mesh.size, alpha)


def _plan_training(console: Console, config: PlanConfig) -> None:
    """Compile a step of the training that the file ``train`` describes; with ``target`` in place of the file's own."""
    if not Path(config.train).is_file():
        raise InputError(f"train={config.train!r}: no such file")
    training = replace(load_yaml(TrainConfig, config.train), mesh=config.mesh)
    data, model = config.mesh
    if data < 1 or training.data.batch % data:
        raise InputError(
            f"mesh={data} {model}: does not divide the {training.data.batch} rows of data.batch in {config.train!r}"
        )
    target = find_shape("target", config.target) if config.target else None
    if target is None and training.method.target:
        target = huggingface.read_config(huggingface.locate(training.method.target, weights=False))

    mesh, chip = find_mesh(config.compile, *config.mesh)
    placed = None if target is None else abstract.abstract_model(target, mesh, training.compute_dtype)
    run = abstract_run(training, mesh, placed, lambda student: abstract.place_model(student, mesh))
    compiled, _ = compile_program(f"a training step, {training.method.name}", run.lower(), mesh)
    if config.json:
        print(json.dumps({"chip": asdict(chip), "chips": mesh.size, "step": _program_json(compiled)}))
        return
    console.print(_memory_table(f"{config.train} on {mesh.size} x {chip.name}", [compiled], chip))
    exchanged = f"{_counts(compiled)}, {compiled.collective_bytes / 1e6:,.1f} MB"
    console.out(f"A step moves {compiled.bytes / 1e9:,.2f} GB on each chip. Exchanged: {exchanged}.")


def _memory_table(title: str, programs: list[Compiled], chip: Chip) -> Table:
    """What each program needs on one chip."""
    headers = ("program", "compiled s", "given GB", "inner GB", "all GB", f"of {chip.memory / 1e9:.0f} GB")
    table = table_of_numbers(title, *headers, named=True)
    for program in programs:
        memory = program.memory
        table.add_row(
            program.name,
            f"{program.seconds:.0f}",
            f"{memory.arguments / 1e9:.2f}",
            f"{memory.temporaries / 1e9:.2f}",
            f"{memory.together / 1e9:.2f}",
            "fits" if memory.together <= chip.memory else "does not fit",
        )
    return table


def _step_table(steps: list[Step], chip: Chip, chips: int) -> Table:
    table = table_of_numbers("a step, on one chip", "", *(step.drafter for step in steps), named=True)
    limits = [step.limits(chip, chips) for step in steps]
    lines: dict[str, list[str]] = {
        "the target's cache, GB": [f"{step.cache / 1e9:.2f}" for step in steps],
        "moved, GB": [f"{step.decode.bytes / 1e9:.2f}" for step in steps],
        "must be read, GB": [f"{step.floor / 1e9:.2f}" for step in steps],
        "moved / must be read": [f"{step.decode.bytes / step.floor:.2f}" for step in steps],
        "exchanges": [_counts(step.decode) for step in steps],
        "exchanged, MB": [f"{step.decode.collective_bytes / 1e6:.2f}" for step in steps],
        "copies of the cache": [f"{len(step.decode.cache_copies)}" for step in steps],
        "largest new array, MB": [f"{step.decode.largest / 1e6:.2f}" for step in steps],
        "kernels": [f"{step.decode.kernels:,}" for step in steps],
    }
    if any(step.decode.cycles for step in steps):
        lines["cycles by the compiler, M"] = [f"{step.decode.cycles / 1e6:.2f}" for step in steps]
        lines["cycles by bytes, M"] = [f"{1e-6 * step.decode.bytes / chip.bandwidth * chip.clock:.2f}" for step in steps]
    for name in limits[0]:
        lines[f"ms, by {name}"] = [f"{1e3 * limit[name]:.2f}" for limit in limits]
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table


def _loop_table(program: Compiled) -> Table:
    headers = ("turns", "MB a turn", "exchanges", "kernels", "cycles", "most cycles")
    table = table_of_numbers(f"loops of a step, {program.name}", *headers)
    alike: dict[str, TurnCosts] = {}  # a loop in each layer, say: added up
    for turn in program.turns:
        key = repr(replace(turn, turns=0))
        alike[key] = replace(turn, turns=turn.turns + (alike[key].turns if key in alike else 0))
    for turn in alike.values():
        if turn.bytes > 1e5 or turn.kernels > 20:
            most = "; ".join(f"{cycles:,} {kind}" for kind, cycles in list(turn.cycles_by_kind.items())[:3])
            exchanges = str(sum(turn.collectives.values()))
            table.add_row(str(turn.turns), f"{turn.bytes / 1e6:,.1f}", exchanges, f"{turn.kernels:,}", f"{turn.cycles:,}", most)
    table.columns[-1].justify = "left"
    return table


def _say_gain(console: Console, plain: Step, step: Step, chip: Chip, chips: int, alpha: float | None) -> None:
    """How many plain steps a step with the drafter takes, and what chains of that acceptance rate gain."""
    ratios = {"memory, arithmetic and links": step.seconds(chip, chips) / plain.seconds(chip, chips)}
    if plain.decode.cycles:
        ratios["the compiler's cycles"] = step.decode.cycles / plain.decode.cycles
    for by, ratio in ratios.items():
        console.out(f"By {by} a step with {step.drafter} takes {ratio:.2f} plain ones: it gains from so many tokens a step on.")
        if alpha is not None:
            tokens = theory.expected_tokens(alpha, step.depth)
            console.out(
                f"  At alpha = {alpha:g} it makes {tokens:.2f} tokens: {tokens / ratio:.2f} times as fast as plain decoding."
            )


def _counts(program: Compiled) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(program.collectives.items())) or "none"


def _as_json(step: Step, chip: Chip, chips: int) -> dict[str, Any]:
    return {
        "drafter": step.drafter,
        "prefill": _program_json(step.prefill),
        "decode": _program_json(step.decode),
        "must_read_bytes": step.floor,
        "cache_bytes": step.cache,
        "seconds": step.limits(chip, chips),
        "depth": step.depth,
    }


def _program_json(program: Compiled) -> dict[str, Any]:
    totals = {name: getattr(program, name) for name in ("bytes", "collectives", "collective_bytes", "kernels", "cycles")}
    return {name: value for name, value in asdict(program).items() if name != "text"} | {"a_step": totals}
