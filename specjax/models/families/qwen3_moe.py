"""Qwen3-MoE (Yang et al. 2025, arXiv 2505.09388): Qwen3 with experts in all layers, or in some."""

from dataclasses import replace
from typing import Any

from specjax.models.config import ModelConfig, MoE
from specjax.models.families import experts
from specjax.models.families.base import Family
from specjax.models.fields import Fields, FieldTable, JsonObject, flag, text, whole

_FIELDS: FieldTable = {
    **experts.FIELDS,
    "num_experts": whole(1, 100_000),
    "norm_topk_prob": flag(default=False),
    **experts.DENSE_FIELDS,
}


def _parse(fields: Fields) -> dict[str, Any]:
    moe = MoE(
        num_experts=fields["num_experts"],
        experts_per_token=fields["num_experts_per_tok"],
        intermediate_size=fields["moe_intermediate_size"],
        normalise=fields["norm_topk_prob"],
        dense_layers=experts.dense_layers(fields),
    )
    return {"moe": moe}


def _format(config: ModelConfig) -> JsonObject:
    if (moe := config.moe) is None:
        return {}
    sizes = {
        "num_experts": moe.num_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(moe.dense_layers),
    }
    return experts.format_experts(moe) | sizes


QWEN3_MOE = Family(
    title="Qwen3-MoE",
    models="Qwen3-30B-A3B",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults={"max_position_embeddings": 32_768, "sliding_window": 4096},
    switches={"qk_norm": True},
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    windows="all",
    window_switch="use_sliding_window",
    fields=_FIELDS,
    aliases={"num_local_experts": "num_experts"},  # its name since transformers 5
    parse=_parse,
    format=_format,
)


def _parse_seeing(fields: Fields) -> dict[str, Any]:
    return _parse({**fields, "norm_topk_prob": True})  # transformers does not read this field


QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    title="Qwen3-VL",
    models="",
    defaults={
        "max_position_embeddings": 128_000,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
    },
    windows="none",
    window_switch=None,
    theta=500_000.0,
    fields={
        **_FIELDS,
        "model_type": text("qwen3_vl_moe_text", default="qwen3_vl_moe_text"),
    },
    parse=_parse_seeing,
    nested="text_config",
    prefixes=("model.language_model.",),
    fused_where_stored=(*experts.FUSED, *experts.fused(transposed=False)),
)
"""The text model of Qwen3-VL with experts, whose vision tower is not read."""
