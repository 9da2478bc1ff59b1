"""Drafting with quantized weights of the target or the drafter.

The text stays that of the quantized target.
"""

from collections.abc import Callable, Collection, Iterable
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest

import specjax
from specjax.assets import embedded
from specjax.drafters import Drafter
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree
from specjax.errors import InputError
from specjax.evaluation import metrics
from specjax.models.config import ModelConfig, MoE
from specjax.models.quantization import is_quantized
from specjax.models.quantization.schemes import SCHEMES
from specjax.models.transformer import Target
from tests.conftest import compilations

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 3,
    "head_dim": 16,
}
PLAIN = ModelConfig(**SIZES, num_heads=4, num_kv_heads=2)
SPARSE = ModelConfig(
    **SIZES,
    num_heads=4,
    num_kv_heads=2,
    model_type="qwen3_moe",
    qk_norm=True,
    moe=MoE(8, 2, 32, normalise=True),
)
CONFIGS = {"dense": PLAIN, "experts": SPARSE}

DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "draft model": (
        lambda target: specjax.DraftModel.init(
            target, jax.random.key(1), draft=3, num_layers=1
        ).quantize("int8")
    ),
    "early exit": lambda target: specjax.EarlyExit(layers=1, draft=Chain(3)),
    "eagle3": (
        lambda target: specjax.Eagle3.init(
            target, jax.random.key(1), draft=DynamicTree(2, 3, 7)
        ).quantize("int4")
    ),
    "dflash": (
        lambda target: specjax.DFlash.init(target, jax.random.key(1), draft=Chain(3)).quantize(
            "int8"
        )
    ),
    "mtp": (
        lambda target: specjax.MTP.init(
            target, jax.random.key(1), draft=SampledTree((2, 1))
        ).quantize("w8a8")
    ),
}


def target_of(config: ModelConfig, weights: str) -> Target:
    target = specjax.Target.init(config, jax.random.key(0))
    sharper = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, target.params)
    return target.replace(params=sharper).quantize(weights)  # pyright: ignore[reportAttributeAccessIssue]


PROMPTS = np.random.default_rng(0).integers(0, 64, size=(3, 6))


def usual(cases: Iterable[Any], ordinary: Collection[Any]) -> list[Any]:
    """Return all ``cases``, marked as thorough unless they are ``ordinary``."""
    marks = {case: () if case in ordinary else (pytest.mark.thorough,) for case in cases}
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=case_marks)
        for case, case_marks in marks.items()
    ]


@pytest.mark.full
@pytest.mark.thorough_except("dense-int8")
@pytest.mark.parametrize(
    ("config", "weights"),
    usual(product(CONFIGS, SCHEMES), [("dense", "int8"), ("dense", "int4"), ("experts", "int8")]),
)
def test_the_text_is_that_of_plain_decoding(config: str, weights: str) -> None:
    target = target_of(CONFIGS[config], weights)
    key = jax.random.key(5)
    for temperature in (0.0, 0.8):
        sampling = specjax.Sampling(temperature=temperature)
        options = {"max_new_tokens": 24, "sampling": sampling, "key": key, "rule": "coupled"}
        plain = specjax.generate(target, None, PROMPTS, **options)
        drafter = specjax.DraftModel(target, draft=DynamicTree(2, 3, 6))
        drafted = specjax.generate(target, drafter, PROMPTS, **options)
        np.testing.assert_array_equal(drafted.tokens, plain.tokens)
        assert drafted.stats.steps.sum() < plain.stats.steps.sum() / 1.5  # it is the target itself


@pytest.mark.full
def test_texts_do_not_depend_on_a_quantized_drafter() -> None:
    target = target_of(PLAIN, "int8")
    specjax.conformance.check_coupled(target, DRAFTERS["eagle3"](target))


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(DRAFTERS))
def test_quantized_drafters_pass_conformance(name: str) -> None:
    target = target_of(PLAIN, "int8")
    drafter = DRAFTERS[name](target)
    assert name == "early exit" or any(
        map(is_quantized, jax.tree.leaves(drafter, is_leaf=is_quantized))
    )
    # What a row remembers does not depend on how weights are stored: texts come and go in one case.
    specjax.conformance.check(target, drafter, come_and_go=name == "eagle3")


@pytest.mark.thorough
def test_quantized_drafters_draft_much_as_wide_ones() -> None:
    target = specjax.Target.from_pretrained("embedded")
    prompts = np.random.default_rng(1).integers(0, 3000, size=(8, 12))
    lengths = {}
    for weights in ("float", "int8"):
        drafter = specjax.Eagle3.from_pretrained(
            embedded("eagle3"), draft=Chain(4), weights=weights
        )
        result = specjax.generate(target, drafter, prompts, max_new_tokens=64)
        lengths[weights] = metrics.summarise(result.stats).acceptance_length
    assert lengths["int8"] > 0.97 * lengths["float"] > 1.2


@pytest.mark.full
def test_a_drafter_is_saved_quantized_and_read_back(tmp_path) -> None:
    target = target_of(PLAIN, "int8")
    drafter = specjax.Eagle3.init(target, jax.random.key(1)).quantize("int4")
    drafter.save_pretrained(tmp_path)
    read = specjax.Eagle3.from_pretrained(tmp_path, draft=drafter.draft)
    assert jax.tree.all(jax.tree.map(np.array_equal, read, drafter))


def test_a_drafters_head_is_quantized_as_the_vocabulary_is() -> None:
    drafter = specjax.Eagle3.from_pretrained(embedded("eagle3"))
    if "lm_head" not in drafter.params:
        drafter = specjax.Eagle3.init(target_of(PLAIN, "int8"), jax.random.key(1))
    quantized = drafter.quantize("int4").params
    assert quantized["fc"].form.kind == "int4" and quantized["lm_head"].form.kind == "int8"
    assert not is_quantized(drafter.quantize("fp8").params["lm_head"])


def test_what_is_quantized_is_not_narrowed_again() -> None:
    target = target_of(PLAIN, "int8")
    with pytest.raises(
        InputError, match="quantized already: load them in floats, with weights='float'"
    ):
        target.quantize("int4")
    with pytest.raises(
        InputError, match="weights='int3': must be one of 'int8', 'w8a8', 'int4', 'fp8'"
    ):
        specjax.Target.init(PLAIN, jax.random.key(0)).quantize("int3")
    with pytest.raises(
        InputError, match="weights='int3': must be one of 'stored', 'float', 'int8'"
    ):
        specjax.load("embedded", weights="int3")


@pytest.mark.full
def test_a_second_call_compiles_nothing() -> None:
    target = target_of(PLAIN, "int4")
    drafter = specjax.DraftModel.init(target, jax.random.key(1), draft=2, num_layers=1).quantize(
        "int8"
    )
    specjax.generate(target, drafter, PROMPTS, max_new_tokens=8)
    before = compilations()
    specjax.generate(target, drafter, PROMPTS[::-1], max_new_tokens=8)
    assert compilations() == before
