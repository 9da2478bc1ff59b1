"""AWQ and GPTQ checkpoints, written number by number as the layouts are described."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import sharding
from specjax.models.fields import CheckpointError
from specjax.models.quantization import Form
from specjax.models.quantization.stored import Awq, Gptq, PackedMatrix, PlainMatrix
from specjax.models.transformer import Target
from tests.conftest import tiny_target
from tests.models.quantization.in_memory import Numbers
from tests.models.quantization.quantized import forms_of, read

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
PROMPTS = np.array([[1, 4, 2, 7, 7, 9, 0, 3]])
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
GROUP = 16


class Matrix:
    """A quantized matrix: numbers from 0, ``[out, in]``.

    Groups of inputs have zeros and scales, ``[out, groups]``; ``group_of_input`` is each input's
    group.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        weight: np.ndarray,
        bits: int,
        size: int,
        symmetric: bool,
        ordered: bool,
    ) -> None:
        outputs, inputs = weight.shape
        size = inputs if size == -1 else size
        self.bits, self.size, middle = bits, size, 1 << (bits - 1)
        self.group_of_input = np.arange(inputs) // size
        if ordered:
            rng.shuffle(self.group_of_input)
        if symmetric:
            zeros = np.full((outputs, inputs // size), middle)
        else:
            zeros = rng.integers(0, 2 * middle, (outputs, inputs // size))
        largest = np.abs(weight).max(axis=1, keepdims=True) * rng.uniform(0.7, 1.3, zeros.shape)
        self.zeros, self.scales = zeros, (largest / middle).astype(np.float16)
        scales = self.scales.astype(np.float64)[:, self.group_of_input]
        numbers = np.rint(weight / scales) + zeros[:, self.group_of_input]
        self.numbers = np.clip(numbers, 0, 2 * middle - 1).astype(int)

    def floats(self) -> np.ndarray:
        weights = np.empty(self.numbers.shape, np.float32)
        for output, index in np.ndindex(*weights.shape):
            group = self.group_of_input[index]
            number = self.numbers[output, index] - self.zeros[output, group]
            weights[output, index] = number * np.float32(self.scales[output, group])
        return weights

    def gptq(self, less: int) -> dict[str, np.ndarray]:
        """Return the tensors of the layout of GPTQ.

        Input i is at bit ``bits * i`` of its output's column, and output o of a group's zeros at
        bit ``bits * o``. The first version of the layout stores zeros less 1, which is ``less``.
        """
        outputs, inputs = self.numbers.shape
        words = np.zeros((inputs * self.bits // 32, outputs), np.uint32)
        zeros = np.zeros((inputs // self.size, outputs * self.bits // 32), np.uint32)
        for output, index in np.ndindex(outputs, inputs):
            word, shift = divmod(index * self.bits, 32)
            words[word, output] |= np.uint32(self.numbers[output, index] << shift)
        for output, group in np.ndindex(*self.zeros.shape):
            word, shift = divmod(output * self.bits, 32)
            zero = (self.zeros[output, group] - less) % (1 << self.bits)
            zeros[group, word] |= np.uint32(zero << shift)
        return {
            "qweight": words.view(np.int32),
            "qzeros": zeros.view(np.int32),
            "scales": np.ascontiguousarray(self.scales.T),
            "g_idx": self.group_of_input.astype(np.int32),
        }

    def awq(self) -> dict[str, np.ndarray]:
        """Return the tensors of the layout of AWQ.

        Each int32 has eight outputs. From its lowest bits on these are the first, third, fifth,
        seventh, second, fourth, sixth and eighth.
        """

        def packed(rows: np.ndarray) -> np.ndarray:
            words = np.zeros((len(rows), rows.shape[1] // 8), np.uint32)
            for row, word in np.ndindex(*words.shape):
                for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                    words[row, word] |= np.uint32(rows[row, 8 * word + output] << 4 * nibble)
            return words.view(np.int32)

        return {
            "qweight": packed(self.numbers.T),
            "qzeros": packed(self.zeros.T),
            "scales": np.ascontiguousarray(self.scales.T),
        }


def write(
    directory: Path,
    quantization: dict[str, Any],
    size: int = GROUP,
    symmetric: bool = False,
    ordered: bool = False,
) -> Path:
    """Write a checkpoint of AWQ or GPTQ, and beside it one of the same weights in floats."""
    target = tiny_target(**SIZES, scale=8.0)
    rng = np.random.default_rng(0)
    target.save_pretrained(directory)
    target.save_pretrained(directory / "floats")
    floats = load_file(directory / "model.safetensors")
    tensors = dict(floats)
    for name in [name for name in floats if ".layers." in name and name.endswith("proj.weight")]:
        matrix = Matrix(
            rng, tensors.pop(name), quantization.get("bits", 4), size, symmetric, ordered
        )
        floats[name] = matrix.floats()
        is_first = quantization.get("checkpoint_format", "gptq") == "gptq"
        parts = (
            matrix.awq() if quantization["quant_method"] == "awq" else matrix.gptq(int(is_first))
        )
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, directory / "model.safetensors")
    save_file(floats, directory / "floats" / "model.safetensors")
    edit_config(directory, quantization_config=quantization | {"group_size": size})
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | changes))


def edit_tensors(directory: Path, edit) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def logits(target: Target) -> np.ndarray:
    return np.asarray(target.forward(PROMPTS)[0].logits)


AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
FIRST = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq", "desc_act": False}
SECOND, EIGHT = FIRST | {"checkpoint_format": "gptq_v2"}, FIRST | {"bits": 8}
ORDERED = {"ordered": True}
# The quantization_config, the options of `write`, and the form of the matrices.
CASES = {
    "AWQ": (AWQ, {}, Form("int4", GROUP, has_zeros=True)),
    "AWQ, one group": (AWQ | {"version": "GEMM"}, {"size": -1}, Form("int4", has_zeros=True)),
    "GPTQ": (FIRST, {}, Form("int4", GROUP, has_zeros=True)),
    "GPTQ, not symmetric": (FIRST | {"sym": False}, {}, Form("int4", GROUP, has_zeros=True)),
    "GPTQ, symmetric": (FIRST | {"sym": True}, {"symmetric": True}, Form("int4", GROUP)),
    "GPTQ, act order": (
        FIRST | {"desc_act": True},
        ORDERED,
        Form("int4", GROUP, has_zeros=True, is_ordered=True),
    ),
    "GPTQ, symmetric, act order": (
        FIRST,
        ORDERED | {"symmetric": True},
        Form("int4", GROUP, is_ordered=True),
    ),
    "GPTQ, one group": (
        {"quant_method": "gptq", "bits": 4},
        {"size": -1, "symmetric": True},
        Form("int4"),
    ),
    "GPTQ v2": (SECOND, {}, Form("int4", GROUP, has_zeros=True)),
    "GPTQ v2, symmetric": (
        SECOND | {"dynamic": {"-:.*lm_head": {}}},
        {"symmetric": True},
        Form("int4", GROUP),
    ),
    "GPTQ of 8 bits": (EIGHT, {}, Form("int8", GROUP, has_zeros=True)),
    "GPTQ of 8 bits, symmetric, act order": (
        EIGHT | {"sym": True},
        ORDERED | {"symmetric": True},
        Form("int8", GROUP, is_ordered=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.represents("packed weights of AWQ and GPTQ")
def test_weights_are_those_that_the_slow_packer_packed(tmp_path, name) -> None:
    quantization, options, form = CASES[name]
    write(tmp_path, quantization, **options)
    floats = read(tmp_path / "floats")
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-6),
        read(tmp_path, weights="float").params,
        floats.params,
    )
    quantized = read(tmp_path)
    assert forms_of(quantized) == dict.fromkeys(MATRICES, form)
    expected = logits(floats)
    error = np.abs(logits(quantized) - expected).max()
    assert 0 < error < 1e-3 * np.abs(expected).max()  # by rounded activations

    quantized.save_pretrained(tmp_path / "again")  # in the layout of compressed-tensors
    again = read(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, again.params, quantized.params)
    assert again.fingerprint() == quantized.fingerprint()


@pytest.mark.full
@pytest.mark.thorough_except("AWQ", "GPTQ, symmetric")
@pytest.mark.parametrize(
    "name", ["AWQ", "GPTQ, symmetric", "GPTQ, act order", "GPTQ of 8 bits", "GPTQ, one group"]
)
def test_on_a_mesh_each_device_reads_its_part(tmp_path, name) -> None:
    """A device has some inputs of `o` and `down`, and some outputs of other matrices."""
    quantization, options, form = CASES[name]
    whole, mesh = read(write(tmp_path, quantization, **options)), sharding.make_mesh(1, 2)
    split = read(tmp_path, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, split.params, whole.params)
    assert split.fingerprint() == whole.fingerprint()
    np.testing.assert_allclose(
        logits(split), logits(whole), rtol=0, atol=1e-3 * np.abs(logits(whole)).max()
    )
    last = split.params["layers"][-1]
    shards = {name: last[name].values.addressable_shards[0].data.shape for name in MATRICES}
    groups, size = (1, 64) if not form.group else (64 // GROUP, GROUP)
    assert (shards["q"], shards["k"]) == ((groups, 32, size), (groups, 16, size))
    assert shards["o"] == ((1, 64, 32) if groups == 1 else (groups // 2, 64, GROUP))
    floats = read(tmp_path, mesh=mesh, weights="float")
    jax.tree.map(
        np.testing.assert_array_equal, floats.params, read(tmp_path, weights="float").params
    )


def stored(kind: str, matrix: Matrix) -> tuple[Any, Numbers]:
    """Return a matrix in one of the layouts, and the tensor that holds its numbers."""
    tensors = matrix.awq() if kind == "awq" else matrix.gptq(1)
    parts = {part: Numbers(tensor) for part, tensor in tensors.items()}
    form = Form("int4", matrix.size, has_zeros=True)
    scales, zeros, values = parts["scales"], parts["qzeros"], parts["qweight"]
    if kind == "awq":
        return Awq(values, scales, zeros, form), values
    if kind.startswith("gptq"):
        order = parts["g_idx"] if kind == "gptq, act order" else None
        form = Form("int4", matrix.size, has_zeros=True, is_ordered=order is not None)
        return Gptq(values, scales, zeros, order, form, 1, False), values
    signed = (matrix.numbers - 8).astype(np.int8)
    if kind == "plain":
        values = Numbers(signed)
        return PlainMatrix(values, Numbers(matrix.scales), Form("int8", matrix.size)), values
    values, scales = Numbers(np.ascontiguousarray(values.numbers.T)), Numbers(matrix.scales)
    form = Form("int4", matrix.size)
    return PackedMatrix(values, scales, None, None, form, signed.shape[1]), values


PARTS = [
    np.s_[:, :],
    np.s_[3:9, 16:48],
    np.s_[7:8, 31:33],
    np.s_[2:20:3, 5:90:7],
    np.s_[5:5, :],
    np.s_[:, 8:8],
]


@pytest.mark.parametrize("kind", ["plain", "packed", "gptq", "gptq, act order", "awq"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_that_of_the_whole_and_little_more_is_read(kind, part) -> None:
    rng = np.random.default_rng(1)
    is_symmetric = kind in ("plain", "packed")
    is_ordered = kind == "gptq, act order"
    matrix = Matrix(rng, rng.normal(size=(24, 96)), 4, GROUP, is_symmetric, is_ordered)
    tensor, values = stored(kind, matrix)
    np.testing.assert_allclose(tensor[part], matrix.floats()[part], rtol=1e-6)
    outputs, inputs = (range(size)[indices] for size, indices in zip((24, 96), part, strict=True))
    # A word of AWQ has eight outputs, and one of the other layouts eight inputs.
    if kind == "awq":
        most = (outputs.stop - outputs.start + 14) * len(inputs)
    else:
        most = len(outputs) * (inputs.stop - inputs.start + 14)
    bits = 8 if kind == "plain" else 4
    assert values.read * 8 <= bits * most

    outputs, groups = part[0], slice(1, 4)
    whole = tensor.read("values", np.s_[:, :, :])
    np.testing.assert_array_equal(
        tensor.read("values", (groups, outputs, slice(3, 9))), whole[groups, outputs, 3:9]
    )
    for role in ("scales", "zeros"):
        np.testing.assert_array_equal(
            tensor.read(role, (groups, outputs)), tensor.read(role, np.s_[:, :])[groups, outputs]
        )
    order = tensor.read("order", (slice(None),))
    zeros, scales = (tensor.read(role, np.s_[:, :])[..., None] for role in ("zeros", "scales"))
    columns = (whole - zeros) * scales
    rows = np.moveaxis(columns, 0, 1).reshape(24, 96)
    np.testing.assert_allclose(rows, matrix.floats()[:, order], rtol=1e-6)
    np.testing.assert_array_equal(tensor.read("order", (slice(4, 9),)), order[4:9])


def test_zeros_of_the_second_version_in_a_file_of_the_first(tmp_path) -> None:
    """GPTQModel has written such files (vLLM's pull request 38966).

    They are recognized because they are symmetric.
    """
    write(tmp_path, SECOND | {"sym": True}, symmetric=True)
    expected = read(tmp_path)
    edit_config(tmp_path, quantization_config=FIRST | {"sym": True, "group_size": GROUP})
    assert forms_of(read(tmp_path)) == dict.fromkeys(MATRICES, Form("int4", GROUP))
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path).params, expected.params)


def test_biases_of_zeros_are_left_out_and_others_are_refused(tmp_path) -> None:
    """AutoGPTQ wrote a bias for every matrix."""
    expected = read(write(tmp_path, FIRST))
    name = "model.layers.0.mlp.up_proj.bias"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: np.zeros(96, np.float16)}))
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path).params, expected.params)
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: np.ones(96, np.float16)}))
    with pytest.raises(CheckpointError, match=f"'{name}' is no part of"):
        read(tmp_path)


Q = "model.layers.0.self_attn.q_proj."
FAULTS = [
    (
        FIRST,
        lambda t: t.pop(f"{Q}scales"),
        f"'{Q}weight' is quantized, and '{Q}scales', which goes with it, is missing: download",
    ),
    (FIRST, lambda t: t.pop(f"{Q}qzeros"), f"'{Q}qzeros', which goes with it, is missing"),
    (
        FIRST,
        lambda t: t.pop(f"{Q}qweight"),
        f"'{Q}weight' of a llama model with this config.json is missing",
    ),
    (
        FIRST,
        lambda t: t.update({f"{Q}qzeros": t[f"{Q}qzeros"][:, 1:].copy()}),
        r"qzeros' is I32 of shape \(4, 7\): .* \(4, 8\)",
    ),
    (
        FIRST,
        lambda t: t.update({f"{Q}scales": t[f"{Q}scales"][1:].copy()}),
        r"scales' is F16 of shape \(3, 64\): .* \(4, 64\)",
    ),
    (
        FIRST,
        lambda t: t.update({f"{Q}qweight": t[f"{Q}qweight"][:4].copy()}),
        r"scales' is F16 of shape \(4, 64\): .* \(2, 64\)",
    ),
    (
        FIRST,
        lambda t: t.update({f"{Q}qweight": t[f"{Q}qweight"].astype(np.int16)}),
        "qweight' is I16 of shape",
    ),
    (
        FIRST,
        lambda t: t.update({f"{Q}g_idx": np.zeros(64, np.int32)}),
        f"'{Q}g_idx': its 4 groups must have 16 inputs each: download",
    ),
    (
        FIRST,
        lambda t: t.update({f"{Q}g_idx": np.full(64, 2**31 - 1, np.int32)}),
        "g_idx': its 4 groups must have",
    ),
    (
        FIRST,
        lambda t: t.update({f"{Q}g_idx": np.zeros(3, np.int32)}),
        r"g_idx' is I32 of shape \(3,\)",
    ),
    (
        FIRST,
        lambda t: t.update({f"{Q}weight": np.zeros((64, 64), np.float32)}),
        f"it holds both '{Q}weight' and '{Q}qweight'",
    ),
    (AWQ, lambda t: t.pop(f"{Q}qzeros"), f"'{Q}qzeros', which goes with it, is missing"),
    (
        AWQ,
        lambda t: t.update({f"{Q}qweight": t[f"{Q}qweight"][:, :4].copy()}),
        r"scales' is F16 of shape \(4, 64\): .* \(4, 32\)",
    ),
    (AWQ, lambda t: t.update({f"{Q}g_idx": np.zeros(64, np.int32)}), f"'{Q}g_idx' is no part of"),
]


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(directory)
    message = str(caught.value)
    assert message.splitlines() == [message] and message.startswith(str(directory)), message
    return message


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    return {
        quantization["quant_method"]: write(tmp_path_factory.mktemp("original"), quantization)
        for quantization in (AWQ, FIRST)
    }


def copy(directory: Path, to: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (to / file).write_bytes((directory / file).read_bytes())


@pytest.mark.parametrize(("quantization", "edit", "message"), FAULTS)
def test_tensors_that_do_not_fit_are_refused_by_name(
    originals, tmp_path, quantization, edit, message
) -> None:
    copy(originals[quantization["quant_method"]], tmp_path)
    edit_tensors(tmp_path, edit)
    assert re.search(message, refusal(tmp_path)), refusal(tmp_path)


CONFIG_FAULTS = [
    (
        FIRST | {"bits": 3},
        "quantization_config.bits=3: must be 4 or 8: use the checkpoint without quantization",
    ),
    (FIRST | {"bits": None}, "bits=None: must be 4 or 8"),
    (FIRST | {"bits": 8}, r"scales' is F16 of shape"),
    (
        FIRST | {"checkpoint_format": "marlin"},
        "checkpoint_format='marlin': must be gptq or gptq_v2",
    ),
    (FIRST | {"pack_dtype": "int64"}, "pack_dtype='int64': must be int32"),
    (
        FIRST | {"dynamic": {"+:.*up_proj": {"bits": 8}}},
        "dynamic=.*: must be left out, or say only which matrices stay floats",
    ),
    (FIRST | {"group_size": 40}, "says groups of 40, which do not divide the 96 inputs of"),
    (FIRST | {"group_size": 0}, "group_size=0: must be a whole number from 1, or -1"),
    (FIRST | {"group_size": "16"}, "group_size='16': must be a whole number"),
    (AWQ | {"bits": 8}, "bits=8: must be 4"),
    (AWQ | {"version": "gemv"}, "version='gemv': must be gemm"),
    (AWQ | {"backend": "llm-awq"}, "backend='llm-awq': must be another than llm-awq"),
    (AWQ | {"zero_point": False}, "zero_point=False: must be True"),
    (
        {"quant_method": "fp8"},
        "qweight' is packed, and config.json does not say how: quant_method must be awq or gptq",
    ),
    (
        None,
        "qweight' is packed, and config.json does not say how: quant_method must be awq or gptq",
    ),
]


@pytest.mark.parametrize(("quantization", "message"), CONFIG_FAULTS)
def test_what_is_not_read_is_refused_by_name(originals, tmp_path, quantization, message) -> None:
    is_awq = quantization is not None and quantization["quant_method"] == "awq"
    copy(originals["awq" if is_awq else "gptq"], tmp_path)
    edit_config(tmp_path, quantization_config=quantization and {"group_size": GROUP} | quantization)
    assert re.search(message, refusal(tmp_path)), refusal(tmp_path)
