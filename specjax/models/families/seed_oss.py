"""Seed-OSS (ByteDance Seed, 2025): Llama with QKV biases, and optionally an output bias."""

from specjax.models.families.base import Family
from specjax.models.fields import flag

SEED_OSS = Family(
    title="Seed-OSS",
    models="Seed-OSS-36B",
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    defaults={
        "max_position_embeddings": 524_288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    biases={
        "attention_bias": ("qkv_bias",),
        "attention_out_bias": ("output_bias",),
        "mlp_bias": ("mlp_bias",),
    },
    fields={"attention_out_bias": flag(default=None)},
)
