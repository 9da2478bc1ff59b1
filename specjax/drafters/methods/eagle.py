"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077): one layer that predicts the target's next feature.

EAGLE-2 (arXiv 2406.16858) is the same drafter with a dynamic tree. HASS (Zhang et al. 2024, arXiv
2408.15766) is the same drafter with another training. Checkpoints of both are checkpoints of this
class.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.drafters.features import FeatureDrafter, Past
from specjax.drafters.trained import CheckpointFormat, TrainedDrafter, layer_like
from specjax.drafts.shapes import DraftShape, DynamicTree
from specjax.models import config_json
from specjax.models import params as declarations
from specjax.models.cache import Entries
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.fields import CheckpointError, Fields, JsonObject
from specjax.models.layers import attention, linear, mlp, rms_norm
from specjax.models.params import Param, Params, matrix
from specjax.models.rope import rotations
from specjax.models.transformer import Target


@dataclass(frozen=True)
class EagleConfig:
    """The configuration of an `Eagle` drafter.

    Attributes:
        layer: the configuration of its one decoder layer; ``vocab_size`` and ``hidden_size`` are
            the target's.
        fc_bias: whether the layer that joins embedding and feature has a bias.
        own_embedding: whether the drafter has an embedding of its own and does not use the
            target's.
    """

    layer: ModelConfig
    fc_bias: bool = True
    own_embedding: bool = False


def recognises(raw: Fields, tensors: Collection[str]) -> bool:
    """Return whether a checkpoint is an EAGLE drafter; see `CheckpointFormat`.

    Its config.json describes a Llama model of one layer. It has the field ``bias``, or its tensors
    have an ``fc``.
    """
    return raw.get("num_hidden_layers") == 1 and ("bias" in raw or "fc.weight" in tensors)


def read_layer(stored: CheckpointFiles) -> EagleConfig:
    """Return the configuration of a checkpoint's layer and of its ``fc``."""
    layer = config_json.parse_drafter_config(stored.raw, stored.file)
    if layer.num_layers != 1:
        raise CheckpointError(
            f"{stored.file}: num_hidden_layers={layer.num_layers}: an EAGLE drafter has one layer"
        )
    return EagleConfig(
        layer=config_json.with_switches(layer, stored.shapes, "layers.0."),
        fc_bias="fc.bias" in stored.shapes,
        own_embedding="embed_tokens.weight" in stored.shapes,
    )


def read_config(stored: CheckpointFiles) -> EagleConfig:
    """Return the configuration of a checkpoint. Raises `CheckpointError`."""
    if stored.raw.get("layer_self_attention") is not None:
        raise CheckpointError(
            f"{stored.file}: layer_self_attention: this drafter reads summaries of the target's"
            " layers; load it with EagleWithLayerAttention, or as eagle-lsa:DIRECTORY"
        )
    return read_layer(stored)


def declare(config: EagleConfig, layout: str) -> Params:
    """Return the `Param` declarations."""
    layer, hidden = config.layer, config.layer.hidden_size
    first = declarations.declare_layer(layer, "layers.0.")
    del first["input_norm"]  # the layer reads the output of `fc` without a norm
    tree: Params = {"fc": matrix("fc", (2 * hidden, None), (hidden, None)), "layers": [first]}
    if config.fc_bias:
        tree["fc_bias"] = Param((hidden,), (None,), "fc.bias", "zeros")
    if config.own_embedding:
        tree["embed"] = Param((layer.vocab_size, hidden), ("vocab", None), "embed_tokens.weight")
    return tree


def format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> JsonObject:
    """Return the fields of config.json."""
    layer = drafter.config.layer
    return config_json.format_config(layer, dtype) | {
        "bias": drafter.config.fc_bias,
        "qkv_bias": layer.qkv_bias,
    }


FORMAT = CheckpointFormat(
    title="an EAGLE drafter",
    layouts=("eagle",),
    recognises=recognises,
    read_config=read_config,
    declare=declare,
    axis_units=lambda config: config.layer.axis_units,
    format_config=format_config,
)


@struct.dataclass
class Eagle(FeatureDrafter):
    """A drafter that predicts the target's next feature, which the target's own head reads.

    The feature is the target's last hidden state, after the final norm. The network is
    ``x = layer(fc([embedding, feature]))``. The layer has no norm before its attention, and x is
    fed back unchanged. Checkpoints are in SafeAILab's format: EAGLE-1, EAGLE-2 or HASS.

    Attributes:
        params: the parameters of ``fc`` and of the layer (see `declare`).
        config: the configuration.
        draft: the shape of the drafts; with a `DynamicTree` the drafter is EAGLE-2.
        mesh: the mesh of the parameters.

    Examples:
        >>> drafter = specjax.Eagle.init(target, jax.random.key(1))
        >>> print(drafter.draft_shape)  # a dynamic tree: EAGLE-2
        dynamic tree, 60 nodes, 7 deep
        >>> drafter.params["fc"].shape  # joins an embedding and a feature
        (32, 16)
    """

    params: Params
    config: EagleConfig = struct.field(pytree_node=False)
    draft: DraftShape | int = struct.field(pytree_node=False, default=DynamicTree())
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    checkpoint_format: ClassVar[CheckpointFormat] = FORMAT

    @classmethod
    def init(
        cls, target: Target, key: jax.Array, draft: DraftShape | int = DynamicTree(), **sizes: Any
    ) -> Self:
        """Return a drafter for ``target`` with random weights.

        Args:
            target: the target model.
            key: the random key for the weights. It is consumed.
            draft: the shape of the drafts.
            sizes: fields of the layer's `ModelConfig`; the default is the target's sizes.
        """
        config = EagleConfig(layer_like(target.config, **sizes))
        return cls(
            params=cls._initialise(config, key, target),
            config=config,
            draft=draft,
            mesh=target.mesh,
        )

    def run(
        self,
        states: jax.Array,
        embedded: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        past: Past,
        module: int = 0,
    ) -> tuple[jax.Array, Entries]:
        config, (layer,) = self.config.layer, self.params["layers"]
        turn = rotations(config.rope, config.head_dim, positions)
        x = linear(self.params, "fc", jnp.concatenate([embedded, states], axis=-1))
        # Unlike the target's layers, this one has no norm before attention.
        visible = self.in_window(0, mask, positions)
        attended, entry = attention(layer, config, x, turn, visible, past[0])
        x = x + attended
        normed = rms_norm(x, layer["post_norm"], config.norm_eps)
        return x + mlp(layer, normed, activation=config.activation), (entry,)
