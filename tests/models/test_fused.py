"""Parameters that are parts of tensors: against numpy's slices, saved, loaded and on a mesh."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import sharding
from specjax.models import checkpoint, checkpoint_files, fingerprint
from specjax.models.checkpoint_files import TORCH_WEIGHTS, WEIGHTS, CheckpointFiles
from specjax.models.fields import CheckpointError
from specjax.models.params import Param, Within

WHAT = "a fused layer"
UNITS = {"heads": 4, "kv_heads": 2, "mlp": 4, "experts": 4}
HIDDEN, MLP, EXPERTS = 6, 4, 4
SHAPES = {
    "qkv.weight": (8 + 4 + 4, HIDDEN),
    "qkv.bias": (8 + 4 + 4,),
    "halves": (EXPERTS, 2 * MLP, HIDDEN),
    "interleaved": (EXPERTS, HIDDEN, 2 * MLP),
    "interleaved_bias": (EXPERTS, 2 * MLP),
    "down": (EXPERTS, HIDDEN, MLP),
    **{f"one.{i}.weight": (2 * MLP, HIDDEN) for i in range(EXPERTS)},
}


def fused(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    name: str,
    *within: int,
    transposed: bool = False,
) -> Param:
    return Param(shape, axes, name, transposed=transposed, within=Within(*within))


UP, BIAS = (EXPERTS, HIDDEN, MLP), (EXPERTS, MLP)
BY_EXPERT, BY_UNIT = ("experts", None, None), (None, None, "mlp")
DECLARED = {
    "q": fused((HIDDEN, 8), (None, "heads"), "qkv.weight", 0, 16, transposed=True),
    "k": fused((HIDDEN, 4), (None, "kv_heads"), "qkv.weight", 0, 16, 8, transposed=True),
    "v": fused((HIDDEN, 4), (None, "kv_heads"), "qkv.weight", 0, 16, 12, transposed=True),
    "q_bias": fused((8,), ("heads",), "qkv.bias", 0, 16),
    "kv_bias": fused((8,), (None,), "qkv.bias", 0, 16, 8),
    "first": fused(UP, BY_UNIT, "halves", 1, 8, transposed=True),
    "second": fused(UP, BY_EXPERT, "halves", 1, 8, 4, transposed=True),
    "even": fused(UP, BY_EXPERT, "interleaved", 2, 8, 0, 2),
    "odd": fused(UP, BY_UNIT, "interleaved", 2, 8, 1, 2),
    "even_bias": fused(BIAS, ("experts", None), "interleaved_bias", 1, 8, 0, 2),
    "odd_bias": fused(BIAS, (None, "mlp"), "interleaved_bias", 1, 8, 1, 2),
    "down": Param((EXPERTS, MLP, HIDDEN), ("experts", None, None), "down", transposed=True),
    "stacked_first": fused(UP, BY_EXPERT, "one.{}.weight", 0, 8, transposed=True),
    "stacked_second": fused(UP, BY_UNIT, "one.{}.weight", 0, 8, 4, transposed=True),
}


def reference(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    matrices = [stored[f"one.{i}.weight"].T for i in range(EXPERTS)]
    return {
        "q": stored["qkv.weight"][:8].T,
        "k": stored["qkv.weight"][8:12].T,
        "v": stored["qkv.weight"][12:].T,
        "q_bias": stored["qkv.bias"][:8],
        "kv_bias": stored["qkv.bias"][8:],
        "first": stored["halves"][:, :4].transpose(0, 2, 1),
        "second": stored["halves"][:, 4:].transpose(0, 2, 1),
        "even": stored["interleaved"][..., ::2],
        "odd": stored["interleaved"][..., 1::2],
        "even_bias": stored["interleaved_bias"][:, ::2],
        "odd_bias": stored["interleaved_bias"][:, 1::2],
        "down": stored["down"].transpose(0, 2, 1),
        "stacked_first": np.stack([matrix[:, :4] for matrix in matrices]),
        "stacked_second": np.stack([matrix[:, 4:] for matrix in matrices]),
    }


def tensors(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


@pytest.fixture
def directory(tmp_path):
    save_file(tensors(), tmp_path / WEIGHTS)
    return tmp_path


def equal_bits(result: Any, expected: Any) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert (np.asarray(result[name]).dtype, result[name].shape) == (
            value.dtype,
            value.shape,
        ), name
        assert np.asarray(result[name]).tobytes() == np.ascontiguousarray(value).tobytes(), name


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_parts_are_those_of_numpy_and_make_the_same_tensors_again(tmp_path, dtype) -> None:
    save_file(tensors(dtype), tmp_path / WEIGHTS)
    assert (
        checkpoint.stored_type(CheckpointFiles(tmp_path))
        == checkpoint.type_of(CheckpointFiles(tmp_path), "halves")
        == dtype
    )
    assert CheckpointFiles(tmp_path).shapes == SHAPES
    assert {
        name: param.stored_shape for param in DECLARED.values() for name in param.stored_names
    } == SHAPES
    read = checkpoint.load(CheckpointFiles(tmp_path), DECLARED, dtype, WHAT)
    equal_bits(read, reference(tensors(dtype)))
    checkpoint.save(tmp_path / "again", DECLARED, read, {})
    equal_bits(load_file(tmp_path / "again" / WEIGHTS), tensors(dtype))


def test_parts_are_read_from_a_file_of_pytorch_too(tmp_path) -> None:
    from tests.with_torch import torch

    torch.save(
        {name: torch.tensor(tensor) for name, tensor in tensors().items()}, tmp_path / TORCH_WEIGHTS
    )
    equal_bits(
        checkpoint.load(CheckpointFiles(tmp_path), DECLARED, jnp.float32, WHAT),
        reference(tensors()),
    )


@pytest.mark.parametrize("sizes", [(1, 2), (2, 4), (1, 8)])
def test_on_a_mesh_there_is_the_same(directory, sizes) -> None:
    whole = checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.float32, WHAT)
    split = checkpoint.load(
        CheckpointFiles(directory),
        DECLARED,
        jnp.float32,
        WHAT,
        mesh=sharding.make_mesh(*sizes),
        units=UNITS,
    )
    equal_bits(split, {name: np.asarray(value) for name, value in whole.items()})
    if sizes[1] == 2:
        shards = {name: value.addressable_shards[0].data.shape for name, value in split.items()}
        assert shards["q"] == (HIDDEN, 4)
        assert (shards["even"], shards["odd"]) == ((2, HIDDEN, MLP), (EXPERTS, HIDDEN, 2))
    checkpoint.save(directory / "again", DECLARED, split, {})
    equal_bits(load_file(directory / "again" / WEIGHTS), tensors())


@pytest.mark.parametrize("name", DECLARED)
def test_any_slice_of_a_part_is_that_slice(directory, name) -> None:
    expected, rng = reference(tensors())[name], np.random.default_rng(1)
    values = checkpoint.reader(CheckpointFiles(directory), DECLARED, jnp.float32, WHAT)
    for _ in range(20):
        ends = [sorted(rng.integers(0, size + 1, 2)) for size in expected.shape]
        part = tuple(
            slice(int(start), int(stop)) if stop > start else slice(None) for start, stop in ends
        )
        np.testing.assert_array_equal(values(DECLARED[name], part), expected[part])


def test_no_more_is_read_than_is_asked_for(directory, monkeypatch) -> None:
    """Reads are counted where the file is opened.

    For interleaved values all those between the first and the last are read.
    """
    reads: list[tuple[str, int]] = []
    open_file = checkpoint_files.safe_open

    class Slice:
        def __init__(self, name, stored) -> None:
            self.name, self.stored = name, stored
            self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

        def __getitem__(self, part):
            reads.append((self.name, self.stored[part].size))
            return self.stored[part]

    class File:
        def __init__(self, *arguments, **named) -> None:
            self.file = open_file(*arguments, **named)
            self.keys, self.__exit__ = self.file.keys, self.file.__exit__

        def get_slice(self, name):
            return Slice(name, self.file.get_slice(name))

        def __exit__(self, *error):
            return self.file.__exit__(*error)

    monkeypatch.setattr(checkpoint_files, "safe_open", File)
    values = checkpoint.reader(CheckpointFiles(directory), DECLARED, jnp.float32, WHAT)
    for name, part, numbers in [
        ("k", np.s_[:, 1:3], [("qkv.weight", 2 * HIDDEN)]),
        ("kv_bias", (slice(2, 3),), [("qkv.bias", 1)]),
        ("second", np.s_[1:3, :, 3:4], [("halves", 2 * HIDDEN)]),
        ("odd", np.s_[1:2, 0:3, 1:3], [("interleaved", 3 * 3)]),
        (
            "stacked_second",
            np.s_[1:3, 2:4, :],
            [("one.1.weight", 2 * MLP), ("one.2.weight", 2 * MLP)],
        ),
    ]:
        reads.clear()
        values(DECLARED[name], part)
        assert reads == numbers
    reads.clear()
    mesh = sharding.make_mesh(1, 2)
    checkpoint.load(
        CheckpointFiles(directory),
        {"q": DECLARED["q"]},
        jnp.float32,
        WHAT,
        ignored=("*",),
        mesh=mesh,
        units=UNITS,
    )
    assert reads == [("qkv.weight", 4 * HIDDEN)] * 2


def test_the_fingerprint_of_what_is_stored_is_that_of_what_is_loaded(directory) -> None:
    values = checkpoint.reader(CheckpointFiles(directory), DECLARED, jnp.float32, WHAT)
    stored_fingerprint = fingerprint.of_stored(DECLARED, values, Within(0, 1))
    params = checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.bfloat16, WHAT)
    assert stored_fingerprint == fingerprint.of_params(params, Within(0, 1))
    changed = params | {"odd": -params["odd"]}
    assert stored_fingerprint != fingerprint.of_params(changed, Within(0, 1))


FAULTS = [
    (lambda t: t.pop("qkv.weight"), r"'qkv.weight' of a fused layer is missing \(1 such tensors\)"),
    (lambda t: t.pop("one.2.weight"), "'one.2.weight' of a fused layer is missing"),
    (
        lambda t: t.update({"qkv.weight": t["qkv.weight"][:12]}),
        r"'qkv.weight' has shape \(12, 6\), but in a fused layer it is \(16, 6\)",
    ),
    (
        lambda t: t.update({"interleaved": np.swapaxes(t["interleaved"], 1, 2).copy()}),
        r"'interleaved' has shape \(4, 8, 6\), but in a fused layer it is \(4, 6, 8\)",
    ),
    (lambda t: t.update({"halves": t["halves"].astype(np.int8)}), "'halves' is of type I8"),
    (
        lambda t: t.update({"halves": t["halves"].astype(jnp.float8_e4m3fn)}),
        "'halves' is of type F8_E4M3, .*: use the unquantized checkpoint",
    ),
    (
        lambda t: t.update({"q.weight": np.zeros((8, 6), np.float32)}),
        "'q.weight' is no part of a fused layer",
    ),
]


@pytest.mark.parametrize(("edit", "message"), FAULTS)
def test_tensors_that_are_not_the_declared_ones_are_refused_by_name(
    directory, edit, message, monkeypatch
) -> None:
    edited = tensors()
    edit(edited)
    save_file(edited, directory / WEIGHTS)
    monkeypatch.setattr(np, "ascontiguousarray", None)  # every check comes before the first weight
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.float32, WHAT)


def test_parts_of_one_tensor_that_disagree_about_its_shape_are_refused(directory) -> None:
    declared = DECLARED | {
        "k": fused((HIDDEN, 4), (None, "kv_heads"), "qkv.weight", 0, 20, 8, transposed=True)
    }
    with pytest.raises(
        CheckpointError,
        match=r"'qkv.weight' has shape \(16, 6\), but in a fused layer it is \(20, 6\)",
    ):
        checkpoint.load(CheckpointFiles(directory), declared, jnp.float32, WHAT)


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(directory, share) -> None:
    file = directory / WEIGHTS
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match="is truncated or damaged"):
        checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.float32, WHAT)


def one(name: str = "a", *within: int) -> Param:
    return Param((2, 3), (None, None), name, within=Within(*within) if within else None)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            [one("a", 0, 5), one("a", 0, 5, 2)],
            r"indices that belong to no parameter, or to several: \[4\]",
        ),
        (
            [one("a", 0, 4), one("a", 0, 4, 1)],
            r"indices that belong to no parameter, or to several: \[1 3\]",
        ),
        ([one("a", 0, 4), one("a", 0, 5, 2)], "declared in several ways"),
        ([one("a", 1, 6), one("a", 0, 4, 2)], "declared in several ways"),
        ([one("a", 0, 2), one("a")], "declared both as a whole and in parts"),
        ([one("a"), one("a", 0, 2)], "declared in several ways"),
    ],
)
def test_declarations_that_do_not_make_up_a_tensor_are_a_mistake_of_ours(
    tmp_path, declared, message
) -> None:
    with pytest.raises(AssertionError, match=message):
        checkpoint.save(tmp_path / "new", declared, [np.ones((2, 3), np.float32)] * 2, {})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "within", [(2, 9), (0, 1), (0, 3, 2), (0, 2, 0, 2), (0, 5, -1), (0, 5, 0, 0), (-1, 9)]
)
def test_a_part_that_does_not_fit_is_a_mistake_of_ours(within) -> None:
    with pytest.raises(AssertionError):
        one("a", *within)


def test_rows_of_a_matrix_in_fp8_are_dequantized_with_their_own_scales(tmp_path) -> None:
    rng, shape = np.random.default_rng(2), (300, 130)
    stored = rng.normal(size=shape).astype(jnp.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, (3, 2)).astype(np.float32)
    save_file({"qk.weight": stored, "qk.weight_scale_inv": scales}, tmp_path / WEIGHTS)
    expected = stored.astype(np.float32) * np.repeat(np.repeat(scales, 128, 0), 128, 1)[:300, :130]
    halves = {
        "q": fused((130, 170), (None, None), "qk.weight", 0, 300, transposed=True),
        "k": fused((130, 130), (None, None), "qk.weight", 0, 300, 170, transposed=True),
    }
    equal_bits(
        checkpoint.load(CheckpointFiles(tmp_path), halves, jnp.float32, WHAT),
        {"q": expected[:170].T, "k": expected[170:].T},
    )
    every_second = {
        "q": fused((130, 150), (None, "mlp"), "qk.weight", 0, 300, 0, 2, transposed=True),
        "k": fused((130, 150), (None, None), "qk.weight", 0, 300, 1, 2, transposed=True),
    }
    read = checkpoint.load(
        CheckpointFiles(tmp_path),
        every_second,
        jnp.float32,
        WHAT,
        mesh=sharding.make_mesh(1, 2),
        units={"mlp": 150},
    )
    equal_bits(read, {"q": expected[::2].T, "k": expected[1::2].T})
