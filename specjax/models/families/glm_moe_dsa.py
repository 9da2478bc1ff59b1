"""GLM-5 (Zhipu, 2026, arXiv 2602.15763): DeepSeek-V3.2, whose layers may share what they select.

GLM-5.2 has an indexer in every fourth layer alone (arXiv 2603.12201).
"""

from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families import indexed
from specjax.models.families.base import Family
from specjax.models.fields import (
    CheckpointError,
    Field,
    Fields,
    FieldTable,
    JsonObject,
    always,
    show,
    texts,
    whole,
)

_FULL, _SHARED = "full", "shared"
_KINDS: dict[str, str] = {"F": _FULL, "S": _SHARED}
_PATTERN = "index_topk_pattern"
_FIELDS: FieldTable = {
    **indexed.FIELDS,
    "indexer_rope_interleave": always(True),
    "indexer_types": texts(default=None),
    _PATTERN: Field(
        "text of F and S, or a list of the kinds of indexers",
        lambda value: type(value) is str or texts().accepts(value),
        default=None,
    ),
    "index_topk_freq": whole(0, 10_000, default=1),
    "index_skip_topk_offset": whole(0, 10_000, default=2),
}


def _indexer_types(fields: Fields) -> tuple[str, list[str]]:
    """Return the field that says which layers have an indexer, and the kind of each layer's."""
    count = fields["num_hidden_layers"]
    if fields["indexer_types"] is not None:
        return "indexer_types", fields["indexer_types"]
    pattern: str | list[str] | None = fields[_PATTERN]
    if pattern is not None:
        # Text has a letter for each layer, and a list has the kinds themselves.
        is_text = isinstance(pattern, str)
        return _PATTERN, [_KINDS.get(kind, kind) if is_text else kind for kind in pattern]
    every, offset = max(fields["index_topk_freq"], 1), fields["index_skip_topk_offset"]
    ranks = [max(layer - offset + 1, 0) for layer in range(count)]
    return "index_topk_freq", [_SHARED if rank % every else _FULL for rank in ranks]


def _shared_layers(fields: Fields) -> tuple[int, ...]:
    """Return the layers without an indexer of their own."""
    name, kinds = _indexer_types(fields)
    count = fields["num_hidden_layers"]
    if len(kinds) != count or not set(kinds) <= {_FULL, _SHARED}:
        raise CheckpointError(
            f"{name}={show(fields[name])}: must be {_FULL!r} or {_SHARED!r}, in a text pattern F or"
            f" S, for each of num_hidden_layers={count}"
        )
    if kinds[0] == _SHARED:
        raise CheckpointError(
            f"{name}={show(fields[name])}: the first layer must have an indexer, since no layer"
            " before it has selected keys"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _SHARED)


def _parse(fields: Fields) -> dict[str, Any]:
    return indexed.parse(fields, rope_interleaved=True, shared=_shared_layers(fields))


def _format(config: ModelConfig) -> JsonObject:
    kinds = [_FULL if config.has_indexer(layer) else _SHARED for layer in range(config.num_layers)]
    return indexed.format_fields(config) | {
        "indexer_rope_interleave": True,
        "indexer_types": kinds,
    }


GLM_MOE_DSA = Family(
    title="GLM-5",
    models=("GLM-5, 5.1 and 5.2: the indexer of DeepSeek-V3.2, which layers of GLM-5.2 share"),
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    defaults=indexed.defaults(
        max_position_embeddings=202_752,
        num_key_value_heads=64,
        rms_norm_eps=1e-5,
        q_lora_rank=2048,
        qk_nope_head_dim=192,
        v_head_dim=256,
        index_n_heads=32,
        n_group=1,
        topk_group=1,
    ),
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    kinds=indexed.KINDS,
    fields=_FIELDS,
    aliases={"num_local_experts": "n_routed_experts"},
    derived_from={"num_experts": "n_routed_experts"},
    derived=indexed.count_experts,
    parse=_parse,
    format=_format,
    modules_follow=True,
)
