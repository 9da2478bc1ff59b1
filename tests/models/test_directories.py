"""Directories that hold no model's checkpoint are refused before any weight is read."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.drafters import Eagle
from specjax.models import config_json
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError
from specjax.models.quantization.published import stated_forms
from specjax.models.transformer import Target
from tests.conftest import tiny_target

QUANTIZED = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "W4A8_AWQ", "kv_cache_quant_algo": "FP8"},
}
NOT_CHECKPOINTS = [  # the files of a directory, and the message
    (
        {"adapter_config.json": "{}", "adapter_model.safetensors": ""},
        "is a LoRA adapter .*: merge it into its base model",
    ),
    (
        {"model-Q4_K_M.gguf": ""},
        r"holds 'model-Q4_K_M.gguf': GGUF is not supported: give the model",
    ),
    ({"config.json": "{}", "model.GGUF": ""}, "GGUF is not supported"),
    (
        {"config.json": "{}", "model-00001-of-00002.safetensors": ""},
        r"without model\.safetensors\.index\.json.*: download",
    ),
    (
        {"config.json": "{}", "hf_quant_config.json": json.dumps(QUANTIZED)},
        r"hf_quant_config.json: quantization.quant_algo='W4A8_AWQ': must be NVFP4 or .*: use the",
    ),
    (
        {"config.json": "{}", "hf_quant_config.json": json.dumps({"quantization": []})},
        r"quantization=\[\]: must be an object",
    ),
    ({"config.json": "{}", "hf_quant_config.json": "[]"}, "must hold a JSON object"),
]


def read_config(path):
    return config_json.read_config(CheckpointFiles(path))


@pytest.mark.parametrize("read", [read_config, Target.from_pretrained, Eagle.from_pretrained])
@pytest.mark.parametrize(("files", "message"), NOT_CHECKPOINTS)
def test_what_is_no_checkpoint_is_named(tmp_path, files, message, read) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_in_place_of_a_directory_is_named(tmp_path) -> None:
    for name, message in (
        ("model.gguf", "GGUF is not supported: give"),
        ("model.safetensors", "is a file: give the"),
    ):
        (tmp_path / name).write_text("")
        with pytest.raises(CheckpointError, match=message):
            Target.from_pretrained(tmp_path / name)


@pytest.mark.parametrize("in_config", [None, {}, {"quant_algo": None}])
@pytest.mark.parametrize("cache", [None, "FP8"])
def test_what_modelopt_has_not_quantized_is_read(tmp_path, cache, in_config) -> None:
    """The scales of a cache are not used, because these files do not quantize the cache here."""
    tiny_target().save_pretrained(tmp_path)
    if in_config is None:
        (tmp_path / "hf_quant_config.json").write_text(
            json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": cache}})
        )
    else:
        raw = json.loads((tmp_path / "config.json").read_text())
        scheme = {"type": "float", "num_bits": 8} if cache else None
        quantization = {"quant_method": "modelopt", "kv_cache_scheme": scheme, "ignore": []}
        raw["quantization_config"] = quantization | in_config
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert stated_forms(raw["quantization_config"])("model.layers.0.mlp.up_proj.weight") is None
    if cache:
        file = tmp_path / "model.safetensors"
        scale = {"model.layers.0.self_attn.k_proj.k_scale": np.ones((), np.float32)}
        save_file(load_file(file) | scale, file)
    assert Target.from_pretrained(tmp_path).config == tiny_target().config
