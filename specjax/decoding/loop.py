"""The decoding loop: draft, score, verify, keep - all of it on the device, in one compiled program.

Plain autoregressive decoding (``drafter=None``) runs it too, with a draft that is only a root: it is the baseline of every
speed figure.
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
from specjax.drafters.base import Committed, Drafter, append_tokens, check_proposal
from specjax.drafts.draft import Draft, Verdict
from specjax.errors import InputError
from specjax.models.cache import Entry, gather_entries
from specjax.models.transformer import States, Target
from specjax.sampling import position_keys, split_keys


def step(target: Target, drafter: Drafter, state: DecodeState, logprobs: int | None = None) -> tuple[DecodeState, StepInfo]:
    """Draft, score, verify, keep: one forward of the target, at least one token for every row that is not done.

    With ``logprobs``, see `advance`.

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
    """Draft below every row's root. The state is for `advance`, which ends the step.

    Examples:
        >>> from specjax import decoding
        >>> drafter, state = decoding.start(target, specjax.PromptLookup(draft=2), prompts)
        >>> draft, state = jax.jit(decoding.propose_step)(target, drafter, state)
        >>> draft.tokens[1].tolist()  # the root, 1, and what followed "3 5 1" before
        [1, 3, 5]
    """
    _, draft_keys, _ = _keys_of_step(state, drafter.draft_shape.depth)
    reads = drafter.reads(target.config)
    given = {"cache": state.cache.of_layers(reads)} if reads else {}
    sampling = state.next_sampling
    proposal = drafter.propose(target, state.drafter, state.roots, sampling, draft_keys, ~state.done, **given)
    draft, drafter_state = check_proposal(drafter, proposal, state.lengths.shape[0])
    return draft, replace(state, drafter=drafter_state)


def _keys_of_step(state: DecodeState, depth: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The random keys of a step.

    Worked example: drafts of depth 2 below a row of 7 tokens, whose last is the root. Tokens are drawn for the positions 7 (the
    first drafted), 8 (the second) and 9 (the bonus, if both are accepted).

    Coupled, ``k(i)`` being the row's key folded with position i, which never changes::

        the state's next key    the row's, as before
        the drafter's           k(7)   k(8)          first and second level
        verification's          k(7)   k(8)   k(9)   the target's own draw at the root, at the first and at the second token

    Drafter and target share k(7) and k(8), and the target's draw is what is emitted. If the first token is rejected, position 7
    is decided and the next step begins at 8, with k(8) once more: nothing was emitted with it yet.

    Not coupled, the row's key is split into three and nothing is shared::

        the state's next key    a              split again in the next step
        the drafter's           b split in 2   first and second level
        verification's          c              one key, which the rule splits: some judge drafted tokens, one draws the last

    Returns:
        The state's next ones ``[B]``; the drafter's ``[depth, B]``; and verification's: ``[B]``, or with coupled sampling
        ``[depth + 1, B]``, one for each position below the root, of which the first are the drafter's.
    """
    if RULES[state.sampling.rule].keys_by_position and not state.sampling.greedy:
        positions = position_keys(state.keys, state.lengths + jnp.arange(depth + 1)[:, None])
        return state.keys, positions[:-1], positions
    keys, draft_keys, verify_keys = split_keys(state.keys, 3)
    return keys, split_keys(draft_keys, depth), verify_keys


def advance(
    target: Target, drafter: Drafter, state: DecodeState, draft: Draft, logprobs: int | None = None
) -> tuple[DecodeState, StepInfo]:
    """Score ``draft``, verify it and keep what was accepted.

    The draft may come from `propose_step`, or from elsewhere (another process or machine). Then ``drafter`` is one that keeps
    what it needs in ``append_committed`` alone, or has proposed nothing in this step. A draft may be of any shape, and
    shallower than those that the state was started for, down to a root alone.

    With ``logprobs``, the step's `StepInfo` has the target's own log-probabilities of the emitted tokens, and of as many of the
    likeliest ones in their places.

    Returns:
        The next state, and what happened; of both the shapes depend on ``state`` alone, but for the draft itself.

    Raises:
        InputError: the draft is deeper than those that the state was started for: the statistics have no room. Or it is a tree,
            and the state's rule verifies chains.

    Examples:
        >>> from specjax import decoding
        >>> from specjax.drafters import Draft
        >>> options = decoding.GenerationOptions(max_new_tokens=8)
        >>> drafter, state = decoding.start(
        ...     target, specjax.PromptLookup(draft=2), prompts, options=options
        ... )
        >>> said = jnp.asarray(plain.tokens[:, 6:8])  # from elsewhere: what plain decoding says
        >>> draft = Draft.chain(state.roots, said)
        >>> state, info = jax.jit(decoding.advance)(target, drafter, state, draft)
        >>> info.emitted.tolist()  # both tokens are accepted, and the target adds one
        [3, 3]
    """
    if not (RULES[state.sampling.rule].takes_trees or draft.is_chain):
        raise InputError(
            f"draft: a tree, but the state was started with rule={state.sampling.rule!r}, which verifies chains: start it with "
            'rule="independent", or rule="coupled"'
        )
    room = state.stats.depth
    if draft.depth > room:
        advice = "" if draft.grown is None or draft.levels is not None else "; give the draft's levels"
        raise InputError(f"draft: {draft.depth} deep, but the state was started for drafts of depth {room}{advice}")
    keys, _, verify_keys = _keys_of_step(state, draft.depth)
    scored = _score(target, drafter, draft, state, verify_keys, logprobs)
    accepted = scored.verdict.count - 1
    verdict, done, failed = _cut(scored.verdict, scored.emitted, state)
    cache = state.cache.append(scored.entries, verdict.count, after=scored.output.hidden)
    committed = Committed(
        tokens=jnp.take_along_axis(draft.tokens, verdict.path, axis=1),
        following=scored.emitted,
        output=scored.output,
        entries=scored.entries,
        count=verdict.count,
        cache=cache,
    )
    info = StepInfo(
        active=~state.done,
        emitted=verdict.count,
        accepted=jnp.minimum(accepted, verdict.count),
        drafted=jnp.where(state.done, 0, draft.length),
        drafted_at=_pad(draft.drafted_at & ~state.done[:, None], room),
        scored=jnp.where(state.done, 0, scored.nodes),
        draft=draft,
        path=_pad(verdict.path, room + 1),
        logprobs=scored.logprobs,
    )
    is_accepted = jnp.arange(draft.depth + 1)[None] < info.accepted[:, None]
    return replace(
        state,
        tokens=append_tokens(state.tokens, state.lengths, scored.emitted, verdict.count),
        lengths=state.lengths + verdict.count,
        done=done,
        failed=state.failed | failed,
        keys=keys,
        cache=cache,
        drafter=drafter.update(target, state.drafter, draft, verdict, committed),
        stats=state.stats.add(info),
        accepted=append_tokens(state.accepted, state.lengths, is_accepted, verdict.count),
    ), info


@struct.dataclass
class _Scored:
    """What one pass of the target over a draft gives.

    Attributes:
        verdict: what is accepted of it.
        emitted: ``[B, D+1]`` the accepted tokens and the bonus, in order.
        output: the target's along the accepted path, ``[B, D+1, …]``.
        entries: each layer's, along the accepted path: ``[B, heads, D+1, dim]`` each part.
        nodes: scalar, how many nodes the pass had.
        logprobs: of the emitted tokens, ``[B, D+1]``, where they are asked for.
    """

    verdict: Verdict
    emitted: jax.Array
    output: States
    entries: tuple[Entry, ...]
    nodes: jax.Array
    logprobs: Logprobs | None


def _score(
    target: Target, drafter: Drafter, draft: Draft, state: DecodeState, keys: jax.Array, logprobs: int | None
) -> _Scored:
    """One pass of the target over the draft, and the verdict.

    Drafts may be shorter than their shape has room for: on a CPU the pass runs at the smallest compiled number of nodes that
    holds every row's draft, but for rows that are done. Elsewhere a few nodes more cost nothing, and one width is compiled. The
    cache is only read in here, because XLA copies what a branch of a conditional writes.
    """
    cache, taps, sampling = state.cache, drafter.taps(target.config), state.next_sampling
    # A long context of a row that is done is not read on.
    readable = replace(cache, length=jnp.where(state.done, 0, cache.length))

    def branch(nodes: int) -> _Scored:
        shorter = draft.first(nodes) if nodes < draft.tokens.shape[1] else draft
        positions = cache.length[:, None] + shorter.depths
        output, new = target.score(shorter.tokens, readable, positions=positions, mask=shorter.mask, taps=taps)
        verdict = verify(shorter, output.logits, sampling, keys)

        def along_path(leaf: jax.Array) -> jax.Array:  # [B, nodes, …] -> [B, D+1, …]
            if shorter.is_chain:
                return widen(leaf)
            return jnp.take_along_axis(leaf, verdict.path.reshape(*verdict.path.shape, *(1,) * (leaf.ndim - 2)), axis=1)

        widen = partial(_pad, size=draft.depth + 1)
        emitted = widen(verdict.emitted(shorter))

        return _Scored(
            verdict=replace(verdict, path=widen(verdict.path)),
            emitted=emitted,
            output=jax.tree.map(along_path, output.states),
            entries=jax.tree.map(partial(widen, axis=2), new) if shorter.is_chain else gather_entries(new, verdict.path),
            nodes=jnp.asarray(nodes, jnp.int32),
            logprobs=None if logprobs is None else Logprobs.of(along_path(output.logits), emitted, logprobs),
        )

    full = draft.tokens.shape[1]
    may_be_shorter = draft.is_chain and drafter.draft_shape.nodes == full and sharding.is_on_cpu(target.mesh)
    counts = drafter.node_counts if may_be_shorter else (full,)
    if len(counts) == 1:
        return branch(*counts)
    count = jnp.sum(jnp.asarray(counts) < 1 + jnp.max(jnp.where(state.done, 0, draft.length)))
    return jax.lax.switch(count, [partial(branch, nodes) for nodes in counts])


def _pad(values: jax.Array, size: int, axis: int = 1) -> jax.Array:
    """``values`` with zeros, or False, at the end of an ``axis``, which then has ``size``."""
    missing = size - values.shape[axis]
    return jnp.pad(values, [(0, missing if i == axis else 0) for i in range(values.ndim)]) if missing else values


def _cut(verdict: Verdict, emitted: jax.Array, state: DecodeState) -> tuple[Verdict, jax.Array, jax.Array]:
    """End each row at its first end-of-sequence token or at its limit, also in the middle of an accepted path, or else before
    the token that could not be drawn.

    Returns:
        The shortened verdict (count 0 for rows that were done already), ``done [B]``, and which rows end for want of a token.
    """
    bad = jnp.zeros(verdict.count.shape, bool) if verdict.bad is None else verdict.bad
    drawn = verdict.count - bad
    index = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None]
    is_end = jnp.any(emitted[..., None] == state.stop_token_ids[:, None], axis=-1) & (index < drawn[:, None])
    until_end = jnp.min(jnp.where(is_end, index + 1, emitted.shape[1] + 1), axis=1)
    count = jnp.minimum(drawn, jnp.minimum(until_end, state.max_lengths - state.lengths))
    count = jnp.where(state.done, 0, count)
    done = state.done | (until_end <= count) | (state.lengths + count >= state.max_lengths)
    failed = bad & ~done
    last = jnp.take_along_axis(emitted, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return replace(verdict, count=count, token=last), done | failed, failed


def rows_of_pass(drafter: Drafter, state: DecodeState, **_: Any) -> int:
    """How many nodes the target reads in one pass, of all rows of the batch together.

    Examples:
        >>> from specjax import decoding
        >>> drafter, state = decoding.start(target, specjax.PromptLookup(draft=2), prompts)
        >>> decoding.rows_of_pass(drafter, state)  # 2 rows of 3 nodes
        6
    """
    return state.lengths.shape[0] * drafter.draft_shape.nodes


@by_rows(rows_of_pass, models=("target", "drafter"), donate_argnames="state")
def decode(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    max_steps: ArrayLike,
    until_any_done: ArrayLike = False,
) -> DecodeState:
    """`step` until every row is done, or ``max_steps`` (a scalar array) times. ``state`` is donated.

    With ``until_any_done``, until the first row is done that was not at the beginning: its place can be given to another text.

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
    """What `decode` does, to be traced as a part of another program.

    With ``logprobs`` ``[B, R]``, from `Logprobs.zeros`, also the target's log-probabilities of the first R emitted tokens.
    """
    done_before, lengths_before = state.done, state.lengths
    top = None if logprobs is None else logprobs.top

    def unfinished(carry: tuple[jax.Array, DecodeState, Logprobs | None]) -> jax.Array:
        steps, state, _ = carry
        ended = jnp.asarray(until_any_done) & jnp.any(state.done & ~done_before)
        return (steps < max_steps) & ~jnp.all(state.done) & ~ended

    def body(carry: tuple[jax.Array, DecodeState, Logprobs | None]) -> tuple[jax.Array, DecodeState, Logprobs | None]:
        steps, before, kept = carry
        state, info = step(target, drafter, before, top)
        if kept is not None:
            positions = before.lengths - lengths_before
            kept = jax.tree.map(lambda room, new: append_tokens(room, positions, new, info.emitted), kept, info.logprobs)
        return steps + 1, state, kept

    _, state, logprobs = jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), state, logprobs))
    return state, logprobs
