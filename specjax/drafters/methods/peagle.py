"""P-EAGLE (Hui et al. 2026, arXiv 2602.01469): an EAGLE-3 that drafts all tokens in one pass.

At positions that the target has not read yet, EAGLE-3 reads its own state, and so drafts one token
after another. P-EAGLE reads a trained vector and the embedding of a mask token there. Both are the
same at every depth, so all depths run together.
"""

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
from specjax.models import params as declarations
from specjax.models.transformer import Target
from specjax.sampling import RowSampling


@struct.dataclass
class PEagle(Eagle3):
    """EAGLE-3's layers over placeholders: a draft of any depth costs one pass.

    The pair of the root was read when the root was committed. It predicts the first drafted token.
    Below it there is one placeholder for each further depth. A placeholder sees that pair, all
    pairs before it, and the placeholders above. No placeholder depends on drafted tokens, so all
    nodes of one depth have the same children, and one pass is enough for a tree as well.

    Checkpoints are those of speculators, which vLLM reads, and of SpecForge (see
    `peagle_checkpoint`). If a file does not name the mask token, give it:
    ``PEagle.from_pretrained(path, mask_token_id=...)``.

    Attributes:
        params: the parameters of `Eagle3`, and ``mask_hidden [1, 1, taps * Ht]``, which takes the
            place of the target's layers.
        config: the configuration.
        draft: the shape of the drafts, of any depth. Beyond the depth of training few tokens are
            accepted.
        mesh: the mesh of the parameters.

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
        """Return a drafter for ``target`` with random weights.

        Its head and its embedding start as copies of the target's.

        Args:
            target: the target model.
            key: the random key for the weights. It is consumed.
            draft: the shape of the drafts.
            mask_token_id: the token that marks positions without a drafted token; None is the last
                token of the target, which large vocabularies do not use.
            ids: ``[Vd]``, the target's tokens that the drafter can draft, ascending; None is all.
            taps: the target layers whose input the drafter reads; None is the default of
                `Eagle3.init`.
            variant: flags of `Eagle3Config` such as ``norm_before_residual``.
            sizes: fields of the layers' `ModelConfig`; the default is one layer of the target's
                sizes.
        """
        key, mask_key = jax.random.split(key)
        flags = {"own_embedding": True, **(variant or {})}
        eagle3 = Eagle3.init(target, key, ids=ids, taps=taps, variant=flags, **sizes)
        eagle3_config = eagle3.config
        config = PEagleConfig.of(
            eagle3_config,
            eagle3_config.layer.vocab_size - 1 if mask_token_id is None else mask_token_id,
        )
        declared = peagle_checkpoint.declare_mask_hidden(config)
        mask_hidden = declarations.initialise(declared, mask_key, target.dtype, target.mesh, {})
        params = eagle3.params | mask_hidden
        if (
            eagle3_config.own_embedding
            and eagle3_config.layer.hidden_size == target.config.hidden_size
        ):
            params["embed"] = target.embedding
        return cls(params=params, config=config, draft=draft, mesh=target.mesh)

    # --- drafting ---

    # A client could receive the features, but it could not draft while it waits for a verdict: at
    # tokens without features the network was trained to read placeholders, and nothing else.
    @property
    def drafts_elsewhere(self) -> bool:
        return False

    def placeholders(self, target: Target, batch: int, count: int) -> tuple[jax.Array, jax.Array]:
        """Return the states and embedded tokens of ``count`` placeholders, each ``[B, T, H]``."""
        taps = self.params["mask_hidden"].reshape(
            1, 1, self.config.tap_count, self.config.target_hidden_size
        )
        feature = self.joined([taps[:, :, tap] for tap in range(self.config.tap_count)])
        embedded = self.embed(target, jnp.full((1, 1), self.config.mask_token_id))
        return (
            jnp.broadcast_to(feature, (batch, count, feature.shape[-1])),
            jnp.broadcast_to(embedded, (batch, count, embedded.shape[-1])),
        )

    def block(self, target: Target, state: FeatureState) -> jax.Array:
        """Return the states ``[B, D, H]`` at the root's pair and at the placeholders below it."""
        batch, below = state.newest.shape[0], self.draft_shape.depth - 1
        if not below:
            return state.newest
        # The newest pair in the cache is the root's, so the placeholders come right after it.
        positions = state.cache.length[:, None] + jnp.arange(below)
        causal = jnp.tril(jnp.ones((1, below, below), bool))
        states, _ = self.run(
            *self.placeholders(target, batch, below),
            positions,
            causal,
            self._past(state.cache, 0, positions),
        )
        return jnp.concatenate([state.newest, states.astype(state.newest.dtype)], axis=1)

    def propose(
        self,
        target: Target,
        state: FeatureState,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, FeatureState]:
        logits = self.logits(target, self.block(target, state))
        return (
            expand_by_depth(
                self.draft_shape, logits, root, sampling, keys, active, self.vocabulary(target)
            ),
            state,
        )

    def tokens_at_once(self, length: int) -> int:
        """Return ``length``: each token of the draft has a position of its own."""
        return length

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return the arrays of one pass: all weights, and the target's head if it is used."""
        return DraftingReads(
            step=(self.own_weights, state, () if self.config.own_head else target.head_as_stored)
        )
