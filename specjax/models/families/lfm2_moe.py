"""LFM2 with experts (Liquid AI, 2025, arXiv 2511.23404): the first layers have one MLP."""

from typing import Any

from specjax.models.config import ModelConfig, MoE
from specjax.models.families import convolutions, experts
from specjax.models.families.base import Family
from specjax.models.families.convolutions import CONVOLUTION
from specjax.models.families.ropes import FULL
from specjax.models.fields import CheckpointError, Fields, JsonObject, flag, number, whole

_FIELDS = {
    **convolutions.FIELDS,
    **experts.FIELDS,
    "num_experts": whole(1, 100_000),
    "num_dense_layers": whole(0, 10_000, default=2),
    "use_expert_bias": flag(default=True),
    "norm_topk_prob": flag(default=True),
    "routed_scaling_factor": number(1e-6, 1e6, default=1.0),
}

_ADDED = 1e-6
"""The number that the model's code adds to the sum of a token's scores, regardless of the file."""


def _parse(fields: Fields) -> dict[str, Any]:
    if (kinds := fields["layer_types"]) is None:
        raise CheckpointError(f"layer_types is missing: name {FULL!r} or {CONVOLUTION!r} for each")
    moe = MoE(
        num_experts=fields["num_experts"],
        experts_per_token=fields["num_experts_per_tok"],
        intermediate_size=fields["moe_intermediate_size"],
        scoring="sigmoid",
        normalise=fields["norm_topk_prob"],
        added_to_sum=_ADDED,
        scale=float(fields["routed_scaling_factor"]),
        corrected=fields["use_expert_bias"],
        dense_layers=tuple(range(min(fields["num_dense_layers"], fields["num_hidden_layers"]))),
    )
    return convolutions.parse(fields, kinds) | {"moe": moe}


def _format(config: ModelConfig) -> JsonObject:
    raw = convolutions.format_fields(config)
    if (moe := config.moe) is None:
        return raw
    return (
        raw
        | experts.format_experts(moe)
        | {
            "num_experts": moe.num_experts,
            "num_dense_layers": len(moe.dense_layers),
            "use_expert_bias": moe.corrected,
            "routed_scaling_factor": moe.scale,
        }
    )


LFM2_MOE = Family(
    title="LFM2",
    models="",
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    defaults={
        **convolutions.DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_experts_per_tok": 4,
        "num_experts": 32,
    },
    switches={"qk_norm": True},
    kinds=(FULL, CONVOLUTION),
    theta=1_000_000.0,
    fields=_FIELDS,
    parse=_parse,
    format=_format,
    names={"mlp.gate.e_score_correction_bias": "mlp.expert_bias", **convolutions.NAMES},
    fused=convolutions.FUSED,
)
