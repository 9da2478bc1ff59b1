"""GLM-4.5 and 4.6 (Zhipu, 2025, arXiv 2508.06471): DeepSeek-V3's experts, ordinary attention."""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import experts
from specjax.models.families.base import Family
from specjax.models.families.ropes import check_turned
from specjax.models.fields import Fields, JsonObject, flag


def _parse(fields: Fields) -> dict[str, Any]:
    check_turned(fields)
    return {"moe": experts.parse_grouped(fields, experts.first_dense(fields))}


def _format(config: ModelConfig) -> JsonObject:
    return (
        experts.format_grouped(config)
        | experts.format_first_dense(config)
        | {"partial_rotary_factor": config.rope.turned}
    )


GLM4_MOE = Family(
    title="GLM-4.5, 4.6, 4.7",
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7-Flash",
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    biases={"attention_bias": ("qkv_bias",), "use_qk_norm": ("qk_norm",)},
    turns_parts=True,
    fields={
        **experts.GROUPED_FIELDS,
        **experts.FIRST_DENSE_FIELDS,
        "use_qk_norm": flag(default=None),
    },
    aliases={"num_local_experts": "n_routed_experts"},
    parse=_parse,
    format=_format,
    modules_follow=True,
)
