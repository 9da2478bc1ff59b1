"""FP8 weights in blocks: against numpy, whole and in slices, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax import sharding
from specjax.models import checkpoint, float8
from specjax.models.fields import CheckpointError
from specjax.models.params import Param

SHAPE, BLOCKS = (300, 132), (3, 2)  # neither is a multiple of 128
DECLARED = {
    "down": Param(SHAPE[::-1], ("mlp", None), "down.weight", transposed=True),
    "experts": Param((2, *SHAPE[::-1]), ("experts", None, None), "experts.{}.weight", transposed=True),
}
NAMES = ("down.weight", "experts.0.weight", "experts.1.weight")


def tensors() -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(0), {}
    for name in NAMES:
        found[name] = rng.normal(size=SHAPE).astype(jnp.float8_e4m3fn)
        found[float8.scale_name(name)] = rng.uniform(0.5, 2, BLOCKS).astype(np.float32)
    return found


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


def test_blocks_are_dequantised_as_numpy_does_it(directory) -> None:
    found = tensors()
    expected = [reference(found[name], found[float8.scale_name(name)]).T for name in NAMES]
    read = checkpoint.load(directory, DECLARED, jnp.float32, "two experts")
    np.testing.assert_array_equal(read["down"], expected[0])
    np.testing.assert_array_equal(read["experts"], np.stack(expected[1:]))


@pytest.mark.parametrize(
    "part", [np.s_[0:300, 0:132], np.s_[127:129, 130:132], np.s_[140:150, 3:4], np.s_[:, 128:], np.s_[5:5, :]]
)
def test_a_slice_is_that_of_the_whole(part) -> None:
    stored, scales = tensors()["down.weight"], tensors()["down.weight_scale_inv"]
    np.testing.assert_array_equal(float8.dequantise(float8.Float8Tensor(stored), scales, part), reference(stored, scales)[part])


def test_a_device_reads_its_own_part(directory, monkeypatch) -> None:
    """Of experts on four devices, two each read one; of a matrix each reads a quarter of the columns."""
    parts = []
    dequantise = float8.dequantise

    def record(stored, scales, part):
        parts.append(tuple(len(range(size)[piece]) for size, piece in zip(SHAPE, part, strict=True)))
        return dequantise(stored, scales, part)

    whole = checkpoint.load(directory, DECLARED, jnp.float32, "two experts")
    monkeypatch.setattr(float8, "dequantise", record)
    mesh = sharding.make_mesh(1, 2)
    split = checkpoint.load(directory, DECLARED, jnp.float32, "two experts", mesh=mesh, units={"mlp": 132, "experts": 2})
    jax.tree.map(np.testing.assert_array_equal, split, whole)
    assert sorted(parts) == [(300, 66), (300, 66), (300, 132), (300, 132)]


FAULTS = [
    (
        lambda found: found.pop("experts.1.weight_scale_inv"),
        "'experts.1.weight' is of type F8_E4M3, and its scales, 'experts.1.weight_scale_inv', are missing: download",
    ),
    (
        lambda found: found.update({"down.weight_scale_inv": np.ones((2, 2), np.float32)}),
        r"'down.weight_scale_inv' is F32 of shape \(2, 2\): it must hold numbers of shape \(3, 2\)",
    ),
    (
        lambda found: found.update({"down.weight_scale_inv": np.ones(BLOCKS, np.int32)}),
        "'down.weight_scale_inv' is I32 of shape",
    ),
    (
        lambda found: found.update({"down.weight": np.ones(SHAPE, np.float32)}),
        "'down.weight_scale_inv' is no part of two experts",
    ),
]


@pytest.mark.parametrize(("edit", "message"), FAULTS)
def test_scales_that_do_not_fit_are_refused_by_name(directory, edit, message, monkeypatch) -> None:
    found = tensors()
    edit(found)
    save_file(found, directory / "model.safetensors")
    monkeypatch.setattr(np, "ascontiguousarray", None)  # every check comes before the first weight
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(directory, DECLARED, jnp.float32, "two experts")
