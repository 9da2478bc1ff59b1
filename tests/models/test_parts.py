"""Parts of a target: they compute what the whole computes, and refuse what they lack."""

import json
from dataclasses import replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.drafters import DraftModel, Eagle3, Medusa, MixtureOfAttentions
from specjax.errors import InputError
from specjax.models import fingerprint
from specjax.models.checkpoint_files import INDEX, WEIGHTS, CheckpointFiles
from specjax.models.fields import CheckpointError
from specjax.models.transformer import Target
from specjax.serving import Engine
from tests.conftest import LAYERED, MIXTURES, tiny_target

FAMILIES = {
    "llama": {},
    "tied": {"model_type": "qwen2", "qkv_bias": True, "tie_embeddings": True},
    **MIXTURES,
}


def last_logits(target: Target, layers: tuple[int, int]) -> jax.Array:
    """Return the logits of random states that enter the last layers."""
    x = jax.random.normal(jax.random.key(3), (2, 5, target.config.hidden_size), target.dtype)
    return target.head(target.norm(target.run(x, layers=layers)[0]))


@pytest.mark.full
@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_a_part_computes_what_the_whole_computes_and_is_read_back_to_the_bit(
    changes, tmp_path
) -> None:
    target = tiny_target(num_layers=3, **changes)
    layers = (2, 3)
    part = target.part(layers=layers)
    np.testing.assert_array_equal(last_logits(part, layers), last_logits(target, layers))
    part.save_pretrained(tmp_path / "part")
    read = Target.from_pretrained(tmp_path / "part", dtype=np.float32)
    assert (read.config, read.held, read.part_of) == (target.config, layers, target.fingerprint())
    is_equal = jax.tree.map(np.array_equal, read.params, part.params)
    assert jax.tree.structure(read) == jax.tree.structure(part) and jax.tree.all(is_equal)


@pytest.mark.full
def test_layers_of_several_kinds_keep_their_numbers() -> None:
    for changes in LAYERED.values():
        target = tiny_target(**changes)
        layers = (target.config.num_layers - 1, target.config.num_layers)
        part = target.part(layers=layers)
        if target.config.entries_of(layers[0]) == layers[0]:
            np.testing.assert_array_equal(last_logits(part, layers), last_logits(target, layers))
            continue
        with pytest.raises(InputError, match="reads the entries of layer 1: begin with that one"):
            last_logits(part, layers)


def shard(directory) -> None:
    """Cut a checkpoint into two files and an index."""
    tensors = load_file(directory / WEIGHTS)
    files = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors"
        for i, name in enumerate(sorted(tensors))
    }
    for file in set(files.values()):
        save_file(
            {name: tensors[name] for name in tensors if files[name] == file}, directory / file
        )
    (directory / INDEX).write_text(json.dumps({"weight_map": files}))
    (directory / WEIGHTS).unlink()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("changes", [{}, MIXTURES["deepseek_v3"]], ids=["llama", "deepseek_v3"])
def test_a_part_of_a_whole_checkpoint_is_what_is_cut_in_memory(
    changes, sharded, tmp_path, monkeypatch
) -> None:
    """A loaded part equals one that is cut in memory, and its fingerprint of the whole too.

    For the fingerprint a few rows of the other layers are read, and no more.
    """
    target = tiny_target(num_layers=3, **changes)
    target.save_pretrained(tmp_path)
    if sharded:
        shard(tmp_path)
    part, read = target.part(layers=(2, 3)), count_reads(monkeypatch)
    loaded = Target.from_pretrained(tmp_path, dtype=np.float32, layers=(2, 3))
    assert jax.tree.structure(loaded) == jax.tree.structure(part)
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded.params, part.params))
    matrices = {
        name: share
        for name, share in read.items()
        if ".layers." in name and name.endswith("_proj.weight")
    }
    assert len(matrices) > 20
    for name, (numbers, size) in matrices.items():
        assert (
            numbers >= size if ".layers.2." in name else numbers <= size * fingerprint.ROWS // 6
        ), name


def count_reads(monkeypatch) -> dict[str, tuple[int, int]]:
    """Count the numbers that are read of each tensor from now on.

    Returns by the name of a tensor how many of its numbers were read, and how many it has.
    """
    counted: dict[str, tuple[int, int]] = {}
    open_tensors = CheckpointFiles.tensors.func

    class Counted:
        def __init__(self, name, tensor) -> None:
            self.name, self.tensor = name, tensor
            self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

        def __getitem__(self, part):
            numbers, size = counted.get(self.name, (0, int(np.prod(self.get_shape()))))
            counted[self.name] = (numbers + self.tensor[part].size, size)
            return self.tensor[part]

    counting = cached_property(
        lambda files: {name: Counted(name, tensor) for name, tensor in open_tensors(files).items()}
    )
    counting.__set_name__(CheckpointFiles, "tensors")
    monkeypatch.setattr(CheckpointFiles, "tensors", counting)
    return counted


def test_a_part_is_as_large_as_what_it_holds(tmp_path) -> None:
    target = tiny_target(num_layers=4)
    for name, layers in (("whole", None), ("last", (3, 4)), ("none", (4, 4))):
        (target if layers is None else target.part(layers)).save_pretrained(tmp_path / name)
    tensors = {name: load_file(tmp_path / name / WEIGHTS) for name in ("whole", "last", "none")}
    ends = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert tensors["none"].keys() == ends
    assert tensors["last"].keys() == ends | {
        name for name in tensors["whole"] if ".layers.3." in name
    }
    header = 4000  # the most bytes of a header
    for name, part_tensors in tensors.items():
        numbers = sum(tensor.nbytes for tensor in part_tensors.values())
        assert numbers < CheckpointFiles(tmp_path / name).weight_bytes < numbers + header


def test_a_part_of_a_part_is_of_the_same_whole(tmp_path) -> None:
    target = tiny_target(num_layers=3)
    part = target.part(layers=(1, 3))
    part.save_pretrained(tmp_path)
    again = Target.from_pretrained(tmp_path, dtype=np.float32, layers=(2, 3))
    assert (again.held, again.part_of) == ((2, 3), target.fingerprint())
    assert part.part(layers=(1, 1)).held == part.part(layers=(3, 3)).held == (3, 3)
    with pytest.raises(
        InputError,
        match=(
            r"layers=\(0, 2\): this is a part .* and layers 1 to 2 of 3\): cut it out of the whole"
        ),
    ):
        part.part(layers=(0, 2))
    for wrong in ((-1, 2), (2, 1), (0, 4)):
        with pytest.raises(InputError, match="both from 0 to num_layers=3"):
            target.part(layers=wrong)


# --- refusals -------------------------------------------------------------------------------------


def test_a_part_is_refused_where_the_whole_is_needed(tmp_path, target) -> None:
    last = target.config.num_layers
    part = target.part(layers=(last - 1, last))
    refusals = (
        lambda: specjax.generate(part, None, [[1, 2]]),
        lambda: next(specjax.stream(part, None, [[1, 2]])),
        lambda: Engine(part),
        lambda: specjax.generate(target, DraftModel(part), [[1, 2]]),
    )
    for use in refusals:
        with pytest.raises(
            InputError,
            match=(
                r"target: this is a part of a target .*: give the whole target that it was cut from"
            ),
        ):
            use()
    with pytest.raises(
        InputError, match=r"layers=\(0, \d\): this is a part of a target .*: give the whole target"
    ):
        jax.eval_shape(lambda part: part.read(jnp.zeros((1, 2), jnp.int32)), part)
    part.save_pretrained(tmp_path)
    for load in (
        lambda: specjax.load(tmp_path),
        lambda: specjax.load(tmp_path, "none", tokenizer="embedded"),
    ):
        with pytest.raises(InputError, match=f"{tmp_path}: this is a part of a target"):
            load()


@pytest.mark.parametrize(
    "fields",
    [
        {"specjax_layers": [1, 2, 3]},
        {"specjax_layers": [1, 2.0]},
        {"specjax_layers": [1, 10**30]},
        {"specjax_layers": [-1, 3]},
        {"specjax_layers": [1, 1]},
        {"specjax_layers": [0, 2]},
        {"specjax_part_of": "../../etc"},
        {"specjax_part_of": ""},
        {"specjax_layers": None},
    ],
    ids=str,
)
def test_a_damaged_part_is_refused(fields, tmp_path) -> None:
    tiny_target(num_layers=3).part(layers=(2, 3)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(
        CheckpointError, match=f"{tmp_path}.*(specjax_layers|specjax_part_of|is missing)"
    ):
        Target.from_pretrained(tmp_path)


# --- fingerprints ---------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.thorough_except("llama", "tied")
@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_a_fingerprint_is_of_the_checkpoint_and_not_of_how_it_was_loaded(changes, tmp_path) -> None:
    tiny_target(num_layers=2, **changes).save_pretrained(tmp_path, dtype=np.float32)
    loads = [Target.from_pretrained(tmp_path, dtype=dtype) for dtype in (np.float32, jnp.bfloat16)]
    loads += [
        Target.from_pretrained(tmp_path, dtype=dtype, layers=(1, 2))
        for dtype in (np.float32, jnp.bfloat16)
    ]
    loads += [
        loads[0].part(layers=(2, 2)),
        Target.from_pretrained(tmp_path, dtype=np.float32, mesh=specjax.make_mesh(2, 2)),
    ]
    assert len({load.fingerprint() for load in loads}) == 1
    assert len(loads[0].fingerprint()) == 32


def test_a_fingerprint_tells_models_apart() -> None:
    target = tiny_target(num_layers=2)
    layers = target.params["layers"]
    middle = layers[0]["q"].shape[1] // 2
    changed = {
        "a row": [{**layers[0], "q": layers[0]["q"].at[:, middle].multiply(1.01)}, layers[1]],
        "a norm": [layers[0], {**layers[1], "input_norm": layers[1]["input_norm"].at[0].add(0.01)}],
        "their order": [layers[1], layers[0]],
    }
    targets = [
        target,
        *(replace(target, params={**target.params, "layers": new}) for new in changed.values()),
        tiny_target(num_layers=2, norm_eps=2e-5),
    ]
    assert len({target.fingerprint() for target in targets}) == len(targets)


def test_drafters_have_fingerprints_too(target, tmp_path) -> None:
    key = jax.random.key(1)
    drafters = [
        Eagle3.init(target, key, ids=np.arange(1, 9), taps=(0, 1)),
        Medusa.init(target, key),
        MixtureOfAttentions.init(target, key, tli=1),
    ]
    prints = []
    for i, drafter in enumerate(drafters):
        prints.append(fingerprint.of_params(drafter.params, drafter.config))
        drafter.save_pretrained(tmp_path / str(i))
        for dtype in (np.float32, jnp.bfloat16):
            read = type(drafter).from_pretrained(tmp_path / str(i), dtype=dtype)
            assert fingerprint.of_params(read.params, read.config) == prints[-1]
    another_drafter = MixtureOfAttentions.init(target, jax.random.key(2), tli=1)
    assert (
        len({*prints, fingerprint.of_params(another_drafter.params, another_drafter.config)}) == 4
    )
