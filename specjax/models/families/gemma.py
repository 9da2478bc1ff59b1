"""The common parts of the Gemma families."""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.fields import (
    CheckpointError,
    Field,
    Fields,
    FieldTable,
    JsonObject,
    number,
    text,
)

GELU = "gelu_pytorch_tanh"
COMMON_FIELDS: FieldTable = {
    "hidden_act": text(GELU, default=GELU),
    "hidden_activation": text(GELU, default=GELU),
    "final_logit_softcapping": number(1e-6, 1e6, default=None),
}
"""The fields of config.json that all Gemma families have."""

FIELDS: FieldTable = {
    **COMMON_FIELDS,
    "attn_logit_softcapping": number(1e-6, 1e6, default=None),
    "query_pre_attn_scalar": number(1e-6, 1e9, default=256),
    "use_bidirectional_attention": Field(
        "left out, or false: text alone is read", lambda v: v is False, default=None
    ),
}
"""The fields of config.json that Gemma 2 and 3 have."""

DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
"""The defaults of transformers for Gemma 2 and 3; published files leave many fields out."""

SWITCHES: dict[str, Any] = {"activation": "gelu_tanh", "norms": "both", "norm_offset": 1.0}


def parse_common(fields: Fields) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that all Gemma families have."""
    return {
        "embedding_scale": fields["hidden_size"] ** 0.5,
        "logit_cap": fields["final_logit_softcapping"],
    }


def format_common(config: ModelConfig) -> JsonObject:
    """Return the fields of config.json that all Gemma families have."""
    return {
        "hidden_act": GELU,
        "hidden_activation": GELU,
        "final_logit_softcapping": config.logit_cap,
    }


def parse(fields: Fields) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that Gemma 2 and 3 have."""
    return parse_common(fields) | {
        "attention_scale": fields["query_pre_attn_scalar"] ** -0.5,
        "score_cap": fields["attn_logit_softcapping"],
    }


def format_fields(config: ModelConfig) -> JsonObject:
    """Return the fields of config.json that Gemma 2 and 3 have."""
    if config.attention_scale is None:
        raise CheckpointError(
            f"attention_scale=None: a {config.model_type} checkpoint needs it: give head_dim **"
            " -0.5"
        )
    scalar = config.attention_scale**-2
    # Write a whole number if it gives the same scale: rounding in ** must not change the scale.
    return format_common(config) | {
        "query_pre_attn_scalar": (
            round(scalar) if round(scalar) ** -0.5 == config.attention_scale else scalar
        ),
        "attn_logit_softcapping": config.score_cap,
    }
