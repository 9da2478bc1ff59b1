"""What config.json says of latent attention and of experts, in the families that have them."""

from collections.abc import Mapping
from typing import Any

from specjax.errors import InputError
from specjax.models.config import MLA, ModelConfig, MoE
from specjax.models.fields import CheckpointError, Field, check_fields, flag, number, text, whole

MIXTURES = ("qwen3_moe", "deepseek_v3")
"""The model types with experts."""

_LATENT: dict[str, Field] = {
    "kv_lora_rank": whole(1, 1_000_000),
    "q_lora_rank": whole(1, 1_000_000, default=None),
    "qk_nope_head_dim": whole(1, 100_000),
    "qk_rope_head_dim": Field(
        "an even number from 2 to 100,000", lambda v: type(v) is int and 2 <= v <= 100_000 and v % 2 == 0
    ),
    "v_head_dim": whole(1, 100_000),
    "rope_interleave": flag(default=True),
}
_EXPERTS: dict[str, Field] = {
    "num_experts_per_tok": whole(1, 100_000),
    "moe_intermediate_size": whole(1, 10_000_000),
}
_DEEPSEEK: dict[str, Field] = {
    **_EXPERTS,
    "n_routed_experts": whole(1, 100_000),
    "n_shared_experts": whole(0, 1000, default=None),
    "scoring_func": text("sigmoid", default="sigmoid"),
    "topk_method": text("noaux_tc", default="noaux_tc"),
    "norm_topk_prob": flag(default=True),
    "routed_scaling_factor": number(1e-6, 1e6),  # no default: no tensor would show that it is wrong, and so with the next two
    "n_group": whole(1, 100_000),
    "topk_group": whole(1, 100_000),
    "first_k_dense_replace": whole(0, 10_000, default=0),
    "moe_layer_freq": whole(1, 1, default=1),
}
_QWEN: dict[str, Field] = {
    **_EXPERTS,
    "num_experts": whole(1, 100_000),
    "norm_topk_prob": flag(default=False),
    "decoder_sparse_step": whole(1, 10_000, default=1),
    "mlp_only_layers": Field(
        "a list of layers, counted from 0",
        lambda value: type(value) is list and all(type(layer) is int and 0 <= layer < 10_000 for layer in value),
        default=None,
    ),
}


def parse_latent_attention(raw: Mapping[str, Any], model_type: str, source: str) -> MLA | None:
    """The latent attention of a model of that type; None where it has none. Raises `CheckpointError`."""
    if model_type != "deepseek_v3":
        return None
    fields = check_fields(raw, _LATENT, source)
    return MLA(
        kv_lora_rank=fields["kv_lora_rank"],
        q_lora_rank=fields["q_lora_rank"],
        qk_nope_head_dim=fields["qk_nope_head_dim"],
        qk_rope_head_dim=fields["qk_rope_head_dim"],
        v_head_dim=fields["v_head_dim"],
        rope_interleaved=fields["rope_interleave"],
    )


def parse_experts(raw: Mapping[str, Any], model_type: str, layers: int, source: str) -> MoE | None:
    """The experts of a model of that type with so many ``layers``; None where it has none. Raises `CheckpointError`."""
    if model_type not in MIXTURES:
        return None
    parse = _parse_qwen if model_type == "qwen3_moe" else _parse_deepseek
    try:
        return parse(raw, layers, source)
    except CheckpointError:
        raise
    except InputError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _parse_deepseek(raw: Mapping[str, Any], layers: int, source: str) -> MoE:
    fields = check_fields(raw, _DEEPSEEK, source)
    return MoE(
        num_experts=fields["n_routed_experts"],
        experts_per_token=fields["num_experts_per_tok"],
        intermediate_size=fields["moe_intermediate_size"],
        shared_experts=fields["n_shared_experts"] or 0,
        scoring="sigmoid",
        normalise=fields["norm_topk_prob"],
        scale=float(fields["routed_scaling_factor"]),
        groups=fields["n_group"],
        groups_kept=fields["topk_group"],
        corrected=True,
        dense_layers=tuple(range(min(fields["first_k_dense_replace"], layers))),
    )


def _parse_qwen(raw: Mapping[str, Any], layers: int, source: str) -> MoE:
    if "num_experts" not in raw and "num_local_experts" in raw:  # its name since transformers 5
        raw = {**raw, "num_experts": raw["num_local_experts"]}
    fields = check_fields(raw, _QWEN, source)
    dense, step = fields["mlp_only_layers"] or (), fields["decoder_sparse_step"]
    return MoE(
        num_experts=fields["num_experts"],
        experts_per_token=fields["num_experts_per_tok"],
        intermediate_size=fields["moe_intermediate_size"],
        normalise=fields["norm_topk_prob"],
        dense_layers=tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step),
    )


def format_parts(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that say what ``config`` has of both; what is written is read back to the same."""
    raw: dict[str, Any] = {}
    if (mla := config.mla) is not None:
        raw |= {
            "kv_lora_rank": mla.kv_lora_rank,
            "q_lora_rank": mla.q_lora_rank,
            "qk_nope_head_dim": mla.qk_nope_head_dim,
            "qk_rope_head_dim": mla.qk_rope_head_dim,
            "v_head_dim": mla.v_head_dim,
            "rope_interleave": mla.rope_interleaved,
        }
    if (moe := config.moe) is not None:
        raw |= {
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.intermediate_size,
            "norm_topk_prob": moe.normalise,
        }
        raw |= _format_qwen(moe) if config.model_type == "qwen3_moe" else _format_deepseek(moe)
    return raw


def _format_qwen(moe: MoE) -> dict[str, Any]:
    return {"num_experts": moe.num_experts, "decoder_sparse_step": 1, "mlp_only_layers": list(moe.dense_layers)}


def _format_deepseek(moe: MoE) -> dict[str, Any]:
    return {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_experts,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": moe.scale,
        "n_group": moe.groups,
        "topk_group": moe.groups_kept,
        "first_k_dense_replace": len(moe.dense_layers),
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,  # such modules are no part of the target, and are not written with it
    }
