"""Qwen3 (Yang et al. 2025, arXiv 2505.09388): Llama with QK norms."""

from dataclasses import replace

from specjax.models.families.base import Family
from specjax.models.fields import text

QWEN3 = Family(
    title="Qwen3",
    models="Qwen3, 0.6B to 32B",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={"max_position_embeddings": 32_768, "sliding_window": 4096, "head_dim": 128},
    switches={"qk_norm": True},
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    windows="any",
    window_switch="use_sliding_window",
)

QWEN3_VL = replace(
    QWEN3,
    title="Qwen3-VL",
    models="2B to 32B, 30B-A3B, 235B-A22B: the text model of each",
    defaults={"max_position_embeddings": 128_000, "num_key_value_heads": 32, "head_dim": 128},
    windows="none",
    window_switch=None,
    theta=500_000.0,
    fields={"model_type": text("qwen3_vl_text", default="qwen3_vl_text")},
    nested="text_config",
    prefixes=("model.language_model.",),
)
"""The text model of Qwen3-VL, whose vision tower is not read.

Text has the same position on all three axes of its RoPE, which is then Qwen3's.
"""
