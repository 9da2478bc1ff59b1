"""The common parts of families with layers of Mamba-2."""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families.base import Fused
from specjax.models.families.ropes import FULL
from specjax.models.families.states import LINEAR
from specjax.models.fields import (
    CheckpointError,
    Field,
    Fields,
    FieldTable,
    JsonObject,
    flag,
    text,
    whole,
)
from specjax.models.memory import Mamba2

OLDER_KINDS = {"mamba": LINEAR, "attention": FULL}
"""The kinds of layers in older files, and their names today."""


def _is_unlimited(value: Any) -> bool:
    """Return whether limits of the step, as JSON has them, allow every positive number."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    low, high = value
    is_infinite = high == {"__float__": "Infinity"} or (isinstance(high, float) and high > 1e30)
    return type(low) in (int, float) and low <= 0 and is_infinite


LIMIT_FIELDS: FieldTable = {
    "time_step_limit": Field(
        "[0.0, Infinity] or left out: limits of the step are not implemented",
        _is_unlimited,
        default=None,
    )
}
"""The field with the limits of the step."""

FUSED = (
    *(
        Fused(
            f"mamba.in_proj.{kind}",
            tuple(f"mamba.{name}_proj.{kind}" for name in ("z", "x", "b", "c", "step")),
        )
        for kind in ("weight", "bias")
    ),
    Fused("mamba.conv1d.weight", tuple(f"mamba.conv_{name}.weight" for name in "xbc"), axis=0),
    Fused("mamba.conv1d.bias", tuple(f"mamba.conv_{name}.bias" for name in "xbc"), axis=0),
)
"""The tensors that hold several parameters."""


NAMES = {
    "model.norm.": "model.final_layernorm.",
    "post_attention_layernorm": "pre_ff_layernorm",
    ".mlp.": ".feed_forward.",
}
"""The names of tensors of Bamba and Falcon-H1."""


def today(kinds: Any) -> Any:
    """Return the kinds of layers with their names of today; what is no list of texts unchanged."""
    if not isinstance(kinds, list):
        return kinds
    return [OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]


# --- the fields of Granite 4 and Bamba ------------------------------------------------------------

FIELDS: FieldTable = {
    **LIMIT_FIELDS,
    "mamba_n_heads": whole(1, 100_000),
    "mamba_d_head": Field(
        "'auto' or a whole number from 1 to 100,000",
        lambda value: value == "auto" or (type(value) is int and 1 <= value <= 100_000),
    ),
    "mamba_n_groups": whole(1, 100_000),
    "mamba_d_state": whole(1, 100_000),
    "mamba_d_conv": whole(2, 1000),
    "mamba_expand": whole(1, 1000),
    "mamba_conv_bias": flag(default=True),
    "mamba_proj_bias": flag(default=False),
    "hidden_act": text("silu", "swish", default="silu"),  # Mamba-2 has SiLU built in
}

DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


def parse_sizes(fields: Fields, inner: int | None = None) -> Mamba2:
    """Return the sizes that `FIELDS` describe.

    Args:
        fields: the fields of config.json.
        inner: the size of all heads together; None for that of the expanded hidden state.

    Raises:
        CheckpointError: The heads do not have this size.
    """
    required, heads = str(inner), fields["mamba_n_heads"]
    if inner is None:
        inner = fields["mamba_expand"] * fields["hidden_size"]
        required = f"mamba_expand * hidden_size={inner}"
    dim = inner // heads if fields["mamba_d_head"] == "auto" else fields["mamba_d_head"]
    if dim * heads != inner:
        raise CheckpointError(
            f"mamba_d_head={dim}: mamba_n_heads={heads} of them must have {required} numbers"
        )
    return Mamba2(
        key_heads=fields["mamba_n_groups"],
        value_heads=heads,
        key_dim=fields["mamba_d_state"],
        value_dim=dim,
        kernel=fields["mamba_d_conv"],
        convolution_bias=fields["mamba_conv_bias"],
        projection_bias=fields["mamba_proj_bias"],
        output_bias=fields["mamba_proj_bias"],
    )


def format_sizes(config: ModelConfig) -> JsonObject:
    """Return the fields of config.json that `parse_sizes` reads.

    Raises:
        CheckpointError: The heads have another size than these files can express.
    """
    if not isinstance(sizes := config.linear, Mamba2):
        return {}
    inner = sizes.value_heads * sizes.value_dim
    if inner % config.hidden_size:
        raise CheckpointError(
            f"linear: {sizes.value_heads} heads of {sizes.value_dim}: must have a multiple of"
            f" hidden_size={config.hidden_size} numbers in a {config.model_type} checkpoint"
        )
    return format_heads(sizes) | {"mamba_expand": inner // config.hidden_size}


def format_heads(sizes: Mamba2) -> JsonObject:
    """Return the fields of config.json about heads, the convolution and biases."""
    return {
        "mamba_n_heads": sizes.value_heads,
        "mamba_d_head": sizes.value_dim,
        "mamba_n_groups": sizes.key_heads,
        "mamba_d_state": sizes.key_dim,
        "mamba_d_conv": sizes.kernel,
        "mamba_conv_bias": sizes.convolution_bias,
        "mamba_proj_bias": sizes.projection_bias,
    }
