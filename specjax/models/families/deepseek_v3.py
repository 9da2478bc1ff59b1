"""DeepSeek-V3 and R1 (arXiv 2412.19437): latent attention, experts in groups, and MTP modules."""

from typing import Any

from specjax.models.config import MLA, ModelConfig, MoE
from specjax.models.families import experts
from specjax.models.families.base import Family
from specjax.models.fields import Field, Fields, FieldTable, JsonObject, flag, number, text, whole

_FIELDS: FieldTable = {
    "kv_lora_rank": whole(1, 1_000_000),
    "q_lora_rank": whole(1, 1_000_000, default=None),
    "qk_nope_head_dim": whole(1, 100_000),
    "qk_rope_head_dim": Field(
        "an even number from 2 to 100,000",
        lambda v: type(v) is int and 2 <= v <= 100_000 and v % 2 == 0,
    ),
    "v_head_dim": whole(1, 100_000),
    "rope_interleave": flag(default=True),
    **experts.FIELDS,
    "n_routed_experts": whole(1, 100_000),
    "n_shared_experts": whole(0, 1000, default=None),
    "scoring_func": text("sigmoid", default="sigmoid"),
    "topk_method": text("noaux_tc", default="noaux_tc"),
    "norm_topk_prob": flag(default=True),
    # These three have no default: no tensor would show that it is wrong.
    "routed_scaling_factor": number(1e-6, 1e6),
    "n_group": whole(1, 100_000),
    "topk_group": whole(1, 100_000),
    "first_k_dense_replace": whole(0, 10_000, default=0),
    "moe_layer_freq": whole(1, 1, default=1),
}


def _parse(fields: Fields) -> dict[str, Any]:
    mla = MLA(
        kv_lora_rank=fields["kv_lora_rank"],
        q_lora_rank=fields["q_lora_rank"],
        qk_nope_head_dim=fields["qk_nope_head_dim"],
        qk_rope_head_dim=fields["qk_rope_head_dim"],
        v_head_dim=fields["v_head_dim"],
        rope_interleaved=fields["rope_interleave"],
    )
    moe = MoE(
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
        dense_layers=tuple(
            range(min(fields["first_k_dense_replace"], fields["num_hidden_layers"]))
        ),
    )
    return {"mla": mla, "moe": moe, "head_dim": mla.qk_rope_head_dim}


def _format(config: ModelConfig) -> JsonObject:
    raw: JsonObject = {}
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
        raw |= experts.format_experts(moe)
        raw |= {
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": moe.shared_experts,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": moe.scale,
            "n_group": moe.groups,
            "topk_group": moe.groups_kept,
            "first_k_dense_replace": len(moe.dense_layers),
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,  # MTP modules are not part of the target, and not saved
        }
    return raw


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={"max_position_embeddings": 4096},
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    fields=_FIELDS,
    parse=_parse,
    format=_format,
    modules_follow=True,
)
