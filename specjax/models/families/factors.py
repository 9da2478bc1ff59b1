"""The factors of Granite's embeddings, scores, residual stream and logits."""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.fields import Fields, FieldTable, JsonObject, number

_FACTORS = {  # Hugging Face's name -> ours
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_divisor",
}
FIELDS: FieldTable = {name: number(1e-6, 1e6, default=1.0) for name in _FACTORS}
"""The fields of config.json with the factors."""


def parse(fields: Fields) -> dict[str, Any]:
    """Return the fields of `ModelConfig` with the factors."""
    factors = {ours: float(fields[name]) for name, ours in _FACTORS.items()}
    return {**factors, "embedding_scale_rounded": False}


def format_fields(config: ModelConfig) -> JsonObject:
    """Return the fields of config.json that `parse` reads."""
    return {name: getattr(config, ours) for name, ours in _FACTORS.items()}
