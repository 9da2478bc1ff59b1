"""The compressed-tensors library reads the quantized checkpoints that are saved."""

import gc
import json
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.with_torch import torch  # compressed-tensors needs it

# isort: split
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from specjax.models import checkpoint
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.families import FAMILIES
from specjax.models.fields import CheckpointError
from specjax.models.params import Param, declare
from specjax.models.quantization import is_quantized, saved, schemes, stored
from specjax.models.quantization.published import stated_forms
from specjax.models.quantization.weights import (
    BLOCK,
    Form,
    QuantizedMatrix,
    dequantize_matrix,
    quantize_matrix,
)
from specjax.models.transformer import Target
from tests.conftest import MIXTURES, blocks, tiny_config, tiny_target

PROMPTS = np.array([[1, 4, 2, 7, 7, 9, 0, 3]])
NAMES = {
    "q": "self_attn.q_proj",
    "o": "self_attn.o_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def read_by_library(directory: Path) -> LlamaForCausalLM:
    """Return the model with the weights that compressed-tensors unpacks.

    Activations are rounded as the configuration says.
    """
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(directory))
    raw = json.loads((directory / "config.json").read_text())
    quantization = QuantizationConfig(**raw["quantization_config"])
    apply_quantization_config(model, quantization, show_progress=False)
    compressor = ModelCompressor(quantization_config=quantization)
    compressor.compress_model(model)
    model.load_state_dict(load_file(directory / "model.safetensors"))
    compressor.decompress_model(model)
    return model


@pytest.mark.parametrize("weights", schemes.SCHEMES)
@pytest.mark.represents("quantized weights as transformers reads them")
def test_the_library_reads_our_weights(tmp_path, weights) -> None:
    tiny_target(hidden_size=128, intermediate_size=256, head_dim=32, scale=6.0).save_pretrained(
        tmp_path
    )
    quantized = Target.from_pretrained(tmp_path, weights=weights, dtype=np.float32)
    quantized.save_pretrained(tmp_path / weights)
    theirs = read_by_library(tmp_path / weights)
    with torch.no_grad():
        logits = theirs(torch.tensor(PROMPTS)).logits.numpy()
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    for i, layer in enumerate(quantized.params["layers"]):
        for ours, name in NAMES.items():
            assert is_quantized(layer[ours])
            np.testing.assert_allclose(
                state[f"model.layers.{i}.{name}.weight"].T,
                dequantize_matrix(layer[ours]),
                rtol=1e-6,
            )
    np.testing.assert_allclose(state["model.embed_tokens.weight"], quantized.embedding, rtol=1e-6)
    np.testing.assert_allclose(state["lm_head.weight"].T, quantized.head_weights, rtol=1e-6)
    our_logits = np.asarray(quantized.forward(PROMPTS)[0].logits)
    # With "w8a8" the library rounds activations too, in another way than ours.
    bound = (0.1 if weights == "w8a8" else 1e-3) * np.abs(logits).max()
    np.testing.assert_allclose(our_logits, logits, rtol=0, atol=bound)


def random_matrix(form: Form, outputs: int = 256, inputs: int = 256) -> QuantizedMatrix:
    """Return a matrix with numbers over the whole range of a ``form``."""
    rng, size = np.random.default_rng(0), form.group or inputs
    groups, half = inputs // size, 1 << (form.bits - 1)
    shape = (groups, outputs, size)
    is_float = form.kind == "fp8"
    if is_float:
        values = rng.normal(size=shape).astype(form.dtype)
    else:
        values = rng.integers(-half, half, shape).astype(np.int8)
    scales = rng.uniform(0.5, 2, (groups, outputs)).astype(np.float32)
    if is_float and form.group:
        scales = np.repeat(scales[:, ::BLOCK], BLOCK, axis=1)
    zeros = rng.integers(-half, half, (groups, outputs)).astype(np.int8) if form.has_zeros else None
    order = None
    if form.is_ordered:
        order = np.argsort(rng.permutation(inputs) // size, kind="stable").astype(np.int32)
    return QuantizedMatrix(values, scales, zeros, order, form.bits, form.activations)


FORMS = [
    *(
        Form("int8"),
        Form("int8", activations=8),
        Form("int8", 64),
        Form("int8", 64, activations=8),
        Form("int8", has_zeros=True),
    ),
    *(
        Form("int8", 64, is_ordered=True),
        Form("int4"),
        Form("int4", 64, has_zeros=True),
        Form("int4", 128, activations=8),
    ),
    *(Form("int4", 64, has_zeros=True, is_ordered=True), Form("fp8"), Form("fp8", 128)),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_is_read_back_bit_for_bit_and_unpacked_by_the_library(tmp_path, form) -> None:
    matrix, name = random_matrix(form), "layer.weight"
    param = Param((256, 256), (None, None), name, transposed=True, is_product=True)
    declared = {"layer": form.declare(param, matrix.values.dtype)}
    config = {"quantization_config": saved.format_config(declared)}
    params = {"layer": jax.tree.map(jnp.asarray, matrix)}
    checkpoint.save(tmp_path, declared, params, {"config.json": config})
    assert CheckpointFiles(tmp_path).forms == {name: form}
    read = checkpoint.load(CheckpointFiles(tmp_path), declared, np.float32, "a layer")["layer"]
    assert read.form == form
    for role in ("values", "scales", "zeros", "order"):
        part = getattr(matrix, role)
        if part is not None:
            read_bytes = np.asarray(getattr(read, role)).tobytes()
            assert read_bytes == np.ascontiguousarray(part).tobytes(), role

    quantization = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    raw = quantization["config_groups"]["group_0"]
    assert raw["weights"].pop("actorder", None) == ("group" if form.is_ordered else None)
    if form.is_ordered:
        return  # the library has refused these since 2026
    scheme = QuantizationScheme(**raw)
    state = {
        part.removeprefix("layer."): tensor
        for part, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    theirs = compressor.decompress(state, scheme)["weight"]
    np.testing.assert_allclose(theirs.numpy().T, dequantize_matrix(matrix), rtol=1e-6)


def test_a_tensor_of_several_parameters_is_named_and_counted_once() -> None:
    config = tiny_config(**blocks("M*"))
    declared = FAMILIES[config.model_type].store(declare(config))
    declared = schemes.declare(declared, schemes.scheme_of("int8").form_of)
    quantization = saved.format_config(declared)
    assert quantization is not None
    assert quantization["ignore"] == ["backbone.layers.0.mixer.conv1d"]
    # Three parts of one matrix are no more than two matrices.
    parts = [Param((256, 256), (None, None), "qkv.weight", is_product=True)] * 3
    apart = [
        Param((256, 256), (None, None), f"{name}.weight", is_product=True) for name in ("up", "o")
    ]
    forms = [(Form("int8"), parts), (Form("int4"), apart)]
    declared = [form.declare(param) for form, params in forms for param in params]
    quantization = saved.format_config(declared)
    assert quantization is not None
    groups = quantization["config_groups"]
    assert groups["group_0"]["targets"] == ["Linear"]
    assert groups["group_0"]["weights"]["num_bits"] == 4
    assert groups["group_1"]["targets"] == ["qkv"]
    # A group that names a module takes precedence over one of its class.
    stated = stated_forms(quantization)
    assert [stated(f"{name}.weight") for name in ("qkv", "up")] == [Form("int8"), Form("int4")]


def test_what_has_no_name_there_is_refused(tmp_path) -> None:
    form = Form("int8")
    stack = Param((2, 256, 256), ("experts", None, None), "experts.down_proj", is_product=True)
    declared = {"down": form.declare(stack)}
    params = {
        "down": jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), declared["down"])
    }
    with pytest.raises(
        CheckpointError,
        match=(
            r"experts\.down_proj is quantized, and .* load the model with weights='float' to"
            r" save it"
        ),
    ):
        checkpoint.save(tmp_path, declared, params, {})
    matrix = random_matrix(Form("fp8", 128))
    uneven = matrix.replace(
        scales=np.random.default_rng(0).uniform(size=matrix.scales.shape).astype(np.float32)
    )
    declared = {
        "layer": uneven.form.declare(
            Param((256, 256), (None, None), "layer.weight", transposed=True, is_product=True)
        )
    }
    with pytest.raises(
        CheckpointError,
        match=r"layer\.weight is in FP8 with scales that differ within a block: load",
    ):
        checkpoint.save(tmp_path, declared, {"layer": jax.tree.map(jnp.asarray, uneven)}, {})
    assert not any(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.thorough_except("int8")
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_model_becomes_quantized_within_the_memory_of_a_layer(tmp_path, weights) -> None:
    """Quantizing takes less memory of numpy than two layers in floats.

    Arrays that JAX has taken over are not counted.
    """
    config = tiny_config(num_layers=24, hidden_size=256, intermediate_size=1024)
    floats = Target.init(config, jax.random.key(0))
    floats.save_pretrained(tmp_path)
    gc.collect()
    tracemalloc.start()
    try:
        quantized = Target.from_pretrained(tmp_path, weights=weights, dtype=np.float32)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert is_quantized(quantized.params["layers"][0]["down"])
    assert peak < 2 * sum(matrix.nbytes for matrix in jax.tree.leaves(floats.params["layers"][0]))


def test_every_matrix_becomes_quantized_once(tmp_path, monkeypatch) -> None:
    """Experts are read one by one: first the values of all, then the scales."""
    tiny_target(**MIXTURES["qwen3_moe"], hidden_size=32).save_pretrained(tmp_path)
    quantized_shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        stored,
        "quantize_matrix",
        lambda floats, form: quantized_shapes.append(floats.shape) or quantize_matrix(floats, form),
    )
    quantized = Target.from_pretrained(tmp_path, weights="int4", dtype=np.float32)
    matrices = [
        value
        for layer in quantized.params["layers"]
        for value in layer.values()
        if is_quantized(value)
    ]
    count = sum(int(np.prod(matrix.values.shape[:-3])) for matrix in matrices)
    count += is_quantized(quantized.params["embed"])
    count += is_quantized(quantized.params.get("lm_head"))
    assert len(quantized_shapes) == count
