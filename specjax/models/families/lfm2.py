"""LFM2 (Liquid AI, 2025, arXiv 2511.23404): short convolutions, and attention in some layers."""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import convolutions
from specjax.models.families.base import Family
from specjax.models.families.convolutions import CONVOLUTION
from specjax.models.families.ropes import FULL
from specjax.models.fields import CheckpointError, Field, Fields, JsonObject, flag, number, whole

_FIELDS = convolutions.FIELDS | {
    "block_ff_dim": whole(1, 10_000_000, default=None),
    "block_auto_adjust_ff_dim": flag(default=True),
    "block_ffn_dim_multiplier": number(1e-6, 1e6, default=1.0),
    "block_multiple_of": whole(1, 10_000_000, default=256),
    "full_attn_idxs": Field(
        "a list of layers, counted from 0",
        lambda value: (
            type(value) is list and all(type(layer) is int and layer >= 0 for layer in value)
        ),
        default=None,
    ),
}


def _parse(fields: Fields) -> dict[str, Any]:
    layers, full = range(fields["num_hidden_layers"]), fields["full_attn_idxs"]
    kinds = fields["layer_types"] or [
        FULL if full is None or layer in full else CONVOLUTION for layer in layers
    ]
    return convolutions.parse(fields, kinds) | {"intermediate_size": _intermediate_size(fields)}


def _intermediate_size(fields: Fields) -> int:
    """Return the size of an MLP, which the field names only if nothing adjusts it.

    Raises:
        CheckpointError: Nothing is left of it.
    """
    name = "block_ff_dim" if fields["block_ff_dim"] else "intermediate_size"
    size = fields[name]
    if not fields["block_auto_adjust_ff_dim"]:
        return size
    adjusted = int(fields["block_ffn_dim_multiplier"] * int(2 * size / 3))
    multiple = fields["block_multiple_of"]
    if adjusted < 1:
        raise CheckpointError(
            f"{name}={size}: nothing is left of it with"
            f" block_ffn_dim_multiplier={fields['block_ffn_dim_multiplier']}: write the size of the"
            " MLP's matrices, and block_auto_adjust_ff_dim=false"
        )
    return -(-adjusted // multiple) * multiple


def _format(config: ModelConfig) -> JsonObject:
    return convolutions.format_fields(config) | {"block_auto_adjust_ff_dim": False}


LFM2 = Family(
    title="LFM2",
    models=(
        "LFM2 and LFM2.5, 350M to 2.6B, 8B-A1B and 24B-A2B: short convolutions, and "
        "attention in some layers"
    ),
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    defaults={**convolutions.DEFAULTS, "hidden_size": 2560, "intermediate_size": 12_288},
    switches={"qk_norm": True},
    kinds=(FULL, CONVOLUTION),
    theta=1_000_000.0,
    fields=_FIELDS,
    derived_from={"full_attn_idxs": "layer_types"},
    parse=_parse,
    format=_format,
    names=convolutions.NAMES,
    fused=convolutions.FUSED,
)
