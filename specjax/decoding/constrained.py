"""Decoding of rows whose texts must satisfy a grammar, in masked steps.

A masked step has three parts. The drafter proposes a draft, freely, in one program. The host
fetches the draft and walks it with each row's `specjax.grammars.Matcher`, which gives the tokens
that are legal after every node. A second program scores the draft and verifies it under these
masks. So a drafter, a cache or a draft shape needs no support for grammars, and nothing is rolled
back on the device.

Where a grammar forces the next tokens, these are the draft of the step, and the drafter is not
asked. Rows without a grammar take part in the same steps, and every token is legal for them.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import sharding
from specjax.decoding.few_rows import by_rows
from specjax.decoding.loop import advance, decode, propose_step, rows_of_pass
from specjax.decoding.state import DecodeState, place_rows
from specjax.decoding.stats import StepInfo
from specjax.drafters.base import Drafter, NoDraft
from specjax.drafters.wrapper import Wrapper
from specjax.drafts import tree
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.grammars import Matcher
from specjax.grammars.matcher import mask_words
from specjax.models.transformer import Target

FORCED = 8
"""The maximum number of forced tokens in the draft of one step."""


@struct.dataclass
class _HostDraftReader(Wrapper[Any]):
    """A drafter that proposes nothing in a step, and reads the tokens that the step commits.

    The draft comes from the host. The wrapped drafter's `update` treats it as another drafter's.
    """

    drafter: Drafter

    @property
    def draft(self) -> DraftShape:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Chain(FORCED)

    @property
    def node_counts(self) -> tuple[int, ...]:
        # Where nothing is forced the pass has a root alone.
        return 1, FORCED // 2 + 1, FORCED + 1

    def own_state(self, state: Any) -> Any:
        return state

    def with_own(self, state: Any, own: Any) -> Any:
        return own

    def start(self, target: Target, batch: int, capacity: int) -> Any:
        return self.drafter.start(target, batch, capacity)


def reader(drafter: Drafter) -> Drafter:
    """Return a drafter that proposes nothing, for steps whose draft the host makes.

    It has the same state as ``drafter``, and reads the tokens that a step commits.
    """
    return _HostDraftReader(drafter)


def forced_draft(forced: Sequence[Sequence[int]]) -> Draft:
    """Return chains of forced tokens, at most `FORCED` in each row, as a draft on the host.

    The root's tokens are missing: `advance_under_masks` inserts them.
    """
    tokens = np.zeros((len(forced), FORCED + 1), np.int32)
    valid = np.zeros(tokens.shape, bool)
    valid[:, 0] = True
    for row, row_tokens in enumerate(forced):
        tokens[row, 1 : len(row_tokens) + 1] = row_tokens
        valid[row, 1 : len(row_tokens) + 1] = True
    return Draft.of_tree(tokens, tree.chain_parents(FORCED + 1), valid=valid)  # pyright: ignore[reportArgumentType]


def begin_with_forced(draft: Draft, forced: Sequence[Sequence[int]]) -> Draft:
    """Return a draft of chains in which the forced tokens of each row come first.

    A chain that begins with the forced tokens stays as it is. Any other chain would be rejected
    within them, so it is replaced by them. Its q stays: the rows must be coupled or greedy.

    Args:
        draft: chains, in numpy arrays. Their drafter must treat any draft as another drafter's.
        forced: the forced tokens of each row; empty for a row whose chain stays.

    Examples:
        >>> from specjax.decoding.constrained import begin_with_forced
        >>> from specjax.drafts.draft import Draft
        >>> root, tokens = np.array([1, 1]), np.array([[5, 6, 7], [5, 6, 7]])
        >>> draft = jax.device_get(Draft.chain(root, tokens, valid=tokens < 7))
        >>> begun = begin_with_forced(draft, [[5], [6]])
        >>> begun.tokens[:, 1:].tolist(), begun.valid[:, 1:].tolist()
        ([[5, 6, 7], [6, 6, 7]], [[True, True, False], [True, False, False]])
    """
    tokens, valid = np.array(draft.tokens), np.array(draft.drafted)
    for row, row_tokens in enumerate(forced):
        first = np.array(row_tokens[: draft.depth], np.int32)
        count = len(first)
        if not (valid[row, :count].all() and np.array_equal(tokens[row, 1 : count + 1], first)):
            tokens[row, 1 : count + 1] = first
            valid[row] = np.arange(valid.shape[1]) < count
    return replace(
        draft, tokens=tokens, valid=np.pad(valid, ((0, 0), (1, 0)), constant_values=True)
    )


def forced_is_longer(forced: Sequence[Sequence[int]], rows: int, expected: float) -> bool:
    """Return whether forced tokens promise a longer step than a drafter, over all rows.

    Args:
        forced: the forced tokens of each row.
        rows: the number of rows that decode.
        expected: the tokens that a row is expected to emit in a step with the drafter.
    """
    return any(forced) and sum(map(len, forced)) + rows >= expected * rows


_SLOW_SECONDS = 1e-3
"""The CPU time of a row's masks from which on the next ones are made in a thread of their own.

Masks that take less are made one row after the other. llguidance releases Python's lock for each
mask, and threads that pass on the lock that often took twice the time of one (8 rows of 8 nodes,
150,000 tokens, two cores: 5.3 ms instead of 2.4).
"""


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that make masks. llguidance releases Python's lock meanwhile."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "specjax-masks")


def legal_tokens(
    matchers: Sequence[Matcher | None],
    draft: Draft,
    vocab_size: int,
    on_error: Callable[[int, Exception], None] | None = None,
) -> tuple[np.ndarray, int]:
    """Return the tokens that are legal after each node of a draft.

    Args:
        matchers: the matcher of each row. None if every token is legal, as in rows that are done.
        draft: the draft of B rows and N nodes, in numpy arrays.
        vocab_size: the number of tokens of the target, V.
        on_error: is called with a row and the error of its matcher. Every token is legal then. None
            raises the error.

    Returns:
        ``[B, N, ceil(V / 32)]`` uint32, one bit for each token, in a new array; and the number of
        drafted nodes that are not legal.
    """
    batch, nodes = draft.tokens.shape
    parents = np.broadcast_to(np.asarray(draft.parents), (batch, nodes))
    valid = np.ones((batch, nodes), bool) if draft.valid is None else np.asarray(draft.valid)
    legal = np.full((batch, nodes, mask_words(vocab_size)), np.uint32(0xFFFFFFFF))

    def write(row: int) -> int:
        matcher = matchers[row]
        assert matcher is not None
        return matcher.write_masks(
            legal[row], draft.tokens[row].tolist(), parents[row].tolist(), valid[row].tolist()
        )

    constrained = {row: matcher for row, matcher in enumerate(matchers) if matcher is not None}
    jobs: dict[int, Callable[[], int]] = {row: partial(write, row) for row in constrained}
    if len(jobs) > 1:
        for row, matcher in constrained.items():
            if matcher.draft_seconds > _SLOW_SECONDS:
                jobs[row] = _threads().submit(jobs[row]).result
    illegal_nodes = 0
    for row, job in jobs.items():
        try:
            illegal_nodes += job()
        except Exception as error:
            if on_error is None:
                raise
            legal[row] = 0xFFFFFFFF
            on_error(row, error)
    return legal, illegal_nodes


@by_rows(rows_of_pass, models=("target", "drafter"), donate_argnames="state")
def _propose(target: Target, drafter: Drafter, state: DecodeState) -> tuple[Draft, DecodeState]:
    """Propose a draft for every row, see `propose_step`. The state is donated."""
    draft, state = propose_step(target, drafter, state)
    return draft, place_rows(state, target)


def advance_under_masks(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    draft: Draft,
    legal: jax.Array,
    logprobs: int | None = None,
) -> tuple[DecodeState, StepInfo]:
    """Verify a draft whose legal tokens are known. Arguments and results are those of `advance`.

    The root's tokens are those of the state, whatever the draft has there.
    """
    tokens = jnp.asarray(draft.tokens).at[:, 0].set(state.roots)
    return advance(target, drafter, state, replace(draft, tokens=tokens), logprobs, legal)


def left_over(before: Any, after: Any) -> list[jax.Array]:
    """Return the arrays of a drafter's state that exist only between draft and verdict.

    A program that receives them as donated arguments returns them. Otherwise JAX warns that it
    cannot use their memory.

    Args:
        before: the drafter's state after drafting.
        after: its state after the verdict.
    """
    stays = {path for path, _ in jax.tree_util.tree_leaves_with_path(after)}
    leaves = jax.tree_util.tree_leaves_with_path(before)
    return [leaf for path, leaf in leaves if path not in stays]


@by_rows(rows_of_pass, models=("target", "drafter"), donate_argnames="state")
def _advance(
    target: Target, drafter: Drafter, state: DecodeState, draft: Draft, legal: jax.Array
) -> tuple[DecodeState, jax.Array, list[jax.Array]]:
    """Verify a draft under masks. The state is donated.

    Returns:
        The state; ``[B, D+1]`` the emitted tokens, -1 behind a row's last; and arrays that are not
        used any more.
    """
    before, drafted = state.lengths, state.drafter
    state, _ = advance_under_masks(target, drafter, state, draft, legal)
    index = jnp.arange(draft.depth + 1)[None]
    tokens = state.tokens_from(before, draft.depth + 1)
    emitted = jnp.where(index < (state.lengths - before)[:, None], tokens, -1)
    return place_rows(state, target), emitted, left_over(drafted, state.drafter)


@dataclass
class ConstrainedRows:
    """The host's part of constrained decoding: a matcher for each row, and some counts.

    Attributes:
        matchers: the matcher of each row; None for a row without a grammar.
        stuck: the rows that have ended because no token was legal.
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
    stuck: list[int] = field(default_factory=list)
    forced_tokens: int = 0
    illegal_nodes: int = 0
    _emitted_per_row: float | None = field(default=None, repr=False)

    def stuck_error(self, result: Any = None) -> InputError:
        """Return the error for the rows of ``stuck``, at least one, with the batch's ``result``."""
        first = self.matchers[self.stuck[0]]
        assert first is not None
        return first.stuck_error(self.stuck, result)

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
        while max_steps > 0 and not done.all():
            # Steps in which no token can be illegal need no masks, and so no host between them.
            free = min(max_steps, self._free_steps(drafter, done))
            if free:
                state = self._run_free(target, drafter, state, free)
            else:
                state = self._step(target, drafter, state, done)
            max_steps -= max(1, free)
            before = done
            done, lengths, ends = sharding.to_host(
                (state.done, state.lengths, state.max_lengths), target.mesh
            )
            for row in np.flatnonzero(done & ~before & (lengths < ends)).tolist():
                matcher = self.matchers[row]
                if matcher is not None and matcher.is_stuck:
                    self.stuck.append(row)
        return state

    def _free_steps(self, drafter: Drafter, done: np.ndarray) -> int:
        """Return the number of next steps in which every token is legal, in all rows."""
        rows = zip(self.matchers, done.tolist(), strict=True)
        running = [it for it, is_done in rows if it is not None and not is_done]
        if not running:
            return np.iinfo(np.int32).max
        return min(it.free_tokens for it in running) // (drafter.draft_shape.depth + 1)

    def _run_free(
        self, target: Target, drafter: Drafter, state: DecodeState, steps: int
    ) -> DecodeState:
        """Run steps without masks."""
        starts = sharding.to_host(state.lengths, target.mesh)
        state = decode(target, drafter, state, steps)
        tokens, lengths = sharding.to_host((state.tokens, state.lengths), target.mesh)
        for row, matcher in enumerate(self.matchers):
            if matcher is not None:
                matcher.append(tokens[row, starts[row] : lengths[row]].tolist())
        return state

    def _step(
        self, target: Target, drafter: Drafter, state: DecodeState, done: np.ndarray
    ) -> DecodeState:
        """Run one masked step for the rows that are not ``done [B]``."""
        matchers = [
            None if is_done else matcher
            for matcher, is_done in zip(self.matchers, done.tolist(), strict=True)
        ]
        forced = [[] if matcher is None else matcher.forced(FORCED) for matcher in matchers]
        active = int((~done).sum())
        expected = self._emitted_per_row or 1 + drafter.draft_shape.depth / 2
        is_from_host = isinstance(drafter, NoDraft) or forced_is_longer(forced, active, expected)
        if is_from_host:
            drafter, draft = reader(drafter), forced_draft(forced)
            on_host = draft
        else:
            draft, state = _propose(target, drafter, state)
            on_host = sharding.to_host(replace(draft, q=None), target.mesh)
        legal, illegal_nodes = legal_tokens(matchers, on_host, target.config.vocab_size)
        self.illegal_nodes += illegal_nodes
        state, emitted, _ = _advance(target, drafter, state, draft, jnp.asarray(legal))
        emitted = sharding.to_host(emitted, target.mesh)
        counts = (emitted >= 0).sum(axis=1)
        for row, matcher in enumerate(self.matchers):
            if matcher is not None:
                matcher.append(emitted[row, : counts[row]].tolist())
        if is_from_host:
            self.forced_tokens += int(sum(map(min, counts, map(len, forced))))
        else:
            mean = float(counts[~done].mean())
            before = mean if self._emitted_per_row is None else self._emitted_per_row
            self._emitted_per_row = 0.8 * before + 0.2 * mean
        return state
