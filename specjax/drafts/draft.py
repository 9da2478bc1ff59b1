"""The two messages between drafting and verification: what was proposed, and what is accepted of it."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.drafts import tree


@struct.dataclass
class Draft:
    """A proposed tree of tokens. Node 0 is the root: the newest committed token.

    Which node hangs below which is said by ``parents``: of each node the number of its parent, parents before children, -1 for
    the root. `Draft.of_tree` and `Draft.chain` make one.

    Attributes:
        tokens: ``[B, N]`` token ids, the root's first.
        topology: static, the ``[N]`` parents as a tuple, where the shape of the tree is known before tracing: masks then fold
            into constants.
        grown: ``[B, N]`` the parents, where each row finds its own while drafting. One of the two is None.
        q: ``[B, N, V]`` float32, for each node the distribution that its children were drawn from: exactly that one, in the
            same dtype and with the same warping; siblings without replacement, in the order of their numbers. Ignored at nodes
            without a child. None where tokens were chosen, not drawn.
        valid: ``[B, N]`` bool, the nodes that this row really drafted; a row may draft fewer than the shape has room for.
            None is all. A node that is not valid is never accepted, nor is anything below it, nor, where tokens were drawn,
            a later sibling.
        levels: static, the depth of the deepest node of a ``grown`` tree.

    Examples:
        >>> from specjax.drafters import Draft
        >>> tokens = jnp.array([[7, 2, 5, 3]])  # one row: the root 7, below it 2 and 5, below 2 a 3
        >>> draft = Draft.of_tree(tokens, np.array([-1, 0, 0, 1]))
        >>> draft.depth, draft.is_chain, draft.depths.tolist()
        (2, False, [0, 1, 1, 2])
        >>> draft.mask[0].astype(int)  # which nodes (columns) each node (row) sees
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 0, 1, 0],
               [1, 1, 0, 1]])
    """

    tokens: jax.Array
    topology: tuple[int, ...] | None = struct.field(pytree_node=False, default=None)
    grown: jax.Array | None = None
    q: jax.Array | None = None
    valid: jax.Array | None = None
    levels: int | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def of_tree(
        cls,
        tokens: jax.Array,
        parents: np.ndarray | jax.Array,
        q: jax.Array | None = None,
        valid: jax.Array | None = None,
        levels: int | None = None,
    ) -> "Draft":
        """A tree of ``tokens [B, N]``; ``parents`` are numpy ``[N]``, known before tracing, or a JAX array ``[B, N]``."""
        if isinstance(parents, np.ndarray):
            return cls(tokens=tokens, topology=tuple(parents.tolist()), q=q, valid=valid)
        return cls(tokens=tokens, grown=parents, q=q, valid=valid, levels=levels)

    @classmethod
    def chain(cls, root: jax.Array, drafted: jax.Array, q: jax.Array | None = None, valid: jax.Array | None = None) -> "Draft":
        """A chain below ``root [B]``: ``drafted [B, D]``, with ``q [B, D, V]`` and ``valid [B, D]`` of the drafted tokens."""
        tokens = jnp.concatenate([root[:, None], drafted], axis=1)
        if q is not None:
            q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))  # the last node has no child
        if valid is not None:
            valid = jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True)
        return cls.of_tree(tokens, tree.chain_parents(tokens.shape[1]), q, valid)

    @property
    def parents(self) -> np.ndarray | jax.Array:
        """``[N]``, a numpy array known before tracing, or ``[B, N]``: see `topology` and `grown`."""
        if self.topology is not None:
            return np.array(self.topology)
        assert self.grown is not None
        return self.grown

    @property
    def is_chain(self) -> bool:
        """Whether it is known before tracing that the tree has one branch."""
        return self.topology == tuple(range(-1, self.tokens.shape[1] - 1))

    @property
    def depth(self) -> int:
        """Most drafted tokens on one path, D. Static."""
        if self.topology is not None:
            return int(tree.depths(np.array(self.topology)).max())
        return self.tokens.shape[1] - 1 if self.levels is None else self.levels

    @property
    def depths(self) -> np.ndarray | jax.Array:
        """``[N]`` or ``[B, N]`` steps from the root to each node."""
        return tree.depths(self.parents, self.depth)

    @property
    def mask(self) -> np.ndarray | jax.Array:
        """``[1|B, N, N]`` bool, which nodes each node sees: those on its path from the root."""
        visible = tree.ancestors(self.parents, self.depth)
        return visible if visible.ndim == 3 else visible[None]

    def first(self, nodes: int) -> "Draft":
        """The first ``nodes`` nodes of a chain."""
        return Draft.of_tree(
            self.tokens[:, :nodes],
            tree.chain_parents(nodes),
            q=None if self.q is None else self.q[:, :nodes],
            valid=None if self.valid is None else self.valid[:, :nodes],
        )

    @property
    def drafted(self) -> jax.Array:
        """``[B, N-1]`` bool, the nodes below the root that this row drafted."""
        if self.valid is None:
            return jnp.ones((self.tokens.shape[0], self.tokens.shape[1] - 1), bool)
        return self.valid[:, 1:]

    @property
    def drafted_at(self) -> jax.Array:
        """``[B, D]`` bool, the depths below the root at which this row drafted a node."""
        at_depth = self.depths[..., 1:, None] == np.arange(1, self.depth + 1)
        return jnp.any(self.drafted[..., None] & at_depth, axis=1)

    @property
    def length(self) -> jax.Array:
        """``[B]`` number of tokens that the row drafted."""
        return jnp.sum(self.drafted, axis=1, dtype=jnp.int32)


@struct.dataclass
class Verdict:
    """What verification decided.

    Attributes:
        path: ``[B, D+1]`` int32 nodes of the accepted path, the root first; meaningful below ``count``.
        count: ``[B]`` int32 nodes on that path, the root included. One node, one emitted token: the accepted drafts and then
            ``token``, so this is also the number of tokens emitted. 0 where the row has finished and emits nothing.
        token: ``[B]`` int32, the last emitted token: the bonus that the target adds after the accepted path.
        bad: ``[B]`` bool, no token can be drawn from the target's logits at the end of the path
            (`specjax.sampling.can_be_drawn`), and ``token`` means nothing. None: none are.

    Examples:
        >>> from specjax.drafters import Draft, Verdict
        >>> draft = Draft.of_tree(jnp.array([[7, 2, 5, 3]]), np.array([-1, 0, 0, 1]))
        >>> verdict = Verdict(  # 5, which is node 2, is accepted; the target adds 9
        ...     path=jnp.array([[0, 2, 0]]), count=jnp.array([2]), token=jnp.array([9])
        ... )
        >>> verdict.emitted(draft)[0, :2].tolist()
        [5, 9]
    """

    path: jax.Array
    count: jax.Array
    token: jax.Array
    bad: jax.Array | None = None

    def emitted(self, draft: Draft) -> jax.Array:
        """``[B, D+1]`` the emitted tokens in order; meaningful below ``count``."""
        following = jnp.roll(self.path, -1, axis=1)
        drafted = jnp.take_along_axis(draft.tokens, following, axis=1)
        last = jnp.arange(self.path.shape[1])[None] == self.count[:, None] - 1
        return jnp.where(last, self.token[:, None], drafted)
