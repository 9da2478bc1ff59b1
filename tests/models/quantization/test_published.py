"""Checkpoints that the compressed-tensors library writes, and the weights that it reads."""

import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.with_torch import torch  # compressed-tensors needs it

# isort: split
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from specjax import sharding
from specjax.models.fields import CheckpointError
from specjax.models.quantization import Form
from specjax.models.quantization.weights import dequantize_matrix
from specjax.models.transformer import Target
from tests.models.quantization.compressed import (
    FLOAT_TOKEN,
    PROMPTS,
    STATIC,
    TOKEN,
    logits,
    scheme,
    write,
)
from tests.models.quantization.quantized import as_floats, bits, forms_of, read

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
ATTENTION, MLP = "re:.*self_attn.*", "re:.*mlp.*"
FLOAT8 = {"type": "float"}
BLOCKS = FLOAT8 | {"block_structure": [128, 128]}
ROUNDED = {8: 0.08, 16: 1e-3}
"""By the bits of activations, the allowed error of the logits, as a share of the largest.

8 bits are steps of 1/127 of a row's largest number, and 16 bits steps of 1/32,639. 14 products
follow each other.
"""

# The library's schemes, and the forms of the matrices: one for all, or by name.
CASES = {
    "W8A8": ([scheme(8, "channel", TOKEN)], Form("int8", activations=8)),
    "W8A8 of a matrix": ([scheme(8, "tensor", TOKEN)], Form("int8", activations=8)),
    "W8A16": ([scheme(8, "channel", layout="int-quantized")], Form("int8")),
    "W8A16 in groups": (
        [scheme(8, "group", layout="naive-quantized", group_size=64)],
        Form("int8", 64),
    ),
    "W8A16 packed": ([scheme(8, "channel")], Form("int8")),
    "W8A16 packed in groups": (
        [scheme(8, "group", group_size=32, symmetric=False)],
        Form("int8", 32, has_zeros=True),
    ),
    "W4A16": ([scheme(4, "group", group_size=128)], Form("int4", 128)),
    "W4A16 asymmetric": (
        [scheme(4, "group", group_size=64, symmetric=False)],
        Form("int4", 64, has_zeros=True),
    ),
    "W4A16 per output": ([scheme(4, "channel")], Form("int4")),
    "W4A8": (
        [scheme(4, "group", TOKEN, "pack-quantized", group_size=128)],
        Form("int4", 128, activations=8),
    ),
    "mixed": (
        [
            scheme(8, "channel", TOKEN, targets=(ATTENTION,)),
            scheme(4, "group", group_size=64, targets=("Linear",)),
        ],
        dict.fromkeys(MATRICES[:4], Form("int8", activations=8))
        | dict.fromkeys(MATRICES[4:], Form("int4", 64)),
    ),
    "FP8": ([scheme(8, "channel", FLOAT_TOKEN, **FLOAT8)], Form("fp8")),
    "FP8 static": ([scheme(8, "tensor", STATIC, **FLOAT8)], Form("fp8")),
    "FP8 blocks": ([scheme(8, "block", FLOAT_TOKEN, **BLOCKS)], Form("fp8", 128)),
}


def our_logits(target: Target) -> np.ndarray:
    return np.asarray(target.forward(PROMPTS)[0].logits)


def share(result: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, as a share of the largest number."""
    return float(np.abs(result - expected).max() / np.abs(expected).max())


RARE = ("W8A8 of a matrix", "W8A16 in groups", "W8A16 packed", "W4A16 per output", "W4A8")


@pytest.mark.full
@pytest.mark.thorough_except("W8A8", "W8A16", "W8A16 packed in groups")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in RARE)) for name in CASES]
)
def test_logits_are_those_of_the_weights_that_the_library_reads(
    tmp_path, monkeypatch, name
) -> None:
    schemes, forms = CASES[name]
    expected = logits(write(tmp_path, schemes))
    floats = read(tmp_path, weights="float")
    assert not forms_of(floats)
    np.testing.assert_allclose(our_logits(floats), expected, rtol=0, atol=1e-4)
    stored = read(tmp_path)
    is_float8 = name.startswith("FP8")
    assert is_float8 == (not forms_of(stored))  # a CPU converts it
    if is_float8:
        monkeypatch.setattr(sharding, "is_on_cpu", lambda mesh: False)
        stored = read(tmp_path)
    forms = forms if isinstance(forms, dict) else dict.fromkeys(MATRICES, forms)
    assert forms_of(stored) == forms
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6),
        as_floats(stored),
        floats.params,
    )
    bits = min(form.activations for form in forms.values())
    assert share(our_logits(stored), expected) < ROUNDED[bits]
    # Quantized matrices are multiplied as such, which changes the logits.
    assert is_float8 or share(our_logits(stored), expected) > 0


@pytest.mark.full
@pytest.mark.parametrize("inputs", ["measured", pytest.param("floats", marks=pytest.mark.thorough)])
def test_nvfp4_has_the_weights_that_the_library_reads(tmp_path, inputs) -> None:
    """The library's own reader rounds them to bfloat16; its functions also have float32."""
    blocks = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    blocks["scale_dtype"] = torch.float8_e4m3fn
    args = QuantizationArgs(**blocks)
    dynamic = QuantizationArgs(dynamic="local", observer="static_minmax", **blocks)
    arguments = {"bits": blocks.pop("num_bits"), **blocks}
    library = write(
        tmp_path, [scheme(inputs=dynamic if inputs == "measured" else None, **arguments)]
    )
    with pytest.warns(UserWarning, match="NVFP4 as int8 in groups of 16 .14 tensors."):
        stored = read(tmp_path)
    assert forms_of(stored) == dict.fromkeys(MATRICES, Form("int8", 16))
    state, layers = library.state_dict(), as_floats(stored)["layers"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for index, matrix in itertools.product(range(2), MATRICES):
        module = "self_attn" if matrix in MATRICES[:4] else "mlp"
        name = f"model.layers.{index}.{module}.{matrix}_proj.weight"
        ours = np.asarray(layers[index][matrix].T)
        np.testing.assert_array_equal(
            ours.astype(jnp.bfloat16).astype(np.float32), state[name].numpy()
        )
        packed = tensors[f"{name}_packed"]
        numbers = unpack_fp4_from_uint8(packed, *ours.shape, dtype=torch.float32)
        state[name] = dequantize(
            numbers,
            tensors[f"{name}_scale"].float(),
            args=args,
            dtype=torch.float32,
            global_scale=tensors[f"{name}_global_scale"],
        )
        # The library has zeros of both signs.
        np.testing.assert_array_equal(bits(ours), bits(state[name].numpy()))
    library.load_state_dict(state)
    expected = logits(library)
    with pytest.warns(UserWarning, match="NVFP4 as float32 .14 tensors."):
        floats = read(tmp_path, weights="float")
    np.testing.assert_allclose(our_logits(floats), expected, rtol=0, atol=1e-4)
    assert 0 < share(our_logits(stored), expected) < ROUNDED[16]


@pytest.mark.full
def test_groups_of_inputs_that_are_no_neighbours(tmp_path) -> None:
    """The library wrote ``weight_g_idx`` until 2026, and orders the numbers itself today.

    The test puts each number back to where it was.
    """
    floats, size = write(tmp_path, [scheme(4, "group", group_size=64, symmetric=False)]), 64
    tensors, state = load_file(tmp_path / "model.safetensors"), floats.state_dict()
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        base = name.removesuffix("_packed")
        shape = tuple(tensors[f"{base}_shape"].tolist())
        group_of_input = rng.permutation(np.arange(shape[1]) // size).astype(np.int32)
        # The position of each input in the library's order.
        positions = np.argsort(np.argsort(group_of_input, kind="stable"))
        numbers = unpack_from_int32(torch.tensor(tensors[name]), 4, torch.Size(shape))[:, positions]
        tensors |= {
            name: pack_to_int32(numbers.contiguous(), 4).numpy(),
            f"{base}_g_idx": group_of_input,
        }
        state[base] = state[base][:, positions]
    save_file(tensors, tmp_path / "model.safetensors")
    floats.load_state_dict(state)
    expected = logits(floats)
    np.testing.assert_allclose(
        our_logits(read(tmp_path, weights="float")), expected, rtol=0, atol=1e-4
    )
    stored = read(tmp_path)
    assert forms_of(stored) == dict.fromkeys(
        MATRICES, Form("int4", 64, has_zeros=True, is_ordered=True)
    )
    assert share(our_logits(stored), expected) < ROUNDED[16]

    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = np.full_like(tensors[name], -1)  # not set
    save_file(tensors, tmp_path / "model.safetensors")
    assert forms_of(read(tmp_path)) == dict.fromkeys(MATRICES, Form("int4", 64, has_zeros=True))


@pytest.mark.full
def test_a_matrix_whose_last_word_is_not_full_and_one_whose_blocks_are_not(tmp_path) -> None:
    # The inputs of `down` fill 38 words and a half, and two blocks and a half.
    sizes = {"intermediate_size": 308}
    expected = logits(write(tmp_path / "packed", [scheme(4, "channel", symmetric=False)], **sizes))
    np.testing.assert_allclose(
        our_logits(read(tmp_path / "packed", weights="float")), expected, rtol=0, atol=1e-4
    )
    assert forms_of(read(tmp_path / "packed")) == dict.fromkeys(
        MATRICES, Form("int4", has_zeros=True)
    )
    assert share(our_logits(read(tmp_path / "packed")), expected) < ROUNDED[16]
    expected = logits(
        write(tmp_path / "blocks", [scheme(8, "block", FLOAT_TOKEN, **BLOCKS)], **sizes)
    )
    np.testing.assert_allclose(our_logits(read(tmp_path / "blocks")), expected, rtol=0, atol=1e-4)


def test_blocks_that_are_not_full_stay_floats_beside_others_that_are_kept(
    tmp_path, monkeypatch
) -> None:
    write(tmp_path, [scheme(8, "block", FLOAT_TOKEN, **BLOCKS)], intermediate_size=308)
    monkeypatch.setattr(sharding, "is_on_cpu", lambda mesh: False)
    assert forms_of(read(tmp_path)) == dict.fromkeys(MATRICES[:-1], Form("fp8", 128))


@pytest.mark.full
def test_away_from_a_cpu_4_bits_are_4_bits(tmp_path, monkeypatch) -> None:
    write(tmp_path, [scheme(4, "group", group_size=64, symmetric=False)])
    on_cpu = read(tmp_path)
    monkeypatch.setattr(sharding, "is_on_cpu", lambda mesh: False)
    elsewhere = read(tmp_path)
    assert on_cpu.params["layers"][0]["q"].values.dtype == jnp.int8
    assert elsewhere.params["layers"][0]["q"].values.dtype == jnp.int4
    assert elsewhere.fingerprint() == on_cpu.fingerprint()
    jax.tree.map(np.testing.assert_array_equal, as_floats(elsewhere), as_floats(on_cpu))


def test_a_checkpoint_in_shards(tmp_path) -> None:
    write(tmp_path, [scheme(4, "group", group_size=64, symmetric=False)])
    whole = read(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shards = {
        name: f"model-0000{i % 3 + 1}-of-00003.safetensors"
        for i, name in enumerate(sorted(tensors))
    }
    for file in set(shards.values()):  # the parts of a matrix lie in all three shards
        save_file(
            {name: tensors[name] for name in tensors if shards[name] == file}, tmp_path / file
        )
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path).params, whole.params)


@pytest.mark.parametrize("weights", ["int8", "w8a8"])
def test_asking_for_what_is_stored_already_changes_no_number(tmp_path, weights) -> None:
    write(tmp_path, [scheme(8, "channel", TOKEN)])
    stored, requested = read(tmp_path), read(tmp_path, weights=weights)
    q, again = stored.params["layers"][0]["q"], requested.params["layers"][0]["q"]
    np.testing.assert_array_equal(q.values, again.values)
    np.testing.assert_array_equal(q.scales, again.scales)
    assert again.activations == {"int8": 16, "w8a8": 8}[weights]


def test_other_forms_are_made_of_what_is_stored(tmp_path) -> None:
    floats = read(write(tmp_path, [scheme(8, "channel")]) and tmp_path, weights="float")
    requested = read(tmp_path, weights="int4")
    assert forms_of(requested) == dict.fromkeys(MATRICES, Form("int4", 128))
    floats_q, quantized = floats.params["layers"][0]["q"], requested.params["layers"][0]["q"]
    step = float(quantized.scales.max())
    error = float(jnp.abs(dequantize_matrix(quantized) - floats_q).max())
    assert 0 < error <= 2.5 * step  # the largest weights may be cut off


# --- what is refused ------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
PACKED, PLAIN, FLOAT = "W4A16 asymmetric", "W8A8", "FP8 blocks"


def swap(tensors, first: str, second: str) -> None:
    tensors[first], tensors[second] = tensors[second], tensors[first]


FAULTS = [
    (
        PACKED,
        lambda t: t.pop(f"{Q}_scale"),
        f"'{Q}' is quantized, and '{Q}_scale', which goes with it, is missing: download",
    ),
    (
        PACKED,
        lambda t: t.pop(f"{Q}_zero_point"),
        f"'{Q}_zero_point', which goes with it, is missing",
    ),
    (PACKED, lambda t: t.pop(f"{Q}_shape"), f"'{Q}_shape', which goes with it, is missing"),
    (
        PACKED,
        lambda t: t.pop(f"{Q}_packed"),
        f"'{Q}' of a llama model with this config.json is missing",
    ),
    (
        PACKED,
        lambda t: t.update({f"{Q}_scale": t[f"{Q}_scale"][:, :3].copy()}),
        r"_scale' is F32 of shape \(256, 3\): .*\(256, 4\)",
    ),
    (
        PACKED,
        lambda t: t.update({f"{Q}_scale": t[f"{Q}_scale"].astype(np.int32)}),
        r"_scale' is I32 of shape .* must be F64 or",
    ),
    (
        PACKED,
        lambda t: swap(t, f"{Q}_scale", f"{UP}_scale"),
        r"q_proj.weight_scale' is F32 of shape \(384, 4\)",
    ),
    (
        PACKED,
        lambda t: t.update({f"{Q}_packed": t[f"{Q}_packed"][:, :-1].copy()}),
        rf"'{Q}_shape' is \[256, 256\], but '{Q}_packed', of",
    ),
    (
        PACKED,
        lambda t: t.update({f"{Q}_packed": t[f"{Q}_packed"].astype(np.int64)}),
        f"'{Q}_packed' is I64 of shape",
    ),
    (
        PACKED,
        lambda t: t.update({f"{Q}_packed": t[f"{Q}_packed"].reshape(-1)}),
        f"'{Q}_packed' has shape .*must be a matrix",
    ),
    (
        PACKED,
        lambda t: t.update({f"{Q}_shape": np.array([256, 512])}),
        rf"'{Q}_shape' is \[256, 512\], but '{Q}_packed'",
    ),
    (
        PACKED,
        lambda t: t.update({f"{Q}_shape": np.array([256, -256])}),
        rf"'{Q}_shape' is \[256, -256\], but '{Q}_packed'",
    ),
    (
        PACKED,
        lambda t: t.update({f"{Q}_shape": np.array([256])}),
        rf"'{Q}_shape' is I64 of shape \(1,\)",
    ),
    (
        PACKED,
        lambda t: t.update({f"{Q}_zero_point": t[f"{Q}_zero_point"].T.copy()}),
        r"_zero_point' is I32 of shape \(4, 32\)",
    ),
    (
        PACKED,
        lambda t: t.update({f"{Q}_g_idx": np.zeros(256, np.int32)}),
        f"'{Q}_g_idx': its 4 groups must have 64 inputs each",
    ),
    (
        PACKED,
        lambda t: t.update({f"{Q}_g_idx": np.full(256, 2**31 - 1, np.int32)}),
        f"'{Q}_g_idx': its 4 groups must have",
    ),
    (
        PACKED,
        lambda t: t.update({f"{Q}_g_idx": np.arange(256, dtype=np.int32) % 4 - 1}),
        f"'{Q}_g_idx': its 4 groups must have",
    ),
    (
        PACKED,
        lambda t: t.update({f"{Q}_g_idx": np.zeros(9, np.int32)}),
        rf"'{Q}_g_idx' is I32 of shape \(9,\)",
    ),
    (
        PACKED,
        lambda t: t.update({Q: np.zeros((256, 256), np.float32)}),
        f"it holds both '{Q}' and '{Q}_packed'",
    ),
    (PLAIN, lambda t: t.pop(f"{Q}_scale"), f"'{Q}_scale', which goes with it, is missing"),
    (
        PLAIN,
        lambda t: swap(t, f"{Q}_scale", f"{UP}_scale"),
        r"q_proj.weight_scale' is F32 of shape \(384, 1\): .* \(256, 1\) or",
    ),
    (
        PLAIN,
        lambda t: t.update({f"{Q}_zero_point": np.zeros((256, 1), np.int8)}),
        "must be symmetric, without zero points: use",
    ),
    (
        PLAIN,
        lambda t: t.update({Q: t[Q][:, :128].copy()}),
        rf"'{Q}' has shape \(256, 128\), but in a llama model",
    ),
    (
        PLAIN,
        lambda t: t.update({"lm_head.weight_scale": np.ones((96, 1), np.float32)}),
        "'lm_head.weight_scale' is no part of",
    ),
    (FLOAT, lambda t: t.pop(f"{Q}_scale"), f"'{Q}_scale', which goes with it, is missing"),
    (
        FLOAT,
        lambda t: swap(t, f"{Q}_scale", f"{UP}_scale"),
        r"q_proj.weight_scale' is F32 of shape \(3, 2\): .* of shape \(2, 2\)",
    ),
    (
        FLOAT,
        lambda t: t.update({Q: t[Q].astype(np.float32)}),
        f"'{Q}_scale' is no part of a llama model",
    ),
]


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("compressed")
    for name in (PACKED, PLAIN, FLOAT):
        write(root / name, CASES[name][0])
    return {name: root / name for name in (PACKED, PLAIN, FLOAT)}


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(directory)
    message = str(caught.value)
    assert message.splitlines() == [message], message
    assert message.startswith(str(directory)) and message.count(": ") >= 2, message
    return message


def load(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file, those in FP8 too."""
    from safetensors.torch import load_file as load_torch

    def to_numpy(tensor) -> np.ndarray:
        if tensor.dtype == torch.float8_e4m3fn:
            return tensor.view(torch.uint8).numpy().view(jnp.float8_e4m3fn)
        return tensor.numpy()

    return {name: to_numpy(tensor) for name, tensor in load_torch(file).items()}


@pytest.mark.parametrize(("name", "edit", "message"), FAULTS)
def test_tensors_that_do_not_fit_are_refused_by_name(
    originals, tmp_path, monkeypatch, name, edit, message
) -> None:
    tensors = load(originals[name] / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((originals[name] / "config.json").read_bytes())
    monkeypatch.setattr(np, "ascontiguousarray", None)  # every check comes before the first weight
    assert re.search(message, refusal(tmp_path)), refusal(tmp_path)


def edit_config(name: str, **changes):
    """Return ``name`` and a function that edits a compressed-tensors ``quantization_config``."""
    return name, lambda raw: raw.update(changes)


def edit_group(name: str, part: str | None = None, **changes):
    """Return ``name`` and a function that edits the first group, or a part of that group."""

    def edit(raw) -> None:
        group = raw["config_groups"]["group_0"]
        (group if part is None else group[part]).update(changes)

    return name, edit


CONFIG_FAULTS = [
    (
        edit_config(PACKED, quant_method="quark"),
        "quant_method='quark': must be one of fp8, mxfp4, compressed-tensors, awq, gptq, modelopt:",
    ),
    (edit_config(PACKED, quant_method=None), "quant_method=None: must be one of"),
    (edit_config(PACKED, quant_method=["awq"]), r"quant_method=\['awq'\]: must be one of"),
    (
        edit_config(PACKED, config_groups={}),
        "config_groups={}: must be an object with a group or more",
    ),
    (
        edit_config(PACKED, config_groups={"W4A16": ["Linear"]}),
        r"config_groups.W4A16=\['Linear'\]: must be an object",
    ),
    (
        edit_config(PACKED, sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config=.*: must be dense, or left out",
    ),
    (edit_config(PACKED, sparsity_config=["x"]), "sparsity_config=.*: must be dense, or left out"),
    (
        edit_config(PACKED, transform_config={"config_groups": {"u": {}}}),
        "transform_config=.*: must be left out",
    ),
    (
        edit_group(PACKED, format="nvfp4-pack-quantized"),
        "config_groups.group_0.weights.type='int': must be float: use",
    ),
    (edit_group(PACKED, format="marlin-24"), "format='marlin-24': must be one of"),
    (
        edit_group(PACKED, targets="Linear"),
        "targets='Linear': must be a list of names and patterns",
    ),
    (
        edit_group(PACKED, targets=["re:("]),
        r"targets=\['re:\('\]: must be a list of names and patterns",
    ),
    (edit_group(PACKED, weights=None), "group_0.weights=None: must be an object"),
    (edit_group(PACKED, "weights", num_bits=3), "weights.num_bits=3: must be 4 or 8"),
    (edit_group(PACKED, "weights", num_bits=4.0), "weights.num_bits=4.0: must be 4 or 8"),
    (edit_group(PACKED, "weights", type="float"), "weights.type='float': must be int"),
    (
        edit_group(PACKED, "weights", strategy="tensor_group"),
        "weights.strategy='tensor_group': must be channel or group",
    ),
    (edit_group(PACKED, "weights", group_size=0), "weights.group_size=0: must be a number from 1"),
    (
        edit_group(PACKED, "weights", group_size=None),
        "weights.group_size=None: must be a number from 1",
    ),
    (
        edit_group(PACKED, "weights", group_size=40),
        "says groups of 40, which do not divide the 384 inputs of",
    ),
    (
        edit_group(PACKED, "weights", group_size=32),
        r"weight_scale' is F32 of shape \(\d+, \d\): .* of shape",
    ),
    (edit_group(PACKED, "weights", num_bits=8), "is no matrix of that shape in numbers of 8 bits"),
    (
        edit_group(PACKED, input_activations=7),
        "input_activations=7: must be an object, or left out",
    ),
    (
        edit_group(PACKED, input_activations={"num_bits": 4}),
        "input_activations.num_bits=4: must be 8",
    ),
    (edit_group(PLAIN, "weights", num_bits=4), "weights.num_bits=4: must be 8"),
    (
        edit_group(PLAIN, "weights", symmetric=False),
        "8-bit numbers that are not packed must be symmetric",
    ),
    (
        edit_group(PLAIN, "weights", strategy="block"),
        "weights.strategy='block': must be tensor or channel or group",
    ),
    (
        edit_group(FLOAT, "weights", strategy="group", group_size=128),
        "weights.strategy='group': must be tensor or channel or block",
    ),
    (
        edit_group(FLOAT, "weights", block_structure=[64, 128]),
        r"block_structure=\[64, 128\]: must be \[128, 128\]",
    ),
    (
        edit_group(FLOAT, "weights", strategy="channel"),
        r"weight_scale' is F32 of shape \(\d, \d\): .* or",
    ),
    ((PACKED, lambda raw: raw.clear()), "quant_method=None: must be one of"),
    (
        (PACKED, lambda raw: (raw.clear(), raw.update({"quant_method": "gptq", "bits": 4}))),
        (
            "weight_packed' is packed, and config.json does not say how: quant_method must be"
            " compressed-tensors"
        ),
    ),
    (
        (
            PACKED,
            lambda raw: (
                raw["config_groups"].update(g={**raw["config_groups"]["group_0"], "targets": ["x"]})
                or raw["config_groups"]["group_0"].update(targets=["y"])
            ),
        ),
        "is quantized, and config.json does not say how: none of its config_groups is for it",
    ),
]


@pytest.mark.parametrize(("edited", "message"), CONFIG_FAULTS)
def test_what_is_not_read_is_refused_by_name(originals, tmp_path, edited, message) -> None:
    name, edit = edited
    for file in originals[name].iterdir():
        (tmp_path / file.name).symlink_to(file)
    raw = json.loads((tmp_path / "config.json").read_text())
    edit(raw["quantization_config"])
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert re.search(message, refusal(tmp_path)), refusal(tmp_path)


def test_packed_tensors_without_a_configuration_are_refused(originals, tmp_path) -> None:
    (tmp_path / "model.safetensors").symlink_to(originals[PACKED] / "model.safetensors")
    raw = json.loads((originals[PACKED] / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert "is packed, and config.json does not say how" in refusal(tmp_path)
