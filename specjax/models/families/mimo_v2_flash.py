"""MiMo-V2-Flash (Xiaomi, 2025): windows in most layers, whose attention has sinks, and experts.

Values are smaller than keys, and windowed layers have twice the key and value heads.
"""

from typing import Any

from specjax.models.config import Layer, ModelConfig, Rope
from specjax.models.families import experts
from specjax.models.families.base import Family
from specjax.models.families.ropes import (
    FULL,
    WINDOWED,
    format_by_kind,
    layers_by_kind,
    parse_by_kind,
)
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

MODULES = "model.mtp."
"""The prefix of the names of MTP modules' tensors."""

_SHARE = 0.334
_ROPES = {FULL: Rope(theta=5e6, turned=_SHARE), WINDOWED: Rope(theta=1e4, turned=_SHARE)}
_BY_LAYER = Field(
    "a list with 0 or 1 for each layer",
    lambda value: type(value) is list and all(item in (0, 1) for item in value),
    default=None,
)
_FIELDS: FieldTable = {
    **experts.GROUPED_FIELDS,
    "n_shared_experts": whole(0, 0, default=None),
    "routed_scaling_factor": number(1e-6, 1e6, default=None),
    "v_head_dim": whole(1, 100_000),
    "attention_value_scale": number(1e-6, 1e6, default=None),
    **experts.KIND_FIELDS,
    "sliding_window_size": whole(1, 1_000_000_000, default=None),
    "add_swa_attention_sink_bias": always(True),
    "add_full_attention_sink_bias": always(False),
    # transformers does not read these fields of the published files.
    "hybrid_layer_pattern": _BY_LAYER,
    "moe_layer_freq": _BY_LAYER,
    "swa_num_attention_heads": whole(1, 100_000, default=None),
    "swa_num_key_value_heads": whole(1, 100_000, default=None),
    "swa_head_dim": whole(1, 100_000, default=None),
    "swa_v_head_dim": whole(1, 100_000, default=None),
    "swa_rope_theta": number(2, 1e12, default=None),
    "layernorm_epsilon": number(1e-12, 0.1, default=None),
}


def _parse(fields: Fields) -> dict[str, Any]:
    dense = experts.dense_by_kind(fields)
    # Neither is read by transformers, which has a rope for each kind of layer.
    ropes = parse_by_kind({**fields, "rope_theta": None, "rope_scaling": None}, _ROPES)
    _check_unread(fields, dense, ropes)
    kv_heads = fields["num_key_value_heads"] or fields["num_attention_heads"]
    grouped = {**fields, "routed_scaling_factor": fields["routed_scaling_factor"] or 1.0}
    parsed = {
        "moe": experts.parse_grouped(grouped, dense),
        "value_dim": fields["v_head_dim"],
        "value_scale": float(fields["attention_value_scale"] or 1.0),
        "num_kv_heads": 2 * kv_heads,
        "rope": ropes[WINDOWED],
        "sinks": True,
        "layers": layers_by_kind(
            fields, Layer(num_kv_heads=kv_heads, rope=ropes[FULL], sinks=False)
        ),
    }
    # The published field counts the tokens before the query.
    if fields["sliding_window_size"] is not None and WINDOWED in fields["layer_types"]:
        parsed["sliding_window"] = fields["sliding_window_size"] + 1
    return parsed


def _check_unread(fields: Fields, dense: tuple[int, ...], ropes: dict[str, Rope]) -> None:
    """Refuse a file where a field of the published files says something else than what is read."""
    kv_heads = fields["num_key_value_heads"] or fields["num_attention_heads"]
    shares = {rope.turned for rope in ropes.values()}
    read = {
        "hybrid_layer_pattern": [int(kind == WINDOWED) for kind in fields["layer_types"]],
        "moe_layer_freq": [int(layer not in dense) for layer in range(fields["num_hidden_layers"])],
        "swa_num_attention_heads": fields["num_attention_heads"],
        "swa_num_key_value_heads": 2 * kv_heads,
        "swa_head_dim": fields["head_dim"],
        "swa_v_head_dim": fields["v_head_dim"],
        "rope_theta": ropes[FULL].theta,
        "swa_rope_theta": ropes[WINDOWED].theta,
        "partial_rotary_factor": shares.pop() if len(shares) == 1 else None,
        "layernorm_epsilon": fields["rms_norm_eps"],
        "rope_scaling": None,
    }
    for name, value in read.items():
        if fields[name] not in (None, value):
            raise CheckpointError(
                f"{name}={show(fields[name])}: transformers does not read this field, and computes"
                f" with {show(value)}: write layer_types, mlp_layer_types, rope_parameters and"
                " rms_norm_eps, and leave it out"
            )


def _format(config: ModelConfig) -> JsonObject:
    return (
        experts.format_grouped(config)
        | experts.format_kinds(config)
        | format_by_kind(config)
        | {
            "num_key_value_heads": config.num_kv_heads // 2,
            "v_head_dim": config.value_dim or config.head_dim,
            "attention_value_scale": config.value_scale,
        }
    )


def kinds_of(count: int) -> list[str]:
    """Return the kinds of layers of a file without ``layer_types``: the first is full as well."""
    return [FULL if layer == 0 or (layer + 1) % 6 == 0 else WINDOWED for layer in range(count)]


MIMO_V2_FLASH = Family(
    title="MiMo-V2",
    models=("MiMo-V2-Flash: values smaller than keys, and sinks in layers with windows"),
    model_type="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 129,
        "attention_value_scale": 0.707,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_routed_experts": 256,
        "n_group": 1,
        "topk_group": 1,
        "bos_token_id": 1,
    },
    biases={"attention_bias": ("qkv_bias",)},
    windows="any",
    kinds_by_default=kinds_of,
    ropes_by_kind=True,
    fields=_FIELDS,
    aliases={"num_local_experts": "n_routed_experts"},
    parse=_parse,
    format=_format,
    names={"self_attn.sinks": "self_attn.attention_sink_bias"},
    left_over=lambda _: (f"{MODULES}*",),
)
