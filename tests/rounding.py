"""Measure how far float32 rounding moves a result.

Two correct orders of the same sums may differ by as much.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

EPSILON = np.finfo(np.float32).eps


def moved_by_last_bits(function: Callable[[Any], Any], inputs: Any, draws: int = 4) -> float:
    """Return the largest change of a result when each float32 input changes by its last bit.

    Random weights may enlarge such a change a thousandfold. How sums are rounded depends on the
    machine, so a fixed tolerance holds on one and not on the next.

    Args:
        function: makes arrays of ``inputs``, as a pytree.
        inputs: a pytree of arrays.
        draws: how many random changes are tried.
    """
    rng = np.random.default_rng(5)

    def change(number: Any) -> Any:
        if number.dtype != np.float32:
            return number
        return number * (1 + EPSILON * rng.choice(np.array([-1, 1], np.float32), number.shape))

    expected = jax.tree.leaves(function(inputs))
    changes = []
    for _ in range(draws):
        results = jax.tree.leaves(function(jax.tree.map(change, inputs)))
        changes += [
            float(np.abs(result - leaf).max())
            for result, leaf in zip(results, expected, strict=True)
        ]
    return max(changes)
