"""DFlash (z-lab 2025, github.com/z-lab/dflash) and JetSpec (arXiv 2606.18394): drafters that write a whole block in one pass.

A block is the root, which is called its anchor, and mask tokens behind it. A few layers read it once, and at each place come to
what is expected there. They see the text before the anchor by keys and values that every layer makes of the target's hidden
states. So a draft of 15 tokens costs what one of 1 does. No token of it knows which ones were drafted before it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax import sharding
from specjax.drafters import draft_vocabulary
from specjax.drafters.base import DraftingReads, RemoteFeatures, check_mesh
from specjax.drafters.cache_schemes import Streaming, check_own_cache
from specjax.drafters.candidates import Vocabulary
from specjax.drafters.checkpoints import dflash as dflash_checkpoint
from specjax.drafters.checkpoints.dflash_config import DFlashConfig, default_taps
from specjax.drafters.draft_vocabulary import TokenIds
from specjax.drafters.expansion import expand_by_depth
from specjax.drafters.trained import CheckpointFormat, TrainedDrafter, layer_like
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models.attention import Filled, Piece
from specjax.models.cache import Cache, Entry, KVCache, RingCache
from specjax.models.config import ModelConfig
from specjax.models.layers import decoder_layer, keys_values, normed
from specjax.models.params import Params
from specjax.models.primitives import capped, linear, vocabulary_logits
from specjax.models.rope import Rotations, rotations
from specjax.models.transformer import States, Target
from specjax.sampling import RowSampling

Seen = Callable[[int, int | None], tuple[jax.Array, Sequence[Piece]]]
"""What the tokens of blocks see: by the number of a layer, and its window or None. ``[B|1, T, T]`` bool, which of each other;
and the text before."""


@struct.dataclass
class DFlash(TrainedDrafter[Cache]):
    """Drafts a block in one pass; what it remembers of the text are keys and values for each of its layers.

    With ``causal`` in its configuration a token sees the block up to itself alone: that is JetSpec. Such a block is read as far
    as the draft is deep. Others are always read as long as they were in training.

    All nodes of one depth offer the same children, so trees grow from one pass, too. Checkpoints are in z-lab's layout, or in
    that of speculators (see `specjax.drafters.checkpoints.dflash`).

    Attributes:
        params: see `dflash_config.declare`.
        config: its configuration.
        draft: the shape of its drafts, at most as deep as a block has room for.
        mesh: where the params live.
        cache: what it remembers of a text: the first tokens and the newest, ``budget`` in all, so that its memory and its pass
            do not grow with the text. By default all of it. Of layers with a window it is what both leave.
        budget: with ``cache``, slots of a row in each layer.

    Examples:
        >>> drafter = specjax.DFlash.init(target, jax.random.key(1), draft=3, block_size=4)
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
        >>> small = drafter.replace(cache=specjax.Streaming(sinks=2), budget=6)
        >>> result = specjax.generate(target, small, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)
        True
    """

    params: Params
    config: DFlashConfig = struct.field(pytree_node=False)
    draft: DraftShape | int = struct.field(pytree_node=False, default=Chain(7))
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    cache: Streaming | None = struct.field(pytree_node=False, default=None)
    budget: int = struct.field(pytree_node=False, default=256)
    grows_trees: ClassVar[bool] = True

    checkpoint_format: ClassVar[CheckpointFormat] = dflash_checkpoint.DFLASH

    @classmethod
    def default_draft(cls, config: DFlashConfig) -> Chain:
        """A chain of all tokens that a block has room for."""
        return Chain(config.depth)

    @classmethod
    def usual_sizes(cls, target: Target) -> dict[str, Any]:
        """Those of z-lab's drafters."""
        return {"num_layers": 5, "block_size": 16}

    @classmethod
    def init(
        cls,
        target: Target,
        key: jax.Array,
        draft: DraftShape | int | None = None,
        *,
        block_size: int = 8,
        mask_token_id: int | None = None,
        taps: tuple[int, ...] | None = None,
        ids: TokenIds | None = None,
        variant: Mapping[str, Any] | None = None,
        **sizes: Any,
    ) -> Self:
        """A drafter for ``target`` with random weights; consumes ``key``.

        Args:
            target: what it will draft for.
            key: random.
            draft: the shape of its drafts; None: a chain of all tokens that a block has room for.
            block_size: tokens of a block, the anchor included.
            mask_token_id: the token that stands where nothing is drafted yet; None: the target's last, which large vocabularies
                do not use.
            taps: layers of the target whose input it reads; None: `dflash_config.default_taps`, one for each of its layers.
            ids: ``[Vd]`` the target's tokens that it can draft, ascending; None is all of them.
            variant: fields of `DFlashConfig` such as ``causal``.
            sizes: fields of its layers' `ModelConfig`; by default one layer of the target's sizes.
        """
        of_target = target.config
        layer = layer_like(of_target, **({"model_type": "qwen3", "qk_norm": True} | sizes))
        draft_vocabulary.check_ids(ids, layer.vocab_size)
        given: dict[str, Any] = {} if ids is None else {"own_ids": True, "own_head": True}
        config = DFlashConfig(
            layer=layer,
            block_size=block_size,
            mask_token_id=layer.vocab_size - 1 if mask_token_id is None else mask_token_id,
            taps=default_taps(of_target.num_layers, layer.num_layers) if taps is None else taps,
            draft_vocab_size=layer.vocab_size if ids is None else len(ids),
            target_layers=of_target.num_layers,
            **given | dict(variant or {}),
        )
        params = cls._initialise(config, key, target)
        params |= draft_vocabulary.initial_params(target, ids, config.own_head)
        if config.own_embedding:
            params["embed"] = target.embedding
        return cls(params=params, config=config, draft=cls.default_draft(config) if draft is None else draft, mesh=target.mesh)

    # --- drafting ---

    def check(self, target: Target) -> None:
        own, theirs = self.config, target.config
        if (own.layer.hidden_size, own.layer.vocab_size) != (theirs.hidden_size, theirs.vocab_size):
            raise InputError(
                f"drafter: {self.title} was made for a target of hidden size {own.layer.hidden_size} with "
                f"{own.layer.vocab_size} tokens, and target has {theirs.hidden_size} and {theirs.vocab_size}: give the target "
                "that it was made for"
            )
        if own.taps[-1] > theirs.num_layers:
            raise InputError(
                f"drafter: reads the target's layers {own.taps}, and target has {theirs.num_layers}: give the target that it "
                "was made for"
            )
        if self.draft_shape.depth > own.depth:
            raise InputError(
                f"draft={self.draft}: {self.draft_shape.depth} deep, and a block of this drafter has room for {own.depth}; "
                "give at most as many"
            )
        self.draft_shape.check(own.draft_vocab_size)
        check_own_cache(type(self).__name__, self.cache, self.budget)
        check_mesh(self.mesh, target)

    def taps(self, config: Any) -> tuple[int, ...]:
        return self.config.taps

    def start(self, target: Target, batch: int, capacity: int) -> Cache:
        layer = self.config.layer
        parts = [layer.entry_parts(index) for index in range(layer.num_layers)]
        if self.cache is not None:
            capacity = self.budget
        cache = KVCache.create(parts, batch=batch, capacity=capacity, dtype=self._dtype, mesh=self.mesh)
        return cache if self.cache is None else RingCache.around(cache, self.cache.kept(self.budget))

    def features(self, output: States) -> jax.Array:
        """``[B, T, H]`` what the layers make keys and values of, of the target's ``output``."""
        taps = output.taps.reshape(*output.taps.shape[:2], -1).astype(self._dtype)
        return normed(self.params, "hidden_norm", self.config.layer, linear(self.params, "fc", taps))

    def context(self, features: jax.Array, positions: jax.Array) -> tuple[Entry, ...]:
        """Each layer's keys and values of tokens with ``features [B, T, H]`` at ``positions [B, T]``."""
        entries = []
        for index, params in enumerate(self.params["layers"]):
            layer = self.config.layer.of_layer(index)
            entries.append(keys_values(params, layer, features, rotations(layer.rope, layer.head_dim, positions)))
        return tuple(entries)

    def remote_inputs(self, target: Target, output: States, entries: Sequence[Entry]) -> dict[str, jax.Array]:
        return {"features": self.features(output)}

    def append_remote(self, target: Target, state: Cache, told: RemoteFeatures) -> Cache:
        features = told.arrays["features"].astype(self._dtype)
        positions = state.length[:, None] + jnp.arange(features.shape[1])[None]
        return state.append(self.context(features, positions), told.count, after=features)

    def run(self, target: Target, tokens: jax.Array, positions: jax.Array, offset: jax.Array, seen: Seen) -> jax.Array:
        """``[B, T, H]`` what its head reads at each of the ``tokens [B, T]`` of blocks, at ``positions [B, T]``.

        The blocks lie one behind the other; ``offset [T]`` is each token's in its own, 0 that of an anchor.
        """
        x = self.params["embed"][tokens] if "embed" in self.params else target.embed(tokens)
        if self.config.input_embedding_scale != 1.0:  # one rounding, of the product
            x = x.astype(jnp.float32) * self.config.input_embedding_scale
        x = x.astype(self._dtype)
        for index, params in enumerate(self.params["layers"]):
            layer = self.config.layer.of_layer(index)
            mask, before = seen(index, self.config.layer.window_of(index))
            turn = rotations(layer.rope, layer.head_dim, positions)
            x = self.layer(params, layer, x, turn, offset, mask, before)
        return normed(self.params, "norm", self.config.layer, x)

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
        """``[B, T, H]`` the residual stream ``x`` after one layer; ``offset`` as in `run`, the rest as in `decoder_layer`."""
        return decoder_layer(params, config, x, turn, mask, before, self.mesh)[0]

    def is_causal(self, window: int | None) -> bool:
        """Whether tokens of a block see those before them alone, in layers with a ``window`` or without."""
        return self.config.causal or (window is not None and self.config.causal_in_window)

    def sees(self, window: int | None, back: Any) -> Any:
        """Of each number of the array ``back``: whether a place of a block sees the one so many places before it, or after it
        where that is negative, in a layer with a ``window`` or without."""
        seen = back >= (0 if self.is_causal(window) else -self.config.block_size)
        return seen if window is None or self.config.window_of_block else seen & (back < window)

    def reach(self, window: int | None, positions: jax.Array, anchors: jax.Array) -> jax.Array | None:
        """``[B, T|1]`` the first position that tokens at ``positions [B, T]`` of blocks with ``anchors [B, T|1]`` see in a
        layer with a ``window``; None: they see all."""
        if window is None:
            return None
        return anchors - window if self.config.window_of_block else positions - window + 1

    def block(self, target: Target, state: Cache, root: jax.Array) -> jax.Array:
        """``[B, D, H]`` what its head reads at each depth of a draft below ``root [B]``; before them stands the anchor, where
        that predicts nothing."""
        first, depth = int(not self.config.from_anchor), self.draft_shape.depth
        size = self.tokens_at_once(depth)
        masks = jnp.full((root.shape[0], size - 1), self.config.mask_token_id, root.dtype)
        tokens = jnp.concatenate([root[:, None], masks], axis=1)
        anchors, offset = state.length[:, None], jnp.arange(size)
        positions = anchors + offset

        def seen(index: int, window: int | None) -> tuple[jax.Array, Sequence[Piece]]:
            mask = self.sees(window, offset[:, None] - offset)
            return mask[None], [_before(state, index, self.reach(window, positions, anchors), self.mesh)]

        return self.run(target, tokens, positions, offset, seen)[:, : first + depth]

    def tokens_at_once(self, length: int) -> int:
        """Those of a block, or of a causal one no more than the draft is long: what comes later is not seen."""
        windows = [self.config.layer.window_of(index) for index in range(self.config.layer.num_layers)]
        is_causal = all(self.is_causal(window) for window in windows)
        return length + (not self.config.from_anchor) if is_causal else self.config.block_size

    def vocabulary(self, target: Target) -> Vocabulary | None:
        """The tokens that it can draft; None is the target's vocabulary."""
        return draft_vocabulary.vocabulary_of(self.params, target)

    def logits(self, target: Target, states: jax.Array) -> jax.Array:
        """``[..., Vd]`` float32 of what its head reads, ``states [..., H]``."""
        config = self.config
        if config.own_head:
            axes = ("batch", *(None,) * (states.ndim - 2), "draft_vocab")
            return sharding.constrain(vocabulary_logits(states, self.params["lm_head"]), axes, self.units, self.mesh)
        if not config.scales_logits:
            return target.head(states.astype(target.dtype))
        products = target.head_products(states.astype(target.dtype))
        return capped(products * config.output_multiplier, config.final_logit_softcapping)

    def propose(
        self, target: Target, state: Cache, root: jax.Array, sampling: RowSampling, keys: jax.Array, active: jax.Array
    ) -> tuple[Draft, Cache]:
        logits = self.logits(target, self.block(target, state, root)[:, -self.draft_shape.depth :])
        return expand_by_depth(self.draft_shape, logits, root, sampling, keys, active, self.vocabulary(target)), state

    def drafting_reads(self, target: Target, state: Cache | tuple[()] = (), cache: Sequence[Entry] = ()) -> DraftingReads:
        """All of it once, whatever the depth, and the target's head where it has none."""
        head = () if self.config.own_head else target.head_as_stored
        return DraftingReads(step=(self.own_weights, state, head))


def _before(cache: Cache, layer: int, since: jax.Array | None, mesh: Mesh | None) -> Piece:
    """What a ``cache`` holds of a layer, of which queries see the positions from ``since [B, T|1]`` on; None: all of them."""
    if since is None or not isinstance(cache, RingCache):
        return Filled.of(cache, layer, since, mesh)
    # The slots of a ring are in no order that a window could begin in: which of them are seen is said one by one.
    positions, slots = cache.newest_at(cache.length)[:, None], jnp.arange(cache.slots)
    return cache.layers[layer], (slots < cache.filled[:, None, None]) & (positions >= since[..., None])
