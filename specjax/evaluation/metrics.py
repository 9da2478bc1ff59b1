"""Measures of drafts: the acceptance probability, and statistics of accepted tokens."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.decoding.stats import Stats
from specjax.shape_checks import shape_checked


@shape_checked
def overlap(p: Float[Array, "*batch V"], q: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    """Return beta = sum_x min(p(x), q(x)), which is 1 minus the total variation.

    It is the probability that rejection sampling accepts a token sampled from q (Leviathan et al.
    2023, arXiv 2211.17192, Theorem 3.5 and Lemma 3.3).

    Examples:
        >>> from specjax.evaluation.metrics import overlap
        >>> p, q = jnp.array([0.6, 0.4]), jnp.array([0.5, 0.5])
        >>> round(float(overlap(p, q)), 4)
        0.9
    """
    return jnp.sum(jnp.minimum(p, q), axis=-1)


@dataclass(frozen=True)
class Acceptance:
    """The statistics of `Stats` as readable numbers. Only emitted tokens count.

    Attributes:
        steps: the number of target passes after the prompt.
        emitted: the number of emitted tokens.
        drafted: the number of drafted tokens.
        accepted: the number of drafted tokens that were emitted.
        scored: the total width of the target's passes, in nodes.
        acceptance_length: the mean number of emitted tokens per target pass, with the bonus token
            (tau in the papers).
        acceptance_rate: the accepted share of the drafted tokens; None if nothing was drafted.
        by_position: for each depth, the share of the steps with a draft of that depth in which a
            token of that depth was emitted.
        histogram: the number of steps by emitted tokens, from 0 to D + 1.
        drafted_at: for each depth, the number of steps with a draft of that depth.
        accepted_at: for each depth, the number of these steps in which a token of that depth was
            emitted.
        drafted_by: for each part of the drafter, the number of drafted tokens that it offered; ()
            if the drafter has no parts (`specjax.drafters.Together`).
        accepted_by: for each part, the number of these tokens that were emitted.
        accepted_only_by: for each part, the number of those that no other part offered.

    Examples:
        >>> from specjax.evaluation.metrics import summarise
        >>> acceptance = summarise(plain.stats)
        >>> acceptance.acceptance_length, acceptance.acceptance_rate  # nothing was drafted
        (1.0, None)
    """

    steps: int
    emitted: int
    drafted: int
    accepted: int
    scored: int
    acceptance_length: float
    acceptance_rate: float | None
    by_position: tuple[float | None, ...]
    histogram: tuple[int, ...]
    drafted_at: tuple[int, ...]
    accepted_at: tuple[int, ...]
    drafted_by: tuple[int, ...] = ()
    accepted_by: tuple[int, ...] = ()
    accepted_only_by: tuple[int, ...] = ()


def summarise(stats: Stats, row: int | None = None) -> Acceptance:
    """Return the statistics of one row, or of all rows together.

    Ratios are ratios of totals, not means of the rows' ratios.

    Examples:
        >>> from specjax.evaluation.metrics import summarise
        >>> result = specjax.generate(
        ...     target, specjax.PromptLookup(draft=2), prompts, max_new_tokens=8
        ... )
        >>> all_rows, first = summarise(result.stats), summarise(result.stats, row=0)
        >>> all_rows.emitted, first.emitted
        (16, 8)
    """
    selected = slice(None) if row is None else slice(row, row + 1)
    total = {
        field: np.asarray(getattr(stats, field))[selected].sum(axis=0)
        for field in stats.__dataclass_fields__
    }
    emitted = int(total["histogram"] @ np.arange(len(total["histogram"])))

    def ratio(part: int, whole: int) -> float | None:
        return part / whole if whole else None

    return Acceptance(
        steps=int(total["steps"]),
        emitted=emitted,
        drafted=int(total["drafted"]),
        accepted=int(total["accepted"]),
        scored=int(total["scored"]),
        acceptance_length=emitted / max(int(total["steps"]), 1),
        acceptance_rate=ratio(int(total["accepted"]), int(total["drafted"])),
        by_position=tuple(map(ratio, total["accepted_at"].tolist(), total["drafted_at"].tolist())),
        histogram=tuple(total["histogram"].tolist()),
        drafted_at=tuple(total["drafted_at"].tolist()),
        accepted_at=tuple(total["accepted_at"].tolist()),
        drafted_by=tuple(total["drafted_by"].tolist()),
        accepted_by=tuple(total["accepted_by"].tolist()),
        accepted_only_by=tuple(total["accepted_only_by"].tolist()),
    )
