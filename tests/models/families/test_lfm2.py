"""LFM2's config.json: sizes of published models, older forms, and what is refused."""

import pytest

from specjax.models import config_json
from specjax.models.fields import CheckpointError
from specjax.models.memory import ShortConvolution
from specjax.models.published import parameter_count
from tests.models.families.hub_files import count_by_transformers

_FULL = [2, 5, 8, 10, 12, 14]
SMALL = {  # LFM2-1.2B
    "model_type": "lfm2",
    "vocab_size": 65_536,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "block_ff_dim": 12_288,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": _FULL,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_embedding": True,
    "max_position_embeddings": 128_000,
}
EXPERTS = {  # LFM2-8B-A1B
    "model_type": "lfm2_moe",
    "vocab_size": 65_536,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 24,
    "layer_types": [
        "full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)
    ],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_dense_layers": 2,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@pytest.mark.full
@pytest.mark.parametrize(("file", "count"), [(SMALL, 1_170_340_608), (EXPERTS, 8_339_930_560)])
def test_a_published_model_has_as_many_parameters_as_in_transformers(file, count) -> None:
    assert parameter_count(config_json.parse_config(dict(file))) == count
    assert count_by_transformers(dict(file)) == count


def test_kinds_of_layers_and_the_size_of_an_mlp_are_read_in_all_their_forms() -> None:
    config = config_json.parse_config(dict(SMALL))
    assert config.layers_with_entries == tuple(_FULL)
    assert config.linear == ShortConvolution(channels=2048) and config.intermediate_size == 8192
    kinds = ["full_attention" if layer in _FULL else "conv" for layer in range(16)]
    adjusted = {"block_auto_adjust_ff_dim": False, "block_ff_dim": 8192}
    for changes in ({"layer_types": kinds, "full_attn_idxs": [1]}, adjusted):
        assert config_json.parse_config(SMALL | changes) == config
    assert config_json.parse_config(SMALL | {"full_attn_idxs": None}).linear_layers == ()
    assert not config_json.parse_config(SMALL | {"tie_embedding": False}).tie_embeddings


REFUSALS = [
    (SMALL, {"full_attn_idxs": []}, "full_attn_idxs: none is 'full_attention': at least one must"),
    (SMALL, {"full_attn_idxs": "all"}, "full_attn_idxs='all': must be a list of layers"),
    (SMALL, {"conv_L_cache": 1}, "conv_L_cache=1: must be a whole number from 2"),
    (SMALL, {"hidden_act": "gelu"}, "hidden_act='gelu': must be one of silu"),
    (SMALL, {"block_ffn_dim_multiplier": 1e-5}, "block_ff_dim=12288: nothing is left of it"),
    (EXPERTS, {"layer_types": None}, "layer_types is missing: name 'full_attention' or 'conv'"),
    (EXPERTS, {"layer_types": ["mamba"] * 24}, "layer_types has 'mamba': only 'full_attention'"),
]


@pytest.mark.parametrize(("file", "changes", "message"), REFUSALS)
def test_what_is_not_implemented_is_refused(file, changes, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_json.parse_config(file | changes)
