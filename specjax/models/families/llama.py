"""Llama (Touvron et al. 2023, arXiv 2302.13971)."""

from specjax.models.families.base import Family

LLAMA = Family(
    title="Llama",
    models="Llama 2, 3, 3.1, 3.2, 3.3, and all models with the same architecture",
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={"max_position_embeddings": 2048},
    biases={"attention_bias": ("qkv_bias", "output_bias"), "mlp_bias": ("mlp_bias",)},
)
