"""Qwen2 (Yang et al. 2024, arXiv 2407.10671): a Llama with biases of queries, keys and values; and MiMo (arXiv 2505.07608)."""

from dataclasses import replace

from specjax.models.families.base import Family

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={"max_position_embeddings": 32_768, "sliding_window": 4096},
    switches={"qkv_bias": True},
    windows="any",
    window_switch="use_sliding_window",
)

MIMO_MODULES = "model.mtp_layers."
"""How the names of MiMo's MTP modules begin."""

MIMO = replace(QWEN2, left_over=lambda _: (f"{MIMO_MODULES}*",))
"""A Qwen2 with modules beside it that predict further tokens."""
