"""Merge the drafts of several drafters into one tree without duplicates."""

from collections.abc import Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp

from specjax.drafts.draft import Draft


def merge(
    drafts: Sequence[Draft], slots: Sequence[int], most: int | None = None
) -> tuple[Draft, tuple[jax.Array, ...]]:
    """Merge drafts below the same root into one tree.

    Two nodes are equal if they have the same token and equal parents. Equal nodes become one node.
    Nodes keep the order of the parts, and within a part the part's own order. So the nodes of the
    first part come first, and parents come before children. Nodes that no part has filled come
    last.

    Args:
        drafts: the draft of each part, with the same root.
        slots: the maximum number of nodes that each part offers. In each row a part offers the
            first ones that it has drafted.
        most: the maximum number of nodes below the root. The last ones of the last parts are left
            out. None: there is room for all.

    Returns:
        The draft, of ``N = 1 + min(most, sum(slots))`` nodes, without q. And for each part
        ``[B, N]`` int32 the index of each node in the part's own draft; -1 if the part does not
        offer the node. The root has index 0 in all.

    Examples:
        >>> from specjax.drafters import Draft
        >>> from specjax.drafts.union import merge
        >>> chain = Draft.chain(jnp.array([7]), jnp.array([[2, 5, 9]]))
        >>> tree = Draft.of_tree(jnp.array([[7, 3, 2, 5]]), np.array([-1, 0, 0, 2]))
        >>> union, indices = merge((chain, tree), slots=(3, 3))
        >>> union.tokens.tolist(), union.parents.tolist(), union.valid.tolist()[0][-2:]
        ([[7, 2, 5, 9, 3, 7, 7]], [[-1, 0, 1, 2, 0, 0, 0]], [False, False])
        >>> indices[1].tolist()  # node 1 of the union, token 2, is node 2 of the tree
        [[0, 2, 3, -1, 1, -1, -1]]
    """
    root = drafts[0].tokens[:, :1]
    batch, room = root.shape[0], sum(slots) if most is None else min(most, sum(slots))
    num_nodes = 1 + room
    depth = max(min(draft.depth, slot, room) for draft, slot in zip(drafts, slots, strict=True))
    # The candidates: the root, then the nodes of all parts. `starts` are the parts' first ones.
    starts = [1]
    for draft in drafts:
        starts.append(starts[-1] + draft.tokens.shape[1] - 1)
    tokens = jnp.concatenate([root, *(draft.tokens[:, 1:] for draft in drafts)], axis=1)
    parents, is_offered = [jnp.zeros_like(root)], [jnp.ones_like(root, bool)]
    for draft, slot, start in zip(drafts, slots, starts, strict=False):
        below = jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape)[:, 1:]
        parents.append(jnp.where(below > 0, below + start - 1, 0).astype(jnp.int32))
        is_offered.append(draft.drafted & (jnp.cumsum(draft.drafted, axis=1) <= slot))
    parents, offered = jnp.concatenate(parents, axis=1), jnp.concatenate(is_offered, axis=1)

    # For each candidate, the first one that equals it. After turn d it is right down to depth d.
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    equal_tokens = tokens[:, :, None] == tokens[:, None]
    first = jnp.broadcast_to(index, tokens.shape)
    for _ in range(depth):
        offered &= jnp.take_along_axis(offered, parents, axis=1)
        # -1: the root must not count as one of its own children.
        above = jnp.where(index == 0, -1, jnp.take_along_axis(first, parents, axis=1))
        equal = equal_tokens & (above[:, :, None] == above[:, None]) & offered[:, None]
        first = jnp.argmax(equal, axis=-1).astype(jnp.int32)

    is_first = offered & (first == index)
    node_of_first = jnp.cumsum(is_first, axis=1, dtype=jnp.int32) - 1
    node = jnp.take_along_axis(node_of_first, first, axis=1)  # of each candidate
    nodes = jnp.arange(num_nodes)[:, None]
    is_source = is_first[:, None] & (node_of_first[:, None] == nodes)  # [B, N, candidates]
    source, is_filled = jnp.argmax(is_source, axis=-1), jnp.any(is_source, axis=-1)

    def of_nodes(values: jax.Array, filler: jax.Array | int) -> jax.Array:
        return jnp.where(is_filled, jnp.take_along_axis(values, source, axis=1), filler)

    above = of_nodes(jnp.take_along_axis(node, parents, axis=1), 0).at[:, 0].set(-1)
    holds = offered[:, None] & (node[:, None] == nodes)
    part_nodes = []
    for start, end in pairwise(starts):
        of_part = holds[:, :, start:end]
        if start == end:  # a part that never drafts
            indices = jnp.full((batch, num_nodes), -1, jnp.int32)
        else:
            indices = jnp.where(jnp.any(of_part, axis=-1), 1 + jnp.argmax(of_part, axis=-1), -1)
        part_nodes.append(indices.astype(jnp.int32).at[:, 0].set(0))
    offered_by = jnp.stack(part_nodes, axis=-1) > 0
    merged = Draft(
        tokens=of_nodes(tokens, root),
        grown=above,
        valid=is_filled,
        levels=depth,
        offered_by=offered_by,
        is_packed=True,
    )
    return merged, tuple(part_nodes)
