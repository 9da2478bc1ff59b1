"""EAGLE with layer self-attention: an ablation, Mixture of Attentions without cross-attention.

See arXiv 2410.03804.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import jax
from flax import struct

from specjax.drafters import layer_attention
from specjax.drafters.base import DraftingReads
from specjax.drafters.layer_attention import LayerAttention
from specjax.drafters.methods import eagle
from specjax.drafters.methods.eagle import Eagle, EagleConfig
from specjax.drafters.trained import CheckpointFormat, TrainedDrafter, layer_like
from specjax.drafts.shapes import DraftShape, DynamicTree
from specjax.models.cache import Entry
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import Fields, JsonObject, check_fields, mapping
from specjax.models.params import Params
from specjax.models.transformer import States, Target


@dataclass(frozen=True)
class EagleLayerAttentionConfig(EagleConfig):
    """The configuration of an `EagleWithLayerAttention` drafter.

    Attributes:
        lsa: the configuration of layer self-attention, whose summary is the feature.
    """

    lsa: LayerAttention = field(kw_only=True)


def _recognises(raw: Fields, tensors: Collection[str]) -> bool:
    return raw.get("layer_self_attention") is not None and eagle.recognises(raw, tensors)


def _read_config(stored: CheckpointFiles) -> EagleLayerAttentionConfig:
    config, source = eagle.read_layer(stored), f"{stored.file}: layer_self_attention"
    fields = check_fields(stored.raw, {"layer_self_attention": mapping()}, stored.file)
    lsa = layer_attention.parse(fields["layer_self_attention"], config.layer, source)
    return EagleLayerAttentionConfig(**vars(config), lsa=lsa)


def _declare(config: EagleLayerAttentionConfig, layout: str) -> Params:
    return eagle.declare(config, layout) | layer_attention.declare(
        config.lsa, config.layer.hidden_size
    )


def _format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> JsonObject:
    fields = layer_attention.format_fields(drafter.config.lsa)
    return eagle.format_config(drafter, layout, dtype, target) | {"layer_self_attention": fields}


@struct.dataclass
class EagleWithLayerAttention(Eagle):
    """An `Eagle` whose feature is a summary of the KV entries of all target layers.

    The plain `Eagle` reads the last hidden state instead. Checkpoints are EAGLE's, with the field
    ``layer_self_attention`` in config.json.

    Examples:
        >>> drafter = specjax.EagleWithLayerAttention.init(target, jax.random.key(1))
        >>> drafter.check(target)
    """

    config: EagleLayerAttentionConfig = struct.field(pytree_node=False)
    checkpoint_format: ClassVar[CheckpointFormat] = replace(
        eagle.FORMAT,
        title="an EAGLE drafter with layer self-attention",
        recognises=_recognises,
        read_config=_read_config,
        declare=_declare,
        format_config=_format_config,
    )

    @classmethod
    def init(
        cls, target: Target, key: jax.Array, draft: DraftShape | int = DynamicTree(), **sizes: Any
    ) -> Self:
        lsa = LayerAttention.for_target(target.config)
        config = EagleLayerAttentionConfig(layer_like(target.config, **sizes), lsa=lsa)
        return cls(
            params=cls._initialise(config, key, target),
            config=config,
            draft=draft,
            mesh=target.mesh,
        )

    def check(self, target: Target) -> None:
        super().check(target)
        self.config.lsa.check(target.config)

    def features(self, output: States, entries: Sequence[Entry] = ()) -> jax.Array:
        assert entries, "layer self-attention needs KV entries"
        return layer_attention.summarise(self.params, self.config.lsa, entries, self.mesh)

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return EAGLE's weights for each level, and the summary's weights once per step."""
        step = layer_attention.weights_of(self.params)
        level = {name: value for name, value in self.own_weights.items() if name not in step}
        return DraftingReads(level=(level, state, target.head_as_stored), step=step)
