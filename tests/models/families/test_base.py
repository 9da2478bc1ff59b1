"""A model type is one `Family` and one line of the table, here for one more type."""

import json
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from docs.model_table import GUIDE, HEADER, with_table
from specjax.models import config_json
from specjax.models.families import FAMILIES, REFUSED
from specjax.models.families.llama import LLAMA
from specjax.models.fields import CheckpointError
from specjax.models.transformer import Target
from tests.conftest import tiny_target

WRAPPED = replace(
    LLAMA,
    model_type="wrapped",
    architecture="WrappedForConditionalGeneration",
    prefixes=("model.language_model.",),
    left_over=lambda _: ("model.visual.*",),
    modules_follow=True,
)


def test_a_family_may_call_its_tensors_otherwise_and_bring_others(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(FAMILIES, "wrapped", WRAPPED)
    target = tiny_target(model_type="wrapped")
    target.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert (
        "model.language_model.layers.1.self_attn.q_proj.weight" in tensors
        and "lm_head.weight" in tensors
    )
    tensors["model.visual.patch.weight"] = np.zeros((3, 3), np.float32)

    def store(layers: int, modules: int) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        raw = json.loads((tmp_path / "config.json").read_text())
        sizes = {"num_hidden_layers": layers, "num_nextn_predict_layers": modules}
        (tmp_path / "config.json").write_text(json.dumps(raw | sizes))

    store(2, 0)
    jax.tree.map(
        np.testing.assert_array_equal, Target.from_pretrained(tmp_path).params, target.params
    )
    store(1, 0)
    with pytest.raises(
        CheckpointError, match="num_hidden_layers=1, but the tensors are of 2 layers"
    ):
        Target.from_pretrained(tmp_path)
    store(1, 1)
    assert len(Target.from_pretrained(tmp_path).params["layers"]) == 1
    tensors["model.norm.weight"] = tensors.pop("model.language_model.norm.weight")
    store(2, 0)
    with pytest.raises(
        CheckpointError, match=r"'model\.language_model\.norm\.weight' of a wrapped model"
    ):
        Target.from_pretrained(tmp_path)


def test_each_line_of_the_table_is_the_family_of_that_model_type() -> None:
    aliases = {
        name: family.model_type for name, family in FAMILIES.items() if name != family.model_type
    }
    gemma4 = dict.fromkeys(("gemma4", "gemma4_unified", "gemma4_unified_text"), "gemma4_text")
    qwen = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
    rest = {"mimo": "qwen2", "gemma3": "gemma3_text", "mistral3": "ministral3"}
    rest |= {"llama4": "llama4_text", "step3p7": "step3p5", "muse_glimmer": "muse_glimmer_text"}
    rest |= {"kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3"}
    rest |= {"qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
    assert aliases == rest | gemma4 | qwen
    assert not FAMILIES.keys() & REFUSED.keys()


def test_the_table_of_the_guide_is_that_of_the_families() -> None:
    """The command ``python -m docs.model_table`` writes it."""
    guide = GUIDE.read_text()
    assert with_table(guide) == guide
    table = guide.partition(HEADER)[2].partition("\n\n")[0]
    listed = [
        name for row in table.splitlines() for name in re.findall("`(\\w+)`", row.split("|")[2])
    ]
    assert sorted(listed) == sorted(FAMILIES)
    assert all(row.split("|")[3].strip() for row in table.splitlines())


SPARSE = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_layers_of_a_gemma_4_are_numbered_with_zeros_in_front() -> None:
    """Transformers writes them so if there are more than ten layers."""
    raw = SPARSE | {
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "hidden_size_per_layer_input": 0,
        "head_dim": 8,
    }
    per_layer = {"05": {"head_dim": 16, "num_key_value_heads": 1}, "11": {"head_dim": 16}}
    config = config_json.parse_config(raw | {"per_layer_config": per_layer})
    sizes = [
        (config.of_layer(layer).head_dim, config.of_layer(layer).num_kv_heads)
        for layer in (0, 5, 11)
    ]
    assert sizes == [(8, 2), (16, 1), (16, 2)]


def test_the_older_place_of_a_rope_counts_and_null_says_nothing() -> None:
    raw = SPARSE | {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "rope_theta": 150_000,
    }
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16_384}
    assert config_json.parse_config(raw | {"rope_scaling": scaling}).rope.factor == 8.0
    assert config_json.parse_config(raw | {"rope_parameters": None}).rope.factor == 32.0
    assert config_json.parse_config(raw).rope.factor == 32.0
    gemma = SPARSE | {
        "model_type": "gemma2",
        "num_hidden_layers": 2,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": None,
    }
    assert config_json.parse_config(gemma).tie_embeddings
