"""P-EAGLE (Hui et al. 2026, arXiv 2602.01469): EAGLE-3's drafter, which drafts all tokens in one pass.

EAGLE-3 reads its own state where the target has not read a token yet, and so drafts one token after another. P-EAGLE reads a
learnt vector there, and the embedding of a mask token. Both are the same at every depth, so that all depths are run together.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.drafters.base import DraftingReads
from specjax.drafters.checkpoints import peagle as peagle_checkpoint
from specjax.drafters.checkpoints.peagle import PEagleConfig
from specjax.drafters.draft_vocabulary import TokenIds
from specjax.drafters.expansion import expand_by_depth
from specjax.drafters.features import FeatureState
from specjax.drafters.methods.eagle3 import Eagle3
from specjax.drafters.trained import CheckpointFormat
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models import params as declarations
from specjax.models.attention import Filled, Piece
from specjax.models.cache import Entry
from specjax.models.transformer import Target
from specjax.sampling import RowSampling


@struct.dataclass
class PEagle(Eagle3):
    """EAGLE-3's layers over placeholders: a draft costs one pass, however deep it is.

    The pair of the root was read when the root was committed, and says what the first tokens of the draft are. Below it stand
    placeholders, one for each depth further, which see that pair, those before it and each other downwards. They know no token
    that has been drafted. So all nodes of one depth expect the same, and trees grow from one pass, too.

    Checkpoints are as speculators, which vLLM reads, or SpecForge write them (see `peagle_checkpoint`). Of a file that does not
    name the mask token, give it: ``PEagle.from_pretrained(path, mask_token_id=...)``.

    Attributes:
        params: those of `Eagle3`, and ``mask_hidden [1, 1, taps * Ht]``, which stands in place of the target's layers.
        config: its configuration.
        draft: the shape of its drafts, of any depth; beyond what it was trained for little is accepted.
        mesh: where the params live.

    Examples:
        >>> drafter = specjax.PEagle.init(target, jax.random.key(1), draft=3)
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
    """

    config: PEagleConfig = struct.field(pytree_node=False)
    draft: DraftShape | int = struct.field(pytree_node=False, default=Chain(7))
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    checkpoint_format: ClassVar[CheckpointFormat] = peagle_checkpoint.FORMAT

    @classmethod
    def usual_sizes(cls, target: Target) -> dict[str, Any]:
        return {**super().usual_sizes(target), "num_layers": 4}

    @classmethod
    def init(
        cls,
        target: Target,
        key: jax.Array,
        draft: DraftShape | int = Chain(7),
        *,
        mask_token_id: int | None = None,
        ids: TokenIds | None = None,
        taps: tuple[int, ...] | None = None,
        variant: dict[str, bool] | None = None,
        **sizes: Any,
    ) -> Self:
        """A drafter for ``target`` with random weights; consumes ``key``. Its head and its embedding begin as the target's.

        Args:
            target: what it will draft for.
            key: random.
            draft: the shape of its drafts.
            mask_token_id: the token that stands where nothing has been drafted yet; None: the target's last, which large
                vocabularies do not use.
            ids: ``[Vd]`` the target's tokens that it can draft, ascending; None is all of them.
            taps: layers of the target whose input it reads; None: as `Eagle3.init` chooses them.
            variant: flags of `Eagle3Config` such as ``norm_before_residual``.
            sizes: fields of its layers' `ModelConfig`; by default one layer as the target's.
        """
        key, mask_key = jax.random.split(key)
        brings = {"own_embedding": True, **(variant or {})}
        eagle3 = Eagle3.init(target, key, ids=ids, taps=taps, variant=brings, **sizes)
        own = eagle3.config
        config = PEagleConfig.of(own, own.layer.vocab_size - 1 if mask_token_id is None else mask_token_id)
        declared = peagle_checkpoint.declare_mask_hidden(config)
        mask_hidden = declarations.initialise(declared, mask_key, target.dtype, target.mesh, {})
        params = eagle3.params | mask_hidden
        if own.own_embedding and own.layer.hidden_size == target.config.hidden_size:
            params["embed"] = target.embedding
        return cls(params=params, config=config, draft=draft, mesh=target.mesh)

    # --- drafting ---

    def check(self, target: Target) -> None:
        super().check(target)
        window = self.sizes.sliding_window
        if self.sizes.windowed_layers and window is not None and self.draft_shape.depth > window:
            raise InputError(
                f"draft={self.draft}: {self.draft_shape.depth} deep, and layers of this drafter see the newest {window} pairs "
                "alone; give a draft at most as deep"
            )

    # It could hear what the target tells, but has no state to go on from while it waits for a verdict: what it was trained to
    # read after tokens without features are placeholders, and nothing else.
    @property
    def drafts_elsewhere(self) -> bool:
        return False

    def seen(
        self, layer: int, positions: jax.Array, mask: jax.Array | None, past: tuple[Piece, ...]
    ) -> tuple[jax.Array | None, tuple[Piece, ...]]:
        """A layer with a window sees the pairs so near. Of the pieces those with a mask hold the text, slot t the pair of t."""
        window = self.sizes.window_of(layer)
        if window is None:
            return mask, past
        first = positions - window + 1  # [B, T]

        def near(piece: Piece) -> Piece:
            if isinstance(piece, Filled):
                return replace(piece, since=first if piece.since is None else jnp.maximum(piece.since, first))
            entry, visible = piece
            if visible is None:
                return piece
            return entry, visible & (jnp.arange(visible.shape[-1]) >= first[..., None])

        own = None if mask is None else mask & (positions[:, None] >= first[..., None])
        return own, tuple(near(piece) for piece in past)

    def placeholders(self, target: Target, batch: int, count: int) -> tuple[jax.Array, jax.Array]:
        """``count`` pairs that stand where nothing has been drafted yet: states and embedded tokens, ``[B, T, H]`` each."""
        taps = self.params["mask_hidden"].reshape(1, 1, self.config.tap_count, self.config.target_hidden_size)
        feature = self.joined([taps[:, :, tap] for tap in range(self.config.tap_count)])
        embedded = self.embed(target, jnp.full((1, 1), self.config.mask_token_id))
        return (
            jnp.broadcast_to(feature, (batch, count, feature.shape[-1])),
            jnp.broadcast_to(embedded, (batch, count, embedded.shape[-1])),
        )

    def block(self, target: Target, state: FeatureState) -> jax.Array:
        """``[B, D, H]`` its states at the pair of the root, and at the placeholders below it."""
        batch, below = state.newest.shape[0], self.draft_shape.depth - 1
        if not below:
            return state.newest
        # The root's pair is the last one in the cache.
        positions = state.cache.length[:, None] + jnp.arange(below)
        causal = jnp.tril(jnp.ones((1, below, below), bool))
        states, _ = self.run(*self.placeholders(target, batch, below), positions, causal, self._past(state.cache, 0))
        return jnp.concatenate([state.newest, states.astype(state.newest.dtype)], axis=1)

    def propose(
        self, target: Target, state: FeatureState, root: jax.Array, sampling: RowSampling, keys: jax.Array, active: jax.Array
    ) -> tuple[Draft, FeatureState]:
        logits = self.logits(target, self.block(target, state))
        return expand_by_depth(self.draft_shape, logits, root, sampling, keys, active, self.vocabulary(target)), state

    def tokens_at_once(self, length: int) -> int:
        """One place for each token of the draft."""
        return length

    def drafting_reads(
        self, target: Target, state: FeatureState | tuple[()] = (), cache: Sequence[Entry] = ()
    ) -> DraftingReads:
        """All of it once, whatever the depth, and the target's head where it has none."""
        return DraftingReads(step=(self.own_weights, state, () if self.config.own_head else target.head_as_stored))
