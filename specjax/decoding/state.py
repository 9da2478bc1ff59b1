"""The state of a batch of rows between two steps, and the prefill that makes it.

Rows are independent of each other.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import sharding
from specjax.adjustments import Adjustments
from specjax.decoding.stats import Stats
from specjax.drafters.base import Committed, Drafter, start_drafter
from specjax.drafts.speculation import NO_LIMIT
from specjax.errors import InputError
from specjax.models.cache import KVCache, PagedCache
from specjax.models.transformer import Target
from specjax.sampling import RowSampling


@struct.dataclass
class DecodeState:
    """Everything that the next step needs.

    Rows are independent. Every array has the row axis first, so that `insert` can replace a row.

    Attributes:
        tokens: ``[B, S]`` prompt and output; S is the capacity.
        lengths: ``[B]`` committed tokens, the root included. The root is token ``lengths - 1``.
        max_lengths: ``[B]`` number of committed tokens at which a row is done.
        done: ``[B]`` bool, rows that steps skip: the text has ended, or, if rows come and go, the
            row is free, its prompt is not prefilled yet, or a client drafts for it.
        keys: ``[B]`` random keys, one for each row.
        stop_token_ids: ``[B, E]`` token ids that end each row, padded with -1.
        sampling: the sampling parameters of the rows.
        cache: the target's KV cache. It holds ``lengths - 1`` tokens, all but the root. It is paged
            if rows come and go (`specjax.decoding.rows`).
        drafter: the drafter's own state.
        stats: the statistics so far.
        accepted: ``[B, S]`` bool, which tokens were drafted and accepted.
        failed: ``[B]`` bool, rows that ended because the target's logits were NaN or +inf, so that
            no token could be drawn for position ``lengths``.
        min_lengths: ``[B]`` number of committed tokens before which a row must not end. None if no
            row may have such a minimum.
        draft_limits: ``[B]`` int32 the largest depth of each row's drafts, 0 for a row that drafts
            nothing. None if no row has a limit.

    Examples:
        >>> from specjax import decoding
        >>> drafter, state = decoding.start(target, specjax.PromptLookup(draft=2), prompts)
        >>> state.roots.tolist()  # the last tokens of the prompts
        [7, 1]
    """

    tokens: jax.Array
    lengths: jax.Array
    max_lengths: jax.Array
    done: jax.Array
    keys: jax.Array
    stop_token_ids: jax.Array
    sampling: RowSampling
    cache: KVCache | PagedCache
    drafter: Any
    stats: Stats
    accepted: jax.Array
    failed: jax.Array
    min_lengths: jax.Array | None = None
    draft_limits: jax.Array | None = None

    @property
    def roots(self) -> jax.Array:
        """The newest committed token of each row, ``[B]``."""
        return jnp.take_along_axis(self.tokens, self.lengths[:, None] - 1, axis=1)[:, 0]

    def tokens_from(self, starts: jax.Array, count: int) -> jax.Array:
        """Return ``[B, count]`` each row's tokens from ``starts [B]`` on; beyond its end, any."""
        positions = starts[:, None] + jnp.arange(count)[None]
        return jnp.take_along_axis(
            self.tokens, jnp.minimum(positions, self.tokens.shape[1] - 1), axis=1
        )

    @property
    def next_sampling(self) -> RowSampling:
        """The sampling parameters for the tokens below the roots."""
        if self.min_lengths is None:
            return self.sampling
        return replace(
            self.sampling,
            stop_token_ids=self.stop_token_ids,
            tokens_before_stop=self.min_lengths - self.lengths,
        )


PREFILL_CHUNK = 512
"""The number of prompt tokens per forward pass. Memory does not grow with the prompt."""


@partial(jax.jit, static_argnames=("capacity", "depth"))
def prefill(
    target: Target,
    drafter: Drafter,
    tokens: jax.Array,
    lengths: jax.Array,
    max_lengths: jax.Array,
    keys: jax.Array,
    stop_token_ids: jax.Array,
    sampling: RowSampling,
    min_lengths: jax.Array | None = None,
    draft_limits: jax.Array | None = None,
    *,
    capacity: int,
    depth: int | None = None,
) -> DecodeState:
    """Read the prompts ``tokens [B, P]`` and return the state that `decode` continues.

    See `DecodeState` for the shapes. ``depth`` is the depth of the deepest draft that the state
    will verify; by default it is the drafter's.

    Examples:
        >>> from specjax.decoding import prefill
        >>> state = prefill(
        ...     target,
        ...     specjax.PromptLookup(draft=2),
        ...     jnp.asarray(prompts),
        ...     lengths=jnp.array([6, 6]),
        ...     max_lengths=jnp.array([14, 14]),
        ...     keys=jax.random.split(jax.random.key(0)),
        ...     stop_token_ids=jnp.full((2, 1), -1),  # no token ends a row
        ...     sampling=specjax.Sampling(temperature=0.0).rows(2),
        ...     capacity=24,
        ... )
        >>> state.tokens.shape, state.cache.length.tolist()
        ((2, 24), [5, 5])
    """
    batch, width = tokens.shape
    cache, drafter_state = read_prompts(target, drafter, tokens, lengths, capacity)
    state = DecodeState(
        tokens=jnp.pad(tokens, ((0, 0), (0, max(0, capacity - width))))[:, :capacity],
        lengths=lengths,
        max_lengths=max_lengths,
        done=lengths >= max_lengths,
        keys=keys,
        stop_token_ids=stop_token_ids,
        sampling=sampling,
        cache=cache,
        drafter=drafter_state,
        stats=Stats.zeros(
            batch,
            drafter.draft_shape.depth if depth is None else depth,
            parts=len(drafter.part_names),
        ),
        accepted=jnp.zeros((batch, capacity), bool),
        failed=jnp.zeros(batch, bool),
        min_lengths=min_lengths,
        draft_limits=draft_limits,
    )
    return place_rows(state, target)


def read_prompts(
    target: Target, drafter: Drafter, tokens: jax.Array, lengths: jax.Array, capacity: int
) -> tuple[KVCache, Any]:
    """Return the target's cache and the drafter's state after the prompts.

    The prompts are read `PREFILL_CHUNK` tokens at a time. A prompt's last token is its first root,
    which the first step reads, so this function commits ``lengths - 1`` tokens.
    """
    batch, width = tokens.shape
    committed, taps = lengths - 1, drafter.taps(target.config)
    # The token after each token. The roll wraps around at the last one, which is not committed
    # here.
    following = jnp.roll(tokens, -1, axis=1)
    # Empty caches are constants. Without the barrier XLA folds the attention over them while
    # compiling, which takes minutes.
    cache, state = jax.lax.optimization_barrier(
        (target.new_cache(batch, capacity), start_drafter(drafter, target, batch, capacity))
    )

    def commit(
        cache: KVCache,
        state: Any,
        tokens: jax.Array,
        following: jax.Array,
        count: jax.Array,
        *earlier: KVCache,
    ) -> tuple[KVCache, Any]:
        output, new = target.read(tokens, *earlier, taps=taps, commit=count)
        cache = cache.append(new, count, after=output.hidden)
        results = Committed(tokens, following, output, new, count, cache)
        return cache, drafter.append_committed(target, state, results)

    if width <= PREFILL_CHUNK:  # one chunk: attention need not read the empty cache
        cache, state = commit(cache, state, tokens, following, committed)
        return cache, drafter.prompts_read(target, state, tokens, cache)

    chunks = -(-width // PREFILL_CHUNK)

    def split(values: jax.Array) -> jax.Array:  # [B, P] -> [chunks, B, C]
        padded = jnp.pad(values, ((0, 0), (0, chunks * PREFILL_CHUNK - width)))
        return jnp.moveaxis(padded.reshape(batch, chunks, PREFILL_CHUNK), 1, 0)

    def read(
        carry: tuple[KVCache, Any], part: tuple[jax.Array, ...]
    ) -> tuple[tuple[KVCache, Any], None]:
        cache, state = carry
        tokens, following, index = part
        count = jnp.clip(committed - index * PREFILL_CHUNK, 0, PREFILL_CHUNK)
        return commit(cache, state, tokens, following, count, cache), None

    parts = split(tokens), split(following), jnp.arange(chunks, dtype=jnp.int32)
    (cache, state), _ = jax.lax.scan(read, (cache, state), parts)
    return cache, drafter.prompts_read(target, state, tokens, cache)


def place_rows(state: DecodeState, target: Target) -> DecodeState:
    """Spread the small arrays of the rows over the mesh.

    `decode` then receives arrays with the sharding that it returns, so it is compiled once.
    """
    batch = state.lengths.shape[0]

    def place(leaf: jax.Array) -> jax.Array:
        if leaf.ndim not in (1, 2) or leaf.shape[0] != batch:
            return leaf
        return sharding.constrain(leaf, ("batch", *(None,) * (leaf.ndim - 1)), {}, target.mesh)

    return jax.tree.map(place, state)


@jax.jit
def place_adjustments(adjustments: Adjustments, target: Target) -> Adjustments:
    """Return adjustments on the device, with their rows spread over the mesh."""

    def place(leaf: jax.Array) -> jax.Array:
        axes = ("batch", *(None,) * (leaf.ndim - 1))
        return sharding.constrain(leaf, axes, {}, target.mesh)

    return jax.tree.map(place, adjustments)


def insert(state: DecodeState, request: DecodeState, row: int) -> DecodeState:
    """Return ``state`` with row ``row`` replaced by the one row of ``request``.

    This is for states of `start`, which prefills a prompt in a state of its own. For paged caches
    see `specjax.decoding.rows.admit`: there a prompt is prefilled in its row.

    Args:
        state: a state of B rows that `start` or `decode` returned. It is donated.
        request: a state of one row from `start`, with the same drafter and rule and the
            ``capacity`` of ``state``, and with ``mixed`` if some rows are greedy and others are
            not. Give it its own random key.
        row: the index of the row, from 0 to B - 1.

    Raises:
        InputError: The row is out of range, or the two states do not fit together.

    Examples:
        >>> from specjax import decoding
        >>> options = decoding.GenerationOptions(max_new_tokens=8)
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> drafter, state = decoding.start(
        ...     target, drafter, prompts, options=options, capacity=24
        ... )
        >>> state = decoding.decode(target, drafter, state, max_steps=100)
        >>> _, request = decoding.start(
        ...     target, drafter, prompts[:1], options=options, capacity=24
        ... )
        >>> state = decoding.insert(state, request, row=1)
        >>> state.done.tolist(), state.lengths.tolist()
        ([True, False], [14, 6])
    """
    (batch, max_ids), ids = state.stop_token_ids.shape, request.stop_token_ids
    if not 0 <= row < batch:
        raise InputError(f"row={row}: the state has {batch} rows; give 0 to {batch - 1}")
    if ids.shape[1] > max_ids:
        raise InputError(
            f"eos_token_ids: the request has {ids.shape[1]}, but the state has room for {max_ids}"
            " in each row"
        )
    padding = jnp.full((ids.shape[0], max_ids - ids.shape[1]), -1, ids.dtype)
    request = replace(request, stop_token_ids=jnp.concatenate([ids, padding], axis=1))
    request = _match_min_lengths(state, request)
    request = _match_draft_limits(state, request)
    if jax.tree.structure(state) != jax.tree.structure(request):
        raise InputError(
            "request: its sampling or drafter differs from the state's; start both alike, and with"
            " mixed=True"
        )
    for leaf, new in zip(jax.tree.leaves(state), jax.tree.leaves(request), strict=True):
        if new.shape != (1, *leaf.shape[1:]):
            raise InputError(
                f"request: its shape {new.shape} does not fit the state's {leaf.shape}; start it"
                f" with one prompt, capacity={state.tokens.shape[1]} and the same drafter"
            )
    return _insert(state, request, jnp.asarray(row))


def _match_min_lengths(state: DecodeState, request: DecodeState) -> DecodeState:
    """Give ``request`` `DecodeState.min_lengths` if ``state`` has them, otherwise remove them."""
    minimum = request.min_lengths
    if state.min_lengths is not None and minimum is None:
        return replace(request, min_lengths=request.lengths)
    if state.min_lengths is None and minimum is not None:
        if np.any(minimum.addressable_data(0) > request.lengths.addressable_data(0)):
            raise InputError(
                "request: it has min_new_tokens, but the state has no room for them; make it with"
                " decoding.start"
            )
        return replace(request, min_lengths=None)
    return request


def _match_draft_limits(state: DecodeState, request: DecodeState) -> DecodeState:
    """Give ``request`` `DecodeState.draft_limits` if ``state`` has them.

    Raises:
        InputError: Only the request has them.
    """
    if state.draft_limits is None and request.draft_limits is not None:
        raise InputError(
            "request: its speculation is limited, but the state has no room for limits; start the"
            " state with a speculation for each row, such as ['auto', 'off']"
        )
    if state.draft_limits is not None and request.draft_limits is None:
        return replace(request, draft_limits=jnp.full_like(request.lengths, NO_LIMIT))
    return request


@partial(jax.jit, donate_argnames="state")  # donated, so that the caches are updated in place
def _insert(state: DecodeState, request: DecodeState, row: jax.Array) -> DecodeState:
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, row, axis=0),
        state,
        request,
    )
