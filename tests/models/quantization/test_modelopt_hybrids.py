"""ModelOpt's checkpoints of hybrids, with the modules that NVIDIA leaves in floats.

NVIDIA publishes Nemotron 3 in FP8 and NVFP4, and Qwen3.5 and Qwen3.6 in NVFP4. Parts of them stay
in floats, such as convolutions, attention, and the layers of Mamba-2 before attention.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax import sharding
from specjax.models import config_json, huggingface
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.quantization import Form
from specjax.models.transformer import Target
from tests.models.quantization import modelopt, quantized
from tests.models.quantization.modelopt import FP8, NVFP4
from tests.models.quantization.quantized import as_floats, forms_in

GROUPS = Form("int8", 16)

NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 64,
    "intermediate_size": 48,
    "hybrid_override_pattern": "MEM*E-M",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,  # which two devices do not divide, unlike Mamba-2's groups
    "head_dim": 8,
    "vocab_size": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

LAYER = "backbone.layers.{}.mixer"
CONVOLUTIONS = [f"{LAYER.format(layer)}.conv1d" for layer in (0, 2, 6)]
BEFORE_ATTENTION = [f"{LAYER.format(2)}.{name}_proj" for name in ("in", "out")]
ATTENTION = [f"{LAYER.format(3)}.{kind}_proj" for kind in "qkvo"]
_NVFP4 = {"quant_algo": NVFP4, "group_size": 16}
_MAMBA = {
    f"{LAYER.format(layer)}.{name}_proj": {"quant_algo": FP8}
    for layer in (0, 2, 6)
    for name in ("in", "out")
}

# By name: the fields of config.json, and ModelOpt's description.
CHECKPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Nemotron 3 Nano FP8": (
        NEMOTRON,
        {
            "quant_algo": FP8,
            "exclude_modules": ["lm_head", *CONVOLUTIONS, *BEFORE_ATTENTION, *ATTENTION],
        },
    ),
    "Nemotron 3 Super NVFP4": (
        NEMOTRON,
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": _MAMBA
            | {
                f"{LAYER.format(layer)}.experts.{expert}.{name}_proj": _NVFP4
                for layer in (1, 4)
                for expert in range(4)
                for name in ("up", "down")
            },
        },
    ),
    "Nemotron 3.5 W4A16": (
        NEMOTRON,
        {
            "quant_algo": "W4A16_NVFP4",
            "group_size": 16,
            "exclude_modules": ["*conv1d*", "*.gate", "*latent_proj", "mtp*", *ATTENTION],
        },
    ),
    "Nemotron 3 Nano 4B": (
        NEMOTRON,
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "backbone.embeddings": _NVFP4,
                "lm_head": {"quant_algo": FP8},
                f"{LAYER.format(5)}.down_proj": _NVFP4,
                f"{LAYER.format(3)}.v_proj": {"quant_algo": FP8},
                f"{LAYER.format(6)}.in_proj": _NVFP4,
            },
        },
    ),
    "Qwen3.5 NVFP4": (
        QWEN,
        {
            **_NVFP4,
            "exclude_modules": [
                "lm_head",
                "model.language_model.layers.0.linear_attn*",
                "model.language_model.layers.2.linear_attn*",
                "model.language_model.layers.3.self_attn*",
                "mtp*",
            ],
        },
    ),
    "Qwen3.6 NVFP4": (
        QWEN,
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                f"model.language_model.layers.{layer}.linear_attn.{name}": {"quant_algo": FP8}
                for layer in (0, 2)
                for name in ("out_proj", "in_proj_qkv", "in_proj_z")
            }
            | {
                f"model.language_model.layers.{layer}.mlp.{name}_proj": _NVFP4
                for layer in range(4)
                for name in ("gate", "up", "down")
            },
        },
    ),
}

ONLY_IN_OWN_FILE = ("Nemotron 3 Nano FP8", "Qwen3.5 NVFP4")
"""Checkpoints with the description in hf_quant_config.json alone, and not in config.json too."""


def algorithm_of(stated: dict[str, Any], name: str) -> str | None:
    """Return the algorithm of a tensor, by a reading of ModelOpt's description of its own."""
    module = name.removesuffix(".weight").replace("model.layers", "model.language_model.layers")
    if module == name or "norm" in name or "conv1d" in name or module.endswith(".gate"):
        return None
    if stated["quant_algo"] == "MIXED_PRECISION":
        layer = stated["quantized_layers"].get(module)
        return None if layer is None else layer["quant_algo"]
    if module.endswith(("embeddings", "embed_tokens", "in_proj_a", "in_proj_b")):
        return None
    starts, ends = [], []
    for pattern in stated["exclude_modules"]:
        (ends if pattern.startswith("*") else starts).append(pattern.strip("*"))
    if module.startswith(tuple(starts)) or module.endswith(tuple(ends)):
        return None
    return NVFP4 if NVFP4 in stated["quant_algo"] else FP8


def publish(name: str, directory: Path, in_config: bool) -> None:
    """Write a small checkpoint of random weights, with scales of a KV cache and an MTP tensor.

    ``in_config`` is whether config.json has the description, too.
    """
    fields, stated = CHECKPOINTS[name]
    stated = {**stated, "kv_cache_quant_algo": "FP8"}
    target = Target.init(config_json.parse_config(fields), jax.random.key(0))
    target.save_pretrained(directory)
    in_file = {key: value for key, value in stated.items() if key != "exclude_modules"}
    in_file |= {"quant_method": "modelopt", "ignore": stated.get("exclude_modules", [])}
    modelopt.quantize(
        directory,
        lambda tensor: algorithm_of(stated, tensor),
        in_file if in_config else None,
        stated,
    )
    file = directory / "model.safetensors"
    tensors = modelopt.load(file)
    keys = [tensor for tensor in tensors if tensor.endswith("k_proj.weight")]
    for key in keys:
        attention = key.removesuffix("k_proj.weight")
        for kind in "kv":
            tensors[f"{attention}{kind}_proj.{kind}_scale"] = np.ones((), np.float32)
    tensors["mtp.layers.0.mixer.q_proj.weight"] = np.zeros((4, 4), np.float32)
    save_file(tensors, file)


def read(directory: Path, **options: Any) -> Target:
    with pytest.warns(UserWarning, match="it is read with .* and for the KV cache are not used"):
        return quantized.read(directory, **options)


@pytest.mark.full_except("Nemotron 3.5 W4A16")
@pytest.mark.thorough_except("Nemotron 3 Nano FP8")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hybrid_has_the_weights_that_its_numbers_mean(name, tmp_path, monkeypatch) -> None:
    publish(name, tmp_path, in_config=name not in ONLY_IN_OWN_FILE)
    expected = quantized.read(tmp_path / "floats")
    floats = read(tmp_path, weights="float")
    jax.tree.map(np.testing.assert_array_equal, floats.params, expected.params)
    on_cpu = read(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, as_floats(on_cpu), expected.params)
    # Away from a CPU, FP8 stays FP8.
    monkeypatch.setattr(sharding, "is_on_cpu", lambda mesh: False)
    stored = read(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, as_floats(stored), expected.params)
    forms = forms_in(stored.params)
    present = {form for form in jax.tree.leaves(forms, is_leaf=lambda leaf: leaf is None) if form}
    assert present <= {GROUPS, Form("fp8")} and present
    on_mesh = read(tmp_path, mesh=sharding.make_mesh(1, 2))
    jax.tree.map(np.testing.assert_array_equal, on_mesh.params, stored.params)
    # The description alone, without tensors, gives the same forms.
    (tmp_path / "model.safetensors").unlink()
    alone = huggingface.declare_stored(CheckpointFiles(tmp_path), stored.config)
    assert forms_in(alone) == forms


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # FP8 has one group of inputs; they are divided for the output.
        (
            "Nemotron 3 Super NVFP4",
            {
                "z": ((1, 16, 64), (1, 16)),
                "step": ((1, 2, 64), (1, 2)),
                "o": ((1, 64, 16), (1, 64)),
            },
        ),
        (
            "Nemotron 3.5 W4A16",
            {
                "z": ((4, 16, 16), (4, 16)),
                "step": ((4, 2, 16), (4, 2)),
                "o": ((1, 64, 16), (1, 64)),
            },
        ),
    ],
)
def test_mamba2_is_divided_by_its_own_groups(name, expected, tmp_path, monkeypatch) -> None:
    """Attention has one KV head and is not divided; the groups of Mamba-2 are two."""
    publish(name, tmp_path, in_config=True)
    monkeypatch.setattr(sharding, "is_on_cpu", lambda mesh: False)
    layer = read(tmp_path, mesh=sharding.make_mesh(1, 2)).params["layers"][6]
    shapes = {
        part: tuple(
            array.sharding.shard_shape(array.shape)
            for array in (layer[part].values, layer[part].scales)
        )
        for part in expected
    }
    assert shapes == expected


@pytest.mark.full
@pytest.mark.parametrize("is_on_cpu", [True, False])
@pytest.mark.parametrize(
    "name", ["Nemotron 3 Super NVFP4", "Nemotron 3.5 W4A16", "Nemotron 3 Nano 4B"]
)
def test_a_hybrid_that_was_read_is_saved_and_read_again(
    name, is_on_cpu, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(sharding, "is_on_cpu", lambda mesh: is_on_cpu)
    publish(name, tmp_path, in_config=True)
    stored = read(tmp_path)
    stored.save_pretrained(tmp_path / "again")
    if name == "Nemotron 3 Nano 4B":  # an embedding is no Linear
        raw = CheckpointFiles(tmp_path / "again").quantization
        assert "backbone.embeddings" in raw["config_groups"]["group_0"]["targets"]
        assert len(raw["config_groups"]) == (1 if is_on_cpu else 2)
    again = quantized.read(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, again.params, stored.params)
    prompt = np.arange(1, 9)[None]
    np.testing.assert_array_equal(again.forward(prompt)[0].logits, stored.forward(prompt)[0].logits)
