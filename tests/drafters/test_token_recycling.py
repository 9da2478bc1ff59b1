"""Compare the table and the drafts with slow, obvious ones."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import Draft, TokenRecycling, Verdict
from specjax.drafters.base import Committed, LikelyTokens
from specjax.drafters.methods.token_recycling import (
    AdjacencyTable,
    _newest_of_each_token,
    _with_pairs,
)
from specjax.drafters.registry import load_drafter
from specjax.drafters.suffix_index import SuffixIndex
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree, StaticTree
from specjax.errors import InputError
from specjax.sampling import Rule, Sampling, noise_of_rows, position_keys
from tests.conftest import tiny_config, tiny_target

TREE = DynamicTree(top_k=3, depth=3, nodes=10)
ROWS = np.array([[1, 4, 2, 4, 2, 7], [3, 3, 0, 0, 0, 0]])
LENGTHS = np.array([6, 2])


def table_of(lists: dict[int, list[tuple[int, float]]], vocab: int = 11, size: int = 3):
    """Return the table of one row that has the given next tokens and probabilities."""
    tokens = np.full((1, vocab, size), -1, np.int32)
    logprobs = np.full((1, vocab, size), -np.inf, np.float32)
    for token, entries in lists.items():
        for rank, (following, probability) in enumerate(entries):
            tokens[0, token, rank], logprobs[0, token, rank] = following, np.log(probability)
    return AdjacencyTable(jnp.asarray(tokens), jnp.asarray(logprobs))


@partial(jax.jit, static_argnames="rule")
def propose(drafter, table, root, seed=0, rule: Rule = "independent"):
    rows = Sampling(temperature=float(rule == "coupled")).rows(1, rule)
    keys = position_keys(jax.random.split(jax.random.key(seed), 1), jnp.arange(8)[:, None])
    roots = jnp.asarray(root)[None]
    return drafter.propose(tiny_target(), table, roots, rows, keys, jnp.ones(1, bool))[0]


def paths(draft) -> set[tuple[int, ...]]:
    """Return the drafted paths of the first row, as tokens below the root."""
    parents = np.asarray(draft.parents)
    parents = parents if parents.ndim == 1 else parents[0]
    result: dict[int, tuple[int, ...]] = {0: ()}
    drafted = np.asarray(draft.drafted[0])
    for node in range(1, len(parents)):
        if drafted[node - 1] and int(parents[node]) in result:
            result[node] = (*result[int(parents[node])], int(draft.tokens[0, node]))
    return set(result.values()) - {()}


LISTS = {
    5: [(1, 0.5), (2, 0.25), (3, 0.125)],
    1: [(2, 0.75), (0, 0.25)],
    2: [(5, 0.5)],
    0: [(0, 0.9)],
}


def test_a_chain_follows_the_first_of_each_list_and_ends_where_there_is_none() -> None:
    assert paths(propose(TokenRecycling(3, Chain(4)), table_of(LISTS), 5)) == {
        *((1,), (1, 2), (1, 2, 5), (1, 2, 5, 1))
    }
    assert paths(propose(TokenRecycling(3, Chain(4)), table_of(LISTS), 3)) == set()
    ending = table_of({5: [(1, 0.5)], 1: [(9, 0.5)]})
    assert paths(propose(TokenRecycling(3, Chain(4)), ending, 5)) == {(1,), (1, 9)}


def test_a_chain_may_end_where_the_target_was_uncertain() -> None:
    drafter = TokenRecycling(3, Chain(4, stop_below=0.6))
    assert paths(propose(drafter, table_of(LISTS), 5)) == {(1,)}
    assert paths(propose(drafter, table_of(LISTS), 1)) == {(2,), (2, 5)}


def test_a_static_tree_has_the_tokens_by_their_ranks() -> None:
    shape = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0)))
    draft = propose(TokenRecycling(3, shape), table_of(LISTS), 5)
    assert paths(draft) == {(1,), (2,), (3,), (1, 2), (1, 0)}  # nothing is known after 3


def test_a_dynamic_tree_has_the_likeliest_paths() -> None:
    draft = propose(TokenRecycling(3, DynamicTree(3, 3, 5)), table_of(LISTS), 5)
    # 1: 1/2; 1 2: 3/8; 2: 1/4; 1 2 5: 3/16; 3 and 1 0 and 2 5: 1/8.
    assert paths(draft) == {(1,), (1, 2), (2,), (1, 2, 5)}


@pytest.mark.full
def test_with_coupled_sampling_the_children_are_those_that_the_target_is_likely_to_draw() -> None:
    sampling = Sampling(temperature=1.0).rows(1, "coupled")
    probabilities = np.array([0.4, 0.3, 0.2])
    table = table_of({5: list(zip((7, 8, 9), probabilities, strict=True))})
    firsts = set()
    for seed in range(20):
        keys = position_keys(jax.random.split(jax.random.key(seed), 1), jnp.arange(2)[:, None])
        draft = propose(TokenRecycling(3, Chain(1)), table, 5, seed, "coupled")
        noise = np.asarray(noise_of_rows(keys[0], 11, sampling))[0, 7:10]
        expected = 7 + int(np.argmax(np.log(probabilities) + noise))
        assert int(draft.tokens[0, 1]) == expected
        firsts.add(expected)
    assert len(firsts) > 1


def slow_pairs(lists: dict[int, list[int]], text: list[int], size: int) -> dict[int, list[int]]:
    """Return the lists of next tokens after a text, one pair after the other."""
    lists = {token: list(entries) for token, entries in lists.items()}
    for token, following in itertools.pairwise(text):
        before = [entry for entry in lists.get(token, []) if entry != following]
        lists[token] = [following, *before][:size]
    return lists


def lists_of(table: AdjacencyTable, row: int) -> dict[int, list[int]]:
    tokens = np.asarray(table.tokens[row])
    logprobs = np.asarray(table.logprobs[row], np.float32)
    assert ((tokens == -1) == np.isneginf(logprobs)).all()
    return {
        token: [entry for entry in entries if entry >= 0]
        for token, entries in enumerate(tokens.tolist())
        if max(entries) >= 0
    }


@pytest.mark.full
@pytest.mark.parametrize("vocab", [2, 5, 11])
def test_the_pairs_of_a_text_are_stored_as_if_one_came_after_the_other(vocab) -> None:
    rng = np.random.default_rng(vocab)
    rows, width, size = 30, 16, 3
    start = specjax.TokenRecycling(size).start(tiny_target(), rows, 32)
    table, expected = start, [{} for _ in range(rows)]
    for _ in range(2):  # the second text meets the lists of the first
        tokens, lengths = rng.integers(0, vocab, (rows, width)), rng.integers(1, width + 1, rows)
        following = np.roll(tokens, -1, axis=1)
        are_valid = np.arange(width) < lengths[:, None] - 1
        table = _with_pairs(table, *map(jnp.asarray, (tokens, following, are_valid)))
        for row, length in enumerate(lengths):
            expected[row] = slow_pairs(expected[row], tokens[row, :length].tolist(), size)
    for row in range(rows):
        assert lists_of(table, row) == expected[row]
    is_pair = np.asarray(table.tokens) >= 0
    np.testing.assert_allclose(np.asarray(table.logprobs)[is_pair], np.log(0.5), rtol=1e-6)
    assert max(len(entries) for lists in expected for entries in lists.values()) == min(size, vocab)


@pytest.mark.full
def test_a_table_begins_with_the_pairs_of_its_segment() -> None:
    target, answers = tiny_target(), SuffixIndex.empty(segments=2, capacity=13)
    texts = {0: [[7, 7]], 1: [[5, 1, 2], [1, 3, 5], [5, 4, 1, 2]]}
    for segment, parts in texts.items():
        answers = answers.put(segment, SuffixIndex.of(parts, capacity=13))
    drafter = TokenRecycling(2, Chain(2), answers=answers)
    segments = [1, -1, 0]
    table = drafter.in_segment(drafter.start(target, 3, 16), jnp.array(segments))
    for row, segment in enumerate(segments):
        expected: dict[int, list[int]] = {}
        for text in texts.get(segment, []):  # no pair of the end of a text and the next one
            expected = slow_pairs(expected, text, 2)
        assert lists_of(table, row) == expected
    before = drafter.start(target, 3, 16)
    assert drafter.replace(answers=None).in_segment(before, jnp.array(segments)) is before


def test_of_equal_tokens_the_deepest_accepted_node_is_stored() -> None:
    tokens = jnp.array([[7, 3, 4, 3, 7, 4, 4]])
    verdict = Verdict(path=jnp.array([[0, 1, 3]]), count=jnp.array([2]), token=jnp.array([9]))
    was_read = jnp.array([[True] * 6 + [False]])
    stored = np.asarray(_newest_of_each_token(tokens, was_read, verdict))[0]
    # 7: the root, which is accepted; 3: node 1, node 3 is beyond the count; 4: the later of the two
    # that were read.
    assert stored.tolist() == [True, True, False, False, False, True, False]


@pytest.mark.full
def test_likely_tokens_after_every_node_are_stored_and_a_row_that_is_done_keeps_its_table() -> None:
    drafter, target = TokenRecycling(2, Chain(2)), tiny_target()
    state = drafter.start(target, 2, 16)
    draft = Draft.chain(jnp.array([5, 5]), jnp.array([[1, 2], [1, 2]]))
    logits = jax.random.normal(jax.random.key(0), (2, 3, 11))
    likely = LikelyTokens.of(logits, 2)
    likely = replace(likely, logprobs=likely.logprobs.at[0, 2].set(jnp.nan))  # an unread node
    verdict = Verdict(
        path=jnp.zeros((2, 3), jnp.int32), count=jnp.array([1, 0]), token=jnp.array([4, 4])
    )
    committed = Committed(
        tokens=draft.tokens,
        following=draft.tokens,
        output=None,  # pyright: ignore[reportArgumentType]
        entries=(),
        count=verdict.count,
        cache=None,  # pyright: ignore[reportArgumentType]
        likely=likely,
    )
    table = drafter.update(target, state, draft, verdict, committed)
    top = np.argsort(-np.asarray(logits), axis=-1)[..., :2].tolist()
    assert lists_of(table, 0) == {5: top[0][0], 1: top[0][1]}
    assert lists_of(table, 1) == {}


@pytest.mark.full
def test_tokens_that_were_committed_while_it_was_paused_are_stored_as_pairs() -> None:
    drafter, target = TokenRecycling(2, Chain(2)), tiny_target()
    committed = Committed(
        tokens=jnp.array([[5, 1, 5], [5, 1, 5]]),
        following=jnp.array([[1, 5, 2], [1, 5, 2]]),
        output=None,  # pyright: ignore[reportArgumentType]
        entries=(),
        count=jnp.array([3, 1]),
        cache=None,  # pyright: ignore[reportArgumentType]
    )
    draft = Draft.chain(committed.tokens[:, 0], committed.tokens[:, 1:])
    verdict = Verdict(path=jnp.zeros((2, 3), jnp.int32), count=committed.count, token=draft.tokens)
    table = drafter.update(target, drafter.start(target, 2, 16), draft, verdict, committed)
    assert lists_of(table, 0) == {5: [2, 1], 1: [5]}
    assert lists_of(table, 1) == {5: [1]}


@pytest.mark.full
def test_the_table_after_a_step_has_what_a_plain_pass_of_the_target_holds_likely(target) -> None:
    drafter = TokenRecycling(3, TREE)
    _, state = decoding.start(target, drafter, ROWS, LENGTHS, GenerationOptions(max_new_tokens=20))
    assert lists_of(state.drafter, 0) == slow_pairs({}, ROWS[0].tolist(), 3)
    assert lists_of(state.drafter, 1) == {3: [3]}
    step = jax.jit(lambda state: decoding.step(target, drafter, state))
    rejected = 0
    for _ in range(6):
        before = state
        state, info = step(before)
        for row in range(2):
            nodes, parents = np.asarray(info.draft.tokens[row]), np.asarray(info.draft.parents[row])
            drafted = [True, *np.asarray(info.draft.drafted[row]).tolist()]
            text = np.asarray(before.tokens[row, : int(before.lengths[row]) - 1]).tolist()
            after = []
            for node in range(len(nodes)):
                path, at = [], node
                while at >= 0:
                    path, at = [int(nodes[at]), *path], int(parents[at])
                logits = np.asarray(target.forward(np.array([text + path]))[0].logits)[0, -1]
                after.append(np.argsort(-logits)[:3].tolist())
            lists = lists_of(state.drafter, row)
            for node in np.flatnonzero(drafted):
                same = [i for i in np.flatnonzero(drafted) if nodes[i] == nodes[node]]
                assert lists[int(nodes[node])] in [after[i] for i in same]
            rejected += sum(drafted) - int(info.accepted[row]) - 1
    assert rejected > 0  # nodes beside the accepted path were compared too


def test_wrong_settings_are_refused(target) -> None:
    with pytest.raises(InputError, match="successors=0"):
        specjax.generate(target, TokenRecycling(0), [[1]])
    with pytest.raises(InputError, match="looked up and not sampled"):
        specjax.generate(target, TokenRecycling(draft=SampledTree((2, 2))), [[1]])
    with pytest.raises(InputError, match="give successors=3"):
        specjax.generate(target, TokenRecycling(2, TREE), [[1]])


def test_it_is_loaded_by_its_name() -> None:
    assert load_drafter("token-recycling", None, tiny_config()) == TokenRecycling()
    assert load_drafter("token-recycling:5", Chain(2), tiny_config()) == TokenRecycling(5, Chain(2))
    with pytest.raises(InputError, match="token-recycling:SUCCESSORS"):
        load_drafter("token-recycling:0", None, tiny_config())
