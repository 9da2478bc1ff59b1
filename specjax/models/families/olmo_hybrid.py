"""OLMo Hybrid (Ai2, 2026): layers of Gated DeltaNet, and OLMo 3's attention in every fourth.

The layers with attention have norms after attention and MLP, and the others before them.
"""

from typing import Any

from specjax.models.config import Layer, LinearAttention, ModelConfig, Rope
from specjax.models.families import delta_net
from specjax.models.families.base import Family
from specjax.models.families.ropes import FULL, format_rope, parse_rope
from specjax.models.families.states import LINEAR
from specjax.models.fields import CheckpointError, Fields, FieldTable, JsonObject, flag, text, whole

_SIZES = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_FIELDS: FieldTable = {name: delta_net.FIELDS[name] for name in _SIZES} | {
    "linear_allow_neg_eigval": flag(default=True),
    "hidden_act": text("silu", "swish", default="silu"),  # the convolution has it as well
    "full_attention_interval": whole(1, 1_000_000, default=4),
}

_NORM_EPS = 1e-5
"""The epsilon of the norm of the rule's output, regardless of config.json."""


def _derived(fields: Fields) -> dict[str, Any]:
    """Return the kinds of layers, and the sizes of linear attention. Nothing is checked yet."""
    count, hidden, heads = (
        fields.get(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    derived: dict[str, Any] = {"full_attention_interval": 4}
    if fields.get("layer_types") is None and type(count) is int and 1 <= count <= 10_000:
        kinds = [FULL if layer % 4 == 3 else LINEAR for layer in range(count)]
        derived["layer_types"] = [*kinds[:-1], FULL] if FULL not in kinds else kinds
    has_rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    if not has_rope and fields.get("rope_theta", 0) is None:  # null, and not left out
        derived["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
    sizes = {name: fields.get(name) for name in _SIZES[1:]}
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        sizes[name] = heads if sizes[name] is None else sizes[name]
    keys = sizes["linear_num_key_heads"]
    if sizes["linear_key_head_dim"] is None and type(hidden) is int and type(keys) is int and keys:
        sizes["linear_key_head_dim"] = int(0.75 * hidden / keys)
    dim = sizes["linear_key_head_dim"]
    if sizes["linear_value_head_dim"] is None and type(dim) is int:
        sizes["linear_value_head_dim"] = 2 * dim
    return derived | sizes


def _parse(fields: Fields) -> dict[str, Any]:
    kinds = fields["layer_types"]
    if LINEAR not in kinds:
        raise CheckpointError(f"layer_types: none is {LINEAR!r}: give a model of another type")
    return {
        **delta_net.parse(
            fields,
            by_key_head=False,
            largest_share=2.0 if fields["linear_allow_neg_eigval"] else 1.0,
            norm_eps=_NORM_EPS,
        ),
        "layers": tuple(Layer(norms="after" if kind == FULL else None) for kind in kinds),
        "rope": _parse_rope(fields),
    }


def _parse_rope(fields: Fields) -> Rope:
    """Return the rope; layers have none if its ``rope_theta`` is null, as published."""
    rope = fields["rope_scaling"] or fields["rope_parameters"]
    if rope and "rope_theta" in rope and rope["rope_theta"] is None:
        if fields["rope_theta"] is not None:
            raise CheckpointError(
                f"rope_theta={fields['rope_theta']}: rope_parameters.rope_theta is null, so layers"
                " have no positions: leave out one of them"
            )
        return Rope(kind="none")
    return parse_rope(fields)


def _format(config: ModelConfig) -> JsonObject:
    raw = delta_net.format_fields(config)
    del raw["partial_rotary_factor"]
    raw["pad_token_id"] = None  # the default may be beyond the vocabulary
    if isinstance(sizes := config.linear, LinearAttention):
        raw["linear_allow_neg_eigval"] = sizes.largest_share == 2.0
    if config.rope.kind == "none":
        return raw | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    return raw | {"rope_parameters": format_rope(config.rope)}


OLMO_HYBRID = Family(
    title="OLMo Hybrid",
    models="7B: Gated DeltaNet in three layers of four",
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    defaults={
        "vocab_size": 100_352,
        "hidden_size": 3840,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 100_257,
        "linear_conv_kernel_dim": 4,
    },
    switches={"qk_norm": True, "qk_norm_over_heads": True},
    biases={"attention_bias": ("qkv_bias", "output_bias")},
    kinds=(FULL, LINEAR),
    ropes_by_kind=True,
    fields=_FIELDS,
    derived=_derived,
    parse=_parse,
    format=_format,
    names={
        "input_layernorm": "attention_layer_norm",
        "linear_attn.in_proj_z": "linear_attn.g_proj",
        "linear_attn.in_proj_b": "linear_attn.b_proj",
        "linear_attn.in_proj_a": "linear_attn.a_proj",
        "linear_attn.out_proj": "linear_attn.o_proj",
        "linear_attn.norm": "linear_attn.o_norm",
        **delta_net.CONVOLUTION_NAMES,
    },
    names_elsewhere={
        "attention_layer_norm": "input_layernorm",
        "post_attention_layernorm": "feedforward_layer_norm",
    },
)
