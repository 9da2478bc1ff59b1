"""DFlash and JetSpec: drafters that draft a whole block in one pass.

DFlash is by z-lab (2025, github.com/z-lab/dflash), JetSpec is arXiv 2606.18394. A block consists of
the root, which is called its anchor, and of mask tokens behind it. A few layers read the block
once, and predict a token at each position. They see the text before the anchor through keys and
values, which every layer computes from the target's hidden states. So a draft of 15 tokens costs as
much as a draft of one. No drafted token depends on the tokens drafted before it.
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
from specjax.drafters.checkpoints import dflash as dflash_checkpoint
from specjax.drafters.checkpoints.dflash_config import DFlashConfig, default_taps
from specjax.drafters.draft_vocabulary import TokenIds
from specjax.drafters.expansion import expand_by_depth
from specjax.drafters.trained import CheckpointFormat, TrainedDrafter, layer_like
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models.attention import Filled, Piece
from specjax.models.cache import Cache, Entries, Entry, KVCache, RingCache
from specjax.models.config import ModelConfig
from specjax.models.layers import decoder_layer, keys_values, normed
from specjax.models.params import Params
from specjax.models.primitives import capped, linear, vocabulary_logits
from specjax.models.rope import Rotations, rotations
from specjax.models.transformer import States, Target
from specjax.sampling import RowSampling

Seen = Callable[[int, int | None], tuple[jax.Array, Sequence[Piece]]]
"""The type of a function that returns what the tokens of blocks attend to in a layer.

It takes the index of the layer, and its window or None. It returns which tokens of the blocks see
each other, ``[B|1, T, T]`` bool, and the pieces of the text before them.
"""


@struct.dataclass
class DFlash(TrainedDrafter[Cache]):
    """A drafter that drafts a block in one pass.

    Its memory of the text is a cache with keys and values for each of its layers.

    With ``causal`` in the configuration a token attends only to the tokens of the block up to
    itself: that is JetSpec. Such a block is only as long as the draft is deep. Blocks of other
    drafters always have the length that they had in training.

    All nodes of one depth have the same children, so one pass is enough for a tree as well.
    Checkpoints are in z-lab's layout or in that of speculators (see
    `specjax.drafters.checkpoints.dflash`).

    Attributes:
        params: the parameters, see `dflash_config.declare`.
        config: the configuration.
        draft: the shape of the drafts, at most as deep as a block allows.
        mesh: the mesh of the parameters.
        cache: the scheme of the cache. By default it has the whole text. `Streaming` keeps the
            first tokens and the newest, ``budget`` in all, so that neither memory nor time grows
            with the text. Layers with a window see the part of these that is inside the window.
        budget: with ``cache``, the number of slots of a row in each layer.

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
        """Return a chain of all tokens that a block has room for."""
        return Chain(config.depth)

    @classmethod
    def usual_sizes(cls, target: Target) -> dict[str, Any]:
        """Return the sizes of z-lab's drafters."""
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
        """Return a drafter for ``target`` with random weights.

        Args:
            target: the target model.
            key: the random key for the weights. It is consumed.
            draft: the shape of the drafts; None is a chain of all tokens that a block has room for.
            block_size: the number of tokens of a block, the anchor included.
            mask_token_id: the token that marks positions without a drafted token; None is the last
                token of the target, which large vocabularies do not use.
            taps: the target layers whose input the drafter reads; None is
                `dflash_config.default_taps`, one for each layer of the drafter.
            ids: ``[Vd]``, the target's tokens that the drafter can draft, ascending; None is all.
            variant: fields of `DFlashConfig` such as ``causal``.
            sizes: fields of the layers' `ModelConfig`; the default is one layer of the target's
                sizes.
        """
        target_config = target.config
        layer = layer_like(target_config, **({"model_type": "qwen3", "qk_norm": True} | sizes))
        draft_vocabulary.check_ids(ids, layer.vocab_size)
        vocabulary: dict[str, Any] = {} if ids is None else {"own_ids": True, "own_head": True}
        config = DFlashConfig(
            layer=layer,
            block_size=block_size,
            mask_token_id=layer.vocab_size - 1 if mask_token_id is None else mask_token_id,
            taps=default_taps(target_config.num_layers, layer.num_layers) if taps is None else taps,
            draft_vocab_size=layer.vocab_size if ids is None else len(ids),
            target_layers=target_config.num_layers,
            **vocabulary | dict(variant or {}),
        )
        params = cls._initialise(config, key, target)
        params |= draft_vocabulary.initial_params(target, ids, config.own_head)
        if config.own_embedding:
            params["embed"] = target.embedding
        return cls(
            params=params,
            config=config,
            draft=cls.default_draft(config) if draft is None else draft,
            mesh=target.mesh,
        )

    def embed(self, target: Target, tokens: jax.Array) -> jax.Array:
        if "embed" in self.params or self.config.embedding_normed:
            return super().embed(target, tokens)
        return target.embed(tokens, normed=False)

    # --- drafting ---

    def check(self, target: Target) -> None:
        config, target_config = self.config, target.config
        if (config.layer.hidden_size, config.layer.vocab_size) != (
            target_config.hidden_size,
            target_config.vocab_size,
        ):
            raise InputError(
                f"drafter: {self.title} was made for a target of hidden size"
                f" {config.layer.hidden_size} with {config.layer.vocab_size} tokens, but target has"
                f" {target_config.hidden_size} and {target_config.vocab_size}: that it was made for"
            )
        if config.taps[-1] > target_config.num_layers:
            raise InputError(
                f"drafter: it reads the target's layers {config.taps}, but target has"
                f" {target_config.num_layers}: give the target that it was made for"
            )
        if self.draft_shape.depth > config.depth:
            raise InputError(
                f"draft={self.draft}: it is {self.draft_shape.depth} deep, but a block of this"
                f" drafter has room for {config.depth}; give at most as many"
            )
        self.draft_shape.check(config.draft_vocab_size)
        check_own_cache(type(self).__name__, self.cache, self.budget)
        check_mesh(self.mesh, target)

    def taps(self, config: Any) -> tuple[int, ...]:
        return self.config.taps

    def start(self, target: Target, batch: int, capacity: int) -> Cache:
        layer = self.config.layer
        parts = [layer.entry_parts(index) for index in range(layer.num_layers)]
        if self.cache is not None:
            capacity = self.budget
        cache = KVCache.create(
            parts, batch=batch, capacity=capacity, dtype=self._dtype, mesh=self.mesh
        )
        return (
            cache if self.cache is None else RingCache.around(cache, self.cache.kept(self.budget))
        )

    def features(self, output: States) -> jax.Array:
        """Return the features ``[B, T, H]``, from which the layers compute keys and values.

        ``output`` has the target's states at T tokens.
        """
        taps = output.taps.reshape(*output.taps.shape[:2], -1).astype(self._dtype)
        return normed(
            self.params, "hidden_norm", self.config.layer, linear(self.params, "fc", taps)
        )

    def context(self, features: jax.Array, positions: jax.Array) -> Entries:
        """Return each layer's keys and values at tokens with ``features [B, T, H]``.

        ``positions`` are ``[B, T]``.
        """
        entries = []
        for index, params in enumerate(self.params["layers"]):
            layer = self.config.layer.of_layer(index)
            entries.append(
                keys_values(
                    params, layer, features, rotations(layer.rope, layer.head_dim, positions)
                )
            )
        return tuple(entries)

    def remote_inputs(
        self, target: Target, output: States, entries: Sequence[Entry]
    ) -> dict[str, jax.Array]:
        return {"features": self.features(output)}

    def append_remote(self, target: Target, state: Cache, told: RemoteFeatures) -> Cache:
        features = told.arrays["features"].astype(self._dtype)
        positions = state.length[:, None] + jnp.arange(features.shape[1])[None]
        return state.append(self.context(features, positions), told.count, after=features)

    def run(
        self,
        target: Target,
        tokens: jax.Array,
        positions: jax.Array,
        offset: jax.Array,
        attends_to: Seen,
        remat: bool = False,
    ) -> jax.Array:
        """Return the final states ``[B, T, H]`` at the tokens of blocks.

        The blocks of a row lie one behind the other.

        Args:
            target: the target model.
            tokens: ``[B, T]``, the token ids.
            positions: ``[B, T]``, the RoPE positions.
            offset: ``[T]``, the index of each token in its block; 0 for anchors.
            attends_to: what the tokens attend to in each layer.
            remat: whether to recompute each layer's activations for the gradient, to save memory.
        """
        run_layer = jax.checkpoint(self.layer, static_argnums=1) if remat else self.layer
        x = self.embed(target, tokens)
        # The product is in float32, so that it is rounded only once.
        if self.config.input_embedding_scale != 1.0:
            x = x.astype(jnp.float32) * self.config.input_embedding_scale
        x = x.astype(self._dtype)
        for index, params in enumerate(self.params["layers"]):
            layer = self.config.layer.of_layer(index)
            mask, before = attends_to(index, self.config.layer.window_of(index))
            turn = rotations(layer.rope, layer.head_dim, positions)
            x = run_layer(params, layer, x, turn, offset, mask, before)
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
        """Return the residual stream ``[B, T, H]`` after one layer.

        ``offset`` is as in `run`, the other arguments are as in `decoder_layer`.
        """
        return decoder_layer(params, config, x, turn, mask, before, self.mesh)[0]

    def is_causal(self, window: int | None) -> bool:
        """Return whether tokens of a block see only the tokens before them.

        ``window`` is that of the layer.
        """
        return self.config.causal or (window is not None and self.config.causal_in_window)

    def sees(self, window: int | None, back: Any) -> Any:
        """Return whether a token of a block sees the tokens at the distances ``back`` in its block.

        Args:
            window: the window of the layer, or None.
            back: an array of distances, positive for tokens before it and negative for tokens after
                it.
        """
        is_visible = back >= (0 if self.is_causal(window) else -self.config.block_size)
        if window is None or self.config.window_of_block:
            return is_visible
        return is_visible & (back < window)

    def reach(
        self, window: int | None, positions: jax.Array, anchors: jax.Array
    ) -> jax.Array | None:
        """Return the first visible position for each token of blocks, in a layer with a ``window``.

        Args:
            window: the window of the layer. Without one all positions are visible, and the result
                is None.
            positions: ``[B, T]``, the positions of the tokens.
            anchors: ``[B, T|1]``, the positions of their anchors.

        Returns:
            The positions, ``[B, T|1]``.
        """
        if window is None:
            return None
        return anchors - window if self.config.window_of_block else positions - window + 1

    def block(self, target: Target, state: Cache, root: jax.Array) -> jax.Array:
        """Run the block below ``root [B]``, and return the states that the head reads.

        They are ``[B, D, H]``, one for each depth. If the anchor predicts nothing, its state comes
        before them.
        """
        first, depth = int(not self.config.from_anchor), self.draft_shape.depth
        size = self.tokens_at_once(depth)
        masks = jnp.full((root.shape[0], size - 1), self.config.mask_token_id, root.dtype)
        tokens = jnp.concatenate([root[:, None], masks], axis=1)
        anchors, offset = state.length[:, None], jnp.arange(size)
        positions = anchors + offset

        def attends_to(index: int, window: int | None) -> tuple[jax.Array, Sequence[Piece]]:
            mask = self.sees(window, offset[:, None] - offset)
            return mask[None], [
                _before(state, index, self.reach(window, positions, anchors), self.mesh)
            ]

        return self.run(target, tokens, positions, offset, attends_to)[:, : first + depth]

    def tokens_at_once(self, length: int) -> int:
        """Return the length of the block that a draft of ``length`` tokens needs.

        A causal block ends with the draft, because no token sees the tokens behind it.
        """
        windows = [
            self.config.layer.window_of(index) for index in range(self.config.layer.num_layers)
        ]
        is_causal = all(self.is_causal(window) for window in windows)
        return length + (not self.config.from_anchor) if is_causal else self.config.block_size

    def logits(self, target: Target, states: jax.Array) -> jax.Array:
        """Return the float32 logits ``[..., Vd]`` for ``states [..., H]`` of the block."""
        config = self.config
        if config.own_head:
            axes = ("batch", *(None,) * (states.ndim - 2), "draft_vocab")
            return sharding.constrain(
                vocabulary_logits(states, self.params["lm_head"]), axes, self.units, self.mesh
            )
        if not config.scales_logits:
            return target.head(states.astype(target.dtype))
        products = target.head_products(states.astype(target.dtype))
        return capped(products * config.output_multiplier, config.final_logit_softcapping)

    def propose(
        self,
        target: Target,
        state: Cache,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, Cache]:
        logits = self.logits(target, self.block(target, state, root)[:, -self.draft_shape.depth :])
        return (
            expand_by_depth(
                self.draft_shape, logits, root, sampling, keys, active, self.vocabulary(target)
            ),
            state,
        )

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return the arrays of one pass: all weights, and the target's head if it is used."""
        head = () if self.config.own_head else target.head_as_stored
        return DraftingReads(step=(self.own_weights, state, head))


def _before(cache: Cache, layer: int, since: jax.Array | None, mesh: Mesh | None) -> Piece:
    """Return the part of a layer's ``cache`` that queries see.

    ``since [B, T|1]`` are the first visible positions; None makes all visible.
    """
    if since is None or not isinstance(cache, RingCache):
        return Filled.of(cache, layer, since, mesh)
    # The slots of a ring are not in the order of positions, so a window is no range of slots: each
    # slot needs a flag of its own.
    positions, slots = cache.positions_by_slot(cache.length)[:, None], jnp.arange(cache.slots)
    return cache.layers[layer], (slots < cache.filled[:, None, None]) & (
        positions >= since[..., None]
    )
