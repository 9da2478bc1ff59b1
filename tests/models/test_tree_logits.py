"""One pass over a tree gives, at every node, the logits of its path read alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import state
from specjax.drafters.base import NoDraft
from specjax.drafts import tree
from specjax.drafts.draft import Draft
from specjax.drafts.published import EAGLE_TREE
from specjax.drafts.shapes import StaticTree
from tests.conftest import MIXTURES, REAL_PAIRS, tiny_target

LENGTHS = np.array([9, 2, 5])


MODELS = {"tiny": {}, "windows": {"sliding_window": 4, "windowed_layers": (1,)}, **MIXTURES}


read_prompts = jax.jit(state.read_prompts, static_argnums=4)


def static_parents() -> np.ndarray:
    return StaticTree(EAGLE_TREE).template.parents


def dynamic_parents() -> jax.Array:
    """Return another tree for every row, of random depth."""
    rng = np.random.default_rng(1)
    return jnp.asarray(
        [
            [-1] + [int(rng.integers(max(0, node - 4), node)) for node in range(1, 12)]
            for _ in LENGTHS
        ]
    )


@pytest.mark.full_except(
    "dynamic_parents-deepseek_v3", "dynamic_parents-tiny", "static_parents-windows"
)
@pytest.mark.thorough_except("static_parents-tiny", "dynamic_parents-windows")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("parents", [static_parents, dynamic_parents])
def test_tree_logits_are_those_of_each_path_alone(model, parents) -> None:
    prompts = np.random.default_rng(0).integers(0, 11, (3, 9)).astype(np.int32)
    check(tiny_target(**MODELS[model]), prompts, parents())


@pytest.mark.full
@pytest.mark.parametrize("pair", REAL_PAIRS)
@pytest.mark.parametrize(
    "parents", [pytest.param(static_parents, marks=pytest.mark.thorough), dynamic_parents]
)
def test_tree_logits_of_trained_models_are_those_of_each_path_alone(pair, parents) -> None:
    trained = pair()
    check(trained.target, trained.prompts(3, 9)[0], parents())


def check(target, prompts, parents) -> None:
    """Check the logits of a tree with these ``parents`` below each prompt of LENGTHS."""
    nodes = parents.shape[-1]
    tokens = (
        np.random.default_rng(2).integers(0, target.config.vocab_size, (3, nodes)).astype(np.int32)
    )
    tokens[:, 0] = prompts[np.arange(3), LENGTHS - 1]  # the root is the prompt's last token
    cache, _ = read_prompts(target, NoDraft(), prompts, LENGTHS, 9 + nodes)
    draft = Draft.of_tree(tokens=jnp.asarray(tokens), parents=parents)

    @jax.jit
    def score(target, tokens, cache):
        positions = cache.length[:, None] + draft.depths
        return target.score(tokens, cache, positions=positions, mask=draft.mask)[0].logits

    logits = np.asarray(score(target, draft.tokens, cache))
    alone = jax.jit(lambda target, texts: target.forward(texts)[0].logits)
    largest = 0.0
    for row, row_parents in enumerate(np.broadcast_to(np.asarray(parents), tokens.shape)):
        depths = tree.depths(np.array(row_parents))
        paths = tree.paths(np.array(row_parents), int(depths.max()))
        texts = np.zeros((nodes, 9 + nodes), np.int32)
        texts[:, : LENGTHS[row]] = prompts[row, : LENGTHS[row]]
        for node in range(nodes):
            path = tokens[row, paths[node, 1 : depths[node] + 1]]
            texts[node, LENGTHS[row] : LENGTHS[row] + len(path)] = path
        expected = np.asarray(alone(target, texts))[np.arange(nodes), LENGTHS[row] - 1 + depths]
        largest = max(largest, float(np.abs(logits[row] - expected).max()))
    assert largest < 1e-4
