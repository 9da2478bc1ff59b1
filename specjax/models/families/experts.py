"""What families with experts have in common."""

from typing import Any

from specjax.models.config import MoE
from specjax.models.fields import Field, whole

FIELDS: dict[str, Field] = {
    "num_experts_per_tok": whole(1, 100_000),
    "moe_intermediate_size": whole(1, 10_000_000),
}
"""The fields of config.json that all of them have."""


def format_experts(moe: MoE) -> dict[str, Any]:
    """The fields of config.json that all of them write."""
    return {
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.normalise,
    }
