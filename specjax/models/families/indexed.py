"""The common parts of families in which an indexer selects the keys of latent attention."""

from typing import Any

from specjax.models.config import Indexer, ModelConfig
from specjax.models.families import experts, latent
from specjax.models.fields import Fields, FieldTable, JsonObject, always, whole

_INDEXED = "indexed_attention"
KINDS = (_INDEXED, "deepseek_sparse_attention")
"""The kind of these layers, as ``layer_types`` names it today and in older files."""

FIELDS: FieldTable = {
    **latent.FIELDS,
    **experts.GROUPED_FIELDS,
    **experts.KIND_FIELDS,
    **experts.FIRST_DENSE_FIELDS,
    "q_lora_rank": whole(1, 1_000_000),
    "rope_interleave": always(True),
    "index_n_heads": whole(1, 100_000),
    "index_head_dim": whole(1, 100_000),
    "index_topk": whole(1, 1_000_000_000),
}
"""The fields of config.json for latent attention with an indexer, and DeepSeek-V3's experts."""


def defaults(**changes: Any) -> dict[str, Any]:
    """Return the defaults of all families with an indexer, with ``changes`` of one of them."""
    common = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return common | changes


def count_experts(fields: Fields) -> dict[str, Any]:
    """Return the number of experts by the name that is read, if a file has the other name."""
    count = fields.get("num_experts")
    return {} if count is None else {"n_routed_experts": count}


def parse(fields: Fields, rope_interleaved: bool, shared: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that `FIELDS` describe.

    Args:
        fields: the fields of config.json.
        rope_interleaved: whether pairs of the indexer are neighbours.
        shared: the layers without an indexer.
    """
    if fields["mlp_layer_types"] is None:
        dense = experts.first_dense(fields)
    else:
        dense = experts.dense_by_kind(fields)
    mla = latent.parse(fields)
    indexer = Indexer(
        heads=fields["index_n_heads"],
        head_dim=fields["index_head_dim"],
        topk=fields["index_topk"],
        rope_interleaved=rope_interleaved,
        shared_layers=shared,
    )
    return {
        "mla": mla,
        "indexer": indexer,
        "moe": experts.parse_grouped(fields, dense),
        "head_dim": mla.qk_rope_head_dim,
    }


def format_fields(config: ModelConfig) -> JsonObject:
    """Return the fields of config.json that `parse` reads."""
    raw = latent.format_fields(config)
    raw |= experts.format_grouped(config) | experts.format_kinds(config)
    if (indexer := config.indexer) is None:
        return raw
    return raw | {
        "index_n_heads": indexer.heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.topk,
        "layer_types": [_INDEXED] * config.num_layers,
    }
