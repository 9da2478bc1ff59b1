"""Small models with each kind of layer that keeps a state: on two devices, served, quantized."""

import inspect
from typing import Any

import numpy as np
import pytest

import specjax
from specjax import sharding
from specjax.drafters import DraftModel, EarlyExit, PromptLookup
from specjax.models.config import MLA, Rope
from specjax.models.layers import WITH_STATE
from specjax.models.memory import KimiDeltaAttention, ShortConvolution, StateSizes
from specjax.sampling import Sampling
from specjax.serving.engine import Engine
from tests.conftest import SHAPES, tiny_target
from tests.models.test_mamba2 import HYBRID as MAMBA2

MODELS: dict[str, dict[str, Any]] = {
    "mamba2": MAMBA2,
    "short convolution": {
        "model_type": "lfm2",
        "num_layers": 4,
        "linear": ShortConvolution(channels=16),
        "linear_layers": (0, 2, 3),
        "qk_norm": True,
    },
    "kimi delta attention": {
        "model_type": "kimi_linear",
        "num_layers": 3,
        "num_kv_heads": 4,
        "linear": KimiDeltaAttention(key_heads=2, key_dim=6),
        "linear_layers": (0, 2),
        "rope": Rope(kind="none"),
        "mla": MLA(kv_lora_rank=6, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8),
        "head_dim": 4,
    },
}
"""Changes of `tiny_config`."""

PARTS = {"mamba2": "conv_b", "short convolution": "conv_value", "kimi delta attention": "conv_k"}
"""A parameter of each kind that is divided between devices."""

PROMPT = np.array([[1, 2, 3, 1, 2, 3, 1, 2]])


def generated(target, drafter):
    options = {"max_new_tokens": 24, "sampling": Sampling(temperature=0.0)}
    result = specjax.generate(target, drafter, PROMPT, **options)
    return np.asarray(result.tokens)


def concrete_subclasses(kind: type[StateSizes]) -> set[type[StateSizes]]:
    """Return all subclasses of the library that describe a kind of layer."""
    below = kind.__subclasses__()
    ours = [sub for sub in below if sub.__module__.startswith("specjax.")]
    concrete = {sub for sub in ours if not inspect.isabstract(sub)}
    return concrete.union(*map(concrete_subclasses, ours))


def test_every_kind_of_state_has_a_function_that_reads_it() -> None:
    assert concrete_subclasses(StateSizes) == set(WITH_STATE)
    assert ShortConvolution in WITH_STATE and KimiDeltaAttention in WITH_STATE


@pytest.mark.full
@pytest.mark.thorough_except("kimi delta attention")
@pytest.mark.parametrize("name", MODELS)
def test_on_two_devices_the_text_is_the_same(name, tmp_path) -> None:
    """A device has the parts of a layer that belong together, with their states."""
    hybrid = tiny_target(**MODELS[name], scale=4.0)
    hybrid.save_pretrained(tmp_path)
    split = specjax.Target.from_pretrained(
        tmp_path, dtype=np.float32, mesh=sharding.make_mesh(1, 2)
    )
    drafter = EarlyExit(layers=2, draft=SHAPES["static"])
    np.testing.assert_array_equal(generated(split, drafter), generated(hybrid, drafter))
    np.testing.assert_array_equal(generated(hybrid, None), generated(hybrid, drafter))
    newest = split.new_cache(2, 8).states[0].newest[0]
    assert newest.sharding.shard_shape(newest.shape)[1] == newest.shape[1] // 2
    conv = split.params["layers"][0][PARTS[name]]
    assert conv.sharding.shard_shape(conv.shape)[0] == conv.shape[0] // 2


@pytest.mark.full
@pytest.mark.thorough_except("mamba2")
@pytest.mark.parametrize("name", MODELS)
def test_a_shared_prefix_brings_its_state(name) -> None:
    """A second request goes on from the state at the end of a page, and has the text of its own."""
    target = tiny_target(**MODELS[name], scale=4.0, max_positions=256)
    prompt = np.random.default_rng(0).integers(0, 11, 40).tolist()
    sizes = {"rows": 2, "widths": (2,), "page": 8, "chunk": 16, "capacity": 128, "steps": 4}
    with Engine(target, PromptLookup(), drafts=("chain:3",), **sizes) as engine:
        texts = [[*prompt, 1], [*prompt, 7, 2]]
        handles = []
        for text in texts:
            handles.append(engine.submit(text, max_new_tokens=20))
            handles[-1].result(60.0)
        assert handles[1].cached_tokens >= 32
        for text, handle in zip(texts, handles, strict=True):
            alone_text = specjax.generate(
                target,
                None,
                np.array([text]),
                max_new_tokens=20,
                sampling=Sampling(temperature=0.0),
            )
            expected = np.asarray(alone_text.tokens)[0, len(text) :]
            np.testing.assert_array_equal(handle.result(60.0).tokens, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_quantized_weights_are_decoded_losslessly(name) -> None:
    quantized = tiny_target(**MODELS[name], scale=4.0).quantize("int8")
    drafter = DraftModel(quantized, draft=SHAPES["dynamic"])
    np.testing.assert_array_equal(generated(quantized, None), generated(quantized, drafter))
