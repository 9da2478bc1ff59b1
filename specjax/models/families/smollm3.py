"""SmolLM3 (Hugging Face, 2025): Llama, every fourth layer without RoPE (NoPE, arXiv 2501.18795)."""

from typing import Any

from specjax.models.config import Layer, ModelConfig
from specjax.models.families.base import Family
from specjax.models.families.ropes import (
    INTERVAL_FIELDS,
    NO_POSITIONS,
    format_rope_layers,
    parse_rope_layers,
)
from specjax.models.fields import Field, Fields, FieldTable, JsonObject

_FIELDS: FieldTable = {
    "no_rope_layers": Field(
        "a list with 1 for each layer with RoPE and 0 for each other",
        lambda value: (
            type(value) is list and all(type(item) is int and item in (0, 1) for item in value)
        ),
        default=None,
    ),
    **INTERVAL_FIELDS,
}


def _parse(fields: Fields) -> dict[str, Any]:
    turned = parse_rope_layers(fields, fields["no_rope_layers"])
    windows: dict[str, Any] = {}
    # Without layer_types the layers without RoPE have a window, if any layers do.
    if fields["layer_types"] is None:
        if _has_windows(fields):
            windowed = tuple(layer for layer, has_rope in enumerate(turned) if not has_rope)
        else:
            windowed = ()
        windows = {
            "sliding_window": fields["sliding_window"] if windowed else None,
            "windowed_layers": windowed,
        }
    layers = tuple(Layer() if has_rope else NO_POSITIONS for has_rope in turned)
    return windows | {"layers": () if all(turned) else layers}


def _has_windows(fields: Fields) -> bool:
    return bool(fields["use_sliding_window"]) and fields["sliding_window"] is not None


def _format(config: ModelConfig) -> JsonObject:
    # transformers' default padding id does not exist in smaller vocabularies.
    return format_rope_layers(config) | {"pad_token_id": None}


SMOLLM3 = Family(
    title="SmolLM3",
    models="SmolLM3-3B",
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    defaults={
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    biases={"attention_bias": ("qkv_bias", "output_bias"), "mlp_bias": ("mlp_bias",)},
    windows="any",
    window_switch="use_sliding_window",
    theta=2_000_000.0,
    fields=_FIELDS,
    parse=_parse,
    format=_format,
)
