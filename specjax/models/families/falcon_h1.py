"""Falcon-H1 (Technology Innovation Institute, 2025): every layer has attention beside Mamba-2.

Constant factors multiply inputs and outputs of both, of the MLP and of embeddings and logits.
"""

from dataclasses import replace
from typing import Any

from specjax.models.config import LayerFactors, ModelConfig
from specjax.models.families import mamba2
from specjax.models.families.base import Family
from specjax.models.fields import Field, Fields, FieldTable, JsonObject, flag, number, whole
from specjax.models.memory import Mamba2


def _factors(count: int) -> Field:
    factor = number(-1e6, 1e6)
    return Field(
        f"a list of {count} numbers",
        lambda value: (
            type(value) is list and len(value) == count and all(map(factor.accepts, value))
        ),
        default=None,
    )


_FACTORS = {  # Hugging Face's name -> ours
    "attention_in_multiplier": "attention_in",
    "attention_out_multiplier": "attention_out",
    "key_multiplier": "key",
    "ssm_in_multiplier": "state_in",
    "ssm_out_multiplier": "state_out",
}
_FIELDS: FieldTable = {
    **{name: field for name, field in mamba2.FIELDS.items() if name != "mamba_expand"},
    **{name: number(-1e6, 1e6, default=1.0) for name in _FACTORS},
    "ssm_multipliers": _factors(5),
    "mlp_multipliers": _factors(2),
    "embedding_multiplier": number(1e-6, 1e6, default=1.0),
    "lm_head_multiplier": number(1e-6, 1e6, default=1.0),
    "mamba_d_ssm": whole(1, 10_000_000, default=None),
    "mamba_expand": whole(1, 1000, default=2),
    "mamba_norm_before_gate": flag(default=True),
    "mamba_rms_norm": flag(default=False),
    "projectors_bias": flag(default=False),
}


def _parse(fields: Fields) -> dict[str, Any]:
    inner = fields["mamba_d_ssm"] or fields["mamba_expand"] * fields["hidden_size"]
    before = "before_gate" if fields["mamba_norm_before_gate"] else "after_gate"
    gate, down = fields["mlp_multipliers"] or (1.0, 1.0)
    return {
        "linear": replace(
            mamba2.parse_sizes(fields, inner),
            output_bias=fields["projectors_bias"],
            norm=before if fields["mamba_rms_norm"] else "none",
            beside_attention=True,
        ),
        "linear_layers": tuple(range(fields["num_hidden_layers"])),
        "factors": LayerFactors(
            **{ours: float(fields[name]) for name, ours in _FACTORS.items()},
            state_parts=tuple(map(float, fields["ssm_multipliers"] or (1.0,) * 5)),
            gate=float(gate),
            down=float(down),
        ),
        "embedding_scale": float(fields["embedding_multiplier"]),
        "embedding_scale_rounded": False,
        "logit_divisor": 1.0 / fields["lm_head_multiplier"],
    }


def _format(config: ModelConfig) -> JsonObject:
    factors, sizes = config.factors or LayerFactors(), config.linear
    raw: JsonObject = {name: getattr(factors, ours) for name, ours in _FACTORS.items()}
    raw |= {
        "ssm_multipliers": list(factors.state_parts),
        "mlp_multipliers": [factors.gate, factors.down],
        "embedding_multiplier": config.embedding_scale,
        "lm_head_multiplier": 1.0 / config.logit_divisor,
    }
    if not isinstance(sizes, Mamba2):
        return raw
    return raw | {
        "mamba_d_ssm": sizes.value_heads * sizes.value_dim,
        **mamba2.format_heads(sizes),
        "projectors_bias": sizes.output_bias,
        "mamba_rms_norm": sizes.norm != "none",
        "mamba_norm_before_gate": sizes.norm != "after_gate",
    }


FALCON_H1 = Family(
    title="Falcon-H1",
    models="0.5B to 34B: attention and Mamba-2 side by side in every layer",
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    defaults={
        **mamba2.DEFAULTS,
        "mamba_d_ssm": 1024,
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    biases={"attention_bias": ("qkv_bias", "output_bias"), "mlp_bias": ("mlp_bias",)},
    fields=_FIELDS,
    derived=lambda _: {"layer_types": None},
    parse=_parse,
    format=_format,
    names=mamba2.NAMES,
    fused=mamba2.FUSED,
)
