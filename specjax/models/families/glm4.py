"""GLM-4 (Zhipu, 2025, the models of April), dense: four norms a layer, and pairs of neighbours."""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families.base import Family, Fused
from specjax.models.families.ropes import check_turned
from specjax.models.fields import Fields, JsonObject


def _parse(fields: Fields) -> dict[str, Any]:
    check_turned(fields)
    return {}


def _format(config: ModelConfig) -> JsonObject:
    # transformers' default padding id does not exist in smaller vocabularies.
    return {"partial_rotary_factor": config.rope.turned, "pad_token_id": None}


GLM4 = Family(
    title="GLM-4",
    models="GLM-4-9B-0414, GLM-4-32B-0414",
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "eos_token_id": [151_329, 151_336, 151_338],
    },
    switches={"norms": "both", "rope_interleaved": True},
    biases={"attention_bias": ("qkv_bias",)},
    turns_parts=True,
    parse=_parse,
    format=_format,
    names={
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
    fused=(Fused("gate_up_proj.weight", ("gate_proj.weight", "up_proj.weight")),),
)
