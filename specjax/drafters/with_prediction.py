"""Draft from a prediction: a text that the output is expected to resemble, given with the request.

If the user asks for an edit of a file, most of the answer is known already. The prediction is
copied, one chain per step, as long as the text agrees with it. When they differ, the position in
the prediction where the text continues is searched. Until the search succeeds, the row drafts as it
would without a prediction. OpenAI calls this predicted outputs.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.base import Committed, Drafter, DraftingReads, tokens_at, zeros_of
from specjax.drafters.wrapper import Wrapper
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models.cache import KVCache, PagedCache
from specjax.models.transformer import Target
from specjax.sampling import RowSampling

WEIGHTS = (4, 3, 2, 1, 1, 1, 1, 1)
"""The points by which a position in the prediction is chosen as the one where the text continues.

Each token before the position that equals the text's token counts, the newest first. If the newest
token differs and all others agree, the position still gets 10 of 14 points, so copying continues
behind a changed token.
"""

FEWEST_POINTS = 4
"""The number of points that a position needs: below it, not even the newest token is equal."""


@struct.dataclass
class WithPredictionState:
    """The state of a drafter with predictions.

    Attributes:
        own: the state of the wrapped drafter.
        tokens: ``[B, P]``, the predictions.
        lengths: ``[B]``, the number of tokens of each prediction; 0 if the row has none.
        position: ``[B]``, the position of the prediction's token that is copied next.
        certain: ``[B]``, the position up to which the text has followed the prediction. The search
            begins there.
        fits: ``[B]`` bool, whether the text continues at ``position``.
        newest: ``[B, len(WEIGHTS)]``, the newest tokens of the output, the root last; -1 before its
            beginning.
        matched: ``[B]``, the number of output tokens that were as predicted.
    """

    own: Any
    tokens: jax.Array
    lengths: jax.Array
    position: jax.Array
    certain: jax.Array
    fits: jax.Array
    newest: jax.Array
    matched: jax.Array


@struct.dataclass
class WithPrediction(Wrapper[WithPredictionState]):
    """A wrapped drafter, and predictions for some rows.

    Rows with a prediction draft by copying it. The other rows draft as usual.

    Attributes:
        drafter: the wrapped drafter. It drafts chains, or nothing.
        tokens: ``[B, P]`` int32, one prediction for each row, or ``[P]``, one for all rows. None:
            `predict` sets them later.
        lengths: ``[B]`` int32, the number of tokens of each prediction; 0 if the row has none.
            None: all have P.
        longest: the maximum number of tokens that are copied in a step; static. With 0 nothing is
            copied, and the state stays the same, so such a drafter can alternate with one that
            copies.

    Examples:
        >>> from specjax.drafters import NoDraft, WithPrediction
        >>> expected = jnp.asarray(plain.tokens[:, 6:]).at[:, 3].set(9)  # one wrong token
        >>> drafter = WithPrediction(NoDraft(), expected, longest=4)
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # still the target's text
        True
        >>> int(result.stats.steps.max()) < 8  # it takes fewer steps
        True
    """

    drafter: Drafter
    tokens: jax.Array | None = None
    lengths: jax.Array | None = None
    longest: int = struct.field(pytree_node=False, default=16)

    @property
    def draft(self) -> DraftShape:  # pyright: ignore[reportIncompatibleVariableOverride]
        shape = self.drafter.draft_shape
        return Chain(max(self.longest, shape.depth)) if self.longest > 0 else shape

    @property
    def node_counts(self) -> tuple[int, ...]:
        counts = self.drafter.node_counts
        return tuple(sorted({*counts, self.draft_shape.nodes})) if self.longest else counts

    def check(self, target: Target) -> None:
        self.drafter.check(target)
        shape = self.drafter.draft_shape
        if self.longest and not shape.is_chain:
            raise InputError(
                f"WithPrediction(drafter): it drafts a {shape}, but predictions need chains: give"
                " it a Chain"
            )
        if self.longest < 0:
            raise InputError(f"WithPrediction(longest={self.longest}): must be at least 0")

    def start(self, target: Target, batch: int, capacity: int) -> WithPredictionState:
        tokens, lengths = self.tokens, self.lengths
        if tokens is None:
            tokens, lengths = jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32)
        elif tokens.ndim == 1:
            tokens = jnp.broadcast_to(tokens, (batch, *tokens.shape))
        elif tokens.shape[0] != batch:
            raise InputError(
                f"WithPrediction(tokens): {tokens.shape[0]} predictions for {batch} rows; give one"
                " for each"
            )
        return WithPredictionState(
            own=self.drafter.start(target, batch, capacity),
            tokens=tokens.astype(jnp.int32),
            lengths=jnp.full(batch, tokens.shape[1], jnp.int32) if lengths is None else lengths,
            position=jnp.zeros(batch, jnp.int32),
            certain=jnp.zeros(batch, jnp.int32),
            fits=jnp.ones(batch, bool),
            newest=jnp.full((batch, len(WEIGHTS)), -1, jnp.int32),
            matched=jnp.zeros(batch, jnp.int32),
        )

    def predict(
        self, state: WithPredictionState, tokens: jax.Array, lengths: jax.Array
    ) -> WithPredictionState:
        """Return the state with other predictions, for rows whose output has not begun.

        Args:
            state: the state of the rows.
            tokens: ``[B, P]``, the predictions.
            lengths: ``[B]``, the number of tokens of each.
        """
        return replace(state, tokens=tokens, lengths=lengths)

    def propose(
        self,
        target: Target,
        state: WithPredictionState,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
        **cache: Any,
    ) -> tuple[Draft, WithPredictionState]:
        drafter_depth = self.drafter.draft_shape.depth
        propose = partial(
            self.drafter.propose,
            target,
            state.own,
            root,
            sampling,
            keys[:drafter_depth],
            active,
            **cache,
        )
        if not self.longest:
            draft, drafter_state = propose()
            return draft, replace(state, own=drafter_state)
        steps = jnp.arange(self.draft_shape.depth)[None]
        positions = state.position[:, None] + steps
        copied = tokens_at(state.tokens, positions)
        is_predicted = (positions < state.lengths[:, None]) & (steps < self.longest)
        copies = (active & state.fits)[:, None] & is_predicted[:, :1]
        no_draft = zeros_of(lambda: propose()[0])
        # If every active row copies, the wrapped drafter need not run at all.
        draft = jax.lax.cond(
            jnp.all(copies[:, 0] | ~active), lambda: no_draft, lambda: propose()[0]
        )
        missing = self.draft_shape.depth - drafter_depth
        drafted = jnp.pad(draft.tokens[:, 1:], ((0, 0), (0, missing)))
        valid = jnp.pad(draft.drafted, ((0, 0), (0, missing)))
        q = None
        if draft.q is not None:
            q = jnp.pad(draft.q[:, :-1], ((0, 0), (0, missing), (0, 0)))
            # A copied token has probability 1, which keeps verification exact.
            q = jnp.where(copies[..., None], jax.nn.one_hot(copied, q.shape[-1], dtype=q.dtype), q)
        tokens, valid = jnp.where(copies, copied, drafted), jnp.where(copies, is_predicted, valid)
        # The state of the wrapped drafter stays the one before its `propose`. It must treat the
        # draft as foreign anyway, because some rows may have copied theirs.
        return Draft.chain(root, tokens, q=q, valid=valid), state

    def update(
        self,
        target: Target,
        state: WithPredictionState,
        draft: Draft,
        verdict: Verdict,
        committed: Committed,
    ) -> WithPredictionState:
        drafter_state = self.drafter.update(target, state.own, draft, verdict, committed)
        new, count = committed.following, committed.count
        steps = jnp.arange(new.shape[1])[None]
        positions = state.position[:, None] + steps
        matches = (
            (tokens_at(state.tokens, positions) == new)
            & (positions < state.lengths[:, None])
            & (steps < count[:, None])
        )
        matches = jnp.cumprod(matches & state.fits[:, None], axis=1, dtype=jnp.int32)
        run = jnp.sum(matches, axis=1)
        position = state.position + run
        recent = jnp.concatenate([state.newest, new], axis=1)
        newest = jnp.take_along_axis(
            recent, count[:, None] + jnp.arange(len(WEIGHTS))[None], axis=1
        )
        certain = jnp.where(run > 0, position, state.certain)
        # The text has left the prediction in this step, or has not found it again yet.
        is_lost = (state.lengths > 0) & (count > 0) & ~(state.fits & (run == count))

        def search() -> tuple[jax.Array, jax.Array]:
            match, points = _search(state.tokens, state.lengths, newest, certain)
            fits = jnp.where(is_lost, points >= FEWEST_POINTS, state.fits)
            return jnp.where(is_lost, match, position), fits

        # A search reads whole predictions, which most steps need not do.
        position, fits = jax.lax.cond(jnp.any(is_lost), search, lambda: (position, state.fits))
        matched = state.matched + run
        return replace(
            state,
            own=drafter_state,
            position=position,
            certain=certain,
            fits=fits,
            newest=newest,
            matched=matched,
        )

    def catch_up(
        self,
        target: Target,
        state: WithPredictionState,
        tokens: jax.Array,
        cache: KVCache | PagedCache,
        most: int,
    ) -> WithPredictionState:
        """Let the wrapped drafter catch up; it must be a `specjax.drafters.pausable.Pausable`."""
        caught_up = self.drafter.catch_up(target, state.own, tokens, cache, most)  # pyright: ignore[reportAttributeAccessIssue]
        return replace(state, own=caught_up)

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        return self.drafter.drafting_reads(target, state.own if state else (), cache)


def _search(
    tokens: jax.Array, lengths: jax.Array, newest: jax.Array, certain: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the position in each prediction that fits the ``newest`` tokens best, and its points.

    Among equals the first one from ``certain`` on wins: changes, insertions and omissions lie ahead
    of it.
    """
    count = tokens.shape[1]
    positions = jnp.arange(count + 1)[None]
    points = jnp.zeros((tokens.shape[0], count + 1), jnp.int32)
    for distance, weight in enumerate(WEIGHTS, 1):
        # No token is -2, and no filler of `newest` (-1): nothing matches before the prediction.
        before = jnp.pad(tokens, ((0, 0), (distance, 0)), constant_values=-2)[:, : count + 1]
        points = points + weight * (before == newest[:, -distance, None])
    ahead = positions - certain[:, None]
    order = jnp.where(ahead >= 0, ahead, count - ahead)  # behind `certain`: last, the nearest first
    points = jnp.where(positions < lengths[:, None], points, 0)
    # The factor is larger than any order, so that the points decide, and the order among equals.
    best = jnp.argmax(points * (2 * count + 2) - order, axis=1).astype(jnp.int32)
    return best, jnp.take_along_axis(points, best[:, None], axis=1)[:, 0]
