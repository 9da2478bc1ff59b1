"""The command ``specjax plan contexts``: what a compressed cache gains, by context and rows."""

from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table

from specjax.cli.plan.on_prompts import OnPrompts
from specjax.cli.plan.options import new_console, save_plot
from specjax.drafters import CompressedCache
from specjax.errors import InputError
from specjax.planning.contexts import TRIAL_TOKENS, MeasuredContexts, measure_contexts
from specjax.reports.speedups import draw_by_batch
from specjax.reports.tables import table_of_numbers

_PROMPTS = 4


@dataclass(frozen=True)
class ContextsConfig(OnPrompts):
    """Measure what a compressed cache (--drafter streaming or snapkv) gains on this machine.

    The result depends on the context and the number of rows. Times are measured for each, and
    acceptance on up to 4 prompts that are at least as long as the longest context.

    Attributes:
        contexts: numbers of tokens in each row's cache.
        budgets: numbers of slots of the drafter's cache to choose from.
    """

    drafter: str = "streaming"
    contexts: tuple[int, ...] = ()
    budgets: tuple[int, ...] = (128, 256, 512)


def run_contexts(config: ContextsConfig) -> None:
    """Run ``specjax plan contexts``."""
    if min(config.contexts, default=0) < 2 or min(config.budgets, default=0) < 1:
        raise InputError(
            f"contexts={config.contexts}, budgets={config.budgets}: give numbers of tokens, and at"
            " least one budget"
        )
    pair, prompts, options = config.load("contexts")
    if not isinstance(pair.drafter, CompressedCache):
        raise InputError(
            f"drafter={config.drafter!r}: contexts needs a compressed cache: give streaming or"
            " snapkv"
        )
    texts = [ids for prompt in prompts if len(ids := pair.encode(prompt)) >= max(config.contexts)][
        :_PROMPTS
    ]
    if not texts:
        raise InputError(
            f"prompts={config.prompts!r}: no prompt has {max(config.contexts)} tokens, the longest"
            " of --contexts"
        )
    measured = measure_contexts(
        pair.target,
        pair.drafter,
        np.array([ids[: max(config.contexts)] for ids in texts]),
        contexts=config.contexts,
        batches=config.batch,
        budgets=config.budgets,
        longest=config.longest,
        options=replace(options, max_new_tokens=TRIAL_TOKENS),
    )
    console = new_console()
    console.print(contexts_table(config.title, measured))
    critical = measured.critical_context()
    if critical is not None:
        console.out(
            f"Critical context: about {critical:,.0f} tokens; beyond it, more rows gain more."
        )
    if config.plot:
        best = {
            c: {b: measured.gains(c, b)[0].speedup for b in measured.batches}
            for c in measured.contexts
        }
        figure = draw_by_batch(
            f"{config.target}, drafter {config.drafter}", best, critical=critical
        )
        save_plot(console, figure, config.plot)


def contexts_table(title: str, measured: MeasuredContexts) -> Table:
    """Return a table of the best gain for each context and number of rows, with its times."""
    table = table_of_numbers(
        title,
        "context",
        "rows",
        "T_T ms",
        "budget",
        "gamma",
        "T_D ms",
        "T_V ms",
        "tokens a step",
        "speed-up",
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
                f"{1e3 * measured.draft_times[best.budget, batch]:.1f}",
                f"{1e3 * costs.verification(best.gamma + 1):.1f}",
                f"{best.tokens:.2f}",
                f"{best.speedup:.2f}x",
            )
    table.caption = (
        "T_T: a step of plain decoding. T_D: a drafted token. T_V: a verification. Each line has"
        " its best budget and chain."
    )
    return table
