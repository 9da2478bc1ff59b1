"""SmolLM3 (Hugging Face, 2025): Llama, every fourth layer without RoPE (NoPE, arXiv 2501.18795)."""

from typing import Any

from specjax.models.config import Layer, ModelConfig, Rope
from specjax.models.families.base import Family
from specjax.models.fields import CheckpointError, Field, Fields, FieldTable, JsonObject, whole

_FIELDS: FieldTable = {
    "no_rope_layers": Field(
        "a list with 1 for each layer with RoPE and 0 for each other",
        lambda value: (
            type(value) is list and all(type(item) is int and item in (0, 1) for item in value)
        ),
        default=None,
    ),
    "no_rope_layer_interval": whole(1, 10_000, default=4),
}
_NO_POSITIONS = Layer(rope=Rope(kind="none"))


def _parse(fields: Fields) -> dict[str, Any]:
    count = fields["num_hidden_layers"]
    every = fields["no_rope_layer_interval"]
    turned = fields["no_rope_layers"]
    if turned is None:
        turned = [(layer + 1) % every for layer in range(count)]
    if len(turned) < count:
        raise CheckpointError(
            f"no_rope_layers names {len(turned)} layers of num_hidden_layers={count}: name each"
        )
    windows: dict[str, Any] = {}
    # Without layer_types the layers without RoPE have a window, if any layers do.
    if fields["layer_types"] is None:
        if _has_windows(fields):
            windowed = tuple(layer for layer in range(count) if not turned[layer])
        else:
            windowed = ()
        windows = {
            "sliding_window": fields["sliding_window"] if windowed else None,
            "windowed_layers": windowed,
        }
    layers = tuple(Layer() if has_rope else _NO_POSITIONS for has_rope in turned[:count])
    return windows | {"layers": () if all(turned[:count]) else layers}


def _has_windows(fields: Fields) -> bool:
    return bool(fields["use_sliding_window"]) and fields["sliding_window"] is not None


def _format(config: ModelConfig) -> JsonObject:
    turned = [int(config.of_layer(i).rope.kind != "none") for i in range(config.num_layers)]
    # transformers' default padding id does not exist in smaller vocabularies.
    return {"no_rope_layers": turned, "pad_token_id": None}


SMOLLM3 = Family(
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
