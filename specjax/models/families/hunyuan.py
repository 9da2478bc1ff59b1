"""Hunyuan V1 (Tencent, 2025), dense and with experts: queries and keys are normed after RoPE."""

from dataclasses import replace
from typing import Any

from specjax.models.config import ModelConfig, MoE
from specjax.models.families import experts
from specjax.models.families.base import Family
from specjax.models.families.ropes import parse_rope, said_of_rope
from specjax.models.fields import (
    CheckpointError,
    Field,
    Fields,
    FieldTable,
    JsonObject,
    always,
    number,
    show,
    whole,
)

_ALPHA = number(1e-3, 1e9, default=None)


def _parse(fields: Fields) -> dict[str, Any]:
    """Return the RoPE: with a fixed ``alpha``, type "dynamic" is a larger theta for all lengths."""
    place, raw = said_of_rope(fields)
    rope, alpha = parse_rope(fields), raw.get("alpha")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if not alpha or kind != "dynamic":
        return {"rope": rope}
    if not _ALPHA.accepts(alpha):
        raise CheckpointError(f"{place}.alpha={show(alpha)}: must be {_ALPHA.expected}")
    size = fields["head_dim"]
    if size is None:
        raise CheckpointError(f"head_dim is missing: {place}.alpha={alpha} needs it")
    if size < 4:
        raise CheckpointError(f"head_dim={size}: must be at least 4 with {place}.alpha={alpha}")
    return {"rope": replace(rope, theta=rope.theta * alpha ** (size / (size - 2)))}


HUNYUAN_V1_DENSE = Family(
    title="Hunyuan",
    models="0.5B to 7B, A13B",
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    switches={"qk_norm": True, "qk_norm_after_rope": True},
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    fields={"use_qk_norm": always(True)},
    parse=_parse,
    names={"q_norm.": "query_layernorm.", "k_norm.": "key_layernorm."},
)


def _same_in_all_layers(low: int, high: int, default: Any) -> Field:
    """Return a field for a whole number, or a list of it for each layer."""
    size = whole(low, high)

    def accepts(value: Any) -> bool:
        if type(value) is list:
            return bool(value) and size.accepts(value[0]) and value == value[:1] * len(value)
        return size.accepts(value)

    return Field(f"{size.expected}, the same in all layers", accepts, default)


_SPARSE_FIELDS: FieldTable = {
    "use_qk_norm": always(True),
    "num_experts": whole(1, 100_000),
    "moe_topk": _same_in_all_layers(1, 100_000, default=1),
    # transformers reads neither: experts and the shared MLP are of intermediate_size.
    "moe_intermediate_size": _same_in_all_layers(1, 10_000_000, default=None),
    "num_shared_expert": _same_in_all_layers(1, 1, default=1),
}


def _number(value: int | list[int]) -> int:
    return value[0] if isinstance(value, list) else value


def _parse_sparse(fields: Fields) -> dict[str, Any]:
    size = fields["intermediate_size"]
    if (
        fields["moe_intermediate_size"] is not None
        and _number(fields["moe_intermediate_size"]) != size
    ):
        raise CheckpointError(
            f"moe_intermediate_size={show(fields['moe_intermediate_size'])}: must be"
            f" intermediate_size={size}: transformers reads that alone in this model_type"
        )
    moe = MoE(
        num_experts=fields["num_experts"],
        experts_per_token=_number(fields["moe_topk"]),
        intermediate_size=size,
        normalise=True,
        shared_experts=1,
    )
    return _parse(fields) | {"moe": moe}


def _format_sparse(config: ModelConfig) -> JsonObject:
    if (moe := config.moe) is None:
        return {}
    return {
        "num_experts": moe.num_experts,
        "moe_topk": moe.experts_per_token,
        "intermediate_size": moe.intermediate_size,
    }


HUNYUAN_V1_MOE = replace(
    HUNYUAN_V1_DENSE,
    title="Hunyuan",
    models="",
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    defaults={**HUNYUAN_V1_DENSE.defaults, "num_experts": 1},
    fields=_SPARSE_FIELDS,
    aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
    parse=_parse_sparse,
    format=_format_sparse,
    names={
        **HUNYUAN_V1_DENSE.names,
        "mlp.gate.": "mlp.gate.wg.",
        "mlp.shared_experts.": "mlp.shared_mlp.",
    },
    fused_where_stored=experts.FUSED,
)
