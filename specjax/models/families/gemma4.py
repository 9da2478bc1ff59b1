"""Gemma 4 (Google DeepMind, 2026), text model: E2B, E4B, 12B, 26B-A4B and 31B.

Most layers have a sliding window and a RoPE of their own; full layers have larger heads, of which a
quarter is rotated. The last layers of E2B and E4B attend to the entries of earlier layers and have
none themselves, and every layer has an input of its own for each token. In the larger models the
values of full layers are their keys; 26B-A4B has experts beside each MLP.
"""

from dataclasses import replace
from typing import Any

from specjax.errors import InputError
from specjax.models.config import Layer, ModelConfig, MoE, Rope
from specjax.models.families import gemma
from specjax.models.families.base import Family, Fused, unpadded
from specjax.models.families.ropes import FULL, WINDOWED, format_by_kind, parse_by_kind
from specjax.models.fields import (
    Field,
    Fields,
    FieldTable,
    JsonObject,
    check_fields,
    flag,
    mapping,
    show,
    whole,
)

_ROPES = {FULL: Rope(theta=1e6, kind="proportional", turned=0.25), WINDOWED: Rope(theta=1e4)}
_FIELDS: FieldTable = {
    **gemma.COMMON_FIELDS,
    "use_bidirectional_attention": Field(
        "left out, or 'vision', which text does not meet",
        lambda v: v in ("vision", False),
        default=None,
    ),
    "global_head_dim": whole(2, 100_000, default=None),
    "num_global_key_value_heads": whole(1, 100_000, default=None),
    "per_layer_config": mapping(default=None),
    "attention_k_eq_v": flag(default=False),
    "num_kv_shared_layers": whole(0, 10_000, default=0),
    "use_double_wide_mlp": flag(default=False),
    "hidden_size_per_layer_input": whole(0, 1_000_000, default=0),
    "vocab_size_per_layer_input": whole(0, 10_000_000, default=0),
    "enable_moe_block": flag(default=False),
    "num_experts": whole(1, 100_000, default=None),
    "top_k_experts": whole(1, 100_000, default=None),
    "moe_intermediate_size": whole(1, 10_000_000, default=None),
}
_OVERRIDES: FieldTable = {
    "head_dim": whole(2, 100_000, default=None),
    "num_key_value_heads": whole(1, 100_000, default=None),
}


def _parse(fields: Fields) -> dict[str, Any]:
    if fields["layer_types"][-1] != FULL:
        raise InputError(
            f"layer_types: the last is {fields['layer_types'][-1]!r}: the last layer must be"
            f" {FULL!r} in this model_type"
        )
    if fields["rope_scaling"]:
        raise InputError(
            f"rope_scaling={show(fields['rope_scaling'])}: this model_type reads rope_parameters"
            " alone: write it there"
        )
    ropes, moe = parse_by_kind({**fields, "rope_theta": None}, _ROPES), None  # nor is rope_theta
    if fields["enable_moe_block"]:
        sizes = {
            name: fields[name] for name in ("num_experts", "top_k_experts", "moe_intermediate_size")
        }
        if missing := [name for name, value in sizes.items() if value is None]:
            raise InputError(f"{missing[0]} is missing: enable_moe_block needs it")
        experts, chosen, size = sizes.values()
        moe = MoE(
            num_experts=experts,
            experts_per_token=chosen,
            intermediate_size=size,
            normalise=True,
            beside_mlp=True,
        )
    return gemma.parse_common(fields) | {
        "rope": ropes[WINDOWED],
        "layers": _parse_layers(fields, ropes[FULL]),
        "moe": moe,
        "per_layer_inputs": fields["hidden_size_per_layer_input"],
        "per_layer_vocab_size": (
            fields["vocab_size_per_layer_input"] if fields["hidden_size_per_layer_input"] else 0
        ),
    }


def _parse_layers(fields: Fields, rope: Rope) -> tuple[Layer, ...]:
    kinds, shared = fields["layer_types"], fields["num_kv_shared_layers"]
    num_own = len(kinds) - shared
    if shared and (num_own < 1 or set(kinds[:num_own]) != set(kinds)):
        raise InputError(
            f"num_kv_shared_layers={shared}: a layer of every kind must come before them: they read"
            " its entries"
        )
    wide = 2 * fields["intermediate_size"] if fields["use_double_wide_mlp"] else None
    full: dict[str, Any] = {"rope": rope, "keys_are_values": fields["attention_k_eq_v"] or None}
    if fields["per_layer_config"] is None:
        full["head_dim"] = fields["global_head_dim"] or 512
        full["num_kv_heads"] = (
            fields["num_global_key_value_heads"] if fields["attention_k_eq_v"] else None
        )
    overrides = unpadded(fields["per_layer_config"] or {})
    layers = []
    for index, kind in enumerate(kinds):
        layer = dict(full) if kind == FULL else {}
        layer |= _override(overrides.get(str(index)), index)
        if index >= num_own:
            layer |= {
                "entries_of": num_own - 1 - kinds[:num_own][::-1].index(kind),
                "intermediate_size": wide,
            }
        layers.append(Layer(**layer))
    return tuple(layers)


def _override(override: Any, layer: int) -> dict[str, Any]:
    """Return the fields of `Layer` that ``per_layer_config`` sets for one layer.

    transformers 5 writes it in place of the ``global_`` fields.
    """
    if override is None:
        return {}
    if not isinstance(override, dict) or override.keys() - _OVERRIDES.keys():
        raise InputError(
            f"per_layer_config.{layer}: must be an object with {' and '.join(_OVERRIDES)}"
        )
    values = check_fields(override, _OVERRIDES, "config.json", f"per_layer_config.{layer}.")
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    return {names[name]: value for name, value in values.items() if value is not None}


def _format(config: ModelConfig) -> JsonObject:
    full = [config.layers[i] for i in range(len(config.layers)) if i not in config.windowed_layers]
    shared = [layer for layer in config.layers if layer.entries_of is not None]
    raw: JsonObject = (
        gemma.format_common(config)
        | format_by_kind(config)
        | {
            "num_kv_shared_layers": len(shared),
            "use_double_wide_mlp": any(layer.intermediate_size for layer in shared),
            "hidden_size_per_layer_input": config.per_layer_inputs,
            "vocab_size_per_layer_input": config.per_layer_vocab_size,
            "enable_moe_block": config.moe is not None,
        }
    )
    if full:
        raw |= {
            "global_head_dim": full[0].head_dim or config.head_dim,
            "num_global_key_value_heads": full[0].num_kv_heads,
            "attention_k_eq_v": bool(full[0].keys_are_values),
        }
    if (moe := config.moe) is not None:
        raw |= {
            "num_experts": moe.num_experts,
            "top_k_experts": moe.experts_per_token,
            "moe_intermediate_size": moe.intermediate_size,
        }
    return raw


def _left_over(config: ModelConfig) -> tuple[str, ...]:
    """Return the patterns of keys and values of layers that read another layer's entries.

    Published files have them.
    """
    shared = [i for i in range(config.num_layers) if config.entries_of(i) != i]
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return tuple(f"*.layers.{layer}.self_attn.{name}.weight" for layer in shared for name in names)


GEMMA4_TEXT = Family(
    title="Gemma 4",
    models="",
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    defaults={
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    switches={
        "activation": "gelu_tanh",
        "norms": "both",
        "qk_norm": True,
        "value_norm": True,
        "attention_scale": 1.0,
        "layer_scalars": True,
    },
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    windows="any",
    whole_every=6,
    ropes_by_kind=True,
    fields=_FIELDS,
    parse=_parse,
    format=_format,
    names={"mlp.gate.": "router.proj.", "mlp.experts.": "experts."},
    fused=(
        Fused("experts.gate_up_proj", ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight")),
        Fused("experts.down_proj", ("experts.{}.down_proj.weight",)),
    ),
    left_over=_left_over,
)

GEMMA4 = replace(
    GEMMA4_TEXT,
    title="Gemma 4",
    models="E2B, E4B, 12B, 26B-A4B, 31B; the text model of each",
    nested="text_config",
    prefixes=("model.language_model.",),
)
"""The text model inside a multimodal model, whose other towers are not read."""
