"""ERNIE 4.5 (Baidu, 2025), dense and with experts: rotated pairs are neighbours."""

from dataclasses import replace
from typing import Any

from specjax.models.config import ModelConfig, MoE
from specjax.models.families.base import Family
from specjax.models.fields import Fields, JsonObject, always, flag, number, whole

ERNIE4_5 = Family(
    title="ERNIE 4.5",
    models="0.3B, 21B-A3B, 300B-A47B",
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    switches={"rope_interleaved": True},
    biases={"use_bias": ("qkv_bias", "output_bias", "mlp_bias")},
    theta=500_000.0,
    fields={"use_bias": flag(default=None)},
)


def _parse(fields: Fields) -> dict[str, Any]:
    count = fields["num_hidden_layers"]
    start, end = fields["moe_layer_start_index"], fields["moe_layer_end_index"]
    sparse = {
        layer
        for layer in range(start, count if end == -1 else min(end + 1, count))
        if (layer + 1) % fields["moe_layer_interval"] == 0
    }
    moe = MoE(
        num_experts=fields["moe_num_experts"],
        experts_per_token=fields["moe_k"],
        intermediate_size=fields["moe_intermediate_size"],
        shared_experts=fields["moe_num_shared_experts"],
        normalise=True,
        corrected=True,
        dense_layers=tuple(layer for layer in range(count) if layer not in sparse),
    )
    return {"moe": moe}


def _format(config: ModelConfig) -> JsonObject:
    if (moe := config.moe) is None:
        return {}
    sparse = [layer for layer in range(config.num_layers) if config.is_sparse(layer)]
    return {
        "moe_num_experts": moe.num_experts,
        "moe_k": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "moe_num_shared_experts": moe.shared_experts,
        "moe_layer_start_index": sparse[0] if sparse else config.num_layers,
        "moe_layer_end_index": sparse[-1] if sparse else config.num_layers,
        "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
        # transformers' default padding id does not exist in smaller vocabularies.
        "pad_token_id": None,
    }


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    title="ERNIE 4.5",
    models="",
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
    },
    biases={},
    fields={
        "use_bias": always(False),  # a bias of the head as well
        "moe_intermediate_size": whole(1, 10_000_000),
        "moe_k": whole(1, 100_000),
        "moe_num_experts": whole(1, 100_000),
        "moe_num_shared_experts": whole(0, 1000),
        "moe_layer_start_index": whole(0, 10_000, default=1),
        "moe_layer_end_index": whole(-1, 10_000, default=-1),
        "moe_layer_interval": whole(1, 10_000, default=1),
        "moe_norm_min": number(0, 1e-6, default=1e-12),  # below every sum of weights
    },
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    parse=_parse,
    format=_format,
    names={"mlp.gate.e_score": "mlp.moe_statics.e_score"},
    unit_axes={"e_score_correction_bias": 1},
    left_over=lambda _: ("model.mtp*",),
)
"""ERNIE 4.5 with experts."""
