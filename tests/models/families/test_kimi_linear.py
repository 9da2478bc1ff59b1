"""The config.json of Kimi Linear and OLMo Hybrid: published forms, and what is refused."""

import pytest

from specjax.models import config_json
from specjax.models.fields import CheckpointError
from specjax.models.memory import KimiDeltaAttention
from specjax.models.published import parameter_count
from tests.models.families.hub_files import count_by_transformers

KIMI = {  # Kimi-Linear-48B-A3B
    "model_type": "kimi_linear",
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "model_max_length": 1_048_576,
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "tie_word_embeddings": False,
}
OLMO = {  # Olmo-Hybrid-7B
    "model_type": "olmo_hybrid",
    "num_hidden_layers": 32,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "tie_word_embeddings": False,
}


@pytest.mark.full
@pytest.mark.parametrize("file", [KIMI, OLMO], ids=["kimi_linear", "olmo_hybrid"])
def test_a_published_model_has_as_many_parameters_as_in_transformers(file) -> None:
    assert parameter_count(config_json.parse_config(dict(file))) == count_by_transformers(
        dict(file)
    )


def test_the_published_form_of_kimi_linear_is_read() -> None:
    config = config_json.parse_config(dict(KIMI))
    assert config.layers_with_entries == (3, 7, 11, 15, 19, 23, 26)
    assert config.linear == KimiDeltaAttention(key_heads=32, key_dim=128)
    assert config.moe is not None and config.moe.dense_layers == (0,)
    assert (config.max_positions, config.rope.kind) == (1_048_576, "none")
    formatted = config_json.format_config(config, "bfloat16")
    assert config_json.parse_config(formatted) == config


def test_the_defaults_of_olmo_hybrid_are_those_of_transformers() -> None:
    config = config_json.parse_config(dict(OLMO))
    sizes = config.linear
    assert config.layers_with_entries == tuple(range(3, 32, 4)) and config.rope.kind == "none"
    assert sizes is not None and sizes.table == (30, 96, 192)
    assert [config.of_layer(layer).norms for layer in (2, 3)] == ["before", "after"]


REFUSALS = [
    (
        KIMI,
        {"linear_attn_config": {"gate_lower_bound": -5.0}},
        "gate_lower_bound=-5.0: is not read",
    ),
    (KIMI, {"layer_types": ["linear_attention"] * 27}, "layer_types: none is 'full_attention'"),
    (
        KIMI,
        {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2]}},
        "must name each layer from 1 to num_hidden_layers=27",
    ),
    (KIMI, {"mla_use_nope": False}, "mla_use_nope=False: must be left out, or true"),
    (KIMI, {"hidden_act": "situ"}, "hidden_act='situ': must be one of silu"),
    (OLMO, {"layer_types": ["full_attention"] * 32}, "layer_types: none is 'linear_attention'"),
    (OLMO, {"rope_theta": 5e5}, "rope_theta=500000.0: rope_parameters.rope_theta is null"),
]


@pytest.mark.parametrize(("file", "changes", "message"), REFUSALS)
def test_what_is_not_implemented_is_refused(file, changes, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_json.parse_config(file | changes)


def test_kimi_k3_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"its residuals \(attn_res_block_size\)"):
        config_json.parse_config({"model_type": "kimi_k3"})
