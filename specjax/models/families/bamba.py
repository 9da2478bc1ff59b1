"""Bamba (IBM, Princeton and UIUC, 2024): layers of Mamba-2, and some with attention."""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import mamba2
from specjax.models.families.base import Family
from specjax.models.families.ropes import FULL
from specjax.models.families.states import LINEAR, format_layers, parse_layers
from specjax.models.fields import CheckpointError, Field, Fields, JsonObject

_ROTATED = 0.5
"""The share of a head that is rotated. It is fixed in transformers, whatever the file says."""


def _derived(fields: Fields) -> dict[str, Any]:
    """Return the kinds of layers, which ``attn_layer_indices`` alone decides."""
    count, full = fields.get("num_hidden_layers"), fields.get("attn_layer_indices") or ()
    rotated = {"partial_rotary_factor": _ROTATED}
    if type(count) is not int or not isinstance(full, list | tuple) or count > 10_000:
        return rotated  # refused later
    kinds = [FULL if layer in full else LINEAR for layer in range(count)]
    return rotated | {"layer_types": kinds}


def _parse(fields: Fields) -> dict[str, Any]:
    full, last = fields["attn_layer_indices"] or [], fields["num_hidden_layers"] - 1
    if not full or max(full) > last:
        raise CheckpointError(
            f"attn_layer_indices={full}: must name at least one layer with attention, and"
            f" layers from 0 to {last} alone (num_hidden_layers - 1)"
        )
    return parse_layers(fields["layer_types"], mamba2.parse_sizes(fields))


def _format(config: ModelConfig) -> JsonObject:
    kinds = enumerate(format_layers(config))
    full = [layer for layer, kind in kinds if kind == FULL]
    return mamba2.format_sizes(config) | {
        "attn_layer_indices": full,
        "partial_rotary_factor": config.rope.turned,
    }


BAMBA = Family(
    title="Bamba",
    models="Bamba-9B: a hybrid with Mamba-2",
    model_type="bamba",
    architecture="BambaForCausalLM",
    defaults={
        **mamba2.DEFAULTS,
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    biases={"attention_bias": ("qkv_bias", "output_bias"), "mlp_bias": ("mlp_bias",)},
    kinds=(FULL, LINEAR),
    turns_parts=True,
    fields={
        **mamba2.FIELDS,
        "attn_layer_indices": Field(
            "a list of layers, counted from 0",
            lambda value: (
                type(value) is list and all(type(layer) is int and layer >= 0 for layer in value)
            ),
            default=None,
        ),
    },
    derived=_derived,
    parse=_parse,
    format=_format,
    names=mamba2.NAMES,
    fused=mamba2.FUSED,
)
