"""The command ``specjax plan theory``: closed formulas for the gain of a drafter."""

from dataclasses import dataclass

from rich.table import Table

from specjax.cli.plan.options import check_longest, check_plot, new_console, save_plot
from specjax.errors import InputError
from specjax.planning import roofline, theory
from specjax.reports.speedups import draw_by_length
from specjax.reports.tables import table_of_numbers

_NEARBY = (0.1, 0.0, -0.1, -0.2)  # offsets from the acceptance rate, of the lines in the picture


@dataclass(frozen=True)
class TheoryConfig:
    """Compute the gain of a drafter for each chain length, by Leviathan's closed formulas.

    Attributes:
        cost: time of a drafting step divided by the time of a target forward pass (c).
        alpha: acceptance rate, the probability that a drafted token is accepted.
        operations: arithmetic operations per token of the drafter divided by those of the target
            (c-hat); the default is the cost.
        longest: maximum chain length to consider, in tokens.
        plot: picture to write: .png, .pdf or .svg.
    """

    cost: float | None = None
    alpha: float = 0.8
    operations: float | None = None
    longest: int = roofline.LONGEST
    plot: str = ""


def run_theory(config: TheoryConfig) -> None:
    """Run ``specjax plan theory``."""
    if config.cost is None:
        raise InputError(
            "cost: give --cost C, or compute it from two models with specjax plan roofline"
        )
    check_longest(config.longest)
    check_plot(config.plot)
    console, cost = new_console(), config.cost
    best = theory.best_gamma(config.alpha, cost, config.longest)
    console.print(_table(config, cost, best))
    if best.gamma:
        console.out(
            f"Best: chains of {best.gamma}, {best.factor:.2f} times as fast as plain decoding."
        )
    else:
        console.out(
            f"Speculation does not pay: plain decoding is best, as alpha = {config.alpha:g} is not"
            f" above c = {cost:g}."
        )
    if best.gamma == config.longest:
        console.out(f"A chain of more than {best.gamma} may be better still: raise --longest.")
    if config.plot:
        alphas = [
            alpha
            for alpha in (round(config.alpha + step, 6) for step in _NEARBY)
            if 0 <= alpha <= 1
        ]
        lines = {
            f"alpha = {alpha:g}": [
                theory.walltime_factor(alpha, gamma, cost) for gamma in range(config.longest + 1)
            ]
            for alpha in alphas
        }
        title = f"drafting step over target forward c = {cost:g}"
        figure = draw_by_length(title, lines, strong=f"alpha = {round(config.alpha, 6):g}")
        save_plot(console, figure, config.plot)


def _table(config: TheoryConfig, cost: float, best: theory.GammaChoice) -> Table:
    """Return a table of tokens, speed-up, operations and target reads. It marks the best length."""
    alpha, operations = config.alpha, cost if config.operations is None else config.operations
    title = f"alpha = {alpha:g}, c = {cost:g}, c-hat = {operations:g}"
    table = table_of_numbers(
        title, "gamma", "tokens a step", "speed-up", "operations", "target reads", ""
    )
    table.caption = "operations, target reads: per token, relative to plain decoding"
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
