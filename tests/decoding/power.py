"""How surely a G-test notices a rule that is slightly wrong.

A test of draws says little unless it would fail for a wrong rule. A wrong rule has a distribution of its own. With its draws
the statistic of the G-test follows the non-central chi-square distribution (Cohen 1988, chapter 7), whose non-centrality grows
with the number of draws. From that follow how many draws a test must take, and of which distributions.
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
"""Cells that are expected less often than this count as one, so that the G-test's own pooling leaves them as they are."""


def pooled(values: np.ndarray, exact: np.ndarray, draws: int) -> np.ndarray:
    """Return ``values`` of each cell, summed over the cells that ``draws`` draws from ``exact`` seldom hit.

    Cells that ``exact`` never hits stay as they are: a single draw there is proof enough.

    Args:
        values: ``[n]`` counts or probabilities.
        exact: ``[n]`` probabilities.
        draws: number of draws.
    """
    is_rare = (exact > 0) & (draws * exact < _RARE)
    return np.append(values[~is_rare], values[is_rare].sum())


def power(exact: np.ndarray, alternative: np.ndarray, draws: int) -> float:
    """Return the probability that `check` fails where the draws come from ``alternative``.

    Args:
        exact: ``[n]`` probabilities that the test expects.
        alternative: ``[n]`` probabilities that the draws have.
        draws: number of draws.
    """
    exact, alternative = (pooled(values, exact, draws) for values in (exact, alternative))
    impossible = alternative[exact == 0].sum()
    unnoticed = (1 - impossible) ** draws
    expected, found = exact[exact > 0], alternative[exact > 0] / (1 - impossible)
    freedom = len(expected) - 1
    divergence = np.sum(
        np.where(found > 0, found * np.log(np.where(found > 0, found, 1.0) / expected), 0.0)
    )
    unnoticed *= stats.ncx2.cdf(
        stats.chi2.isf(FALSE_ALARM, freedom), freedom, 2 * draws * max(divergence, 1e-12)
    )
    return float(1 - unnoticed)


def weakest(
    exact: np.ndarray, alternatives: Mapping[str, np.ndarray], draws: int
) -> tuple[float, str]:
    """Return the power against the alternative that is noticed least, and its name."""
    return min(
        (power(exact, alternative, draws), name) for name, alternative in alternatives.items()
    )


def check(counts: np.ndarray, exact: np.ndarray, alternatives: Mapping[str, np.ndarray]) -> None:
    """Fail where ``counts`` are not of draws from ``exact``, or where too few draws were taken to tell the ``alternatives``.

    Args:
        counts: ``[n]`` how often each outcome came.
        exact: ``[n]`` their probabilities.
        alternatives: the outcomes' probabilities ``[n]`` by what is wrong with the rule.
    """
    draws = int(counts.sum())
    sure, name = weakest(exact, alternatives, draws)
    assert sure >= LEAST_POWER, (
        f"{draws} draws notice {name!r} with probability {sure:.3f}: take more, or other"
        " distributions"
    )
    found = g_test(pooled(counts, exact, draws), pooled(exact, exact, draws))
    assert found >= FALSE_ALARM, f"p-value {found:.1e}"


def scaled(names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the alternatives of a rule: each a factor of one of the quantities that ``names`` lists."""
    return {f"{name} * {factor}": {name: factor} for name in names for factor in FACTORS}
