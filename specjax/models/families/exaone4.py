"""EXAONE 4 (LG AI Research, 2025, arXiv 2507.11407): norms after attention and MLP, QK norms.

Three layers of four have a window, and the others no RoPE.
"""

from typing import Any

from specjax.models.config import Layer, ModelConfig
from specjax.models.families.base import Family
from specjax.models.families.ropes import FULL, NO_POSITIONS
from specjax.models.fields import Field, Fields, FieldTable, JsonObject

_FIELDS: FieldTable = {
    "sliding_window_pattern": Field(
        "a whole number, or a text of L and G beside layer_types",
        lambda value: (type(value) is int and 0 < value < 10_000) or type(value) is str,
        default=None,
    ),
}


def _parse(fields: Fields) -> dict[str, Any]:
    if fields["sliding_window"] is None:  # then all layers have RoPE
        return {}
    is_full = [kind == FULL for kind in fields["layer_types"]]
    return {"layers": tuple(NO_POSITIONS if full else Layer() for full in is_full)}


def _format(config: ModelConfig) -> JsonObject:
    kinds = {config.of_layer(layer).rope.kind for layer in range(config.num_layers)}
    # Where no layer has a window, its size is what takes the RoPE away.
    return {"sliding_window": config.sliding_window or (4096 if kinds == {"none"} else None)}


EXAONE4 = Family(
    title="EXAONE 4",
    models="EXAONE-4.0-1.2B and 32B",
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    switches={"norms": "after", "qk_norm": True},
    windows="any",
    whole_every=4,
    fields=_FIELDS,
    parse=_parse,
    format=_format,
)
