"""The command ``specjax plan measure``: find the fastest drafts on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rich.table import Table

from specjax import text
from specjax.cli.plan.on_prompts import OnPrompts
from specjax.cli.plan.options import new_console, save_plot
from specjax.drafts.shapes import Chain, DynamicTree, StaticTree
from specjax.errors import InputError
from specjax.planning.choice import DraftComparison, compare_drafts, measure_acceptance
from specjax.reports.speedups import count_rows, draw_by_nodes
from specjax.reports.tables import table_of_numbers

_SHOWN, _PROMPTS = 8, 32


@dataclass(frozen=True)
class MeasureConfig(OnPrompts):
    """Find the fastest chain or tree on this machine, for each number of rows.

    Times are measured on this machine, and acceptance on up to 32 prompts.
    """


def run_measure(config: MeasureConfig) -> None:
    """Run ``specjax plan measure``."""
    pair, prompts, options = config.load("measure")
    target, drafter, longest = pair.target, pair.drafter, config.longest
    if drafter is None:
        raise InputError("drafter='none': there is nothing to measure; name a drafter")
    console = new_console()
    prompts_read = text.pad([pair.encode(prompt) for prompt in prompts[:_PROMPTS]])
    comparisons = {}
    # The positions of the target are the only limit of a trial.
    options = replace(options, max_new_tokens=target.config.max_positions)
    acceptance = measure_acceptance(
        target, drafter, *prompts_read, options=options, longest=longest
    )
    for rows in config.batch:
        comparisons[rows] = compare_drafts(
            target,
            drafter,
            *prompts_read,
            batch=rows,
            options=options,
            longest=longest,
            acceptance=acceptance,
        )
        console.print(_table(config, rows, comparisons[rows]))
        best = comparisons[rows].best
        console.out(
            f"Best with {count_rows(rows)}: {best.draft or 'plain decoding'}, expected"
            f" {best.speedup:.2f}x."
        )
        if isinstance(best.draft, StaticTree):
            console.out(f"  StaticTree({best.draft.choices})")
        if isinstance(best.draft, DynamicTree):
            console.out(
                f"  --draft dynamic:{best.draft.top_k},{best.draft.depth},{best.draft.nodes}"
            )
    if config.plot:
        panels = {rows: _fastest_by_nodes(comparison) for rows, comparison in comparisons.items()}
        save_plot(console, draw_by_nodes(config.title, panels), config.plot)


def _table(config: MeasureConfig, rows: int, comparison: DraftComparison) -> Table:
    """Return a table of the fastest drafts, the best chain and dynamic tree, and plain decoding."""
    title = (
        f"{config.target}, drafter {config.drafter}; {count_rows(rows)}, temperature"
        f" {config.temperature:g}"
    )
    table = table_of_numbers(title, "draft", "tokens a step", "step ms", "speed-up", "", named=True)
    chains = [
        candidate for candidate in comparison.candidates if isinstance(candidate.draft, Chain)
    ]
    plain = [candidate for candidate in comparison.candidates if candidate.draft is None]
    dynamic = [
        candidate for candidate in comparison.candidates if isinstance(candidate.draft, DynamicTree)
    ]
    shown = dict.fromkeys([*comparison.candidates[:_SHOWN], *chains[:1], *dynamic[:1], *plain])
    for candidate in sorted(shown, key=lambda candidate: -candidate.speedup):
        table.add_row(
            str(candidate.draft or "plain decoding"),
            f"{candidate.tokens:.2f}",
            f"{1e3 * candidate.seconds:.2f}",
            f"{candidate.speedup:.2f}x",
            "best" if candidate is comparison.best else "",
            style="bold" if candidate is comparison.best else None,
        )
    verify = ", ".join(f"{n}: {1e3 * seconds:.2f}" for n, seconds in comparison.verify.items())
    draft = ", ".join(f"{n}: {1e3 * seconds:.2f}" for n, seconds in comparison.draft_times.items())
    ranks = ", ".join(f"{chance:.2f}" for chance in comparison.acceptance.by_rank)
    table.caption = f"T_V ms by nodes: {verify}. T_D ms a level by nodes read: {draft}." + (
        f" Accepted by rank: {ranks}." if ranks else ""
    )
    return table


def _fastest_by_nodes(comparison: DraftComparison) -> Mapping[str, Mapping[int, float]]:
    """Return the speed-ups of chains, and of the fastest static and dynamic trees, by nodes."""
    fastest: dict[str, dict[int, float]] = {
        "chains": {},
        "fastest static tree": {},
        "fastest dynamic tree": {},
    }
    for kind, of_kind in zip((Chain, StaticTree, DynamicTree), fastest.values(), strict=True):
        for candidate in comparison.candidates:  # the fastest first
            if isinstance(candidate.draft, kind):
                of_kind.setdefault(candidate.draft.nodes, candidate.speedup)
    return {name: of_kind for name, of_kind in fastest.items() if of_kind}
