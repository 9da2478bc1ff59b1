"""How good a draft is: the chance that its tokens are accepted, and statistics of those that were."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.decoding.stats import Stats
from specjax.shape_checks import shape_checked


@shape_checked
def overlap(p: Float[Array, "*batch V"], q: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    """beta = sum_x min(p(x), q(x)): the chance that rejection sampling accepts a token drawn from q; 1 - their total variation.

    Leviathan et al. 2023, arXiv 2211.17192, Theorem 3.5 and Lemma 3.3.

    Examples:
        >>> from specjax.evaluation.metrics import overlap
        >>> p, q = jnp.array([0.6, 0.4]), jnp.array([0.5, 0.5])
        >>> round(float(overlap(p, q)), 4)
        0.9
    """
    return jnp.sum(jnp.minimum(p, q), axis=-1)


@dataclass(frozen=True)
class Acceptance:
    """What `Stats` says, as numbers for people. Only emitted tokens count.

    Attributes:
        steps: target forwards after the prompt.
        emitted: tokens.
        drafted: tokens.
        accepted: drafted tokens that were emitted.
        scored: nodes that the target's passes were wide.
        acceptance_length: emitted tokens a target forward, the bonus included (tau in the papers).
        acceptance_rate: accepted share of the drafted tokens; None where nothing was drafted.
        by_position: for each depth, the share of the steps that drafted there in which a token of it was emitted.
        histogram: number of steps by emitted tokens, from 0 to D + 1.
        drafted_at: for each depth, the steps that drafted there.
        accepted_at: for each depth, those of them in which a token of it was emitted.

    Examples:
        >>> from specjax.evaluation.metrics import summarise
        >>> of_plain = summarise(plain.stats)
        >>> of_plain.acceptance_length, of_plain.acceptance_rate  # nothing was drafted
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


def summarise(stats: Stats, row: int | None = None) -> Acceptance:
    """The statistics of one row, or of all rows together: totals first, then ratios of totals.

    Examples:
        >>> from specjax.evaluation.metrics import summarise
        >>> result = specjax.generate(
        ...     target, specjax.PromptLookup(draft=2), prompts, max_new_tokens=8
        ... )
        >>> all_rows, first = summarise(result.stats), summarise(result.stats, row=0)
        >>> all_rows.emitted, first.emitted
        (16, 8)
    """
    chosen = slice(None) if row is None else slice(row, row + 1)
    total = {field: np.asarray(getattr(stats, field))[chosen].sum(axis=0) for field in stats.__dataclass_fields__}
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
    )
