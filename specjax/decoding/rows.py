"""Rows that come and go: many texts decoded together, each of which begins and ends when it will.

`empty` makes a state whose rows are free. A text is given a row by `admit`; its prompt is read by `read_chunk`, piece by piece,
between two calls of `decode_rows`, in which the other rows go on; and when it is done another text may have its row. The caches
lie in pages (`specjax.models.cache.PagedCache`). The host decides who has which page, and gives the table to every call.

Everything here is compiled for a number of rows and a shape of draft: whatever comes, nothing is compiled again.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike

from specjax.decoding.few_rows import by_rows
from specjax.decoding.loop import run_steps
from specjax.decoding.row_arrays import (
    HostOrDevice,
    first_rows,
    map_rows,
    put_first,
    put_rows,
    retire,
    to_pages,
    with_table,
    without_pools,
)
from specjax.decoding.state import DecodeState, place_rows
from specjax.decoding.stats import Logprobs, Stats
from specjax.drafters.base import Committed, Drafter, start_drafter
from specjax.drafters.pausable import Pausable
from specjax.drafters.with_prediction import WithPrediction
from specjax.models.cache import KVCache, PagedCache, by_group, groups_of
from specjax.models.transformer import States, Target
from specjax.sampling import GREEDY


@struct.dataclass
class Text:
    """A text that is to have a row. What is known of it before anything is computed.

    Attributes:
        tokens: ``[S]`` int32 the prompt, and filler; S is the capacity.
        length: scalar int32, tokens of the prompt.
        max_length: scalar int32, the largest number of tokens of prompt and output.
        key: its random key, or the key's numbers on the host: ``[2]`` uint32, of `jax.random.key_data`.
        stop_token_ids: ``[E]`` int32 ids that end it; -1 is none.
        sampling: the parameters of its distribution by their names, each a scalar: those of `specjax.Sampling.by_row`.
        min_length: scalar int32, tokens of prompt and output before which it does not end.
        prediction: ``[S]`` int32, what its output is expected to be, for `WithPrediction`; None: there is none.
        predicted: scalar int32, tokens of the prediction.

    Examples:
        >>> from specjax.decoding import rows
        >>> text = rows.Text(
        ...     tokens=np.resize(prompts[0], 32).astype(np.int32),  # a capacity of 32
        ...     length=np.int32(6),
        ...     max_length=np.int32(14),
        ...     key=jax.random.key(0),
        ...     stop_token_ids=np.full(8, -1, np.int32),
        ...     sampling=specjax.Sampling(temperature=0.7, top_p=0.9).of_row(),
        ... )
    """

    tokens: Any
    length: Any
    max_length: Any
    key: Any
    stop_token_ids: Any
    sampling: dict[str, Any]
    min_length: Any = 0
    prediction: Any = None
    predicted: Any = None


@struct.dataclass
class Progress:
    """What a call of `decode_rows` has added to each row: a copy for the host, which outlives the state.

    It is as large as what a call can add, and not as what a row can hold: a host that asks for it waits for every byte.

    Attributes:
        tokens: ``[B, R]`` the tokens that the call emitted, ``lengths - starts`` of them; the rest means nothing.
        starts: ``[B]`` how many tokens each row had before the call.
        lengths: ``[B]`` how many it has now.
        done: ``[B]``.
        failed: ``[B]`` as `DecodeState.failed`.
        stats: since each row's text was admitted.
        accepted: ``[B, R]`` bool, which of ``tokens`` were drafted and accepted.
        matched: ``[B]`` tokens that came as predicted since each row's text was admitted; None: no drafter looks for that.
        logprobs: of ``tokens``, ``[width, R]``, where they were asked for.
    """

    tokens: jax.Array
    starts: jax.Array
    lengths: jax.Array
    done: jax.Array
    failed: jax.Array
    stats: Stats
    accepted: jax.Array
    matched: jax.Array | None
    logprobs: Logprobs | None


@partial(jax.jit, static_argnames=("rows", "capacity", "pages", "page", "max_stop_tokens", "depth"))
def empty(
    target: Target,
    drafter: Drafter,
    *,
    rows: int,
    capacity: int,
    pages: int,
    page: int = 64,
    max_stop_tokens: int = 8,
    depth: int | None = None,
) -> DecodeState:
    """A state of free rows.

    Rows are drawn with coupled sampling, or greedily, each as its text asks. So what a text comes to depends on its key and its
    prompt alone: not on the drafter, nor on the shape of the drafts, nor on when it was put into which row.

    Args:
        target: the target.
        drafter: that will draft.
        rows: B.
        capacity: most tokens of a text, prompt and output.
        pages: in each pool; on a mesh, of each of the groups in which its data axis splits the rows.
        page: tokens of a page.
        max_stop_tokens: most ids that end a text.
        depth: of the deepest drafts that there will be; None: the drafter's.

    Examples:
        >>> from specjax.decoding import rows
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> state = rows.empty(target, drafter, rows=4, capacity=32, pages=16, page=8)
        >>> state.done.tolist(), state.cache.table.shape
        ([True, True, True, True], (4, 4))
    """
    cache, own = to_pages(
        (target.new_cache(rows, capacity), start_drafter(drafter, target, rows, capacity)), pages, page, target
    )
    state = DecodeState(
        tokens=jnp.zeros((rows, capacity), jnp.int32),
        lengths=jnp.ones(rows, jnp.int32),
        max_lengths=jnp.ones(rows, jnp.int32),
        done=jnp.ones(rows, bool),
        keys=jnp.broadcast_to(jax.random.key(0), (rows,)),
        stop_token_ids=jnp.full((rows, max_stop_tokens), -1, jnp.int32),
        sampling=GREEDY.rows_of_any_kind(rows),
        cache=cache,
        drafter=own,
        stats=Stats.zeros(rows, drafter.draft_shape.depth if depth is None else depth),
        accepted=jnp.zeros((rows, capacity), bool),
        failed=jnp.zeros(rows, bool),
        min_lengths=jnp.zeros(rows, jnp.int32),
    )
    return place_rows(state, target)


@struct.dataclass
class PrefixState:
    """What is known at the end of a chunk of a prompt beside its pages, for a text that goes on from there.

    Attributes:
        states: the target's, of layers that keep one (`specjax.models.cache.KVCache`), with a row for each group.
        drafter: what `Drafter.to_prefix_state` keeps.
    """

    states: Any
    drafter: Any


def empty_prefix_state(target: Target, drafter: Drafter, *, capacity: int, pages: int, page: int = 64) -> PrefixState:
    """What `admit` is given for a text of which nothing has been read.

    Arguments as of `empty`. On a mesh it has a row for each group, as what `read_chunk` returns.
    """

    @jax.jit
    def make(target: Target, drafter: Drafter) -> PrefixState:
        groups = groups_of(target.mesh)
        own = to_pages(drafter.start(target, groups, capacity), pages, page, target)
        return PrefixState(target.new_cache(groups, capacity).states, without_pools(drafter.to_prefix_state(own)))

    return make(target, drafter)


@partial(jax.jit, donate_argnames="state")
def admit(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    row: ArrayLike,
    text: Text,
    cached: ArrayLike,
    prefix_state: PrefixState,
    group: ArrayLike = 0,
) -> DecodeState:
    """Give a ``row`` to a ``text``. It is done, as far as `decode_rows` goes, until its prompt has been read.

    Args:
        target: the target.
        drafter: as given to `empty`.
        state: donated.
        row: a number.
        text: the text.
        cached: how many of its tokens have been read already, for another text, whose pages are in this row's table. The token
            after them is the same in both texts, too: drafters pair a token with the one after it.
        prefix_state: what was known of that text there, as `read_chunk` gave it; `empty_prefix_state` where ``cached`` is 0.
        group: whose row of ``prefix_state`` it is; 0 without a mesh.

    Examples:
        >>> from specjax.decoding import rows
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> sizes = {"capacity": 32, "pages": 16, "page": 8}
        >>> state = rows.empty(target, drafter, rows=4, **sizes)
        >>> prefix_state = rows.empty_prefix_state(target, drafter, **sizes)
        >>> text = rows.Text(
        ...     tokens=np.resize(prompts[0], 32).astype(np.int32),
        ...     length=np.int32(6),
        ...     max_length=np.int32(14),
        ...     key=jax.random.key(0),
        ...     stop_token_ids=np.full(8, -1, np.int32),
        ...     sampling=specjax.sampling.GREEDY.of_row(),
        ... )
        >>> row, start, group = np.int32(1), np.int32(0), np.int32(0)
        >>> state = rows.admit(target, drafter, state, row, text, start, prefix_state, group)
        >>> state.lengths.tolist(), state.done.tolist()  # done: its prompt has yet to be read
        ([1, 6, 1, 1], [True, True, True, True])
    """
    cache, capacity = state.cache, state.tokens.shape[1]
    assert isinstance(cache, PagedCache)
    kept = map_rows(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, group, 1), prefix_state)
    fresh = to_pages(drafter.start(target, 1, capacity), 1, cache.page, target)
    one = DecodeState(
        tokens=text.tokens,
        lengths=text.length,
        max_lengths=text.max_length,
        done=jnp.ones((), bool),
        keys=jax.random.wrap_key_data(text.key, impl="threefry2x32") if text.key.dtype == jnp.uint32 else text.key,
        stop_token_ids=text.stop_token_ids,
        sampling=replace(state.sampling, **text.sampling),
        cache=replace(cache, layers=(), table=cache.table[0], length=cached, states=()),  # pyright: ignore[reportArgumentType]
        drafter=None,
        stats=jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), state.stats),
        accepted=jnp.zeros(capacity, bool),
        failed=jnp.zeros((), bool),
        min_lengths=text.min_length,
    )
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], one)
    own = drafter.from_prefix_state(fresh, kept.drafter)
    if isinstance(drafter, WithPrediction) and text.prediction is not None:
        own = drafter.predict(own, *(jnp.asarray(leaf, jnp.int32)[None] for leaf in (text.prediction, text.predicted)))
    one = replace(one, cache=replace(one.cache, states=kept.states), drafter=without_pools(own))
    return put_rows(state, one, lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new.astype(leaf.dtype), row, 0))


@partial(jax.jit, static_argnames=("width", "logprobs"), donate_argnames="state")
def read_chunk(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    table: HostOrDevice,
    rows: HostOrDevice,
    counts: HostOrDevice,
    is_last: HostOrDevice,
    *,
    width: int,
    logprobs: int | None = None,
    remote_drafter: Drafter | None = None,
) -> tuple[DecodeState, PrefixState, Logprobs | None, dict[str, jax.Array]]:
    """Read the next tokens of a prompt: of one row, or on a mesh of one row of each group.

    Args:
        target: the target.
        drafter: as given to `empty`.
        state: donated.
        table: ``[B, n]`` the pages of all rows.
        rows: ``[G]`` whose, one of each group.
        counts: ``[G]`` how many tokens, at most ``width``; 0 where nothing is to be read.
        is_last: ``[G]`` bool, afterwards the whole prompt has been read but its last token, and the row is decoded. (The first
            step of decoding reads the last token, which is the first root.)
        width: tokens that are computed.
        logprobs: with a number, the target's log-probabilities too, and of as many likeliest tokens in each place.
        remote_drafter: a drafter that drafts for this text elsewhere, and must be told of its tokens.

    Returns:
        The state; what is known at the end of the chunk, for `admit`; where they are asked for, the log-probabilities
        ``[G, width]`` of the token that comes after each of the chunk's; and of each of the chunk's tokens the
        `Drafter.remote_inputs` of the ``remote_drafter``, ``[G, width, …]``: nothing without one.

    Examples:
        >>> from specjax.decoding import rows
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> sizes = {"capacity": 32, "pages": 16, "page": 8}
        >>> state = rows.empty(target, drafter, rows=4, **sizes)
        >>> prefix_state = rows.empty_prefix_state(target, drafter, **sizes)
        >>> text = rows.Text(
        ...     tokens=np.resize(prompts[0], 32).astype(np.int32),
        ...     length=np.int32(6),
        ...     max_length=np.int32(14),
        ...     key=jax.random.key(0),
        ...     stop_token_ids=np.full(8, -1, np.int32),
        ...     sampling=specjax.sampling.GREEDY.of_row(),
        ... )
        >>> row, start, group = np.int32(1), np.int32(0), np.int32(0)
        >>> state = rows.admit(target, drafter, state, row, text, start, prefix_state, group)
        >>> table = np.full((4, 4), 16, np.int32)  # 16: no page
        >>> table[1, :2] = 3, 7
        >>> row, count, is_last = np.array([1]), np.array([5]), np.array([True])
        >>> state, _, _, _ = rows.read_chunk(
        ...     target, drafter, state, table, row, count, is_last, width=8
        ... )
        >>> state.cache.length.tolist(), state.done.tolist()
        ([0, 5, 0, 0], [True, False, True, True])
    """
    state = with_table(state, table)
    groups, batch = rows.shape[0], state.lengths.shape[0]
    counts, is_last = jnp.asarray(counts), jnp.asarray(is_last)
    own_rows = jnp.asarray(rows) % (batch // groups)

    def take(leaf: jax.Array) -> jax.Array:
        return by_group(lambda leaf, row: leaf[row], groups, leaf, own_rows)

    def put(leaf: jax.Array, new: jax.Array) -> jax.Array:
        return by_group(lambda leaf, new, row: leaf.at[row].set(new), groups, leaf, new, own_rows)

    part = map_rows(take, state)
    positions = part.cache.length[:, None] + jnp.arange(width)[None]

    def at(positions: jax.Array) -> jax.Array:
        return jnp.take_along_axis(part.tokens, jnp.minimum(positions, part.tokens.shape[1] - 1), axis=1)

    tokens, following = at(positions), at(positions + 1)
    asked = drafter.taps(target.config), () if remote_drafter is None else remote_drafter.taps(target.config)
    taps = tuple(sorted({*asked[0], *asked[1]}))
    output, new = target.read(tokens, part.cache, taps=taps, commit=counts)
    told = {} if remote_drafter is None else remote_drafter.remote_inputs(target, _with_taps(output, taps, asked[1]), new)
    output = _with_taps(output, taps, asked[0])
    cache = part.cache.append(new, counts, after=output.hidden)
    committed = Committed(tokens=tokens, following=following, output=output, entries=new, count=counts, cache=cache)
    own = drafter.append_committed(target, part.drafter, committed)
    prefix_state = PrefixState(cache.states, without_pools(drafter.to_prefix_state(own)))
    own = _prompts_read(target, drafter, own, part.tokens, cache, is_last)
    part = replace(part, cache=cache, drafter=own, done=part.done & ~is_last)
    said = None if logprobs is None else _read_logprobs(target, output.hidden, following, logprobs)
    return place_rows(put_rows(state, part, put), target), prefix_state, said, told


def _with_taps(output: States, taps: tuple[int, ...], asked: tuple[int, ...]) -> States:
    """``output``, in which ``taps`` were recorded, with those alone that were ``asked`` for."""
    if taps == asked:
        return output
    return replace(output, taps=output.taps[:, :, np.array([taps.index(tap) for tap in asked], np.int32)])


_SCORED_AT_ONCE = 64
"""Tokens of a prompt whose logits are there at a time: for 128,000 tokens a vocabulary 32 MB."""


def _read_logprobs(target: Target, hidden: jax.Array, following: jax.Array, top: int) -> Logprobs:
    """Of the tokens ``following [G, T]`` those whose states are ``hidden [G, T, H]``, a few at a time."""
    size = math.gcd(following.shape[1], _SCORED_AT_ONCE)

    def split(values: jax.Array) -> jax.Array:  # [G, T, …] -> [T / size, G, size, …]
        return jnp.moveaxis(values.reshape(values.shape[0], -1, size, *values.shape[2:]), 1, 0)

    def score(part: tuple[jax.Array, jax.Array]) -> Logprobs:
        states, tokens = part
        return Logprobs.of(target.head(states), tokens, top)

    def join(values: jax.Array) -> jax.Array:
        return jnp.moveaxis(values, 0, 1).reshape(following.shape[0], -1, *values.shape[3:])

    return jax.tree.map(join, jax.lax.map(score, (split(hidden), split(following))))


def _prompts_read(
    target: Target, drafter: Drafter, own: Any, tokens: jax.Array, cache: PagedCache | KVCache, is_last: HostOrDevice
) -> Any:
    """The drafter's state, of which the rows have been told that are at the end of their prompts."""
    if type(drafter).prompts_read is Drafter.prompts_read:
        return own
    small, treedef = jax.tree.flatten(without_pools(own))

    def told() -> list[jax.Array]:
        after = jax.tree.leaves(without_pools(drafter.prompts_read(target, own, tokens, cache)))
        return [jnp.where(is_last.reshape(-1, *(1,) * (new.ndim - 1)), new, old) for new, old in zip(after, small, strict=True)]

    after = jax.tree.unflatten(treedef, jax.lax.cond(jnp.any(is_last), told, lambda: small))
    return put_rows(own, after, lambda _, new: new)


def rows_of_call(drafter: Drafter, width: int, **_: Any) -> int:
    """How many nodes the target reads in one pass of `decode_rows`."""
    return width * drafter.draft_shape.nodes


@by_rows(
    rows_of_call, models=("target", "drafter"), static_argnames=("width", "logprobs", "call_steps"), donate_argnames="state"
)
def decode_rows(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    table: HostOrDevice,
    free: HostOrDevice,
    max_steps: ArrayLike,
    until_any_done: ArrayLike,
    *,
    width: int,
    call_steps: int,
    logprobs: int | None = None,
) -> tuple[DecodeState, Progress]:
    """`decode` the first rows of a state.

    Args:
        target: the target.
        drafter: which drafts: any that has the state of the one that was given to `empty`, of whatever shape of draft.
        state: donated.
        table: ``[B, n]`` the pages of all rows, with room for what is decoded here: each step may commit D + 1 tokens a row.
        free: ``[B]`` bool, rows that have no text any more: they are retired first.
        max_steps: scalar.
        until_any_done: scalar bool: end when a row is done.
        width: how many rows. The others stay as they are. Fewer rows take less time.
        call_steps: what ``max_steps`` is at most: there is room to report R = call_steps * (D + 1) tokens. With more steps than
            that the state has all tokens, and the report has the first R.
        logprobs: with a number, the target's log-probabilities too, and of as many likeliest tokens in each place. It is
            another program.

    Returns:
        The state, and what this call has added to its rows.

    Examples:
        >>> from specjax.decoding import rows
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> sizes = {"capacity": 32, "pages": 16, "page": 8}
        >>> state = rows.empty(target, drafter, rows=4, **sizes)
        >>> prefix_state = rows.empty_prefix_state(target, drafter, **sizes)
        >>> text = rows.Text(
        ...     tokens=np.resize(prompts[0], 32).astype(np.int32),
        ...     length=np.int32(6),
        ...     max_length=np.int32(14),
        ...     key=jax.random.key(0),
        ...     stop_token_ids=np.full(8, -1, np.int32),
        ...     sampling=specjax.sampling.GREEDY.of_row(),
        ... )
        >>> row, start, group = np.int32(1), np.int32(0), np.int32(0)
        >>> state = rows.admit(target, drafter, state, row, text, start, prefix_state, group)
        >>> table = np.full((4, 4), 16, np.int32)  # 16: no page
        >>> table[1, :2] = 3, 7
        >>> row, count, is_last = np.array([1]), np.array([5]), np.array([True])
        >>> state, _, _, _ = rows.read_chunk(
        ...     target, drafter, state, table, row, count, is_last, width=8
        ... )
        >>> free = np.array([True, False, True, True])
        >>> state, progress = rows.decode_rows(
        ...     target, drafter, state, table, free, np.int32(8), np.bool_(False), width=2, call_steps=8
        ... )
        >>> progress.tokens[1, :8].tolist() == plain.tokens[0, 6:].tolist()
        True
    """
    state = retire(with_table(state, table), free)
    starts, report_tokens = state.lengths, call_steps * (drafter.draft_shape.depth + 1)
    said = None if logprobs is None else Logprobs.zeros(width, report_tokens, logprobs)
    part, said = run_steps(target, drafter, first_rows(state, width), max_steps, until_any_done, said)
    state = put_rows(state, part, put_first)
    matched = state.drafter.matched if isinstance(drafter, WithPrediction) else None
    emitted = jnp.minimum(starts[:, None] + jnp.arange(report_tokens), state.tokens.shape[1] - 1)
    progress = Progress(
        tokens=jnp.take_along_axis(state.tokens, emitted, axis=1),
        starts=starts,
        lengths=state.lengths,
        done=state.done,
        failed=state.failed,
        stats=state.stats,
        accepted=jnp.take_along_axis(state.accepted, emitted, axis=1),
        matched=matched,
        logprobs=said,
    )
    return place_rows(state, target), progress


@partial(jax.jit, static_argnames="width", donate_argnames="state")
def catch_up(
    target: Target, drafter: Pausable | WithPrediction, state: DecodeState, table: HostOrDevice, *, width: int
) -> DecodeState:
    """Tell the drafter of the tokens that it has yet to read, in the first ``width`` rows. The state is donated."""
    state = with_table(state, table)
    part = first_rows(state, width)
    own = drafter.catch_up(target, part.drafter, part.tokens, part.cache)
    part = replace(part, drafter=own)
    state = put_rows(state, part, put_first)
    return place_rows(state, target)


@partial(jax.jit, donate_argnames="state")
def rearrange(state: DecodeState, order: HostOrDevice) -> DecodeState:
    """The state in whose row i is what was in row ``order[i]``: ``order [B]`` is a permutation. Pages stay where they are."""
    return map_rows(lambda leaf: leaf[order], state)
