"""Qwen3-Next (Qwen team, 2025): three linear-attention layers to one full layer, many experts."""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import delta_net, experts
from specjax.models.families.base import Family
from specjax.models.fields import Fields, JsonObject


def _parse(fields: Fields) -> dict[str, Any]:
    dense = experts.dense_layers(fields)
    if len(dense) < fields["num_hidden_layers"]:
        moe = experts.parse_shared(fields, dense_layers=dense)
    else:
        moe = None
    return delta_net.parse(fields, by_key_head=True) | {"moe": moe}


def _format(config: ModelConfig) -> JsonObject:
    dense = config.moe.dense_layers if config.moe is not None else range(config.num_layers)
    beside = {"decoder_sparse_step": 1, "mlp_only_layers": list(dense)}
    return delta_net.format_fields(config) | experts.format_shared(config) | beside


QWEN3_NEXT = Family(
    title="Qwen3-Next",
    models="Qwen3-Next-80B-A3B: a hybrid, with experts",
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    defaults={
        **delta_net.DEFAULTS,
        **experts.SHARED_DEFAULTS,
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 10,
        "num_experts": 512,
    },
    **delta_net.ALIKE,
    fields={**delta_net.FIELDS, **experts.SHARED_FIELDS, **experts.DENSE_FIELDS},
    parse=_parse,
    format=_format,
    names=experts.SHARED_NAMES,
    fused=(delta_net.CONVOLUTION,),
    fused_where_stored=experts.FUSED,
)
