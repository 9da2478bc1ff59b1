"""The decoding loop: draft, score, verify, keep - all of it on the device, in one compiled program.

`generate` and `stream` run the same program. Plain autoregressive decoding (``drafter=None``) runs it too, with a draft that is
only a root: it is the baseline of every speed figure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import sharding
from specjax.decoding.options import GenerationOptions, bucket, check_prompts, default_rule
from specjax.decoding.stats import Stats, StepInfo
from specjax.decoding.verification import verify
from specjax.draft import Draft, Verdict
from specjax.drafters.base import Drafter, NoDraft, Seen, append_tokens
from specjax.errors import InputError
from specjax.models.cache import Entry, KVCache, gather_entries
from specjax.models.transformer import Output, Target
from specjax.sampling import RowSampling, Rule, Sampling, position_keys, split_keys


@struct.dataclass
class DecodeState:
    """Everything the next step needs. Rows are independent, and every array has the row axis first: see `insert`.

    Attributes:
        tokens: ``[B, S]`` prompt and output; S is the capacity.
        lengths: ``[B]`` committed tokens, the root included. The root is token ``lengths - 1``.
        limits: ``[B]`` where to stop.
        done: ``[B]`` bool.
        keys: ``[B]`` random keys, one a row.
        eos: ``[B, E]`` ids that end each row; -1 is none.
        sampling: the rows' settings.
        cache: the target's; it holds ``lengths - 1`` tokens, all but the root.
        drafter: the drafter's own state.
        stats: so far.
    """

    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array
    done: jax.Array
    keys: jax.Array
    eos: jax.Array
    sampling: RowSampling
    cache: KVCache
    drafter: Any
    stats: Stats

    @property
    def roots(self) -> jax.Array:
        """``[B]`` each row's newest committed token."""
        return jnp.take_along_axis(self.tokens, self.lengths[:, None] - 1, axis=1)[:, 0]


@struct.dataclass
class Result:
    """What was generated; numpy arrays.

    Attributes:
        tokens: ``[B, P + max_new_tokens]`` each row's prompt, then its output; what lies beyond ``lengths`` is filler.
        lengths: ``[B]`` prompt tokens plus emitted tokens. An end-of-sequence token counts as emitted.
        stats: see `Stats`.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    stats: Stats


PREFILL_CHUNK = 512
"""Prompt tokens read in one forward pass: so memory does not grow with the prompt."""


# --- the device side -------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames="capacity")
def prefill(
    target: Target,
    drafter: Drafter,
    tokens: jax.Array,
    lengths: jax.Array,
    limits: jax.Array,
    keys: jax.Array,
    eos: jax.Array,
    sampling: RowSampling,
    *,
    capacity: int,
) -> DecodeState:
    """Read the prompts ``tokens [B, P]`` and make the state that `decode` continues. See `DecodeState` for the shapes."""
    batch, width = tokens.shape
    cache, drafter_state = read_prompts(target, drafter, tokens, lengths, capacity)
    state = DecodeState(
        tokens=jnp.pad(tokens, ((0, 0), (0, max(0, capacity - width))))[:, :capacity],
        lengths=lengths,
        limits=limits,
        done=lengths >= limits,
        keys=keys,
        eos=eos,
        sampling=sampling,
        cache=cache,
        drafter=drafter_state,
        stats=Stats.zeros(batch, drafter.draft.depth),
    )
    return _place_rows(state, target)


def read_prompts(target: Target, drafter: Drafter, tokens: jax.Array, lengths: jax.Array, capacity: int) -> tuple[KVCache, Any]:
    """The target's cache and the drafter's state after the prompts, read `PREFILL_CHUNK` tokens at a time.

    A prompt's last token is its first root: the first step reads it, and ``lengths - 1`` tokens are committed here.
    """
    batch, width = tokens.shape
    committed, taps = lengths - 1, drafter.taps(target.config)
    # The token after each. What comes after the last one lies beyond what is committed, and does not matter.
    following = jnp.roll(tokens, -1, axis=1)
    # Without the barrier the compiler would work out, while compiling, what attention over empty caches gives: for minutes.
    cache, state = jax.lax.optimization_barrier((target.new_cache(batch, capacity), drafter.start(target, batch, capacity)))

    def absorb(state: Any, tokens: jax.Array, following: jax.Array, **read: Any) -> Any:
        return drafter.absorb(target, state, Seen(tokens=tokens, following=following, **read))

    if width <= PREFILL_CHUNK:  # nothing came before: there is no cache to read
        output, new = target.score(tokens, taps=taps, with_logits=False)
        cache = cache.append(new, committed, after=output.hidden)
        state = absorb(state, tokens, following, output=output, entries=new, count=committed, cache=cache)
        return cache, drafter.prompts_read(target, state, tokens, cache)

    chunks = -(-width // PREFILL_CHUNK)

    def split(values: jax.Array) -> jax.Array:  # [B, P] -> [chunks, B, C]
        padded = jnp.pad(values, ((0, 0), (0, chunks * PREFILL_CHUNK - width)))
        return jnp.moveaxis(padded.reshape(batch, chunks, PREFILL_CHUNK), 1, 0)

    def read(carry: tuple[KVCache, Any], part: tuple[jax.Array, ...]) -> tuple[tuple[KVCache, Any], None]:
        cache, state = carry
        tokens, following, number = part
        count = jnp.clip(committed - number * PREFILL_CHUNK, 0, PREFILL_CHUNK)
        output, new = target.score(tokens, cache, taps=taps, with_logits=False)
        written = cache.append(new, count, after=output.hidden)
        return (written, absorb(state, tokens, following, output=output, entries=new, count=count, cache=written)), None

    (cache, state), _ = jax.lax.scan(read, (cache, state), (split(tokens), split(following), jnp.arange(chunks)))
    return cache, drafter.prompts_read(target, state, tokens, cache)


def _place_rows(state: DecodeState, target: Target) -> DecodeState:
    """Spread the rows' small arrays over the mesh. `decode` is given them as it returns them: one compilation serves all."""
    batch = state.lengths.shape[0]

    def place(leaf: jax.Array) -> jax.Array:
        if leaf.ndim not in (1, 2) or leaf.shape[0] != batch:
            return leaf
        return sharding.constrain(leaf, ("batch", *(None,) * (leaf.ndim - 1)), {}, target.mesh)

    return jax.tree.map(place, state)


def step(target: Target, drafter: Drafter, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """Draft, score, verify, keep: one forward of the target, at least one token for every row that is not done."""
    draft, state = propose_step(target, drafter, state)
    return advance(target, drafter, state, draft)


def propose_step(target: Target, drafter: Drafter, state: DecodeState) -> tuple[Draft, DecodeState]:
    """Draft below every row's root. The state is for `advance`, which ends the step."""
    _, draft_keys, _ = _keys_of_step(state, drafter.draft.depth)
    given = {"cache": state.cache} if drafter.reads_cache else {}
    draft, drafter_state = drafter.propose(target, state.drafter, state.roots, state.sampling, draft_keys, ~state.done, **given)
    return draft, replace(state, drafter=drafter_state)


def _keys_of_step(state: DecodeState, depth: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The random keys of a step.

    Returns:
        The state's next ones ``[B]``; the drafter's ``[depth, B]``; and verification's: ``[B]``, or with coupled sampling
        ``[depth + 1, B]``, one for each position below the root, of which the first are the drafter's.
    """
    if state.sampling.coupled:
        positions = position_keys(state.keys, state.lengths + jnp.arange(depth + 1)[:, None])
        return state.keys, positions[:-1], positions
    keys, draft_keys, verify_keys = split_keys(state.keys, 3)
    return keys, split_keys(draft_keys, depth), verify_keys


def advance(target: Target, drafter: Drafter, state: DecodeState, draft: Draft) -> tuple[DecodeState, StepInfo]:
    """Score ``draft``, verify it and keep what was accepted.

    The draft may come from `propose_step`, or from elsewhere (another process or machine). Then ``drafter`` is one that keeps
    what it needs in ``absorb`` alone, and its ``draft`` says how deep the drafts are.

    Raises:
        InputError: the draft is deeper than the drafter's, for which the statistics have room.
    """
    if draft.depth > drafter.draft.depth:
        raise InputError(f"draft: {draft.depth} deep, but the state was started for drafts of depth {drafter.draft.depth}")
    keys, _, verify_keys = _keys_of_step(state, draft.depth)
    scored = _score(target, drafter, draft, state, verify_keys)
    accepted = scored.verdict.count - 1
    verdict, done = _cut(scored.verdict, scored.emitted, state)
    cache = state.cache.append(scored.entries, verdict.count, after=scored.output.hidden)
    seen = Seen(
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
        drafted_at=draft.drafted_at & ~state.done[:, None],
        scored=jnp.where(state.done, 0, scored.nodes),
        draft=draft,
        path=verdict.path,
    )
    return replace(
        state,
        tokens=append_tokens(state.tokens, state.lengths, scored.emitted, verdict.count),
        lengths=state.lengths + verdict.count,
        done=done,
        keys=keys,
        cache=cache,
        drafter=drafter.update(target, state.drafter, draft, verdict, seen),
        stats=state.stats.add(info),
    ), info


@struct.dataclass
class _Scored:
    """What one pass of the target over a draft gives.

    Attributes:
        verdict: what is accepted of it.
        emitted: ``[B, D+1]`` the accepted tokens and the bonus, in order.
        output: the target's along the accepted path, ``[B, D+1, …]``, without logits.
        entries: each layer's, along the accepted path: ``[B, heads, D+1, dim]`` each part.
        nodes: scalar, how many nodes the pass had.
    """

    verdict: Verdict
    emitted: jax.Array
    output: Output
    entries: tuple[Entry, ...]
    nodes: jax.Array


def _score(target: Target, drafter: Drafter, draft: Draft, state: DecodeState, keys: jax.Array) -> _Scored:
    """One pass of the target over the draft, and the verdict.

    Drafts may be shorter than their shape has room for: on a CPU the pass runs at the smallest compiled number of nodes that
    holds every row's draft, but for rows that are done. Elsewhere a few nodes more cost nothing, and one width is compiled. The
    cache is only read in here, because XLA copies what a branch of a conditional writes.
    """
    cache, taps = state.cache, drafter.taps(target.config)
    # A long context of a row that is done is not read on.
    readable = replace(cache, length=jnp.where(state.done, 0, cache.length))

    def branch(nodes: int) -> _Scored:
        shorter = draft.first(nodes) if nodes < draft.tokens.shape[1] else draft
        positions = cache.length[:, None] + shorter.depths
        output, new = target.score(shorter.tokens, readable, positions=positions, mask=shorter.mask, taps=taps)
        assert output.logits is not None
        verdict = verify(shorter, output.logits, state.sampling, keys)

        def along_path(leaf: jax.Array) -> jax.Array:  # [B, nodes, …] -> [B, D+1, …]
            if shorter.is_chain:
                return widen(leaf)
            return jnp.take_along_axis(leaf, verdict.path.reshape(*verdict.path.shape, *(1,) * (leaf.ndim - 2)), axis=1)

        def widen(leaf: jax.Array, axis: int = 1) -> jax.Array:
            missing = draft.depth + 1 - leaf.shape[axis]
            return jnp.pad(leaf, [(0, missing if i == axis else 0) for i in range(leaf.ndim)]) if missing else leaf

        return _Scored(
            verdict=replace(verdict, path=widen(verdict.path)),
            emitted=widen(verdict.emitted(shorter)),
            output=jax.tree.map(along_path, replace(output, logits=None)),
            entries=jax.tree.map(partial(widen, axis=2), new) if shorter.is_chain else gather_entries(new, verdict.path),
            nodes=jnp.asarray(nodes),
        )

    full = draft.tokens.shape[1]
    may_be_shorter = draft.is_chain and drafter.draft.nodes == full and sharding.is_on_cpu(target.mesh)
    counts = drafter.node_counts if may_be_shorter else (full,)
    if len(counts) == 1:
        return branch(*counts)
    count = jnp.sum(jnp.asarray(counts) < 1 + jnp.max(jnp.where(state.done, 0, draft.length)))
    return jax.lax.switch(count, [partial(branch, nodes) for nodes in counts])


def _cut(verdict: Verdict, emitted: jax.Array, state: DecodeState) -> tuple[Verdict, jax.Array]:
    """End each row at its first end-of-sequence token or at its limit, also in the middle of an accepted path.

    Returns:
        The shortened verdict (count 0 for rows that were done already), and ``done [B]``.
    """
    index = jnp.arange(emitted.shape[1])[None]
    is_end = jnp.any(emitted[..., None] == state.eos[:, None], axis=-1) & (index < verdict.count[:, None])
    until_end = jnp.min(jnp.where(is_end, index + 1, emitted.shape[1] + 1), axis=1)
    count = jnp.minimum(verdict.count, jnp.minimum(until_end, state.limits - state.lengths))
    count = jnp.where(state.done, 0, count)
    done = state.done | (until_end <= count) | (state.lengths + count >= state.limits)
    last = jnp.take_along_axis(emitted, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return replace(verdict, count=count, token=last), done


@partial(jax.jit, donate_argnames="state")
def decode(target: Target, drafter: Drafter, state: DecodeState, max_steps: jax.Array) -> DecodeState:
    """`step` until every row is done, or ``max_steps`` (a scalar array) times. ``state`` is donated."""

    def unfinished(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        steps, state = carry
        return (steps < max_steps) & ~jnp.all(state.done)

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        steps, state = carry
        return steps + 1, step(target, drafter, state)[0]

    _, state = jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), state))
    return _place_rows(state, target)


# --- the edge --------------------------------------------------------------------------------------------------------


def generate(
    target: Target,
    drafter: Drafter | None,
    tokens: Any,
    lengths: Any = None,
    *,
    max_new_tokens: Any = 64,
    sampling: Sampling = Sampling(temperature=0.0),
    key: jax.Array | None = None,
    eos_token_ids: Sequence[Any] | None = None,
    rule: Rule | None = None,
) -> Result:
    """Generate from the target, distributed exactly as it alone would; the drafter decides only how fast.

    Args:
        target: the model to generate from.
        drafter: proposes tokens; None is plain autoregressive decoding.
        tokens: ``[B, P]`` prompts as token ids, right-padded. Equal P shares compiled programs; memory and time go by it, too.
        lengths: ``[B]`` prompt lengths; None: all are P.
        max_new_tokens: most tokens to emit; one number, or one a row.
        sampling: how to draw; the default is greedy.
        key: one random key, from which each row's is folded by its index, or ``[B]`` keys. A row's output depends on its own
            key and prompt alone. Give every text a key of its own. None: ``jax.random.key(0)``.
        eos_token_ids: ids that end a row; they are emitted. One sequence of ids for all rows, or one sequence a row. None: the
            target's own (`ModelConfig.eos_token_ids`); ``()``: none.
        rule: how tokens are drawn and drafts verified, see `specjax.sampling.Rule`; every one is exact. None is the one
            that suits the shape of the drafts, `specjax.decoding.options.default_rule`.

    Raises:
        InputError: an argument is out of its range; names it, its value and what it must be.
    """
    options = GenerationOptions(max_new_tokens, sampling, key, eos_token_ids, rule)
    drafter, state = start(target, drafter, tokens, lengths, options)
    state = decode(target, drafter, state, jnp.iinfo(jnp.int32).max)
    return _result(target, state, _width(tokens, max_new_tokens))


def stream(
    target: Target,
    drafter: Drafter | None,
    tokens: Any,
    lengths: Any = None,
    *,
    max_new_tokens: Any = 64,
    sampling: Sampling = Sampling(temperature=0.0),
    key: jax.Array | None = None,
    eos_token_ids: Sequence[Any] | None = None,
    rule: Rule | None = None,
    steps: int = 4,
) -> Iterator[Result]:
    """As `generate`, yielding what there is after every ``steps`` steps; the last one is the complete `Result`.

    Raises InputError as `generate`, and for ``steps`` below 1, before the first is asked for.
    """
    if steps < 1:
        raise InputError(f"steps={steps}: must be at least 1")
    options = GenerationOptions(max_new_tokens, sampling, key, eos_token_ids, rule)
    started = start(target, drafter, tokens, lengths, options)
    width = _width(tokens, max_new_tokens)

    def results(drafter: Drafter, state: DecodeState) -> Iterator[Result]:
        while True:
            state = decode(target, drafter, state, steps)
            done = sharding.to_host(state.done, target.mesh).all()
            yield _result(target, state, width)
            if done:
                return

    return results(*started)


def start(
    target: Target,
    drafter: Drafter | None,
    tokens: Any,
    lengths: Any = None,
    options: GenerationOptions = GenerationOptions(),
    *,
    capacity: int | None = None,
    mixed: bool = False,
) -> tuple[Drafter, DecodeState]:
    """Check everything on the host, then read the prompts: the drafter and the state to `decode` on.

    Args:
        target: as for `generate`.
        drafter: as for `generate`.
        tokens: as for `generate`.
        lengths: as for `generate`.
        options: as for `generate`.
        capacity: most tokens that a row may come to hold, prompt and output; by default as many as prompts of this width need,
            rounded up to a `bucket`. Prompts are padded to a bucket too, so that few programs serve many widths.
        mixed: compile for rows of all kinds of sampling, whatever these rows ask for, so that any request can be inserted.

    Raises:
        InputError: as `generate`.
    """
    config = target.config
    tokens, lengths = check_prompts(tokens, lengths, config.vocab_size)
    batch, width = tokens.shape
    width = width if capacity is None else min(width, capacity)
    checked = options.check(config, batch)
    drafter = NoDraft() if drafter is None else drafter
    drafter.draft.check(config.vocab_size)
    drafter.check(target)
    wanted = lengths + checked.limits
    _check_positions(lengths, wanted, config.max_positions, "the target")
    _check_positions(lengths, wanted, most_positions(target, drafter), "the drafter")
    if capacity is None:  # from the shape of the prompts and not from their lengths: equal shapes share a program
        capacity = bucket(width + int(checked.limits.max()))
    elif capacity < wanted.max():
        raise InputError(f"capacity={capacity}: a row may come to hold {wanted.max()} tokens; give at least that")
    padded = np.pad(tokens[:, :width], ((0, 0), (0, bucket(width) - width)))
    rule = options.rule or default_rule(drafter.draft)
    rows = options.sampling.rows(batch, rule)
    if mixed:
        rows = replace(rows, greedy=False, truncated=True, rule=rule)
    state = prefill(
        target,
        drafter,
        jnp.asarray(padded),
        jnp.asarray(lengths),
        jnp.asarray(wanted.astype(np.int32)),
        checked.keys,
        jnp.asarray(checked.eos),
        rows,
        capacity=capacity,
    )
    return drafter, state


def insert(state: DecodeState, request: DecodeState, row: int) -> DecodeState:
    """``state`` with the one row of ``request`` in place of its row number ``row``; ``state`` is donated.

    Args:
        state: of B rows, as `start` or `decode` returned it.
        request: of one row, from `start` with the same drafter and rule and the ``capacity`` of ``state``, and with ``mixed``
            where some rows are greedy and others are not. Give it a key of its own.
        row: from 0 to B - 1.

    Raises:
        InputError: the two do not fit together.
    """
    batch, ends = state.eos.shape
    if not 0 <= row < batch:
        raise InputError(f"row={row}: the state has {batch} rows; give 0 to {batch - 1}")
    if request.eos.shape[1] > ends:
        raise InputError(f"eos_token_ids: {request.eos.shape[1]} of the request, but the state has room for {ends} a row")
    padding = jnp.full((request.eos.shape[0], ends - request.eos.shape[1]), -1, request.eos.dtype)
    request = replace(request, eos=jnp.concatenate([request.eos, padding], axis=1))
    if jax.tree.structure(state) != jax.tree.structure(request):
        raise InputError("request: other sampling or another drafter than the state's; start both alike, and with mixed=True")
    for whole, one in zip(jax.tree.leaves(state), jax.tree.leaves(request), strict=True):
        if one.shape != (1, *whole.shape[1:]):
            raise InputError(f"request: an array of shape {one.shape} for one of {whole.shape}; start it with one prompt, "
                             f"capacity={state.tokens.shape[1]} and the same drafter")  # fmt: skip
    return _insert(state, request, jnp.asarray(row))


@partial(jax.jit, donate_argnames="state")
def _insert(state: DecodeState, request: DecodeState, row: jax.Array) -> DecodeState:
    return jax.tree.map(lambda all_rows, one: jax.lax.dynamic_update_slice_in_dim(all_rows, one, row, axis=0), state, request)


def most_positions(target: Target, drafter: Drafter) -> int:
    """The longest text, in tokens, that both can hold."""
    own = drafter.max_positions
    return target.config.max_positions if own is None else min(own, target.config.max_positions)


def _check_positions(lengths: np.ndarray, wanted: np.ndarray, positions: int, whose: str) -> None:
    longest = int(np.argmax(wanted))
    if wanted[longest] > positions:
        raise InputError(
            f"prompt ({lengths[longest]} tokens) plus max_new_tokens make {wanted[longest]} tokens, but {whose} has "
            f"{positions} positions: shorten the prompt or lower max_new_tokens"
        )


def _width(tokens: Any, max_new_tokens: Any) -> int:
    return np.asarray(tokens).shape[1] + int(np.max(max_new_tokens))


def _result(target: Target, state: DecodeState, width: int) -> Result:
    """The result so far; its tokens are ``width`` wide, whatever the capacity is."""
    tokens, lengths, stats = sharding.to_host((state.tokens, state.lengths, state.stats), target.mesh)
    missing = max(0, width - tokens.shape[1])
    return Result(tokens=np.pad(tokens, ((0, 0), (0, missing)))[:, :width], lengths=lengths, stats=stats)
