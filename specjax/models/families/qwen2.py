"""Qwen2 (Yang et al. 2024, arXiv 2407.10671): Llama with QKV biases. MiMo (arXiv 2505.07608)."""

from dataclasses import replace

from specjax.models.families.base import Family

QWEN2 = Family(
    title="Qwen2",
    models="Qwen2, Qwen2.5",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={"max_position_embeddings": 32_768, "sliding_window": 4096},
    switches={"qkv_bias": True},
    windows="any",
    window_switch="use_sliding_window",
)

MIMO_MODULES = "model.mtp_layers."
"""The prefix of the names of MiMo's MTP modules."""

MIMO = replace(
    QWEN2,
    title="MiMo",
    models="MiMo-7B; its modules for multi-token prediction are a drafter",
    left_over=lambda _: (f"{MIMO_MODULES}*",),
)
"""Qwen2 with MTP modules."""
