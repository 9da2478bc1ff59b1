"""Test merging the drafts of several drafters into one tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DynamicTree, StaticTree, UnionTree, complete_tree
from specjax.drafts.union import merge
from specjax.errors import InputError

ROWS = 12
Path = tuple[int, ...]


def random_draft(rng: np.random.Generator, nodes: int, is_static: bool, vocab: int = 3) -> Draft:
    """Return a draft of few different tokens, in which siblings differ and rows leave out nodes."""
    shapes = [np.array([-1] + [int(rng.integers(0, n)) for n in range(1, nodes)])]
    if not is_static:
        shapes += [
            np.array([-1] + [int(rng.integers(0, n)) for n in range(1, nodes)])
            for _ in range(ROWS - 1)
        ]
    parents = np.broadcast_to(np.stack(shapes), (ROWS, nodes))
    tokens, valid = np.full((ROWS, nodes), 1), np.ones((ROWS, nodes), bool)
    for row in range(ROWS):
        used: dict[int, list[int]] = {}
        for node in range(1, nodes):
            parent = int(parents[row, node])
            free = [t for t in range(vocab) if t not in used.get(parent, [])]
            valid[row, node] = bool(free) and valid[row, parent] and rng.random() < 0.8
            tokens[row, node] = rng.choice(free) if free else 0
            if valid[row, node]:
                used.setdefault(parent, []).append(int(tokens[row, node]))
    topology = np.array(parents[0]) if is_static else jnp.asarray(parents)
    return Draft.of_tree(jnp.asarray(tokens), topology, valid=jnp.asarray(valid), levels=nodes - 1)


def paths_of(draft: Draft, row: int) -> list[Path | None]:
    """Return the tokens from below the root to each node; None for nodes that are not valid."""
    parents = np.broadcast_to(np.asarray(draft.parents), draft.tokens.shape)[row]
    tokens, valid = np.asarray(draft.tokens)[row], np.asarray(draft.drafted)[row]
    paths: list[Path | None] = [()]
    for node in range(1, len(tokens)):
        above = paths[parents[node]]
        is_there = valid[node - 1] and above is not None
        paths.append((*above, int(tokens[node])) if is_there else None)
    return paths


@pytest.mark.full_except("sizes0")
@pytest.mark.parametrize("sizes", [(9, 9), (12, 5, 4), (33, 34), (1, 6)])
def test_the_union_has_the_paths_of_all_parts_once(sizes) -> None:
    rng = np.random.default_rng(sum(sizes))
    drafts = [random_draft(rng, nodes, is_static=index == 0) for index, nodes in enumerate(sizes)]
    slots = tuple(max(0, nodes - 1 - 2 * index) for index, nodes in enumerate(sizes))
    merged = jax.jit(merge, static_argnames="slots")(drafts, slots=slots)
    drafts, (union, indices) = jax.device_get((drafts, merged))
    # With 33 and 34 nodes: the root, 32 and 31, which are 64.
    assert union.tokens.shape == (ROWS, 1 + sum(slots))
    shared = 0
    for row in range(ROWS):
        offered: list[list[Path]] = []
        for draft, slot in zip(drafts, slots, strict=True):
            offered.append([path for path in paths_of(draft, row)[1:] if path is not None][:slot])
        expected = list(dict.fromkeys(path for paths in offered for path in paths))
        shared += sum(map(len, offered)) - len(expected)
        paths = paths_of(union, row)
        # The nodes are in the order of the parts, and those that nobody fills come last.
        assert paths == [(), *expected, *[None] * (sum(slots) - len(expected))]
        for part, (draft, own_nodes) in enumerate(zip(drafts, indices, strict=True)):
            own_paths = paths_of(draft, row)
            for node, path in enumerate(paths[1:], 1):
                index = int(own_nodes[row, node])
                is_offered = path in offered[part]
                assert bool(union.offered_by[row, node, part]) == (index > 0) == is_offered
                assert not is_offered or own_paths[index] == path
            assert int(own_nodes[row, 0]) == 0
    assert shared > ROWS or min(sizes) == 1
    parents = np.asarray(union.parents)
    assert np.all(parents[:, 0] == -1)
    assert np.all((parents[:, 1:] >= 0) & (parents[:, 1:] < np.arange(1, parents.shape[1])))
    assert not np.asarray(union.offered_by)[:, 0].any()


@pytest.mark.full
def test_the_first_nodes_are_a_draft() -> None:
    rng = np.random.default_rng(0)
    drafts = [random_draft(rng, 6, is_static=True), random_draft(rng, 6, is_static=False)]
    union, _ = merge(drafts, (5, 5))
    most = 1 + int(np.asarray(union.length).max())
    assert most < 11  # no row fills all of them
    short = union.first(most)
    assert short.depth == min(union.depth, most - 1)
    for row in range(ROWS):
        assert paths_of(short, row) == paths_of(union, row)[:most]


@pytest.mark.full
@pytest.mark.parametrize("most", [11, 14, 19])
def test_the_last_part_has_the_nodes_that_the_others_leave(most) -> None:
    """A union with a limit has the first nodes of the union without one."""
    rng = np.random.default_rng(most)
    drafts = [random_draft(rng, 11, is_static=True), random_draft(rng, 11, is_static=False)]
    whole, whole_indices = merge(drafts, (10, 10))
    union, indices = merge(drafts, (10, 10), most)
    assert union.tokens.shape == (ROWS, 1 + most)
    for row in range(ROWS):
        assert paths_of(union, row) == paths_of(whole, row)[: 1 + most]
    assert int(np.asarray(whole.length).max()) > 11  # the limit cuts the draft of some row
    for limited, unlimited in zip(indices, whole_indices, strict=True):
        np.testing.assert_array_equal(limited, unlimited[:, : 1 + most])
    np.testing.assert_array_equal(union.offered_by, whole.offered_by[:, : 1 + most])


def test_a_limit_must_hold_all_parts_before_the_last_one() -> None:
    union = UnionTree((Chain(4), Chain(16)), most=16)
    assert (union.nodes, union.depth, union.shares) == (17, 16, (4, 12))
    assert UnionTree((Chain(4), Chain(16)), most=9).depth == 9
    for most in (4, 21, True, "9"):
        with pytest.raises(InputError, match="give a number from 5 to 20, or None"):
            UnionTree((Chain(4), Chain(16)), most=most)  # pyright: ignore[reportArgumentType]


def test_a_union_adds_up_what_its_parts_may_draft() -> None:
    union = UnionTree((StaticTree(complete_tree((2, 2))), Chain(8)), slots=(6, 3))
    assert (union.nodes, union.depth, union.branching) == (10, 3, 3)
    assert UnionTree((Chain(2), Chain(5))).slots == (2, 5)
    union.check(2)
    with pytest.raises(InputError, match="a node has 4 children"):
        UnionTree((Chain(2), DynamicTree(4, 2, 6))).check(3)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((3,), "there are 2 parts; give one number for each"),
        ((3, 9), "a part drafts a chain of 8, so give it a number from 0 to 8"),
        ((-1, 8), "from 0 to 4"),
        ((0, 0), "give at least one a slot"),
    ],
)
def test_slots_that_cannot_be_used_are_refused(slots, message) -> None:
    with pytest.raises(InputError, match=message):
        UnionTree((Chain(4), Chain(8)), slots)
