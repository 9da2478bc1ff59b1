"""Ministral 3 (Mistral, 2025): Mistral with YaRN; queries grow with position, as in Llama 4."""

from dataclasses import replace
from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families.base import Family
from specjax.models.families.ropes import format_rope, parse_rope, said_of_rope
from specjax.models.fields import CheckpointError, Fields, JsonObject, number, show, text

_BETA = "llama_4_scaling_beta"
_THETA = 1_000_000.0
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": _THETA,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}
_GROWTH = number(0, 100)


def _parse(fields: Fields) -> dict[str, Any]:
    _, rope_fields = said_of_rope(fields)
    rope, beta = parse_rope(fields, _THETA), rope_fields.get(_BETA, 0.0)
    if not _GROWTH.accepts(beta):
        raise CheckpointError(f"rope_parameters.{_BETA}={show(beta)}: must be {_GROWTH.expected}")
    if beta and rope.original_max_positions is None:
        raise CheckpointError(
            f"rope_parameters.{_BETA}={beta}: it needs original_max_position_embeddings: give rope"
            " type yarn"
        )
    return {"rope": replace(rope, query_growth=float(beta))}


def _format(config: ModelConfig) -> JsonObject:
    rope = format_rope(config.rope) | {_BETA: config.rope.query_growth}
    return {"rope_scaling": None, "rope_parameters": rope}


MINISTRAL3 = Family(
    title="Ministral 3",
    models=(
        "3B, 8B, 14B and Devstral 2; the text model of multimodal ones, also of Mistral "
        "Small 3.1 and 3.2, whose text model is a Mistral"
    ),
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    defaults={
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _ROPE,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    windows="all",
    theta=_THETA,
    parse=_parse,
    format=_format,
)

MISTRAL3 = replace(
    MINISTRAL3,
    nested="text_config",
    prefixes=("model.language_model.", "language_model.model."),
    fields={"model_type": text("ministral3", "mistral")},
)
"""The text model inside a model with a vision tower, which is not read."""
