"""Granite 3 and 4 (IBM, 2024), dense: Llama with factors of embeddings, scores and logits.

A fourth factor scales what a layer adds to the residual stream.
"""

from specjax.models.families import factors
from specjax.models.families.base import Family

GRANITE = Family(
    title="Granite",
    models="Granite 3 and 4, dense",
    model_type="granite",
    architecture="GraniteForCausalLM",
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    biases={"attention_bias": ("qkv_bias", "output_bias"), "mlp_bias": ("mlp_bias",)},
    fields=factors.FIELDS,
    parse=factors.parse,
    format=factors.format_fields,
)
