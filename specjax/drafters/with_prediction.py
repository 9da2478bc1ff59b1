"""Drafting from a prediction: a text, given with the request, that the output will be much like.

Who asks for an edit of a file has most of the answer already. The prediction is copied, a chain at a time, as long as the text
goes on as it says. Where they part, the place to go on from is looked for, and until it is found the row drafts as it would
without a prediction. OpenAI's name for it is predicted outputs.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.base import Committed, Drafter, DraftingReads
from specjax.drafters.wrapper import Wrapper
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models.cache import KVCache, PagedCache
from specjax.models.transformer import Target
from specjax.sampling import RowSampling

WEIGHTS = (4, 3, 2, 1, 1, 1, 1, 1)
"""What makes a place in the prediction the one to go on from: points for each of the tokens before it that equals the text's,
the newest first. One token that was changed leaves 10 of 14, and the line of which it is a part is gone on with."""

FEWEST_POINTS = 4
"""With fewer, there is no such place: not even the newest token is the same."""


@struct.dataclass
class WithPredictionState:
    """Attributes:
    own: the other drafter's state.
    tokens: ``[B, P]`` the predictions.
    lengths: ``[B]`` of the predictions; 0: the row has none.
    position: ``[B]`` of the token that is to be copied next.
    certain: ``[B]`` how far the text certainly went along with the prediction: where the search begins.
    fits: ``[B]`` bool, the text is at ``position``.
    newest: ``[B, len(WEIGHTS)]`` the newest tokens of the output, the root last; -1 before its beginning.
    matched: ``[B]`` tokens of the output that came where the prediction had them.
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
    """Another drafter, and predictions for some rows. These rows draft by copying, the others as always.

    Attributes:
        drafter: the other, which drafts chains, or nothing.
        tokens: ``[B, P]`` int32, a prediction for each row, or ``[P]``, one for all of them; None: they are put into the state
            later.
        lengths: ``[B]`` int32, tokens of each prediction; 0: the row has none. None: all are P.
        longest: most tokens that are copied in a step; static. With 0 nothing is copied, and the state is kept: such a drafter
            may take turns with one that copies.

    Examples:
        >>> from specjax.drafters import NoDraft, WithPrediction
        >>> expected = jnp.asarray(plain.tokens[:, 6:]).at[:, 3].set(9)  # one token is another
        >>> drafter = WithPrediction(NoDraft(), expected, longest=4)
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # the text is the target's
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
        own = self.drafter.draft_shape
        return Chain(max(self.longest, own.depth)) if self.longest > 0 else own

    @property
    def node_counts(self) -> tuple[int, ...]:
        own = self.drafter.node_counts
        return tuple(sorted({*own, self.draft_shape.nodes})) if self.longest else own

    def check(self, target: Target) -> None:
        self.drafter.check(target)
        shape = self.drafter.draft_shape
        if self.longest and shape.nodes != shape.depth + 1:
            raise InputError(f"WithPrediction(drafter): drafts a {shape}, and beside copies go chains: give it a Chain")
        if self.longest < 0:
            raise InputError(f"WithPrediction(longest={self.longest}): must be at least 0")

    def start(self, target: Target, batch: int, capacity: int) -> WithPredictionState:
        tokens, lengths = self.tokens, self.lengths
        if tokens is None:
            tokens, lengths = jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32)
        elif tokens.ndim == 1:
            tokens = jnp.broadcast_to(tokens, (batch, *tokens.shape))
        elif tokens.shape[0] != batch:
            raise InputError(f"WithPrediction(tokens): {tokens.shape[0]} predictions for {batch} rows; give one for each")
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

    def predict(self, state: WithPredictionState, tokens: jax.Array, lengths: jax.Array) -> WithPredictionState:
        """The state of rows whose output has yet to begin, with other predictions: ``tokens [B, P]``, ``lengths [B]``."""
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
        own_depth = self.drafter.draft_shape.depth
        propose = partial(self.drafter.propose, target, state.own, root, sampling, keys[:own_depth], active, **cache)
        if not self.longest:
            draft, own = propose()
            return draft, replace(state, own=own)
        steps = jnp.arange(self.draft_shape.depth)[None]
        positions = state.position[:, None] + steps
        copied = _at(state.tokens, positions)
        is_there = (positions < state.lengths[:, None]) & (steps < self.longest)
        copies = (active & state.fits)[:, None] & is_there[:, :1]
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: propose()[0]))
        draft = jax.lax.cond(jnp.all(copies[:, 0] | ~active), lambda: nothing, lambda: propose()[0])
        missing = self.draft_shape.depth - own_depth
        drafted = jnp.pad(draft.tokens[:, 1:], ((0, 0), (0, missing)))
        valid = jnp.pad(draft.drafted, ((0, 0), (0, missing)))
        q = None
        if draft.q is not None:
            q = jnp.pad(draft.q[:, :-1], ((0, 0), (0, missing), (0, 0)))
            q = jnp.where(copies[..., None], jax.nn.one_hot(copied, q.shape[-1], dtype=q.dtype), q)
        tokens, valid = jnp.where(copies, copied, drafted), jnp.where(copies, is_there, valid)
        # The other drafter's state is the one from before: to it the draft comes from elsewhere, as it does where rows copy.
        return Draft.chain(root, tokens, q=q, valid=valid), state

    def update(
        self, target: Target, state: WithPredictionState, draft: Draft, verdict: Verdict, committed: Committed
    ) -> WithPredictionState:
        own = self.drafter.update(target, state.own, draft, verdict, committed)
        new, count = committed.following, committed.count
        steps = jnp.arange(new.shape[1])[None]
        positions = state.position[:, None] + steps
        agrees = (_at(state.tokens, positions) == new) & (positions < state.lengths[:, None]) & (steps < count[:, None])
        agrees = jnp.cumprod(agrees & state.fits[:, None], axis=1, dtype=jnp.int32)
        run = jnp.sum(agrees, axis=1)
        position = state.position + run
        both = jnp.concatenate([state.newest, new], axis=1)
        newest = jnp.take_along_axis(both, count[:, None] + jnp.arange(len(WEIGHTS))[None], axis=1)
        certain = jnp.where(run > 0, position, state.certain)
        is_lost = (state.lengths > 0) & (count > 0) & ~(state.fits & (run == count))

        def search() -> tuple[jax.Array, jax.Array]:
            found, points = _search(state.tokens, state.lengths, newest, certain)
            return jnp.where(is_lost, found, position), jnp.where(is_lost, points >= FEWEST_POINTS, state.fits)

        position, fits = jax.lax.cond(jnp.any(is_lost), search, lambda: (position, state.fits))
        matched = state.matched + run
        return replace(state, own=own, position=position, certain=certain, fits=fits, newest=newest, matched=matched)

    def catch_up(
        self, target: Target, state: WithPredictionState, tokens: jax.Array, cache: KVCache | PagedCache
    ) -> WithPredictionState:
        """As `specjax.drafters.pausable.Pausable.catch_up`, where the other drafter is such a one."""
        return replace(state, own=self.drafter.catch_up(target, state.own, tokens, cache))  # pyright: ignore[reportAttributeAccessIssue]

    def drafting_reads(self, target: Target, state: WithPredictionState | tuple[()] = (), cache: Any = ()) -> DraftingReads:
        return self.drafter.drafting_reads(target, state.own if state else (), cache)


def _at(tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """``[B, n]`` of ``tokens [B, P]`` those at ``positions [B, n]``; anything where there is none."""
    return jnp.take_along_axis(tokens, jnp.clip(positions, 0, tokens.shape[1] - 1), axis=1)


def _search(tokens: jax.Array, lengths: jax.Array, newest: jax.Array, certain: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The place in each row's prediction whose tokens before it are most like the ``newest`` of the text, and its points.

    Among equals the first one from ``certain`` on: what was changed or put in lies there, and what was left out.
    """
    count = tokens.shape[1]
    positions = jnp.arange(count + 1)[None]
    points = jnp.zeros((tokens.shape[0], count + 1), jnp.int32)
    for back, weight in enumerate(WEIGHTS, 1):
        before = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-2)[:, : count + 1]
        points = points + weight * (before == newest[:, -back, None])
    ahead = positions - certain[:, None]
    order = jnp.where(ahead >= 0, ahead, count - ahead)  # what was gone through comes last, the nearest first
    points = jnp.where(positions < lengths[:, None], points, 0)
    best = jnp.argmax(points * (2 * count + 2) - order, axis=1).astype(jnp.int32)
    return best, jnp.take_along_axis(points, best[:, None], axis=1)[:, 0]
