"""The command ``specjax plan compile``: compile decoding for chips that are not here."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from specjax.chips import Chip
from specjax.cli.plan.options import compute_on_the_cpu, find_model, new_console
from specjax.cli.plan.programs import exchanges_of, memory_table, program_as_json
from specjax.drafts.names import parse_shape
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.lowering import abstract
from specjax.lowering.compiled import Compiled, Setup, Step, TurnCosts, compile_step
from specjax.lowering.topologies import find_mesh
from specjax.models.quantization import schemes
from specjax.planning import theory
from specjax.reports.tables import table_of_numbers
from specjax.sampling import Sampling


@dataclass(frozen=True)
class CompileConfig:
    """Compile prefill and a decoding step, with and without a drafter, for chips that are not here.

    The command prints the memory of the programs, the bytes that they move and exchange, and what
    the drafter should gain. It needs specjax[compile], and for h100 specjax[compile-cuda].

    Attributes:
        chips: chips to compile for: h100, or TPUs such as v5e:2x4, v5p:2x2x2, v6e:2x4.
        slices: number of such TPU slices, connected by the network of the data center.
        mesh: number of devices of each mesh axis: data (splits the rows) and model (splits the
            weights).
        target: the model to generate from: a published model such as llama-3.1-8b, a directory or a
            hub id.
        drafter: its draft model, in the same forms, or a method such as eagle3 or prompt-lookup;
            the default is none.
        draft: shape of the drafts, as in generate; the default is the drafter's own.
        batch: number of rows that are decoded together.
        context: number of tokens in each row's KV cache.
        page: tokens per page, for a paged KV cache as in a server; by default a row's tokens are
            contiguous.
        temperature: sampling temperature; 0 is greedy.
        weights: weights of the target, and of a published draft model: "float", or quantized as in
            generate, such as "int8".
        alpha: acceptance rate, the probability that a token of a chain is accepted, to estimate the
            gain; the default is 0.8.
        json: print JSON instead of tables.
    """

    chips: str = ""
    slices: int = 1
    mesh: tuple[int, int] = (1, 1)
    target: str = ""
    drafter: str = ""
    draft: str = ""
    batch: int = 1
    context: int = 1024
    page: int | None = None
    temperature: float = 0.0
    weights: str = schemes.FLOATS
    alpha: float | None = None
    json: bool = False


_ALPHA = 0.8


def run_compile(config: CompileConfig) -> None:
    """Run ``specjax plan compile``."""
    compute_on_the_cpu()
    # Invalid options are refused before any compiler is loaded.
    if not config.target:
        raise InputError("target='': name the model to compile, such as llama-3.1-8b")
    schemes.check_weights(config.weights, (schemes.FLOATS,))
    names = ["none"] if config.drafter in ("", "none") else ["none", config.drafter]
    for name, value in {"draft": config.draft or None, "alpha": config.alpha}.items():
        if len(names) == 1 and value is not None:
            raise InputError(f"{name}={value}: it needs --drafter; leave it out")
    alpha = _ALPHA if config.alpha is None else config.alpha
    theory.expected_tokens(alpha, 1)
    sampling = Sampling(temperature=config.temperature)
    sampling.rows(1)
    draft = parse_shape(config.draft) if config.draft else None
    shape = find_model("target", config.target)

    mesh, chip = find_mesh(config.chips, *config.mesh, config.slices)
    target = abstract.abstract_model(shape, mesh, weights=config.weights)
    setup = Setup(
        target, mesh, chip, config.batch, config.context, sampling=sampling, page=config.page
    )
    drafters = [
        abstract.abstract_drafter(name, None if name == "none" else draft, target, config.weights)
        for name in names
    ]
    is_chain = isinstance(drafters[-1].draft, Chain)
    if config.alpha is not None and not is_chain:
        raise InputError(
            f"alpha={alpha:g}: it applies to chains, but the draft is a {drafters[-1].draft}; leave"
            " it out"
        )
    console, steps = new_console(), []
    for name, drafter in zip(names, drafters, strict=True):
        title = "plain" if name == "none" else name
        steps.append(compile_step(setup, drafter, title))
    if config.json:
        print(
            json.dumps(
                {
                    "chip": asdict(chip),
                    "chips": mesh.size,
                    "steps": [_as_json(s, chip, mesh.size) for s in steps],
                }
            )
        )
        return
    where = (
        f"{config.target} on {mesh.size} x {chip.name}, {config.batch} rows, context of"
        f" {config.context:,} tokens"
    )
    console.print(
        memory_table(
            where, [program for step in steps for program in (step.prefill, step.decode)], chip
        )
    )
    console.print(_step_table(steps, chip, mesh.size, config.slices))
    console.print(_loop_table(steps[-1].decode))
    if len(steps) > 1:
        _say_gain(console, steps[0], steps[1], chip, mesh.size, alpha if is_chain else None)


def _step_table(steps: list[Step], chip: Chip, chips: int, slices: int) -> Table:
    table = table_of_numbers(
        "a step, on one chip", "", *(step.drafter for step in steps), named=True
    )
    limits = [step.limits(chip, chips) for step in steps]
    has_states = any(step.states for step in steps)
    lines: dict[str, list[str]] = {
        "the target's cache, GB": [f"{step.cache / 1e9:.2f}" for step in steps],
        **(_lines_of_states(steps) if has_states else {}),
        "moved, GB": [f"{step.decode.bytes / 1e9:.2f}" for step in steps],
        "must be read, GB": [f"{step.floor / 1e9:.2f}" for step in steps],
        "moved / must be read": [f"{step.decode.bytes / step.floor:.2f}" for step in steps],
        "exchanges": [exchanges_of(step.decode) for step in steps],
        f"exchanged{' in a slice' * (slices > 1)}, MB": [
            f"{step.decode.collective_bytes / 1e6:.2f}" for step in steps
        ],
        **(
            {"sent to other slices, MB": [f"{step.decode.slice_bytes / 1e6:.2f}" for step in steps]}
            if slices > 1
            else {}
        ),
        f"copies of the cache{' or states' * has_states}": [
            f"{len(step.decode.cache_copies)}" for step in steps
        ],
        "largest new array, MB": [f"{step.decode.largest / 1e6:.2f}" for step in steps],
        "kernels": [f"{step.decode.kernels:,}" for step in steps],
    }
    if any(step.decode.cycles for step in steps):
        lines["cycles by the compiler, M"] = [f"{step.decode.cycles / 1e6:.2f}" for step in steps]
        lines["cycles by bytes, M"] = [
            f"{1e-6 * step.decode.bytes / chip.bandwidth * chip.clock:.2f}" for step in steps
        ]
    for name in limits[0]:
        lines[f"ms, by {name}"] = [f"{1e3 * limit[name]:.2f}" for limit in limits]
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table


def _lines_of_states(steps: list[Step]) -> dict[str, list[str]]:
    """Return the lines of a target with layers that keep a state.

    They have the size of its states, and of the entries that it stores of a draft instead of a
    state per token.
    """
    return {
        "its states, MB": [f"{step.states / 1e6:.1f}" for step in steps],
        "entries of a draft, MB": [f"{step.drafted / 1e6:.2f}" for step in steps],
    }


def _loop_table(program: Compiled) -> Table:
    headers = ("turns", "MB a turn", "exchanges", "kernels", "cycles", "most cycles")
    table = table_of_numbers(f"loops of a step, {program.name}", *headers)
    alike: dict[str, TurnCosts] = {}  # equal loops, such as one per layer, are added up
    for turn in program.turns:
        key = repr(replace(turn, turns=0))
        alike[key] = replace(turn, turns=turn.turns + (alike[key].turns if key in alike else 0))
    for turn in alike.values():
        if turn.bytes > 1e5 or turn.kernels > 20:
            top = "; ".join(
                f"{cycles:,} {kind}" for kind, cycles in list(turn.cycles_by_kind.items())[:3]
            )
            exchanges = str(sum(turn.collectives.values()))
            table.add_row(
                str(turn.turns),
                f"{turn.bytes / 1e6:,.1f}",
                exchanges,
                f"{turn.kernels:,}",
                f"{turn.cycles:,}",
                top,
            )
    table.columns[-1].justify = "left"
    return table


def _say_gain(
    console: Console, plain: Step, step: Step, chip: Chip, chips: int, alpha: float | None
) -> None:
    """Print how many plain steps a step with the drafter takes, and what chains gain."""
    ratios = {
        "memory, arithmetic and links": step.seconds(chip, chips) / plain.seconds(chip, chips)
    }
    if plain.decode.cycles:
        ratios["the compiler's cycles"] = step.decode.cycles / plain.decode.cycles
    for by, ratio in ratios.items():
        console.out(
            f"By {by}, a step with {step.drafter} takes {ratio:.2f} plain steps: it gains if it"
            " emits more tokens than that."
        )
        if alpha is not None:
            tokens = theory.expected_tokens(alpha, step.depth)
            console.out(
                f"  At alpha = {alpha:g} it emits {tokens:.2f} tokens: {tokens / ratio:.2f} times"
                " as fast as plain decoding."
            )


def _as_json(step: Step, chip: Chip, chips: int) -> dict[str, Any]:
    return {
        "drafter": step.drafter,
        "prefill": program_as_json(step.prefill),
        "decode": program_as_json(step.decode),
        "must_read_bytes": step.floor,
        "cache_bytes": step.cache,
        "state_bytes": step.states,
        "drafted_bytes": step.drafted,
        "seconds": step.limits(chip, chips),
        "depth": step.depth,
    }
