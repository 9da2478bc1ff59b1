"""Step-3.7's config.json: the published form, and what is refused."""

import pytest

from specjax.models import config_json
from specjax.models.fields import CheckpointError
from specjax.models.published import parameter_count
from tests.models.families import zoo
from tests.models.families.hub_files import count_by_transformers

_FULL, _WINDOWED = "full_attention", "sliding_attention"
TEXT = {  # of Step-3.7-Flash, whose lists have elements for three MTP modules as well
    "model_type": "step3p5",
    "vocab_size": 128_896,
    "hidden_size": 4096,
    "intermediate_size": 11_264,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "sliding_window": 512,
    "layer_types": [_WINDOWED if layer % 4 else _FULL for layer in range(48)],
    "attention_other_setting": {
        "attention_type": _WINDOWED,
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
    },
    "rope_theta": [1e4 if layer % 4 else 5e6 for layer in range(48)],
    "partial_rotary_factors": [1.0 if layer % 4 else 0.5 for layer in range(48)],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 131_072,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_router_scaling_factor": 3.0,
    "num_nextn_predict_layers": 3,
    "swiglu_limits": [0.0] * 43 + [7.0] * 5,
    "swiglu_limits_shared": [0.0] * 43 + [16.0] * 5,
}


def nested(**changes):
    text = {name: value for name, value in (TEXT | changes).items() if value != "left out"}
    return {"model_type": "step3p7", "text_config": text, "vision_config": dict(zoo.STEP_VISION)}


def test_the_published_form_is_read() -> None:
    config = config_json.parse_config(nested())
    layers = [config.of_layer(layer) for layer in range(45)]
    assert [layer.num_heads for layer in layers[:5]] == [64, 96, 96, 96, 64]
    assert [layer.experts_limit for layer in layers[41:]] == [None, None, 7.0, 7.0]
    assert layers[44].mlp_limit == 16.0
    assert [layers[0].rope.kind, layers[0].rope.turned, layers[0].rope.theta] == [
        "llama3",
        0.5,
        5e6,
    ]
    assert [layers[1].rope.kind, layers[1].rope.turned, layers[1].rope.theta] == [
        "default",
        1.0,
        1e4,
    ]
    assert config.moe is not None and config.moe.dense_layers == (0, 1, 2)
    assert config.num_kv_heads == 8 and config.moe.num_experts == 288
    formatted = config_json.format_config(config, "bfloat16")
    assert formatted["model_type"] == "step3p5" and config_json.parse_config(formatted) == config


@pytest.mark.full
def test_it_has_as_many_parameters_as_in_transformers() -> None:
    count = parameter_count(config_json.parse_config(nested()))
    assert count == count_by_transformers(nested())


REFUSALS = [
    ({"share_expert_dim": 1281}, "share_expert_dim=1281: must be a multiple of moe_interm"),
    ({"mlp_bias": True}, "mlp_bias=true: must be false in a model with experts"),
    ({"swiglu_limits": [7.0]}, "swiglu_limits names 1 layers of num_hidden_layers=45: name each"),
    ({"swiglu_limits": ["x"] * 45}, "swiglu_limits=.*: must be a list with a number or null"),
    ({"moe_layers_enum": "3,x"}, "moe_layers_enum='3,x': must name layers"),
    ({"rope_theta": [1e4]}, "rope_theta, partial_rotary_factors: 1 values: name each"),
    ({"per_layer_config": {"1": {"head_dim": 4}}}, "per_layer_config.1=.*: must have num_att"),
    (
        {"per_layer_config": {"1": {"num_attention_heads": 0}}},
        "per_layer_config.1.num_attention_heads=0: must be a whole",
    ),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True: must be left out"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_what_is_not_implemented_is_refused(changes, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_json.parse_config(nested(**changes))


def test_the_fields_of_the_text_model_must_be_nested() -> None:
    """transformers reads no other fields of such a file, and would take its defaults."""
    for raw in ({}, TEXT, {"text_confg": TEXT}):
        with pytest.raises(CheckpointError, match="text_config=None: must be an object"):
            config_json.parse_config({**raw, "model_type": "step3p7"})


def test_a_short_file_for_planning_states_its_sizes_at_the_top() -> None:
    kinds = ["full_attention", *["sliding_attention"] * 3] * 2
    sizes = {"hidden_size": 32, "num_hidden_layers": 8, "vocab_size": 40, "layer_types": kinds}
    of_experts = {"num_experts": 16, "first_k_dense_replace": 2, "sliding_window": 4}
    config = config_json.parse_config({"model_type": "step3p7", **sizes, **of_experts})
    assert config.moe is not None
    assert (config.num_layers, config.moe.num_experts, config.moe.dense_layers) == (8, 16, (0, 1))


def test_heads_by_layer_are_read_where_the_numbers_of_layers_are_padded() -> None:
    """transformers writes layer 5 as "05" if there are more than ten."""
    count = 12
    kinds = ["full_attention", *["sliding_attention"] * 3] * 3
    heads = {f"{layer:02}": {"num_attention_heads": 96} for layer in range(count) if layer % 4}
    text = {
        **TEXT,
        "num_hidden_layers": count,
        "layer_types": kinds,
        "mlp_layer_types": ["dense"] * count,
        "swiglu_limits": None,
        "swiglu_limits_shared": None,
        "per_layer_config": heads,
    }
    config = config_json.parse_config({"model_type": "step3p7", "text_config": text})
    assert [config.of_layer(layer).num_heads == 96 for layer in range(count)] == [
        layer % 4 > 0 for layer in range(count)
    ]


@pytest.mark.parametrize("name", ["moe_top_k", "moe_num_experts"])
def test_a_name_of_its_own_wins_over_the_common_one(name) -> None:
    common = {"moe_top_k": "num_experts_per_tok", "moe_num_experts": "n_routed_experts"}[name]
    moe = config_json.parse_config(nested(**{name: 19, common: 12})).moe
    assert moe is not None
    assert 19 in (moe.experts_per_token, moe.num_experts)
