"""Gemma 3 (arXiv 2503.19786), text model: Gemma 2 with QK norms and one full layer in six."""

from dataclasses import replace
from typing import Any

from specjax.models.config import Layer, ModelConfig, Rope
from specjax.models.families import gemma
from specjax.models.families.base import Family
from specjax.models.families.ropes import (
    FULL,
    WINDOWED,
    format_by_kind,
    layers_by_kind,
    parse_by_kind,
)
from specjax.models.fields import Fields, FieldTable, JsonObject, number, whole

_ROPES = {FULL: Rope(theta=1e6), WINDOWED: Rope(theta=1e4)}
_FIELDS: FieldTable = {
    **gemma.FIELDS,
    "rope_local_base_freq": number(2, 1e12, default=None),
    "sliding_window_pattern": whole(1, 10_000, default=None),
}


def _parse(fields: Fields) -> dict[str, Any]:
    ropes = parse_by_kind(fields, _ROPES)
    layers = layers_by_kind(fields, Layer(rope=ropes[FULL]))
    # transformers' configuration has attn_logit_softcapping, but the model never applies it.
    return gemma.parse(fields) | {"score_cap": None, "rope": ropes[WINDOWED], "layers": layers}


def _format(config: ModelConfig) -> JsonObject:
    return gemma.format_fields(config) | format_by_kind(config)


GEMMA3_TEXT = Family(
    title="Gemma 3",
    models="",
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults=gemma.DEFAULTS
    | {"vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window": 4096},
    switches=gemma.SWITCHES | {"qk_norm": True},
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    windows="any",
    whole_every=6,
    ropes_by_kind=True,
    fields=_FIELDS,
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    parse=_parse,
    format=_format,
)

GEMMA3 = replace(
    GEMMA3_TEXT,
    title="Gemma 3",
    models="1B to 27B; the text model of multimodal ones",
    nested="text_config",
    prefixes=("model.language_model.", "language_model.model.", "language_model."),
)
"""The text model inside a model with a vision tower, which is not read."""
