"""DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3, in which an indexer selects each query's keys."""

from typing import Any

from specjax.models.families import indexed
from specjax.models.families.base import Family
from specjax.models.fields import Fields


def _parse(fields: Fields) -> dict[str, Any]:
    return indexed.parse(fields, rope_interleaved=False)


DEEPSEEK_V32 = Family(
    title="DeepSeek-V3.2",
    models="DeepSeek-V3.2: an indexer selects the keys that a query attends to",
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    defaults=indexed.defaults(
        max_position_embeddings=163_840,
        num_key_value_heads=128,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        v_head_dim=128,
        index_n_heads=64,
        n_group=8,
        topk_group=4,
    ),
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    kinds=indexed.KINDS,
    fields=indexed.FIELDS,
    aliases={"num_local_experts": "n_routed_experts"},
    derived_from={"num_experts": "n_routed_experts"},
    derived=indexed.count_experts,
    parse=_parse,
    format=indexed.format_fields,
    modules_follow=True,
)
