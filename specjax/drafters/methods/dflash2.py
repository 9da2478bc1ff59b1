"""DFlash2 (z-lab 2026, github.com/z-lab/dflash): a DFlash with convolutions and a selector.

*Convolutions* stand before and after attention and MLP. They mix each position of the block with
the positions right before it, so that it knows what these are about to predict. The *selector*
takes the likeliest tokens of each position by the block's logits, and scores them again by the
token drafted before. So the tokens of a chain depend on the drafted tokens before them, and
different nodes of a tree have different children. The head is applied to the whole vocabulary once,
for all positions together. While a draft grows, only the candidates are scored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.drafters.base import DraftingReads
from specjax.drafters.candidates import Candidates, CandidateTokens, offered_by
from specjax.drafters.checkpoints import dflash as dflash_checkpoint
from specjax.drafters.expansion import Frontier, expand
from specjax.drafters.methods.dflash import DFlash
from specjax.drafters.trained import CheckpointFormat
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError
from specjax.models.attention import Piece
from specjax.models.cache import Cache
from specjax.models.config import ModelConfig
from specjax.models.layers import attention, normed
from specjax.models.params import Params
from specjax.models.primitives import linear, mlp
from specjax.models.rope import Rotations
from specjax.models.transformer import Target
from specjax.sampling import RowSampling, before_temperature, likeliest
from specjax.shape_checks import shape_checked


@struct.dataclass
class DFlash2(DFlash):
    """A `DFlash` with convolutions and a selector.

    It drafts only the `DFlashConfig.selector_top_k` likeliest tokens of each position, so that is
    the maximum number of children of a node.

    Attributes:
        params: the parameters, see `dflash_config.declare`.
        config: the configuration.
        draft: the shape of the drafts, at most as deep as a block allows.
        mesh: the mesh of the parameters.
        cache: the scheme of the cache, see `DFlash`.
        budget: with ``cache``, the number of slots of a row in each layer.

    Examples:
        >>> drafter = specjax.DFlash2.init(target, jax.random.key(1), draft=3, block_size=4)
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
    """

    checkpoint_format: ClassVar[CheckpointFormat] = dflash_checkpoint.DFLASH2

    @classmethod
    def usual_sizes(cls, target: Target) -> dict[str, Any]:
        """Return the sizes of z-lab's drafters."""
        return {"num_layers": 5, "block_size": 8}

    @classmethod
    def init(
        cls,
        target: Target,
        key: jax.Array,
        draft: DraftShape | int | None = None,
        *,
        block_size: int = 8,
        conv_kernel_size: int = 2,
        conv_group_size: int = 16,
        selector_rank: int = 256,
        selector_top_k: int = 16,
        variant: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Return a drafter for ``target`` with random weights, and convolutions that do nothing.

        Args:
            target: the target model.
            key: the random key for the weights. It is consumed.
            draft: the shape of the drafts; None is a chain of all tokens that a block has room for.
            block_size: the number of tokens of a block, the anchor included.
            conv_kernel_size: the number of tokens that a convolution reads, the position's own
                included.
            conv_group_size: the number of channels that share what a position adds to its kernel.
                It must divide the target's hidden size.
            selector_rank: the rank of the selector's codebooks.
            selector_top_k: the number of candidates at each position, at most the vocabulary size.
            variant: further fields of `DFlashConfig`.
            options: as in `DFlash.init`.
        """
        fields = {
            "conv_kernel_size": conv_kernel_size,
            "conv_group_size": conv_group_size,
            "selector_rank": selector_rank,
            "selector_top_k": min(selector_top_k, target.config.vocab_size),
        }
        variant = fields | dict(variant or {})
        drafter = super().init(
            target, key, draft, block_size=block_size, variant=variant, **options
        )
        # The convolutions begin as the identity: a token's own number is 1.
        for layer in drafter.params["layers"]:
            layer |= {
                name: layer[name].at[:, 0].set(1.0)
                for name in ("attention_conv_base", "mlp_conv_base")
            }
        return drafter

    def check(self, target: Target) -> None:
        super().check(target)
        children, candidates = self.draft_shape.branching, self.config.selector_top_k
        if children > candidates:
            raise InputError(
                f"draft={self.draft}: it needs {children} children of a node, but this drafter has"
                f" {candidates} candidates at each position (selector_top_k); give at most as many"
            )

    # --- the block ---

    def layer(
        self,
        params: Params,
        config: ModelConfig,
        x: jax.Array,
        turn: Rotations,
        offset: jax.Array,
        mask: jax.Array,
        before: Sequence[Piece],
    ) -> jax.Array:
        return _convolved_layer(params, config, x, turn, offset, mask, before)

    # --- the selector ---

    def candidates(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the largest K of ``logits [..., V]``, and their token ids, the likeliest first.

        Both are ``[..., K]``.
        """
        return likeliest(logits, self.config.selector_top_k)

    def selector_context(self, states: jax.Array) -> jax.Array:
        """Return the selector's input ``[..., r]`` for the block's ``states [..., H]``."""
        return linear(self.params, "selector", states)

    def selected(
        self, scores: jax.Array, ids: jax.Array, context: jax.Array, before: jax.Array
    ) -> jax.Array:
        """Return the selector's float32 logits ``[..., K]`` of the candidates after a token.

        Args:
            scores: ``[..., K]``, the block's logits of the candidates.
            ids: ``[..., K]``, their token ids.
            context: ``[..., r]``, from `selector_context`.
            before: ``[...]``, the token before.
        """
        query = self.params["predecessors"][before] * context
        products = query[..., None, :] * self.params["successors"][ids]
        bonus = jnp.sum(products, axis=-1, dtype=jnp.float32)
        return scores + bonus

    def expected(self, target: Target, states: jax.Array, before: jax.Array) -> jax.Array:
        """Return the logits ``[..., V]`` after the tokens ``before``; -inf except for candidates.

        ``states`` are the block's, ``[..., H]``, and ``before`` is ``[...]``.
        """
        logits = self.logits(target, states)
        scores, ids = self.candidates(logits)
        scores = self.selected(scores, ids, self.selector_context(states), before)
        return jnp.put_along_axis(
            jnp.full_like(logits, -jnp.inf), ids, scores, axis=-1, inplace=False
        )

    def propose(
        self,
        target: Target,
        state: Cache,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, Cache]:
        shape, vocab = self.draft_shape, target.config.vocab_size
        states = self.block(target, state, root)[:, -shape.depth :]
        # A token that is not allowed must not take a candidate's place.
        scores, ids = self.candidates(
            before_temperature(self.logits(target, states), sampling, jnp.arange(shape.depth))
        )
        context = self.selector_context(states)

        def children_after(depth: jax.Array, before: jax.Array) -> CandidateTokens:
            scores_here, ids_here, context_here = (
                jnp.take(values, depth, axis=1) for values in (scores, ids, context)
            )
            logits = self.selected(
                scores_here[:, None], ids_here[:, None], context_here[:, None], before
            )
            return offered_by(
                shape, logits, depth, sampling, keys[depth], Candidates(ids_here, vocab)
            )

        def read(frontier: Frontier, state: tuple[()]) -> tuple[CandidateTokens, tuple[()]]:
            return children_after(frontier.depth, frontier.tokens), state

        first = children_after(jnp.zeros((), jnp.int32), root[:, None])
        draft, _, _ = expand(shape, read, first, (), root, sampling, keys, active)
        # q is over the candidates of each node's depth. Leaves have no children, and a q of zeros.
        if draft.q is not None:
            node_ids = ids[:, np.minimum(draft.depths, shape.depth - 1)]
            zeros = jnp.zeros((*draft.q.shape[:2], vocab), draft.q.dtype)
            draft = replace(
                draft, q=jnp.put_along_axis(zeros, node_ids, draft.q, axis=-1, inplace=False)
            )
        return draft, state

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return all weights but the codebooks, of which a pass reads only a few rows."""
        weights = {
            name: value
            for name, value in self.own_weights.items()
            if name not in ("predecessors", "successors")
        }
        head = () if self.config.own_head else target.head_as_stored
        return DraftingReads(step=(weights, state, head))


@partial(jax.jit, static_argnames=("config",))  # jit, so that it is traced once for all layers
def _convolved_layer(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    rotations: Rotations,
    offset: jax.Array,
    mask: jax.Array,
    before: Sequence[Piece],
) -> jax.Array:
    """Run a Qwen3 decoder layer with convolutions around attention and MLP."""
    branch, finish = _around(
        params, "attention_conv", normed(params, "input_norm", config, x), offset
    )
    x = x + finish(attention(params, config, branch, rotations, mask, before)[0])
    branch, finish = _around(params, "mlp_conv", normed(params, "post_norm", config, x), offset)
    return x + finish(mlp(params, branch, activation=config.activation))


def _around(
    params: Params, name: str, x: jax.Array, offset: jax.Array
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Apply the convolution before attention or MLP, and return the one after it as a function.

    The kernels of both depend on the input ``x [B, T, H]``.
    """
    base = params[f"{name}_base"]  # [2, kernel_size, H]
    changes = linear(params, name, x).reshape(*x.shape[:2], *base.shape[:2], -1)
    return convolve(x, base[0], changes[:, :, 0], offset), lambda y: convolve(
        y, base[1], changes[:, :, 1], offset
    )


@shape_checked
def convolve(
    x: Float[Array, "B T H"],
    base: Float[Array, "K H"],
    changes: Float[Array, "B T K G"],
    offset: Int[Array, " T"],
) -> Float[Array, "B T H"]:
    """Convolve the tokens of blocks, each with a kernel of its own and within its block.

    The result at a token is the sum over j of the j-th number of its kernel times ``x`` at j tokens
    before.

    Args:
        x: the tokens of blocks that lie one behind the other.
        base: the part of the kernel that all tokens share, for each channel.
        changes: what each token adds to the kernel, for each of G groups of channels.
        offset: the index of each token in its block, from 0.

    Examples:
        Two blocks of two tokens, and a kernel that adds the token before:

        >>> from specjax.drafters.methods.dflash2 import convolve
        >>> x = jnp.array([1.0, 2.0, 3.0, 4.0])[None, :, None]
        >>> kernel, changes = jnp.ones((2, 1)), jnp.zeros((1, 4, 2, 1))
        >>> convolve(x, kernel, changes, jnp.array([0, 1, 0, 1]))[0, :, 0].tolist()
        [1.0, 3.0, 3.0, 7.0]
    """
    kernel_size, groups = changes.shape[2:]
    count, by_group = x.shape[1], x.reshape(*x.shape[:2], groups, -1)
    total = jnp.zeros_like(by_group)
    for lag in range(kernel_size):
        earlier = jnp.pad(by_group, ((0, 0), (lag, 0), (0, 0), (0, 0)))[:, :count]
        earlier = jnp.where((offset >= lag)[:, None, None], earlier, 0)
        total += (base[lag].reshape(groups, -1) + changes[:, :, lag, :, None]) * earlier
    return total.reshape(x.shape)
