"""Granite 3 and 4 (IBM, 2024), dense: Llama with factors of embeddings, scores and logits.

A fourth factor scales what a layer adds to the residual stream.
"""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families.base import Family
from specjax.models.fields import Fields, FieldTable, JsonObject, number

_FACTORS = {  # Hugging Face's name -> ours
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_divisor",
}
_FIELDS: FieldTable = {name: number(1e-6, 1e6, default=1.0) for name in _FACTORS}


def _parse(fields: Fields) -> dict[str, Any]:
    return {ours: float(fields[name]) for name, ours in _FACTORS.items()}


def _format(config: ModelConfig) -> JsonObject:
    return {name: getattr(config, ours) for name, ours in _FACTORS.items()}


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    biases={"attention_bias": ("qkv_bias", "output_bias"), "mlp_bias": ("mlp_bias",)},
    fields=_FIELDS,
    parse=_parse,
    format=_format,
)
