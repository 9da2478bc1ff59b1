"""Quantized matrices of families with fused, stacked or tied tensors, or blocks of FP8."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import sharding
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import MLA, MoE
from specjax.models.quantization import Form, is_quantized
from specjax.models.quantization.packing import packed
from specjax.models.transformer import Target
from tests.conftest import MIXTURES, tiny_target
from tests.models.quantization.quantized import forms_of, in_floats, read

PROMPTS = np.array([[1, 4, 2, 7, 7, 9, 0, 3]])


def logits(target: Target) -> np.ndarray:
    return np.asarray(target.forward(PROMPTS)[0].logits)


def assert_equal(target: Target, expected: Target) -> None:
    jax.tree.map(np.testing.assert_array_equal, target.params, expected.params)
    assert target.fingerprint() == expected.fingerprint()


MODELS = {
    "phi3": {"model_type": "phi3"},
    "qwen3_moe": MIXTURES["qwen3_moe"],
    "deepseek_v3": MIXTURES["deepseek_v3"],
    "tied": {"model_type": "qwen2", "qkv_bias": True, "tie_embeddings": True},
}


OFTEN = [
    ("phi3", "int4"),
    ("phi3", "int8"),
    ("qwen3_moe", "int8"),
    ("qwen3_moe", "int4"),
    ("deepseek_v3", "fp8"),
    ("tied", "w8a8"),
]


@pytest.mark.full
@pytest.mark.thorough_except("phi3-int4")
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *OFTEN,
        *(
            pytest.param(*pair, marks=pytest.mark.thorough)
            for pair in itertools.product(MODELS, ("int8", "int4", "w8a8", "fp8"))
            if pair not in OFTEN
        ),
    ],
)
def test_what_is_made_is_saved_and_read_bit_for_bit_and_on_a_mesh(
    tmp_path, monkeypatch, name, weights
) -> None:
    tiny_target(**MODELS[name], hidden_size=32).save_pretrained(tmp_path)
    quantized = read(tmp_path, weights=weights)
    expected = logits(in_floats(quantized))
    bound = (0.15 if weights == "w8a8" else 1e-3) * np.abs(expected).max()
    np.testing.assert_allclose(logits(quantized), expected, rtol=0, atol=bound)
    quantized.save_pretrained(tmp_path / "quantized")
    if weights == "fp8":  # a CPU would convert them to floats
        monkeypatch.setattr(sharding, "is_on_cpu", lambda mesh: False)
    again = read(tmp_path / "quantized")
    assert_equal(again, quantized)
    assert_equal(read(tmp_path / "quantized", mesh=sharding.make_mesh(1, 2)), quantized)
    on_mesh = read(tmp_path, weights=weights, mesh=sharding.make_mesh(1, 2))
    assert_equal(on_mesh, quantized)
    np.testing.assert_allclose(
        logits(on_mesh), logits(quantized), rtol=0, atol=1e-3 * np.abs(expected).max()
    )


def test_fused_matrices_are_one_in_the_file(tmp_path) -> None:
    tiny_target(model_type="phi3", hidden_size=32).save_pretrained(tmp_path)
    read(tmp_path, weights="int4").save_pretrained(tmp_path / "quantized")
    shapes = CheckpointFiles(tmp_path / "quantized").shapes
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (32, 32)
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    assert tensors["model.layers.0.self_attn.qkv_proj.weight_packed"].shape == (32, 32 * 4 // 32)
    assert tensors["model.layers.1.mlp.gate_up_proj.weight_scale"].shape == (48, 1)


def test_a_tied_embedding_is_one_matrix(tmp_path) -> None:
    tiny_target(**MODELS["tied"]).save_pretrained(tmp_path)
    quantized = read(tmp_path, weights="int8")
    quantized.save_pretrained(tmp_path / "quantized")
    names = load_file(tmp_path / "quantized" / "model.safetensors").keys()
    assert "model.embed_tokens.weight_packed" in names
    assert not any(name.startswith("lm_head") for name in names)
    assert quantized.params["embed"].form == Form("int8") and "lm_head" not in quantized.params


# --- experts one by one ---------------------------------------------------------------------------


@pytest.mark.full
def test_experts_whose_inputs_are_in_different_orders(tmp_path) -> None:
    """GPTQ checkpoints may have the inputs of each expert in another order, or in none."""
    target = tiny_target(**MIXTURES["qwen3_moe"], hidden_size=32, num_layers=1)
    target.save_pretrained(tmp_path)
    target.save_pretrained(tmp_path / "floats")
    tensors = load_file(tmp_path / "model.safetensors")
    floats = dict(tensors)
    rng = np.random.default_rng(0)
    for name in [name for name in floats if ".experts." in name]:
        outputs, inputs = floats[name].shape
        group_of_input = np.arange(inputs) // 8
        if ".experts.3." not in name:
            rng.shuffle(group_of_input)
        numbers = rng.integers(0, 16, (outputs, inputs))
        scales = rng.uniform(0.02, 0.1, (inputs // 8, outputs)).astype(np.float32)
        floats[name] = ((numbers - 8) * scales.T[:, group_of_input]).astype(np.float32)
        del tensors[name]
        stem = name.removesuffix("weight")
        tensors |= {
            f"{stem}qweight": packed(numbers, 4).T.copy(),
            f"{stem}scales": scales,
            f"{stem}g_idx": group_of_input.astype(np.int32),
        }
        tensors[f"{stem}qzeros"] = np.full((inputs // 8, outputs // 8), 0x77777777, np.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    save_file(floats, tmp_path / "floats" / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 8,
        "sym": True,
        "desc_act": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))

    quantized, expected = read(tmp_path), read(tmp_path / "floats")
    # An expert has 8 units, so that its last matrix has one group.
    ordered = Form("int4", 8, is_ordered=True)
    assert forms_of(quantized) == {
        "experts_gate": ordered,
        "experts_up": ordered,
        "experts_down": Form("int4"),
    }
    assert quantized.params["layers"][0]["experts_up"].order.shape == (8, 32)
    params = in_floats(quantized).params
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-6),
        params,
        expected.params,
    )
    np.testing.assert_allclose(
        logits(quantized), logits(expected), rtol=0, atol=1e-3 * np.abs(logits(expected)).max()
    )
    assert_equal(read(tmp_path, mesh=sharding.make_mesh(1, 2)), quantized)
    quantized.save_pretrained(tmp_path / "again")
    assert_equal(read(tmp_path / "again"), quantized)


def test_experts_of_which_one_is_not_quantized_are_read_as_floats(tmp_path) -> None:
    target = tiny_target(**MIXTURES["qwen3_moe"], hidden_size=32, num_layers=1)
    target.save_pretrained(tmp_path)
    read(tmp_path, weights="int8").save_pretrained(tmp_path / "quantized")
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    floats = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    for part in ("_packed", "_scale", "_shape"):
        del tensors[name + part]
    save_file(tensors | {name: floats[name]}, tmp_path / "quantized" / "model.safetensors")
    layer = read(tmp_path / "quantized").params["layers"][0]
    assert not is_quantized(layer["experts_up"]) and is_quantized(layer["experts_gate"])
    np.testing.assert_array_equal(layer["experts_up"][5], floats[name].T)


# --- FP8 in blocks, as DeepSeek and Qwen publish it -----------------------------------------------


def slow(stored: np.ndarray, scales: np.ndarray) -> np.ndarray:
    weights = stored.astype(np.float32)
    for row, column in np.ndindex(*scales.shape):
        block = np.s_[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
        weights[block] *= scales[row, column]
    return weights


IN_BLOCKS = {
    "deepseek_v3": {
        **MIXTURES["deepseek_v3"],
        "hidden_size": 256,
        "head_dim": 16,
        "mla": MLA(
            q_lora_rank=144,
            kv_lora_rank=136,
            qk_nope_head_dim=20,
            qk_rope_head_dim=16,
            v_head_dim=40,
        ),
        "moe": MoE(**{**MIXTURES["deepseek_v3"]["moe"].__dict__, "intermediate_size": 144}),
        "intermediate_size": 200,
    },
    "qwen3": {
        "model_type": "qwen3",
        "qk_norm": True,
        "hidden_size": 256,
        "intermediate_size": 300,
        "head_dim": 64,
    },
}


@pytest.mark.full
@pytest.mark.thorough_except("deepseek_v3")
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_of_fp8_also_where_they_do_not_fill_a_matrix(tmp_path, monkeypatch, name) -> None:
    target = tiny_target(**IN_BLOCKS[name], scale=4.0)
    target.save_pretrained(tmp_path)
    target.save_pretrained(tmp_path / "floats")
    floats, rng = load_file(tmp_path / "model.safetensors"), np.random.default_rng(0)
    tensors = dict(floats)
    for matrix_name in [name for name in floats if ".layers." in name and "_proj" in name]:
        if floats[matrix_name].ndim != 2:
            continue
        blocks = [-(-size // 128) for size in floats[matrix_name].shape]
        scales = rng.uniform(0.5, 2, blocks).astype(np.float32)
        tensors[matrix_name] = floats[matrix_name].astype(jnp.float8_e4m3fn)
        tensors[f"{matrix_name}_scale_inv"] = scales
        floats[matrix_name] = slow(tensors[matrix_name], scales)
    save_file(tensors, tmp_path / "model.safetensors")
    save_file(floats, tmp_path / "floats" / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))

    expected = read(tmp_path / "floats")
    assert_equal(read(tmp_path), expected)  # on a CPU
    assert_equal(read(tmp_path, weights="float", mesh=sharding.make_mesh(1, 2)), expected)
    monkeypatch.setattr(sharding, "is_on_cpu", lambda mesh: False)
    quantized = read(tmp_path)
    form = Form("fp8", 128)
    if name == "qwen3":  # `down` has 300 inputs
        assert forms_of(quantized) == dict.fromkeys(("q", "k", "v", "o", "gate", "up"), form)
    else:  # `kv_b` is no product, and 144, 136, 160 and 200 inputs are no whole blocks
        names = ("q_a", "kv_a", "experts_gate", "experts_up", "shared_gate", "shared_up")
        assert forms_of(quantized) == dict.fromkeys(names, form)
    np.testing.assert_allclose(
        logits(quantized), logits(expected), rtol=0, atol=1e-4 * np.abs(logits(expected)).max()
    )
    assert_equal(read(tmp_path, mesh=sharding.make_mesh(1, 2)), quantized)
    quantized.save_pretrained(tmp_path / "again")
    assert_equal(read(tmp_path / "again"), quantized)
