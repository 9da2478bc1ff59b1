"""MiniMax-M2 (MiniMax, 2025): experts with sigmoid scores, QK norms over heads, partial RoPE."""

from dataclasses import replace
from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import experts
from specjax.models.families.base import Family
from specjax.models.families.ropes import check_turned, parse_rope
from specjax.models.fields import (
    Field,
    Fields,
    FieldTable,
    JsonObject,
    always,
    text,
    whole,
)

_THETA = 5_000_000.0
_FIELDS: FieldTable = {
    **experts.ALONE_FIELDS,
    "rotary_dim": whole(2, 100_000, default=None),
    # transformers does not read these: the model has one value of each.
    "scoring_func": text("sigmoid", default="sigmoid"),
    "use_qk_norm": always(True),
    "qk_norm_type": text("per_layer", default="per_layer"),
    "use_routing_bias": always(True),
    "shared_intermediate_size": whole(0, 0, default=0),
    "attn_type_list": Field(
        "a list of 1 for each layer, which is attention of all tokens",
        lambda value: type(value) is list and all(item == 1 for item in value),
        default=None,
    ),
}


def _parse(fields: Fields) -> dict[str, Any]:
    share = fields["partial_rotary_factor"]
    if share is None and fields["rotary_dim"] is not None:
        head_dim = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
        share = fields["rotary_dim"] / head_dim
    fields = {**fields, "partial_rotary_factor": share}
    check_turned(fields)
    moe = replace(experts.parse_alone(fields), scoring="sigmoid", corrected=True)
    return {"moe": moe, "rope": parse_rope(fields, _THETA, turns_parts=True)}


def _format(config: ModelConfig) -> JsonObject:
    return experts.format_alone(config) | {"partial_rotary_factor": config.rope.turned}


MINIMAX_M2 = Family(
    title="MiniMax-M2",
    models="MiniMax-M2 to M2.7",
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    defaults={
        "max_position_embeddings": 196_608,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "bos_token_id": 200_034,
        "eos_token_id": 200_020,
    },
    switches={"qk_norm": True, "qk_norm_over_heads": True},
    theta=_THETA,
    turns_parts=True,
    fields=_FIELDS,
    aliases={"num_experts": "num_local_experts"},
    parse=_parse,
    format=_format,
    names={
        "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        **experts.ALONE_NAMES,
    },
)
