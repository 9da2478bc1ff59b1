"""What speculation should gain before anything runs: a table and a picture, from the closed forms or from a chip's roofline."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from specjax import pipeline, text
from specjax.chips import find_chip
from specjax.cli.plan_compiled import Request, run_compiled, run_compiled_training, table_of_numbers
from specjax.drafters import CompressedCache, check_vocabulary
from specjax.errors import InputError
from specjax.models import huggingface
from specjax.models.config import ModelConfig
from specjax.models.shapes import PUBLISHED, published
from specjax.planning import roofline, theory
from specjax.planning.choice import Comparison, compare_drafts, measure_acceptance
from specjax.planning.contexts import TRIAL_TOKENS, MeasuredContexts, measure_contexts
from specjax.reports import pictures
from specjax.reports.speedups import draw_by_batch
from specjax.sampling import Rule, Sampling
from specjax.tree import Chain, StaticTree, parse_shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NEARBY = (0.1, 0.0, -0.1, -0.2)  # acceptance rates that a picture shows beside the given one, as differences from it
_MOST_ROWS, _LONGEST_CHAIN = 2**20, 256


@dataclass(frozen=True)
class PlanConfig:
    """Reckon what speculation should gain: give --cost, or --target and --drafter for the roofline of a chip, or with --measure
    for this machine: which chain or tree is fastest, from measured times and acceptance.

    Attributes:
        alpha: acceptance rate, the chance that a drafted token is accepted.
        cost: time of a drafting step over the time of a target forward (c).
        operations: arithmetic operations of the drafter a token over the target's (c-hat); by default the cost.
        target: instead of a cost, the model to generate from: a published shape such as llama-3.1-8b, a directory or a hub id.
        drafter: its draft model, named likewise; "self" is the target itself with a draft cache.
        draft_cache: entries that the drafter keeps of a row's cache; by default all.
        chip: the accelerator that target and drafter share.
        batch: rows decoded together; the table has a line for each number given.
        context: tokens in each row's cache.
        longest: longest chain to look at, in tokens; with measure at most 8.
        plot: a picture to write: .png, .pdf or .svg.
        measure: run target and drafter here on the prompts, and compare chains with trees.
        prompts: with measure, a file with one prompt a line (plain, or JSON with "prompt" or "text"); 32 are read.
        temperature: with measure, of the generation; 0 is greedy.
        rule: with measure, as in generate.
        contexts: with measure and a compressed cache (--drafter streaming or snapkv): speed-up against rows for each of these
            numbers of tokens. The prompts must be as long as the longest.
        budgets: with contexts, numbers of slots of the drafter's cache to choose from.
        compile: chips to compile for, which need not be here: h100, or TPUs such as v5e:2x4, v5p:2x2x2, v6e:2x4. Needs
            specjax[compile], and for h100 specjax[compile-cuda].
        mesh: with compile, devices by axis: data (splits the rows) and model (splits the weights).
        draft: with compile, shape of the drafts, as in generate; by default the drafter's own.
        train: with compile, a configuration of a training: one of its steps is compiled.
        json: with compile, print JSON and no tables.
    """

    alpha: float = 0.8
    cost: float | None = None
    operations: float | None = None
    target: str = ""
    drafter: str = ""
    draft_cache: int | None = None
    chip: str = "h100"
    batch: tuple[int, ...] = (1, 4, 16, 64)
    context: int = 1024
    longest: int = roofline.LONGEST
    plot: str = ""
    measure: bool = False
    prompts: str = ""
    temperature: float = 0.0
    rule: Rule | None = None
    contexts: tuple[int, ...] = ()
    budgets: tuple[int, ...] = (128, 256, 512)
    compile: str = ""
    mesh: tuple[int, int] = (1, 1)
    draft: str = ""
    train: str = ""
    json: bool = False


def run_plan(config: PlanConfig) -> None:
    """``specjax plan``."""
    console = Console(highlight=False, markup=False, emoji=False)
    if config.compile:
        _plan_compiled(console, config)
        return
    _check_options(config)
    if config.measure and config.contexts:
        _plan_contexts(console, config)
    elif config.measure:
        _plan_here(console, config)
    elif config.cost is not None:
        _plan_cost(console, config, config.cost)
    else:
        _plan_models(console, config)
    if config.plot:
        console.out(f"picture: {config.plot}")


def _check_options(config: PlanConfig) -> None:
    """Refuse what cannot be used, or would not be read, before any model is looked up."""
    _refuse_unread(config, "without --compile", "mesh", "draft", "train", "json")
    if config.measure:
        _refuse_unread(config, "with --measure", "alpha", "chip", "context", "cost", "draft_cache")
    else:
        _refuse_unread(config, "without --measure", "prompts", "temperature", "rule", "contexts")
    if not config.contexts:
        _refuse_unread(config, "without --contexts", "budgets")
    if min(config.batch, default=0) < 1:
        raise InputError(f"batch={min(config.batch, default=())}: give at least one number of rows, each at least 1")
    if max(config.batch) > _MOST_ROWS:
        raise InputError(f"batch={max(config.batch)}: give at most {_MOST_ROWS} rows")
    find_chip(config.chip)
    if not 1 <= config.longest <= _LONGEST_CHAIN:
        raise InputError(
            f"longest={config.longest}: the longest chain to look at has at least 1 token and at most {_LONGEST_CHAIN}"
        )
    if (config.cost is None) == (not config.target):
        raise InputError("cost: give either --cost C, or --target MODEL and --drafter MODEL to have it reckoned")
    for name in ("operations",) if config.target else ("drafter", "draft_cache"):
        if (value := getattr(config, name)) not in (None, ""):
            partner = "--cost" if config.target else "--target"
            raise InputError(f"{name}={value}: goes with {partner}, which is not given; leave it out")
    if config.plot:
        pictures.check_path("plot", config.plot)


def _refuse_unread(config: PlanConfig, when: str, *names: str) -> None:
    """Refuse those of the named options that were given and would not be read."""
    for name in names:
        if (value := getattr(config, name)) != getattr(PlanConfig, name):
            raise InputError(f"{name}={value}: is not read {when}; leave it out")


# --- compiled for chips that need not be here ------------------------------------------------------------------------


def _plan_compiled(console: Console, config: PlanConfig) -> None:
    """What decoding, or a step of training, would take on the chips of ``compile``."""
    others = (
        "cost",
        "operations",
        "draft_cache",
        "chip",
        "longest",
        "plot",
        "measure",
        "prompts",
        "rule",
        "contexts",
        "budgets",
    )
    _refuse_unread(config, "with --compile", *others)
    if config.train:
        _refuse_unread(config, "with --train", "drafter", "draft", "context", "batch", "temperature", "alpha")
        target = _find_shape("target", config.target) if config.target else None
        run_compiled_training(console, config.compile, config.mesh, config.train, target, config.json)
        return
    if not config.target:
        raise InputError("target='': name the model to compile, such as llama-3.1-8b")
    if config.drafter in ("", "none"):
        _refuse_unread(config, "without --drafter", "draft", "alpha")
    theory.expected_tokens(config.alpha, 1)  # refuses what is out of range before anything is compiled
    Sampling(temperature=config.temperature).rows(1)
    if len(config.batch) != 1:
        raise InputError(f"batch={config.batch}: with --compile give one number of rows, such as --batch 8")
    request = Request(
        topology=config.compile,
        mesh=config.mesh,
        target=_find_shape("target", config.target),
        target_name=config.target,
        drafter=config.drafter,
        draft=parse_shape(config.draft) if config.draft else None,
        batch=config.batch[0],
        context=config.context,
        alpha=config.alpha,
        temperature=config.temperature,
        json=config.json,
    )
    run_compiled(console, request)


# --- from a cost: closed forms ---------------------------------------------------------------------------------------


def _plan_cost(console: Console, config: PlanConfig, cost: float) -> None:
    best = theory.best_gamma(config.alpha, cost, config.longest)
    console.print(_cost_table(config, cost, best))
    if best.gamma:
        console.out(f"Best: chains of {best.gamma}, {best.factor:.2f} times as fast as plain decoding.")
    else:
        console.out(f"Speculation does not pay, plain decoding is best: alpha = {config.alpha:g} is not above c = {cost:g}.")
    _print_limit(console, config, best.gamma)
    if config.plot:
        pictures.save(_draw_cost(config, cost), "plot", Path(config.plot))


def _cost_table(config: PlanConfig, cost: float, best: theory.Choice) -> Table:
    """For each chain length: expected tokens, speed-up, operations and reads of the target; the best is marked."""
    alpha, operations = config.alpha, cost if config.operations is None else config.operations
    title = f"alpha = {alpha:g}, c = {cost:g}, c-hat = {operations:g}"
    table = table_of_numbers(title, "gamma", "tokens a step", "speed-up", "operations", "target reads", "")
    table.caption = "operations, target reads: a token, over plain decoding's"
    for gamma in range(1, config.longest + 1):
        table.add_row(
            str(gamma),
            f"{theory.expected_tokens(alpha, gamma):.2f}",
            f"{theory.walltime_factor(alpha, gamma, cost):.2f}x",
            f"{theory.operations_factor(alpha, gamma, operations):.2f}x",
            f"{1 / theory.memory_factor(alpha, gamma):.2f}x",
            "best" if gamma == best.gamma else "",
            style="bold" if gamma == best.gamma else None,
        )
    return table


# --- from two models: a roofline -------------------------------------------------------------------------------------


def _plan_models(console: Console, config: PlanConfig) -> None:
    pair = _load_pair(config)
    best = {rows: roofline.best_gamma(pair, rows, config.context, config.alpha, config.longest) for rows in config.batch}
    console.print(_models_table(config, pair, best))
    if plain := [f"{rows}" for rows, choice in best.items() if choice.gamma == 0]:
        console.out(f"Speculation does not pay with {', '.join(plain)} rows: plain decoding is best there.")
    _print_limit(console, config, max(choice.gamma for choice in best.values()))
    console.out("The peaks of arithmetic and bandwidth are never reached: speed-ups are upper bounds.")
    if config.plot:
        pictures.save(_draw_models(config, pair), "plot", Path(config.plot))


def _load_pair(config: PlanConfig) -> roofline.Pair:
    """The target and the drafter as shapes, on the chip; reads at most their config.json."""
    if not config.drafter:
        raise InputError("drafter='': give a draft model, or \"self\" with --draft-cache ENTRIES")
    if config.drafter == "self" and config.draft_cache is None:
        raise InputError("drafter='self': a target that drafts with its whole cache gains nothing; give --draft-cache ENTRIES")
    target = _find_shape("target", config.target)
    drafter = None if config.drafter == "self" else _find_shape("drafter", config.drafter)
    if drafter is not None:
        check_vocabulary(drafter, target)
    pair = roofline.Pair(target, find_chip(config.chip), drafter, config.draft_cache)
    if config.context > pair.longest_context:
        raise InputError(f"context={config.context}: the models have positions for {pair.longest_context} tokens")
    return pair


def _find_shape(argument: str, name: str) -> ModelConfig:
    """A published shape of that name, or else what the config.json of the directory or hub id says."""
    elsewhere = "/" in name or os.path.isdir(os.path.expanduser(name))
    if elsewhere and name.lower() not in PUBLISHED:
        return huggingface.read_config(huggingface.locate(name, weights=False))
    try:
        return published(name)
    except InputError as error:
        raise InputError(f"{argument}: {error}; or give a directory or a hub id owner/name") from None


def _models_table(config: PlanConfig, pair: roofline.Pair, best: dict[int, theory.Choice]) -> Table:
    """For each number of rows: the three times, the best chain, its speed-up, where speculation starts to pay, and memory."""
    room = f"{pair.chip.memory / 1e9:.0f}"
    table = table_of_numbers(
        _title(config, pair), "rows", "T_T ms", "T_D ms", "T_V ms", "gamma", "speed-up", "pays from", "memory GB"
    )
    table.caption = (
        "T_T: a decoding step. T_D: a drafting step. T_V: a verification of the best chain. pays from: the smallest context, "
        f"in tokens, at which speculation pays. The chip has {room} GB."
    )
    for rows, choice in best.items():
        break_even = roofline.break_even_context(pair, rows, config.alpha, config.longest)
        memory = f"{pair.memory(rows, config.context) / 1e9:,.1f}"
        table.add_row(
            str(rows),
            f"{1e3 * pair.target_time(rows, config.context):.2f}",
            f"{1e3 * pair.draft_time(rows, config.context):.2f}",
            f"{1e3 * pair.verify_time(rows, config.context, choice.gamma):.2f}" if choice.gamma else "-",
            str(choice.gamma) if choice.gamma else "plain",
            f"{choice.factor:.2f}x",
            "never" if break_even is None else f"{break_even:,}",
            memory if pair.fits(rows, config.context) else f"{memory} > {room}",
        )
    return table


def _title(config: PlanConfig, pair: roofline.Pair) -> str:
    cache = "" if config.draft_cache is None else f" with {config.draft_cache:,} cache entries"
    place = f"{pair.chip.name}, context of {config.context:,} tokens"
    return f"{config.target}, drafter {config.drafter}{cache}; {place}; alpha = {config.alpha:g}"


def _print_limit(console: Console, config: PlanConfig, gamma: int) -> None:
    if gamma == config.longest:
        console.out(f"A chain of more than {gamma} may be better still: raise --longest.")


# --- from two models on this machine ---------------------------------------------------------------------------------


_SHOWN, _PROMPTS, _LONGEST = 8, 32, 8
_LONG_PROMPTS = 4


def _plan_here(console: Console, config: PlanConfig) -> None:
    """For each number of rows: the fastest chains and trees on the prompts."""
    if not config.drafter or not config.prompts:
        raise InputError("measure: give --target, --drafter and --prompts FILE")
    prompts = text.read_prompts("prompts", config.prompts)
    options = pipeline.settings(temperature=config.temperature, rule=config.rule)
    options.sampling.rows(1)  # refuses what is out of range before any weights are read
    longest = min(config.longest, _LONGEST)
    pair = pipeline.load(config.target, config.drafter, draft=Chain(longest))
    target, drafter = pair.target, pair.drafter
    if drafter is None:
        raise InputError("drafter='none': there is nothing to measure; name a drafter")
    prompts_read = text.pad([pair.encode(prompt) for prompt in prompts[:_PROMPTS]])
    compared = {}
    options = replace(options, max_new_tokens=target.config.max_positions)  # trials may take all there is
    acceptance = measure_acceptance(target, drafter, *prompts_read, options=options, longest=longest)
    for rows in config.batch:
        compared[rows] = compare_drafts(
            target, drafter, *prompts_read, batch=rows, options=options, longest=longest, acceptance=acceptance
        )
        console.print(_here_table(config, rows, compared[rows]))
        best = compared[rows].best
        console.out(f"Best with {rows} row{'s' * (rows > 1)}: {best.draft or 'plain decoding'}, expected {best.speedup:.2f}x.")
        if isinstance(best.draft, StaticTree):
            console.out(f"  StaticTree({best.draft.choices})")
    if config.plot:
        pictures.save(_draw_here(config, compared), "plot", Path(config.plot))


def _plan_contexts(console: Console, config: PlanConfig) -> None:
    """For each context and number of rows: the budget and the chain that gain most."""
    if not config.drafter or not config.prompts:
        raise InputError("contexts: give --target, --drafter and --prompts FILE")
    if min(config.contexts) < 2 or min(config.budgets, default=0) < 1:
        raise InputError(
            f"contexts={config.contexts}, budgets={config.budgets}: give numbers of tokens, and at least one budget"
        )
    prompts = text.read_prompts("prompts", config.prompts)
    options = pipeline.settings(temperature=config.temperature, rule=config.rule)
    longest = min(config.longest, _LONGEST)
    pair = pipeline.load(config.target, config.drafter, draft=Chain(longest))
    if not isinstance(pair.drafter, CompressedCache):
        raise InputError(f"drafter={config.drafter!r}: contexts are for a compressed cache: give streaming or snapkv")
    texts = [ids for prompt in prompts if len(ids := pair.encode(prompt)) >= max(config.contexts)][:_LONG_PROMPTS]
    if not texts:
        raise InputError(f"prompts={config.prompts!r}: none has {max(config.contexts)} tokens, the longest of --contexts")
    measured = measure_contexts(
        pair.target,
        pair.drafter,
        np.array([ids[: max(config.contexts)] for ids in texts]),
        contexts=config.contexts,
        batches=config.batch,
        budgets=config.budgets,
        longest=longest,
        options=replace(options, max_new_tokens=TRIAL_TOKENS),
    )
    console.print(contexts_table(f"{config.target}, drafter {config.drafter}; temperature {config.temperature:g}", measured))
    critical = measured.critical_context()
    if critical is not None:
        console.out(f"Critical context: about {critical:,.0f} tokens; beyond it more rows gain more.")
    if config.plot:
        best = {c: {b: measured.gains(c, b)[0].speedup for b in measured.batches} for c in measured.contexts}
        figure = draw_by_batch(f"{config.target}, drafter {config.drafter}", best, critical=critical)
        pictures.save(figure, "plot", Path(config.plot))


def contexts_table(title: str, measured: MeasuredContexts) -> Table:
    """The best gain of each context and number of rows, with the times that it comes from."""
    table = table_of_numbers(
        title, "context", "rows", "T_T ms", "budget", "gamma", "T_D ms", "T_V ms", "tokens a step", "speed-up"
    )
    for context in measured.contexts:
        for batch in measured.batches:
            best, costs = measured.gains(context, batch)[0], measured.costs[context, batch]
            table.add_row(
                f"{context:,}",
                str(batch),
                f"{1e3 * costs.target:.1f}",
                str(best.budget),
                str(best.gamma),
                f"{1e3 * measured.draft[best.budget, batch]:.1f}",
                f"{1e3 * costs.verification(best.gamma + 1):.1f}",
                f"{best.tokens:.2f}",
                f"{best.speedup:.2f}x",
            )
    table.caption = (
        "T_T: a step of plain decoding. T_D: a drafted token. T_V: a verification. Each with its best budget and chain."
    )
    return table


def _here_table(config: PlanConfig, rows: int, found: Comparison) -> Table:
    """The fastest candidates, the fastest chain, and plain decoding."""
    title = f"{config.target}, drafter {config.drafter}; {rows} row{'s' * (rows > 1)}, temperature {config.temperature:g}"
    table = table_of_numbers(title, "draft", "tokens a step", "step ms", "speed-up", "")
    table.columns[0].justify = "left"
    chains = [candidate for candidate in found.candidates if isinstance(candidate.draft, Chain)]
    plain = [candidate for candidate in found.candidates if candidate.draft is None]
    shown = dict.fromkeys([*found.candidates[:_SHOWN], *chains[:1], *plain])
    for candidate in sorted(shown, key=lambda candidate: -candidate.speedup):
        table.add_row(
            str(candidate.draft or "plain decoding"),
            f"{candidate.tokens:.2f}",
            f"{1e3 * candidate.seconds:.2f}",
            f"{candidate.speedup:.2f}x",
            "best" if candidate is found.best else "",
            style="bold" if candidate is found.best else None,
        )
    verify = ", ".join(f"{n}: {1e3 * seconds:.2f}" for n, seconds in found.verify.items())
    draft = ", ".join(f"{n}: {1e3 * seconds:.2f}" for n, seconds in found.draft.items())
    ranks = ", ".join(f"{chance:.2f}" for chance in found.acceptance.by_rank)
    table.caption = f"T_V ms by nodes: {verify}. T_D ms a level by nodes read: {draft}." + (
        f" Accepted by rank: {ranks}." if ranks else ""
    )
    return table


# --- pictures --------------------------------------------------------------------------------------------------------


def _draw_cost(config: PlanConfig, cost: float) -> "Figure":
    """Speed-up against chain length, for acceptance rates around the given one."""
    figure, (axes,) = _figure(1, f"drafting step over target forward c = {cost:g}")
    gammas = range(config.longest + 1)
    alphas = [alpha for alpha in (round(config.alpha + step, 6) for step in _NEARBY) if 0 <= alpha <= 1]
    for alpha, colour in zip(alphas, _colours(len(alphas)), strict=True):
        factors = [theory.walltime_factor(alpha, gamma, cost) for gamma in gammas]
        width = 2.5 if alpha == round(config.alpha, 6) else 1.2
        axes.plot(gammas, factors, "o-", color=colour, linewidth=width, markersize=2 * width, label=f"alpha = {alpha:g}")
    _finish(axes, "chain length gamma (tokens)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    return figure


def _draw_models(config: PlanConfig, pair: roofline.Pair) -> "Figure":
    """Speed-up against chain length, and that of the best chain against context; a line for each number of rows."""
    figure, (left, right) = _figure(2, _title(config, pair))
    last = pair.longest_context
    contexts = np.unique(np.geomspace(max(1, last // 1024), last, 60).round().astype(int)).tolist()
    gammas = range(config.longest + 1)
    for rows, colour in zip(config.batch, _colours(len(config.batch)), strict=True):
        by_gamma = [roofline.chain_speedup(pair, rows, config.context, gamma, config.alpha) for gamma in gammas]
        left.plot(gammas, by_gamma, "o-", color=colour, markersize=3, label=f"{rows} row{'s' * (rows > 1)}")
        best = [roofline.best_gamma(pair, rows, s, config.alpha, config.longest, shortest=1).factor for s in contexts]
        held = sum(pair.fits(rows, s) for s in contexts)  # memory grows with context
        right.plot(contexts[:held], best[:held], color=colour)
        right.plot(contexts[max(held - 1, 0) :], best[max(held - 1, 0) :], ":", color=colour)
    left.plot([], [], ":", color="grey", label="beyond the memory")
    _finish(left, "chain length gamma (tokens)")
    _finish(right, "context (tokens; 1k = 1024), each with its best chain")
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(lambda s, _: f"{s / 1024:g}k" if s >= 1024 else f"{s:g}")
    right.axvline(config.context, color="grey", linewidth=0.8)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
    return figure


def _draw_here(config: PlanConfig, compared: dict[int, Comparison]) -> "Figure":
    """The fastest tree and the chain of each size, against its number of nodes; a panel for each number of rows."""
    figure, panels = _figure(len(compared), f"{config.target}, drafter {config.drafter}; temperature {config.temperature:g}")
    for axes, (rows, found) in zip(panels, compared.items(), strict=True):
        for kind, label in ((Chain, "chains"), (StaticTree, "fastest static tree")):
            fastest: dict[int, float] = {}
            for candidate in found.candidates:
                if isinstance(candidate.draft, kind):
                    fastest.setdefault(candidate.draft.nodes, candidate.speedup)
            axes.plot(sorted(fastest), [fastest[n] for n in sorted(fastest)], "o-", markersize=3, label=label)
        axes.set_title(f"{rows} row{'s' * (rows > 1)}", fontsize="medium")
        _finish(axes, "nodes, the root included")
    panels[0].legend()
    return figure


def _figure(panels: int, title: str) -> "tuple[Figure, list[Axes]]":
    figure, axes = pictures.new_figure(2 + 4.5 * panels, 4.2, panels)
    figure.suptitle(title, fontsize="medium")
    return figure, axes


def _colours(count: int) -> list[tuple[float, ...]]:
    from matplotlib import colormaps

    return [colormaps["viridis"](x) for x in np.linspace(0, 0.85, count)]


def _finish(axes: "Axes", label: str) -> None:
    """Labels, a light grid, whole numbers below, and the line at 1 above which speculation pays."""
    from matplotlib.ticker import MaxNLocator

    axes.axhline(1, color="black", linestyle="--", linewidth=1, label="plain decoding")
    axes.set_xlabel(label)
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
