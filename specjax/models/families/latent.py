"""The common parts of families with latent attention (MLA)."""

from specjax.models.config import MLA, ModelConfig
from specjax.models.fields import Field, Fields, FieldTable, JsonObject, flag, whole

FIELDS: FieldTable = {
    "kv_lora_rank": whole(1, 1_000_000),
    "q_lora_rank": whole(1, 1_000_000, default=None),
    "qk_nope_head_dim": whole(1, 100_000),
    "qk_rope_head_dim": Field(
        "an even number from 2 to 100,000",
        lambda v: type(v) is int and 2 <= v <= 100_000 and v % 2 == 0,
    ),
    "v_head_dim": whole(1, 100_000),
    "rope_interleave": flag(default=True),
}
"""The fields of config.json for latent attention."""


def parse(fields: Fields) -> MLA:
    """Return the latent attention that `FIELDS` describe."""
    return MLA(
        kv_lora_rank=fields["kv_lora_rank"],
        q_lora_rank=fields["q_lora_rank"],
        qk_nope_head_dim=fields["qk_nope_head_dim"],
        qk_rope_head_dim=fields["qk_rope_head_dim"],
        v_head_dim=fields["v_head_dim"],
        rope_interleaved=fields["rope_interleave"],
    )


def format_fields(config: ModelConfig) -> JsonObject:
    """Return the fields of config.json that `parse` reads."""
    if (mla := config.mla) is None:
        return {}
    return {
        "kv_lora_rank": mla.kv_lora_rank,
        "q_lora_rank": mla.q_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_interleave": mla.rope_interleaved,
    }
