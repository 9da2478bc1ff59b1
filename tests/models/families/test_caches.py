"""Every family through a cache, in pieces, in pages and as a tree, against the whole text."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.cache import PagedCache
from specjax.models.transformer import Target
from specjax.planning.work import cache_bytes
from tests.models.families import zoo
from tests.rounding import moved_by_last_bits

LENGTH = 24  # longer than the windows
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]  # of the nodes of a tree
PAGE = 4
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def zoo_model(tmp_path_factory):
    """Return a function that makes a model of the zoo, once for each name.

    It returns the model, a text, the logits of the whole text, and how far other logits may be from
    them.
    """

    @cache
    def of(name: str):
        directory = tmp_path_factory.mktemp("zoo")
        zoo.save(name, directory)
        target = Target.from_pretrained(directory, dtype=np.float32)
        tokens = jnp.asarray(np.random.default_rng(3).integers(0, zoo.VOCABULARY, (2, LENGTH)))
        expected = np.asarray(whole(target, tokens))
        rounding = moved_by_last_bits(lambda changed: whole(changed, tokens), target)
        return target, tokens, expected, max(TOLERANCE, rounding)

    return of


@jax.jit
def whole(target, tokens):
    return target.forward(tokens)[0].logits


@jax.jit
def read_on(target, tokens, cache):
    output, cache = target.forward(tokens, cache)
    return output.logits, cache


def in_pieces(target, tokens, cache, size: int):
    pieces = []
    for start in range(0, tokens.shape[1], size):
        logits, cache = read_on(target, tokens[:, start : start + size], cache)
        pieces.append(logits)
    return np.concatenate(pieces, axis=1), cache


def in_pages(target, capacity: int) -> PagedCache:
    columns = capacity // PAGE
    cache = PagedCache.like(target.new_cache(2, capacity), pages=2 * columns, page=PAGE)
    shuffled = np.random.default_rng(0).permutation(2 * columns).reshape(2, columns)
    return cache.with_table(jnp.asarray(shuffled, jnp.int32))


@pytest.mark.full_except("llama4", "phi3 turned in part", "seed_oss", "smollm3 with windows")
@pytest.mark.thorough_except(*zoo.ONE_OF_EACH_KIND)
@pytest.mark.parametrize("name", zoo.MODELS)
def test_pieces_and_trees_are_as_the_whole(zoo_model, name) -> None:
    target, tokens, expected, tolerance = zoo_model(name)
    logits, cache = in_pieces(target, tokens, target.new_cache(2, LENGTH + 8), 3)
    np.testing.assert_allclose(logits, expected, atol=tolerance)
    check_tree(target, tokens, cache, tolerance)


@pytest.mark.full_except(
    "deepseek_v32", "gemma4 E2B", "gpt_oss", "llama4", "mimo_v2_flash", "qwen3_5"
)
@pytest.mark.thorough_except(*zoo.ONE_OF_EACH_KIND, "llama4")
@pytest.mark.parametrize("name", zoo.cases("llama4"))
@pytest.mark.represents("paged caches of every kind of entry")
def test_one_by_one_in_pages_is_as_the_whole(zoo_model, name) -> None:
    target, tokens, expected, tolerance = zoo_model(name)
    logits, _ = in_pieces(target, tokens, in_pages(target, LENGTH), 1)
    np.testing.assert_allclose(logits, expected, atol=tolerance)


def check_tree(target, tokens, cache, tolerance: float) -> None:
    """Check that each node of a tree after the text has the logits of its path read alone."""
    paths = [[0]]
    for node, parent in enumerate(PARENTS[1:], start=1):
        paths.append([*paths[parent], node])
    mask = np.zeros((1, len(paths), len(paths)), bool)
    for node, path in enumerate(paths):
        mask[0, node, path] = True
    drafted = np.random.default_rng(4).integers(0, zoo.VOCABULARY, (2, len(paths)))
    depths = np.array([len(path) - 1 for path in paths])
    logits = score(target, jnp.asarray(drafted), cache, depths, mask)
    texts = np.zeros((2 * len(paths), LENGTH + depths.max() + 1), np.int32)
    for row, node in np.ndindex(2, len(paths)):
        text = [*tokens[row], *drafted[row, paths[node]]]
        texts[row * len(paths) + node, : len(text)] = text
    alone = np.asarray(whole(target, jnp.asarray(texts))).reshape(
        2, len(paths), *texts.shape[1:], -1
    )
    expected = alone[:, np.arange(len(paths)), LENGTH + depths]
    np.testing.assert_allclose(logits, expected, atol=tolerance)


@jax.jit
def score(target, tokens, cache, depths, mask):
    positions = cache.length[:, None] + depths
    output, _ = target.score(tokens, cache, positions=positions, mask=mask)
    return output.logits


def test_layers_that_share_take_no_memory(zoo_model) -> None:
    target, *_ = zoo_model("gemma4 E2B")
    layers = target.new_cache(1, 16).layers
    layer_bytes = [sum(part.nbytes for part in entry) for entry in layers]
    size = 16 * 4 * 2 * 2  # slots, float32, keys and values, heads
    assert layer_bytes == [size * 8, size * 8, size * 16, 0, 0, 0]
    assert [len(entry) for entry in layers] == [2, 2, 2, 0, 0, 0]
    assert cache_bytes(target.config, 4.0) * 16 == sum(layer_bytes)
