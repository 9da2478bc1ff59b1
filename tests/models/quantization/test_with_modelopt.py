"""Checkpoints that NVIDIA's ModelOpt wrote, and the weights and logits that it means by them.

`with_modelopt` writes them, in an environment with ModelOpt. The repository has a few small ones;
the variable SPECJAX_MODELOPT names a folder with others.
"""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from specjax import sharding
from specjax.models.transformer import Target
from tests.models.quantization import modelopt, quantized
from tests.models.quantization.quantized import as_floats, bits

RECORDED = Path(__file__).parent / "of_modelopt"
FOLDER = Path(os.environ.get("SPECJAX_MODELOPT", RECORDED))
CHECKPOINTS = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
assert CHECKPOINTS, f"{FOLDER} has no checkpoints of ModelOpt"


def read(directory: Path, **options) -> Target:
    with pytest.warns(UserWarning, match="activations are not quantized, and stored scales"):
        return quantized.read(directory, **options)


def assert_same_bits(params, expected) -> None:
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_array_equal(bits(ours), bits(theirs)),
        params,
        expected,
    )


def write_floats(name: str, directory: Path) -> None:
    """Write a checkpoint with ModelOpt's weights in float32."""
    recorded = load_file(FOLDER / f"{name}.safetensors")
    tensors = modelopt.load(FOLDER / name / "model.safetensors")
    floats = {part: tensors[part] for part in tensors if not part.endswith(("_scale", "_scale_2"))}
    matrices = recorded.keys() - {"prompts", "logits"}
    assert matrices == {part for part in floats if floats[part].dtype.itemsize == 1}
    floats |= {part: recorded[part] for part in matrices}
    save_file(floats, directory / "model.safetensors")
    raw = json.loads((FOLDER / name / "config.json").read_text())
    del raw["quantization_config"]
    (directory / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_have_the_bits_that_modelopt_dequantizes(name, tmp_path, monkeypatch) -> None:
    write_floats(name, tmp_path)
    expected = quantized.read(tmp_path).params
    assert_same_bits(read(FOLDER / name, weights="float").params, expected)
    assert_same_bits(as_floats(read(FOLDER / name)), expected)
    monkeypatch.setattr(sharding, "is_on_cpu", lambda mesh: False)  # FP8 stays FP8
    assert_same_bits(as_floats(read(FOLDER / name)), expected)


@pytest.mark.full
@pytest.mark.parametrize(("weights", "error"), [("float", 1e-5), ("stored", 1e-3)])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_of_a_torch_model_with_these_weights(name, weights, error) -> None:
    """Products with weights as they are stored round activations to about 15 bits."""
    recorded = load_file(FOLDER / f"{name}.safetensors")
    target = read(FOLDER / name, weights=weights)
    logits = np.asarray(target.forward(recorded["prompts"])[0].logits)
    difference = np.abs(logits - recorded["logits"]).max() / np.abs(recorded["logits"]).max()
    print(f"{name}, {weights}: {difference:.1e} of the largest logit")
    assert difference < error


def test_recorded_files_are_modelopts_and_small() -> None:
    names = sorted(path.stem for path in RECORDED.glob("*.safetensors"))
    assert names == ["llama-fp8", "llama-nvfp4", "qwen3_moe-nvfp4"]
    for name in names:
        with safe_open(RECORDED / f"{name}.safetensors", "numpy") as file:
            versions = file.metadata()
        stated = json.loads((RECORDED / name / "hf_quant_config.json").read_text())
        assert stated["producer"] == {"name": "modelopt", "version": versions["nvidia-modelopt"]}
    assert sum(file.stat().st_size for file in RECORDED.rglob("*.*")) < 100e3
