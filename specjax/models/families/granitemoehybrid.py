"""Granite 4 H (IBM, 2025): layers of Mamba-2, some with attention, and Granite's factors.

Every layer has an MLP, and in larger models experts beside it: the MLP is then the shared expert.
"""

from typing import Any

from specjax.errors import InputError
from specjax.models.config import ModelConfig, MoE, Rope
from specjax.models.families import factors, mamba2
from specjax.models.families.base import Family, Fused
from specjax.models.families.ropes import FULL, format_rope, parse_rope
from specjax.models.families.states import LINEAR, format_layers, parse_layers
from specjax.models.fields import Fields, FieldTable, JsonObject, text, whole

_FIELDS: FieldTable = {
    **factors.FIELDS,
    **mamba2.FIELDS,
    "shared_intermediate_size": whole(1, 10_000_000),
    "num_local_experts": whole(0, 100_000),
    "num_experts_per_tok": whole(0, 100_000),
    "position_embedding_type": text("rope", "nope", default=None),
}


def _derived(fields: Fields) -> dict[str, Any]:
    """Return the kinds of layers with their names of today."""
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    return {"layer_types": mamba2.today(kinds)}


def _parse(fields: Fields) -> dict[str, Any]:
    kinds = fields["layer_types"] or [LINEAR] * fields["num_hidden_layers"]
    has_rope = fields["position_embedding_type"] == "rope"
    return {
        **factors.parse(fields),
        **parse_layers(kinds, mamba2.parse_sizes(fields)),
        **_parse_mlps(fields),
        "rope": parse_rope(fields) if has_rope else Rope(kind="none"),
    }


def _parse_mlps(fields: Fields) -> dict[str, Any]:
    size, shared = fields["intermediate_size"], fields["shared_intermediate_size"]
    if not fields["num_local_experts"]:
        return {"intermediate_size": shared}
    if not fields["num_experts_per_tok"]:
        raise InputError(
            f"num_experts_per_tok=0: must be at least 1 with"
            f" num_local_experts={fields['num_local_experts']}; only a model without experts has 0"
        )
    if shared % size:
        raise InputError(
            f"shared_intermediate_size={shared}: must be a multiple of intermediate_size={size}"
        )
    moe = MoE(
        num_experts=fields["num_local_experts"],
        experts_per_token=fields["num_experts_per_tok"],
        intermediate_size=size,
        shared_experts=shared // size,
        normalise=True,
    )
    return {"moe": moe}


def _format(config: ModelConfig) -> JsonObject:
    raw = factors.format_fields(config) | mamba2.format_sizes(config)
    raw |= {"layer_types": format_layers(config)}
    if config.rope.kind == "none":
        raw["position_embedding_type"] = "nope"
    else:
        raw |= {"position_embedding_type": "rope", "rope_parameters": format_rope(config.rope)}
    if (moe := config.moe) is None:
        return raw | {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": config.intermediate_size,
        }
    return raw | {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "intermediate_size": moe.intermediate_size,
        "shared_intermediate_size": moe.shared_experts * moe.intermediate_size,
    }


def _gate_and_up(name: str, of: str) -> Fused:
    return Fused(name, tuple(f"mlp.{of}{part}_proj.weight" for part in ("gate", "up")))


GRANITEMOEHYBRID = Family(
    title="Granite 4 H",
    models="Granite 4.0 H Micro, Tiny and Small: hybrids with Mamba-2",
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    defaults={
        **mamba2.DEFAULTS,
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "shared_intermediate_size": 1024,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    kinds=(FULL, LINEAR),
    ropes_by_kind=True,
    fields=_FIELDS,
    derived_from={"layers_block_type": "layer_types"},
    derived=_derived,
    parse=_parse,
    format=_format,
    names={
        "mlp.down_proj": "shared_mlp.output_linear",
        "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
        "mlp.gate.weight": "block_sparse_moe.router.layer.weight",
    },
    fused=(
        *mamba2.FUSED,
        _gate_and_up("shared_mlp.input_linear.weight", ""),
        _gate_and_up("shared_mlp.input_linear.weight", "shared_experts."),
        _gate_and_up("block_sparse_moe.input_linear.weight", "experts.{}."),
        Fused("block_sparse_moe.output_linear.weight", ("mlp.experts.{}.down_proj.weight",)),
    ),
)
