"""GLM-4.7-Flash (Zhipu, 2026): DeepSeek-V3 in small, whose layers say whether they have experts."""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import experts, latent
from specjax.models.families.base import Family
from specjax.models.fields import CheckpointError, Fields, FieldTable, JsonObject, whole

_FIELDS: FieldTable = {
    **latent.FIELDS,
    **experts.GROUPED_FIELDS,
    **experts.KIND_FIELDS,
    "first_k_dense_replace": whole(0, 10_000, default=None),
}


def _parse(fields: Fields) -> dict[str, Any]:
    mla, dense = latent.parse(fields), experts.dense_by_kind(fields)
    first = fields["first_k_dense_replace"]
    if first is not None and dense != tuple(range(first)):
        raise CheckpointError(
            f"first_k_dense_replace={first}: transformers does not read it in this model_type, and"
            f" computes with dense layers {list(dense)}: write mlp_layer_types"
        )
    moe = experts.parse_grouped(fields, dense)
    return {"mla": mla, "moe": moe, "head_dim": mla.qk_rope_head_dim}


def _format(config: ModelConfig) -> JsonObject:
    return (
        latent.format_fields(config) | experts.format_grouped(config) | experts.format_kinds(config)
    )


GLM4_MOE_LITE = Family(
    title="GLM-4.5, 4.6, 4.7",
    models="",
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    defaults={
        "max_position_embeddings": 202_752,
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    fields=_FIELDS,
    aliases={"num_local_experts": "n_routed_experts"},
    parse=_parse,
    format=_format,
    modules_follow=True,
)
