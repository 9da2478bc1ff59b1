"""Continuous batching: rows that requests join and leave while other rows are decoded.

`empty` makes a state of free rows. `admit` gives a row to a text. `read_chunk` prefills its prompt
chunk by chunk, between calls of `decode_rows`, which decode the other rows. When the text is done,
another text can have its row. The caches are paged (`specjax.models.cache.PagedCache`). The host
decides which row has which page and passes the table to every call.

The functions are compiled for a number of rows and a draft shape. Nothing is compiled again while
texts come and go.
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
from specjax.drafters.pausable import ROOM, Pausable
from specjax.drafters.with_prediction import WithPrediction
from specjax.drafts.speculation import NO_LIMIT
from specjax.models.cache import KVCache, PagedCache, by_group, groups_of
from specjax.models.transformer import States, Target
from specjax.sampling import GREEDY, Sampling


@struct.dataclass
class Text:
    """A text that is about to get a row, before any computation.

    Attributes:
        tokens: ``[S]`` int32 the prompt, and the output so far if the text continues; padded. S is
            the capacity.
        length: scalar int32, number of these tokens.
        max_length: scalar int32, the largest number of tokens of prompt and output.
        key: its random key, or the key's data on the host: ``[2]`` uint32 from
            `jax.random.key_data`.
        stop_token_ids: ``[E]`` int32 ids that end it, padded with -1.
        sampling: the parameters of its distribution by name, each a scalar: those of
            `specjax.Sampling.by_row`.
        min_length: scalar int32, number of tokens of prompt and output before which it does not
            end.
        prediction: ``[S]`` int32, the expected output, for `WithPrediction`; None without one.
        predicted: scalar int32, number of tokens of the prediction.
        draft_limit: scalar int32, the largest depth of its drafts; 0 if nothing is drafted.
        segment: scalar int32, the segment of the index of earlier answers that its drafts come
            from, see `specjax.drafters.Suffix`; -1: none; None if there is no such index.

    Examples:
        >>> from specjax.decoding import rows
        >>> sampling = specjax.Sampling(temperature=0.7, top_p=0.9)
        >>> text = rows.Text.of_prompt(prompts[0], capacity=32, max_new_tokens=8, sampling=sampling)
        >>> text.tokens.shape, text.length, text.max_length
        ((32,), np.int32(6), np.int32(14))
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
    draft_limit: Any = np.int32(NO_LIMIT)
    segment: Any = None

    @classmethod
    def of_prompt(
        cls,
        prompt: ArrayLike,
        *,
        capacity: int,
        max_new_tokens: int,
        key: jax.Array | None = None,
        stop_token_ids: np.ndarray | None = None,
        sampling: Sampling = GREEDY,
        draft_limit: int = NO_LIMIT,
    ) -> "Text":
        """Return the text of a prompt.

        Args:
            prompt: ``[P]`` the token ids of the prompt.
            capacity: the largest number of tokens of a text, as in `empty`.
            max_new_tokens: the largest number of tokens of the output.
            key: the random key; None for ``jax.random.key(0)``.
            stop_token_ids: ``[E]`` ids that end the text, padded with -1, as many as the state has
                room for; None for eight times -1.
            sampling: the parameters of its distribution.
            draft_limit: the largest depth of its drafts.
        """
        prompt = np.asarray(prompt)
        return cls(
            tokens=np.pad(prompt.astype(np.int32), (0, capacity - len(prompt))),
            length=np.int32(len(prompt)),
            max_length=np.int32(len(prompt) + max_new_tokens),
            key=jax.random.key(0) if key is None else key,
            stop_token_ids=np.full(8, -1, np.int32) if stop_token_ids is None else stop_token_ids,
            sampling=sampling.of_row(),
            draft_limit=np.int32(draft_limit),
        )


@struct.dataclass
class Progress:
    """The tokens that one call of `decode_rows` added to each row: a copy for the host.

    The copy stays valid when the state is donated to the next call. It holds what one call can add,
    not a whole row, because the host waits for every byte of the transfer.

    Attributes:
        tokens: ``[B, R]`` the tokens that the call emitted: ``lengths - starts`` of them, then
            padding.
        starts: ``[B]`` number of tokens of each row before the call.
        lengths: ``[B]`` number of tokens of each row after it.
        done: ``[B]`` bool, as `DecodeState.done`.
        failed: ``[B]`` bool, as `DecodeState.failed`.
        stats: the statistics of each row since its text was admitted, not of this call alone.
        accepted: ``[B, R]`` bool, which of ``tokens`` were drafted and accepted.
        matched: ``[B]`` number of tokens that matched the prediction since the row's text was
            admitted; None if the drafter has no predictions.
        logprobs: those of ``tokens`` in the decoded rows, ``[width, R]``; None if they were not
            requested.
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
    """Return a state whose rows are all free.

    Tokens are drawn with coupled sampling, or greedily, as each text requests. So a text depends
    only on the fields of its `Text`: not on the drafter, the shape of the drafts, its row or when
    it was admitted.

    Args:
        target: the target.
        drafter: the drafter of the rows.
        rows: the number of rows, B.
        capacity: the largest number of tokens of a text, prompt and output.
        pages: the number of pages of each pool. On a mesh, the data axis splits the rows into
            groups, and every group has this number.
        page: the number of tokens of a page.
        max_stop_tokens: the largest number of ids that end a text.
        depth: the depth of the deepest drafts that the state has room for; None for the drafter's.

    Examples:
        >>> from specjax.decoding import rows
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> state = rows.empty(target, drafter, rows=4, capacity=32, pages=16, page=8)
        >>> state.done.tolist(), state.cache.table.shape
        ([True, True, True, True], (4, 4))
    """
    contiguous = target.new_cache(rows, capacity), start_drafter(drafter, target, rows, capacity)
    # Only the shapes of the contiguous caches are read, so this program never allocates them.
    cache, drafter_state = to_pages(contiguous, pages, page, target)
    state = DecodeState(
        tokens=jnp.zeros((rows, capacity), jnp.int32),
        lengths=jnp.ones(rows, jnp.int32),  # not 0, because the root is token ``length - 1``
        max_lengths=jnp.ones(rows, jnp.int32),
        done=jnp.ones(rows, bool),
        keys=jnp.broadcast_to(jax.random.key(0), (rows,)),
        stop_token_ids=jnp.full((rows, max_stop_tokens), -1, jnp.int32),
        sampling=GREEDY.rows_of_any_kind(rows),
        cache=cache,
        drafter=drafter_state,
        stats=Stats.zeros(
            rows,
            drafter.draft_shape.depth if depth is None else depth,
            parts=len(drafter.part_names),
        ),
        accepted=jnp.zeros((rows, capacity), bool),
        failed=jnp.zeros(rows, bool),
        min_lengths=jnp.zeros(rows, jnp.int32),
        draft_limits=jnp.full(rows, NO_LIMIT, jnp.int32),
    )
    return place_rows(state, target)


@struct.dataclass
class PrefixState:
    """The state at the end of a prompt chunk, apart from pages.

    Another text with the same prefix can continue from it and from the pages.

    Attributes:
        states: the target's recurrent states (`specjax.models.cache.KVCache`), one row for each
            group.
        drafter: the result of `Drafter.to_prefix_state`.
    """

    states: Any
    drafter: Any


def empty_prefix_state(
    target: Target, drafter: Drafter, *, capacity: int, pages: int, page: int = 64
) -> PrefixState:
    """Return the ``prefix_state`` for `admit` if no token of the text has been read before.

    The arguments are those of `empty`. On a mesh the prefix state has one row per group, like the
    one that `read_chunk` returns.
    """

    # Compiled, so that the caches, which are not a part of the result, are never allocated.
    @jax.jit
    def make(target: Target, drafter: Drafter) -> PrefixState:
        groups = groups_of(target.mesh)
        drafter_state = to_pages(drafter.start(target, groups, capacity), pages, page, target)
        return PrefixState(
            target.new_cache(groups, capacity).states,
            without_pools(drafter.to_prefix_state(drafter_state)),
        )

    return make(target, drafter)


# Here and below the state is donated, so that the caches are updated in place.
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
    """Give a row to a text.

    The row counts as done, so that `decode_rows` skips it, until `read_chunk` has read its prompt.

    Args:
        target: the target.
        drafter: the drafter that `empty` was called with.
        state: the state; it is donated.
        row: the index of the row.
        text: the text.
        cached: the length of the shared prefix: the text's first tokens that were read for another
            text. The tables of later calls must have that prefix's pages in this row. The token
            after the prefix must be the same in both texts, because drafters store each token
            together with the next one.
        prefix_state: the state after these tokens, from `read_chunk`; `empty_prefix_state` if
            ``cached`` is 0.
        group: the row of ``prefix_state`` to use; 0 without a mesh.

    Examples:
        >>> from specjax.decoding import rows
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> sizes = {"capacity": 32, "pages": 16, "page": 8}
        >>> state = rows.empty(target, drafter, rows=4, **sizes)
        >>> begin = rows.empty_prefix_state(target, drafter, **sizes)
        >>> text = rows.Text.of_prompt(prompts[0], capacity=32, max_new_tokens=8)
        >>> state = rows.admit(target, drafter, state, 1, text, 0, begin)  # row 1, nothing cached
        >>> state.lengths.tolist(), state.done.tolist()  # done: its prompt has yet to be read
        ([1, 6, 1, 1], [True, True, True, True])
    """
    cache, capacity = state.cache, state.tokens.shape[1]
    assert isinstance(cache, PagedCache)
    prefix_row = map_rows(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, group, 1), prefix_state)
    new_drafter_state = to_pages(drafter.start(target, 1, capacity), 1, cache.page, target)
    # An engine passes the key's data, because numpy has no arrays of keys.
    key = text.key
    if key.dtype == jnp.uint32:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
    new_row = DecodeState(
        tokens=text.tokens,
        lengths=text.length,
        max_lengths=text.max_length,
        done=jnp.ones((), bool),
        keys=key,
        stop_token_ids=text.stop_token_ids,
        sampling=replace(state.sampling, **text.sampling),
        # A row has no pools: without layers here, `put_rows` keeps those of the state. The table is
        # a placeholder, because every later call has its own.
        cache=replace(cache, layers=(), table=cache.table[0], length=cached, states=()),  # pyright: ignore[reportArgumentType]
        drafter=None,
        stats=jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), state.stats),
        accepted=jnp.zeros(capacity, bool),
        failed=jnp.zeros((), bool),
        min_lengths=text.min_length,
        draft_limits=text.draft_limit,
    )
    new_row = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], new_row)
    drafter_state = drafter.from_prefix_state(new_drafter_state, prefix_row.drafter)
    if isinstance(drafter, WithPrediction) and text.prediction is not None:
        tokens = jnp.asarray(text.prediction, jnp.int32)
        count = jnp.asarray(text.predicted, jnp.int32)
        drafter_state = drafter.predict(drafter_state, tokens[None], count[None])
    if text.segment is not None:
        segments = jnp.asarray(text.segment, jnp.int32)[None]
        drafter_state = drafter.in_segment(drafter_state, segments)
    new_row = replace(
        new_row,
        cache=replace(new_row.cache, states=prefix_row.states),
        drafter=without_pools(drafter_state),
    )
    return put_rows(
        state,
        new_row,
        lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new.astype(leaf.dtype), row, 0),
    )


@partial(jax.jit, static_argnames=("size", "logprobs"), donate_argnames="state")
def read_chunk(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    table: HostOrDevice,
    rows: HostOrDevice,
    counts: HostOrDevice,
    is_last: HostOrDevice,
    *,
    size: int,
    logprobs: int | None = None,
    remote_drafter: Drafter | None = None,
) -> tuple[DecodeState, PrefixState, Logprobs | None, dict[str, jax.Array]]:
    """Read the next tokens of a prompt: of one row, or on a mesh of one row of each group.

    Args:
        target: the target.
        drafter: the drafter that `empty` was called with.
        state: the state; it is donated.
        table: ``[B, n]`` the pages of all rows.
        rows: ``[G]`` the index of the row to read, one for each group.
        counts: ``[G]`` the number of tokens to read, at most ``size``; 0 for a group with nothing
            to read.
        is_last: ``[G]`` bool, whether this chunk ends the prompt and `decode_rows` may decode the
            row from now on. It is False if a client drafts for the text. The prompt's last token is
            never in a chunk: it is the first root, which the first step of decoding reads.
        size: the number of tokens that are computed for each row, padding included.
        logprobs: if not None, return the target's log-probability of each token, and those of this
            number of likeliest tokens at its position.
        remote_drafter: the drafter of the client that drafts for this text; the result then has
            what must be sent to it for the chunk's tokens. None without a client.

    Returns:
        The state; the `PrefixState` at the end of the chunk, for `admit`; the log-probabilities
        ``[G, size]`` of the token after each token of the chunk, or None; and the
        `Drafter.remote_inputs` of ``remote_drafter``, ``[G, size, …]`` each, or an empty
        dictionary.

    Examples:
        >>> from specjax.decoding import rows
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> sizes = {"capacity": 32, "pages": 16, "page": 8}
        >>> state = rows.empty(target, drafter, rows=4, **sizes)
        >>> begin = rows.empty_prefix_state(target, drafter, **sizes)
        >>> text = rows.Text.of_prompt(prompts[0], capacity=32, max_new_tokens=8)
        >>> state = rows.admit(target, drafter, state, 1, text, 0, begin)  # row 1, nothing cached
        >>> table = np.full((4, 4), 16, np.int32)  # 16: no page
        >>> table[1, :2] = 3, 7
        >>> row, count, is_last = np.array([1]), np.array([5]), np.array([True])
        >>> state, _, _, _ = rows.read_chunk(
        ...     target, drafter, state, table, row, count, is_last, size=8
        ... )
        >>> state.cache.length.tolist(), state.done.tolist()
        ([0, 5, 0, 0], [True, False, True, True])
    """
    state = with_table(state, table)
    groups, batch = rows.shape[0], state.lengths.shape[0]
    counts, is_last = jnp.asarray(counts), jnp.asarray(is_last)
    # An index within each group: each device finds the row among its own, without an exchange.
    rows_in_groups = jnp.asarray(rows) % (batch // groups)

    def take(leaf: jax.Array) -> jax.Array:
        return by_group(lambda leaf, row: leaf[row], groups, leaf, rows_in_groups)

    def put(leaf: jax.Array, new: jax.Array) -> jax.Array:
        return by_group(
            lambda leaf, new, row: leaf.at[row].set(new), groups, leaf, new, rows_in_groups
        )

    selected = map_rows(take, state)
    positions = selected.cache.length[:, None] + jnp.arange(size)[None]

    def tokens_at(positions: jax.Array) -> jax.Array:
        # Padding may lie beyond the capacity, where `take_along_axis` returns invalid ids. Any
        # valid id will do, because nothing is stored for the positions after ``counts``.
        clamped = jnp.minimum(positions, selected.tokens.shape[1] - 1)
        return jnp.take_along_axis(selected.tokens, clamped, axis=1)

    tokens, following = tokens_at(positions), tokens_at(positions + 1)
    # One pass of the target records the taps of both drafters.
    local_taps = drafter.taps(target.config)
    remote_taps = () if remote_drafter is None else remote_drafter.taps(target.config)
    taps = tuple(sorted({*local_taps, *remote_taps}))
    output, entries = target.read(tokens, selected.cache, taps=taps, commit=counts)
    remote = {}
    if remote_drafter is not None:
        remote_output = _with_taps(output, taps, remote_taps)
        remote = remote_drafter.remote_inputs(target, remote_output, entries)
    output = _with_taps(output, taps, local_taps)
    cache = selected.cache.append(entries, counts, after=output.hidden)
    committed = Committed(
        tokens=tokens,
        following=following,
        output=output,
        entries=entries,
        count=counts,
        cache=cache,
    )
    drafter_state = drafter.append_committed(target, selected.drafter, committed)
    # Take the prefix state before the prompt is finished: a text that continues from it has more
    # tokens of its own prompt after this chunk.
    prefix_state = PrefixState(cache.states, without_pools(drafter.to_prefix_state(drafter_state)))
    drafter_state = _finish_prompts(target, drafter, drafter_state, selected.tokens, cache, is_last)
    selected = replace(selected, cache=cache, drafter=drafter_state, done=selected.done & ~is_last)
    scored = None
    if logprobs is not None:
        scored = _read_logprobs(target, output.hidden, following, logprobs)
    return place_rows(put_rows(state, selected, put), target), prefix_state, scored, remote


def _with_taps(output: States, taps: tuple[int, ...], selected: tuple[int, ...]) -> States:
    """Return ``output``, which has ``taps``, with the ``selected`` taps alone."""
    if taps == selected:
        return output
    indices = np.array([taps.index(tap) for tap in selected], np.int32)
    return replace(output, taps=output.taps[:, :, indices])


_SCORED_AT_ONCE = 64
"""The number of prompt tokens whose logits exist at a time: 32 MB for a vocabulary of 128,000."""


def _read_logprobs(target: Target, hidden: jax.Array, following: jax.Array, top: int) -> Logprobs:
    """Return the log-probabilities of ``following [G, T]``, the tokens after ``hidden [G, T, H]``.

    They are computed for a few tokens at a time to save memory.
    """
    size = math.gcd(following.shape[1], _SCORED_AT_ONCE)  # `lax.map` needs parts of one size

    def split(values: jax.Array) -> jax.Array:  # [G, T, …] -> [T / size, G, size, …]
        return jnp.moveaxis(values.reshape(values.shape[0], -1, size, *values.shape[2:]), 1, 0)

    def score(part: tuple[jax.Array, jax.Array]) -> Logprobs:
        states, tokens = part
        return Logprobs.of(target.head(states), tokens, top)

    def join(values: jax.Array) -> jax.Array:
        return jnp.moveaxis(values, 0, 1).reshape(following.shape[0], -1, *values.shape[3:])

    return jax.tree.map(join, jax.lax.map(score, (split(hidden), split(following))))


def _finish_prompts(
    target: Target,
    drafter: Drafter,
    state: Any,
    tokens: jax.Array,
    cache: PagedCache | KVCache,
    is_last: HostOrDevice,
) -> Any:
    """Return the drafter's state after `Drafter.prompts_read` for the rows of ``is_last``."""
    if type(drafter).prompts_read is Drafter.prompts_read:
        return state
    # The conditional returns no pools, because XLA would copy them.
    before, treedef = jax.tree.flatten(without_pools(state))

    def at_end() -> list[jax.Array]:
        after = jax.tree.leaves(without_pools(drafter.prompts_read(target, state, tokens, cache)))
        return [
            jnp.where(is_last.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
            for new, old in zip(after, before, strict=True)
        ]

    after = jax.tree.unflatten(treedef, jax.lax.cond(jnp.any(is_last), at_end, lambda: before))
    return put_rows(state, after, lambda _, new: new)


def nodes_of_call(drafter: Drafter, width: int, **_: Any) -> int:
    """Return the number of nodes that the target reads in one pass of `decode_rows`."""
    return width * drafter.draft_shape.nodes


@by_rows(
    nodes_of_call,
    models=("target", "drafter"),
    static_argnames=("width", "logprobs", "call_steps"),
    donate_argnames="state",
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
    """Decode the first ``width`` rows of a state, as `specjax.decoding.decode` does.

    A row that becomes done does not stop the other rows, unless ``until_any_done``.

    Args:
        target: the target.
        drafter: the drafter. Its draft shape may differ from that of the drafter that `empty` was
            called with, but its state must have the same arrays.
        state: the state; it is donated.
        table: ``[B, n]`` the pages of all rows. They must have room for the new tokens, because
            cache entries without a page are dropped: each step may commit D + 1 tokens of a row.
        free: ``[B]`` bool, the rows to retire before decoding: those without a text, and those
            whose new text is not admitted yet.
        max_steps: a scalar, the largest number of steps.
        until_any_done: a scalar bool, whether to stop as soon as a row becomes done.
        width: the number of rows to decode. Fewer rows take less time. Other rows do not change,
            unless they are retired.
        call_steps: the number of steps that `Progress` has room for, R = call_steps * (D + 1)
            tokens of each row. ``max_steps`` may be larger: then `Progress` has the first R tokens,
            and the state has all.
        logprobs: if not None, return the target's log-probability of each new token, and those of
            this number of likeliest tokens at its position.

    Each value of ``width``, ``call_steps`` and ``logprobs`` needs its own compiled program.

    Returns:
        The state, and the `Progress` of its rows in this call.

    Examples:
        >>> from specjax.decoding import rows
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> sizes = {"capacity": 32, "pages": 16, "page": 8}
        >>> state = rows.empty(target, drafter, rows=4, **sizes)
        >>> begin = rows.empty_prefix_state(target, drafter, **sizes)
        >>> text = rows.Text.of_prompt(prompts[0], capacity=32, max_new_tokens=8)
        >>> state = rows.admit(target, drafter, state, 1, text, 0, begin)  # row 1, nothing cached
        >>> table = np.full((4, 4), 16, np.int32)  # 16: no page
        >>> table[1, :2] = 3, 7
        >>> row, count, is_last = np.array([1]), np.array([5]), np.array([True])
        >>> state, _, _, _ = rows.read_chunk(
        ...     target, drafter, state, table, row, count, is_last, size=8
        ... )
        >>> free = np.array([True, False, True, True])
        >>> state, progress = rows.decode_rows(
        ...     target, drafter, state, table, free, 8, False, width=2, call_steps=8
        ... )
        >>> progress.tokens[1, :8].tolist() == plain.tokens[0, 6:].tolist()
        True
    """
    # A row without a text must be done before the loop, which would otherwise go on with the text
    # that had the row before.
    state = retire(with_table(state, table), free)
    starts, room = state.lengths, call_steps * (drafter.draft_shape.depth + 1)
    reported = None if logprobs is None else Logprobs.zeros(width, room, logprobs)
    decoded, reported = run_steps(
        target, drafter, first_rows(state, width), max_steps, until_any_done, reported
    )
    state = put_rows(state, decoded, put_first)
    matched = state.drafter.matched if isinstance(drafter, WithPrediction) else None
    progress = replace(progress_since(state, starts, room), matched=matched, logprobs=reported)
    return place_rows(state, target), progress


def progress_since(state: DecodeState, starts: jax.Array, room: int) -> Progress:
    """Return the `Progress` of rows that had ``starts [B]`` tokens, for up to ``room`` tokens."""
    # ``room`` is static, so these positions may be beyond the capacity, and are clamped. Only the
    # first ``lengths - starts`` tokens have a meaning.
    emitted = jnp.minimum(starts[:, None] + jnp.arange(room), state.tokens.shape[1] - 1)
    return Progress(
        tokens=jnp.take_along_axis(state.tokens, emitted, axis=1),
        starts=starts,
        lengths=state.lengths,
        done=state.done,
        failed=state.failed,
        stats=state.stats,
        accepted=jnp.take_along_axis(state.accepted, emitted, axis=1),
        matched=None,
        logprobs=None,
    )


@partial(jax.jit, static_argnames=("width", "most"), donate_argnames="state")
def catch_up(
    target: Target,
    drafter: Pausable | WithPrediction,
    state: DecodeState,
    table: HostOrDevice,
    *,
    width: int,
    most: int = ROOM,
) -> DecodeState:
    """Let the drafter read its pending tokens in the first ``width`` rows. The state is donated.

    No row may have more than ``most`` of them.
    """
    state = with_table(state, table)
    part = first_rows(state, width)
    drafter_state = drafter.catch_up(target, part.drafter, part.tokens, part.cache, most)
    state = put_rows(state, replace(part, drafter=drafter_state), put_first)
    return place_rows(state, target)


@partial(jax.jit, donate_argnames="state")
def rearrange(state: DecodeState, order: HostOrDevice) -> DecodeState:
    """Permute the rows: row i of the result is row ``order[i]`` of ``state``. Pages do not move.

    ``order [B]`` is a permutation. ``state`` is donated.
    """
    return map_rows(lambda leaf: leaf[order], state)
