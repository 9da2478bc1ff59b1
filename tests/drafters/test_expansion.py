"""Compare the growth of trees with slow references in Python, and the drawn nodes with q.

The examples of the docstrings are compared as well.
"""

import inspect
import itertools
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import candidates, expansion
from specjax.drafters.expansion import expand, expand_by_depth
from specjax.drafts import tree
from specjax.drafts.published import EAGLE_TREE, MEDUSA_TREE
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree, StaticTree, Template
from specjax.evaluation.conformance import FALSE_ALARM, g_test
from specjax.sampling import Sampling, position_noise, probabilities, split_keys
from tests.conftest import SHAPES

V = 12


def read_table(table, frontier, state):
    """Return the logits of what follows a token: a drafter without memory."""
    return table[frontier.tokens], state


def read_path(table, frontier, states):
    """Return logits and states of a drafter with memory.

    Its state at a node depends on the whole path, so it must read the parent's state.
    """
    states = jnp.take_along_axis(states, frontier.parents, axis=1)
    states = (states * 7 + frontier.tokens + 1) % table.shape[0]
    return table[states], states


@partial(jax.jit, static_argnames=("shape", "read", "sampling"))
def grow(shape, read, table, root, keys, sampling):
    states = jnp.broadcast_to(root[:, None], (root.shape[0], max(shape.width, 1)))
    draft, places, _ = expand(
        shape,
        partial(read, table),
        table[root],
        states,
        root,
        Sampling(sampling).rows(root.shape[0]),
        split_keys(keys, shape.depth),
        jnp.ones(root.shape[0], bool),
    )
    parents = jnp.broadcast_to(draft.parents, draft.tokens.shape)
    return draft.tokens, parents, draft.q, draft.valid, places


def state_after(read, state: int, token: int, size: int) -> int:
    return token if read is read_table else (state * 7 + token + 1) % size


def log_probabilities(table: np.ndarray) -> np.ndarray:
    return np.asarray(
        jnp.asarray(table) - jax.nn.logsumexp(jnp.asarray(table), axis=-1, keepdims=True),
        np.float32,
    )


def best(scores: np.ndarray, count: int) -> list[int]:
    """Return the indices of the largest scores; equal scores in order of their index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def grow_slowly(
    shape: DynamicTree, read, table: np.ndarray, root: int
) -> tuple[list[tuple[int, int]], int]:
    """Grow EAGLE-2's tree node by node.

    Return ``(token, parent)`` of every node, and the number of nodes whose score equals their
    parent's.
    """
    logp = log_probabilities(table)
    candidates = []  # (score, token, parent candidate or None, state)
    frontier = [(np.float32(0.0), None, root)]  # (score, candidate, state)
    for _ in range(shape.depth):
        level = []
        for score, parent, state in frontier:
            for token in best(logp[state], shape.top_k):
                after = state_after(read, state, token, len(table))
                level.append((np.float32(score + logp[state][token]), token, parent, after))
        first = len(candidates)
        candidates += level
        chosen = best([score for score, *_ in level], shape.top_k)
        frontier = [(level[i][0], first + i, level[i][3]) for i in chosen]
    chosen_nodes = sorted(best([score for score, *_ in candidates], shape.nodes - 1))
    node_of = {None: 0} | {candidate: node for node, candidate in enumerate(chosen_nodes, 1)}
    ties = sum(
        parent is not None and score == candidates[parent][0]
        for score, _, parent, _ in (candidates[i] for i in chosen_nodes)
    )
    nodes = [(candidates[i][1], node_of[candidates[i][2]]) for i in chosen_nodes]
    return [(root, -1), *nodes], ties


def tables(ties: bool) -> np.ndarray:
    rng = np.random.default_rng(3)
    if ties:
        # Logits of only three values, in random order, cause ties among siblings and between
        # branches. In odd rows a single logit is 60: the log probability of that child is 0 in
        # float32, so that it ties with its parent.
        value_counts = ([6, 4, 2], [6, 5, 1])
        return np.stack(
            [
                rng.permutation(np.repeat([0.0, 2.0, 60.0], value_counts[row % 2]))
                for row in range(V)
            ]
        ).astype(np.float32)
    return rng.normal(size=(V, V)).astype(np.float32) * 2


@pytest.mark.full_except("read_path-random-dynamic tree, 14 nodes, 4 deep")
@pytest.mark.parametrize(
    "shape",
    [DynamicTree(3, 4, 14), DynamicTree(4, 3, 20), DynamicTree(10, 7, 60), DynamicTree(5, 1, 4)],
    ids=str,
)
@pytest.mark.parametrize("ties", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("read", [read_table, read_path])
def test_a_dynamic_tree_is_the_reference_node_for_node(shape, ties, read) -> None:
    table = tables(ties)
    roots = jnp.arange(V)
    tokens, parents, q, valid, places = grow(
        shape, read, jnp.asarray(table), roots, jax.random.split(jax.random.key(0), V), 0.0
    )
    assert q is None
    assert np.all(valid)
    branching_trees = equal_to_parents = 0
    for row in range(V):
        expected, equal = grow_slowly(shape, read, table, row)
        equal_to_parents += equal
        assert list(zip(tokens[row].tolist(), parents[row].tolist(), strict=True)) == expected
        branching_trees += len({parent for _, parent in expected}) < len(expected)
        check_places(np.asarray(parents[row]), np.asarray(places[row]), shape)
    assert branching_trees == V
    assert (equal_to_parents > 0) == (ties and shape.depth > 1)


def check_places(parents: np.ndarray, places: np.ndarray, shape) -> None:
    """Check that every node with a child has a place, an index among the nodes read.

    No two nodes have the same place, and ``place // width`` is the level of the node.
    """
    depths = tree.depths(parents)
    assert set(parents[1:]) - {0} <= set(np.flatnonzero(places >= 0))
    read = places[places >= 0]
    assert len(set(read)) == len(read)
    np.testing.assert_array_equal(read // shape.width, depths[places >= 0] - 1)


@pytest.mark.full
@pytest.mark.parametrize(
    "choices",
    [EAGLE_TREE, MEDUSA_TREE, ((1,), (1, 2), (0,), (1, 2, 0))],
    ids=["eagle", "medusa", "gaps"],
)
@pytest.mark.parametrize("read", [read_table, read_path])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_static_tree_takes_each_rank_from_its_parent(choices, read, temperature) -> None:
    """Check that children are chosen, not drawn, at any temperature."""
    table, shape = tables(ties=False), StaticTree(choices)
    tokens, parents, q, valid, places = grow(
        shape,
        read,
        jnp.asarray(table),
        jnp.arange(V),
        jax.random.split(jax.random.key(0), V),
        temperature,
    )
    assert q is None
    assert valid is None
    check_places(np.asarray(parents[0]), np.asarray(places), shape)
    for row in range(V):
        states, token_of = {(): row}, {(): row}
        for path in choices:
            state = states[path[:-1]]
            token_of[path] = best(table[state], path[-1] + 1)[-1]
            states[path] = state_after(read, state, token_of[path], V)
        assert tokens[row].tolist() == list(token_of.values())


def test_drawn_siblings_are_a_draw_without_replacement() -> None:
    """Check the joint distribution of ordered siblings.

    The q of nodes 1 to 3 is the distribution that their children were drawn from.
    """
    table, shape, rows = tables(ties=False)[:, :4] * 0.7, SampledTree((3, 2)), 100_000
    table = table[:4]
    root = jnp.zeros(rows, jnp.int32)
    tokens, parents, q, valid, _ = grow(
        shape, read_table, jnp.asarray(table), root, jax.random.split(jax.random.key(1), rows), 1.0
    )
    assert np.all(valid)
    p = np.asarray(probabilities(jnp.asarray(table), Sampling().rows(4)), np.float64)

    def probabilities_of_ordered_draws(q: np.ndarray, count: int) -> np.ndarray:
        """Return the probability of each sequence of ``count`` different tokens, flattened."""
        joint = np.zeros((4,) * count)
        for sequence in np.ndindex(joint.shape):
            if len(set(sequence)) == count:
                remaining, probability = 1.0, 1.0
                for token in sequence:
                    probability *= q[token] / remaining
                    remaining -= q[token]
                joint[sequence] = probability
        return joint.ravel()

    siblings = np.asarray(tokens[:, 1:4])
    counts = np.bincount(siblings @ np.array([16, 4, 1]), minlength=64)
    assert g_test(counts, probabilities_of_ordered_draws(p[0], 3)) >= FALSE_ALARM
    for node in (1, 2, 3):
        children = np.asarray(tokens)[:, np.flatnonzero(np.asarray(parents[0]) == node)]
        for token in range(4):
            below = children[siblings[:, node - 1] == token]
            pairs = np.bincount(below @ [4, 1], minlength=16)
            assert g_test(pairs, probabilities_of_ordered_draws(p[token], 2)) >= FALSE_ALARM
        np.testing.assert_allclose(
            np.asarray(q)[:100, node], p[siblings[:100, node - 1]], atol=1e-6
        )


def draft_with_depth_logits(shape, logits, root, keys, rows, at_every_node=False):
    """Return a draft of a drafter whose logits depend on the depth only.

    With ``at_every_node`` it is a draft of `expand`, which reads the logits at every node.
    """
    keys, active = split_keys(keys, shape.depth), jnp.ones(len(root), bool)

    def read(frontier, _):
        level = jnp.take(logits, frontier.depth, axis=1)[:, None]
        return jnp.broadcast_to(level, (*frontier.tokens.shape, logits.shape[-1])), ()

    if at_every_node:
        return expand(shape, read, logits[:, 0], (), root, rows, keys, active)[0]
    return expand_by_depth(shape, logits, root, rows, keys, active)


@pytest.mark.full
def test_a_dynamic_tree_by_depth_holds_the_best_of_all_paths() -> None:
    """Check that the tree holds the 36 best of all paths of up to 3 tokens.

    Each token of a path is among the 4 likeliest of its depth.
    """
    shape, rng = DynamicTree(4, 3, 37), np.random.default_rng(5)
    logits = jnp.asarray(rng.normal(size=(2, 3, V)) * 0.5, jnp.float32)
    rows, root = Sampling(0.0).rows(2), jnp.arange(2)
    draft = jax.jit(partial(draft_with_depth_logits, shape))(
        logits, root, jax.random.split(jax.random.key(0), 2), rows
    )
    for row in range(2):
        log_q = np.asarray(jax.nn.log_softmax(logits[row]))
        likeliest = [np.argsort(-log_q[depth])[:4].tolist() for depth in range(3)]
        paths = [path for depth in range(1, 4) for path in itertools.product(*likeliest[:depth])]
        scored = sorted(
            paths, key=lambda path: -sum(log_q[depth, token] for depth, token in enumerate(path))
        )
        tokens, parents = np.asarray(draft.tokens[row]), np.asarray(draft.parents[row])
        path_of = {0: ()}
        for node in range(1, 37):
            path_of[node] = (*path_of[parents[node]], int(tokens[node]))
        assert set(path_of.values()) - {()} == set(scored[:36])
    level_by_level = jax.jit(partial(draft_with_depth_logits, shape, at_every_node=True))(
        logits, root, jax.random.split(jax.random.key(0), 2), rows
    )
    # `expand` reads only the 4 best nodes of each level, so it misses some of the 36. Otherwise
    # this test would not distinguish the two functions.
    assert not np.array_equal(level_by_level.tokens, draft.tokens)


BY_DEPTH = [
    Chain(4),
    Chain(4, stop_below=0.7),
    StaticTree(((0,), (1,), (1, 2), (1, 0), (1, 0, 1))),
    DynamicTree(3, 4, 6),
]


@pytest.mark.full
@pytest.mark.thorough_except("greedy-chain of 4")
@pytest.mark.parametrize("shape", BY_DEPTH, ids=str)
@pytest.mark.parametrize("how", ["greedy", "coupled", "drawn"])
def test_expand_by_depth_equals_expand_with_the_same_logits_at_every_node_of_a_depth(
    shape, how
) -> None:
    rng, rows = np.random.default_rng(0), 6
    logits = jnp.asarray(rng.normal(size=(rows, shape.depth, V)) * 2, jnp.float32)
    root = jnp.arange(rows)
    temperature = 0.0 if how == "greedy" else (0.7, 1.0, 0.0, 1.3, 1.0, 0.2)
    settings = Sampling(temperature=temperature, top_p=0.9)
    sampling = settings.rows(rows, "coupled" if how == "coupled" else "independent")
    keys = jax.random.split(jax.random.key(4), rows)
    quick, slow = (
        jax.jit(partial(draft_with_depth_logits, shape, at_every_node=at_every_node))(
            logits, root, keys, sampling
        )
        for at_every_node in (False, True)
    )
    is_valid = np.ones(slow.tokens.shape, bool) if slow.valid is None else np.asarray(slow.valid)
    assert (quick.valid is None) == (slow.valid is None)
    if getattr(shape, "stop_below", 0) and slow.valid is not None:
        assert 0 < is_valid[:, 1:].mean() < 1, "all chains stop, or none: this tests nothing"
    np.testing.assert_array_equal(
        np.where(is_valid, quick.tokens, -1), np.where(is_valid, slow.tokens, -1)
    )
    np.testing.assert_array_equal(quick.parents, slow.parents)
    if slow.valid is not None:
        np.testing.assert_array_equal(quick.valid, slow.valid)
    assert (quick.q is None) == (slow.q is None)
    if slow.q is not None:
        # After a chain has stopped, `expand_by_depth` still computes q, and `expand` does not.
        is_drafted = (
            is_valid[:, :-1] if isinstance(shape, Chain) else np.ones_like(is_valid[:, :-1])
        )
        np.testing.assert_allclose(
            quick.q[:, :-1] * is_drafted[..., None],
            slow.q[:, :-1] * is_drafted[..., None],
            atol=1e-6,
        )


@pytest.mark.full
def test_children_that_are_drawn_once_for_a_depth_are_drawn_without_replacement() -> None:
    """Check the joint distribution of the children of the root and of node 1.

    Both pairs are drawn without replacement, and independently of each other.
    """
    rows, shape = 60_000, SampledTree((2, 2))
    p = np.array([[0.5, 0.3, 0.2], [0.1, 0.3, 0.6]])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (rows, 2, 3))
    keys = jax.random.split(jax.random.key(11), rows)
    draft = jax.jit(partial(draft_with_depth_logits, shape))(
        logits, jnp.zeros(rows, int), keys, Sampling(1.0).rows(rows)
    )
    tokens = np.asarray(draft.tokens)
    parents = np.asarray(draft.parents)
    parents = parents if parents.ndim == 1 else parents[0]
    first, second = (np.flatnonzero(parents == parent) for parent in (0, 1))
    expected = {}
    for a, b, c, d in np.ndindex(3, 3, 3, 3):
        if a != b and c != d:
            of_first = p[0][a] * p[0][b] / (1 - p[0][a])
            expected[a, b, c, d] = of_first * p[1][c] * p[1][d] / (1 - p[1][c])
    outcomes = [tuple(row) for row in tokens[:, [*first, *second]].tolist()]
    assert set(outcomes) <= set(expected)
    counts = np.array([outcomes.count(outcome) for outcome in expected])
    assert g_test(counts, np.array(list(expected.values()))) > FALSE_ALARM
    np.testing.assert_allclose(draft.q[0, 0], p[0], atol=1e-6)
    np.testing.assert_allclose(draft.q[0, 1], p[1], atol=1e-6)


@pytest.mark.full_except("truncation1")
@pytest.mark.parametrize("truncation", [{"top_k": 2}, {"top_p": 0.01}, {"min_p": 1.0}, {}])
def test_coupled_children_are_those_that_truncation_leaves_and_then_the_next_likely_ones(
    truncation,
) -> None:
    """Check that the children are first the tokens that truncation keeps, then those it removes.

    Within each group they are in the order of log q plus noise. The second group is needed because
    the target's truncation may keep other tokens than the drafter's.
    """
    rows, count = 40, 4
    logits = np.random.default_rng(0).normal(size=(rows, V)).astype(np.float32) * 2
    keys = jax.random.split(jax.random.key(0), rows)
    sampling = Sampling(temperature=0.8, **truncation).rows(rows, "coupled")
    shape = StaticTree(tuple((rank,) for rank in range(count)))
    offered = candidates.offered_by(
        shape, jnp.asarray(logits)[:, None], jnp.zeros((), int), sampling, keys, None
    )
    noisy = logits / 0.8 + np.asarray(position_noise(keys, V))
    is_kept = np.asarray(probabilities(jnp.asarray(logits), sampling)) > 0
    assert (is_kept.sum(axis=1) < count).all() == bool(truncation)
    order = np.lexsort((-noisy, ~is_kept), axis=1)
    np.testing.assert_array_equal(offered.tokens[:, 0], order[:, :count])


@pytest.mark.full
def test_siblings_beyond_what_q_can_give_are_not_drafted() -> None:
    table = np.full((V, V), -np.inf, np.float32)
    table[:, [2, 7]] = 1.0
    keys = jax.random.split(jax.random.key(0), 3)
    tokens, parents, _, valid, _ = grow(
        SampledTree((3, 1)), read_table, jnp.asarray(table), jnp.arange(3), keys, 1.0
    )
    for row in range(3):
        assert set(tokens[row, 1:3].tolist()) == {2, 7}
        np.testing.assert_array_equal(valid[row], [True, True, True, False, True, True, False])
    np.testing.assert_array_equal(parents[0], [-1, 0, 0, 0, 1, 2, 3])


def test_only_a_chain_that_may_stop_asks_after_each_level_whether_to_go_on() -> None:
    """Check that only a chain with `stop_below` has a loop whose end depends on data.

    Its condition is ``any(going)``, a reduce_or in the jaxpr. All other loops have a fixed number
    of iterations, so a GPU does not wait for its host after each of them.
    """
    table, root = jnp.zeros((V, V)), jnp.zeros(2, jnp.int32)
    keys = jax.random.split(jax.random.key(0), 2)
    for name, shape in SHAPES.items():
        traced = jax.make_jaxpr(partial(grow, shape, read_table, sampling=0.0))(table, root, keys)
        assert ("reduce_or" in str(traced)) == (name == "adaptive"), name


# --- the example of the docstrings ----------------------------------------------------------------

EXAMPLE = StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)))


def columns(text: str, first: str) -> dict[str, list[str]]:
    """Return the cells of a table in a docstring, by the label of their row.

    The label of the table's first row is ``first``.
    """
    table = re.search(rf"^ +{first}  .*?\n\n", text, re.MULTILINE | re.DOTALL)[0]
    rows = [re.split(r" {2,}", line.strip()) for line in table.strip().splitlines()]
    return {name: cells for name, *cells in rows}


@dataclass(frozen=True)
class TableModel:
    """A model whose logits are a table, and whose KV entries are the tokens that it reads.

    It has the methods of a model that drafting uses.
    """

    table: jax.Array

    def new_scratch(self, slots: int):
        return ((jnp.zeros((1, 1, slots, 1)),),)

    def score(self, tokens, cache, **_):
        values = tokens[..., None].astype(jnp.float32)
        return SimpleNamespace(logits=self.table[tokens], hidden=values), ((values[:, None],),)


@pytest.fixture(scope="module")
def example():
    """Grow `EXAMPLE`, and return its `_Growth`, the frontiers by level, and the final scratch.

    The growth is internal to `expand`, so `_fixed` is patched to collect it.
    """
    ids, grown, fixed = np.arange(V), [], expansion._fixed
    table = np.full((V, V), 1 / 4 / (V - 2))
    table[ids, (ids + 1) % V], table[ids, (ids + 2) % V] = 1 / 2, 1 / 4
    model, cache = TableModel(jnp.log(table)), SimpleNamespace(length=jnp.zeros(1, jnp.int32))

    def read(frontier, state):
        scratch, frontiers = state
        logits, scratch = expansion.read_nodes(model, cache, frontier, scratch)
        return logits, (
            scratch,
            jax.tree.map(
                lambda levels, new: levels.at[frontier.depth - 1].set(new), frontiers, frontier
            ),
        )

    @jax.jit
    def run(root, keys):
        no_tokens = jnp.zeros((2, 1, 2), jnp.int32)
        visible = jnp.zeros((2, 1, 2, EXAMPLE.read_slots), bool)
        state = (
            model.new_scratch(1 + EXAMPLE.read_slots),
            expansion.Frontier(no_tokens, jnp.zeros(2, jnp.int32), no_tokens, visible),
        )
        sampling, active = Sampling(0.0).rows(1), jnp.ones(1, bool)
        _, _, (scratch, frontiers) = expand(
            EXAMPLE, read, model.table[root], state, root, sampling, keys, active
        )
        return grown[0], frontiers, scratch[0][0].ravel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            expansion,
            "_fixed",
            lambda shape, growth, root: grown.append(growth) or fixed(shape, growth, root),
        )
        return run(
            jnp.zeros(1, jnp.int32),
            split_keys(jax.random.split(jax.random.key(0), 1), EXAMPLE.depth),
        )


def test_the_numbers_of_a_template_are_those_of_its_example(example) -> None:
    shown = columns(Template.__doc__, "node")
    assert shown["node"] == [str(node) for node in range(EXAMPLE.nodes)]
    assert shown["path"] == ["()", *(",".join(map(str, path)) for path in EXAMPLE.choices)]
    template = EXAMPLE.template
    per_level = template.width * template.branching
    assert (template.width, template.branching) == (2, 2)
    assert shown["candidate over all levels"] == ["-", *map(str, template.source)]
    assert shown["candidate within its level"] == ["-", *map(str, template.source % per_level)]
    assert shown["place among the nodes read"] == [
        "-" if place < 0 else str(place) for place in template.places
    ]
    assert template.parents.tolist() == [-1, 0, 0, 1, 2, 2, 4]
    assert template.frontier.tolist() == [[0, 1], [2, 0]]

    growth, _, scratch = example
    tokens = [0, *growth.tokens[:, 0].ravel()[template.source].tolist()]
    in_slots = {
        int(slot): token
        for slot, token in zip(shown["slot of scratch"], tokens, strict=True)
        if slot != "-"
    }
    filler = {4: growth.tokens[1, 0, 0]}
    assert dict(enumerate(scratch.tolist())) == in_slots | filler == {0: 0, 1: 1, 2: 2, 3: 3, 4: 2}


def test_what_is_held_while_the_example_grows_is_what_its_docstring_shows(example) -> None:
    shown = columns(inspect.getsource(expand), "after level")
    growth, frontiers, _ = example
    assert shown["after level"] == ["0", "1", "2"]
    for level in range(3):
        np.testing.assert_array_equal(
            growth.tokens[level, 0], [int(cell) for cell in shown["tokens"][level].split()]
        )
        scores = [float(Fraction(cell)) for cell in shown["scores"][level].split()]
        np.testing.assert_allclose(jnp.exp(growth.scores[level, 0]), scores, rtol=1e-5)
        np.testing.assert_array_equal(
            growth.picked[level, 0], [int(cell) for cell in shown["picked"][level].split()]
        )
    fields = [name for name in shown if name.startswith("frontier.")]
    assert len(fields) == 3
    for name in fields:
        field = np.asarray(getattr(frontiers, name.removeprefix("frontier.")))
        values = field[:, 0].astype(int)  # [level, F] or [level, F, R]
        assert len(shown[name]) == len(values) == 2
        for level, of_level in enumerate(values.reshape(2, 2, -1)):
            assert ["".join(map(str, node)) for node in of_level] == shown[name][level].split(), (
                name,
                level,
            )


@pytest.mark.parametrize("how", ["greedy", "coupled", "drawn"])
def test_a_vocabulary_of_its_own_is_the_targets_without_the_rest(how) -> None:
    """Check that a drafter with a reduced vocabulary drafts as one with the whole vocabulary.

    The other logits of the whole vocabulary are -1e9. Both have the same ids and the same noise for
    an id, and q is 0 for all tokens that cannot be drafted.
    """
    ids, rows = np.array([7, 1, 4, 10, 5]), 6
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 1, len(ids))), jnp.float32)
    whole = jnp.full((rows, 1, V), -1e9).at[..., ids].set(logits)
    keys = jax.random.split(jax.random.key(0), rows)
    shape = SampledTree((3,)) if how == "drawn" else StaticTree(((0,), (1,)))
    sampling = Sampling(0.0 if how == "greedy" else 1.0).rows(
        rows, "coupled" if how == "coupled" else "independent"
    )
    vocabulary = candidates.Vocabulary(jnp.asarray(ids), size=V)
    reduced, complete = (
        candidates.offered_by(shape, x, jnp.zeros((), int), sampling, keys, of_drafter)
        for x, of_drafter in ((logits, vocabulary), (whole, None))
    )
    assert np.isin(reduced.tokens, ids).all()
    if how == "drawn":
        np.testing.assert_allclose(vocabulary.widen(reduced.q), complete.q, atol=1e-6)
    else:
        np.testing.assert_array_equal(reduced.tokens, complete.tokens)
        np.testing.assert_allclose(reduced.scores, complete.scores, atol=1e-5)
