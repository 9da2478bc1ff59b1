"""``specjax plan --measure``: the fastest drafts on this machine, from measured times and acceptance."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from specjax import pipeline, text
from specjax.cli.plan_options import PlanConfig
from specjax.decoding.options import GenerationOptions
from specjax.drafters import CompressedCache
from specjax.errors import InputError
from specjax.planning.choice import Comparison, compare_drafts, measure_acceptance
from specjax.planning.contexts import TRIAL_TOKENS, MeasuredContexts, measure_contexts
from specjax.reports import pictures
from specjax.reports.speedups import count_rows, draw_by_batch, draw_by_nodes
from specjax.reports.tables import table_of_numbers
from specjax.tree import Chain, StaticTree

_SHOWN, _PROMPTS, _LONGEST = 8, 32, 8
_LONG_PROMPTS = 4


def plan_here(console: Console, config: PlanConfig) -> None:
    """For each number of rows: the fastest chains and trees on the prompts."""
    pair, prompts, options, longest = _load("measure", config)
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
        console.out(f"Best with {count_rows(rows)}: {best.draft or 'plain decoding'}, expected {best.speedup:.2f}x.")
        if isinstance(best.draft, StaticTree):
            console.out(f"  StaticTree({best.draft.choices})")
    if config.plot:
        title = f"{config.target}, drafter {config.drafter}; temperature {config.temperature:g}"
        panels = {rows: _fastest_by_nodes(found) for rows, found in compared.items()}
        pictures.save(draw_by_nodes(title, panels), "plot", Path(config.plot))


def plan_contexts(console: Console, config: PlanConfig) -> None:
    """For each context and number of rows: the budget and the chain that gain most."""
    if min(config.contexts) < 2 or min(config.budgets, default=0) < 1:
        raise InputError(
            f"contexts={config.contexts}, budgets={config.budgets}: give numbers of tokens, and at least one budget"
        )
    pair, prompts, options, longest = _load("contexts", config)
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


def _load(argument: str, config: PlanConfig) -> tuple[pipeline.TextGenerator, list[str], GenerationOptions, int]:
    """The pair, the prompts, the settings of the generation, and the longest chain to look at."""
    if not config.drafter or not config.prompts:
        raise InputError(f"{argument}: give --target, --drafter and --prompts FILE")
    prompts = text.read_prompts("prompts", config.prompts)
    options = pipeline.settings(temperature=config.temperature, rule=config.rule)
    options.sampling.rows(1)  # refuses what is out of range before any weights are read
    longest = min(config.longest, _LONGEST)
    return pipeline.load(config.target, config.drafter, draft=Chain(longest)), prompts, options, longest


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
    title = f"{config.target}, drafter {config.drafter}; {count_rows(rows)}, temperature {config.temperature:g}"
    table = table_of_numbers(title, "draft", "tokens a step", "step ms", "speed-up", "", named=True)
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


def _fastest_by_nodes(found: Comparison) -> Mapping[str, Mapping[int, float]]:
    """The speed-up of the chain of each size, and of the fastest static tree, by their nodes."""
    fastest: dict[str, dict[int, float]] = {"chains": {}, "fastest static tree": {}}
    for kind, of_kind in zip((Chain, StaticTree), fastest.values(), strict=True):
        for candidate in found.candidates:  # the fastest first
            if isinstance(candidate.draft, kind):
                of_kind.setdefault(candidate.draft.nodes, candidate.speedup)
    return fastest
