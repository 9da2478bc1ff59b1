"""OLMo 3 (Ai2, 2025): norms after attention and MLP, and windows in three layers of four.

One QK norm covers all heads of a token.
"""

from typing import Any

from specjax.models.config import Layer, Rope
from specjax.models.families.base import Family
from specjax.models.families.ropes import (
    FULL,
    WINDOWED,
    format_by_kind,
    layers_by_kind,
    parse_by_kind,
)
from specjax.models.fields import CheckpointError, Fields

_ROPE = Rope(theta=500_000.0)


def _parse(fields: Fields) -> dict[str, Any]:
    _check_one_theta(fields)
    ropes = parse_by_kind(fields, {FULL: _ROPE, WINDOWED: _ROPE})
    return {"rope": ropes[WINDOWED], "layers": layers_by_kind(fields, Layer(rope=ropes[FULL]))}


def _check_one_theta(fields: Fields) -> None:
    """Refuse older files with one ``rope_theta`` that is not the default.

    transformers 4 used it in all layers; transformers 5 uses the default in layers with a window.
    """
    theta, windowed = fields["rope_theta"], (fields["rope_parameters"] or {}).get(WINDOWED)
    has_theta = isinstance(windowed, dict) and windowed.get("rope_theta") is not None
    if theta not in (None, _ROPE.theta) and not has_theta and WINDOWED in fields["layer_types"]:
        raise CheckpointError(
            f"rope_theta={theta}: transformers 5 ignores it in layers with a window, and"
            f" transformers 4 did not: give rope_parameters of {FULL!r} and {WINDOWED!r}, each with"
            " the rope_theta that the model was trained with"
        )


OLMO3 = Family(
    title="OLMo 3",
    models="7B and 32B",
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={"max_position_embeddings": 2048, "sliding_window": 4096, "rms_norm_eps": 1e-5},
    switches={"norms": "after", "qk_norm": True, "qk_norm_over_heads": True},
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    windows="any",
    whole_every=4,
    ropes_by_kind=True,
    parse=_parse,
    format=format_by_kind,
)
