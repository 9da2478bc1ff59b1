"""Names and numbers of the layers that keep a state, as config.json has them."""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families.ropes import FULL
from specjax.models.fields import CheckpointError
from specjax.models.memory import StateSizes

LINEAR = "linear_attention"
"""The kind of layers that keep a state, as ``layer_types`` names it."""


def parse_layers(kinds: list[str], sizes: StateSizes, kind: str = LINEAR) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for the layers of ``kind``, whose state has ``sizes``.

    Raises:
        CheckpointError: No layer has attention.
    """
    if FULL not in kinds:
        raise CheckpointError(f"layer_types: none is {FULL!r}: at least one must be")
    layers = tuple(layer for layer, its_kind in enumerate(kinds) if its_kind == kind)
    return {"linear": sizes, "linear_layers": layers} if layers else {}


def format_layers(config: ModelConfig, kind: str = LINEAR) -> list[str]:
    """Return the kind of each layer: ``kind`` if it keeps a state, and full attention otherwise."""
    return [kind if config.is_linear(layer) else FULL for layer in range(config.num_layers)]
