"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840), and its variants under their published names.

It differs from EAGLE-1 in three ways. It reads several layers of the target and not just the last.
It is trained to predict tokens and not features, so its own state is free. And it may draft from a
small vocabulary of its own.
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
from specjax.drafters.checkpoints import eagle3 as eagle3_checkpoint
from specjax.drafters.checkpoints.eagle3 import Eagle3Config
from specjax.drafters.draft_vocabulary import TokenIds
from specjax.drafters.features import FeatureDrafter, Past
from specjax.drafters.trained import CheckpointFormat, layer_like
from specjax.drafts.shapes import DraftShape, DynamicTree
from specjax.errors import InputError
from specjax.models.cache import Entries, Entry
from specjax.models.config import ModelConfig
from specjax.models.layers import attention, decoder_layer, linear, mlp, rms_norm
from specjax.models.params import Params
from specjax.models.primitives import vocabulary_logits
from specjax.models.rope import rotations
from specjax.models.transformer import States, Target

USUAL_VOCABULARY = 32_000
"""The number of draft tokens of published drafters for targets with a large vocabulary."""


@struct.dataclass
class Eagle3(FeatureDrafter):
    """A drafter that reads several layers of the target and has a head of its own.

    ``fc`` joins the states of the target's layers to a feature. With g the feature, or the
    drafter's own state in its place, and e the embedding of the next token, the first layer is
    ``x = g + attention([norm(e), norm(g)])``, followed by an ordinary MLP. The head reads
    ``norm(x)``; x itself is fed back. Checkpoints of SafeAILab, SpecForge, SGLang, speculators,
    vLLM and ModelOpt are supported (see `eagle3_checkpoint`).

    Attributes:
        params: the parameters, see `eagle3_checkpoint.declare`. With ``d2t [Vd]`` the drafter's
            token i is the target's token ``i + d2t[i]``.
        config: the configuration.
        draft: the shape of the drafts.
        mesh: the mesh of the parameters.

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
        if target.config.vocab_size > USUAL_VOCABULARY:
            return {"ids": np.arange(USUAL_VOCABULARY)}
        return {}

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
        """Return a drafter for ``target`` with random weights.

        Its head starts as a copy of the target's.

        Args:
            target: the target model.
            key: the random key for the weights. It is consumed.
            draft: the shape of the drafts.
            ids: ``[Vd]``, the target's tokens that the drafter can draft, ascending; None is all.
            taps: the target layers whose input the drafter reads; None is `default_taps`.
            variant: flags of `Eagle3Config` such as ``norm_before_residual`` or ``own_head``.
            sizes: fields of the layers' `ModelConfig`; the default is one layer of the target's
                sizes.
        """
        layer = layer_like(target.config, **sizes)
        draft_vocabulary.check_ids(ids, layer.vocab_size)
        taps = eagle3_checkpoint.default_taps(target.config.num_layers) if taps is None else taps
        config = Eagle3Config(
            layer=layer,
            draft_vocab_size=layer.vocab_size if ids is None else len(ids),
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
    def target_hidden_size(self) -> int:
        return self.config.target_hidden_size

    def check(self, target: Target) -> None:
        super().check(target)
        layers, taps = target.config.num_layers, self.config.taps_of(target.config.num_layers)
        if len(taps) != self.config.tap_count or not all(0 <= tap <= layers for tap in taps):
            raise InputError(
                f"drafter: this Eagle3 reads {self.config.tap_count} layers of the target, but for"
                f" a target of {layers} layers they would be {taps}: give the target that it was"
                " trained with"
            )

    def taps(self, config: ModelConfig) -> tuple[int, ...]:
        return tuple(sorted(set(self.config.taps_of(config.num_layers))))

    def features(self, output: States, entries: Sequence[Entry] = ()) -> jax.Array:
        if not self.config.tap_count:
            return output.hidden
        taps = [output.taps[:, :, i] for i in range(output.taps.shape[2])]
        if self.config.taps is not None:  # recorded in ascending order, each once
            recorded = sorted(set(self.config.taps))
            taps = [taps[recorded.index(tap)] for tap in self.config.taps]
        return self.joined(taps)

    def joined(self, taps: Sequence[jax.Array]) -> jax.Array:
        """Return the features ``[B, T, H]`` that ``fc`` makes of ``taps``, each ``[B, T, Ht]``."""
        if self.config.fc_norm:
            taps = [
                rms_norm(x, weight, self.sizes.norm_eps)
                for x, weight in zip(taps, self.params["fc_norm"], strict=True)
            ]
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
        past: Past,
        module: int = 0,
    ) -> tuple[jax.Array, Entries]:
        config, eps = self.sizes, self.sizes.norm_eps
        turn = rotations(config.rope, config.head_dim, positions)
        first, *rest = self.params["layers"]
        normed = rms_norm(states, first["hidden_norm"], eps)
        joined = jnp.concatenate([rms_norm(embedded, first["input_norm"], eps), normed], axis=-1)
        visible = self.in_window(0, mask, positions)
        attended, entry = attention(first, config, joined, turn, visible, past[0])
        x = (normed if self.config.norm_before_residual else states) + attended
        x = x + mlp(first, rms_norm(x, first["post_norm"], eps), activation=config.activation)
        entries = [entry]
        for index, (layer, before) in enumerate(zip(rest, past[1:], strict=True), 1):
            visible = self.in_window(index, mask, positions)
            x, entry, _ = decoder_layer(layer, config, x, turn, visible, before)
            entries.append(entry)
        # What is fed back in place of a feature is the state before the norm, unless the checkpoint
        # says otherwise.
        output = rms_norm(x, self.params["norm"], eps) if self.config.norm_output else x
        return output, tuple(entries)

    def logits(self, target: Target, states: jax.Array, module: int | jax.Array = 0) -> jax.Array:
        if self.config.norm_output:
            x = states
        else:
            x = rms_norm(states, self.params["norm"], self.sizes.norm_eps)
        if self.config.own_head:
            return self._split(vocabulary_logits(x, self.params["lm_head"]))
        return target.head(x)

    def drafted_head(self, target: Target) -> jax.Array:
        """Return the columns ``[H, Vd]`` of the target's head for tokens that can be drafted.

        It needs a drafter with its own vocabulary.
        """
        vocabulary = self.vocabulary(target)
        assert vocabulary is not None
        return target.head_weights[:, vocabulary.ids]

    def drafted_logits(self, target: Target, hidden: jax.Array, head: jax.Array) -> jax.Array:
        """Return the target's logits ``[..., Vd]`` of the tokens that the drafter can draft.

        ``hidden [..., H]`` are the target's hidden states, and ``head`` is the `drafted_head`.
        """
        # Select columns of the head and not of the logits: there are far more logits, and on a mesh
        # the devices would have to exchange them.
        return self._split(target.finish_logits(vocabulary_logits(hidden, head)))

    def _split(self, logits: jax.Array) -> jax.Array:
        """Return ``logits [..., Vd]``, split over the devices of the mesh."""
        units = {"vocab": logits.shape[-1]}
        return sharding.constrain(
            logits, ("batch", *(None,) * (logits.ndim - 2), "vocab"), units, self.mesh
        )

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return what a level reads, and ``fc`` with its norms, which is read once per step."""
        step = self.own_weights
        level = {name: step.pop(name) for name in ("layers", "norm", "lm_head") if name in step}
        head = () if self.config.own_head else target.head_as_stored
        return DraftingReads(level=(level, state, head), step=step)
