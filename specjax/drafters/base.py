"""What a drafter is, and the two messages between drafting and verification."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import tree
from specjax.models.cache import KVCache
from specjax.models.transformer import Output, Target
from specjax.sampling import RowSampling


@struct.dataclass
class Draft:
    """A proposed tree of tokens. Node 0 is the root: the newest committed token.

    Attributes:
        tokens: ``[B, N]`` token ids, the root's first.
        parents: parents before children, ``parents[…, 0] = -1``. ``[N]``, a numpy array known before tracing, where the shape
            of the tree is fixed: masks then fold into constants. ``[B, N]`` where it is found while drafting.
        q: ``[B, N, V]`` float32, for each node the distribution that its children were drawn from: exactly that one, in the
            same dtype and with the same warping; siblings without replacement, in the order of their numbers. Ignored at nodes
            without a child. None where tokens were chosen, not drawn.
        valid: ``[B, N]`` bool, the nodes that this row really drafted; a row may draft fewer than the shape has room for.
            None is all. A node that is not valid is never accepted, nor is anything below it, nor, where tokens were drawn,
            a later sibling.
        levels: static, the depth of the deepest node, where ``parents`` are not known before tracing.
    """

    tokens: jax.Array
    parents: np.ndarray | jax.Array
    q: jax.Array | None = None
    valid: jax.Array | None = None
    levels: int | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def chain(cls, root: jax.Array, drafted: jax.Array, q: jax.Array | None = None, valid: jax.Array | None = None) -> "Draft":
        """A chain below ``root [B]``: ``drafted [B, D]``, with ``q [B, D, V]`` and ``valid [B, D]`` of the drafted tokens."""
        tokens = jnp.concatenate([root[:, None], drafted], axis=1)
        if q is not None:
            q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))  # the last node has no child
        if valid is not None:
            valid = jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True)
        return cls(tokens=tokens, parents=tree.chain_parents(tokens.shape[1]), q=q, valid=valid)

    @property
    def is_chain(self) -> bool:
        """Whether it is known before tracing that the tree has one branch."""
        return isinstance(self.parents, np.ndarray) and np.array_equal(self.parents, tree.chain_parents(len(self.parents)))

    @property
    def depth(self) -> int:
        """Most drafted tokens on one path, D. Static."""
        if isinstance(self.parents, np.ndarray):
            return int(tree.depths(self.parents).max())
        return self.parents.shape[1] - 1 if self.levels is None else self.levels

    @property
    def depths(self) -> np.ndarray | jax.Array:
        """``[N]`` or ``[B, N]`` steps from the root to each node."""
        return tree.depths(self.parents, self.depth)

    @property
    def mask(self) -> np.ndarray | jax.Array:
        """``[1|B, N, N]`` bool, which nodes each node sees: those on its path from the root."""
        seen = tree.ancestors(self.parents, self.depth)
        return seen if seen.ndim == 3 else seen[None]

    def first(self, nodes: int) -> "Draft":
        """The first ``nodes`` nodes of a chain."""
        return Draft(
            tokens=self.tokens[:, :nodes],
            parents=self.parents[:nodes],
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
        return jnp.sum(self.drafted, axis=1)


@struct.dataclass
class Verdict:
    """What verification decided.

    Attributes:
        path: ``[B, D+1]`` int32 nodes of the accepted path, the root first; meaningful below ``count``.
        count: ``[B]`` int32 nodes on that path, the root included. One node, one emitted token: the accepted drafts and then
            ``token``, so this is also the number of tokens emitted. 0 where the row has finished and emits nothing.
        token: ``[B]`` int32, the last emitted token: the bonus that the target adds after the accepted path.
    """

    path: jax.Array
    count: jax.Array
    token: jax.Array

    def emitted(self, draft: Draft) -> jax.Array:
        """``[B, D+1]`` the emitted tokens in order; meaningful below ``count``."""
        following = jnp.roll(self.path, -1, axis=1)
        drafted = jnp.take_along_axis(draft.tokens, following, axis=1)
        last = jnp.arange(self.path.shape[1])[None] == self.count[:, None] - 1
        return jnp.where(last, self.token[:, None], drafted)


class Drafter:
    """Proposes tokens for the target to check. Subclass it as a ``flax.struct.dataclass``; every method is pure.

    Attributes:
        draft: the shape of its drafts, see `specjax.tree`.
        taps: layers of the target whose input `Output.taps` is to hold in `prefill` and `update`.
        grows_trees: whether it drafts any shape of `specjax.tree`, and not chains alone.
        borrows_cache: the state has a field ``cache``, None except while `propose` runs: there it holds the target's cache,
            to be read anywhere below ``length`` and written anywhere else, and returned in the new state.
    """

    draft: tree.Shape
    taps: tuple[int, ...] = ()
    grows_trees: ClassVar[bool] = False
    borrows_cache: ClassVar[bool] = False

    def check(self, target: Target) -> None:
        """Refuse, with an InputError that names what is wrong, a target that this drafter cannot serve. Runs on the host."""

    @property
    def node_counts(self) -> tuple[int, ...]:
        """Numbers of nodes, ascending, that a step is compiled for; it takes the smallest that holds every row's draft."""
        return self.draft.node_counts

    def prefill(self, target: Target, tokens: jax.Array, lengths: jax.Array, output: Output, cache: KVCache) -> Any:
        """The state after the prompts.

        Args:
            target: the target model.
            tokens: ``[B, P]`` prompts, right-padded.
            lengths: ``[B]``, at least 1. The last token of a prompt is the first root.
            output: the target's over the prompts; without logits.
            cache: the target's, with ``lengths - 1`` committed slots.
        """
        raise NotImplementedError

    def propose(self, target: Target, state: Any, root: jax.Array, sampling: RowSampling, keys: jax.Array) -> tuple[Draft, Any]:
        """Draft below ``root [B]``; consumes the row keys ``[B]``.

        Tokens that are drawn are drawn from exactly the ``q`` handed over. An autoregressive drafter leaves that, and the
        shape of the tree, to `specjax.drafters.expansion.expand`.
        """
        raise NotImplementedError

    def update(self, target: Target, state: Any, draft: Draft, verdict: Verdict, output: Output, cache: KVCache) -> Any:
        """The state after ``verdict``.

        Args:
            target: the target model.
            state: as `propose` returned it.
            draft: what was proposed.
            verdict: what was accepted of it.
            output: the target's over the draft's nodes, without logits; nodes that no row drafted may hold zeros.
            cache: the target's, the accepted path already committed.
        """
        raise NotImplementedError


def append(tokens: jax.Array, lengths: jax.Array, new: jax.Array, count: jax.Array) -> jax.Array:
    """``tokens [B, S]`` with the first ``count [B]`` of ``new [B, n]`` written at ``lengths [B]``; the rest is dropped."""
    step = jnp.arange(new.shape[1])[None]
    slots = jnp.where(step < count[:, None], lengths[:, None] + step, tokens.shape[1])
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], slots].set(new, mode="drop")


@struct.dataclass
class NoDraft(Drafter):
    """Plain autoregressive decoding: a tree that is a root and nothing else."""

    @property
    def draft(self) -> tree.Shape:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _RootOnly()

    def prefill(self, target: Target, tokens: jax.Array, lengths: jax.Array, output: Output, cache: KVCache) -> tuple[()]:
        return ()

    def propose(self, target: Target, state: Any, root: jax.Array, sampling: RowSampling, keys: jax.Array) -> tuple[Draft, Any]:
        return Draft(tokens=root[:, None], parents=tree.chain_parents(1)), state

    def update(self, target: Target, state: Any, draft: Draft, verdict: Verdict, output: Output, cache: KVCache) -> Any:
        return state


class _RootOnly(tree.Shape):
    depth, nodes, branching, width = 0, 1, 0, 0
