"""The common parts of LFM2 and its models with experts: fields and names of short convolutions."""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families.base import Fused
from specjax.models.families.states import format_layers, parse_layers
from specjax.models.fields import (
    Fields,
    FieldTable,
    JsonObject,
    flag,
    number,
    text,
    whole,
)
from specjax.models.memory import ShortConvolution

CONVOLUTION = "conv"
"""The kind of layers with a short convolution, as ``layer_types`` names it."""

FIELDS: FieldTable = {
    "conv_L_cache": whole(2, 1000, default=3),
    "conv_bias": flag(default=False),
    "norm_eps": number(1e-12, 0.1, default=1e-5),
    "tie_embedding": flag(default=None),
    # transformers does not read this field: SiLU is built in.
    "hidden_act": text("silu", "swish", default="silu"),
}

DEFAULTS: dict[str, Any] = {
    "vocab_size": 65_536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}

NAMES = {
    "model.norm.": "model.embedding_norm.",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    ".mlp.": ".feed_forward.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}
"""The names of tensors."""

FUSED = tuple(
    Fused(
        f"conv.in_proj.{kind}",
        tuple(f"conv.{name}_proj.{kind}" for name in ("gate_in", "gate_out", "value")),
    )
    for kind in ("weight", "bias")
)
"""The tensors that hold several parameters."""


def parse(fields: Fields, kinds: list[str]) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that both families have, for the kinds of layers.

    Raises:
        CheckpointError: No layer has attention.
    """
    sizes = ShortConvolution(
        channels=fields["hidden_size"],
        kernel=fields["conv_L_cache"],
        bias=fields["conv_bias"],
    )
    tied = fields["tie_embedding"]
    return {
        "norm_eps": fields["norm_eps"],
        "tie_embeddings": bool(fields["tie_word_embeddings"] if tied is None else tied),
        **parse_layers(kinds, sizes, CONVOLUTION),
    }


def format_fields(config: ModelConfig) -> JsonObject:
    """Return the fields of config.json that `parse` reads."""
    raw: JsonObject = {
        "norm_eps": config.norm_eps,
        "layer_types": format_layers(config, CONVOLUTION),
    }
    if isinstance(sizes := config.linear, ShortConvolution):
        raw |= {"conv_L_cache": sizes.kernel, "conv_bias": sizes.bias}
    return raw
