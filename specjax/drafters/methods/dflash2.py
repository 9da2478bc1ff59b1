"""DFlash2 (z-lab 2026, github.com/z-lab/dflash): a DFlash with convolutions in its blocks, and a selector of candidates.

*Convolutions* stand before and after attention and MLP: what a place of the block has is mixed with what those right before it
have, so that it knows what they are about to say. The *selector* takes the likeliest tokens of each place, by the block's
logits, and scores them anew by the token that was drafted before. So a chain goes on from what it has drafted, and the children
of a tree's nodes differ. The vocabulary is looked through once, for all places together; while a draft grows only the
candidates are scored.
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
from specjax.models.cache import Cache, Entry
from specjax.models.config import ModelConfig
from specjax.models.layers import attention, normed
from specjax.models.params import Params
from specjax.models.primitives import linear, mlp
from specjax.models.rope import Rotations
from specjax.models.transformer import Target
from specjax.sampling import RowSampling, likeliest, without_stop_tokens
from specjax.shape_checks import shape_checked


@struct.dataclass
class DFlash2(DFlash):
    """A `DFlash` with convolutions and a selector.

    It drafts the likeliest tokens of each place, `DFlashConfig.selector_top_k` of them, and no others: a tree has at most so
    many children below a node.

    Attributes:
        params: see `dflash_config.declare`.
        config: its configuration.
        draft: the shape of its drafts, at most as deep as a block has room for.
        mesh: where the params live.
        cache: what it remembers of a text, see `DFlash`.
        budget: with ``cache``, slots of a row in each layer.

    Examples:
        >>> drafter = specjax.DFlash2.init(target, jax.random.key(1), draft=3, block_size=4)
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
    """

    checkpoint_format: ClassVar[CheckpointFormat] = dflash_checkpoint.DFLASH2

    @classmethod
    def usual_sizes(cls, target: Target) -> dict[str, Any]:
        """Those of z-lab's drafters."""
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
        """A drafter for ``target`` with random weights; consumes ``key``. Its convolutions begin as doing nothing.

        Args:
            target: what it will draft for.
            key: random.
            draft: the shape of its drafts; None: a chain of all tokens that a block has room for.
            block_size: tokens of a block, the anchor included.
            conv_kernel_size: tokens that a convolution reads, a position's own included.
            conv_group_size: channels that share what a place adds to its kernel; must divide the target's hidden size.
            selector_rank: of the selector's codebooks.
            selector_top_k: candidates at each place; of a smaller vocabulary, all its tokens.
            variant: further fields of `DFlashConfig`.
            options: as in `DFlash.init`.
        """
        given = {
            "conv_kernel_size": conv_kernel_size,
            "conv_group_size": conv_group_size,
            "selector_rank": selector_rank,
            "selector_top_k": min(selector_top_k, target.config.vocab_size),
        }
        variant = given | dict(variant or {})
        drafter = super().init(target, key, draft, block_size=block_size, variant=variant, **options)
        for layer in drafter.params["layers"]:
            layer |= {name: layer[name].at[:, 0].set(1.0) for name in ("attention_conv_base", "mlp_conv_base")}
        return drafter

    def check(self, target: Target) -> None:
        super().check(target)
        asked, candidates = self.draft_shape.branching, self.config.selector_top_k
        if asked > candidates:
            raise InputError(
                f"draft={self.draft}: asks for {asked} children of a node, and this drafter has {candidates} candidates at "
                "each place (selector_top_k); give at most as many"
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
        """``[..., K]`` the largest of the block's ``logits [..., V]``, and whose they are, the likeliest first."""
        return likeliest(logits, self.config.selector_top_k)

    def selector_context(self, states: jax.Array) -> jax.Array:
        """``[..., r]`` what the selector reads of the block's ``states [..., H]``."""
        return linear(self.params, "selector", states)

    def selected(self, scores: jax.Array, ids: jax.Array, context: jax.Array, before: jax.Array) -> jax.Array:
        """``[..., K]`` float32 logits of candidates after a token, in the places of the block's.

        Args:
            scores: ``[..., K]`` the block's own logits of them.
            ids: ``[..., K]``.
            context: ``[..., r]`` see `selector_context`.
            before: ``[...]`` the token before.
        """
        known = self.params["predecessors"][before] * context
        follow = jnp.sum(known[..., None, :] * self.params["successors"][ids], axis=-1, dtype=jnp.float32)
        return scores + follow

    def expected(self, target: Target, states: jax.Array, before: jax.Array) -> jax.Array:
        """``[..., V]`` logits after tokens ``before [...]``, of the block's ``states [..., H]``: -inf but for candidates."""
        logits = self.logits(target, states)
        scores, ids = self.candidates(logits)
        scores = self.selected(scores, ids, self.selector_context(states), before)
        return jnp.put_along_axis(jnp.full_like(logits, -jnp.inf), ids, scores, axis=-1, inplace=False)

    def propose(
        self, target: Target, state: Cache, root: jax.Array, sampling: RowSampling, keys: jax.Array, active: jax.Array
    ) -> tuple[Draft, Cache]:
        shape, vocab = self.draft_shape, target.config.vocab_size
        states = self.block(target, state, root)[:, -shape.depth :]
        # Tokens that must not come yet are no candidates.
        scores, ids = self.candidates(without_stop_tokens(self.logits(target, states), sampling, jnp.arange(shape.depth)))
        context = self.selector_context(states)

        def offer(depth: jax.Array, before: jax.Array) -> CandidateTokens:
            here, named, known = (jnp.take(values, depth, axis=1) for values in (scores, ids, context))
            logits = self.selected(here[:, None], named[:, None], known[:, None], before)
            return offered_by(shape, logits, depth, sampling, keys[depth], Candidates(named, vocab))

        def read(frontier: Frontier, nothing: tuple[()]) -> tuple[CandidateTokens, tuple[()]]:
            return offer(frontier.depth, frontier.tokens), nothing

        first = offer(jnp.zeros((), jnp.int32), root[:, None])
        draft, _, _ = expand(shape, read, first, (), root, sampling, keys, active)
        if draft.q is not None:  # over the candidates of each node's depth; the deepest nodes have none, and zeros
            of_nodes = ids[:, np.minimum(draft.depths, shape.depth - 1)]
            everywhere = jnp.zeros((*draft.q.shape[:2], vocab), draft.q.dtype)
            draft = replace(draft, q=jnp.put_along_axis(everywhere, of_nodes, draft.q, axis=-1, inplace=False))
        return draft, state

    def drafting_reads(self, target: Target, state: Cache | tuple[()] = (), cache: Sequence[Entry] = ()) -> DraftingReads:
        """All but the codebooks once; of these the rows of a few tokens."""
        own = {name: value for name, value in self.own_weights.items() if name not in ("predecessors", "successors")}
        head = () if self.config.own_head else target.head_as_stored
        return DraftingReads(step=(own, state, head))


@partial(jax.jit, static_argnames=("config",))  # traced and lowered once for all layers alike
def _convolved_layer(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    rotations: Rotations,
    offset: jax.Array,
    mask: jax.Array,
    before: Sequence[Piece],
) -> jax.Array:
    """A Qwen3's decoder layer with convolutions around attention and MLP."""
    own, finish = _around(params, "attention_conv", normed(params, "input_norm", config, x), offset)
    x = x + finish(attention(params, config, own, rotations, mask, before)[0])
    own, finish = _around(params, "mlp_conv", normed(params, "post_norm", config, x), offset)
    return x + finish(mlp(params, own, activation=config.activation))


def _around(params: Params, name: str, x: jax.Array, offset: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """The input ``x [B, T, H]`` of a part of a layer after the convolution before it, and the convolution for its output. The
    kernels of both follow from ``x``."""
    base = params[f"{name}_base"]  # [2, kernel_size, H]
    changes = linear(params, name, x).reshape(*x.shape[:2], *base.shape[:2], -1)
    return convolve(x, base[0], changes[:, :, 0], offset), lambda y: convolve(y, base[1], changes[:, :, 1], offset)


@shape_checked
def convolve(
    x: Float[Array, "B T H"], base: Float[Array, "K H"], changes: Float[Array, "B T K G"], offset: Int[Array, " T"]
) -> Float[Array, "B T H"]:
    """Return at each token the sum over j of the kernel's j-th number times ``x`` j tokens before, none from another block.

    Args:
        x: tokens of blocks that lie one behind the other.
        base: of the kernel, of each channel.
        changes: what each token adds to its kernel, of each of G groups of channels.
        offset: of the tokens in their blocks, from 0.

    Examples:
        Two blocks of two tokens, and a kernel that adds the token before:

        >>> from specjax.drafters.methods.dflash2 import convolve
        >>> x = jnp.array([1.0, 2.0, 3.0, 4.0])[None, :, None]
        >>> convolve(x, jnp.ones((2, 1)), jnp.zeros((1, 4, 2, 1)), jnp.array([0, 1, 0, 1]))[0, :, 0].tolist()
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
