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
from specjax.decoding.stats import Stats, StepInfo
from specjax.decoding.verification import CHAIN_RULES, Rule, verify
from specjax.drafters.base import Draft, Drafter, NoDraft, Verdict, append
from specjax.errors import InputError
from specjax.models.cache import KVCache
from specjax.models.layers import Slots
from specjax.models.transformer import Output, Target
from specjax.sampling import RowSampling, Sampling, split_keys


@struct.dataclass
class DecodeState:
    """Everything the next step needs. Rows are independent slots.

    Attributes:
        tokens: ``[B, P + max_new_tokens]`` prompt and output.
        lengths: ``[B]`` committed tokens, the root included. The root is token ``lengths - 1``.
        limits: ``[B]`` where to stop.
        done: ``[B]`` bool.
        keys: ``[B]`` random keys, one a row.
        eos: ``[E]`` ids that end a row.
        sampling: the rows' settings.
        cache: the target's; ``lengths - 1`` slots of it are committed.
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


@struct.dataclass
class Result:
    """What was generated.

    Attributes:
        tokens: ``[B, P + max_new_tokens]`` each row's prompt, then its output; what lies beyond ``lengths`` is filler.
        lengths: ``[B]`` prompt tokens plus emitted tokens. An end-of-sequence token counts as emitted.
        stats: see `Stats`.
    """

    tokens: jax.Array
    lengths: jax.Array
    stats: Stats


LARGE_CACHE = 2048
"""Slots of a row from which on attention over a short context does not read all of them."""


# --- the device side -------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames="max_new_tokens")
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
    max_new_tokens: int,
) -> DecodeState:
    """Read the prompts and make the state that `decode` continues. See `DecodeState` for the shapes."""
    batch, count = tokens.shape
    # A draft hangs below the last committed token, the root, which is not in the cache yet.
    capacity = count + max_new_tokens + drafter.draft.room
    output, cache = target.prefill(tokens, lengths, capacity, drafter.taps)
    state = DecodeState(
        tokens=jnp.pad(tokens, ((0, 0), (0, max_new_tokens))),
        lengths=lengths,
        limits=limits,
        done=lengths >= limits,
        keys=keys,
        eos=eos,
        sampling=sampling,
        cache=cache,
        drafter=drafter.prefill(target, tokens, lengths, output, cache),
        stats=Stats.zeros(batch, drafter.draft.depth),
    )
    return _place_rows(state, target)


def _place_rows(state: DecodeState, target: Target) -> DecodeState:
    """Spread the rows' small arrays over the mesh. `decode` is given them as it returns them: one compilation serves all."""
    batch = state.lengths.shape[0]

    def place(leaf: jax.Array) -> jax.Array:
        if leaf.ndim not in (1, 2) or leaf.shape[0] != batch:
            return leaf
        return sharding.constrain(leaf, ("batch", *(None,) * (leaf.ndim - 1)), {}, target.mesh)

    return replace(jax.tree.map(place, state), eos=state.eos)


def step(target: Target, drafter: Drafter, state: DecodeState, rule: Rule = "block") -> tuple[DecodeState, StepInfo]:
    """Draft, score, verify, keep: one forward of the target, at least one token for every row that is not done."""
    keys, draft_keys, verify_keys = split_keys(state.keys, 3)
    root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]

    draft, drafter_state = drafter.propose(target, lend(drafter, state), root, state.sampling, draft_keys)
    cache = state.cache
    if drafter.borrows_cache:
        cache, drafter_state = drafter_state.cache, replace(drafter_state, cache=None)

    verdict, emitted, output, new, nodes = _score(target, drafter, draft, cache, state.done, state.sampling, verify_keys, rule)
    accepted = verdict.count - 1
    verdict, done = _cut(verdict, emitted, state)
    cache = cache.write(new, after=output.hidden).keep(None if draft.is_chain else verdict.path, verdict.count)
    info = StepInfo(
        active=~state.done,
        emitted=verdict.count,
        accepted=jnp.minimum(accepted, verdict.count),
        drafted=jnp.where(state.done, 0, draft.length),
        drafted_at=draft.drafted_at & ~state.done[:, None],
        scored=jnp.where(state.done, 0, nodes),
        draft=draft,
        path=verdict.path,
    )
    return replace(
        state,
        tokens=append(state.tokens, state.lengths, emitted, verdict.count),
        lengths=state.lengths + verdict.count,
        done=done,
        keys=keys,
        cache=cache,
        drafter=drafter.update(target, drafter_state, draft, verdict, output, cache),
        stats=state.stats.add(info),
    ), info


def lend(drafter: Drafter, state: DecodeState) -> Any:
    """The drafter's state as `Drafter.propose` is given it: with the target's cache, for a drafter that borrows it."""
    return replace(state.drafter, cache=state.cache) if drafter.borrows_cache else state.drafter


def _score(
    target: Target,
    drafter: Drafter,
    draft: Draft,
    cache: KVCache,
    done: jax.Array,
    sampling: RowSampling,
    keys: jax.Array,
    rule: Rule,
) -> tuple[Verdict, jax.Array, Output, tuple[Slots, ...], jax.Array]:
    """One pass of the target over the draft, and the verdict.

    Drafts may be shorter than their shape has room for, and rows than the cache: the pass runs at the smallest compiled number
    of nodes that holds every row's draft, and reads the smallest compiled part of the cache that holds every row. The cache is
    only read in here, because XLA copies what a branch of a conditional writes.

    Returns:
        The verdict, the emitted tokens, the target's output without logits, its new keys and values, all N wide; and how
        many nodes the pass had.
    """

    def branch(slots: int, nodes: int) -> tuple[Verdict, jax.Array, Output, tuple[Slots, ...], jax.Array]:
        shorter = draft.first(nodes) if nodes < draft.tokens.shape[1] else draft
        positions = cache.length[:, None] + shorter.depths
        output, new = target.score(
            shorter.tokens, cache.first(slots), positions=positions, mask=shorter.mask, taps=drafter.taps
        )
        assert output.logits is not None
        verdict = verify(shorter, output.logits, sampling, keys, rule)

        def widen(leaf: jax.Array, axis: int = 1) -> jax.Array:  # `nodes` long -> N long
            padding = [(0, draft.tokens.shape[1] - nodes if i == axis else 0) for i in range(leaf.ndim)]
            return jnp.pad(leaf, padding)

        verdict, emitted = replace(verdict, path=widen(verdict.path)), widen(verdict.emitted(shorter))
        output = jax.tree.map(widen, replace(output, logits=None))
        return verdict, emitted, output, jax.tree.map(partial(widen, axis=2), new), jnp.asarray(nodes)

    parts, counts = cache_parts(cache.capacity), drafter.node_counts
    if len(parts) * len(counts) == 1:
        return branch(*parts, *counts)
    part = jnp.sum(jnp.asarray(parts) < jnp.max(cache.length))
    count = jnp.sum(jnp.asarray(counts) < 1 + jnp.max(jnp.where(done, 0, draft.length)))
    branches = [partial(branch, slots, nodes) for slots in parts for nodes in counts]
    return jax.lax.switch(part * len(counts) + count, branches)


def cache_parts(capacity: int) -> tuple[int, ...]:
    """Numbers of slots, ascending, that attention is compiled for. A small cache is always read whole: it costs little."""
    return (capacity // 8, capacity) if capacity >= LARGE_CACHE else (capacity,)


def _cut(verdict: Verdict, emitted: jax.Array, state: DecodeState) -> tuple[Verdict, jax.Array]:
    """End each row at its first end-of-sequence token or at its limit, also in the middle of an accepted path.

    Returns:
        The shortened verdict (count 0 for rows that were done already), and ``done [B]``.
    """
    index = jnp.arange(emitted.shape[1])[None]
    is_end = jnp.any(emitted[..., None] == state.eos, axis=-1) & (index < verdict.count[:, None])
    until_end = jnp.min(jnp.where(is_end, index + 1, emitted.shape[1] + 1), axis=1)
    count = jnp.minimum(verdict.count, jnp.minimum(until_end, state.limits - state.lengths))
    count = jnp.where(state.done, 0, count)
    done = state.done | (until_end <= count) | (state.lengths + count >= state.limits)
    last = jnp.take_along_axis(emitted, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return replace(verdict, count=count, token=last), done


@partial(jax.jit, static_argnames="rule", donate_argnames="state")
def decode(target: Target, drafter: Drafter, state: DecodeState, max_steps: jax.Array, *, rule: Rule = "block") -> DecodeState:
    """`step` until every row is done, or ``max_steps`` (a scalar array) times. ``state`` is donated."""

    def unfinished(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        steps, state = carry
        return (steps < max_steps) & ~jnp.all(state.done)

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        steps, state = carry
        return steps + 1, step(target, drafter, state, rule)[0]

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
    eos_token_ids: Sequence[int] = (),
    rule: Rule = "block",
) -> Result:
    """Generate from the target, distributed exactly as it alone would; the drafter decides only how fast.

    Args:
        target: the model to generate from.
        drafter: proposes tokens; None is plain autoregressive decoding.
        tokens: ``[B, P]`` prompts as token ids, right-padded.
        lengths: ``[B]`` prompt lengths; None: all are P.
        max_new_tokens: most tokens to emit; one number, or one a row.
        sampling: how to draw; the default is greedy.
        key: one random key, from which each row's is folded by its index, or ``[B]`` keys. A row's output depends on its own
            key and prompt alone. None: ``jax.random.key(0)``.
        eos_token_ids: ids that end a row. They are emitted.
        rule: verification of drawn chains, ``block`` or ``rejection``; both are exact.

    Raises:
        InputError: an argument is out of its range; names it, its value and what it must be.
    """
    drafter, state = start(
        target,
        drafter,
        tokens,
        lengths,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        key=key,
        eos_token_ids=eos_token_ids,
        rule=rule,
    )
    state = decode(target, drafter, state, jnp.iinfo(jnp.int32).max, rule=rule)
    return Result(tokens=state.tokens, lengths=state.lengths, stats=state.stats)


def stream(
    target: Target,
    drafter: Drafter | None,
    tokens: Any,
    lengths: Any = None,
    *,
    max_new_tokens: Any = 64,
    sampling: Sampling = Sampling(temperature=0.0),
    key: jax.Array | None = None,
    eos_token_ids: Sequence[int] = (),
    rule: Rule = "block",
    steps: int = 4,
) -> Iterator[Result]:
    """As `generate`, yielding what there is after every ``steps`` steps; the last one is the complete `Result`.

    Its arrays are on the host. Raises InputError as `generate`, and for ``steps`` below 1, before the first is asked for.
    """
    if steps < 1:
        raise InputError(f"steps={steps}: must be at least 1")
    started = start(
        target,
        drafter,
        tokens,
        lengths,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        key=key,
        eos_token_ids=eos_token_ids,
        rule=rule,
    )

    def results(drafter: Drafter, state: DecodeState) -> Iterator[Result]:
        while True:
            state = decode(target, drafter, state, steps, rule=rule)
            seen = jax.device_get((state.tokens, state.lengths, state.stats, state.done))
            yield Result(*seen[:3])
            if seen[3].all():
                return

    return results(*started)


def start(
    target: Target,
    drafter: Drafter | None,
    tokens: Any,
    lengths: Any = None,
    *,
    max_new_tokens: Any = 64,
    sampling: Sampling = Sampling(temperature=0.0),
    key: jax.Array | None = None,
    eos_token_ids: Sequence[int] = (),
    rule: Rule = "block",
) -> tuple[Drafter, DecodeState]:
    """Check every argument of `generate` on the host, then read the prompts: the drafter and the state to `decode` on."""
    config = target.config
    tokens, lengths = check_prompts(tokens, lengths, config.vocab_size)
    batch = tokens.shape[0]
    limits = _check_limits(max_new_tokens, batch)
    if (longest := int((lengths.astype(np.int64) + limits).max())) > config.max_positions:
        raise InputError(
            f"prompt ({int(lengths[np.argmax(lengths + limits)])} tokens) plus max_new_tokens make {longest} tokens, but the "
            f"target has {config.max_positions} positions: shorten the prompt or lower max_new_tokens"
        )
    if isinstance(eos_token_ids, int):
        raise InputError(f"eos_token_ids={eos_token_ids}: give a sequence of ids, such as ({eos_token_ids},)")
    if bad := [i for i in eos_token_ids if not 0 <= i < config.vocab_size]:
        raise InputError(f"eos_token_ids={bad}: outside the vocabulary of {config.vocab_size} tokens")
    if rule not in CHAIN_RULES:
        raise InputError(f"rule={rule!r}: must be one of {', '.join(CHAIN_RULES)}")
    drafter = NoDraft() if drafter is None else drafter
    drafter.draft.check(config.vocab_size)
    drafter.check(target)
    if int(lengths.max()) + drafter.draft.depth > config.max_positions:
        raise InputError(
            f"draft={drafter.draft}: {drafter.draft.depth} deep, but below a prompt of {int(lengths.max())} tokens there is no "
            f"room for it in the target's {config.max_positions} positions; give a shallower one"
        )
    state = prefill(
        target,
        drafter,
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        jnp.asarray((lengths + limits).astype(np.int32)),
        _row_keys(key, batch),
        jnp.asarray(np.asarray(eos_token_ids, np.int32)),
        sampling.rows(batch),
        max_new_tokens=int(limits.max()),
    )
    return drafter, state


def check_prompts(tokens: Any, lengths: Any, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The prompts ``[B, P]`` and their lengths ``[B]``. Raises InputError, which names what is wrong with them."""
    try:
        tokens = np.asarray(tokens)
    except ValueError:
        raise InputError(
            "tokens: rows of different lengths; right-pad them (specjax.text.pad gives tokens and lengths)"
        ) from None
    if tokens.size == 0:
        raise InputError("tokens: empty prompt; every row needs at least 1 token (begin with the bos token)")
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise InputError(f"tokens: must be whole numbers [batch, prompt], not {tokens.dtype} {list(tokens.shape)}")
    batch, width = tokens.shape
    lengths = np.full(batch, width) if lengths is None else np.asarray(lengths)
    if lengths.shape != (batch,) or lengths.dtype.kind not in "iu":
        raise InputError(f"lengths: must be {batch} whole numbers, one a row, not {lengths.dtype} {list(lengths.shape)}")
    if lengths.min() < 1:
        raise InputError(f"lengths={lengths.min()}: empty prompt; every row needs at least 1 token")
    if lengths.max() > width:
        raise InputError(f"lengths={lengths.max()}: longer than the prompts' width {width}")
    inside = np.arange(width)[None] < lengths[:, None]
    bad = tokens[inside & ((tokens < 0) | (tokens >= vocab_size))]
    if bad.size:
        raise InputError(f"tokens: id {bad[0]} is outside the vocabulary of {vocab_size} tokens; is it the target's tokenizer?")
    return np.where(inside, tokens, 0).astype(np.int32), lengths.astype(np.int32)


def _check_limits(max_new_tokens: Any, batch: int) -> np.ndarray:
    limits = np.asarray(max_new_tokens)
    if limits.dtype.kind not in "iu" or limits.shape not in ((), (batch,)) or limits.min() < 1:
        raise InputError(f"max_new_tokens={max_new_tokens}: must be at least 1, one number or one for each of the {batch} rows")
    return np.broadcast_to(limits, (batch,)).astype(np.int64)


def _row_keys(key: Any, batch: int) -> jax.Array:
    key = jax.random.key(0) if key is None else key
    if not isinstance(key, jax.Array) or (key.ndim == 0 and not jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise InputError(f"key={key!r}: give a random key, such as jax.random.key(0)")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):  # an old-style uint32 key
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        return jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(batch))
    if key.shape != (batch,):
        raise InputError(f"key has shape {key.shape}: give one key, or one for each of the {batch} rows")
    return key
