"""Constrained rows that requests join and leave, in a paged state.

`specjax.decoding.constrained` explains masked steps, and `specjax.decoding.rows` the state. Rows
without a grammar take part, and every token is legal for them.

With coupled sampling and in greedy rows, a free token that is legal is the constrained token. So a
row whose text stays legal may be decoded by `specjax.decoding.rows.decode_rows`, without masks.
`copy_rows` copies the rows before such a call. The host checks the new tokens. `restore_rows` puts
back the rows in which one is not legal, and masked steps go on from there.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding.constrained import advance_under_masks
from specjax.decoding.few_rows import by_rows
from specjax.decoding.loop import propose_step
from specjax.decoding.row_arrays import (
    HostOrDevice,
    first_rows,
    map_rows,
    put_first,
    put_rows,
    retire,
    with_table,
    without_pools,
)
from specjax.decoding.rows import Progress, nodes_of_call, progress_since
from specjax.decoding.state import DecodeState, place_rows
from specjax.drafters.base import Drafter
from specjax.drafts.draft import Draft
from specjax.models.transformer import Target


@by_rows(
    nodes_of_call,
    models=("target", "drafter"),
    static_argnames="width",
    donate_argnames="state",
)
def propose_rows(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    table: HostOrDevice,
    free: HostOrDevice,
    *,
    width: int,
) -> tuple[DecodeState, Draft, Any]:
    """Propose drafts for the first ``width`` rows of a state.

    The arguments are those of `specjax.decoding.rows.decode_rows`.

    Returns:
        The state, the draft of ``width`` rows, and the drafter's state after drafting. All three
        are for `advance_rows`: until then the drafter's pools are in the last one alone.
    """
    state = retire(with_table(state, table), free)
    draft, part = propose_step(target, drafter, first_rows(state, width))
    state = replace(state, drafter=without_pools(state.drafter))
    return place_rows(state, target), draft, part.drafter


@by_rows(
    nodes_of_call,
    models=("target", "drafter"),
    static_argnames=("width", "logprobs"),
    donate_argnames=("state", "drafted"),
)
def advance_rows(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    table: HostOrDevice,
    free: HostOrDevice,
    draft: Draft,
    legal: HostOrDevice,
    drafted: Any = None,
    *,
    width: int,
    logprobs: int | None = None,
) -> tuple[DecodeState, Progress, list[jax.Array]]:
    """Verify drafts of the first ``width`` rows under masks: one masked step.

    Args:
        target: the target.
        drafter: the drafter that proposed the draft, or its `specjax.decoding.constrained.reader`
            if the draft comes from the host.
        state: the state; it is donated.
        table: ``[B, n]`` the pages of all rows, with room for D + 1 tokens more in each.
        free: ``[B]`` bool, rows without a text. They are retired first.
        draft: the draft of ``width`` rows.
        legal: ``[width, N, ceil(V / 32)]`` from `specjax.decoding.constrained.legal_tokens`.
        drafted: the drafter's state from `propose_rows`, donated too; None if the draft comes from
            the host.
        width: the number of rows.
        logprobs: if not None, return the target's log-probabilities, with those of this number of
            likeliest tokens at each position. A grammar does not change them.

    Returns:
        The state, the `Progress` of its rows in this step, and arrays that are not used any more.
    """
    state = retire(with_table(state, table), free)
    starts = state.lengths
    words = jnp.asarray(legal)
    part = first_rows(state, width)
    part = part if drafted is None else replace(part, drafter=drafted)
    part, info = advance_under_masks(target, drafter, part, draft, words, logprobs)
    state = put_rows(state, part, put_first)
    # JAX warns of donated arrays that no result can replace. The pools are written in place.
    unused = jax.tree.leaves(without_pools(drafted))
    progress = replace(
        progress_since(state, starts, draft.depth + 1),
        matched=getattr(state.drafter, "matched", None),
        logprobs=info.logprobs,
    )
    return place_rows(state, target), progress, unused


@jax.jit
def copy_rows(state: DecodeState) -> DecodeState:
    """Return a copy of everything in a state that has a row axis, for `restore_rows`.

    Pools are left out: what a row writes into its pages after the copy has no meaning once its
    length is restored.
    """
    return map_rows(jnp.copy, without_pools(state))


@partial(jax.jit, donate_argnames="state")
def restore_rows(
    target: Target, state: DecodeState, before: DecodeState, mask: HostOrDevice
) -> DecodeState:
    """Put back the rows of ``mask [B]`` to what they were at `copy_rows`. The state is donated.

    Examples:
        >>> from specjax.decoding import rows
        >>> from specjax.decoding.constrained_rows import copy_rows, restore_rows
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> sizes = {"capacity": 32, "pages": 16, "page": 8}
        >>> state = rows.empty(target, drafter, rows=2, **sizes)
        >>> before = copy_rows(state)
        >>> begin = rows.empty_prefix_state(target, drafter, **sizes)
        >>> text = rows.Text.of_prompt(prompts[0], capacity=32, max_new_tokens=8)
        >>> for row in (0, 1):
        ...     state = rows.admit(target, drafter, state, row, text, 0, begin)
        >>> state = restore_rows(target, state, before, np.array([True, False]))
        >>> state.lengths.tolist()
        [1, 6]
    """

    def put_back(now: jax.Array, earlier: jax.Array) -> jax.Array:
        return jnp.where(jnp.reshape(mask, (-1, *(1,) * (now.ndim - 1))), earlier, now)

    return place_rows(put_rows(state, before, put_back), target)
