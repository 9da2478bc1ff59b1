"""Gemma 2 (arXiv 2408.00118): norms around attention and MLP, soft caps, alternating windows."""

from specjax.models.families import gemma
from specjax.models.families.base import Family

GEMMA2 = Family(
    title="Gemma 2",
    models="2B, 9B, 27B",
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    defaults=gemma.DEFAULTS
    | {
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    switches=gemma.SWITCHES,
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    windows="any",
    whole_every=2,
    fields=gemma.FIELDS,
    parse=gemma.parse,
    format=gemma.format_fields,
)
