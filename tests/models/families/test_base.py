"""A model type is one `Family` and one line of the table: two more, against transformers, and in and out of files."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.drafters.registry import load_drafter
from specjax.models import huggingface
from specjax.models.families import FAMILIES, REFUSED, Family
from specjax.models.families.llama import LLAMA
from specjax.models.fields import CheckpointError, flag
from specjax.models.transformer import Target
from tests.conftest import tiny_target

SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    defaults={"max_position_embeddings": 524_288, "attention_bias": True, "head_dim": 128},
    biases={"attention_bias": ("qkv_bias",), "attention_out_bias": ("output_bias",), "mlp_bias": ("mlp_bias",)},
    fields={"attention_out_bias": flag(default=None)},
)
SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


@pytest.mark.parametrize("biases", [{}, {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}])
def test_a_family_more_gives_the_logits_of_transformers(tmp_path, monkeypatch, biases) -> None:
    import torch
    from transformers import AutoModelForCausalLM, SeedOssConfig, SeedOssForCausalLM

    torch.manual_seed(0)
    model = SeedOssForCausalLM(SeedOssConfig(**SIZES | biases)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or "bias" in name:
                value.add_(torch.randn_like(value) * 0.3)
    model.save_pretrained(tmp_path)
    if not biases:  # it is for the family's defaults to say
        raw = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if not k.endswith("_bias")}))
    with pytest.raises(CheckpointError, match="model_type='seed_oss': must be one of llama, mistral"):
        Target.from_pretrained(tmp_path)

    monkeypatch.setitem(FAMILIES, "seed_oss", SEED_OSS)
    target = Target.from_pretrained(tmp_path, dtype=np.float32)
    tokens = np.random.default_rng(0).integers(0, 37, (2, 40))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(target.forward(jnp.asarray(tokens))[0].logits, expected, atol=1e-4)

    again = tmp_path / "again"
    target.save_pretrained(again)
    assert huggingface.read_config(again) == target.config
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(again, dtype=torch.float32)(torch.tensor(tokens)).logits
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-5)
    drafter = load_drafter(str(again), None, target.config)
    jax.tree.map(np.testing.assert_array_equal, drafter.model.params, target.params)


WRAPPED = replace(
    LLAMA,
    model_type="wrapped",
    architecture="WrappedForConditionalGeneration",
    names={"model.": "model.language_model."},
    left_over=("model.visual.*",),
    modules_follow=True,
)


def test_a_family_may_call_its_tensors_otherwise_and_bring_others(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(FAMILIES, "wrapped", WRAPPED)
    target = tiny_target(model_type="wrapped")
    target.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.language_model.layers.1.self_attn.q_proj.weight" in tensors and "lm_head.weight" in tensors
    tensors["model.visual.patch.weight"] = np.zeros((3, 3), np.float32)

    def store(layers: int, modules: int) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        raw = json.loads((tmp_path / "config.json").read_text())
        sizes = {"num_hidden_layers": layers, "num_nextn_predict_layers": modules}
        (tmp_path / "config.json").write_text(json.dumps(raw | sizes))

    store(2, 0)
    jax.tree.map(np.testing.assert_array_equal, Target.from_pretrained(tmp_path).params, target.params)
    store(1, 0)
    with pytest.raises(CheckpointError, match="num_hidden_layers=1, but the tensors are of 2 layers"):
        Target.from_pretrained(tmp_path)
    store(1, 1)
    assert len(Target.from_pretrained(tmp_path).params["layers"]) == 1
    tensors["model.norm.weight"] = tensors.pop("model.language_model.norm.weight")
    store(2, 0)
    with pytest.raises(CheckpointError, match=r"'model\.language_model\.norm\.weight' of a wrapped model"):
        Target.from_pretrained(tmp_path)


def test_each_line_of_the_table_is_the_family_of_that_model_type() -> None:
    assert {name: family.model_type for name, family in FAMILIES.items() if name != family.model_type} == {"mimo": "qwen2"}
    assert not FAMILIES.keys() & REFUSED.keys()
