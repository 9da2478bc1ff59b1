"""Families whose layers keep states: their texts against transformers, and trees node by node."""

from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.transformer import Target
from tests.models.families import zoo
from tests.models.families.test_hybrids import (
    DRAFTERS,
    LENGTHS,
    generated,
    texts,
    texts_of_transformers,
)
from tests.models.test_delta_rule import mask_of, paths_of


@pytest.fixture(scope="module")
def zoo_model(tmp_path_factory):
    """Return a function that makes a model of the zoo and reads it, once for each name."""

    @cache
    def of(name: str) -> SimpleNamespace:
        directory = tmp_path_factory.mktemp("zoo")
        model = zoo.save(name, directory)
        return SimpleNamespace(
            model=model, target=Target.from_pretrained(directory, dtype=np.float32)
        )

    return of


FULL = ("nemotron_h", "lfm2", "kimi_linear")
"""A family with each kind of layer; those of Qwen3.5 are in ``test_hybrids.py``."""

NAMES = (
    *FULL,
    *("nemotron_h with experts", "granitemoehybrid", "bamba", "falcon_h1"),
    *("lfm2 with biases", "lfm2_moe", "olmo_hybrid", "olmo_hybrid without positions"),
)
_MARKS = dict.fromkeys(NAMES, pytest.mark.thorough) | dict.fromkeys(FULL, pytest.mark.full)
_FIRST, *_OTHERS = (
    "itself, dynamic tree",
    "early exit, static tree",
    "plain",
    "lookup",
    "itself, chain",
)
_MARKS_OF_TEXTS = _MARKS | {"kimi_linear": pytest.mark.thorough}  # its tree test is full
PAIRS = [pytest.param(name, _FIRST, marks=_MARKS_OF_TEXTS[name]) for name in NAMES] + [
    pytest.param(name, drafter, marks=pytest.mark.thorough) for name in NAMES for drafter in _OTHERS
]


@pytest.mark.parametrize(("name", "drafter"), PAIRS)
def test_greedy_texts_are_those_of_transformers(zoo_model, name, drafter) -> None:
    """Prompts on both sides of a chunk's end are in one batch."""
    hybrid = zoo_model(name)
    result = generated(hybrid.target, DRAFTERS[drafter](hybrid.target), LENGTHS)
    assert texts(result, LENGTHS) == texts_of_transformers(hybrid, name, LENGTHS)
    if drafter == "itself, chain":
        assert np.sum(result.stats.accepted) > 0.9 * np.sum(result.stats.drafted)


@pytest.mark.parametrize("name", [pytest.param(name, marks=_MARKS[name]) for name in NAMES])
def test_a_prompt_in_odd_chunks_and_a_tree_below_it_are_as_texts_alone(zoo_model, name) -> None:
    """The logits of a node are those of transformers after the prompt and the node's path."""
    hybrid = zoo_model(name)
    rng, paths = np.random.default_rng(0), paths_of([-1, 0, 0, 1, 2, 2, 4, -1])
    prompt, nodes = rng.integers(0, zoo.VOCABULARY, 75), rng.integers(0, zoo.VOCABULARY, 8)
    cache, start = hybrid.target.new_cache(1, 90), 0
    for size in (1, 67, 7):
        output, cache = hybrid.target.forward(
            jnp.asarray(prompt[None, start : start + size]), cache
        )
        start += size
    expected = zoo.logits(hybrid.model, prompt[None])[0, -7:]
    np.testing.assert_allclose(output.logits[0], expected, rtol=0, atol=1e-4)
    depths = np.array([len(path) - 1 for path in paths])
    scored, entries = jax.jit(type(hybrid.target).score)(
        hybrid.target,
        jnp.asarray(nodes[None]),
        cache,
        mask=mask_of(paths)[None],
        positions=jnp.asarray(75 + depths)[None],
    )
    for node, path in enumerate(paths):
        text = np.concatenate([prompt, nodes[path]])[None]
        np.testing.assert_allclose(
            scored.logits[0, node], zoo.logits(hybrid.model, text)[0, -1], rtol=0, atol=1e-4
        )
    accepted = jax.tree.map(lambda part: part[:, :, np.array(paths[6])], entries)
    count = jnp.array([len(paths[6])])
    after = jax.jit(type(cache).append)(cache, accepted, count, scored.hidden)
    text = np.concatenate([prompt, nodes[paths[6]], [5]])[None]
    output, _ = hybrid.target.forward(jnp.array([[5]]), after)
    expected = zoo.logits(hybrid.model, text)[0, -1]
    np.testing.assert_allclose(output.logits[0, 0], expected, rtol=0, atol=1e-4)
