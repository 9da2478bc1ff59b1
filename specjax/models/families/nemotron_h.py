"""Nemotron-H and Nemotron 3 (NVIDIA, 2025, arXiv 2504.03624): a layer is one block.

A block is a layer of Mamba-2, attention without positions, an MLP or experts, none with gates.
"""

from dataclasses import replace
from typing import Any

from specjax.errors import InputError
from specjax.models.config import ModelConfig, Rope
from specjax.models.families import experts, mamba2
from specjax.models.families.base import Family, Fused
from specjax.models.families.ropes import FULL
from specjax.models.families.states import LINEAR, parse_layers
from specjax.models.fields import Fields, FieldTable, JsonObject, flag, number, text, whole
from specjax.models.memory import Mamba2

MODULES = "mtp."
"""The prefix of the names of MTP modules' tensors."""

_MLP, _MOE = "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _MOE}
"""The kinds of layers in ``hybrid_override_pattern``."""

_ACTIVATIONS = ("relu2", "silu")

_LEAST_STEP = 1e-9

_FIELDS: FieldTable = {
    **experts.GROUPED_FIELDS,
    **mamba2.LIMIT_FIELDS,
    "mamba_num_heads": whole(1, 100_000),
    "mamba_head_dim": whole(1, 100_000),
    "n_groups": whole(1, 100_000),
    "ssm_state_size": whole(1, 100_000),
    "conv_kernel": whole(2, 1000),
    "use_bias": flag(default=False),
    "use_conv_bias": flag(default=True),
    "mamba_hidden_act": text("silu", "swish", default="silu"),
    "mlp_hidden_act": text(*_ACTIVATIONS, default="relu2"),
    "layer_norm_epsilon": number(1e-12, 0.1, default=1e-5),
    "moe_shared_expert_intermediate_size": whole(1, 10_000_000),
    "moe_latent_size": whole(1, 1_000_000, default=None),
}


def _derived(fields: Fields) -> dict[str, Any]:
    """Return the kinds of layers and their number, which is not read, as in transformers."""
    kinds = fields.get("layers_block_type") or fields.get("layer_types")
    pattern = fields.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = [_LETTERS.get(letter, letter) for letter in pattern]
    if kinds is None:
        kinds = [LINEAR, _MOE, FULL, _MLP]
    count = len(kinds) if isinstance(kinds, list) else fields.get("num_hidden_layers")
    return {"layer_types": mamba2.today(kinds), "num_hidden_layers": count}


def _parse(fields: Fields) -> dict[str, Any]:
    kinds = fields["layer_types"]
    sizes = Mamba2(
        key_heads=fields["n_groups"],
        value_heads=fields["mamba_num_heads"],
        key_dim=fields["ssm_state_size"],
        value_dim=fields["mamba_head_dim"],
        kernel=fields["conv_kernel"],
        convolution_bias=fields["use_conv_bias"],
        projection_bias=fields["use_bias"],
        output_bias=fields["use_bias"],
    )
    moe = {"moe": _parse_experts(fields)} if _MOE in kinds else {}
    return {
        **parse_layers(kinds, sizes),
        **moe,
        "mlp_layers": tuple(i for i, kind in enumerate(kinds) if kind in (_MLP, _MOE)),
        "activation": fields["mlp_hidden_act"],
        "rope": Rope(kind="none"),
        "norm_eps": fields["layer_norm_epsilon"],
    }


def _parse_experts(fields: Fields) -> Any:
    size, shared = fields["moe_intermediate_size"], fields["moe_shared_expert_intermediate_size"]
    if shared % size:
        raise InputError(
            f"moe_shared_expert_intermediate_size={shared}: must be a multiple of"
            f" moe_intermediate_size={size}"
        )
    if fields["mlp_bias"]:
        raise InputError("mlp_bias=true: must be false in a model with experts")
    dense = tuple(i for i, kind in enumerate(fields["layer_types"]) if kind == _MLP)
    counted = {**fields, "n_shared_experts": shared // size}
    return replace(experts.parse_grouped(counted, dense), latent_size=fields["moe_latent_size"])


def _format(config: ModelConfig) -> JsonObject:
    kinds = [_kind(config, layer) for layer in range(config.num_layers)]
    letters = {kind: letter for letter, kind in _LETTERS.items()}
    raw: JsonObject = {
        "layers_block_type": kinds,
        "hybrid_override_pattern": "".join(letters[kind] for kind in kinds),
        "mlp_hidden_act": config.activation,
        "layer_norm_epsilon": config.norm_eps,
        # transformers raises the steps of prompts to it, but not those of decoding.
        "time_step_min": _LEAST_STEP,
    }
    if isinstance(sizes := config.linear, Mamba2):
        raw |= {
            "n_groups": sizes.key_heads,
            "mamba_num_heads": sizes.value_heads,
            "ssm_state_size": sizes.key_dim,
            "mamba_head_dim": sizes.value_dim,
            "conv_kernel": sizes.kernel,
            "use_conv_bias": sizes.convolution_bias,
            "use_bias": sizes.projection_bias,
        }
    if (moe := config.moe) is not None:
        raw |= experts.format_grouped(config) | {
            "moe_shared_expert_intermediate_size": moe.shared_experts * moe.intermediate_size,
            "moe_latent_size": moe.latent_size,
        }
    return raw


def _kind(config: ModelConfig, layer: int) -> str:
    """Return the kind of a layer, as config.json names it."""
    if config.is_linear(layer):
        return LINEAR
    if config.has_mixer(layer):
        return FULL
    return _MOE if config.is_sparse(layer) else _MLP


NEMOTRON_H = Family(
    title="Nemotron-H, Nemotron 3",
    models=(
        "Nemotron-H-8B to 56B, Nemotron 3 Nano, Super and Ultra: hybrids with Mamba-2, "
        "also with experts"
    ),
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    defaults={
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    switches={"gated_mlp": False},
    biases={"mlp_bias": ("mlp_bias",)},
    kinds=(LINEAR, FULL, _MLP, _MOE),
    ropes_by_kind=True,
    fields=_FIELDS,
    derived_from=dict.fromkeys(("layers_block_type", "hybrid_override_pattern"), "layer_types"),
    derived=_derived,
    parse=_parse,
    format=_format,
    prefixes=("backbone.", "model."),
    names={
        "embed_tokens": "embeddings",
        "model.norm.": "model.norm_f.",
        "input_layernorm": "norm",
        "post_attention_layernorm": "norm",
        ".self_attn.": ".mixer.",
        ".mamba.": ".mixer.",
        ".mlp.": ".mixer.",
        "latent_in": "fc1_latent_proj",
        "latent_out": "fc2_latent_proj",
    },
    fused=mamba2.FUSED,
    fused_where_stored=tuple(
        Fused(f"mlp.experts.{name}_proj", (f"mlp.experts.{{}}.{name}_proj.weight",))
        for name in ("up", "down")
    ),
    left_over=lambda _: (f"{MODULES}*",),
)
