"""Bounds for comparing an empirical distribution with the exact one."""

import math

import numpy as np


def total_variation(counts: np.ndarray, exact: np.ndarray) -> float:
    """Total variation distance of the empirical distribution ``counts / sum`` from ``exact``."""
    return 0.5 * float(np.abs(counts / counts.sum() - exact).sum())


def monte_carlo_bound(exact: np.ndarray, draws: int, failure: float = 1e-9) -> float:
    """What `total_variation` of ``draws`` exact draws stays below, but for a chance of ``failure``.

    Its mean is at most ``1/2 sum_i sqrt(p_i (1 - p_i) / n)`` (Jensen, cell by cell). One draw moves it by at most 1/n, so by
    McDiarmid's inequality it exceeds its mean by more than e with probability at most ``exp(-2 n e^2)``.
    """
    mean = 0.5 * np.sqrt(exact * (1 - exact) / draws).sum()
    return float(mean + math.sqrt(-math.log(failure) / (2 * draws)))
