"""Loading and saving the tensors of declared parameters: here those of a small drafter."""

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

DECLARED = {
    "fc": Param((12, 4), (None, "mlp"), "fc.weight", transposed=True),
    "layers": [{"norm": Param((4,), (None,), f"layers.{i}.norm.weight", "ones")} for i in range(2)],
    "target_ids": Param((6,), (None,), "d2t", "zeros", dtype="int32"),
}
UNITS = {"mlp": 4}
WHAT = "a drafter of 2 layers"


def parameters():
    leaves, tree = jax.tree.flatten(DECLARED)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    params = jax.tree.unflatten(
        tree, [leaf.initialise(key, jnp.float32) for leaf, key in zip(leaves, keys, strict=True)]
    )
    return params | {"target_ids": jnp.arange(6)}


@pytest.fixture
def directory(tmp_path):
    checkpoint.save(tmp_path / "drafter", DECLARED, parameters(), {"config.json": {"layers": 2}})
    return tmp_path / "drafter"


def test_what_is_written_is_named_and_turned_as_published(directory) -> None:
    assert sorted(file.name for file in directory.iterdir()) == ["config.json", "model.safetensors"]
    shapes = {
        "fc.weight": (4, 12),
        "layers.0.norm.weight": (4,),
        "layers.1.norm.weight": (4,),
        "d2t": (6,),
    }
    assert CheckpointFiles(directory).shapes == shapes
    np.testing.assert_array_equal(
        load_file(directory / "model.safetensors")["fc.weight"].T, parameters()["fc"]
    )


def test_it_is_read_back_with_and_without_a_mesh(directory) -> None:
    whole = checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.float32, WHAT)
    jax.tree.map(np.testing.assert_array_equal, whole, parameters())
    split = checkpoint.load(
        CheckpointFiles(directory),
        DECLARED,
        jnp.float32,
        WHAT,
        mesh=sharding.make_mesh(2, 4),
        units=UNITS,
    )
    jax.tree.map(np.testing.assert_array_equal, split, parameters())
    assert {shard.data.shape for shard in split["fc"].addressable_shards} == {(12, 1)}
    assert {shard.data.shape for shard in split["layers"][0]["norm"].addressable_shards} == {(4,)}


def test_a_parameter_with_a_dtype_of_its_own_keeps_it(directory) -> None:
    read = checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.bfloat16, WHAT)
    assert (read["fc"].dtype, read["target_ids"].dtype) == (jnp.bfloat16, jnp.int32)
    checkpoint.save(directory, DECLARED, read, {}, jnp.float16)
    stored = load_file(directory / "model.safetensors")
    assert (stored["fc.weight"].dtype, stored["d2t"].dtype) == (np.float16, np.int32)


FAULTS = [
    (lambda t: t.pop("d2t"), r"'d2t' of a drafter of 2 layers is missing \(1 such tensors\)"),
    (lambda t: t.update({"fc.bias": np.zeros(4)}), "'fc.bias' is no part of a drafter of 2 layers"),
    (
        lambda t: t.update({"fc.weight": np.zeros((12, 4))}),
        r"'fc.weight' has shape \(12, 4\), .* it is \(4, 12\)",
    ),
    (lambda t: t.update({"fc.weight": np.zeros((4, 12), np.int32)}), "'fc.weight' is of type I32"),
    (
        lambda t: t.update({"d2t": np.zeros(6)}),
        "'d2t' is of type F64, but in a drafter of 2 layers it is one of I64",
    ),
]


@pytest.mark.parametrize(("edit", "message"), FAULTS)
def test_tensors_that_are_not_the_declared_ones_are_refused_by_name(
    directory, edit, message, monkeypatch
) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")
    monkeypatch.setattr(np, "ascontiguousarray", None)  # every check comes before the first weight
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.float32, WHAT)


def test_what_may_be_left_over_is_said_by_pattern(directory) -> None:
    tensors = load_file(directory / "model.safetensors") | {
        "a.0.inv_freq": np.zeros(2),
        "embed.weight": np.zeros((6, 4)),
    }
    save_file(tensors, directory / "model.safetensors")
    read = checkpoint.load(
        CheckpointFiles(directory),
        DECLARED,
        jnp.float32,
        WHAT,
        ignored=("*.inv_freq", "embed.weight"),
    )
    jax.tree.map(np.testing.assert_array_equal, read, parameters())
    with pytest.raises(CheckpointError, match=r"'embed\.weight' is no part"):
        checkpoint.load(
            CheckpointFiles(directory), DECLARED, jnp.float32, WHAT, ignored=("*.inv_freq",)
        )


def test_two_shards_with_one_tensor_are_refused(directory) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file({"d2t": tensors["d2t"]}, directory / "other.safetensors")
    index = '{"weight_map": {"d2t": "other.safetensors", "fc.weight": "model.safetensors"}}'
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="two shards hold 'd2t'"):
        checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.float32, WHAT)


def test_a_file_is_no_place_to_write(directory) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is a file: save to a directory"):
        checkpoint.save(directory / "config.json", DECLARED, parameters(), {})
