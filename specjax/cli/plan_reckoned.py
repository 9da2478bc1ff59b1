"""``specjax plan`` from numbers alone: closed forms of a cost, or the roofline of two models on a chip."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from specjax.chips import find_chip
from specjax.cli.plan_options import PlanConfig, find_shape
from specjax.drafters import check_vocabulary
from specjax.errors import InputError
from specjax.planning import roofline, theory
from specjax.reports import pictures
from specjax.reports.speedups import draw_by_length, draw_by_length_and_context
from specjax.reports.tables import table_of_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NEARBY = (0.1, 0.0, -0.1, -0.2)  # acceptance rates that a picture shows beside the given one, as differences from it


# --- from a cost: closed forms ---------------------------------------------------------------------------------------


def plan_cost(console: Console, config: PlanConfig, cost: float) -> None:
    """For each chain length, what a drafter of that cost gains by the closed forms; which is best."""
    best = theory.best_gamma(config.alpha, cost, config.longest)
    console.print(_cost_table(config, cost, best))
    if best.gamma:
        console.out(f"Best: chains of {best.gamma}, {best.factor:.2f} times as fast as plain decoding.")
    else:
        console.out(f"Speculation does not pay, plain decoding is best: alpha = {config.alpha:g} is not above c = {cost:g}.")
    _print_limit(console, config, best.gamma)
    if config.plot:
        alphas = [alpha for alpha in (round(config.alpha + step, 6) for step in _NEARBY) if 0 <= alpha <= 1]
        lines = {
            f"alpha = {alpha:g}": [theory.walltime_factor(alpha, gamma, cost) for gamma in range(config.longest + 1)]
            for alpha in alphas
        }
        title = f"drafting step over target forward c = {cost:g}"
        figure = draw_by_length(title, lines, strong=f"alpha = {round(config.alpha, 6):g}")
        pictures.save(figure, "plot", Path(config.plot))


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


def plan_models(console: Console, config: PlanConfig) -> None:
    """For each number of rows, the best chain by the roofline of the chip, and from which context on it pays."""
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
    target = find_shape("target", config.target)
    drafter = None if config.drafter == "self" else find_shape("drafter", config.drafter)
    if drafter is not None:
        check_vocabulary(drafter, target)
    pair = roofline.Pair(target, find_chip(config.chip), drafter, config.draft_cache)
    if config.context > pair.longest_context:
        raise InputError(f"context={config.context}: the models have positions for {pair.longest_context} tokens")
    return pair


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


def _draw_models(config: PlanConfig, pair: roofline.Pair) -> "Figure":
    """Speed-up against chain length, and that of the best chain against context; a line for each number of rows."""
    last, alpha = pair.longest_context, config.alpha
    contexts = np.unique(np.geomspace(max(1, last // 1024), last, 60).round().astype(int)).tolist()
    by_length, by_context, held = {}, {}, {}
    for rows in config.batch:
        lengths = range(config.longest + 1)
        by_length[rows] = [roofline.chain_speedup(pair, rows, config.context, gamma, alpha) for gamma in lengths]
        by_context[rows] = [roofline.best_gamma(pair, rows, s, alpha, config.longest, shortest=1).factor for s in contexts]
        held[rows] = sum(pair.fits(rows, s) for s in contexts)  # memory grows with context
    return draw_by_length_and_context(_title(config, pair), by_length, contexts, by_context, held, config.context)
