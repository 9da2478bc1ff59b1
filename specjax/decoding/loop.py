"""The decoding loop: draft, score, verify, keep. All of it is one compiled program on the device.

Plain autoregressive decoding (``drafter=None``) runs the same loop with a draft that is only a
root. It is the baseline of every speed-up.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

from specjax import sharding
from specjax.decoding.few_rows import by_rows
from specjax.decoding.state import DecodeState, place_rows
from specjax.decoding.stats import Logprobs, StepInfo
from specjax.decoding.verification import RULES, verify
from specjax.drafters.base import Committed, Drafter, LikelyTokens, append_tokens, check_proposal
from specjax.drafts.draft import Draft, Verdict
from specjax.errors import InputError
from specjax.models.cache import Entries, gather_entries
from specjax.models.transformer import States, Target
from specjax.sampling import at_nodes, position_keys, split_keys


def step(
    target: Target, drafter: Drafter, state: DecodeState, logprobs: int | None = None
) -> tuple[DecodeState, StepInfo]:
    """Run one step: draft, score, verify, keep.

    It is one forward pass of the target. Every row that is not done emits at least one token, or
    fails because no token can be drawn after its root. For ``logprobs`` see `advance`.

    Examples:
        >>> from specjax import decoding
        >>> drafter, state = decoding.start(target, specjax.PromptLookup(draft=2), prompts)
        >>> state, info = jax.jit(decoding.step)(target, drafter, state)
        >>> np.array_equal(state.lengths, 6 + info.emitted)
        True
    """
    draft, state = propose_step(target, drafter, state)
    return advance(target, drafter, state, draft, logprobs)


def propose_step(target: Target, drafter: Drafter, state: DecodeState) -> tuple[Draft, DecodeState]:
    """Propose a draft below every row's root.

    Returns:
        The draft, and the state to pass to `advance`, which ends the step.

    Examples:
        >>> from specjax import decoding
        >>> drafter, state = decoding.start(target, specjax.PromptLookup(draft=2), prompts)
        >>> draft, state = jax.jit(decoding.propose_step)(target, drafter, state)
        >>> draft.tokens[1].tolist()  # the root, 1, and what followed "3 5 1" before
        [1, 3, 5]
    """
    _, draft_keys, _ = _keys_of_step(state, drafter.draft_shape.depth)
    reads = drafter.reads(target.config)
    caches = {"cache": state.cache.of_layers(reads)} if reads else {}
    sampling = state.next_sampling
    # Rows that are done are not active: the loop of a chain with `stop_below` ends as soon as every
    # active row has stopped.
    proposal = drafter.propose(
        target, state.drafter, state.roots, sampling, draft_keys, ~state.done, **caches
    )
    draft, drafter_state = check_proposal(drafter, proposal, state.lengths.shape[0])
    if state.draft_limits is not None:
        # A row that may draft nothing still counts as active above: its drafter must read the root.
        draft = draft.limited(state.draft_limits)
    return draft, replace(state, drafter=drafter_state)


def _keys_of_step(state: DecodeState, depth: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the random keys of a step.

    Worked example: drafts of depth 2 below a row of 7 tokens, the last of which is the root. Tokens
    are drawn for the positions 7 (the first drafted token), 8 (the second) and 9 (the bonus, if
    both are accepted).

    With coupled sampling, ``k(i)`` is the row's key folded with position i, and never changes::

        the state's next key    the row's key, unchanged
        the drafter's keys      k(7)   k(8)          first and second level
        verification's keys     k(7)   k(8)   k(9)   the target's own draw at the root, at the first
                                                     and at the second token

    Drafter and target share k(7) and k(8), and the step emits the target's draws. If the first
    token is rejected, the target's draw for position 7 replaces it, and the next step begins at
    position 8 with k(8). No token that was drawn with k(8) has been emitted. So using it again is
    unbiased: the emitted token at a position depends only on the text and on that position's key.

    Without coupled sampling the row's key is split into three, and nothing is shared::

        the state's next key    a              split again in the next step
        the drafter's keys      b, split in 2  first and second level
        verification's key      c              the rule splits it: some parts judge drafted tokens,
                                               one draws the last token

    Returns:
        The state's next keys ``[B]``, the drafter's keys ``[depth, B]``, and verification's keys:
        ``[B]``, or with coupled sampling ``[depth + 1, B]``, one for each position below the root.
        The first ``depth`` of those are the drafter's keys.
    """
    if RULES[state.sampling.rule].keys_by_position and not state.sampling.greedy:
        positions = position_keys(state.keys, state.lengths + jnp.arange(depth + 1)[:, None])
        return state.keys, positions[:-1], positions
    keys, draft_keys, verify_keys = split_keys(state.keys, 3)
    return keys, split_keys(draft_keys, depth), verify_keys


def advance(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    draft: Draft,
    logprobs: int | None = None,
    legal: jax.Array | None = None,
) -> tuple[DecodeState, StepInfo]:
    """Score ``draft``, verify it and keep the accepted tokens.

    The draft comes from `propose_step`, or from elsewhere (another process or machine). If it comes
    from elsewhere, do not call `propose_step` in this step: the drafter's state would hold its own
    draft. (Drafters that take everything that they store from ``append_committed`` are an
    exception.) A draft may have any shape and may be shallower than the drafts that the state was
    started for; it may also be a root alone.

    Args:
        target: the target.
        drafter: the drafter whose state is updated.
        state: the state before the step.
        draft: the draft to verify.
        logprobs: the number of likeliest tokens whose log-probabilities `StepInfo` has at the
            position of each emitted token, beside that of the emitted token itself. They are the
            target's. None for no log-probabilities.
        legal: the tokens that the rows' grammars allow after each node, as in
            `specjax.decoding.verification.verify`; None if no row has a grammar.

    Returns:
        The next state, and the `StepInfo` of this step. Their shapes depend on ``state`` alone,
        except that `StepInfo` contains the draft itself, and log-probabilities for its depth.

    Raises:
        InputError: The draft is deeper than the drafts that the state was started for, so that the
            statistics have no room; or the draft is a tree and the state's rule verifies chains
            only.

    Examples:
        >>> from specjax import decoding
        >>> from specjax.drafters import Draft
        >>> options = decoding.GenerationOptions(max_new_tokens=8)
        >>> drafter, state = decoding.start(
        ...     target, specjax.PromptLookup(draft=2), prompts, options=options
        ... )
        >>> tokens = jnp.asarray(plain.tokens[:, 6:8])  # what plain decoding emits
        >>> draft = Draft.chain(state.roots, tokens)
        >>> state, info = jax.jit(decoding.advance)(target, drafter, state, draft)
        >>> info.emitted.tolist()  # both tokens are accepted, and the target adds one
        [3, 3]
    """
    if not (RULES[state.sampling.rule].takes_trees or draft.is_chain):
        raise InputError(
            f"draft: a tree, but the state was started with rule={state.sampling.rule!r}, which"
            ' verifies chains: start it with rule="independent", or rule="coupled"'
        )
    max_depth = state.stats.depth
    if draft.depth > max_depth:
        lacks_levels = draft.grown is not None and draft.levels is None
        advice = "; give the draft's levels" if lacks_levels else ""
        raise InputError(
            f"draft: it is {draft.depth} deep, but the state was started for drafts of depth"
            f" {max_depth}{advice}"
        )
    keys, _, verify_keys = _keys_of_step(state, draft.depth)
    scored = _score(target, drafter, draft, state, verify_keys, logprobs, legal)
    accepted = scored.verdict.count - 1
    verdict, done, failed = _cut_at_end(scored.verdict, scored.emitted, state, legal)
    # `hidden` is computed last in the pass. If the write depends on it, XLA can update the cache in
    # place, and need not copy it first (see `KVCache.append`).
    cache = state.cache.append(scored.entries, verdict.count, after=scored.output.hidden)
    committed = Committed(
        tokens=jnp.take_along_axis(draft.tokens, verdict.path, axis=1),
        following=scored.emitted,
        output=scored.output,
        entries=scored.entries,
        count=verdict.count,
        cache=cache,
        likely=scored.likely,
    )
    # Padded to the state's depth, so that drafts of all depths are counted in the same arrays.
    info = StepInfo(
        active=~state.done,
        emitted=verdict.count,
        accepted=jnp.minimum(accepted, verdict.count),
        drafted=jnp.where(state.done, 0, draft.length),
        drafted_at=_pad(draft.drafted_at & ~state.done[:, None], max_depth),
        scored=jnp.where(state.done, 0, scored.num_nodes),
        draft=draft,
        path=_pad(verdict.path, max_depth + 1),
        logprobs=scored.logprobs,
    )
    is_accepted = jnp.arange(draft.depth + 1)[None] < info.accepted[:, None]
    sampling = state.sampling
    if sampling.adjustments is not None:
        adjustments = sampling.adjustments.after(scored.emitted, verdict.count)
        sampling = replace(sampling, adjustments=adjustments)
    return (
        replace(
            state,
            sampling=sampling,
            tokens=append_tokens(state.tokens, state.lengths, scored.emitted, verdict.count),
            lengths=state.lengths + verdict.count,
            done=done,
            failed=state.failed | failed,
            keys=keys,
            cache=cache,
            drafter=drafter.update(target, state.drafter, draft, verdict, committed),
            stats=state.stats.add(info),
            accepted=append_tokens(state.accepted, state.lengths, is_accepted, verdict.count),
        ),
        info,
    )


@struct.dataclass
class _Scored:
    """The result of one pass of the target over a draft.

    Attributes:
        verdict: what the target accepts of the draft.
        emitted: ``[B, D+1]`` the accepted tokens and the bonus, in order.
        output: the target's hidden states along the accepted path, ``[B, D+1, …]``.
        entries: the cache entries of each layer along the accepted path, ``[B, heads, D+1, dim]``
            each.
        num_nodes: scalar, the number of nodes that the pass had in each row.
        logprobs: those of the emitted tokens, ``[B, D+1]``; None if they were not requested.
        likely: the likeliest tokens after all nodes, ``[B, N, k]``; None if the drafter does not
            request them. They are meaningless at nodes that were not drafted.

    Only the first ``verdict.count`` elements of a row are meaningful along the axis D+1. For a
    chain, for example, ``output`` and ``entries`` hold all nodes, rejected ones as well.
    """

    verdict: Verdict
    emitted: jax.Array
    output: States
    entries: Entries
    num_nodes: jax.Array
    logprobs: Logprobs | None
    likely: LikelyTokens | None


def _score(
    target: Target,
    drafter: Drafter,
    draft: Draft,
    state: DecodeState,
    keys: jax.Array,
    logprobs: int | None,
    legal: jax.Array | None,
) -> _Scored:
    """Run one pass of the target over the draft and verify it.

    A draft may have fewer tokens than its shape has room for. On a CPU a chain of the drafter's
    full size is therefore scored with the smallest width of ``drafter.node_counts`` that holds the
    longest draft of the rows that are not done; one branch is compiled for each width. So is a
    packed tree (`Draft.is_packed`), on every device. Other trees, and chains on other devices,
    where a few more nodes cost nothing, are scored with all nodes.

    The cache is only read here. Writing it inside the conditional would make XLA copy it.
    """
    cache, taps, sampling = state.cache, drafter.taps(target.config), state.next_sampling
    # A row that is done may have a long context. With length 0, attention does not read it.
    readable_cache = replace(cache, length=jnp.where(state.done, 0, cache.length))
    full, num_likely = draft.tokens.shape[1], drafter.likely_tokens(target.config)

    def score_first_nodes(width: int) -> _Scored:
        scored_draft = draft.first(width) if width < draft.tokens.shape[1] else draft
        positions = cache.length[:, None] + scored_draft.depths
        output, node_entries = target.score(
            scored_draft.tokens,
            readable_cache,
            positions=positions,
            mask=scored_draft.mask,
            taps=taps,
        )
        words = None if legal is None else legal[:, :width]
        verdict = verify(scored_draft, output.logits, sampling, keys, words)

        # All branches must return the same shapes, so a shorter draft's results are padded.
        widen = partial(_pad, size=draft.depth + 1)
        verdict = replace(verdict, path=widen(verdict.path))

        def along_path(leaf: jax.Array) -> jax.Array:  # [B, nodes, …] -> [B, D+1, …]
            if scored_draft.is_chain:  # its path is its nodes in order: nothing has to be gathered
                return widen(leaf)
            path = verdict.path.reshape(*verdict.path.shape, *(1,) * (leaf.ndim - 2))
            return jnp.take_along_axis(leaf, path, axis=1)

        if scored_draft.is_chain:
            entries = jax.tree.map(partial(widen, axis=2), node_entries)
        else:
            entries = gather_entries(node_entries, verdict.path)
        emitted = verdict.emitted(scored_draft)
        emitted_logprobs = None
        if logprobs is not None:
            emitted_logprobs = Logprobs.of(along_path(output.logits), emitted, logprobs)
        likely = None
        if num_likely:
            all_nodes = partial(_pad, size=full)
            likely = jax.tree.map(all_nodes, LikelyTokens.of(output.logits, num_likely))
        return _Scored(
            verdict=verdict,
            emitted=emitted,
            output=jax.tree.map(along_path, output.states),
            entries=entries,
            num_nodes=jnp.asarray(width, jnp.int32),
            logprobs=emitted_logprobs,
            likely=likely,
        )

    may_be_cut = draft.is_packed or (draft.is_chain and sharding.is_on_cpu(target.mesh))
    may_be_shorter = may_be_cut and drafter.draft_shape.nodes == full
    widths = drafter.node_counts if may_be_shorter else (full,)
    if len(widths) == 1:
        return score_first_nodes(*widths)
    # `widths` ascend. The index is that of the first one that holds the last node of every row. A
    # row with a limit may have gaps before it.
    last = jnp.max(jnp.where(state.done, 0, draft.last))
    index = jnp.sum(jnp.asarray(widths) < 1 + last)
    return jax.lax.switch(index, [partial(score_first_nodes, width) for width in widths])


def _pad(values: jax.Array, size: int, axis: int = 1) -> jax.Array:
    """Append zeros, or False, along an ``axis`` so that it has ``size`` elements."""
    missing = size - values.shape[axis]
    if not missing:
        return values
    return jnp.pad(values, [(0, missing if i == axis else 0) for i in range(values.ndim)])


def _cut_at_end(
    verdict: Verdict, emitted: jax.Array, state: DecodeState, legal: jax.Array | None = None
) -> tuple[Verdict, jax.Array, jax.Array]:
    """Cut each row's verdict where the row ends.

    A row ends at its first stop token or at its limit, even in the middle of an accepted path. It
    also ends before a token that cannot be drawn, and, in a row that no token ends, after the node
    at which its grammar allows no token: there the text is complete.

    Returns:
        The shortened verdict, with count 0 for rows that were done before; ``done [B]``; and
        ``failed [B]``, the rows that end because a token could not be drawn.
    """
    bad = jnp.zeros(verdict.count.shape, bool) if verdict.bad is None else verdict.bad
    drawn_count = verdict.count - bad
    index = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None]
    is_end = jnp.any(emitted[..., None] == state.stop_token_ids[:, None], axis=-1) & (
        index < drawn_count[:, None]
    )
    # `until_end` counts the tokens up to the first stop token. Without a stop token it is larger
    # than any count, so that the minimum below ignores it.
    until_end = jnp.min(jnp.where(is_end, index + 1, emitted.shape[1] + 1), axis=1)
    count = jnp.minimum(drawn_count, jnp.minimum(until_end, state.max_lengths - state.lengths))
    count = jnp.where(state.done, 0, count)
    done = state.done | (until_end <= count) | (state.lengths + count >= state.max_lengths)
    # A row fails only if it needs the token that cannot be drawn. If it ends before that token, it
    # is simply done.
    failed = bad & ~done
    if legal is not None:
        end_of_path = at_nodes(verdict.path, verdict.count - 1)
        failed &= jnp.any(at_nodes(legal, end_of_path) != 0, axis=-1)
    last = jnp.take_along_axis(emitted, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return replace(verdict, count=count, token=last), done | bad, failed


def rows_of_pass(drafter: Drafter, state: DecodeState, **_: Any) -> int:
    """Return the maximum number of nodes that the target reads in one pass, over all rows.

    Examples:
        >>> from specjax import decoding
        >>> drafter, state = decoding.start(target, specjax.PromptLookup(draft=2), prompts)
        >>> decoding.rows_of_pass(drafter, state)  # 2 rows of 3 nodes
        6
    """
    return state.lengths.shape[0] * drafter.draft_shape.nodes


# The state is donated so that the caches are updated in place: two copies might not fit in memory.
@by_rows(rows_of_pass, models=("target", "drafter"), donate_argnames="state")
def decode(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    max_steps: ArrayLike,
    until_any_done: ArrayLike = False,
) -> DecodeState:
    """Run `step` until every row is done, or ``max_steps`` (a scalar array) times.

    With ``until_any_done`` it returns as soon as any row finishes during this call, so that the
    caller can give the row to another text. ``state`` is donated.

    Examples:
        >>> from specjax import decoding
        >>> options = decoding.GenerationOptions(max_new_tokens=8)
        >>> drafter, state = decoding.start(
        ...     target, specjax.PromptLookup(draft=2), prompts, options=options
        ... )
        >>> state = decoding.decode(target, drafter, state, max_steps=100)
        >>> state.done.tolist(), state.lengths.tolist()
        ([True, True], [14, 14])
    """
    state, _ = run_steps(target, drafter, state, max_steps, until_any_done)
    return place_rows(state, target)


def run_steps(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    max_steps: ArrayLike,
    until_any_done: ArrayLike,
    logprobs: Logprobs | None = None,
) -> tuple[DecodeState, Logprobs | None]:
    """Run the steps of `decode`. The function is traced as a part of a larger program.

    Args:
        target: the target.
        drafter: the drafter.
        state: the state before the steps.
        max_steps: a scalar, the largest number of steps.
        until_any_done: a scalar bool, as for `decode`.
        logprobs: empty `Logprobs` with room for R tokens of each row, from `Logprobs.zeros`; None
            for no log-probabilities.

    Returns:
        The state, and ``logprobs``, filled with the target's log-probabilities of the first R
        tokens that these steps emit in each row.
    """
    done_before, lengths_before = state.done, state.lengths
    num_likeliest = None if logprobs is None else logprobs.top

    # The device decides when to stop, so that no step waits for the host.
    def unfinished(carry: tuple[jax.Array, DecodeState, Logprobs | None]) -> jax.Array:
        steps, state, _ = carry
        ended = jnp.asarray(until_any_done) & jnp.any(state.done & ~done_before)
        return (steps < max_steps) & ~jnp.all(state.done) & ~ended

    def body(
        carry: tuple[jax.Array, DecodeState, Logprobs | None],
    ) -> tuple[jax.Array, DecodeState, Logprobs | None]:
        steps, before, logprobs = carry
        state, info = step(target, drafter, before, num_likeliest)
        # Collected here, because the loop keeps no step's `StepInfo`.
        if logprobs is not None:
            starts = before.lengths - lengths_before
            logprobs = jax.tree.map(
                lambda old, new: append_tokens(old, starts, new, info.emitted),
                logprobs,
                info.logprobs,
            )
        return steps + 1, state, logprobs

    _, state, logprobs = jax.lax.while_loop(
        unfinished, body, (jnp.zeros((), jnp.int32), state, logprobs)
    )
    return state, logprobs
