"""MXFP4 against a table in numpy and against transformers, in slices, and what is refused."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import sharding
from specjax.models import checkpoint, fingerprint
from specjax.models.checkpoint_files import INDEX, WEIGHTS, CheckpointFiles
from specjax.models.config import MoE
from specjax.models.fields import CheckpointError
from specjax.models.params import Param, Within
from specjax.models.quantization import Form, is_quantized, mxfp4, schemes
from specjax.models.quantization.weights import dequantize_matrix
from specjax.models.transformer import Target
from tests.conftest import tiny_target
from tests.models.quantization.in_memory import Numbers

EXPERTS, MLP, HIDDEN = 4, 6, 96
UP = (EXPERTS, HIDDEN, MLP)
DECLARED = {
    "gate": Param(UP, ("experts", None, None), "gate_up_proj", within=Within(2, 2 * MLP, 0, 2)),
    "up": Param(UP, (None, None, "mlp"), "gate_up_proj", within=Within(2, 2 * MLP, 1, 2)),
    "down": Param((EXPERTS, 32, HIDDEN), ("experts", None, None), "down_proj"),
    "norm": Param((3,), (None,), "norm"),
}
UNITS = {"experts": 4, "mlp": 6}
WHAT = "a layer of experts"
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def packed(
    experts: int, outputs: int, blocks: int, scales: tuple[int, int] = (100, 140)
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (experts, outputs, blocks)
    return rng.integers(0, 256, (*shape, 16), np.uint8), rng.integers(*scales, shape, np.uint8)


def reference(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the weights ``[experts, in, out]``, computed number by number."""
    weights = np.empty((*blocks.shape[:3], 32), np.float64)
    for *block, byte in np.ndindex(*blocks.shape):
        scale = 2.0 ** (int(scales[*block]) - 127)
        codes = divmod(int(blocks[*block, byte]), 16)
        for half, code in enumerate(reversed(codes)):  # the low half comes first
            weights[*block, 2 * byte + half] = VALUES[code] * scale
    with np.errstate(over="ignore"):
        return weights.reshape(*blocks.shape[:2], -1).transpose(0, 2, 1).astype(jnp.bfloat16)


def tensors() -> dict[str, np.ndarray]:
    blocks, scales = packed(EXPERTS, 2 * MLP, HIDDEN // 32)
    down, down_scales = packed(EXPERTS, HIDDEN, 1)
    return {
        "gate_up_proj_blocks": blocks,
        "gate_up_proj_scales": scales,
        "down_proj_blocks": down,
        "down_proj_scales": down_scales,
        "norm": np.ones(3, jnp.bfloat16),
    }


def expected() -> dict[str, np.ndarray]:
    stored = tensors()
    gate_up = reference(stored["gate_up_proj_blocks"], stored["gate_up_proj_scales"])
    down = reference(stored["down_proj_blocks"], stored["down_proj_scales"])
    return {
        "gate": gate_up[..., ::2],
        "up": gate_up[..., 1::2],
        "down": down,
        "norm": stored["norm"],
    }


def bits(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.itemsize}")


@pytest.fixture
def directory(tmp_path):
    save_file(tensors(), tmp_path / WEIGHTS)
    return tmp_path


def every_number() -> tuple[np.ndarray, np.ndarray]:
    """Return every byte under every scale: 256 experts with 16 blocks of 16 bytes."""
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(1, 16, 1, 16), (256, 16, 1, 16))
    return blocks, np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None, None], (256, 16, 1))


def test_every_byte_under_every_scale_is_what_the_table_says() -> None:
    blocks, scales = every_number()
    weights = mxfp4.unpack(blocks[:255], scales[:255]).transpose(0, 2, 1)
    np.testing.assert_array_equal(bits(weights), bits(reference(blocks[:255], scales[:255])))
    assert np.isinf(weights.astype(np.float32)).any()  # 2 ** 127 times 2 and more: beyond bfloat16


def test_scale_255_is_not_a_number_nor_are_its_weights() -> None:
    """A scale of 255 means NaN in the specification of MXFP4.

    In transformers only zeros become NaN under it, and other numbers become infinite.
    """
    blocks, scales = every_number()
    assert np.isnan(mxfp4.unpack(blocks[255:], scales[255:]).astype(np.float32)).all()


def test_every_weight_is_that_of_transformers() -> None:
    from tests.with_torch import torch  # skips the test without torch; transformers would fail

    # isort: split
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for blocks, scales in ([part[:255] for part in every_number()], packed(3, 40, 5, (0, 255))):
        weights = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
        theirs = weights.view(torch.int16).numpy()
        ours = mxfp4.Mxfp4Tensor(Numbers(blocks), Numbers(scales))
        assert tuple(ours.get_shape()) == theirs.shape
        np.testing.assert_array_equal(bits(ours[:, :, :]), theirs.view(np.uint16))


@pytest.mark.parametrize(
    "part",
    [
        *(
            np.s_[:, :, :],
            np.s_[1:3, 0:96, 2:7],
            np.s_[0:1, 31:33, 0:1],
            np.s_[2:4, 40:50, 1::2],
            np.s_[:, 3:90:5, 0:5:3],
        ),
        *(np.s_[3:3, :, :], np.s_[:, 32:32, :], np.s_[:, :, 5:5]),
    ],
)
def test_a_slice_is_that_of_the_whole_and_no_more_is_read(part) -> None:
    blocks, scales = packed(EXPERTS, 2 * MLP, HIDDEN // 32)
    stored = Numbers(blocks), Numbers(scales)
    result, whole = mxfp4.Mxfp4Tensor(*stored)[part], reference(blocks, scales)
    np.testing.assert_array_equal(bits(result), bits(whole[part]))
    experts, inputs, outputs = (
        range(size)[indices] for size, indices in zip(whole.shape, part, strict=True)
    )
    blocks_read = -(-inputs.stop // 32) - inputs.start // 32
    assert stored[1].read == len(experts) * len(outputs) * blocks_read
    assert stored[0].read == 16 * stored[1].read


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_checkpoint_appears_unquantized_and_is_written_so(directory, dtype) -> None:
    shapes = {
        "gate_up_proj": (EXPERTS, HIDDEN, 2 * MLP),
        "down_proj": (EXPERTS, 32, HIDDEN),
        "norm": (3,),
    }
    files = CheckpointFiles(directory)
    assert files.shapes == shapes
    assert checkpoint.stored_type(files) == checkpoint.type_of(files, "down_proj") == jnp.bfloat16
    read = checkpoint.load(files, DECLARED, dtype, WHAT)
    for name, value in expected().items():
        assert read[name].dtype == dtype
        np.testing.assert_array_equal(bits(read[name]), bits(value.astype(dtype)))
    checkpoint.save(directory / "again", DECLARED, read, {})
    again = load_file(directory / "again" / WEIGHTS)
    assert {name: tensor.shape for name, tensor in again.items()} == shapes
    np.testing.assert_array_equal(
        bits(again["gate_up_proj"][..., 1::2]), bits(expected()["up"].astype(dtype))
    )
    values = checkpoint.reader(files, DECLARED, dtype, WHAT)
    assert fingerprint.of_stored(DECLARED, values, UNITS) == fingerprint.of_params(read, UNITS)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 4)])
def test_on_a_mesh_there_is_the_same(directory, sizes) -> None:
    split = checkpoint.load(
        CheckpointFiles(directory),
        DECLARED,
        jnp.bfloat16,
        WHAT,
        mesh=sharding.make_mesh(*sizes),
        units=UNITS,
    )
    for name, value in expected().items():
        np.testing.assert_array_equal(bits(split[name]), bits(value))
    if sizes == (1, 2):
        assert split["gate"].addressable_shards[0].data.shape == (2, HIDDEN, MLP)
        assert split["up"].addressable_shards[0].data.shape == (EXPERTS, HIDDEN, MLP // 2)


def test_blocks_and_scales_may_lie_in_different_shards(directory) -> None:
    first = tensors()
    second = {name: first.pop(name) for name in list(first) if name.endswith("_scales")}
    save_file(first, directory / "a.safetensors")
    save_file(second, directory / "b.safetensors")
    (directory / WEIGHTS).unlink()
    weight_map = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    read = checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.bfloat16, WHAT)
    np.testing.assert_array_equal(bits(read["up"]), bits(expected()["up"]))


# --- read as stored -------------------------------------------------------------------------------

PRODUCTS = {name: replace(param, is_product=name != "norm") for name, param in DECLARED.items()}


def declare(directory) -> dict[str, Any]:
    forms = CheckpointFiles(directory).forms
    # The 32 inputs of down_proj are one group.
    assert forms == {"gate_up_proj": Form("int8", 32), "down_proj": Form("int8")}
    return schemes.declare(
        PRODUCTS, lambda param: forms.get(param.name) if param.is_product else None
    )


@pytest.mark.full
@pytest.mark.parametrize("sizes", [None, (1, 2), (2, 4)])
def test_kept_quantized_they_are_the_same_weights(directory, sizes) -> None:
    mesh = sizes and sharding.make_mesh(*sizes)
    declared = declare(directory)
    quantized = checkpoint.load(
        CheckpointFiles(directory), declared, jnp.bfloat16, WHAT, mesh=mesh, units=UNITS
    )
    assert (quantized["gate"].form, quantized["down"].form) == (Form("int8", 32), Form("int8"))
    up = quantized["up"].values
    assert (up.shape, up.dtype) == ((EXPERTS, HIDDEN // 32, MLP, 32), jnp.int8)
    # Numbers are twice those of the table, so that all of them are integers.
    assert set(np.unique(np.abs(up))) <= {0, 1, 2, 3, 4, 6, 8, 12}
    for name, value in expected().items():
        weights = (
            dequantize_matrix(quantized[name]) if is_quantized(quantized[name]) else quantized[name]
        )
        np.testing.assert_array_equal(np.asarray(weights, np.float32), value.astype(np.float32))
    if sizes == (1, 2):
        gate_shard, scales_shard = (
            part.addressable_shards[0].data
            for part in (quantized["gate"].values, quantized["up"].scales)
        )
        assert gate_shard.shape == (2, HIDDEN // 32, MLP, 32)
        assert scales_shard.shape == (EXPERTS, HIDDEN // 32, MLP // 2)
    values = checkpoint.reader(CheckpointFiles(directory), declared, jnp.bfloat16, WHAT)
    stored_fingerprint = fingerprint.of_stored(declared, values, UNITS)
    assert stored_fingerprint == fingerprint.of_params(quantized, UNITS, mesh)
    with pytest.raises(
        CheckpointError,
        match=r"_proj is quantized, .* load the model with weights='float' to save it",
    ):
        checkpoint.save(directory / "again", declared, quantized, {})


def test_under_every_scale_but_the_last_numbers_times_scales_are_the_weights() -> None:
    blocks, scales = every_number()
    stored = mxfp4.Mxfp4Tensor(Numbers(blocks), Numbers(scales))
    values = stored.read("values", (slice(None),) * 4)
    factors = stored.read("scales", (slice(None),) * 3)
    assert (values.dtype, factors.dtype) == (np.int8, np.float32)
    with np.errstate(over="ignore"):  # beyond bfloat16 and float32: infinite in both
        weights = (values.astype(np.float64) * factors[..., None])[:, 0].astype(jnp.bfloat16)
    expected_weights = reference(blocks[:255], scales[:255])
    np.testing.assert_array_equal(weights[:255].swapaxes(1, 2), expected_weights)
    assert np.isnan(factors[255]).all()


@pytest.mark.parametrize(
    "part", [np.s_[1:3, 0:2, 2:7], np.s_[0:1, 1:2, 1::2], np.s_[3:3, :, :], np.s_[:, :, 5:5]]
)
def test_a_part_of_the_numbers_is_that_of_the_whole_and_no_more_is_read(part) -> None:
    blocks, scales = packed(EXPERTS, 2 * MLP, HIDDEN // 32)
    stored = Numbers(blocks), Numbers(scales)
    result = mxfp4.Mxfp4Tensor(*stored).read("values", (*part, slice(3, 30)))
    whole = mxfp4.Mxfp4Tensor(Numbers(blocks), Numbers(scales)).read("values", np.s_[:, :, :, :])
    np.testing.assert_array_equal(result, whole[part][..., 3:30])
    assert stored[0].read == result[..., 0].size * 16 and not stored[1].read


@pytest.mark.full
def test_a_model_is_read_as_it_is_stored_and_as_floats(tmp_path) -> None:
    moe = MoE(
        num_experts=4,
        experts_per_token=2,
        intermediate_size=32,
        normalise=True,
        biased=True,
        limit=7.0,
    )
    sizes = {
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "intermediate_size": 32,
        "moe": moe,
        "sinks": True,
    }
    target = tiny_target(
        **sizes, qkv_bias=True, output_bias=True, sliding_window=128, windowed_layers=(0,)
    )
    target.save_pretrained(tmp_path)
    tensors_in_file, rng = load_file(tmp_path / WEIGHTS), np.random.default_rng(0)
    for name in [name for name in tensors_in_file if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors_in_file.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors_in_file[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16), np.uint8)
        tensors_in_file[f"{name}_scales"] = rng.integers(121, 125, shape, np.uint8)
    save_file(tensors_in_file, tmp_path / WEIGHTS)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(raw | {"quantization_config": {"quant_method": "mxfp4"}})
    )

    stored, floats = (
        Target.from_pretrained(tmp_path, dtype=np.float32, weights=weights)
        for weights in ("stored", "float")
    )
    forms = {
        name: value.form
        for name, value in stored.params["layers"][1].items()
        if is_quantized(value)
    }
    group = Form("int8", 32)
    assert forms == {"experts_gate": group, "experts_up": group, "experts_down": Form("int8")}
    dequantized = jax.tree.map(
        lambda leaf: dequantize_matrix(leaf) if is_quantized(leaf) else leaf,
        stored.params,
        is_leaf=is_quantized,
    )
    jax.tree.map(np.testing.assert_array_equal, dequantized, floats.params)
    prompts = np.array([[1, 4, 2, 7, 7, 9, 0, 3]])
    expected = np.asarray(floats.forward(prompts)[0].logits)
    on_mesh = Target.from_pretrained(tmp_path, dtype=np.float32, mesh=sharding.make_mesh(1, 2))
    jax.tree.map(np.testing.assert_array_equal, on_mesh.params, stored.params)
    for model in (stored, on_mesh):
        np.testing.assert_allclose(
            model.forward(prompts)[0].logits, expected, rtol=0, atol=1e-3 * np.abs(expected).max()
        )
    floats.save_pretrained(tmp_path / "floats")
    requantized = Target.from_pretrained(tmp_path / "floats", dtype=np.float32, weights="int4")
    # 64 inputs are one group.
    assert requantized.params["layers"][0]["experts_up"].form == Form("int4")


BLOCKS, SCALES = "gate_up_proj_blocks", "gate_up_proj_scales"
FAULTS = [
    (
        lambda t: t.pop(SCALES),
        f"'{BLOCKS}' is in MXFP4, and its scales, '{SCALES}', are missing: download",
    ),
    (lambda t: t.pop(BLOCKS), "'gate_up_proj' of a layer of experts is missing"),
    (
        lambda t: t.update({SCALES: t[SCALES][:, :, :2].copy()}),
        (
            rf"'{SCALES}' is U8 of shape \(4, 12, 2\): it must be U8 of shape \(4, 12, 3\), one for"
            rf" each block of '{BLOCKS}'"
        ),
    ),
    (lambda t: t.update({SCALES: t[SCALES].astype(np.float32)}), f"'{SCALES}' is F32 of shape"),
    (
        lambda t: t.update({BLOCKS: t[BLOCKS][..., :8].copy()}),
        rf"'{BLOCKS}' has shape \(4, 12, 3, 8\): each block of MXFP4 must have 16 bytes: use",
    ),
    (
        lambda t: t.update({BLOCKS: t[BLOCKS].reshape(4, 12, 48)}),
        "'gate_up_proj' of a layer of experts is missing",
    ),
    (
        lambda t: t.update({BLOCKS: t[BLOCKS][:, :10].copy(), SCALES: t[SCALES][:, :10].copy()}),
        r"'gate_up_proj' has shape \(4, 96, 10\), but in a layer of experts it is \(4, 96, 12\)",
    ),
    (
        lambda t: t.update(gate_up_proj=np.zeros((4, 96, 12), np.float32)),
        f"'{BLOCKS}' is no part of a layer of experts",
    ),
    (
        lambda t: t.update(up_blocks=t[BLOCKS], up_scales=t[SCALES]),
        "'up' is no part of a layer of experts",
    ),
    (lambda t: t.update(up_scales=t[SCALES]), "'up_scales' is no part of a layer of experts"),
]


@pytest.mark.parametrize(("edit", "message"), FAULTS)
def test_tensors_that_do_not_fit_are_refused_by_name(directory, edit, message, monkeypatch) -> None:
    edited = tensors()
    edit(edited)
    save_file(edited, directory / WEIGHTS)
    monkeypatch.setattr(mxfp4, "unpack", None)  # every check comes before the first weight
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.float32, WHAT)


def test_a_truncated_file_is_refused(directory) -> None:
    file = directory / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is truncated or damaged"):
        checkpoint.load(CheckpointFiles(directory), DECLARED, jnp.float32, WHAT)
