"""Decoding of rows whose texts must satisfy a grammar, in masked steps.

A masked step has three parts. The drafter proposes a draft, freely, in one program. The host
fetches the draft and walks it with each row's `specjax.grammars.Matcher`, which gives the tokens
that are legal after every node. A second program scores the draft and verifies it under these
masks. So a drafter, a cache or a draft shape needs no support for grammars, and nothing is rolled
back on the device.

Where a grammar forces the next tokens, these are the draft of the step, and the drafter is not
asked. Rows without a grammar take part in the same steps, and every token is legal for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import sharding
from specjax.decoding.few_rows import by_rows
from specjax.decoding.loop import advance, propose_step, rows_of_pass
from specjax.decoding.state import DecodeState, place_rows
from specjax.drafters.base import Committed, Drafter, NoDraft
from specjax.drafters.wrapper import Wrapper
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.grammars import Matcher
from specjax.models.transformer import Target

FORCED = 8
"""The maximum number of forced tokens in the draft of one step."""


@struct.dataclass
class _Reader(Wrapper[Any]):
    """A drafter that proposes nothing in a step, and reads the tokens that the step commits.

    The draft comes from the host. The wrapped drafter's `update` might rely on what it has stored
    while drafting, so the committed tokens go to its `append_committed`, like those of a prompt.
    """

    drafter: Drafter

    @property
    def draft(self) -> DraftShape:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Chain(FORCED)

    @property
    def node_counts(self) -> tuple[int, ...]:
        return self.draft_shape.node_counts

    def own_state(self, state: Any) -> Any:
        return state

    def with_own(self, state: Any, own: Any) -> Any:
        return own

    def start(self, target: Target, batch: int, capacity: int) -> Any:
        return self.drafter.start(target, batch, capacity)

    def update(
        self, target: Target, state: Any, draft: Draft, verdict: Verdict, committed: Committed
    ) -> Any:
        return self.append_committed(target, state, committed)


@by_rows(rows_of_pass, models=("target", "drafter"), donate_argnames="state")
def _propose(target: Target, drafter: Drafter, state: DecodeState) -> tuple[Draft, DecodeState]:
    """Propose a draft for every row, see `propose_step`. The state is donated."""
    draft, state = propose_step(target, drafter, state)
    return draft, place_rows(state, target)


@by_rows(rows_of_pass, models=("target", "drafter"), donate_argnames="state")
def _advance(
    target: Target, drafter: Drafter, state: DecodeState, draft: Draft, legal: jax.Array
) -> tuple[DecodeState, jax.Array]:
    """Verify a draft under masks. The state is donated.

    Returns:
        The state, and ``[B, D+1]`` the emitted tokens, -1 behind a row's last.
    """
    before = state.lengths
    state, info = advance(target, drafter, state, draft, legal=legal)
    index = jnp.arange(draft.depth + 1)[None]
    positions = jnp.minimum(before[:, None] + index, state.tokens.shape[1] - 1)
    emitted = jnp.take_along_axis(state.tokens, positions, axis=1)
    return place_rows(state, target), jnp.where(index < info.emitted[:, None], emitted, -1)


@dataclass
class ConstrainedRows:
    """The host's part of constrained decoding: a matcher for each row, and some counts.

    Attributes:
        matchers: the matcher of each row; None for a row without a grammar.
        forced_tokens: the number of forced tokens that were drafted and emitted.
        illegal_nodes: the number of drafted nodes that were not legal.

    Examples:
        >>> import specjax
        >>> from specjax import decoding
        >>> from specjax.decoding.constrained import ConstrainedRows
        >>> generate = specjax.load("embedded")
        >>> grammar = generate.grammar_compiler.compile(specjax.Regex("[0-9]{3}"))
        >>> options = decoding.GenerationOptions(max_new_tokens=8, grammar=grammar)
        >>> prompt = [generate.encode("x = ")]
        >>> drafter, state = decoding.start(generate.target, None, prompt, options=options)
        >>> rows = ConstrainedRows([grammar.matcher(stop_token_ids=(0,))])
        >>> state = rows.decode(generate.target, drafter, state, max_steps=100)
        >>> state.done.tolist(), rows.completed.tolist()
        ([True], [True])
    """

    matchers: Sequence[Matcher | None]
    forced_tokens: int = 0
    illegal_nodes: int = 0
    _emitted_per_row: float | None = field(default=None, repr=False)

    @property
    def completed(self) -> np.ndarray:
        """``[B]`` bool, whether the row's text satisfies its grammar; True without a grammar."""
        return np.array([matcher is None or matcher.is_complete for matcher in self.matchers])

    def decode(
        self, target: Target, drafter: Drafter, state: DecodeState, max_steps: int
    ) -> DecodeState:
        """Run masked steps until every row is done, or ``max_steps`` times. The state is donated.

        It must have been started for drafts of at least `FORCED` tokens.
        """
        done = sharding.to_host(state.done, target.mesh)
        for _ in range(max_steps):
            if done.all():
                break
            state = self._step(target, drafter, state, done)
            before = done
            done, lengths, ends = sharding.to_host(
                (state.done, state.lengths, state.max_lengths), target.mesh
            )
            self._check_ends(np.flatnonzero(done & ~before & (lengths < ends)))
        return state

    def _check_ends(self, rows: np.ndarray) -> None:
        """Raise InputError if one of these rows has ended because no token is legal.

        They have room for more tokens.
        """
        for row in rows:
            matcher = self.matchers[row]
            if matcher is not None and matcher.is_stuck:
                raise InputError(
                    f"grammar: row {row} cannot go on: the next token must be a stop token, or one"
                    " that the tokenizer does not have; change eos_token_ids or the grammar"
                )

    def _step(
        self, target: Target, drafter: Drafter, state: DecodeState, done: np.ndarray
    ) -> DecodeState:
        """Run one masked step for the rows that are not ``done [B]``."""
        forced = [
            [] if matcher is None or done[row] else matcher.forced(FORCED)
            for row, matcher in enumerate(self.matchers)
        ]
        is_forced = isinstance(drafter, NoDraft) or self._forced_is_longer(forced, drafter, done)
        if is_forced:
            drafter = _Reader(drafter)
            drafted = np.zeros((len(forced), FORCED), np.int32)
            valid = np.zeros((len(forced), FORCED), bool)
            for row, tokens in enumerate(forced):
                drafted[row, : len(tokens)], valid[row, : len(tokens)] = tokens, True
            draft = Draft.chain(state.roots, jnp.asarray(drafted), valid=jnp.asarray(valid))
        else:
            draft, state = _propose(target, drafter, state)
        legal = self._masks(target, draft, done)
        state, emitted = _advance(target, drafter, state, draft, jnp.asarray(legal))
        emitted = sharding.to_host(emitted, target.mesh)
        counts = (emitted >= 0).sum(axis=1)
        for row, matcher in enumerate(self.matchers):
            if matcher is not None:
                matcher.append(emitted[row, : counts[row]].tolist())
        if is_forced:
            self.forced_tokens += int(sum(map(min, counts, map(len, forced))))
        else:
            mean = float(counts[~done].mean())
            before = mean if self._emitted_per_row is None else self._emitted_per_row
            self._emitted_per_row = 0.8 * before + 0.2 * mean
        return state

    def _forced_is_longer(
        self, forced: Sequence[Sequence[int]], drafter: Drafter, done: np.ndarray
    ) -> bool:
        """Return whether forced tokens promise a longer step than the drafter, over all rows."""
        if not any(forced):
            return False
        active = int((~done).sum())
        expected = self._emitted_per_row or 1 + drafter.draft_shape.depth / 2
        return sum(map(len, forced)) + active >= expected * active

    def _masks(self, target: Target, draft: Draft, done: np.ndarray) -> np.ndarray:
        """Return ``[B, N, ceil(V / 32)]`` uint32, the legal tokens after each node of the draft."""
        batch, nodes = draft.tokens.shape
        grown = draft.parents if isinstance(draft.parents, jax.Array) else None
        tokens, valid, parents = sharding.to_host((draft.tokens, draft.valid, grown), target.mesh)
        parents = np.broadcast_to(draft.parents if parents is None else parents, (batch, nodes))
        valid = np.ones((batch, nodes), bool) if valid is None else valid
        words = -(-target.config.vocab_size // 32)
        # A new array for each step: JAX may still read the last one, without a copy of it.
        legal = np.full((batch, nodes, words), np.uint32(0xFFFFFFFF))
        for row, matcher in enumerate(self.matchers):
            if matcher is not None and not done[row]:
                masks, illegal = matcher.masks(
                    tokens[row].tolist(), parents[row].tolist(), valid[row].tolist()
                )
                legal[row] = masks
                self.illegal_nodes += illegal
        return legal
