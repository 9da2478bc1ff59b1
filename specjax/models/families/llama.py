"""Llama (Touvron et al. 2023, arXiv 2302.13971)."""

from specjax.models.families.base import Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={"max_position_embeddings": 2048},
    biases={"attention_bias": ("qkv_bias", "output_bias"), "mlp_bias": ("mlp_bias",)},
)
