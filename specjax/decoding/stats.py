"""The statistics of decoding, counted on the device."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.sampling import likeliest

_BY_PART = ("drafted_by", "accepted_by", "accepted_only_by")
"""The counters of `Stats` that have a column for each part of a drafter."""


@struct.dataclass
class Stats:
    """The statistics of each row.

    Only emitted tokens count as accepted: tokens after a stop token or beyond the limit do not.

    Attributes:
        steps: ``[B]`` forward passes of the target after the prompt.
        drafted: ``[B]`` drafted tokens.
        accepted: ``[B]`` drafted tokens that were emitted.
        scored: ``[B]`` nodes that the target's passes computed for the row, padding included. The
            batch's largest draft decides how many.
        drafted_at: ``[B, D]`` steps that drafted at least one token at each depth.
        accepted_at: ``[B, D]`` steps that emitted a drafted token of each depth.
        histogram: ``[B, D+2]`` steps by their number of emitted tokens, from 0 to D+1: the
            histogram of the acceptance length.
        drafted_by: ``[B, P]`` drafted tokens that each of P parts offered, if the drafter has parts
            (`specjax.drafters.Together`). Tokens that several offered count for each. P is 0
            without parts.
        accepted_by: ``[B, P]`` drafted tokens among them that were emitted.
        accepted_only_by: ``[B, P]`` emitted tokens that this part offered, and no other part.

    Examples:
        >>> plain.stats.steps.tolist(), plain.stats.drafted.tolist()
        ([8, 8], [0, 0])
        >>> plain.stats.histogram.tolist()  # every step emitted one token
        [[0, 8], [0, 8]]
    """

    steps: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    scored: jax.Array
    drafted_at: jax.Array
    accepted_at: jax.Array
    histogram: jax.Array
    drafted_by: jax.Array
    accepted_by: jax.Array
    accepted_only_by: jax.Array

    @classmethod
    def zeros(cls, batch: int, depth: int, parts: int = 0) -> "Stats":
        """Return the statistics before the first step.

        Args:
            batch: the number of rows.
            depth: the depth of the deepest draft.
            parts: the number of parts of the drafter.
        """

        def count(*shape: int) -> jax.Array:
            return jnp.zeros((batch, *shape), jnp.int32)

        return cls(
            **{name: count() for name in ("steps", "drafted", "accepted", "scored")},
            **{name: count(depth) for name in ("drafted_at", "accepted_at")},
            histogram=count(depth + 2),
            **{name: count(parts) for name in _BY_PART},
        )

    @property
    def depth(self) -> int:
        """The depth D of the deepest draft that there is room for; static."""
        return self.drafted_at.shape[1]

    def add(self, info: "StepInfo") -> "Stats":
        """Return these statistics with one more step."""
        depth = self.depth
        by_part = {name: getattr(self, name) + new for name, new in _counts_by_part(info).items()}
        return Stats(
            steps=self.steps + info.active,
            drafted=self.drafted + info.drafted,
            accepted=self.accepted + info.accepted,
            scored=self.scored + info.scored,
            drafted_at=self.drafted_at + info.drafted_at,
            accepted_at=self.accepted_at + (jnp.arange(depth)[None] < info.accepted[:, None]),
            histogram=self.histogram
            + info.active[:, None] * (jnp.arange(depth + 2)[None] == info.emitted[:, None]),
            **by_part,
        )


def _counts_by_part(info: "StepInfo") -> dict[str, jax.Array | int]:
    """Return what a step adds to the counters of each part, ``[B, P]`` by name."""
    offered = info.draft.offered_by
    if offered is None:  # no part drafted in this step
        return dict.fromkeys(_BY_PART, 0)
    is_accepted = jnp.arange(info.path.shape[1] - 1) < info.accepted[:, None]
    accepted = jnp.take_along_axis(offered, info.path[:, 1:, None], axis=1) & is_accepted[..., None]
    only = accepted & (jnp.sum(accepted, axis=-1, keepdims=True) == 1)
    counts = (offered & info.active[:, None, None], accepted, only)
    return {
        name: jnp.sum(count, axis=1, dtype=jnp.int32)
        for name, count in zip(_BY_PART, counts, strict=True)
    }


@struct.dataclass
class StepInfo:
    """The record of one step for an observer. The next step needs none of it.

    Attributes:
        active: ``[B]`` bool, the row was not done before the step.
        emitted: ``[B]`` tokens emitted.
        accepted: ``[B]`` drafted tokens among them.
        drafted: ``[B]`` tokens drafted.
        drafted_at: ``[B, D]`` bool, the depths at which a token was drafted. D is the state's
            depth, also for a shallower draft.
        scored: ``[B]`` nodes that the target's pass computed for the row.
        draft: the proposed `specjax.drafters.Draft`.
        path: ``[B, D+1]`` the accepted nodes, the root first; the first ``emitted`` are meaningful.
        logprobs: those of the emitted tokens, ``[B, draft.depth + 1]``; None if they were not
            requested.

    Examples:
        >>> from specjax import decoding
        >>> drafter, state = decoding.start(target, specjax.PromptLookup(draft=2), prompts)
        >>> _, info = jax.jit(decoding.step)(target, drafter, state)
        >>> np.array_equal(info.emitted, info.accepted + 1)  # the accepted tokens and the bonus
        True
    """

    active: jax.Array
    emitted: jax.Array
    accepted: jax.Array
    drafted: jax.Array
    drafted_at: jax.Array
    scored: jax.Array
    draft: Any
    path: jax.Array
    logprobs: "Logprobs | None" = None


@struct.dataclass
class Logprobs:
    """The target's own log-probabilities at some positions of its texts.

    They come from its unmodified logits: before temperature, truncation and ``min_new_tokens``.

    Attributes:
        chosen: ``[B, T]`` float32, the log-probability of the token at each position.
        ids: ``[B, T, K]`` int32, the K likeliest tokens at each position, likeliest first.
        values: ``[B, T, K]`` float32, their log-probabilities.

    Examples:
        >>> from specjax.decoding.stats import Logprobs
        >>> logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))  # one row, one position
        >>> logprobs = Logprobs.of(logits, jnp.array([[1]]), top=2)
        >>> round(float(jnp.exp(logprobs.chosen[0, 0])), 2), logprobs.ids.tolist()
        (0.3, [[[0, 1]]])
    """

    chosen: jax.Array
    ids: jax.Array
    values: jax.Array

    @classmethod
    def zeros(cls, batch: int, width: int, top: int) -> "Logprobs":
        """Return room for ``width`` positions and ``top`` tokens at each."""
        values = jnp.zeros((batch, width, top))
        return cls(chosen=jnp.zeros((batch, width)), ids=values.astype(jnp.int32), values=values)

    @classmethod
    def of(cls, logits: jax.Array, tokens: jax.Array, top: int) -> "Logprobs":
        """Return those of ``tokens [B, T]``, computed from ``logits [B, T, V]``."""
        logits = logits.astype(jnp.float32)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        values, ids = likeliest(logits, top)
        chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1) - total
        return cls(chosen=chosen[..., 0], ids=ids, values=values - total)

    @property
    def top(self) -> int:
        """The number K of likeliest tokens at each position; static."""
        return self.ids.shape[-1]
