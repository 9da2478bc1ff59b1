"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840), and its variants by their published names.

Against EAGLE-1 it reads several of the target's layers and not the last alone; it predicts tokens and no features, so that its
own state is free; and it may draft from a small vocabulary of its own.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from specjax import sharding
from specjax.drafters import draft_vocabulary
from specjax.drafters.base import DraftingReads
from specjax.drafters.candidates import Vocabulary
from specjax.drafters.checkpoints import eagle3 as eagle3_checkpoint
from specjax.drafters.checkpoints.eagle3 import Eagle3Config
from specjax.drafters.draft_vocabulary import TokenIds
from specjax.drafters.features import FeatureDrafter, FeatureState
from specjax.drafters.trained import CheckpointFormat, layer_like
from specjax.drafts.shapes import DraftShape, DynamicTree
from specjax.errors import InputError
from specjax.models.attention import Piece
from specjax.models.cache import Entry
from specjax.models.config import ModelConfig
from specjax.models.layers import attention, decoder_layer, linear, mlp, rms_norm
from specjax.models.params import Params
from specjax.models.primitives import vocabulary_logits
from specjax.models.rope import rotations
from specjax.models.transformer import States, Target

USUAL_VOCABULARY = 32_000
"""Tokens that published drafters for targets of large vocabularies can draft."""


@struct.dataclass
class Eagle3(FeatureDrafter):
    """Reads several of the target's layers, joined by ``fc``; predicts tokens with a head of its own.

    With g the feature, or the drafter's own state in its place, and e the embedding of the next token, the first layer is
    ``x = g + attention([norm(e), norm(g)])`` and then an ordinary MLP. The head reads ``norm(x)``; x itself is fed back.
    Checkpoints are as SafeAILab, SpecForge, SGLang, speculators, vLLM or ModelOpt write them (see `eagle3_checkpoint`).

    Attributes:
        params: see `eagle3_checkpoint.declare`. ``d2t [Vd]``: its own token i is the target's ``i + d2t[i]``.
        config: its configuration.
        draft: the shape of its drafts.
        mesh: where the params live.

    Examples:
        >>> drafter = specjax.Eagle3.init(target, jax.random.key(1), draft=2)
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
        >>> drafter = specjax.Eagle3.from_pretrained("embedded:eagle3", draft="chain:5")
        >>> drafter.config.taps
        (2, 6, 9)
    """

    params: Params
    config: Eagle3Config = struct.field(pytree_node=False)
    draft: DraftShape | int = struct.field(pytree_node=False, default=DynamicTree())
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    checkpoint_format: ClassVar[CheckpointFormat] = eagle3_checkpoint.FORMAT

    @classmethod
    def usual_sizes(cls, target: Target) -> dict[str, Any]:
        return {"ids": np.arange(USUAL_VOCABULARY)} if target.config.vocab_size > USUAL_VOCABULARY else {}

    @classmethod
    def init(
        cls,
        target: Target,
        key: jax.Array,
        draft: DraftShape | int = DynamicTree(),
        *,
        ids: TokenIds | None = None,
        taps: tuple[int, ...] | None = None,
        variant: dict[str, bool] | None = None,
        **sizes: Any,
    ) -> Self:
        """A drafter for ``target`` with random weights; consumes ``key``. Its head begins as the target's.

        Args:
            target: what it will draft for.
            key: random.
            draft: the shape of its drafts.
            ids: ``[Vd]`` the target's tokens that it can draft, ascending; None is all of them.
            taps: layers of the target whose input it reads; None: `default_taps`.
            variant: flags of `Eagle3Config` such as ``norm_before_residual``, or ``own_head``.
            sizes: fields of its layers' `ModelConfig`; by default one layer as the target's.
        """
        own = layer_like(target.config, **sizes)
        draft_vocabulary.check_ids(ids, own.vocab_size)
        taps = eagle3_checkpoint.default_taps(target.config.num_layers) if taps is None else taps
        config = Eagle3Config(
            layer=own,
            draft_vocab_size=own.vocab_size if ids is None else len(ids),
            target_hidden_size=target.config.hidden_size,
            tap_count=len(taps),
            taps=taps,
            own_ids=ids is not None,
            **(variant or {}),
        )
        params = cls._initialise(config, key, target)
        params |= draft_vocabulary.initial_params(target, ids, config.own_head)
        return cls(params=params, config=config, draft=draft, mesh=target.mesh)

    @property
    def sizes(self) -> ModelConfig:
        return self.config.layer

    @property
    def target_hidden_size(self) -> int:
        return self.config.target_hidden_size

    def check(self, target: Target) -> None:
        super().check(target)
        layers, taps = target.config.num_layers, self.config.taps_of(target.config.num_layers)
        if len(taps) != self.config.tap_count or not all(0 <= tap <= layers for tap in taps):
            raise InputError(
                f"drafter: this Eagle3 reads {self.config.tap_count} layers of the target, and of {layers} layers those would "
                f"be {taps}: give the target that it was trained with"
            )

    def taps(self, config: ModelConfig) -> tuple[int, ...]:
        return tuple(sorted(set(self.config.taps_of(config.num_layers))))

    def vocabulary(self, target: Target) -> Vocabulary | None:
        return draft_vocabulary.vocabulary_of(self.params, target)

    def features(self, output: States, entries: Sequence[Entry] = ()) -> jax.Array:
        if not self.config.tap_count:
            return output.hidden
        taps = [output.taps[:, :, i] for i in range(output.taps.shape[2])]
        if self.config.taps is not None:  # recorded in ascending order, each once
            recorded = sorted(set(self.config.taps))
            taps = [taps[recorded.index(tap)] for tap in self.config.taps]
        return self.joined(taps)

    def joined(self, taps: Sequence[jax.Array]) -> jax.Array:
        """``[B, T, H]`` the features that ``taps``, each ``[B, T, Ht]``, are joined to, in this order."""
        if self.config.fc_norm:
            taps = [rms_norm(x, weight, self.sizes.norm_eps) for x, weight in zip(taps, self.params["fc_norm"], strict=True)]
        joined = jnp.concatenate(taps, axis=-1)
        if self.config.norm_before_fc:
            joined = rms_norm(joined, self.params["input_norm"], self.sizes.norm_eps)
        return linear(self.params, "fc", joined)

    def run(
        self,
        states: jax.Array,
        embedded: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        past: tuple[tuple[Piece, ...], ...],
        module: int = 0,
    ) -> tuple[jax.Array, tuple[Entry, ...]]:
        config, eps = self.sizes, self.sizes.norm_eps
        turn = rotations(config.rope, config.head_dim, positions)
        first, *rest = self.params["layers"]
        normed = rms_norm(states, first["hidden_norm"], eps)
        both = jnp.concatenate([rms_norm(embedded, first["input_norm"], eps), normed], axis=-1)
        attended, own = attention(first, config, both, turn, *self.seen(0, positions, mask, past[0]))
        x = (normed if self.config.norm_before_residual else states) + attended
        x = x + mlp(first, rms_norm(x, first["post_norm"], eps), activation=config.activation)
        new = [own]
        for index, (layer, before) in enumerate(zip(rest, past[1:], strict=True), 1):
            x, own = decoder_layer(layer, config, x, turn, *self.seen(index, positions, mask, before))
            new.append(own)
        return (rms_norm(x, self.params["norm"], eps) if self.config.norm_output else x), tuple(new)

    def seen(
        self, layer: int, positions: jax.Array, mask: jax.Array | None, past: tuple[Piece, ...]
    ) -> tuple[jax.Array | None, tuple[Piece, ...]]:
        """What a layer sees of ``mask`` and ``past``, those of `run`: here all of it."""
        return mask, past

    def logits(self, target: Target, states: jax.Array, module: int | jax.Array = 0) -> jax.Array:
        x = states if self.config.norm_output else rms_norm(states, self.params["norm"], self.sizes.norm_eps)
        return self._split(vocabulary_logits(x, self.params["lm_head"])) if self.config.own_head else target.head(x)

    def drafted_logits(self, target: Target, hidden: jax.Array) -> jax.Array:
        """``[..., Vd]`` the target's own logits of the tokens that can be drafted, where these are not all: of its states
        ``hidden [..., H]``."""
        vocabulary = self.vocabulary(target)
        assert vocabulary is not None
        # Columns of the head, and not of the logits: these are many more, and would have to be exchanged on a mesh.
        return self._split(target.finish_logits(vocabulary_logits(hidden, target.head_weights[:, vocabulary.ids])))

    def _split(self, logits: jax.Array) -> jax.Array:
        """``logits [..., Vd]`` as the devices of the mesh share them."""
        units = {"vocab": logits.shape[-1]}
        return sharding.constrain(logits, ("batch", *(None,) * (logits.ndim - 2), "vocab"), units, self.mesh)

    def drafting_reads(
        self, target: Target, state: FeatureState | tuple[()] = (), cache: Sequence[Entry] = ()
    ) -> DraftingReads:
        """``fc`` and what stands before it read the target's layers once a step."""
        own = self.own_weights
        level = {name: own.pop(name) for name in ("layers", "norm", "lm_head") if name in own}
        head = () if self.config.own_head else target.head_as_stored
        return DraftingReads(level=(level, state, head), step=own)
