"""The common parts of families with experts."""

from specjax.errors import InputError
from specjax.models.config import ModelConfig, MoE
from specjax.models.families.base import Fused
from specjax.models.fields import (
    Field,
    Fields,
    FieldTable,
    JsonObject,
    flag,
    number,
    show,
    text,
    texts,
    whole,
)

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


# --- Mixtral's experts, in all layers and without others -----------------------------------------

ALONE_FIELDS: FieldTable = {
    "num_local_experts": whole(1, 100_000),
    "num_experts_per_tok": whole(1, 100_000),
}
ALONE_NAMES = {
    "mlp.": "block_sparse_moe.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}
"""The names of these experts' tensors."""


def parse_alone(fields: Fields) -> MoE:
    """Return the experts that `ALONE_FIELDS` describe, of ``intermediate_size``."""
    return MoE(
        num_experts=fields["num_local_experts"],
        experts_per_token=fields["num_experts_per_tok"],
        intermediate_size=fields["intermediate_size"],
        normalise=True,
    )


def format_alone(config: ModelConfig) -> JsonObject:
    """Return the fields of config.json that `parse_alone` reads."""
    if (moe := config.moe) is None:
        return {}
    return {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "intermediate_size": moe.intermediate_size,
    }


# --- DeepSeek-V3's experts, in groups and with a correction of the selection ---------------------

GROUPED_FIELDS: FieldTable = {
    **FIELDS,
    "n_routed_experts": whole(1, 100_000),
    "n_shared_experts": whole(0, 1000, default=None),
    "scoring_func": text("sigmoid", default="sigmoid"),
    "topk_method": text("noaux_tc", default="noaux_tc"),
    "norm_topk_prob": flag(default=True),
    # These three have no default: no tensor would show that it is wrong.
    "routed_scaling_factor": number(1e-6, 1e6),
    "n_group": whole(1, 100_000),
    "topk_group": whole(1, 100_000),
}
FIRST_DENSE_FIELDS: FieldTable = {
    "first_k_dense_replace": whole(0, 10_000, default=0),
    "moe_layer_freq": whole(1, 1, default=1),
}
"""The fields that say how many of the first layers are dense."""


def first_dense(fields: Fields) -> tuple[int, ...]:
    """Return the layers without experts, from `FIRST_DENSE_FIELDS`."""
    return tuple(range(min(fields["first_k_dense_replace"], fields["num_hidden_layers"])))


DENSE, SPARSE = "dense", "sparse"
KIND_FIELDS: FieldTable = {"mlp_layer_types": texts(default=None)}
"""The field that names the kind of each layer's MLP; without it only the first is dense."""


def dense_by_kind(fields: Fields) -> tuple[int, ...]:
    """Return the layers without experts, from `KIND_FIELDS`."""
    kinds, count = fields["mlp_layer_types"], fields["num_hidden_layers"]
    if kinds is None:
        return (0,)
    if len(kinds) != count or not set(kinds) <= {DENSE, SPARSE}:
        raise InputError(
            f"mlp_layer_types={show(kinds)}: must be {DENSE!r} or {SPARSE!r} for each of"
            f" num_hidden_layers={count}"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == DENSE)


def format_kinds(config: ModelConfig) -> JsonObject:
    """Return the fields of config.json that `dense_by_kind` reads."""
    sparse = [config.is_sparse(layer) for layer in range(config.num_layers)]
    return {"mlp_layer_types": [SPARSE if is_sparse else DENSE for is_sparse in sparse]}


def parse_grouped(fields: Fields, dense_layers: tuple[int, ...]) -> MoE:
    """Return the experts that `GROUPED_FIELDS` describe."""
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
        dense_layers=dense_layers,
    )


def format_grouped(config: ModelConfig) -> JsonObject:
    """Return the fields of config.json that `parse_grouped` reads, and those without modules."""
    if (moe := config.moe) is None:
        return {}
    return format_experts(moe) | {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_experts,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": moe.scale,
        "n_group": moe.groups,
        "topk_group": moe.groups_kept,
        "num_nextn_predict_layers": 0,  # MTP modules are not part of the target, and not saved
    }


def format_first_dense(config: ModelConfig) -> JsonObject:
    """Return the fields of config.json that `first_dense` reads."""
    dense = () if config.moe is None else config.moe.dense_layers
    return {"first_k_dense_replace": len(dense), "moe_layer_freq": 1}


# --- Qwen's experts, and one shared expert with a gate -------------------------------------------

SHARED_FIELDS: FieldTable = {
    **FIELDS,
    "num_experts": whole(1, 100_000),
    "norm_topk_prob": flag(default=True),
    "shared_expert_intermediate_size": whole(1, 10_000_000),
}
SHARED_DEFAULTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
SHARED_NAMES = {"mlp.shared_experts.": "mlp.shared_expert."}


def fused(transposed: bool | None = None) -> tuple[Fused, ...]:
    """Return the tensors of all experts, which some files have in place of one for each expert."""
    inputs = ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")
    return (
        Fused("mlp.experts.gate_up_proj", inputs, transposed=transposed),
        Fused("mlp.experts.down_proj", ("mlp.experts.{}.down_proj.weight",), transposed=transposed),
    )


FUSED = fused()


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
