"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with experts in all layers."""

from typing import Any

from specjax.models.families import experts
from specjax.models.families.base import Family
from specjax.models.fields import Fields


def _parse(fields: Fields) -> dict[str, Any]:
    return {"moe": experts.parse_alone(fields)}


MIXTRAL = Family(
    title="Mixtral",
    models="Mixtral 8x7B and 8x22B",
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    windows="all",
    theta=1_000_000.0,
    fields=experts.ALONE_FIELDS,
    aliases={"num_experts": "num_local_experts"},
    parse=_parse,
    format=experts.format_alone,
    names=experts.ALONE_NAMES,
)
