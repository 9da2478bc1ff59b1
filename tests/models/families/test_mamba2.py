"""Families with Mamba-2: the sizes of published models, and what their files may say."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import DraftModel
from specjax.models import config_json, huggingface
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError
from specjax.models.published import parameter_count
from specjax.models.transformer import Target
from tests.conftest import SHAPES
from tests.models.families import zoo
from tests.models.families.hub_files import count_by_transformers

_MARKS = dict.fromkeys(("granitemoehybrid", "bamba", "falcon_h1"), pytest.mark.thorough) | {
    "nemotron_h": pytest.mark.full
}


@pytest.mark.full
def test_a_layer_of_an_mlp_alone_remembers_nothing(tmp_path) -> None:
    zoo.save("nemotron_h", tmp_path)
    target = Target.from_pretrained(tmp_path, dtype=np.float32)
    cache, scratch = target.new_cache(2, 16), target.new_scratch(2, 4)
    assert [len(entry) for entry in cache.layers] == [0, 0, 2, 0]
    assert [state is not None for state in cache.states] == [True, False, False, False]
    assert [len(entry) for entry in scratch] == [7, 0, 2, 0]
    small = DraftModel.init(target, jax.random.key(0), draft=SHAPES["chain"])
    assert small.model.config.num_layers == 3  # the first layer with attention is the third


NANO = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 131_072,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 262_144,
}
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "mamba_d_conv": 4}
GRANITE = _HEADS | {  # Granite 4.0 H Small
    "model_type": "granitemoehybrid",
    "vocab_size": 100_352,
    "hidden_size": 4096,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_hidden_layers": 40,
    "layer_types": [
        *["mamba"] * 5,
        *(["attention"] + ["mamba"] * 9) * 3,
        "attention",
        *["mamba"] * 4,
    ],
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "position_embedding_type": "nope",
    "tie_word_embeddings": True,
    "max_position_embeddings": 131_072,
}
BAMBA = _HEADS | {  # Bamba 9B
    "model_type": "bamba",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 262_144,
}
FALCON = {  # about Falcon-H1 0.5B
    "model_type": "falcon_h1",
    "vocab_size": 32_784,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "tie_word_embeddings": False,
}
LARGE = {"nemotron_h": NANO, "granitemoehybrid": GRANITE, "bamba": BAMBA, "falcon_h1": FALCON}


@pytest.mark.parametrize("name", [pytest.param(name, marks=_MARKS[name]) for name in LARGE])
def test_a_published_model_has_as_many_parameters_as_in_transformers(name) -> None:
    count = parameter_count(config_json.parse_config(dict(LARGE[name])))
    assert count == count_by_transformers(dict(LARGE[name]))
    assert name != "nemotron_h" or count == 31_577_940_288


REFUSALS = [
    (
        {"hybrid_override_pattern": "MEX*"},
        "hybrid_override_pattern has 'X': only 'linear_attention'",
    ),
    ({"hybrid_override_pattern": "MEME"}, "hybrid_override_pattern: none is 'full_attention'"),
    ({"time_step_limit": [0.01, 1e38]}, r"time_step_limit=\[0.01, 1e\+38\]: must be \[0.0"),
    ({"n_groups": 7}, "value_heads=64 is not a multiple of key_heads=7"),
    ({"moe_shared_expert_intermediate_size": 1857}, "must be a multiple of moe_intermediate_size"),
    ({"mlp_bias": True}, "mlp_bias=true: must be false in a model with experts"),
    ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu': must be"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_what_is_not_implemented_is_refused(changes, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_json.parse_config(NANO | changes)


@pytest.mark.parametrize("indices", [None, [], [9, 32]])
def test_the_layers_of_bamba_with_attention_are_named_within_the_model(indices) -> None:
    with pytest.raises(CheckpointError, match=r"attn_layer_indices=\[.* from 0 to 31 alone"):
        config_json.parse_config(BAMBA | {"attn_layer_indices": indices})


def test_granite_without_experts_has_none_per_token() -> None:
    """Check that its file may have 0 for both, as what is written has; with experts it may not."""
    without = GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0}
    config = config_json.parse_config(without)
    assert (config.moe, config.intermediate_size) == (None, 1536)
    stored = config_json.format_config(config, "float32")
    assert (stored["num_local_experts"], stored["num_experts_per_tok"]) == (0, 0)
    assert config_json.parse_config(stored) == config
    with pytest.raises(CheckpointError, match="num_experts_per_tok=0: must be at least 1 with num"):
        config_json.parse_config(GRANITE | {"num_experts_per_tok": 0})


def test_kinds_of_layers_are_read_in_all_their_forms() -> None:
    base = {name: NANO[name] for name in NANO if name not in ("hybrid_override_pattern",)}
    forms = (
        {"hybrid_override_pattern": "M*E-"},
        {"layers_block_type": ["mamba", "attention", "moe", "mlp"]},
        {"layer_types": ["linear_attention", "full_attention", "moe", "mlp"]},
    )
    first, *rest = (config_json.parse_config(base | form) for form in forms)
    assert all(config == first for config in rest)
    assert (first.num_layers, first.linear_layers, first.mlp_layers) == (4, (0,), (2, 3))
    assert [first.is_sparse(layer) for layer in range(4)] == [False, False, True, False]


@pytest.mark.full
def test_tensors_with_names_of_their_own_are_compared_with_config_json(tmp_path) -> None:
    """Nemotron's files have ``backbone.embeddings`` and ``mixer.experts``."""
    sizes = {"hidden_size": 16, "vocab_size": 11, "hybrid_override_pattern": "M*E"}
    sizes |= {"num_attention_heads": 4, "head_dim": 4, "mamba_num_heads": 8, "mamba_head_dim": 4}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    sizes |= {"moe_shared_expert_intermediate_size": 8, "ssm_state_size": 4}
    config = config_json.parse_config(NANO | sizes | {"bos_token_id": 1, "eos_token_id": 2})
    Target.init(config, jax.random.key(0)).save_pretrained(tmp_path)
    files = CheckpointFiles(tmp_path)
    assert "backbone.embeddings.weight" in files.shapes
    assert any(".mixer.experts.3." in name for name in files.shapes)
    assert huggingface.embedding_type(files) == np.float32
    stated = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"vocab_size": 12}, "vocab_size=12 and hidden_size=16, but the embedding is 11 x 16"),
        ({"n_routed_experts": 5}, "it says 5 experts, but the tensors are of 4"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(stated | change))
        with pytest.raises(CheckpointError, match=message):
            Target.from_pretrained(tmp_path)


_BETWEEN = 1 + 0.98 * 2**-8
"""A number nearly halfway between two of bfloat16."""


@pytest.mark.full
def test_factors_are_not_rounded_before_their_products(tmp_path) -> None:
    """The logits in bfloat16 are as close to those of float32 as transformers' own.

    With factors that are rounded first they are a third further away.
    """
    from tests.with_torch import torch

    kind, fields = zoo.MODELS["falcon_h1"]
    names = [name for name in fields if name.endswith("_multiplier") and name[:2] != "lm"]
    factors = dict.fromkeys(names, _BETWEEN) | {"lm_head_multiplier": 1.0}
    factors |= {"mlp_multipliers": [_BETWEEN] * 2, "ssm_multipliers": [_BETWEEN] * 5}
    model = zoo.build(kind, fields | factors)
    model.save_pretrained(tmp_path)
    narrow = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    tokens = np.random.default_rng(0).integers(0, zoo.VOCABULARY, (8, 48))
    expected = zoo.logits(model, tokens)
    with torch.no_grad():
        theirs = narrow(torch.tensor(tokens)).logits.float().numpy()
    target = Target.from_pretrained(tmp_path, dtype=jnp.bfloat16)
    ours = np.asarray(target.forward(jnp.asarray(tokens))[0].logits)
    distance, distance_of_theirs = (
        np.sqrt(np.mean(np.square(logits - expected))) for logits in (ours, theirs)
    )
    assert distance < 1.15 * distance_of_theirs
