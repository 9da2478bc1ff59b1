"""Compute how surely a G-test notices a rule that is slightly wrong.

A test of draws says little unless it would fail for a wrong rule. A wrong rule has another
distribution. With its draws the statistic of the G-test follows the non-central chi-square
distribution (Cohen 1988, chapter 7), whose non-centrality grows with the number of draws. This
determines how many draws a test must take, and from which distributions.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from scipy import stats

from specjax.evaluation.conformance import FALSE_ALARM, g_test

LEAST_POWER = 0.99
"""A test notices each of its alternatives at least so often."""

FACTORS = (0.98, 1.02)
"""An alternative multiplies one quantity of a rule by one of these."""

_RARE = 200
"""Cells that are expected less often than this count as one.

So the G-test's own pooling leaves them as they are.
"""


def pooled(values: np.ndarray, exact: np.ndarray, draws: int) -> np.ndarray:
    """Return ``values`` of each cell, with the cells that are rarely hit summed to one.

    A cell is rare if ``draws`` draws from ``exact`` seldom hit it. Cells that ``exact`` never hits
    stay as they are: a single draw there is proof enough.

    Args:
        values: ``[n]`` counts or probabilities.
        exact: ``[n]`` probabilities.
        draws: number of draws.
    """
    is_rare = (exact > 0) & (draws * exact < _RARE)
    return np.append(values[~is_rare], values[is_rare].sum())


def power(exact: np.ndarray, alternative: np.ndarray, draws: int) -> float:
    """Return the probability that `check` fails if the draws come from ``alternative``.

    Args:
        exact: ``[n]`` probabilities that the test expects.
        alternative: ``[n]`` probabilities that the draws have.
        draws: number of draws.
    """
    exact, alternative = (pooled(values, exact, draws) for values in (exact, alternative))
    impossible = alternative[exact == 0].sum()
    unnoticed = (1 - impossible) ** draws
    expected, actual = exact[exact > 0], alternative[exact > 0] / (1 - impossible)
    freedom = len(expected) - 1
    divergence = np.sum(
        np.where(actual > 0, actual * np.log(np.where(actual > 0, actual, 1.0) / expected), 0.0)
    )
    unnoticed *= stats.ncx2.cdf(
        stats.chi2.isf(FALSE_ALARM, freedom), freedom, 2 * draws * max(divergence, 1e-12)
    )
    return float(1 - unnoticed)


def weakest(
    exact: np.ndarray, alternatives: Mapping[str, np.ndarray], draws: int
) -> tuple[float, str]:
    """Return the lowest power against any of the alternatives, and its name."""
    return min(
        (power(exact, alternative, draws), name) for name, alternative in alternatives.items()
    )


def check(counts: np.ndarray, exact: np.ndarray, alternatives: Mapping[str, np.ndarray]) -> None:
    """Fail if ``counts`` are not of draws from ``exact``, or if there are too few draws.

    There are too few if one of the ``alternatives`` would be noticed with less than `LEAST_POWER`.

    Args:
        counts: ``[n]`` number of draws of each outcome.
        exact: ``[n]`` probabilities of the outcomes.
        alternatives: the probabilities ``[n]`` of the outcomes by what is wrong with the rule.
    """
    draws = int(counts.sum())
    sure, name = weakest(exact, alternatives, draws)
    assert sure >= LEAST_POWER, (
        f"{draws} draws notice {name!r} with probability {sure:.3f}: take more, or other"
        " distributions"
    )
    p_value = g_test(pooled(counts, exact, draws), pooled(exact, exact, draws))
    assert p_value >= FALSE_ALARM, f"p-value {p_value:.1e}"


def scaled(names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return alternatives that each scale one of the quantities in ``names`` by a factor."""
    return {f"{name} * {factor}": {name: factor} for name in names for factor in FACTORS}
