"""Kimi Linear (Moonshot AI, 2025, arXiv 2510.26692): Kimi Delta Attention, and experts.

Some layers have latent attention without positions.
"""

from typing import Any

from specjax.errors import InputError
from specjax.models.config import ModelConfig, Rope
from specjax.models.families import experts, latent
from specjax.models.families.base import Family, own_names
from specjax.models.families.delta_net import CONVOLUTION_NAMES
from specjax.models.families.ropes import FULL
from specjax.models.families.states import LINEAR, format_layers, parse_layers
from specjax.models.fields import (
    Field,
    Fields,
    FieldTable,
    JsonObject,
    mapping,
    show,
    text,
    whole,
)
from specjax.models.memory import KimiDeltaAttention

_FIELDS: FieldTable = {
    **latent.FIELDS,
    **experts.GROUPED_FIELDS,
    **experts.KIND_FIELDS,
    "linear_head_dim": whole(1, 100_000),
    "linear_num_heads": whole(1, 100_000),
    "linear_conv_kernel_dim": whole(2, 1000),
    "linear_attn_config": mapping(default=None),
    "hidden_act": text("silu", "swish", default="silu"),  # the convolution has it as well
    "moe_router_activation_func": text("sigmoid", default="sigmoid"),
    "mla_use_nope": Field("left out, or true", lambda value: value is True, default=True),
}
_IN_OBJECT = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Fields of ``linear_attn_config`` in published files, and their names today."""

_OWN_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""The names of transformers' configuration, which win over the common ones."""


def _derived(fields: Fields) -> dict[str, Any]:
    """Return the fields of today's files, from those of published ones. Nothing is checked yet."""
    count, inner = fields.get("num_hidden_layers"), fields.get("linear_attn_config") or {}
    if type(count) is not int or not 1 <= count <= 10_000 or not isinstance(inner, dict):
        return {}  # refused later
    if set(inner) - {*_IN_OBJECT, "full_attn_layers", "kda_layers"}:
        unread = sorted(set(inner) - {*_IN_OBJECT, "full_attn_layers", "kda_layers"})
        raise InputError(f"linear_attn_config.{unread[0]}={show(inner[unread[0]])}: is not read")
    derived = own_names(fields, _OWN_NAMES)
    derived |= {ours: inner[name] for name, ours in _IN_OBJECT.items() if name in inner}
    if fields.get("layer_types") is None:
        derived["layer_types"] = _kinds(inner, count)
    if fields.get("mlp_layer_types") is None:
        dense = fields.get("first_k_dense_replace", 1)
        if type(dense) is not int:
            raise InputError(f"first_k_dense_replace={show(dense)}: must be a whole number")
        derived["mlp_layer_types"] = [
            experts.DENSE if layer < dense else experts.SPARSE for layer in range(count)
        ]
    return derived


def _kinds(inner: Fields, count: int) -> list[str]:
    """Return the kinds of layers, which ``linear_attn_config`` names, counted from 1."""
    if not {"full_attn_layers", "kda_layers"} <= inner.keys():
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(count)]
    stated = {FULL: inner["full_attn_layers"], LINEAR: inner["kda_layers"]}
    kinds: dict[int, str] = {}
    for kind, layers in stated.items():
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise InputError(f"linear_attn_config: {show(layers)} must be a list of layers, from 1")
        kinds |= dict.fromkeys(layers, kind)
    if sorted(kinds) != list(range(1, count + 1)):
        raise InputError(
            f"linear_attn_config: full_attn_layers and kda_layers must name each layer from 1 to"
            f" num_hidden_layers={count}"
        )
    return [kinds[layer + 1] for layer in range(count)]


def _parse(fields: Fields) -> dict[str, Any]:
    kinds, dense = fields["layer_types"], experts.dense_by_kind(fields)
    mla = latent.parse(fields)
    sizes = KimiDeltaAttention(
        key_heads=fields["linear_num_heads"],
        key_dim=fields["linear_head_dim"],
        kernel=fields["linear_conv_kernel_dim"],
    )
    has_experts = len(dense) < fields["num_hidden_layers"]
    return {
        "mla": mla,
        "head_dim": mla.qk_rope_head_dim,
        "rope": Rope(kind="none"),
        "moe": experts.parse_grouped(fields, dense) if has_experts else None,
        **parse_layers(kinds, sizes),
    }


def _format(config: ModelConfig) -> JsonObject:
    raw = latent.format_fields(config) | experts.format_kinds(config)
    raw |= experts.format_grouped(config)
    if (moe := config.moe) is not None:  # the names that transformers reads
        raw |= {
            "num_experts": moe.num_experts,
            "num_experts_per_token": moe.experts_per_token,
            "num_shared_experts": moe.shared_experts,
            "num_expert_group": moe.groups,
            "moe_renormalize": moe.normalise,
        }
    raw |= {
        "pad_token_id": None,  # the default may be beyond the vocabulary
        "model_max_length": config.max_positions,
        "layer_types": format_layers(config),
    }
    if isinstance(sizes := config.linear, KimiDeltaAttention):
        raw |= {
            "linear_head_dim": sizes.key_dim,
            "linear_num_heads": sizes.key_heads,
            "linear_conv_kernel_dim": sizes.kernel,
        }
    return raw


KIMI_LINEAR = Family(
    title="Kimi Linear",
    models=(
        "48B-A3B: Kimi Delta Attention, latent attention without positions in some "
        "layers, and experts"
    ),
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    defaults={
        "vocab_size": 163_840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 163_584,
        "eos_token_id": 163_586,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
        "n_group": 1,
        "topk_group": 1,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    },
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    kinds=(FULL, LINEAR),
    ropes_by_kind=True,
    fields=_FIELDS,
    aliases=_OWN_NAMES | {"num_local_experts": "n_routed_experts"},
    derived_from={f"linear_attn_config.{name}": ours for name, ours in _IN_OBJECT.items()},
    derived=_derived,
    parse=_parse,
    format=_format,
    names={
        "mlp.gate.": "block_sparse_moe.gate.",
        "mlp.shared_experts.": "block_sparse_moe.shared_experts.",
        "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
        "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
        "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
        **CONVOLUTION_NAMES,
    },
    names_elsewhere={".mlp.": ".block_sparse_moe."},
    unit_axes={"self_attn.A_log": 2},
)
