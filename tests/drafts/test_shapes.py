import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import DraftModel, PromptLookup, Together, WithPrediction
from specjax.drafts import tree
from specjax.drafts.published import EAGLE_TREE, MEDUSA_TREE
from specjax.drafts.shapes import (
    Chain,
    DynamicTree,
    SampledTree,
    StaticTree,
    UnionTree,
    complete_tree,
    halvings,
)
from specjax.drafts.tree import chain_parents
from specjax.errors import InputError
from tests.conftest import tiny_target


def test_a_chain_has_a_root_and_its_tokens() -> None:
    assert (Chain(4).depth, Chain(4).nodes) == (4, 5)
    np.testing.assert_array_equal(chain_parents(4), [-1, 0, 1, 2])


@pytest.mark.parametrize("length", [0, -3])
def test_a_draft_length_below_one_is_refused(length) -> None:
    with pytest.raises(InputError, match=rf"Chain\(length={length}\)"):
        Chain(length)


@pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan")])
def test_a_threshold_that_is_no_probability_is_refused(threshold) -> None:
    with pytest.raises(InputError, match=r"Chain\(stop_below="):
        Chain(4, stop_below=threshold)


def test_node_counts_are_few_and_hold_every_draft() -> None:
    assert halvings(17) == (3, 5, 9, 17)
    assert halvings(2) == (2,)
    assert Chain(16).node_counts == (17,)
    assert Chain(12, stop_below=0.4).node_counts == (2, 4, 7, 13)


def random_parents(seed: int, nodes: int = 9) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([-1] + [int(rng.integers(0, node)) for node in range(1, nodes)])


def path_to(parents: np.ndarray, node: int) -> list[int]:
    """Return the nodes from the root to ``node``, found by climbing from parent to parent."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


def check_topology(parents: np.ndarray, ancestors, depths, paths, children, siblings) -> None:
    nodes = range(len(parents))
    for node in nodes:
        path = path_to(parents, node)
        assert np.flatnonzero(ancestors[node]).tolist() == sorted(path)
        assert depths[node] == len(path) - 1
        assert paths[node, : len(path)].tolist() == path
        assert not paths[node, len(path) :].any()
        below = [n for n in nodes if parents[n] == node]
        assert children[node] == (below[0] if below else -1)
        after = [n for n in nodes if n > node and parents[n] == parents[node]]
        assert siblings[node] == (after[0] if after else -1)


@pytest.mark.parametrize("seed", range(20))
def test_topology_from_parents(seed) -> None:
    parents = random_parents(seed)
    depth = int(tree.depths(parents).max())
    arrays = (
        tree.ancestors(parents),
        tree.depths(parents),
        tree.paths(parents, depth),
        tree.first_children(parents),
        tree.next_siblings(parents),
    )
    assert all(isinstance(array, np.ndarray) for array in arrays)  # constants for the compiler
    check_topology(parents, *arrays)


def test_topology_on_the_device_row_by_row() -> None:
    parents = np.stack([random_parents(seed) for seed in range(8)])
    rows = jnp.asarray(parents)
    depth = max(int(tree.depths(of_row).max()) for of_row in parents)
    arrays = (
        tree.ancestors(rows, depth),
        tree.depths(rows, depth),
        tree.paths(rows, depth),
        tree.first_children(rows),
        tree.next_siblings(rows),
    )
    for row, of_row in enumerate(parents):
        check_topology(of_row, *(np.asarray(array[row]) for array in arrays))


def test_published_trees() -> None:
    eagle = StaticTree(EAGLE_TREE)
    assert np.bincount([len(path) for path in EAGLE_TREE]).tolist() == [0, 4, 8, 8, 3, 2]
    assert (eagle.nodes, eagle.depth, eagle.branching, eagle.width) == (26, 5, 4, 4)
    medusa = StaticTree(MEDUSA_TREE)
    assert (medusa.nodes, medusa.depth, medusa.branching) == (64, 4, 10)
    assert MEDUSA_TREE[:3] == ((0,), (0, 0), (1,))  # its own order, not by depth


def test_complete_trees() -> None:
    assert complete_tree((2, 1)) == ((0,), (1,), (0, 0), (1, 0))
    assert SampledTree((3, 2, 2)).nodes == 1 + 3 + 6 + 12
    assert Chain(3).choices == ((0,), (0, 0), (0, 0, 0))
    for widths in ((), (2, 0), (2.5,)):
        with pytest.raises(InputError, match="widths="):
            SampledTree(widths)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ((), r"choices=\(\)"),
        (((0, 0), (0,)), r"\(0, 0\) stands before its parent \(0,\)"),
        (((0,), (1, 0)), r"\(1, 0\) is there without its parent \(1,\)"),
        (((0,), (1,), (0,)), r"\(0,\) occurs twice"),
        ((0, 1), "give a sequence of paths"),
        (((0,), ()), r"\(\) is not a path"),
        (((0,), (-1,)), r"\(-1,\) is not a path"),
    ],
)
def test_a_template_that_is_no_tree_is_refused(choices, message) -> None:
    with pytest.raises(InputError, match=message):
        StaticTree(choices)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 2, 3), "at least 1"),
        ((2, 0, 3), "at least 1"),
        ((2, 3, 12), "at most 11"),
        ((4, 5, 5), "at least depth"),
    ],
)
def test_a_dynamic_tree_that_cannot_be_is_refused(numbers, message) -> None:
    with pytest.raises(InputError, match=message):
        DynamicTree(*numbers)
    DynamicTree(2, 3, 11)


def test_shapes_compare_by_what_was_asked_for() -> None:
    assert StaticTree([[0], [1]]) == StaticTree(((0,), (1,)))
    assert hash(SampledTree([2, 1])) == hash(SampledTree((2, 1)))
    assert Chain(2) != SampledTree((1, 1))


@pytest.mark.parametrize(
    ("shape", "is_chain"),
    [
        (Chain(3), True),
        (StaticTree(((1,), (1, 0))), True),
        (SampledTree((1, 1)), True),
        (DynamicTree(1, 3, 4), True),
        (DynamicTree(2, 3, 4), False),  # as many nodes as levels, but they may be siblings
        (UnionTree((Chain(1), Chain(4)), most=4), False),
        (UnionTree((Chain(1), Chain(4)), slots=(0, 4)), True),
        (StaticTree(((0,), (1,))), False),
    ],
    ids=str,
)
def test_a_chain_has_no_two_children(shape, is_chain) -> None:
    assert shape.is_chain == is_chain
    model = DraftModel(tiny_target(5))
    is_union = isinstance(shape, UnionTree)
    drafter = (
        Together((model, PromptLookup()), draft=shape) if is_union else model.replace(draft=shape)
    )
    copying = WithPrediction(drafter, jnp.array([1, 2, 3]), longest=4)
    if is_chain:
        copying.check(tiny_target())
    else:
        with pytest.raises(InputError, match="predictions need chains"):
            copying.check(tiny_target())
