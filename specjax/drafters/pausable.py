"""Drafters that can be paused: while paused they cost nothing, and later they draft again.

Under load plain decoding is often faster than any draft. A drafter that merely proposed nothing
would still have to read every committed token, because each token needs the one before. A paused
drafter does not run at all. Its unread tokens are stored as *pending*, and it reads all of them in
one call before it drafts again.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import sharding
from specjax.drafters.base import (
    Committed,
    Drafter,
    DraftingReads,
    NoDraft,
    append_tokens,
    tokens_at,
)
from specjax.drafters.wrapper import Wrapper
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import DraftShape
from specjax.models.cache import KVCache, PagedCache
from specjax.models.config import ModelConfig
from specjax.models.transformer import States, Target
from specjax.sampling import RowSampling

ROOM = 64
"""The maximum number of committed tokens of a row that may be pending for a paused drafter."""


@struct.dataclass
class PendingTokens:
    """The target's states at the committed tokens that the drafter has not read yet.

    These are the newest tokens of each row. Their ids and KV entries are stored elsewhere.

    Attributes:
        output: the target's states at each token: ``hidden [B, ROOM, H]`` and
            ``taps [B, ROOM, n, H]`` for the layers that `Drafter.taps` requests.
        count: ``[B]``, the number of pending tokens.
    """

    output: States
    count: jax.Array


@struct.dataclass
class PausableState:
    """The state of a drafter that can be paused.

    Attributes:
        own: the state of the wrapped drafter.
        pending: the pending tokens; none while the drafter is in use.
    """

    own: Any
    pending: PendingTokens


@struct.dataclass
class Pausable(Wrapper[PausableState]):
    """A wrapped drafter that is in use or paused.

    Both variants have the same state, so a text may begin with one and continue with the other.
    Call `catch_up` before a paused drafter drafts again, and before more than `ROOM` tokens are
    pending.

    Attributes:
        drafter: the wrapped drafter.
        paused: whether it is paused; static.

    Examples:
        >>> from specjax.drafters.pausable import Pausable
        >>> drafter = Pausable(specjax.PromptLookup(draft=2), paused=True)
        >>> drafter.draft_shape.nodes  # the root alone: plain decoding
        1
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)
        True
    """

    drafter: Drafter
    paused: bool = struct.field(pytree_node=False, default=False)

    @property
    def draft(self) -> DraftShape:  # pyright: ignore[reportIncompatibleVariableOverride]
        return NoDraft().draft if self.paused else self.drafter.draft_shape

    @property
    def node_counts(self) -> tuple[int, ...]:
        return self.draft_shape.node_counts if self.paused else self.drafter.node_counts

    def reads(self, config: ModelConfig) -> tuple[int, ...]:
        return () if self.paused else self.drafter.reads(config)

    def likely_tokens(self, config: ModelConfig) -> int:
        return 0 if self.paused else self.drafter.likely_tokens(config)

    def start(self, target: Target, batch: int, capacity: int) -> PausableState:
        def empty(*shape: int) -> jax.Array:
            axes = ("batch", *(None,) * len(shape))
            return sharding.constrain(
                jnp.zeros((batch, *shape), target.dtype), axes, {}, target.mesh
            )

        hidden = target.config.hidden_size
        output = States(
            hidden=empty(ROOM, hidden), taps=empty(ROOM, len(self.taps(target.config)), hidden)
        )
        pending = PendingTokens(output=output, count=jnp.zeros(batch, jnp.int32))
        return PausableState(own=self.drafter.start(target, batch, capacity), pending=pending)

    def propose(
        self,
        target: Target,
        state: PausableState,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
        **cache: Any,
    ) -> tuple[Draft, PausableState]:
        if self.paused:
            draft, _ = NoDraft().propose(target, (), root, sampling, keys, active)
            return draft, state
        return super().propose(target, state, root, sampling, keys, active, **cache)

    def update(
        self,
        target: Target,
        state: PausableState,
        draft: Draft,
        verdict: Verdict,
        committed: Committed,
    ) -> PausableState:
        if not self.paused:
            return super().update(target, state, draft, verdict, committed)
        pending = state.pending

        def keep(room: jax.Array, new: jax.Array) -> jax.Array:
            return append_tokens(room, pending.count, new.astype(room.dtype), committed.count)

        output = jax.tree.map(keep, pending.output, committed.output)
        return replace(
            state, pending=PendingTokens(output=output, count=pending.count + committed.count)
        )

    def catch_up(
        self,
        target: Target,
        state: PausableState,
        tokens: jax.Array,
        cache: KVCache | PagedCache,
        most: int = ROOM,
    ) -> PausableState:
        """Return the state after the drafter has read all pending tokens.

        Args:
            target: the target model.
            state: the state after paused steps.
            tokens: ``[B, S]``, prompt and output of each row, the root included.
            cache: the target's cache. The pending tokens are its newest entries.
            most: the largest number of pending tokens of a row; static. Fewer take less time.
        """
        count = state.pending.count
        positions = (cache.length - count)[:, None] + jnp.arange(most)[None]
        committed = Committed(
            tokens=tokens_at(tokens, positions),
            following=tokens_at(tokens, positions + 1),
            output=jax.tree.map(lambda leaf: leaf[:, :most], state.pending.output),
            entries=cache.gather(jnp.clip(positions, 0, cache.capacity - 1)),
            count=count,
            cache=cache,
        )
        # The drafter sees a chain that it has not drafted itself, and that was accepted in full.
        draft = Draft.chain(committed.tokens[:, 0], committed.tokens[:, 1:])
        path = jnp.broadcast_to(jnp.arange(most, dtype=jnp.int32)[None], positions.shape)
        # Of a row without pending tokens it is arbitrary: nothing is committed there.
        last = jnp.maximum(count - 1, 0)[:, None]
        newest = jnp.take_along_axis(committed.following, last, axis=1)[:, 0]
        verdict = Verdict(path=path, count=count, token=newest)
        drafter_state = self.drafter.update(target, state.own, draft, verdict, committed)
        return PausableState(
            own=drafter_state, pending=replace(state.pending, count=jnp.zeros_like(count))
        )

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        if self.paused:
            return DraftingReads()
        return self.drafter.drafting_reads(target, state.own if state else (), cache)
