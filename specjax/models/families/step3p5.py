"""Step-3.5 and Step-3.7 (StepFun, 2026): windows in most layers, gates of heads, and experts.

Layers with windows may have another number of heads and another rope. In some layers the gated
units of experts, or of the MLP and the shared expert, are clamped.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specjax.errors import InputError
from specjax.models.config import Layer, ModelConfig, MoE, Rope
from specjax.models.families import experts
from specjax.models.families.base import Family, Fused, own_names, unpadded
from specjax.models.families.ropes import FULL, WINDOWED, format_by_kind, parse_by_kind
from specjax.models.fields import (
    Field,
    Fields,
    FieldTable,
    JsonObject,
    always,
    mapping,
    number,
    show,
    text,
    whole,
)


def _is_limit(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value <= 1e9)


_LIMITS = Field(
    "a list with a number or null for each layer",
    lambda value: type(value) is list and all(map(_is_limit, value)),
    default=None,
)
_FIELDS: FieldTable = {
    **experts.FIELDS,
    **experts.KIND_FIELDS,
    "n_routed_experts": whole(1, 100_000),
    "share_expert_dim": whole(1, 10_000_000),
    "moe_router_scaling_factor": number(1e-6, 1e6, default=1.0),
    "num_sliding_attention_heads": whole(1, 100_000, default=None),
    "per_layer_config": mapping(default=None),
    "hidden_act": text("silu", "swish", default="silu"),  # transformers does not read it
    "query_pre_attn_scalar": number(1e-6, 1e9, default=None),
    "swiglu_limits": _LIMITS,
    "swiglu_limits_shared": _LIMITS,
    "use_bidirectional_attention": always(False),
}
_BY_LAYER = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)
"""Fields with an element for each layer. In published files MTP modules follow."""

_OWN_NAMES = {
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "num_attention_groups": "num_key_value_heads",
}
"""Names that transformers' configuration maps to the common ones."""


def _derived(fields: Fields) -> dict[str, Any]:
    """Return the fields of today's files, from those of published ones. Nothing is checked yet."""
    count, modules = fields.get("num_hidden_layers"), fields.get("num_nextn_predict_layers") or 0
    if type(count) is not int or type(modules) is not int or not 1 <= count <= 10_000:
        return {}  # refused later
    raw = {name: fields.get(name) for name in _BY_LAYER}
    for name, value in raw.items():
        if isinstance(value, list) and len(value) == count + modules:
            raw[name] = value[:count]
    if raw["layer_types"] is None:
        raw["layer_types"] = [FULL] * count
    if raw["mlp_layer_types"] is None:
        sparse = _sparse_layers(fields.get("moe_layers_enum"), count)
        kinds = (experts.DENSE, experts.SPARSE)
        raw["mlp_layer_types"] = [kinds[layer in sparse] for layer in range(count)]
    heads, setting = (
        fields.get("num_sliding_attention_heads"),
        fields.get("attention_other_setting"),
    )
    if heads is None and isinstance(setting, dict):
        heads = setting.get("num_attention_heads")
    ropes = _ropes(fields, raw)
    del raw["partial_rotary_factors"]
    return raw | ropes | own_names(fields, _OWN_NAMES) | {"num_sliding_attention_heads": heads}


def _sparse_layers(stated: Any, count: int) -> Sequence[int]:
    """Return the layers with experts: those that a text or a list names, or all but three."""
    if stated is None:
        return range(3, count)
    items = stated
    if isinstance(stated, str):
        items = [item for item in stated.split(",") if item.strip()]
    if not isinstance(items, list) or not all(str(item).strip().isdecimal() for item in items):
        raise InputError(f"moe_layers_enum={show(stated)}: must name layers, such as '3,4,5'")
    return [int(item) for item in items]


def _ropes(fields: Fields, raw: Fields) -> dict[str, Any]:
    """Return the rope of each kind of layer, and no other field of a rope."""
    ropes, kinds = fields.get("rope_parameters"), raw["layer_types"]
    of_a_model = {"rope_theta": None, "rope_scaling": None, "partial_rotary_factor": None}
    if not isinstance(kinds, list):
        return of_a_model  # refused later
    present = {kind for kind in kinds if isinstance(kind, str)}
    if isinstance(ropes, dict) and all(isinstance(ropes.get(kind), dict) for kind in present):
        share = fields.get("partial_rotary_factor")
        default = {} if share is None else {"partial_rotary_factor": share}
        return of_a_model | {"rope_parameters": {kind: default | ropes[kind] for kind in present}}
    thetas, shares = raw["rope_theta"], raw["partial_rotary_factors"]
    ropes = {}
    for kind in present:
        first = kinds.index(kind)
        theta = _at(thetas, first) if isinstance(thetas, list) else thetas
        ropes[kind] = {"rope_type": "default", "rope_theta": 10_000.0 if theta is None else theta}
        if isinstance(shares, list) and shares:
            ropes[kind]["partial_rotary_factor"] = _at(shares, first)
    if isinstance(scaling := fields.get("rope_scaling"), dict) and FULL in ropes:
        ropes[FULL] |= scaling
    return of_a_model | {"rope_parameters": ropes}


def _at(values: list[Any], index: int) -> Any:
    if index >= len(values):
        raise InputError(f"rope_theta, partial_rotary_factors: {len(values)} values: name each")
    return values[index]


def _parse(fields: Fields) -> dict[str, Any]:
    dense = experts.dense_by_kind(fields)
    ropes = parse_by_kind(fields, {FULL: Rope(), WINDOWED: Rope()}, turns_parts=True)
    count, scalar = fields["num_hidden_layers"], fields["query_pre_attn_scalar"]
    scalar = fields["head_dim"] if scalar is None else scalar
    of_mlps, of_experts = (
        _limits(fields, name) for name in ("swiglu_limits_shared", "swiglu_limits")
    )
    heads = _heads(fields)
    layers = tuple(
        Layer(
            num_heads=None if heads[layer] == fields["num_attention_heads"] else heads[layer],
            rope=ropes[FULL] if fields["layer_types"][layer] == FULL else None,
            mlp_limit=of_mlps[layer],
            experts_limit=of_experts[layer],
        )
        for layer in range(count)
    )
    moe = None if len(dense) == count else _parse_experts(fields, dense)
    return {
        "moe": moe,
        "rope": ropes[WINDOWED],
        "layers": layers,
        "attention_scale": None if scalar == fields["head_dim"] else scalar**-0.5,
    }


def _parse_experts(fields: Fields, dense: tuple[int, ...]) -> MoE:
    size, shared = fields["moe_intermediate_size"], fields["share_expert_dim"]
    if shared % size:
        raise InputError(
            f"share_expert_dim={shared}: must be a multiple of moe_intermediate_size={size}"
        )
    if fields["mlp_bias"]:
        raise InputError("mlp_bias=true: must be false in a model with experts")
    return MoE(
        num_experts=fields["n_routed_experts"],
        experts_per_token=fields["num_experts_per_tok"],
        intermediate_size=size,
        shared_experts=shared // size,
        scoring="sigmoid",
        normalise=True,
        scale=float(fields["moe_router_scaling_factor"]),
        corrected=True,
        dense_layers=dense,
    )


def _limits(fields: Fields, name: str) -> list[float | None]:
    """Return the limit of each layer; 0 and null are none."""
    values, count = (
        fields[name] or [None] * fields["num_hidden_layers"],
        fields["num_hidden_layers"],
    )
    if len(values) < count:
        raise InputError(
            f"{name} names {len(values)} layers of num_hidden_layers={count}: name each"
        )
    return [float(value) if value else None for value in values[:count]]


def _heads(fields: Fields) -> list[int]:
    """Return the number of query heads of each layer."""
    full = fields["num_attention_heads"]
    windowed, by_layer = fields["num_sliding_attention_heads"] or full, fields["per_layer_config"]
    if by_layer is None:
        return [windowed if kind == WINDOWED else full for kind in fields["layer_types"]]
    heads = []
    by_layer = unpadded(by_layer)
    for layer in range(fields["num_hidden_layers"]):
        stated = by_layer.get(str(layer), {})
        if not isinstance(stated, dict) or not stated.keys() <= {"num_attention_heads"}:
            raise InputError(
                f"per_layer_config.{layer}={show(stated)}: must have num_attention_heads alone"
            )
        heads.append(stated.get("num_attention_heads", full))
        if type(heads[-1]) is not int or heads[-1] < 1:
            raise InputError(
                f"per_layer_config.{layer}.num_attention_heads={show(heads[-1])}: must be a whole"
                " number from 1"
            )
    return heads


def _format(config: ModelConfig) -> JsonObject:
    layers = [config.of_layer(layer) for layer in range(config.num_layers)]
    windowed = [layers[layer].num_heads for layer in config.windowed_layers]
    scale = config.attention_scale or config.head_dim**-0.5
    # A whole number if it gives the same scale: rounding in ** must not change the scale.
    scalar = round(scale**-2) if round(scale**-2) ** -0.5 == scale else scale**-2
    raw: JsonObject = {
        "num_sliding_attention_heads": windowed[0] if windowed else config.num_heads,
        "query_pre_attn_scalar": scalar,
        "swiglu_limits": [layer.experts_limit for layer in layers],
        "swiglu_limits_shared": [layer.mlp_limit for layer in layers],
        "num_nextn_predict_layers": 0,
        **experts.format_kinds(config),
        **format_by_kind(config),
    }
    if (moe := config.moe) is None:
        return raw
    return (
        raw
        | experts.format_experts(moe)
        | {
            "n_routed_experts": moe.num_experts,
            "share_expert_dim": moe.shared_experts * moe.intermediate_size,
            "moe_router_scaling_factor": moe.scale,
        }
    )


def _short_file(raw: Fields) -> Fields | None:
    """Return the text model's fields of a file that states its sizes at the top."""
    needed = ("hidden_size", "num_hidden_layers", "num_experts", "layer_types", "vocab_size")
    count, dense = raw.get("num_hidden_layers"), raw.get("first_k_dense_replace")
    if not all(name in raw for name in needed) or type(count) is not int or type(dense) is not int:
        return None
    kinds = [experts.DENSE] * min(dense, count) + [experts.SPARSE] * (count - dense)
    return {**raw, "n_routed_experts": raw["num_experts"], "mlp_layer_types": kinds}


STEP3P5 = Family(
    title="Step-3.5, Step-3.7",
    models=(
        "Step-3.7-Flash: the text model; gates of heads, and limits of gated units in some layers"
    ),
    model_type="step3p5",
    architecture="Step3p7TextModel",
    defaults={
        "vocab_size": 128_815,
        "hidden_size": 4096,
        "intermediate_size": 11_264,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1280,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "share_expert_dim": 1280,
    },
    switches={"qk_norm": True, "norm_offset": 1.0, "gated_heads": True},
    biases={"attention_bias": ("qkv_bias", "output_bias"), "mlp_bias": ("mlp_bias",)},
    windows="any",
    ropes_by_kind=True,
    fields=_FIELDS,
    aliases={
        **_OWN_NAMES,
        "share_expert_dims": "share_expert_dim",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    derived_from={"attention_other_setting.num_attention_heads": "num_sliding_attention_heads"},
    derived=_derived,
    parse=_parse,
    format=_format,
    names={
        "mlp.gate.weight": "moe.gate.weight",
        "mlp.gate.e_score_correction_bias": "moe.router_bias",
        "mlp.shared_experts.": "share_expert.",
    },
    fused=tuple(
        Fused(f"moe.{name}_proj.weight", (f"mlp.experts.{{}}.{name}_proj.weight",))
        for name in ("gate", "up", "down")
    ),
    modules_follow=True,
)

STEP3P7 = replace(
    STEP3P5,
    title="Step-3.5, Step-3.7",
    models="",
    nested="text_config",
    short_file=_short_file,
    prefixes=("model.", "model.language_model."),
)
"""The text model of Step-3.7, whose vision tower is not read.

Collections of files for planning have a shorter one, without ``text_config``. What it lacks has the
defaults of transformers' configuration of the text model, so the published weights do not fit it.
"""
