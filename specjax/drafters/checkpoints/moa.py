"""The configuration of Mixture of Attentions, and the three layouts of its checkpoints.

The tensors have the authors' names in all layouts. ``specjax`` is our own: config.json states
everything, including target layer inference. ``authors`` is the layout of the authors' training
code: config.json is the *target's* and states nothing about the drafter, whose sizes follow from
the tensors' shapes. ``vllm`` is the layout of their converter for their fork of vLLM:
``model_type: moa_spec`` with the drafter's sizes, and only the target's hidden size, heads and
vocabulary.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from specjax.drafters import layer_attention
from specjax.drafters.layer_attention import LayerAttention, block_like
from specjax.drafters.trained import CheckpointFormat, TrainedDrafter, architectures_of, layer_like
from specjax.errors import InputError
from specjax.models import config_json, hub
from specjax.models import params as declarations
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig, Rope
from specjax.models.fields import (
    CheckpointError,
    Fields,
    FieldTable,
    JsonObject,
    check_fields,
    flag,
    mapping,
    whole,
)
from specjax.models.params import Params

_SELF, _CROSS, _LAYERS = "self_attention.", "cross_attention.", "layer_self_attention."
"""The prefixes of the tensor names of the three blocks."""


@dataclass(frozen=True)
class MoAConfig:
    """The configuration of a `MixtureOfAttentions`.

    Attributes:
        self_layer: the configuration of the self-attention block; ``vocab_size`` and
            ``hidden_size`` are the target's.
        cross_layer: the configuration of the cross-attention block, whose key/value heads and MLP
            may differ in size.
        target_layers: the number of the target's layers; None if the checkpoint does not state it.
        lsa: the configuration of layer self-attention. With None the summary of a token is the
            target's last hidden state.
        tli: the number of the target's last layers that complete a prediction.
        target: the target's configuration, if known. Nothing is computed from it, but the layout
            ``authors`` repeats it.
    """

    self_layer: ModelConfig
    cross_layer: ModelConfig
    target_layers: int | None
    lsa: LayerAttention | None
    tli: int = 0
    target: ModelConfig | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.tli < 0:
            raise InputError(f"tli={self.tli}: must not be negative")
        if self.target_layers is not None:
            self.tli_layers_of(self.target_layers)
        names = ("vocab_size", "hidden_size")
        if any(getattr(self.self_layer, name) != getattr(self.cross_layer, name) for name in names):
            raise InputError(
                "self_layer and cross_layer have different hidden sizes or vocabularies: both must"
                " be the target's"
            )

    def tli_layers_of(self, layers: int) -> tuple[int, int]:
        """Return the range of layers that complete a prediction, of ``layers`` layers."""
        if not 0 <= self.tli < layers:
            raise InputError(
                f"tli={self.tli}: the target has {layers} layers; give from 0 to {layers - 1}"
            )
        return layers - self.tli, layers

    @property
    def axis_units(self) -> dict[str, int]:
        """The units by which a mesh may split all blocks, as in `ModelConfig.axis_units`."""
        blocks = [
            self.self_layer,
            self.cross_layer,
            *([] if self.lsa is None else [self.lsa.block]),
        ]
        units = [block.axis_units for block in blocks]
        shared = {
            axis: math.gcd(*(block_units[axis] for block_units in units)) for axis in units[0]
        }
        return shared | {"vocab": self.self_layer.vocab_size}


def cross_like(layer: ModelConfig, **sizes: Any) -> ModelConfig:
    """Return the configuration of cross-attention for self-attention like ``layer``.

    It has no RoPE scaling.
    """
    return replace(layer, rope=Rope(theta=layer.rope.theta), **sizes)


def declare(config: MoAConfig, layout: str) -> Params:
    """Return the `Param` declarations, which have the authors' names in all layouts."""
    tree: Params = {
        "self_attention": declarations.declare_layer(config.self_layer, _SELF),
        "cross_attention": declarations.declare_layer(config.cross_layer, _CROSS),
    }
    if config.lsa is not None:
        tree |= layer_attention.declare(config.lsa, config.self_layer.hidden_size)
    return tree


# --- reading --------------------------------------------------------------------------------------


def recognises(raw: Fields, tensors: Collection[str]) -> bool:
    """Return whether a checkpoint is a Mixture of Attentions; see `CheckpointFormat`."""
    by_name = any(name.startswith("MOASpec") for name in architectures_of(raw))
    return "moa_config" in raw or raw.get("model_type") == "moa_spec" or by_name


def read_config(stored: CheckpointFiles, tli: int | None = None) -> MoAConfig:
    """Return the configuration of a checkpoint in any layout.

    Args:
        stored: the files of the checkpoint.
        tli: the number of the target's last layers that complete a prediction. Published
            checkpoints do not state it, and None is 0. Our own do, and ``tli`` must agree.

    Raises:
        InputError: A field or a tensor is invalid, or ``tli`` is not the number of training.
    """
    if tli is not None and type(tli) is not int:
        raise InputError(f"tli={tli!r}: must be a whole number")
    if "moa_config" in stored.raw:
        config = _read_own(stored)
        if tli not in (None, config.tli):
            raise InputError(
                f"tli={tli}: the checkpoint says that it was trained with tli={config.tli}; leave"
                " tli out"
            )
    elif stored.raw.get("model_type") == "moa_spec":
        config = _read_vllm(stored, tli or 0)
    elif recognises(stored.raw, ()):
        config = _read_authors(stored, tli or 0)
    else:
        raise CheckpointError(
            f"{stored.file}: it has no moa_config, no model_type 'moa_spec' and no architecture"
            " 'MOASpec': give the checkpoint of a Mixture of Attentions"
        )
    names = stored.shapes  # q, k and v have biases in drafters for Qwen2
    lsa = config.lsa
    if lsa is not None:
        lsa = replace(lsa, block=config_json.with_switches(lsa.block, names, _LAYERS))
    return replace(
        config,
        self_layer=config_json.with_switches(config.self_layer, names, _SELF),
        cross_layer=config_json.with_switches(config.cross_layer, names, _CROSS),
        lsa=lsa,
    )


_OWN: FieldTable = {
    "target_layer_inference": whole(0, 10_000),
    "target_num_hidden_layers": whole(1, 10_000, default=None),
    "cross_attention": mapping(default=None),
    "layer_self_attention": mapping(default=None),
}
_SIZES: FieldTable = {
    "num_key_value_heads": whole(1, 100_000),
    "intermediate_size": whole(1, 10_000_000),
}


def _read_own(stored: CheckpointFiles) -> MoAConfig:
    outer = check_fields(stored.raw, {"moa_config": mapping()}, stored.file)["moa_config"]
    fields = check_fields(outer, _OWN, f"{stored.file}: moa_config")
    layer = config_json.with_switches(
        config_json.parse_drafter_config(stored.raw, stored.file), stored.shapes, _SELF
    )
    cross = {}
    if (sizes := fields["cross_attention"]) is not None:
        kv_heads, intermediate = check_fields(
            sizes, _SIZES, f"{stored.file}: moa_config", "cross_attention."
        ).values()
        cross = {"num_kv_heads": kv_heads, "intermediate_size": intermediate}
    lsa_fields = fields["layer_self_attention"]
    return MoAConfig(
        self_layer=layer,
        cross_layer=cross_like(layer, **cross),
        target_layers=fields["target_num_hidden_layers"],
        lsa=(
            None
            if lsa_fields is None
            else layer_attention.parse(lsa_fields, layer, f"{stored.file}: layer_self_attention")
        ),
        tli=fields["target_layer_inference"],
    )


def _read_authors(stored: CheckpointFiles, tli: int) -> MoAConfig:
    target = config_json.parse_drafter_config(stored.raw, stored.file)
    layer = layer_like(target, **_stored_sizes(stored, _SELF, target.head_dim))
    lsa = None
    if any(name.startswith(_LAYERS) for name in stored.shapes):
        size = _shape(stored, f"{_LAYERS}self_attn.q_proj.weight")[1]
        lsa = _layer_attention(
            target,
            target.num_layers,
            size,
            **_stored_sizes(stored, _LAYERS, size // target.num_heads),
        )
    cross = _stored_sizes(stored, _CROSS, target.head_dim)
    return MoAConfig(layer, cross_like(layer, **cross), target.num_layers, lsa, tli, target)


def _shape(stored: CheckpointFiles, name: str) -> tuple[int, ...]:
    """Return the shape of a matrix, or raise CheckpointError if there is no such matrix."""
    if len(shape := stored.shapes.get(name, ())) != 2:
        raise CheckpointError(
            f"{stored.directory}: {name!r} is missing, or is no matrix: give the weights of a"
            " Mixture of Attentions drafter"
        )
    return shape


def _stored_sizes(stored: CheckpointFiles, prefix: str, head_dim: int) -> dict[str, int]:
    """Return the sizes of a block that follow from the shapes of its tensors."""
    keys, intermediate = (
        _shape(stored, f"{prefix}{name}.weight")[0] for name in ("self_attn.k_proj", "mlp.up_proj")
    )
    if head_dim < 1 or keys % head_dim:
        raise CheckpointError(
            f"{stored.file}: '{prefix}self_attn.k_proj.weight' has {keys} rows, which are no heads"
            f" of {head_dim} numbers: give the configuration and the weights of one model"
        )
    return {"num_kv_heads": keys // head_dim, "intermediate_size": intermediate}


def _layer_attention(
    target: ModelConfig, layers: int | None, size: int, num_kv_heads: int, intermediate_size: int
) -> LayerAttention:
    """Return layer self-attention in its published form, with the target's number of query heads.

    ``size`` is the size of a KV entry of one target layer.
    """
    heads, rest = divmod(size, 2 * target.head_dim)
    if rest or not heads:
        raise InputError(
            f"layer self-attention reads {size} numbers, which are no keys and values of size"
            f" {target.head_dim}"
        )
    return LayerAttention(
        block_like(target, size, target.num_heads, num_kv_heads, intermediate_size),
        layers,
        heads,
        target.head_dim,
    )


_VLLM_SELF = {f"self_attention_{name}": size for name, size in _SIZES.items()}
_VLLM_CROSS = {f"cross_attention_{name}": size for name, size in _SIZES.items()}
_VLLM_LAYERS = {
    "kv_hidden_size": whole(1, 10_000_000),
    **{f"layer_self_attention_{name}": size for name, size in _SIZES.items()},
}


def _read_vllm(stored: CheckpointFiles, tli: int) -> MoAConfig:
    raw, source = stored.raw, stored.file
    kv_heads, intermediate = check_fields(raw, _VLLM_SELF, source).values()
    sizes = {"num_key_value_heads": kv_heads, "intermediate_size": intermediate}
    layer = config_json.parse_drafter_config(
        raw | sizes | {"model_type": "llama", "num_hidden_layers": 1}, source
    )
    kv_heads, intermediate = check_fields(raw, _VLLM_CROSS, source).values()
    cross, lsa = cross_like(layer, num_kv_heads=kv_heads, intermediate_size=intermediate), None
    if not check_fields(raw, {"disable_LSA": flag(default=False)}, source)["disable_LSA"]:
        lsa = _layer_attention(layer, None, *check_fields(raw, _VLLM_LAYERS, source).values())
    return MoAConfig(layer, cross, None, lsa, tli)


# --- writing --------------------------------------------------------------------------------------


def format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> JsonObject:
    """Return the fields of config.json in ``layout``.

    ``target`` is the target's directory or hub id. The layout ``authors`` needs it if the target's
    configuration is not known.

    Raises:
        InputError: The layout has no field for a property of the drafter.
    """
    config: MoAConfig = drafter.config
    if layout == "specjax":
        return _format_own(config, dtype)
    first, cross = config.self_layer, config.cross_layer
    further = [cross, *([] if config.lsa is None else [config.lsa.block])]
    if (
        any(block.num_heads != first.num_heads for block in further)
        or cross.head_dim != first.head_dim
    ):
        raise InputError(
            f"layout={layout!r}: all blocks need the target's number of query heads, but this"
            f" drafter's have {[block.num_heads for block in (first, *further)]}, of sizes"
            f" {[block.head_dim for block in (first, *further)]}: write it as 'specjax'"
        )
    return (
        _format_vllm(config, dtype) if layout == "vllm" else _format_authors(config, dtype, target)
    )


def _format_own(config: MoAConfig, dtype: str) -> JsonObject:
    content: JsonObject = {
        "target_layer_inference": config.tli,
        "target_num_hidden_layers": config.target_layers,
        "cross_attention": dict(zip(_SIZES, _sizes(config.cross_layer), strict=True)),
    }
    if config.lsa is not None:
        content["layer_self_attention"] = layer_attention.format_fields(config.lsa)
    layer_fields = config_json.format_config(config.self_layer, dtype)
    return layer_fields | {"architectures": ["MixtureOfAttentionsDrafter"], "moa_config": content}


def _sizes(block: ModelConfig) -> tuple[int, int]:
    """Return the sizes of a block in the order of `_SIZES`."""
    return block.num_kv_heads, block.intermediate_size


def _format_authors(config: MoAConfig, dtype: str, name: str) -> JsonObject:
    target, layer = config.target, config.self_layer
    if name:
        target = config_json.read_config(hub.open_checkpoint(name, weights=False))
    if target is None:
        raise InputError(
            "layout='authors': its config.json is the target's, which is not known here: give"
            " target=DIRECTORY or OWNER/NAME"
        )
    lsa = config.lsa
    layers = target.num_layers if config.target_layers is None else config.target_layers
    kv_heads = target.num_kv_heads if lsa is None else lsa.target_kv_heads
    expected = (
        layer.vocab_size,
        layer.hidden_size,
        layers,
        layer.num_heads,
        kv_heads,
        layer.head_dim,
        layer.rope,
    )
    sizes = (
        target.vocab_size,
        target.hidden_size,
        target.num_layers,
        target.num_heads,
        target.num_kv_heads,
        target.head_dim,
    )
    if (*sizes, layer_like(target).rope) != expected:
        raise InputError(
            f"target={name!r}: it has (vocabulary, hidden size, layers, heads, key/value heads,"
            f" head size) {sizes}, but layout 'authors' needs {expected[:-1]} and the same RoPE:"
            " give the target that the drafter was trained with, or write the drafter as 'specjax'"
        )
    return config_json.format_config(target, dtype) | {"architectures": ["MOASpec"]}


_NOT_IN_VLLM = (
    "attention_bias",
    "mlp_bias",
    "intermediate_size",
    "num_hidden_layers",
    "num_key_value_heads",
    "tie_word_embeddings",
)


def _format_vllm(config: MoAConfig, dtype: str) -> JsonObject:
    content = config_json.format_config(config.self_layer, dtype)
    content = {name: value for name, value in content.items() if name not in _NOT_IN_VLLM}
    content |= {
        "model_type": "moa_spec",
        "architectures": ["MOASpecModel"],
        "disable_LSA": config.lsa is None,
    }
    content |= zip(_VLLM_SELF, _sizes(config.self_layer), strict=True)
    content |= zip(_VLLM_CROSS, _sizes(config.cross_layer), strict=True)
    if config.lsa is not None:
        content |= zip(
            _VLLM_LAYERS, (config.lsa.block.hidden_size, *_sizes(config.lsa.block)), strict=True
        )
    return content


def describe(drafter: TrainedDrafter, layout: str) -> str:
    """Return a line about target layer inference in what `format_config` writes."""
    if layout == "specjax":
        return f"target_layer_inference={drafter.config.tli}"
    return f"target layer inference is not in it: load it with tli={drafter.config.tli}"


FORMAT = CheckpointFormat(
    title="a Mixture of Attentions drafter",
    layouts=("specjax", "authors", "vllm"),
    recognises=recognises,
    read_config=read_config,
    declare=declare,
    axis_units=lambda config: config.axis_units,
    format_config=format_config,
    describe=describe,
)
