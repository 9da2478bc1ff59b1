"""The common parts of families with Gated DeltaNet in most layers, and gated full attention."""

from typing import Any

from specjax.models.config import LinearAttention, ModelConfig
from specjax.models.families.base import Fused
from specjax.models.families.ropes import FULL, check_turned
from specjax.models.families.states import LINEAR, format_layers, parse_layers
from specjax.models.fields import (
    CheckpointError,
    Field,
    Fields,
    FieldTable,
    JsonObject,
    flag,
    number,
    text,
    whole,
)

MODULES = "mtp."
"""The prefix of the names of MTP modules' tensors."""

FIELDS: FieldTable = {
    "linear_conv_kernel_dim": whole(2, 1000),
    "linear_key_head_dim": whole(1, 100_000),
    "linear_value_head_dim": whole(1, 100_000),
    "linear_num_key_heads": whole(1, 100_000),
    "linear_num_value_heads": whole(1, 100_000),
    "full_attention_interval": whole(1, 10_000, default=4),
    "partial_rotary_factor": number(0.01, 1),
    "attn_output_gate": Field("left out, or true", lambda value: value is True, default=True),
    "use_cache": flag(default=True),
    "hidden_act": text("silu", "swish", default="silu"),  # their linear attention has SiLU built in
}
"""The fields of config.json that all of these families have."""

DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

ALIKE: dict[str, Any] = {
    "switches": {"qk_norm": True, "norm_offset": 1.0, "gated_attention": True},
    "biases": {"attention_bias": ("qkv_bias", "output_bias")},
    "kinds": (FULL, LINEAR),
    "turns_parts": True,
    "left_over": lambda _: (f"{MODULES}*",),
}
"""The fields of `Family` that are the same in all of these families."""

CONVOLUTION = Fused("conv1d.weight", ("conv_q.weight", "conv_k.weight", "conv_v.weight"), axis=0)
"""The one tensor of the convolution over queries, keys and values."""


CONVOLUTION_NAMES = {f".conv_{name}.weight": f".{name}_conv1d.weight" for name in "qkv"}
"""The names of the convolution's tensors in files that have one for each input."""


def parse(fields: Fields, *, by_key_head: bool, **changes: Any) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that all of these families have.

    ``changes`` are further fields of `LinearAttention`.
    """
    kinds, interval = fields["layer_types"], fields["full_attention_interval"]
    if kinds is None:
        kinds = [
            LINEAR if (layer + 1) % interval else FULL
            for layer in range(fields["num_hidden_layers"])
        ]
    if fields["linear_num_value_heads"] % fields["linear_num_key_heads"]:
        raise CheckpointError(
            f"linear_num_value_heads={fields['linear_num_value_heads']}: must be a multiple of"
            f" linear_num_key_heads={fields['linear_num_key_heads']}: each head of keys serves an"
            " equal group of value heads"
        )
    check_turned(fields)
    linear = LinearAttention(
        key_heads=fields["linear_num_key_heads"],
        value_heads=fields["linear_num_value_heads"],
        key_dim=fields["linear_key_head_dim"],
        value_dim=fields["linear_value_head_dim"],
        kernel=fields["linear_conv_kernel_dim"],
        by_key_head=by_key_head,
        **changes,
    )
    return parse_layers(kinds, linear)


def format_fields(config: ModelConfig) -> JsonObject:
    """Return the fields of config.json that `parse` reads."""
    fields = {
        "layer_types": format_layers(config),
        "partial_rotary_factor": config.rope.turned,
    }
    if not isinstance(sizes := config.linear, LinearAttention):  # as in a module of one layer
        return fields
    return fields | {
        "linear_conv_kernel_dim": sizes.kernel,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
    }
