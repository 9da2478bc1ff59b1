"""DeepSeek-V3 and R1 (arXiv 2412.19437): latent attention, experts in groups, and MTP modules.

Kimi K2 (arXiv 2507.20534) has the same architecture.
"""

from dataclasses import replace
from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import experts, latent
from specjax.models.families.base import Family
from specjax.models.fields import Fields, FieldTable, JsonObject, text

_FIELDS: FieldTable = {
    **latent.FIELDS,
    **experts.GROUPED_FIELDS,
    **experts.FIRST_DENSE_FIELDS,
}


def _parse(fields: Fields) -> dict[str, Any]:
    mla = latent.parse(fields)
    moe = experts.parse_grouped(fields, experts.first_dense(fields))
    return {"mla": mla, "moe": moe, "head_dim": mla.qk_rope_head_dim}


def _format(config: ModelConfig) -> JsonObject:
    raw = latent.format_fields(config)
    if config.moe is not None:
        raw |= experts.format_grouped(config) | experts.format_first_dense(config)
    return raw


DEEPSEEK_V3 = Family(
    title="DeepSeek-V3",
    models=(
        "DeepSeek-V3 and R1, with latent attention, experts, and a module for "
        "multi-token prediction"
    ),
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={"max_position_embeddings": 4096},
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    fields=_FIELDS,
    parse=_parse,
    format=_format,
    modules_follow=True,
)

KIMI_K25 = replace(
    DEEPSEEK_V3,
    title="Kimi K2",
    models="Kimi K2, and the text model of K2.5: the architecture of DeepSeek-V3",
    defaults={**DEEPSEEK_V3.defaults, "tie_word_embeddings": True},
    nested="text_config",
    prefixes=("model.language_model.", "language_model.model."),
    fields=_FIELDS | {"model_type": text("deepseek_v3", "kimi_k2", default="deepseek_v3")},
)
"""The text model of Kimi K2.5 and later, whose vision tower is not read."""
