"""FP8 weights: blocks against numpy, read as floats or as stored, and what is refused."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import sharding
from specjax.models import checkpoint
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError
from specjax.models.params import Param
from specjax.models.quantization import Form, float8, is_quantized, saved, schemes
from specjax.models.quantization.stored import Ragged
from specjax.models.quantization.weights import dequantize_matrix
from specjax.models.transformer import Target
from tests.conftest import tiny_target

SHAPE, BLOCKS = (300, 132), (3, 2)  # neither is a multiple of 128
DECLARED = {
    "down": Param(SHAPE[::-1], ("mlp", None), "down.weight", transposed=True),
    "experts": Param(
        (2, *SHAPE[::-1]), ("experts", None, None), "experts.{}.weight", transposed=True
    ),
}
NAMES = ("down.weight", "experts.0.weight", "experts.1.weight")


def tensors() -> dict[str, np.ndarray]:
    rng, tensors_by_name = np.random.default_rng(0), {}
    for name in NAMES:
        tensors_by_name[name] = rng.normal(size=SHAPE).astype(jnp.float8_e4m3fn)
        tensors_by_name[f"{name}_scale_inv"] = rng.uniform(0.5, 2, BLOCKS).astype(np.float32)
    return tensors_by_name


def reference(stored: np.ndarray, scales: np.ndarray) -> np.ndarray:
    weights = stored.astype(np.float32)
    for row in range(stored.shape[0]):
        for column in range(stored.shape[1]):
            weights[row, column] *= scales[row // 128, column // 128]
    return weights


@pytest.fixture
def directory(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def test_blocks_are_dequantized_as_numpy_does_it(directory) -> None:
    stored = tensors()
    expected = [reference(stored[name], stored[f"{name}_scale_inv"]).T for name in NAMES]
    read = checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.float32, "two experts")
    np.testing.assert_array_equal(read["down"], expected[0])
    np.testing.assert_array_equal(read["experts"], np.stack(expected[1:]))


class Numbers:
    """A tensor in memory that records which parts of it are read."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers, self.read = numbers, []

    def get_shape(self) -> list[int]:
        return list(self.numbers.shape)

    def __getitem__(self, part):
        sizes = zip(self.numbers.shape, part, strict=True)
        self.read.append(tuple(len(range(size)[piece]) for size, piece in sizes))
        return self.numbers[part]


@pytest.mark.parametrize(
    "part",
    [
        np.s_[0:300, 0:132],
        np.s_[127:129, 130:132],
        np.s_[140:150, 3:4],
        np.s_[:, 128:],
        np.s_[5:5, :],
        np.s_[1:9:2, ::3],
    ],
)
def test_a_slice_is_that_of_the_whole_and_no_more_is_read(part) -> None:
    stored, scales = tensors()["down.weight"], tensors()["down.weight_scale_inv"]
    values = Numbers(stored)
    np.testing.assert_array_equal(
        Ragged(values, Numbers(scales))[part], reference(stored, scales)[part]
    )
    assert values.read == [reference(stored, scales)[part].shape]


def test_a_device_reads_its_own_part(directory, monkeypatch) -> None:
    """A device of a mesh reads one of the two experts, and half of the columns of a matrix."""
    parts = []
    read = float8.MappedTensor.__getitem__

    def record(tensor, part):
        parts.append(
            tuple(len(range(size)[piece]) for size, piece in zip(SHAPE, part, strict=True))
        )
        return read(tensor, part)

    whole = checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.float32, "two experts")
    monkeypatch.setattr(float8.MappedTensor, "__getitem__", record)
    mesh = sharding.make_mesh(1, 2)
    split = checkpoint.load(
        CheckpointFiles(directory),
        DECLARED,
        jnp.float32,
        "two experts",
        mesh=mesh,
        units={"mlp": 132, "experts": 2},
    )
    jax.tree.map(np.testing.assert_array_equal, split, whole)
    assert sorted(parts) == [(300, 66), (300, 66), (300, 132), (300, 132)]


# --- read as stored -------------------------------------------------------------------------------

FULL, FULL_BLOCKS = (300, 256), (3, 2)  # the inputs fill their blocks, the outputs do not
PRODUCTS = {
    "down": Param(FULL[::-1], ("mlp", None), "down.weight", transposed=True, is_product=True),
    "experts": Param(
        (2, *FULL[::-1]),
        ("experts", None, None),
        "experts.{}.weight",
        transposed=True,
        is_product=True,
    ),
}
# The quantization_config, the scales' suffix and shape, and the size of the groups.
SCALES = {
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "_scale_inv",
        FULL_BLOCKS,
        128,
    ),
    "of the matrix": ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale_inv", (), 0),
    "of the matrix, as AutoFP8 has it": ({"quant_method": "fp8"}, "_scale", (1,), 0),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("on_mesh", [False, True])
def test_values_and_scales_are_kept_where_forms_are_asked_for(tmp_path, kind, on_mesh) -> None:
    quantization, suffix, shape, size = SCALES[kind]
    rng, stored = np.random.default_rng(1), {}
    for name in NAMES:
        stored[name] = rng.normal(size=FULL).astype(jnp.float8_e4m3fn)
        stored[f"{name}{suffix}"] = np.asarray(rng.uniform(0.5, 2, shape), np.float32)
        # A scale that was measured beforehand is not read.
        activation_scale = f"{name.removesuffix('weight')}activation_scale"
        stored[activation_scale] = np.ones((), np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))

    forms = CheckpointFiles(tmp_path).forms
    assert forms == dict.fromkeys(NAMES, Form("fp8", size))
    declared = schemes.declare(
        PRODUCTS, lambda param: schemes.common(map(forms.get, param.stored_names))
    )
    mesh = sharding.make_mesh(1, 2) if on_mesh else None
    units = {"mlp": 256, "experts": 2}
    quantized = checkpoint.load(
        CheckpointFiles(tmp_path), declared, jnp.float32, "two experts", mesh=mesh, units=units
    )
    assert quantized["down"].form == quantized["experts"].form == Form("fp8", size)
    groups = quantized["down"].values.shape[0]
    by_group = np.moveaxis(stored["down.weight"].reshape(300, groups, -1), 1, 0)
    np.testing.assert_array_equal(
        np.asarray(quantized["down"].values).view(np.uint8), by_group.view(np.uint8)
    )
    assert quantized["experts"].values.dtype == jnp.float8_e4m3fn
    floats = checkpoint.load(
        CheckpointFiles(tmp_path), PRODUCTS, jnp.float32, "two experts", mesh=mesh, units=units
    )
    expected = []
    for name in NAMES:
        scales = np.broadcast_to(stored[f"{name}{suffix}"], FULL_BLOCKS)
        expected.append(reference(stored[name], scales).T)
    for read in (floats, jax.tree.map(dequantize_matrix, quantized, is_leaf=is_quantized)):
        np.testing.assert_array_equal(read["down"], expected[0])
        np.testing.assert_array_equal(read["experts"], np.stack(expected[1:]))

    again = tmp_path / "again"
    checkpoint.save(
        again,
        declared,
        quantized,
        {"config.json": {"quantization_config": saved.format_config(declared)}},
    )
    read = checkpoint.load(CheckpointFiles(again), declared, jnp.float32, "two experts")
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.tree.map(np.asarray, read),
        jax.tree.map(np.asarray, quantized),
    )


@pytest.mark.full
def test_a_cpu_reads_floats_and_others_what_is_stored(tmp_path, monkeypatch) -> None:
    target = tiny_target(hidden_size=128, intermediate_size=256)
    target.save_pretrained(tmp_path)
    stored, rng = load_file(tmp_path / "model.safetensors"), np.random.default_rng(0)
    for name in [name for name in stored if ".layers." in name and name.endswith("proj.weight")]:
        stored[name] = stored[name].astype(jnp.float8_e4m3fn)
        blocks = [-(-size // 128) for size in stored[name].shape]
        stored[f"{name}_scale_inv"] = rng.uniform(0.5, 2, blocks).astype(np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = SCALES["blocks"][0]
    (tmp_path / "config.json").write_text(json.dumps(config))

    floats = Target.from_pretrained(tmp_path, dtype=np.float32)
    assert not any(map(is_quantized, jax.tree.leaves(floats.params, is_leaf=is_quantized)))
    monkeypatch.setattr(sharding, "is_on_cpu", lambda mesh: False)
    quantized = Target.from_pretrained(tmp_path, dtype=np.float32)
    forms = {
        name: value.form
        for name, value in quantized.params["layers"][1].items()
        if is_quantized(value)
    }
    # 256 inputs are two blocks. 128 are one, with a scale for all inputs. 16 are less than one.
    assert forms == dict.fromkeys(("q", "k", "v", "o", "gate", "up"), Form("fp8")) | {
        "down": Form("fp8", 128)
    }
    assert not is_quantized(quantized.params["embed"])
    prompts = np.array([[1, 2, 3, 4, 5]])
    np.testing.assert_allclose(
        quantized.forward(prompts)[0].logits,
        floats.forward(prompts)[0].logits,
        rtol=0,
        atol=2e-5 * float(jnp.abs(floats.forward(prompts)[0].logits).max()),
    )
    explicit = Target.from_pretrained(tmp_path, dtype=np.float32, weights="float")
    jax.tree.map(np.testing.assert_array_equal, explicit.params, floats.params)


FAULTS = [
    (
        lambda t: t.pop("experts.1.weight_scale_inv"),
        (
            "'experts.1.weight' is quantized, and 'experts.1.weight_scale_inv', which goes with it,"
            " is missing: download"
        ),
    ),
    (
        lambda t: t.update({"down.weight_scale_inv": np.ones((2, 2), np.float32)}),
        (
            r"'down.weight_scale_inv' is F32 of shape \(2, 2\): to go with 'down.weight' it must be"
            r" F64 .* of shape \(3, 2\)"
        ),
    ),
    (
        lambda t: t.update({"down.weight_scale_inv": np.ones(BLOCKS, np.int32)}),
        "'down.weight_scale_inv' is I32 of shape",
    ),
    (
        lambda t: t.update({"down.weight": np.ones(SHAPE, np.float32)}),
        "'down.weight_scale_inv' is no part of two experts",
    ),
]


@pytest.mark.parametrize(("edit", "message"), FAULTS)
def test_scales_that_do_not_fit_are_refused_by_name(directory, edit, message, monkeypatch) -> None:
    edited = tensors()
    edit(edited)
    save_file(edited, directory / "model.safetensors")
    monkeypatch.setattr(np, "ascontiguousarray", None)  # every check comes before the first weight
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.float32, "two experts")


def mapped_bytes(path: Path) -> int:
    """Return how many bytes of a file's maps are in the memory of this process."""
    total, of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, *values = line.split()
        if not field.endswith(":"):  # a map begins
            of_file = line.endswith(str(path))
        elif of_file and field == "Rss:":
            total += 1024 * int(values[0])
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_pages_that_come_with_a_small_tensor_are_given_back_too(tmp_path) -> None:
    file, size = tmp_path / "model.safetensors", 2**15
    names = [f"experts.{index}" for index in range(300)]
    numbers = {
        name: np.full((8, size // 8), index % 256, np.uint8) for index, name in enumerate(names)
    }
    save_file(numbers, file)
    tensors = float8.open_tensors(file, names)
    for name in np.random.default_rng(0).permutation(names):
        np.testing.assert_array_equal(tensors[name][:, :], numbers[name])
    assert mapped_bytes(file) < 2**20
