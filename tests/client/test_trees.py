"""Tests of small trees, which are compared with sets of paths."""

import random

import numpy as np
import pytest

from specjax.client.trees import Tree

Paths = dict[tuple[int, ...], int]
"""Each node's tokens from the root's child on, and its index in the tree."""


def drawn(draw: random.Random, nodes: int = 12, root: int = 0) -> Tree:
    """Draw a tree whose siblings have different tokens."""
    tokens, parents = [root], [-1]
    for _ in range(draw.randrange(nodes)):
        parent = draw.randrange(len(tokens))
        siblings = {token for token, above in zip(tokens, parents, strict=True) if above == parent}
        if free := sorted(set(range(4)) - siblings):
            tokens.append(draw.choice(free))
            parents.append(parent)
    return Tree(np.array(tokens, np.int32), np.array(parents))


def paths(tree: Tree) -> Paths:
    """Return the path of every node, followed up to the root one by one."""
    nodes: Paths = {}
    for node in range(len(tree.tokens)):
        path, above = (), node
        while above:
            path, above = (int(tree.tokens[above]), *path), int(tree.parents[above])
        nodes[path] = node
    return nodes


@pytest.mark.parametrize("seed", range(40))
def test_what_is_below_a_child(seed: int) -> None:
    tree = drawn(random.Random(seed))
    for token in range(4):
        expected = {path[1:] for path in paths(tree) if path[:1] == (token,)}
        below = tree.below(token)
        assert (set() if below is None else set(paths(below))) == expected
        if below is not None:
            assert below.root == token
            assert below.parents[0] == -1 and (below.parents < np.arange(len(below.parents))).all()


@pytest.mark.parametrize("seed", range(40))
def test_depth_and_path(seed: int) -> None:
    tree = drawn(random.Random(seed))
    assert tree.depth == max(map(len, paths(tree)))
    path: tuple[int, ...] = ()
    while children := [
        node
        for node in paths(tree).items()
        if len(node[0]) == len(path) + 1 and node[0][:-1] == path
    ]:
        path = min(children, key=lambda child: child[1])[0]  # the first child
    assert tree.path == path


@pytest.mark.parametrize("seed", range(40))
def test_what_is_cut_is_the_likeliest_path_and_then_the_first_nodes_level_by_level(
    seed: int,
) -> None:
    draw = random.Random(seed)
    tree, nodes, depth = drawn(draw), draw.randint(1, 13), draw.randint(0, 5)

    def rank(node: tuple[tuple[int, ...], int]) -> tuple[bool, int, int]:
        path, place = node
        return tree.path[: len(path)] != path, len(path), place

    expected = {
        path for path, _ in sorted(paths(tree).items(), key=rank)[:nodes] if len(path) <= depth
    }
    cut = tree.cut(nodes, depth)
    assert set(paths(cut)) == expected
    assert (cut.parents < np.arange(len(cut.parents))).all()


@pytest.mark.parametrize("seed", range(40))
def test_a_tree_below_another(seed: int) -> None:
    draw = random.Random(seed)
    tree = drawn(draw)
    end = tree.path
    below = drawn(draw, root=([tree.root, *end])[-1])
    joined = tree.joined(below)
    assert set(paths(joined)) == {*paths(tree), *((*end, *path) for path in paths(below))}
    assert (joined.parents < np.arange(len(joined.parents))).all()
    assert joined.path == (*end, *below.path)


@pytest.mark.parametrize("seed", range(40))
def test_nodes_that_are_not_valid_take_all_below_with_them(seed: int) -> None:
    draw = random.Random(seed)
    tree = drawn(draw)
    valid = np.array([True, *(draw.random() < 0.7 for _ in tree.tokens[1:])])
    wrong = [path for path, node in paths(tree).items() if not valid[node]]
    expected = {
        path for path in paths(tree) if not any(path[: len(prefix)] == prefix for prefix in wrong)
    }
    remaining = Tree.of(tree.tokens, tree.parents, valid)
    assert set(paths(remaining)) == expected
    assert remaining.parents[0] == -1


def test_a_chain() -> None:
    chain = Tree.chain(7, (1, 2, 3))
    assert (chain.root, chain.depth, chain.path) == (7, 3, (1, 2, 3))
    assert Tree.chain(7, ()).depth == 0 and Tree.chain(7, ()).path == ()
    assert chain.cut(1, 9).path == () and chain.cut(9, 0).path == ()
