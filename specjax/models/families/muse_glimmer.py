"""Muse Glimmer (Meta, 2026), text model: normed embeddings, and gates of all attended values.

Three layers of four have a window, and the others no RoPE, counted backward from the last layer.
"""

from dataclasses import replace
from typing import Any

from specjax.models.config import Layer, ModelConfig
from specjax.models.families.base import Family
from specjax.models.families.ropes import FULL, NO_POSITIONS, WINDOWED
from specjax.models.fields import (
    CheckpointError,
    Field,
    Fields,
    FieldTable,
    JsonObject,
    number,
    show,
)

_EVERY = 4
_THETAS = "layer_rope_theta"
_FIELDS: FieldTable = {
    "final_logit_softcapping": number(1e-6, 1e6, default=20.0),
    "qk_scale_factor": number(1e-6, 1e6, default=3.87),
    "output_multiplier": number(1e-6, 1e6, default=0.19611613513818404),
    "post_norm_eps": number(1e-12, 0.1, default=1e-8),
    _THETAS: Field(
        "a list with the theta of each layer, 0 for layers without RoPE",
        lambda value: (
            type(value) is list and all(type(item) in (int, float) and item >= 0 for item in value)
        ),
        default=None,
    ),
}


def _is_whole(count: int) -> list[bool]:
    """Return which layers see the whole text, and have no RoPE, if a file does not say so."""
    return [(count - 1 - layer) % _EVERY == 0 for layer in range(count)]


def _kinds(count: int) -> list[str]:
    return [FULL if is_whole else WINDOWED for is_whole in _is_whole(count)]


def _derived(fields: Fields) -> dict[str, Any]:
    """Return the activation, which has a name of its own. The common name means nothing here."""
    return {"hidden_act": fields.get("hidden_activation", "silu")}


def _turned(fields: Fields) -> list[bool]:
    """Return which layers have RoPE."""
    thetas, count = fields[_THETAS], fields["num_hidden_layers"]
    if thetas is None:
        return [not is_whole for is_whole in _is_whole(count)]
    if len(thetas) != count:
        raise CheckpointError(
            f"{_THETAS} names {len(thetas)} layers of num_hidden_layers={count}: give one for each"
        )
    theta = (fields["rope_parameters"] or {}).get("rope_theta", fields["rope_theta"])
    if not set(thetas) <= {0, theta}:
        raise CheckpointError(
            f"{_THETAS}={show(thetas)}: transformers computes with rope_theta={show(theta)} in all"
            " layers whose theta is not 0: give that theta or 0"
        )
    return [value != 0 for value in thetas]


def _parse(fields: Fields) -> dict[str, Any]:
    turned = _turned(fields)
    return {
        "attention_scale": fields["head_dim"] ** -0.5 * fields["qk_scale_factor"],
        "logit_divisor": 1.0 / fields["output_multiplier"],
        "logit_cap": float(fields["final_logit_softcapping"]),
        "post_norm_eps": float(fields["post_norm_eps"]),
        "layers": () if all(turned) else tuple(Layer() if has else NO_POSITIONS for has in turned),
    }


def _format(config: ModelConfig) -> JsonObject:
    scale = config.attention_scale or config.head_dim**-0.5
    ropes = [config.of_layer(layer).rope for layer in range(config.num_layers)]
    return {
        "hidden_activation": config.activation,
        "final_logit_softcapping": config.logit_cap,
        # Rounded, since the quotient is not always the number that was read.
        "qk_scale_factor": round(scale / config.head_dim**-0.5, 12),
        "output_multiplier": 1.0 / config.logit_divisor,
        "post_norm_eps": config.post_norm_eps,
        _THETAS: [0 if rope.kind == "none" else rope.theta for rope in ropes],
    }


MUSE_GLIMMER_TEXT = Family(
    title="Muse Glimmer",
    models="30B, the text model: normed embeddings, and a gate for each attended value",
    model_type="muse_glimmer_text",
    architecture="MuseGlimmerTextModel",
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 2048,
        "bos_token_id": 200_000,
        "eos_token_id": 200_001,
    },
    switches={
        "norms": "both",
        "norm_offset": 1.0,
        "final_norm_offset": 0.0,
        "embedding_normed": True,
        "qk_unit_norm_in_all_layers": True,
        "gated_values": True,
    },
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    windows="any",
    kinds_by_default=_kinds,
    fields=_FIELDS,
    derived_from={"hidden_activation": "hidden_act"},
    derived=_derived,
    parse=_parse,
    format=_format,
)

MUSE_GLIMMER = replace(MUSE_GLIMMER_TEXT, nested="text_config", prefixes=("model.language_model.",))
"""The text model inside a model with a vision tower, which is not read."""
