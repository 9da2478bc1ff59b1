"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077): one layer that predicts the target's next feature.

EAGLE-2 (arXiv 2406.16858) is the same drafter with a dynamic tree, HASS (Zhang et al. 2024, arXiv 2408.15766) the same trained
otherwise: both are checkpoints of this class.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.drafters import layer_attention
from specjax.drafters.features import FeatureDrafter, layer_like
from specjax.drafters.layer_attention import LayerAttention
from specjax.models import checkpoint, huggingface
from specjax.models import params as declarations
from specjax.models.attention import Piece
from specjax.models.cache import Entry
from specjax.models.config import ModelConfig
from specjax.models.fields import CheckpointError, check_fields, mapping, read_json
from specjax.models.layers import attention, linear, mlp, rms_norm
from specjax.models.params import Param, Params, matrix
from specjax.models.rope import rotations
from specjax.models.transformer import Output, Target, default_dtype
from specjax.tree import DynamicTree, Shape


@dataclass(frozen=True)
class EagleConfig:
    """The shape of an `Eagle`.

    Attributes:
        layer: of its one decoder layer; ``vocab_size`` and ``hidden_size`` are the target's.
        fc_bias: whether the layer that joins embedding and feature has a bias.
        own_embedding: whether it brings an embedding, and does not use the target's.
        lsa: layer self-attention, whose summary is then the feature, in place of the last hidden state. So Mixture of
            Attentions is without its cross-attention; EAGLE has none.
    """

    layer: ModelConfig
    fc_bias: bool = True
    own_embedding: bool = False
    lsa: LayerAttention | None = None


def declare(config: EagleConfig) -> Params:
    """The `Param` declarations, named as in SafeAILab's checkpoints."""
    layer, hidden = config.layer, config.layer.hidden_size
    first = declarations.declare_layer(layer, "layers.0.")
    del first["input_norm"]  # the layer reads what `fc` gives as it is
    tree: Params = {"fc": matrix("fc", (2 * hidden, None), (hidden, None)), "layers": [first]}
    if config.fc_bias:
        tree["fc_bias"] = Param((hidden,), (None,), "fc.bias", "zeros")
    if config.own_embedding:
        tree["embed"] = Param((layer.vocab_size, hidden), ("vocab", None), "embed_tokens.weight")
    if config.lsa is not None:
        tree |= layer_attention.declare(config.lsa, hidden)
    return tree


def is_eagle(raw: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """Whether a checkpoint is an EAGLE-1 drafter: a Llama model's config.json of one layer, which may say whether ``fc`` has a
    bias, and an ``fc`` among the tensors, where they are at hand."""
    return raw.get("num_hidden_layers") == 1 and ("bias" in raw or "fc.weight" in tensors)


def _read_config(directory: Path) -> EagleConfig:
    """The shape of a checkpoint, by its config.json and by the tensors that are there."""
    file, names = directory / "config.json", checkpoint.stored_shapes(directory)
    raw = read_json(file)
    layer = huggingface.parse_config(raw, str(file))
    block = check_fields(raw, {"layer_self_attention": mapping(default=None)}, str(file))["layer_self_attention"]
    if layer.num_layers != 1:
        raise CheckpointError(f"{file}: num_hidden_layers={layer.num_layers}: an EAGLE drafter has one layer")
    return EagleConfig(
        layer=huggingface.with_switches(layer, names, "layers.0."),
        fc_bias="fc.bias" in names,
        own_embedding="embed_tokens.weight" in names,
        lsa=None if block is None else layer_attention.parse(block, layer, f"{file}: layer_self_attention"),
    )


@struct.dataclass
class Eagle(FeatureDrafter):
    """Predicts the target's next feature, its last hidden state after the final norm; the target's own head reads it.

    ``x = layer(fc([embedding, feature]))``, where the layer has no norm before its attention, and x is fed back as it is.

    Attributes:
        params: ``fc`` and the layer's (see `declare`).
        config: its shape.
        draft: the shape of its drafts; a `DynamicTree` makes it EAGLE-2.
        mesh: where the params live.
    """

    params: Params
    config: EagleConfig = struct.field(pytree_node=False)
    draft: Shape = struct.field(pytree_node=False, default=DynamicTree())
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, draft: Shape = DynamicTree(), dtype: Any = None, mesh: Mesh | None = None
    ) -> "Eagle":
        """Load a checkpoint in SafeAILab's format: EAGLE-1, EAGLE-2 or HASS.

        Args:
            path: directory, or hub id, with config.json and safetensors or a ``pytorch_model.bin``.
            draft: the shape of its drafts.
            dtype: of the params; the default is that of `Target.from_pretrained`. It should be the target's.
            mesh: the target's.

        Raises:
            CheckpointError: a file, a field or a tensor is not as it must be.
        """
        directory = huggingface.locate(path)
        config = _read_config(directory)
        params = checkpoint.read(
            directory,
            declare(config),
            dtype or default_dtype(),
            what="an EAGLE drafter with this config.json",
            ignored=("*rotary_emb.inv_freq",),
            mesh=mesh,
            units=config.layer.axis_units,
        )
        return cls(params=params, config=config, draft=draft, mesh=mesh)

    @classmethod
    def init(cls, target: Target, key: jax.Array, draft: Shape = DynamicTree(), *, lsa: bool = False, **sizes: Any) -> "Eagle":
        """A drafter for ``target`` with random weights; consumes ``key``.

        ``lsa`` gives it layer self-attention; ``sizes`` override fields of its layer's config.
        """
        block = LayerAttention.for_target(target.config) if lsa else None
        config = EagleConfig(layer_like(target.config, **sizes), lsa=block)
        params = declarations.initialise(declare(config), key, target.dtype, target.mesh, config.layer.axis_units)
        return cls(params=params, config=config, draft=draft, mesh=target.mesh)

    def save_pretrained(self, path: str | Path, dtype: Any = None) -> None:
        """Write a checkpoint in SafeAILab's format, in ``dtype`` (by default its own). All of it or nothing."""
        kept = checkpoint.float_type(dtype or self._dtype)
        content = huggingface.format_config(self.config.layer, kept.name)
        content |= {"bias": self.config.fc_bias, "qkv_bias": self.config.layer.qkv_bias}
        if self.config.lsa is not None:
            content["layer_self_attention"] = layer_attention.format_fields(self.config.lsa)
        checkpoint.write(Path(path), declare(self.config), self.params, {"config.json": content}, dtype)

    def check(self, target: Target) -> None:
        super().check(target)
        if self.config.lsa is not None:
            self.config.lsa.check(target.config)

    @property
    def sizes(self) -> ModelConfig:
        return self.config.layer

    def features(self, output: Output, entries: Sequence[Entry] = ()) -> jax.Array:
        if self.config.lsa is None:
            return output.hidden
        assert entries, "layer self-attention needs what the layers remember"
        return layer_attention.summarise(self.params, self.config.lsa, entries, self.mesh)

    def run(
        self,
        states: jax.Array,
        embedded: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        past: tuple[tuple[Piece, ...], ...],
        module: int = 0,
    ) -> tuple[jax.Array, tuple[Entry, ...]]:
        config, (layer,) = self.config.layer, self.params["layers"]
        turn = rotations(config.rope, config.head_dim, positions)
        x = linear(self.params, "fc", jnp.concatenate([embedded, states], axis=-1))
        attended, own = attention(layer, config, x, turn, mask, past[0])
        x = x + attended
        return x + mlp(layer, rms_norm(x, layer["post_norm"], config.norm_eps)), (own,)

    def logits(self, target: Target, states: jax.Array, module: int | jax.Array = 0) -> jax.Array:
        return target.head(states)
