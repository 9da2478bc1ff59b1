"""The common parts of families with experts."""

from specjax.errors import InputError
from specjax.models.config import ModelConfig, MoE
from specjax.models.families.base import Fused
from specjax.models.fields import Field, Fields, FieldTable, JsonObject, flag, whole

FIELDS: FieldTable = {
    "num_experts_per_tok": whole(1, 100_000),
    "moe_intermediate_size": whole(1, 10_000_000),
}
"""The fields of config.json that all families with experts have."""


def format_experts(moe: MoE) -> JsonObject:
    """Return the fields of config.json that all families with experts write."""
    return {
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.normalise,
    }


DENSE_FIELDS: FieldTable = {
    "decoder_sparse_step": whole(1, 10_000, default=1),
    "mlp_only_layers": Field(
        "a list of layers, counted from 0",
        lambda value: (
            type(value) is list
            and all(type(layer) is int and 0 <= layer < 10_000 for layer in value)
        ),
        default=None,
    ),
}
"""The fields that say which layers are dense, in families where some may be."""


def dense_layers(fields: Fields) -> tuple[int, ...]:
    """Return the layers without experts, from `DENSE_FIELDS`."""
    dense, step = fields["mlp_only_layers"] or (), fields["decoder_sparse_step"]
    return tuple(
        layer
        for layer in range(fields["num_hidden_layers"])
        if layer in dense or (layer + 1) % step
    )


# --- Qwen's experts, and one shared expert with a gate -------------------------------------------

SHARED_FIELDS: FieldTable = {
    **FIELDS,
    "num_experts": whole(1, 100_000),
    "norm_topk_prob": flag(default=True),
    "shared_expert_intermediate_size": whole(1, 10_000_000),
}
SHARED_DEFAULTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
SHARED_NAMES = {"mlp.shared_experts.": "mlp.shared_expert."}
FUSED = (
    Fused(
        "mlp.experts.gate_up_proj",
        ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    ),
    Fused("mlp.experts.down_proj", ("mlp.experts.{}.down_proj.weight",)),
)
"""Tensors of all experts, which some files have; other files have a tensor for each expert."""


def parse_shared(fields: Fields, dense_layers: tuple[int, ...] = ()) -> MoE:
    """Return the experts that `SHARED_FIELDS` describe."""
    size, shared = fields["moe_intermediate_size"], fields["shared_expert_intermediate_size"]
    if shared % size:
        raise InputError(
            f"shared_expert_intermediate_size={shared}: must be a multiple of"
            f" moe_intermediate_size={size}"
        )
    return MoE(
        num_experts=fields["num_experts"],
        experts_per_token=fields["num_experts_per_tok"],
        intermediate_size=size,
        normalise=fields["norm_topk_prob"],
        shared_experts=shared // size,
        shared_gated=True,
        dense_layers=dense_layers,
    )


def format_shared(config: ModelConfig) -> JsonObject:
    """Return the fields of config.json that `parse_shared` reads."""
    if (moe := config.moe) is None:
        return {}
    sizes = {
        "num_experts": moe.num_experts,
        "shared_expert_intermediate_size": moe.shared_experts * moe.intermediate_size,
    }
    return format_experts(moe) | sizes
