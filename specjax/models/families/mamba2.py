"""The common parts of families with layers of Mamba-2."""

from typing import Any

from specjax.models.families.base import Fused
from specjax.models.families.ropes import FULL
from specjax.models.fields import CheckpointError, Field, FieldTable
from specjax.models.memory import Mamba2

LINEAR = "linear_attention"
"""The kind of layers that keep a state, as ``layer_types`` names it."""

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


def today(kinds: Any) -> Any:
    """Return the kinds of layers with their names of today; what is no list of texts unchanged."""
    if not isinstance(kinds, list):
        return kinds
    return [OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]


def layers_of(kinds: list[str], sizes: Mamba2) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for the layers that are `LINEAR`.

    Raises:
        CheckpointError: No layer has attention.
    """
    if FULL not in kinds:
        raise CheckpointError(f"layer_types: none is {FULL!r}: at least one must be")
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    return {"linear": sizes, "linear_layers": layers} if layers else {}


# --- the fields of Granite 4 and Bamba ------------------------------------------------------------
