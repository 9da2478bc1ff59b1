"""The layout of drafters' checkpoints that the speculators package reads and writes."""

from typing import Any

from specjax.models import config_json
from specjax.models.config import ModelConfig
from specjax.models.fields import Field, JsonObject

LEFT_OVER = ("verifier_norm.weight", "verifier_lm_head.weight")
"""The tensors of the target that such a checkpoint may have, and that are ignored."""

LAYER_DEFAULTS: dict[str, JsonObject] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
}
"""The defaults of transformers, by model type. Fields that equal them are left out."""


def layer_numbers(lowest: int) -> Field:
    """Return a field with the numbers of the target's layers that are read."""

    def accepts(value: Any) -> bool:
        return (
            type(value) is list
            and 0 < len(value) <= 64
            and all(type(i) is int and lowest <= i < 10_000 for i in value)
        )

    return Field("a list of at most 64 layer numbers", accepts, None)


def format_common(
    layer: ModelConfig, algorithm: str, tokens: int, dtype: str, target: str
) -> JsonObject:
    """Return the last fields of config.json, which all drafters have.

    Args:
        layer: the configuration of the layers.
        algorithm: the name of the kind of drafter.
        tokens: the number of tokens to draft.
        dtype: the data type of the weights.
        target: the target's directory or hub id, or an empty string.
    """
    return {
        "transformer_layer_config": config_json.format_config(layer, dtype),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": target or None, "architectures": []},
        },
        "dtype": dtype,
        "torch_dtype": dtype,
    }
