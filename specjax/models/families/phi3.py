"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama with fused projections, partial RoPE."""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families.base import Family, Fused
from specjax.models.families.ropes import check_turned, said_of_rope
from specjax.models.fields import CheckpointError, Fields, FieldTable, JsonObject, number

_FIELDS: FieldTable = {"partial_rotary_factor": number(0.01, 1, default=None)}


def _parse(fields: Fields) -> dict[str, Any]:
    _, rope_fields = said_of_rope(fields)
    kind = rope_fields.get("rope_type") or rope_fields.get("type") or "default"
    if kind in ("longrope", "su", "yarn"):  # Phi-3's "yarn" means longrope
        raise CheckpointError(
            f"rope type {kind!r} of Phi-3 is not supported: its factors depend on the length of the"
            " whole text, and would change keys that are cached already: give a model without it,"
            " such as phi-4 or Phi-3-mini-4k-instruct"
        )
    if kind != "default":
        raise CheckpointError(
            "rope_scaling: must be left out: Phi-3 supports only longrope there, which is not"
            " supported here"
        )
    check_turned(fields)
    return {}


def _format(config: ModelConfig) -> JsonObject:
    # transformers' default padding id does not exist in smaller vocabularies.
    return {"partial_rotary_factor": config.rope.turned, "pad_token_id": None}


PHI3 = Family(
    title="Phi-3, Phi-4",
    models=(
        "Phi-4, Phi-3 with 4K; not with LongRoPE, whose factors depend on the length of "
        "the whole text"
    ),
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32_000,
    },
    windows="all",
    turns_parts=True,
    fields=_FIELDS,
    parse=_parse,
    format=_format,
    fused=(
        Fused("qkv_proj.weight", ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
        Fused("gate_up_proj.weight", ("gate_proj.weight", "up_proj.weight")),
    ),
)
