"""Shrunken copies of published config.json files have the logits of transformers' model of them."""

from typing import Any

import numpy as np
import pytest

from specjax.models.families import FAMILIES
from tests.conftest import SHARED
from tests.models.families import every_field, shrunken

CONFIGS = SHARED / "configs"
COPIES = shrunken.stored_copies()


def names_by_copy() -> dict[str, list[str]]:
    """Return the names of the published models by the first of those with the same copy."""
    names: dict[str, list[str]] = {}
    for name, raw in COPIES.items():
        first = next((first for first in names if COPIES[first] == raw), name)
        names.setdefault(first, []).append(name)
    return names


def first_of_each_type() -> list[str]:
    """Return the first model of each type."""
    types: dict[str, str] = {}
    for name in names_by_copy():
        types.setdefault(COPIES[name]["model_type"], name)
    return list(types.values())


def compare(name: str, raw: dict[str, Any]) -> every_field.Outcome:
    """Compare our model of ``raw`` with transformers' model of the copy of that name."""
    theirs = shrunken.by_transformers(COPIES[name])
    assert np.abs(theirs.logits).max() > 0.5
    return every_field.compare(theirs, raw)


# --- the logits -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.thorough_except(*first_of_each_type())
@pytest.mark.parametrize("name", names_by_copy())
def test_a_shrunken_published_model_has_the_logits_of_transformers(name) -> None:
    result = compare(name, COPIES[name])
    print(f"{', '.join(names_by_copy()[name])}: {result.summary}")
    assert not result.wrong, result.summary
    assert result.compared_tokens >= every_field.LENGTH * 3 // 4


MISREAD = [
    ("Qwen--Qwen3-0.6B", {"rope_theta": 10_000.0}),
    ("Qwen--Qwen3-0.6B", {"rms_norm_eps": 1e-5}),
    ("meta-llama--Meta-Llama-3.1-405B", {"rope_scaling": None}),
    ("moonshotai--Kimi-K2-Instruct", {"routed_scaling_factor": 2.5}),
    ("openai--gpt-oss-120b", {"sliding_window": 9}),
    ("openai--gpt-oss-120b", {"swiglu_limit": 7.5}),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "fields"), MISREAD)
def test_a_field_that_is_read_otherwise_changes_the_logits_too_much(name, fields) -> None:
    assert compare(name, COPIES[name] | fields).wrong


# --- the copies -----------------------------------------------------------------------------------


def test_the_copies_are_of_twenty_supported_types() -> None:
    assert len(COPIES) == 46
    assert {raw["model_type"] for raw in COPIES.values()} <= FAMILIES.keys()
    assert len(first_of_each_type()) == 20


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="needs ../shared/data")
def test_the_copies_are_those_of_the_published_files() -> None:
    """Run ``python -m tests.models.families.shrunken`` with their folder if they are not."""
    assert shrunken.shrink_folder(CONFIGS) == COPIES
