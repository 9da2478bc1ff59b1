"""Llama 4 (Meta, 2025), text model: experts, and layers that see one chunk of the text.

Layers without RoPE see the whole text, and their queries grow with position.
"""

from dataclasses import replace
from typing import Any

from specjax.models.config import Layer, ModelConfig, MoE, Rope
from specjax.models.families.base import Family, Fused
from specjax.models.families.ropes import (
    FULL,
    INTERVAL_FIELDS,
    format_rope_layers,
    parse_rope_layers,
)
from specjax.models.fields import (
    CheckpointError,
    Field,
    Fields,
    FieldTable,
    JsonObject,
    flag,
    number,
    show,
    whole,
)

CHUNKED = "chunked_attention"
"""The kind of layers that see one chunk, as ``layer_types`` names it."""

_FIELDS: FieldTable = {
    "intermediate_size_mlp": whole(1, 10_000_000),
    "num_local_experts": whole(1, 100_000),
    "num_experts_per_tok": whole(1, 1, default=1),
    "moe_layers": Field(
        "a list of layers, counted from 0",
        lambda value: type(value) is list and all(type(layer) is int for layer in value),
        default=None,
    ),
    "interleave_moe_layer_step": whole(1, 10_000, default=1),
    "use_qk_norm": flag(default=None),
    "no_rope_layers": Field(
        "a list with 1 for each layer with RoPE and 0 for each other",
        lambda value: type(value) is list and all(item in (0, 1) for item in value),
        default=None,
    ),
    **INTERVAL_FIELDS,
    "attention_chunk_size": whole(1, 1_000_000_000, default=None),
    "attn_temperature_tuning": flag(default=True),
    "floor_scale": whole(1, 1_000_000_000, default=8192),
    "attn_scale": number(0, 100, default=0.1),
}


def _parse(fields: Fields) -> dict[str, Any]:
    count, every = fields["num_hidden_layers"], fields["interleave_moe_layer_step"]
    sparse = fields["moe_layers"]
    if sparse is None:
        sparse = range(every - 1, count, every)
    # As transformers does, take an empty list for none.
    turned = parse_rope_layers(fields, fields["no_rope_layers"] or None)
    moe = MoE(
        num_experts=fields["num_local_experts"],
        experts_per_token=1,
        intermediate_size=fields["intermediate_size"],
        shared_experts=1,
        scoring="sigmoid",
        scales_inputs=True,
        dense_layers=tuple(layer for layer in range(count) if layer not in sparse),
    )
    growth = float(fields["attn_scale"]) if fields["attn_temperature_tuning"] else 0.0
    unturned = Rope(
        kind="none",
        query_growth=growth,
        original_max_positions=fields["floor_scale"] if growth else None,
        growth_offset=1 if growth else 0,
    )
    layers = tuple(Layer() if has_rope else Layer(rope=unturned) for has_rope in turned)
    return {
        "moe": moe,
        "intermediate_size": fields["intermediate_size_mlp"],
        "layers": () if all(turned) else layers,
        **_chunks(fields, turned),
    }


def _chunks(fields: Fields, turned: list[bool]) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for the layers that see one chunk."""
    size, kinds = fields["attention_chunk_size"], fields["layer_types"]
    if kinds is None:
        kinds = [CHUNKED if has_rope and size is not None else FULL for has_rope in turned]
    chunked = tuple(i for i in range(fields["num_hidden_layers"]) if kinds[i] == CHUNKED)
    if chunked and size is None:
        raise CheckpointError(
            f"attention_chunk_size={show(size)}: must be a number of tokens: layer_types has"
            f" {CHUNKED!r}"
        )
    return {"sliding_window": size if chunked else None, "windowed_layers": chunked}


def _format(config: ModelConfig) -> JsonObject:
    count = config.num_layers
    ropes = [config.of_layer(layer).rope for layer in range(count)]
    growing = [rope for rope in ropes if rope.query_growth]
    kinds = [CHUNKED if layer in config.windowed_layers else FULL for layer in range(count)]
    raw: JsonObject = {
        "intermediate_size_mlp": config.intermediate_size,
        **format_rope_layers(config),
        "layer_types": kinds,
        "attention_chunk_size": config.sliding_window,
        "sliding_window": None,
        "attn_temperature_tuning": bool(growing),
    }
    if growing:
        raw |= {
            "attn_scale": growing[0].query_growth,
            "floor_scale": growing[0].original_max_positions,
        }
    if (moe := config.moe) is not None:
        raw |= {
            "intermediate_size": moe.intermediate_size,
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": 1,
            "moe_layers": [layer for layer in range(count) if config.is_sparse(layer)],
        }
    return raw


LLAMA4_TEXT = Family(
    title="Llama 4",
    models="",
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "intermediate_size_mlp": 16_384,
        "num_local_experts": 16,
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    switches={"rope_interleaved": True, "windows_aligned": True},
    biases={
        "attention_bias": ("qkv_bias", "output_bias"),
        "use_qk_norm": ("qk_unit_norm_in_rope_layers",),
    },
    kinds=(FULL, CHUNKED),
    windows="any",
    theta=500_000.0,
    fields=_FIELDS,
    parse=_parse,
    format=_format,
    names={
        "mlp.gate.": "feed_forward.router.",
        "mlp.shared_experts.": "feed_forward.shared_expert.",
        "mlp.": "feed_forward.",
    },
    fused=(
        Fused(
            "experts.gate_up_proj",
            ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
            transposed=False,
        ),
        Fused("experts.down_proj", ("experts.{}.down_proj.weight",), transposed=False),
    ),
)

LLAMA4 = replace(
    LLAMA4_TEXT,
    title="Llama 4",
    models="Scout and Maverick: the text model of each",
    nested="text_config",
    prefixes=("language_model.model.", "model.language_model."),
)
"""The text model inside a model with a vision tower, which is not read."""
