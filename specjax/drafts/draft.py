"""The data between drafting and verification: the draft, and the verdict on it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.drafts import tree


@struct.dataclass
class Draft:
    """A drafted tree of tokens. Node 0 is the root, the newest committed token.

    `Draft.of_tree` and `Draft.chain` make a draft. The tree is given by ``parents``, the index of
    each node's parent. Parents come before children, and the root has -1.

    Attributes:
        tokens: ``[B, N]`` token ids; the first is the root's.
        topology: the ``[N]`` parents as a tuple, if they are known before tracing. It is static, so
            that masks become constants.
        grown: ``[B, N]`` the parents, if each row grows its own tree while drafting. Either this
            field or ``topology`` is None.
        q: ``[B, N, V]`` float32 the distribution from which each node's children were sampled. It
            must be exactly that distribution, in the same dtype and after temperature and
            truncation. Siblings are sampled without replacement, in the order of their indices. It
            is ignored at nodes without a child. None if the tokens were chosen and not sampled.
        valid: ``[B, N]`` bool the nodes that the row has drafted, if it may draft fewer than the
            shape has; None if all are valid. A node that is not valid is never accepted. Nor are
            the nodes below it, nor, if tokens were sampled, its later siblings.
        levels: the depth of the deepest node of a ``grown`` tree. It is static.
        offered_by: ``[B, N, P]`` bool which of P drafters offered each node, in a draft that was
            merged (`specjax.drafts.union.merge`); otherwise None. No part offers the root.
        is_packed: whether the nodes that a row has not drafted come last, so that it pays to
            compute the first nodes alone; static. Chains need not state it.

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
    offered_by: jax.Array | None = None
    is_packed: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def of_tree(
        cls,
        tokens: jax.Array,
        parents: np.ndarray | jax.Array,
        q: jax.Array | None = None,
        valid: jax.Array | None = None,
        levels: int | None = None,
    ) -> "Draft":
        """Make a draft with ``tokens [B, N]``.

        ``parents`` is a numpy array ``[N]``, known before tracing, or a JAX array ``[B, N]``. For
        the other arguments see `Draft`.
        """
        if isinstance(parents, np.ndarray):
            return cls(tokens=tokens, topology=tuple(parents.tolist()), q=q, valid=valid)
        return cls(tokens=tokens, grown=parents, q=q, valid=valid, levels=levels)

    @classmethod
    def chain(
        cls,
        root: jax.Array,
        drafted: jax.Array,
        q: jax.Array | None = None,
        valid: jax.Array | None = None,
    ) -> "Draft":
        """Make a chain of tokens ``drafted [B, D]`` below ``root [B]``.

        ``q [B, D, V]`` and ``valid [B, D]`` are those of the drafted tokens.
        """
        tokens = jnp.concatenate([root[:, None], drafted], axis=1)
        if q is not None:
            q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))  # the last node has no child
        if valid is not None:
            valid = jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True)
        return cls.of_tree(tokens, tree.chain_parents(tokens.shape[1]), q, valid)

    @property
    def parents(self) -> np.ndarray | jax.Array:
        """The parents: a numpy array ``[N]`` known before tracing, or a JAX array ``[B, N]``."""
        if self.topology is not None:
            return np.array(self.topology)
        assert self.grown is not None
        return self.grown

    @property
    def is_chain(self) -> bool:
        """True if it is known before tracing that the tree is a chain."""
        return self.topology == tuple(range(-1, self.tokens.shape[1] - 1))

    @property
    def depth(self) -> int:
        """The maximum number of drafted tokens on a path, D. It is static."""
        if self.topology is not None:
            return int(tree.depths(np.array(self.topology)).max())
        return self.tokens.shape[1] - 1 if self.levels is None else self.levels

    @property
    def depths(self) -> np.ndarray | jax.Array:
        """The depth of each node, ``[N]`` or ``[B, N]``."""
        return tree.depths(self.parents, self.depth)

    @property
    def mask(self) -> np.ndarray | jax.Array:
        """The attention mask ``[1|B, N, N]``: each node attends to its path from the root."""
        visible = tree.ancestors(self.parents, self.depth)
        return visible if visible.ndim == 3 else visible[None]

    def first(self, nodes: int) -> "Draft":
        """Return the first ``nodes`` nodes of a chain, or of a packed tree, as a draft."""

        def cut(values: jax.Array | None) -> jax.Array | None:
            return None if values is None else values[:, :nodes]

        return replace(
            self,
            tokens=self.tokens[:, :nodes],
            topology=None if self.topology is None else self.topology[:nodes],
            grown=cut(self.grown),
            q=cut(self.q),
            valid=cut(self.valid),
            levels=None if self.levels is None else min(self.levels, nodes - 1),
            offered_by=cut(self.offered_by),
        )

    def limited(self, depths: jax.Array) -> "Draft":
        """Return the draft without the nodes that are deeper than ``depths [B]``, a row's limit.

        A limit must not depend on the drafted tokens, or the output would be biased.

        Examples:
            >>> from specjax.drafters import Draft
            >>> draft = Draft.chain(jnp.array([7, 7]), jnp.array([[2, 5], [2, 5]]))
            >>> draft.limited(jnp.array([0, 1])).length.tolist()  # one row drafts nothing
            [0, 1]
        """
        is_allowed = jnp.asarray(self.depths) <= depths[:, None]
        offered_by = self.offered_by
        if offered_by is not None:
            offered_by = offered_by & is_allowed[..., None]
        valid = is_allowed if self.valid is None else is_allowed & self.valid
        return replace(self, valid=valid, offered_by=offered_by)

    @property
    def drafted(self) -> jax.Array:
        """The nodes below the root that each row has drafted, ``[B, N-1]`` bool."""
        if self.valid is None:
            return jnp.ones((self.tokens.shape[0], self.tokens.shape[1] - 1), bool)
        return self.valid[:, 1:]

    @property
    def drafted_at(self) -> jax.Array:
        """The depths below the root at which each row has drafted a node, ``[B, D]`` bool."""
        at_depth = self.depths[..., 1:, None] == np.arange(1, self.depth + 1)
        return jnp.any(self.drafted[..., None] & at_depth, axis=1)

    @property
    def last(self) -> jax.Array:
        """The index of the last node that each row has drafted, ``[B]``; 0 if there is none."""
        nodes = np.arange(1, self.tokens.shape[1], dtype=np.int32)
        return jnp.max(jnp.where(self.drafted, nodes, 0), axis=1, initial=0)

    @property
    def length(self) -> jax.Array:
        """The number of tokens that each row has drafted, ``[B]``."""
        return jnp.sum(self.drafted, axis=1, dtype=jnp.int32)


@struct.dataclass
class Verdict:
    """The verdict of a verification.

    Attributes:
        path: ``[B, D+1]`` int32 the nodes of the accepted path, beginning with the root. Only the
            first ``count`` are meaningful.
        count: ``[B]`` int32 the number of nodes of that path, with the root. It is also the number
            of emitted tokens, which are the accepted drafted tokens and ``token``. 0 if the row has
            finished and emits nothing.
        token: ``[B]`` int32 the last emitted token: the bonus token.
        bad: ``[B]`` bool whether no token can be sampled from the target's logits at the end of the
            path (`specjax.sampling.can_be_drawn`), so that ``token`` is meaningless. None if no row
            is bad.

    Examples:
        >>> from specjax.drafters import Draft, Verdict
        >>> draft = Draft.of_tree(jnp.array([[7, 2, 5, 3]]), np.array([-1, 0, 0, 1]))
        >>> verdict = Verdict(  # the target accepts node 2, token 5, and adds 9
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
        """Return the emitted tokens ``[B, D+1]``, of which the first ``count`` are meaningful."""
        following = jnp.roll(self.path, -1, axis=1)
        drafted = jnp.take_along_axis(draft.tokens, following, axis=1)
        last = jnp.arange(self.path.shape[1])[None] == self.count[:, None] - 1
        return jnp.where(last, self.token[:, None], drafted)
