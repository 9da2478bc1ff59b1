"""Verify drafts that a client made on its own machine.

`verify_rows` is one pass of the target over such drafts. The client's drafter is not here: in its place stands one that hands
out what the client has to be sent.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.decoding.few_rows import by_rows
from specjax.decoding.loop import advance
from specjax.decoding.row_arrays import HostOrDevice, map_rows, put_rows, with_table
from specjax.decoding.state import DecodeState, place_rows
from specjax.drafters.base import Committed, Drafter, NoDraft
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import DraftShape
from specjax.models.config import ModelConfig
from specjax.models.transformer import Target


@struct.dataclass
class VerifiedRows:
    """What became of the drafts of W rows.

    Attributes:
        path: ``[W, D+1]`` the nodes of the accepted path, the root first.
        tokens: ``[W, D+1]`` what was emitted.
        count: ``[W]`` how many of both count; 0 where no row was asked for.
        accepted: ``[W]`` how many of the emitted tokens were drafted.
        done: ``[W]`` bool, the text is over.
        failed: ``[W]`` bool, because the target's logits after the last of the tokens were none.
        told: of each node of the path, what `Drafter.remote_inputs` gives, ``[W, D+1, …]``.
    """

    path: jax.Array
    tokens: jax.Array
    count: jax.Array
    accepted: jax.Array
    done: jax.Array
    failed: jax.Array
    told: dict[str, jax.Array]


@struct.dataclass
class _Elsewhere(Drafter[Any]):
    """Stands where a drafter would that is on another machine: its state, after a verdict, is what that one is to be told."""

    remote_drafter: Drafter

    @property
    def draft(self) -> DraftShape:  # pyright: ignore[reportIncompatibleVariableOverride]
        return NoDraft().draft

    def taps(self, config: ModelConfig) -> tuple[int, ...]:
        return self.remote_drafter.taps(config)

    def update(self, target: Target, state: Any, draft: Draft, verdict: Verdict, committed: Committed) -> Any:
        return self.remote_drafter.remote_inputs(target, committed.output, committed.entries)


def nodes_of_call(tokens: HostOrDevice, **_: Any) -> int:
    """How many nodes the target reads in the pass of `verify_rows`."""
    return math.prod(tokens.shape)


@by_rows(nodes_of_call, models=("target", "remote_drafter"), static_argnames="depth", donate_argnames="state")
def verify_rows(
    target: Target,
    remote_drafter: Drafter,
    state: DecodeState,
    table: HostOrDevice,
    rows: HostOrDevice,
    tokens: HostOrDevice,
    parents: HostOrDevice,
    valid: HostOrDevice,
    *,
    depth: int,
) -> tuple[DecodeState, VerifiedRows]:
    """One pass of the target over drafts that were made elsewhere, for some rows. Not on a mesh that splits rows.

    The rows are done, as far as `decode_rows` goes, before and afterwards. Other rows, and what a drafter here keeps, stay as
    they are.

    Args:
        target: the target.
        remote_drafter: the drafter that drafts elsewhere, or one like it: its ``taps`` and `Drafter.remote_inputs` are used.
        state: of `empty`, whose drafts may be as deep; donated.
        table: ``[B, n]`` the pages of all rows, with room for what is emitted: up to depth + 1 tokens a row.
        rows: ``[W]`` whose prompts have been read, each once; B where none is asked for.
        tokens: ``[W, N]`` of each node; whatever stands there, the root is the row's newest token.
        parents: ``[W, N]`` of each node the number of its parent, which is smaller; -1 for the root.
        valid: ``[W, N]`` bool, which of the nodes are there.
        depth: D, of the deepest node that there may be.

    Returns:
        The state, and what became of the drafts.

    Examples:
        >>> from specjax.decoding import remote_drafts, rows
        >>> from specjax.drafters import NoDraft
        >>> drafter = NoDraft()
        >>> sizes = {"capacity": 32, "pages": 16, "page": 8}
        >>> state = rows.empty(target, drafter, rows=4, depth=2, **sizes)
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
        >>> row, count, is_last = np.array([1]), np.array([5]), np.array([False])
        >>> state, _, _, _ = rows.read_chunk(
        ...     target, drafter, state, table, row, count, is_last, width=8
        ... )
        >>> first, second = plain.tokens[0, 6:8]
        >>> wrong = (first + 1) % 11
        >>> tokens = np.array([[7, wrong, first, second]], np.int32)
        >>> parents, valid = np.array([[-1, 0, 0, 2]], np.int32), np.ones((1, 4), bool)
        >>> state, checked = remote_drafts.verify_rows(
        ...     target, drafter, state, table, row, tokens, parents, valid, depth=2
        ... )
        >>> checked.path.tolist(), checked.count.tolist()  # and one token of the target's own
        ([[0, 2, 3]], [3])
    """
    numbers, batch = jnp.asarray(rows), state.lengths.shape[0]
    state = with_table(state, table)
    # A number out of range is no row's: it takes the last one, of which nothing is kept.
    part = map_rows(lambda leaf: leaf.at[numbers].get(mode="clip"), replace(state, drafter=()))
    part = replace(part, done=numbers >= batch)
    draft = Draft.of_tree(
        jnp.asarray(tokens).at[:, 0].set(part.roots), jnp.asarray(parents), valid=jnp.asarray(valid), levels=depth
    )
    after, info = advance(target, _Elsewhere(remote_drafter), part, draft)
    positions = jnp.minimum(part.lengths[:, None] + jnp.arange(depth + 1)[None], part.tokens.shape[1] - 1)
    checked = VerifiedRows(
        path=info.path[:, : depth + 1],
        tokens=jnp.take_along_axis(after.tokens, positions, axis=1),
        count=info.emitted,
        accepted=info.accepted,
        done=after.done,
        failed=after.failed,
        told=after.drafter,
    )
    after = replace(after, drafter=(), done=jnp.ones_like(after.done))
    kept = put_rows(replace(state, drafter=()), after, lambda leaf, new: leaf.at[numbers].set(new, mode="drop"))
    return place_rows(replace(kept, drafter=state.drafter), target), checked
