"""NVFP4 and ModelOpt's checkpoints against a table in numpy, and what is refused."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax import sharding
from specjax.models import huggingface
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import LinearAttention, MoE
from specjax.models.fields import CheckpointError
from specjax.models.quantization import Form, is_quantized, published
from specjax.models.quantization.nvfp4 import Nvfp4Experts, Nvfp4Matrix, Scales
from specjax.models.quantization.stored import PlainExperts
from specjax.models.transformer import Target
from tests.conftest import HYBRID, MIXTURES, tiny_config, tiny_target
from tests.models.quantization import modelopt
from tests.models.quantization.in_memory import Numbers
from tests.models.quantization.modelopt import EACH, FP8, NVFP4
from tests.models.quantization.quantized import as_floats

GROUPS = Form("int8", 16)
LINE = "it is read with .*; activations are not quantized, and stored scales"


def matrix(packed, scales, factor, divides=False) -> tuple[Nvfp4Matrix, Numbers]:
    stored = Numbers(packed)
    checked = Scales(Numbers(scales), "weight_scale", "a file")
    return Nvfp4Matrix(stored, checked, factor, divides), stored


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("divides", [False, True])
def test_every_number_under_every_scale_is_what_the_table_says(divides) -> None:
    """Every byte under each of the 126 scales, in both libraries' layouts."""
    scales = np.arange(1, 127, dtype=np.uint8).view(jnp.float8_e4m3fn).reshape(126, 1)
    scales = np.repeat(scales, 32, axis=1)
    packed = np.broadcast_to(np.arange(256, dtype=np.uint8), (126, 256))
    factor = 0.0123
    ours, _ = matrix(packed, scales, factor, divides)
    expected = modelopt.reference(packed, scales, factor, divides)
    np.testing.assert_array_equal(ours[:, :], expected)
    values = ours.read("values", (slice(None),) * 3).astype(np.float32)
    factors = ours.read("scales", (slice(None),) * 2)
    weights = np.moveaxis(values * factors[..., None], 0, 1).reshape(126, 512)
    np.testing.assert_array_equal(weights, expected)
    assert ours.form == GROUPS and set(np.unique(np.abs(values))) == {0, 1, 2, 3, 4, 6, 8, 12}


@pytest.mark.parametrize(
    "part", [np.s_[2:7, 0:96], np.s_[1::2, 31:33], np.s_[0:1, 3:90:5], np.s_[3:3, :], np.s_[:, 5:5]]
)
def test_a_slice_is_that_of_the_whole_and_no_more_is_read(part) -> None:
    blocks = modelopt.random_blocks(np.random.default_rng(0), 12, 96)
    ours, stored = matrix(*blocks)
    np.testing.assert_array_equal(ours[part], modelopt.reference(*blocks)[part])
    outputs, inputs = (
        range(size)[piece] for size, piece in zip(ours.get_shape(), part, strict=True)
    )
    assert stored.read == len(outputs) * (-(-inputs.stop // 2) - inputs.start // 2)
    whole = ours.read("values", (slice(None),) * 3)
    np.testing.assert_array_equal(
        ours.read("values", np.s_[2:5, part[0], 1:9]), whole[2:5, part[0], 1:9]
    )


@pytest.mark.parametrize("algorithm", [NVFP4, FP8, EACH])
def test_the_experts_of_a_layer_may_be_one_tensor(algorithm) -> None:
    name, rng = "experts.up", np.random.default_rng(0)
    parts, expected = modelopt.experts_of(name, (3, 64, 6), algorithm, rng)
    scales = Scales(Numbers(parts[f"{name}_weight_scale"]), "scales", "a file")
    if algorithm == NVFP4:
        factor = parts[f"{name}_weight_scale_2"].reshape(-1)
        experts = Nvfp4Experts(Numbers(parts[name]), scales, factor)
    else:
        experts = PlainExperts(Numbers(parts[name]), scales)
    assert experts.get_shape() == [3, 64, 6]
    for part in (
        np.s_[:, :, :],
        np.s_[1:3, 16:48, 1::2],
        np.s_[0:1, 5:40:3, 0:0],
        np.s_[:, 5:5, :],
    ):
        np.testing.assert_array_equal(experts[part], expected[part])
    values = experts.read("values", (slice(None),) * 4).astype(np.float32)
    factors = experts.read("scales", (slice(None),) * 3)
    weights = (values * factors[..., None]).swapaxes(1, 2).reshape(3, 6, 64).swapaxes(1, 2)
    np.testing.assert_array_equal(weights, expected)
    for role, part in (("values", np.s_[1:2, :, 2:4, :]), ("scales", np.s_[1:2, :, 2:4])):
        whole = experts.read(role, (slice(None),) * len(part))
        assert experts.shape_of(role) == list(whole.shape)
        np.testing.assert_array_equal(experts.read(role, part), whole[part])


def test_each_expert_may_have_a_scale_of_its_own() -> None:
    parts, expected = modelopt.experts_of("up", (2, 32, 4), NVFP4, np.random.default_rng(0))
    scales = Scales(Numbers(parts["up_weight_scale"]), "scales", "a file")
    factors = parts["up_weight_scale_2"] * np.float32([1, 2])
    experts = Nvfp4Experts(Numbers(parts["up"]), scales, factors)
    np.testing.assert_array_equal(experts[:, :, :], expected * np.float32([[[1]], [[2]]]))
    parts, expected = modelopt.experts_of("up", (2, 32, 4), FP8, np.random.default_rng(0))
    factors = parts["up_weight_scale"] * np.float32([1, 2])
    experts = PlainExperts(Numbers(parts["up"]), Numbers(factors))
    np.testing.assert_array_equal(experts[:, :, :], expected * np.float32([[[1]], [[2]]]))


def test_a_block_that_was_divided_by_a_scale_of_0_is_zeros_and_other_zeros_are_refused() -> None:
    packed, scales, factor = modelopt.random_blocks(np.random.default_rng(0), 4, 32)
    scales[1, 1] = 0
    packed[1, 8:] = [0x77, 0x7F, 0xF7, 0xFF, 0x77, 0x77, 0x77, 0x77]  # 6 and -6
    ours, _ = matrix(packed, scales, factor)
    assert not ours[:, :][1, 16:].any() and ours[:, :][1, :16].any()
    packed[1, 9] = 0x71
    for number in (0, np.nan):
        scales[1, 1] = number
        ours, _ = matrix(packed, scales, factor)
        message = f"^a file: 'weight_scale' has a scale of {number}"
        with pytest.raises(CheckpointError, match=message):
            ours[:, :]
        with pytest.raises(CheckpointError, match=message):
            ours.read("scales", np.s_[:, 1:2])
        assert ours[2:4, :].any()  # other rows are not read


def test_the_scale_that_is_named_is_one_that_is_wrong() -> None:
    packed, scales = np.full((3, 8), 0x77, np.uint8), np.float32([[0], [np.nan], [1]])
    ours, _ = matrix(packed, scales, 1)  # the block under 0 is permitted
    with pytest.raises(CheckpointError, match="has a scale of nan"):
        ours[:, :]
    with pytest.raises(CheckpointError, match="has a scale of nan"):
        Scales(Numbers(scales), "weight_scale", "a file").whole()
    np.testing.assert_array_equal(ours[::2, :], [[0] * 16, [6] * 16])


@pytest.mark.parametrize(
    ("scale", "factor", "result", "kind"),
    [
        (448, 1e-38, np.inf, "divided"),
        (448, 1e37, np.inf, "multiplied"),
        (2**-9, 1e-44, 0.0, "multiplied"),
        (448, 1e37, np.inf, "experts"),
        (2**-9, 1e-44, 0.0, "experts"),
    ],
)
def test_two_scales_whose_product_float32_cannot_hold_are_refused(
    scale, factor, result, kind
) -> None:
    packed, scales = np.full((2, 8), 0x42, np.uint8), np.array([[1], [scale]], jnp.float8_e4m3fn)
    good, _ = matrix(packed, scales, 1)
    assert good[:, :].all()
    ours, _ = matrix(packed, scales, factor, divides=kind == "divided")
    if kind == "experts":
        checked = Scales(Numbers(scales.T[None]), "weight_scale", "a file")
        ours = Nvfp4Experts(Numbers(packed.T[None]), checked, np.float32([factor]))
    message = f"^a file: 'weight_scale' has a scale of {float(scale)}, which .* into {result}"
    whole = (slice(None),) * len(ours.get_shape())
    with pytest.raises(CheckpointError, match=message):
        ours[whole]
    with pytest.raises(CheckpointError, match=message):
        ours.read("scales", whole)


def test_a_combined_scale_of_0_is_that_of_a_block_of_zeros() -> None:
    scales = Scales(Numbers(np.float32([[0, 2]])), "weight_scale", "a file")
    np.testing.assert_array_equal(scales.combined(np.float32([0, 2]), np.float32(3)), [0, 3])


# --- models ---------------------------------------------------------------------------------------


def read(directory, **options) -> Target:
    with pytest.warns(UserWarning, match=LINE):
        return Target.from_pretrained(directory, dtype=np.float32, **options)


def plain(directory) -> Target:
    return Target.from_pretrained(directory, dtype=np.float32)


def assert_equal(params, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, params, expected)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
EXPERTS = MIXTURES["qwen3_moe"] | {
    "hidden_size": 32,
    "head_dim": 8,
    "moe": MoE(**{**MIXTURES["qwen3_moe"]["moe"].__dict__, "intermediate_size": 32}),
}
MODELS = {
    "llama": {**SIZES},
    "phi3": {**SIZES, "model_type": "phi3"},  # qkv_proj and gate_up_proj are one matrix each
    "qwen3_moe": EXPERTS,
    "gpt_oss": {  # the experts of a layer are one tensor
        **SIZES,
        "model_type": "gpt_oss",
        "moe": MoE(
            num_experts=4,
            experts_per_token=2,
            intermediate_size=32,
            normalise=True,
            biased=True,
            limit=7.0,
        ),
        "intermediate_size": 32,
        "sinks": True,
        "qkv_bias": True,
        "output_bias": True,
        "sliding_window": 128,
        "windowed_layers": (0,),
    },
}


def is_product(name: str) -> bool:
    return "_proj" in name and not name.endswith("bias")


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "algorithm"),
    [
        ("llama", NVFP4),
        ("phi3", NVFP4),
        ("qwen3_moe", NVFP4),
        ("gpt_oss", NVFP4),
        pytest.param("gpt_oss", FP8, marks=pytest.mark.thorough),
        pytest.param("llama", EACH, marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", FP8, marks=pytest.mark.thorough),
    ],
)
def test_a_model_of_one_algorithm(tmp_path, monkeypatch, model, algorithm) -> None:
    tiny_target(**MODELS[model]).save_pretrained(tmp_path)
    modelopt.quantize(
        tmp_path,
        lambda name: algorithm if is_product(name) else None,
        {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.gate"]},
    )
    expected = plain(tmp_path / "floats")
    assert_equal(read(tmp_path, weights="float").params, expected.params)
    if algorithm != NVFP4:
        assert_equal(read(tmp_path).params, expected.params)
        monkeypatch.setattr(sharding, "is_on_cpu", lambda mesh: False)
    stored = read(tmp_path)
    layer = stored.params["layers"][0]
    quantized = [name for name in layer if is_quantized(layer[name])]
    assert len(quantized) == 7
    form = GROUPS if algorithm == NVFP4 else Form("fp8")
    assert {layer[name].form for name in quantized} == {form}
    assert_equal(as_floats(stored), expected.params)
    if model == "llama" and algorithm == NVFP4:
        return
    on_mesh = read(tmp_path, mesh=sharding.make_mesh(1, 2))
    assert_equal(on_mesh.params, stored.params)
    assert on_mesh.fingerprint() == stored.fingerprint()
    # config.json alone says the same.
    (tmp_path / "model.safetensors").unlink()
    files = CheckpointFiles(tmp_path)
    alone = huggingface.declare_stored(files, stored.config)["layers"][0]
    assert {name: alone[name].form for name in quantized} == dict.fromkeys(quantized, form)


MIXED = {
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": "FP8",
    "quantized_layers": {
        "model.layers.0.self_attn": {"quant_algo": "FP8"},
        "model.layers.1.mlp": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "lm_head": {"quant_algo": "NVFP4", "group_size": 16},
    },
}


def mixed(name: str) -> str | None:
    if ".0.self_attn" in name and "_proj" in name:
        return FP8
    return NVFP4 if ".1.mlp" in name or "lm_head" in name else None


@pytest.mark.full
@pytest.mark.parametrize("is_beside", [True, False])
def test_algorithms_may_differ_and_the_scales_of_a_cache_are_not_used(tmp_path, is_beside) -> None:
    tiny_target(**SIZES).save_pretrained(tmp_path)
    in_config = MIXED | {"quant_method": "modelopt", "ignore": ["mtp*"]}
    modelopt.quantize(
        tmp_path, mixed, None if is_beside else in_config, MIXED if is_beside else None
    )
    file = tmp_path / "model.safetensors"
    cache = {f"model.layers.0.self_attn.{kind}_proj.{kind}_scale" for kind in "kv"}
    save_file(modelopt.load(file) | {name: np.ones((), np.float32) for name in cache}, file)
    with pytest.warns(
        UserWarning,
        match=re.escape(
            f"{tmp_path}/config.json: it is read with FP8 as float32 (4 tensors), NVFP4 as int8 in"
            " groups of 16 (4 tensors); activations are not quantized, and stored scales for them"
            " and for the KV cache are not used"
        ),
    ):
        stored = plain(tmp_path)
    assert_equal(as_floats(stored), plain(tmp_path / "floats").params)
    assert is_quantized(stored.params["lm_head"])
    assert is_quantized(stored.params["layers"][1]["up"])
    stated = published.stated_forms(CheckpointFiles(tmp_path).quantization)
    for name, tensor in CheckpointFiles(tmp_path).tensors.items():
        assert stated(name) == getattr(tensor, "form", None), name


@pytest.mark.full
def test_what_is_read_is_saved_and_read_again(tmp_path) -> None:
    tiny_target(**SIZES).save_pretrained(tmp_path)
    modelopt.quantize(
        tmp_path,
        lambda name: NVFP4 if "_proj" in name else None,
        {"quant_method": "modelopt", "quant_algo": NVFP4},
    )
    stored = read(tmp_path)
    stored.save_pretrained(tmp_path / "again")
    again = plain(tmp_path / "again")
    assert_equal(again.params, stored.params)
    prompts = np.array([[1, 4, 2, 7, 7, 9, 0, 3]])
    expected = np.asarray(plain(tmp_path / "floats").forward(prompts)[0].logits)
    ours = np.asarray(stored.forward(prompts)[0].logits)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-3 * np.abs(expected).max())


# --- what is refused ------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
OWN = {"quant_method": "modelopt", "quant_algo": NVFP4}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("nvfp4")
    tiny_target(**SIZES).save_pretrained(directory)
    of = {"self_attn": NVFP4, "mlp": FP8}
    modelopt.quantize(
        directory,
        lambda name: of.get(name.split(".")[3]) if "_proj" in name else None,
        OWN
        | {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.0.self_attn": {"quant_algo": NVFP4}},
        },
    )
    return directory


def set_to(name: str, value: float):
    """Return an edit that sets the first number of a tensor."""

    def edit(tensors) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[0] = value

    return edit


FAULTS = [
    (lambda t: t.pop(f"{Q}_scale"), f"'{Q}' is quantized, and '{Q}_scale', which goes with it, is"),
    (lambda t: t.pop(f"{Q}_scale_2"), f"'{Q}_scale_2', which goes with it, is missing: download"),
    (lambda t: t.pop(Q), f"'{Q}' of a llama model with this config.json is missing"),
    (
        lambda t: t.update({f"{Q}_scale": t[f"{Q}_scale"][:, :1].copy()}),
        rf"'{Q}_scale' is F8_E4M3 of shape \(32, 1\): to go .* must be F8_E4M3 of shape \(32, 2\)",
    ),
    (
        lambda t: t.update({f"{Q}_scale": t[f"{Q}_scale"].view(np.uint8)}),
        f"'{Q}_scale' is U8 of shape .* must be F8_E4M3",  # MXFP4 has these
    ),
    (
        lambda t: t.update({f"{Q}_scale_2": np.ones(32, np.float32)}),
        rf"'{Q}_scale_2' is F32 of shape \(32,\): .* of shape \(\) or \(1,\)",
    ),
    (
        lambda t: t.update({Q: t[Q][:, :12].copy()}),
        "groups of 16, which do not divide the 24 inputs",
    ),
    (
        lambda t: t.update({Q: t[Q].reshape(32, 4, 4)}),
        rf"'{Q}' has shape \(32, 4, 4\): .*must be a matrix",
    ),
    (
        lambda t: t.update({Q: t[Q][:16].copy(), f"{Q}_scale": t[f"{Q}_scale"][:16].copy()}),
        rf"'{Q}' has shape \(16, 32\), but in a llama model",
    ),
    (
        lambda t: t.update({f"{Q.removesuffix('weight')}pre_quant_scale": np.ones(32, np.float32)}),
        "q_proj.pre_quant_scale' is no part of a llama model",
    ),
    *(
        (set_to(f"{name}", number), f"'{name}' has a scale of {number}: scales must be finite and")
        for name in (f"{Q}_scale_2", f"{DOWN}_scale")
        for number in (0.0, -1.0, np.nan, np.inf)
    ),
    (set_to(f"{Q}_scale", 0.0), f"'{Q}_scale' has a scale of 0.0: scales must be finite and above"),
    (set_to(f"{Q}_scale", -1.0), f"'{Q}_scale' has a scale of -1.0: scales must be finite and"),
    (set_to(f"{Q}_scale", np.nan), f"'{Q}_scale' has a scale of nan: scales must be finite and"),
]


@pytest.mark.parametrize(("edit", "message"), FAULTS)
def test_tensors_that_do_not_fit_are_refused_by_name_and_file(
    original, tmp_path, edit, message
) -> None:
    shutil.copy(original / "config.json", tmp_path)
    tensors = modelopt.load(original / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    files = CheckpointFiles(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        # What Target.from_pretrained does before it places anything, and the scales of a matrix.
        huggingface.declare_stored(files, tiny_target(**SIZES).config)
        files.tensors[Q].read("scales", (slice(None),) * 2)
    assert str(tmp_path) in str(caught.value)
    if "weight_scale" in message:
        assert f"{tmp_path}/model.safetensors: " in str(caught.value)


@pytest.mark.full
def test_a_scale_of_0_in_a_file_is_refused_when_a_model_is_loaded(original, tmp_path) -> None:
    shutil.copy(original / "config.json", tmp_path)
    tensors = modelopt.load(original / "model.safetensors")
    set_to(f"{Q}_scale", 0.0)(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    for options in ({}, {"weights": "float"}, {"mesh": sharding.make_mesh(1, 2)}):
        with (
            pytest.warns(UserWarning, match=LINE),
            pytest.raises(CheckpointError, match=f"'{Q}_scale' has a scale of 0.0"),
        ):
            Target.from_pretrained(tmp_path, dtype=np.float32, **options)


CONFIG_FAULTS = [
    ({"quant_algo": 4}, "quantization_config.quant_algo=4: must be NVFP4 or"),
    ({"quant_algo": None, "ignore": 5}, "quantization_config.ignore=5: must be a list of names"),
    ({"quant_algo": None, "quantized_layers": {"q": {}}}, "quantized_layers=.*: must be left out"),
    ({"quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ': must be NVFP4 or W4A16_NVFP4 or FP8"),
    ({"quant_algo": "W4A8_NVFP4_FP8"}, "quant_algo='W4A8_NVFP4_FP8': must be"),
    ({"group_size": 32}, "group_size=32: must be 16"),
    ({"ignore": "lm_head"}, "ignore='lm_head': must be a list of names and patterns"),
    ({"ignore": [1]}, r"ignore=\[1\]: must be a list of names and patterns"),
    (
        {"quant_algo": "MIXED_PRECISION"},
        "quantized_layers=None: must be an object with a layer or more",
    ),
    ({"quantized_layers": {"q": {}}}, "quantized_layers=.*: must be left out"),
    (
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": 4}},
        r"quantized_layers\['a.b'\]=4: must be an object",
    ),
    (
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A16_AWQ"}}},
        r"quantized_layers\['a'\].quant_algo='W4A16_AWQ': must be",
    ),
    (
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": NVFP4, "group_size": 8}},
        },
        r"quantized_layers\['a'\].group_size=8: must be 16",
    ),
]


@pytest.mark.parametrize(("edit", "message"), CONFIG_FAULTS)
def test_what_modelopt_may_also_do_is_refused_by_name(edit, message) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: .*{message}"):
        published.check_config(OWN | edit, "config.json")


@pytest.mark.parametrize(
    ("in_config", "beside", "message"),
    [
        (None, {"quant_algo": "W4A8_AWQ"}, "quantization.quant_algo='W4A8_AWQ': must be"),
        (None, {"quant_algo": NVFP4, "exclude_modules": 1}, "quantization.exclude_modules=1: must"),
        (OWN, {"quant_algo": FP8}, "quant_algo='FP8': must be NVFP4, as in config.json beside it"),
        (OWN, {"quant_algo": None}, "quant_algo=None: must be NVFP4, as in config.json"),
        (
            {"quant_method": "modelopt"},
            {"quant_algo": NVFP4},
            "quant_algo='NVFP4': must be left out, as in config.json beside it",
        ),
        (None, {"quant_algo": None, "exclude_modules": 5}, "quantization.exclude_modules=5: must"),
        (
            {"quant_method": "fp8"},
            {"quant_algo": NVFP4},
            "quant_algo='NVFP4': must be left out: config.json beside it says quant_method='fp8'",
        ),
    ],
)
def test_a_file_beside_is_checked_and_must_agree(tmp_path, in_config, beside, message) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": in_config}))
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"quantization": beside}))
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(file))}: .*{message}"):
        _ = CheckpointFiles(tmp_path).quantization


def test_a_file_beside_another_method_may_say_that_weights_are_not_quantized(tmp_path) -> None:
    stated = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated}))
    beside = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    assert CheckpointFiles(tmp_path).quantization == stated


def test_a_pattern_is_of_the_names_of_the_text_model_or_of_the_whole() -> None:
    raw = OWN | {"ignore": ["model.language_model.layers.0.self_attn*", "lm_head", "*.shared.*"]}
    names = {
        "model.layers.0.self_attn.q_proj": None,
        "model.layers.10.self_attn.q_proj": GROUPS,
        "model.layers.10.mlp.shared.up_proj": None,
        "model.layers.10.mlp.experts.3.up_proj": GROUPS,
        "lm_head": None,
        "model.embed_tokens": None,
    }
    stated = published.stated_forms(raw)
    assert {name: stated(f"{name}.weight") for name in names} == names
    layers = {"language_model.model.layers.1.mlp.experts": {"quant_algo": "FP8"}}
    raw = OWN | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    stated = published.stated_forms(raw)
    for prefix in ("language_model.model.", "model.language_model.", "model."):
        assert stated(f"{prefix}layers.1.mlp.experts.0.up_proj.weight") == Form("fp8")
    assert stated("model.layers.11.mlp.experts.0.up_proj.weight") is None


def test_modules_are_looked_up_by_name(monkeypatch) -> None:
    """Nemotron 3 Super names 41,000 modules: comparing each with each takes 20 minutes."""
    compared = []
    matches = published._matches

    def counting(pattern: str, module: str) -> bool:
        compared.append(pattern)
        return matches(pattern, module)

    monkeypatch.setattr(published, "_matches", counting)
    experts = [f"backbone.layers.1.mixer.experts.{i}.up_proj" for i in range(2000)]
    layers = {name: {"quant_algo": FP8} for name in experts} | {
        "backbone.layers.*.in_proj": {"quant_algo": NVFP4},
        "backbone.layers.1": {"quant_algo": NVFP4},
    }
    raw = OWN | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    stated = published.stated_forms(raw | {"ignore": experts[:1000]})
    forms = [stated(f"{name}.weight") for name in experts]
    assert forms == [None] * 1000 + [Form("fp8")] * 1000
    assert not compared
    assert stated("backbone.layers.1.mixer.experts.2000.up_proj.weight") == GROUPS  # its parent
    assert stated("backbone.layers.0.mixer.in_proj.weight") == GROUPS
    assert stated("backbone.layers.0.mixer.out_proj.weight") is None
    assert compared == ["backbone.layers.*.in_proj"] * 2
    # A group of compressed-tensors may name as many.
    group = {"targets": experts, "weights": {"num_bits": 4, "group_size": 32}}
    raw = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    stated = published.stated_forms(raw)
    assert {stated(f"{name}.weight") for name in experts} == {Form("int4", 32)}
    assert stated("backbone.layers.0.mixer.in_proj.weight") is None
    assert len(compared) == 2


# --- memory ---------------------------------------------------------------------------------------

LOAD = """
import json, sys
import jax
import jax.numpy as jnp
from specjax.models.transformer import Target

def megabytes(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(field + ":"))

jnp.zeros(1).block_until_ready()
with open("/proc/self/clear_refs", "w") as file:  # the peak starts again from here
    file.write("5")
before = megabytes("VmRSS")
target = Target.from_pretrained(sys.argv[1], dtype=jnp.bfloat16)
jax.block_until_ready(target.params)
total = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params)) / 1e6
print(json.dumps([total, megabytes("VmHWM") - before]))
"""


# Changes of `tiny_config`, by the name of the model. A gigabyte of weights or more: what one matrix
# needs while it is read, and the gaps that it leaves, are about 0.1 GB in all.
LARGE = {
    "llama": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_layers": 12,
        "num_heads": 16,
        "num_kv_heads": 16,
        "head_dim": 128,
    },
    "qwen3_moe": MIXTURES["qwen3_moe"]
    | {
        "hidden_size": 1024,
        "num_layers": 12,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 128,
        "moe": MoE(num_experts=32, experts_per_token=4, intermediate_size=768, normalise=True),
    },
    "qwen3_5_text": HYBRID
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_layers": 12,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 128,
        "linear": LinearAttention(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        "linear_layers": (0, 1, 2, 4, 5, 6, 8, 9, 10),
    },
}


def write_large(directory: Path, model: str, algorithm: str) -> None:
    """Write a checkpoint of random matrices; of "mixed" ones, those outside of MLPs are in FP8."""
    sizes = LARGE[model] | {"vocab_size": 512, "tie_embeddings": True}
    config, rng = tiny_config(**sizes), np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: Target.init(config, key, jnp.bfloat16), jax.random.key(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    zeros.save_pretrained(directory)
    tensors = modelopt.load(directory / "model.safetensors")
    layers = {}
    for name, weights in list(tensors.items()):
        if not is_product(name) or name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
            continue
        of_matrix = (FP8 if ".mlp." not in name else NVFP4) if algorithm == "mixed" else algorithm
        layers[name.removesuffix(".weight")] = {"quant_algo": of_matrix}
        if of_matrix == NVFP4:
            packed, scales, factor = modelopt.random_blocks(rng, *weights.shape)
            tensors |= {name: packed, f"{name}_scale": scales}
            tensors[f"{name}_scale_2"] = np.array(factor, np.float32)
        else:
            tensors[name] = rng.integers(0, 64, weights.shape, np.uint8).view(jnp.float8_e4m3fn)
            tensors[f"{name}_scale"] = np.array(0.5, np.float32)
    save_file(tensors, directory / "model.safetensors")
    raw = json.loads((directory / "config.json").read_text())
    stated = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    stated = OWN | (stated if algorithm == "mixed" else {"quant_algo": algorithm})
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": stated}))


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    ("model", "algorithm"),
    [
        ("llama", NVFP4),
        ("qwen3_moe", NVFP4),
        ("qwen3_moe", FP8),
        ("qwen3_5_text", "mixed"),
    ],
)
def test_loading_needs_little_more_memory_than_the_weights_as_they_are_read(
    tmp_path, model, algorithm
) -> None:
    """Pages of the file would be 45% more, and a second copy of the weights 100%."""
    write_large(tmp_path, model, algorithm)
    stored = (tmp_path / "model.safetensors").stat().st_size / 1e6
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=True
    )
    total, peak = json.loads(run.stdout)
    print(
        f"{model}, {algorithm}: a file of {stored:.0f} MB, {total:.0f} MB of weights, {peak:.0f} MB"
        f" at most while loading: {peak / total:.2f} times the weights"
    )
    assert total > 1000 and peak < 1.2 * total
