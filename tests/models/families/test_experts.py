"""Experts and latent attention in config.json: what is refused, and with which message."""

import pytest

from specjax.models import config_json
from specjax.models.config import MoE
from specjax.models.fields import CheckpointError
from tests.conftest import MIXTURES, tiny_config

FAULTS = [
    (
        "deepseek_v3",
        {"scoring_func": "softmax"},
        "config.json: scoring_func='softmax': must be one of sigmoid",
    ),
    (
        "deepseek_v3",
        {"topk_method": "group_limited_greedy"},
        "topk_method='group_limited_greedy': must be one of noaux_tc",
    ),
    ("deepseek_v3", {"hidden_act": "tanh"}, "hidden_act='tanh': must be one of silu"),
    (
        "deepseek_v3",
        {"rope_scaling": None, "rope_parameters": {"rope_type": "longrope"}},
        "rope_parameters.rope_type='longrope': must be one of default",
    ),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2: must be a whole number from 1 to 1"),
    ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank=None: must be a whole number"),
    ("deepseek_v3", {"qk_rope_head_dim": 3}, "qk_rope_head_dim=3: must be an even number"),
    (
        "deepseek_v3",
        {"num_key_value_heads": 2},
        "num_kv_heads=2: with latent attention .* num_kv_heads is num_heads=",
    ),
    ("deepseek_v3", {"n_group": 3}, "num_experts=8 is no multiple of groups=3"),
    (
        "deepseek_v3",
        {"topk_group": 5},
        "groups=4 of 2 experts with groups_kept=5: groups_kept must be at most groups",
    ),
    ("deepseek_v3", {"n_group": 8}, "groups=8 of 1 experts .* needs two"),
    (
        "deepseek_v3",
        {"topk_group": 1, "num_experts_per_tok": 3},
        "experts_per_token=3: a token can only choose from 2 experts",
    ),
    (
        "deepseek_v3",
        {"num_nextn_predict_layers": 1, "n_routed_experts": "8"},
        "n_routed_experts='8': must be a whole number",
    ),
    ("qwen3_moe", {"num_experts": "remove"}, "num_experts is missing"),
    (
        "qwen3_moe",
        {"num_experts_per_tok": 9},
        "experts_per_token=9: a token can only choose from 8 experts",
    ),
    (
        "qwen3_moe",
        {"mlp_only_layers": [-1]},
        r"mlp_only_layers=\[-1\]: must be a list of layers, counted from 0",
    ),
]


@pytest.mark.parametrize(("family", "change", "message"), FAULTS)
def test_what_is_not_supported_is_refused_by_field_and_value(family, change, message) -> None:
    raw = config_json.format_config(tiny_config(**MIXTURES[family]), "float32") | change
    with pytest.raises(CheckpointError, match=message) as caught:
        config_json.parse_config({name: value for name, value in raw.items() if value != "remove"})
    assert "\n" not in str(caught.value)


def test_every_second_layer_is_sparse_and_some_are_not() -> None:
    raw = config_json.format_config(tiny_config(num_layers=6, **MIXTURES["qwen3_moe"]), "float32")
    config = config_json.parse_config(raw | {"decoder_sparse_step": 2, "mlp_only_layers": [3, 17]})
    assert [layer for layer in range(6) if config.is_sparse(layer)] == [1, 5]


def test_the_first_layers_of_deepseek_are_dense() -> None:
    raw = config_json.format_config(tiny_config(num_layers=4, **MIXTURES["deepseek_v3"]), "float32")
    config = config_json.parse_config(raw | {"first_k_dense_replace": 3})
    assert [config.is_sparse(layer) for layer in range(5)] == [False, False, False, True, True]


def test_transformers_5_has_another_name_for_the_number_of_experts() -> None:
    config = tiny_config(**MIXTURES["qwen3_moe"])
    raw = config_json.format_config(config, "float32")
    raw["num_local_experts"] = raw.pop("num_experts")
    assert config_json.parse_config(raw) == config
    assert isinstance(hash(config), int)
    assert MoE(4, 2, 8) != MoE(4, 2, 8, normalise=True)
