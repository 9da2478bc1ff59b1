"""Qwen3.5 and 3.6 (Qwen team, 2026), text model: three linear-attention layers to one full layer.

The models are dense or have experts.
"""

from dataclasses import replace
from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import delta_net, experts
from specjax.models.families.base import PREFIX, Family, Fused
from specjax.models.fields import Fields, JsonObject

_NESTED = "model.language_model."


def _parse(fields: Fields) -> dict[str, Any]:
    return delta_net.parse(fields, by_key_head=False)


def _parse_sparse(fields: Fields) -> dict[str, Any]:
    return _parse(fields) | {"moe": experts.parse_shared(fields)}


def _format_sparse(config: ModelConfig) -> JsonObject:
    return delta_net.format_fields(config) | experts.format_shared(config)


QWEN3_5_TEXT = Family(
    title="Qwen3.5, Qwen3.6",
    models="",
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    defaults={
        **delta_net.DEFAULTS,
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    **delta_net.ALIKE,
    fields=delta_net.FIELDS,
    parse=_parse,
    format=delta_net.format_fields,
    prefixes=(PREFIX, _NESTED),
    fused=(
        delta_net.CONVOLUTION,
        Fused(
            "linear_attn.in_proj_qkv.weight",
            tuple(f"linear_attn.{name}_proj.weight" for name in "qkv"),
        ),
    ),
)

QWEN3_5 = replace(
    QWEN3_5_TEXT,
    title="Qwen3.5, Qwen3.6",
    models="4B, 9B, 27B, 35B-A3B: hybrids; the text model of multimodal ones",
    nested="text_config",
    prefixes=(_NESTED,),
)
"""The text model inside a model with a vision tower, which is not read."""

QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    title="Qwen3.5, Qwen3.6",
    models="",
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    defaults={
        **QWEN3_5_TEXT.defaults,
        **experts.SHARED_DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    fields={**delta_net.FIELDS, **experts.SHARED_FIELDS},
    parse=_parse_sparse,
    format=_format_sparse,
    names=experts.SHARED_NAMES,
    fused_where_stored=experts.FUSED,
)

QWEN3_5_MOE = replace(
    QWEN3_5_MOE_TEXT, title="Qwen3.5, Qwen3.6", models="", nested="text_config", prefixes=(_NESTED,)
)
