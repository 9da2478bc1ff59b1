"""What happened while decoding, counted on the device."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.sampling import likeliest


@struct.dataclass
class Stats:
    """What happened, row by row. Only emitted tokens count: what EOS or the limit cut off was never accepted.

    Attributes:
        steps: ``[B]`` target forwards after the prompt.
        drafted: ``[B]`` drafted tokens.
        accepted: ``[B]`` of those, emitted.
        scored: ``[B]`` nodes that the target's passes were wide, filler included: the batch's widest draft decides.
        drafted_at: ``[B, D]`` steps in which a token, or several, were drafted at that depth.
        accepted_at: ``[B, D]`` steps in which one of those was emitted.
        histogram: ``[B, D+2]`` steps by their number of emitted tokens, 0 to D+1: the histogram of acceptance length.

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

    @classmethod
    def zeros(cls, batch: int, depth: int) -> "Stats":
        """Before the first step."""

        def count(*shape: int) -> jax.Array:
            return jnp.zeros((batch, *shape), jnp.int32)

        return cls(count(), count(), count(), count(), count(depth), count(depth), count(depth + 2))

    @property
    def depth(self) -> int:
        """Depth of the deepest draft that there is room for, D. Static."""
        return self.drafted_at.shape[1]

    def add(self, info: "StepInfo") -> "Stats":
        """These statistics with one more step."""
        depth = self.depth
        return Stats(
            steps=self.steps + info.active,
            drafted=self.drafted + info.drafted,
            accepted=self.accepted + info.accepted,
            scored=self.scored + info.scored,
            drafted_at=self.drafted_at + info.drafted_at,
            accepted_at=self.accepted_at + (jnp.arange(depth)[None] < info.accepted[:, None]),
            histogram=self.histogram + info.active[:, None] * (jnp.arange(depth + 2)[None] == info.emitted[:, None]),
        )


@struct.dataclass
class StepInfo:
    """What an observer may want to know of one step; nothing that the next step needs.

    Attributes:
        active: ``[B]`` bool, the row was still generating.
        emitted: ``[B]`` tokens emitted.
        accepted: ``[B]`` drafted tokens among them.
        drafted: ``[B]`` tokens drafted.
        drafted_at: ``[B, D]`` bool, the depths at which a token was drafted; D is the state's, also for a shallower draft.
        scored: ``[B]`` nodes that the target's pass was wide.
        draft: what was proposed, a `specjax.drafters.Draft`.
        path: ``[B, D+1]`` the nodes that were accepted of it, the root first; the first ``emitted`` of them.
        logprobs: of the emitted tokens, ``[B, D+1]``, where they were asked for.

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
    """The target's own log-probabilities in some places of its texts: of its logits as they are, before temperature, truncation
    and ``min_new_tokens``.

    Attributes:
        chosen: ``[B, T]`` float32, of the tokens that stand there.
        ids: ``[B, T, K]`` int32, the K likeliest tokens in each place, descending.
        values: ``[B, T, K]`` float32, theirs.

    Examples:
        >>> from specjax.decoding.stats import Logprobs
        >>> logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))  # one row, one place
        >>> logprobs = Logprobs.of(logits, jnp.array([[1]]), top=2)
        >>> round(float(jnp.exp(logprobs.chosen[0, 0])), 2), logprobs.ids.tolist()
        (0.3, [[[0, 1]]])
    """

    chosen: jax.Array
    ids: jax.Array
    values: jax.Array

    @classmethod
    def zeros(cls, batch: int, width: int, top: int) -> "Logprobs":
        """Room for so many places."""
        room = jnp.zeros((batch, width, top))
        return cls(chosen=jnp.zeros((batch, width)), ids=room.astype(jnp.int32), values=room)

    @classmethod
    def of(cls, logits: jax.Array, tokens: jax.Array, top: int) -> "Logprobs":
        """Of ``tokens [B, T]``, by the ``logits [B, T, V]`` that they were drawn from."""
        logits = logits.astype(jnp.float32)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        values, ids = likeliest(logits, top)
        chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1) - total
        return cls(chosen=chosen[..., 0], ids=ids, values=values - total)

    @property
    def top(self) -> int:
        """How many of the likeliest tokens there are in each place, K. Static."""
        return self.ids.shape[-1]
