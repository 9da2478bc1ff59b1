"""Qwen3 (Yang et al. 2025, arXiv 2505.09388): Llama with QK norms."""

from specjax.models.families.base import Family

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={"max_position_embeddings": 32_768, "sliding_window": 4096, "head_dim": 128},
    switches={"qk_norm": True},
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    windows="any",
    window_switch="use_sliding_window",
)
