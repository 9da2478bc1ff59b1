"""OLMo 3 (Ai2, 2025): norms after attention and MLP, one norm over all heads of a token, windows in three layers of four."""

from collections.abc import Mapping
from typing import Any

from specjax.models.config import Layer, Rope
from specjax.models.families.base import Family
from specjax.models.families.ropes import FULL, WINDOWED, format_by_kind, layers_by_kind, parse_by_kind

_ROPE = Rope(theta=500_000.0)


def _parse(fields: Mapping[str, Any]) -> dict[str, Any]:
    # Older files have one theta for all layers; their scaling is that of the full ones alone.
    ropes = parse_by_kind({**fields, "rope_local_base_freq": fields["rope_theta"]}, {FULL: _ROPE, WINDOWED: _ROPE})
    return {"rope": ropes[WINDOWED], "layers": layers_by_kind(fields, Layer(rope=ropes[FULL]))}


OLMO3 = Family(
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
