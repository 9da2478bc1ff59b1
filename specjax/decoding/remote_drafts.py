"""Verify drafts that a client made on its own machine.

`verify_rows` is one pass of the target over such drafts. The client's drafter is not on this
machine. A substitute takes its place in the step and returns the hidden states to send to the
client.
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
    """The result of verifying the drafts of W rows.

    Attributes:
        path: ``[W, D+1]`` the nodes of the accepted path, the root first.
        tokens: ``[W, D+1]`` the emitted tokens.
        count: ``[W]`` how many of ``path`` and ``tokens`` are meaningful; 0 for padding.
        accepted: ``[W]`` number of emitted tokens that were drafted.
        done: ``[W]`` bool, the text is complete.
        failed: ``[W]`` bool, the text ended because the target's logits after its last token were
            NaN or +inf.
        told: the result of `Drafter.remote_inputs` for each node of the path, ``[W, D+1, …]`` each.
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
    """The substitute for a drafter on another machine.

    Its state after a verdict is what must be sent to that drafter.
    """

    remote_drafter: Drafter

    @property
    def draft(self) -> DraftShape:  # pyright: ignore[reportIncompatibleVariableOverride]
        return NoDraft().draft

    def taps(self, config: ModelConfig) -> tuple[int, ...]:
        return self.remote_drafter.taps(config)

    def update(
        self, target: Target, state: Any, draft: Draft, verdict: Verdict, committed: Committed
    ) -> Any:
        return self.remote_drafter.remote_inputs(target, committed.output, committed.entries)


def nodes_of_call(tokens: HostOrDevice, **_: Any) -> int:
    """Return the number of nodes that the target reads in the pass of `verify_rows`."""
    return math.prod(tokens.shape)


@by_rows(
    nodes_of_call,
    models=("target", "remote_drafter"),
    static_argnames="depth",
    donate_argnames="state",
)
def verify_rows(
    target: Target,
    remote_drafter: Drafter,
    state: DecodeState,
    table: HostOrDevice,
    rows: HostOrDevice,
    tokens: HostOrDevice,
    parents: HostOrDevice,
    valid: HostOrDevice,
    legal: HostOrDevice | None = None,
    *,
    depth: int,
) -> tuple[DecodeState, VerifiedRows]:
    """Run one pass of the target over drafts from another machine, for some rows.

    The rows count as done before and after the call, so that `decode_rows` skips them. Other rows,
    and the state of a drafter on this machine, do not change. A mesh that splits the rows is not
    supported.

    Args:
        target: the target.
        remote_drafter: the drafter on the other machine, or one like it. Only its ``taps`` and
            `Drafter.remote_inputs` are used.
        state: a state of `empty` with room for drafts of this depth; it is donated.
        table: ``[B, n]`` the pages of all rows, with room for the new tokens: up to depth + 1
            tokens of a row.
        rows: ``[W]`` different row indices, whose prompts have been read; B for padding.
        tokens: ``[W, N]`` the token of each node. The first is ignored: the root is the row's
            newest token.
        parents: ``[W, N]`` the index of each node's parent, which is smaller than the node's; -1
            for the root.
        valid: ``[W, N]`` bool, which nodes exist.
        legal: ``[W, N, ceil(V / 32)]`` uint32, the tokens that the rows' grammars allow after each
            node, from `specjax.decoding.constrained.legal_tokens`; None if no row has a grammar.
        depth: the largest depth D of a node.

    Returns:
        The state, and the result of verification.

    Examples:
        >>> from specjax.decoding import remote_drafts, rows
        >>> from specjax.drafters import NoDraft
        >>> drafter = NoDraft()
        >>> sizes = {"capacity": 32, "pages": 16, "page": 8}
        >>> state = rows.empty(target, drafter, rows=4, depth=2, **sizes)
        >>> begin = rows.empty_prefix_state(target, drafter, **sizes)
        >>> text = rows.Text.of_prompt(prompts[0], capacity=32, max_new_tokens=8)
        >>> state = rows.admit(target, drafter, state, 1, text, 0, begin)  # row 1, nothing cached
        >>> table = np.full((4, 4), 16, np.int32)  # 16: no page
        >>> table[1, :2] = 3, 7
        >>> row, count, is_last = np.array([1]), np.array([5]), np.array([False])
        >>> state, _, _, _ = rows.read_chunk(
        ...     target, drafter, state, table, row, count, is_last, size=8
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
    indices, batch = jnp.asarray(rows), state.lengths.shape[0]
    state = with_table(state, table)
    # Padding has index B. It reads the last row here, counts as done, and is dropped when rows are
    # written back.
    # The state of a drafter on this machine is left out, so that no row of it is copied.
    part = map_rows(lambda leaf: leaf.at[indices].get(mode="clip"), replace(state, drafter=()))
    part = replace(part, done=indices >= batch)
    draft = Draft.of_tree(
        # A draft from elsewhere cannot replace the newest committed token.
        jnp.asarray(tokens).at[:, 0].set(part.roots),
        jnp.asarray(parents),
        valid=jnp.asarray(valid),
        levels=depth,
    )
    words = None if legal is None else jnp.asarray(legal)
    after, info = advance(target, _Elsewhere(remote_drafter), part, draft, legal=words)
    checked = VerifiedRows(
        path=info.path[:, : depth + 1],
        tokens=after.tokens_from(part.lengths, depth + 1),
        count=info.emitted,
        accepted=info.accepted,
        done=after.done,
        failed=after.failed,
        told=after.drafter,
    )
    # Done again, so that decode calls skip the rows until the next draft comes.
    after = replace(after, drafter=(), done=jnp.ones_like(after.done))
    merged = put_rows(
        replace(state, drafter=()), after, lambda leaf, new: leaf.at[indices].set(new, mode="drop")
    )
    return place_rows(replace(merged, drafter=state.drafter), target), checked
