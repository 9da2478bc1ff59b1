"""gpt-oss (OpenAI, 2025, arXiv 2508.10925): sinks, alternating windows, experts with clamping."""

from typing import Any

from specjax.models.config import ModelConfig, MoE
from specjax.models.families.base import Family, Fused
from specjax.models.fields import Fields, FieldTable, JsonObject, number, whole

_FIELDS: FieldTable = {
    "num_local_experts": whole(1, 100_000),
    "num_experts_per_tok": whole(1, 100_000),
    "swiglu_limit": number(1e-3, 1e6, default=7.0),
    "swiglu_alpha": number(1.702, 1.702, default=1.702),
}


def _parse(fields: Fields) -> dict[str, Any]:
    moe = MoE(
        num_experts=fields["num_local_experts"],
        experts_per_token=fields["num_experts_per_tok"],
        intermediate_size=fields["intermediate_size"],
        normalise=True,
        biased=True,
        limit=float(fields["swiglu_limit"]),
    )
    return {"moe": moe}


def _format(config: ModelConfig) -> JsonObject:
    if (moe := config.moe) is None:
        return {}
    return {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "intermediate_size": moe.intermediate_size,
        "swiglu_limit": moe.limit,
        "swiglu_alpha": 1.702,
    }


_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

GPT_OSS = Family(
    title="gpt-oss",
    models="20B and 120B, also in MXFP4",
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    defaults={
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "head_dim": 64,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _ROPE,
    },
    switches={"sinks": True},
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    windows="any",
    whole_every=2,
    theta=150_000.0,
    fields=_FIELDS,
    aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    parse=_parse,
    format=_format,
    names={"mlp.gate.": "mlp.router."},
    fused=(
        Fused(
            "experts.gate_up_proj",
            ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
            interleaved=True,
            transposed=False,
        ),
        Fused(
            "experts.gate_up_proj_bias",
            ("experts.{}.gate_proj.bias", "experts.{}.up_proj.bias"),
            interleaved=True,
        ),
        Fused("experts.down_proj", ("experts.{}.down_proj.weight",), transposed=False),
        Fused("experts.down_proj_bias", ("experts.{}.down_proj.bias",)),
    ),
)
