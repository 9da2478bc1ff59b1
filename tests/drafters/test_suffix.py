"""Compare the drafts from earlier text with slow, obvious ones."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding, sharding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import Suffix
from specjax.drafters.methods.suffix import OWN_OCCURRENCES
from specjax.drafters.suffix_index import SuffixIndex
from specjax.drafters.text_search import RowTexts
from specjax.drafts.shapes import (
    Chain,
    DynamicTree,
    SampledTree,
    StaticTree,
    complete_tree,
)
from specjax.errors import InputError
from specjax.models import params
from specjax.sampling import Sampling, noise_of_rows, position_keys
from tests.conftest import compilations, tiny_target
from tests.drafters.ngrams import NgramDictionary, all_paths, groups_of, shares_below
from tests.drafters.test_suffix_index import random_rows, random_texts
from tests.drafters.test_token_recycling import paths

SAMPLES, ROWS, LONGEST = 4, 30, 64


@partial(jax.jit, static_argnames="rule")
def propose(drafter, texts: RowTexts, seed=0, rule="independent", is_active=True):
    """Draft below the last token of each row."""
    rows = Sampling(temperature=float(rule == "coupled")).rows(len(texts.lengths), rule)
    keys = jax.random.split(jax.random.key(seed), len(texts.lengths))
    keys = position_keys(keys, jnp.broadcast_to(jnp.arange(8)[:, None], (8, len(keys))))
    last = texts.last(1)[:, 0]
    state = replace(texts, lengths=texts.lengths - 1)
    is_active = jnp.broadcast_to(is_active, texts.lengths.shape)
    return drafter.propose(tiny_target(), state, last, rows, keys, is_active)[0]


def texts_of(rows: list[list[int]]) -> RowTexts:
    tokens = np.full((len(rows), LONGEST), 1, np.int32)  # arbitrary beyond a row's length
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = text
    return RowTexts(jnp.asarray(tokens), jnp.array([len(text) for text in rows]))


def cases(seed: int, vocab: int):
    """Return texts for the index, and rows that are not empty."""
    rng = np.random.default_rng(seed)
    texts = random_texts(rng, vocab, count=4, longest=60)
    rows = [[0, *row] for row in random_rows(rng, texts, vocab, ROWS)]
    return texts, rows


def drafted_paths(draft) -> list[set[tuple[int, ...]]]:
    draft = jax.tree.map(np.asarray, draft)
    return [
        paths(jax.tree.map(lambda values, row=row: values[row : row + 1], draft))
        for row in range(draft.tokens.shape[0])
    ]


def check_chain(drafter: Suffix, texts, rows) -> int:
    """Check chains against the n-grams; return the number of drafted tokens."""
    ngrams, total = NgramDictionary(texts), 0
    drafted = drafted_paths(propose(drafter, texts_of(rows)))
    for row, of_row in zip(rows, drafted, strict=True):
        groups = groups_of(row, ngrams, SAMPLES, OWN_OCCURRENCES, drafter.draft_shape.depth)
        path, product = max(of_row, key=len, default=()), 1.0
        assert of_row == {path[: size + 1] for size in range(len(path))}
        for place in range(drafter.draft_shape.depth):
            shares = shares_below(groups, path[:place])
            best = max(shares.values(), default=0.0)
            if place == len(path):  # it ended, and had to
                assert best * product < drafter.least_share + 1e-5
                break
            assert shares[path[place]] > best - 1e-5
            product *= shares[path[place]]
            assert product > drafter.least_share - 1e-5
        total += len(path)
    return total


@pytest.mark.full
@pytest.mark.parametrize("vocab", [2, 3])
def test_a_chain_follows_the_largest_shares(vocab) -> None:
    texts, rows = cases(vocab, vocab)
    drafter = Suffix(SuffixIndex.of(texts, 300), 0.2, SAMPLES, Chain(4))
    assert check_chain(drafter, texts, rows) > ROWS


@pytest.mark.full
def test_without_an_index_the_own_text_alone_is_searched() -> None:
    _, rows = cases(seed=5, vocab=3)
    assert check_chain(Suffix(None, 0.2, SAMPLES, Chain(4)), [], rows) > ROWS


def check_tree(drafter: Suffix, texts, rows) -> int:
    """Check that all paths with enough share are drafted; return their number."""
    ngrams, total = NgramDictionary(texts), 0
    drafted = drafted_paths(propose(drafter, texts_of(rows)))
    for row, of_row in zip(rows, drafted, strict=True):
        depth, least = drafter.draft_shape.depth, drafter.least_share
        groups = groups_of(row, ngrams, SAMPLES, OWN_OCCURRENCES, depth)
        assert all_paths(groups, depth, least + 1e-5).keys() <= of_row
        assert of_row <= all_paths(groups, depth, least - 1e-5).keys()
        total += len(of_row)
    return total


@pytest.mark.full
@pytest.mark.parametrize("vocab", [2, 3])
def test_a_tree_has_all_paths_with_enough_share(vocab) -> None:
    texts, rows = cases(vocab, vocab)
    tree = StaticTree(complete_tree((3, 3, 3)))
    drafter = Suffix(SuffixIndex.of(texts, 300), 0.05, SAMPLES, tree)
    assert check_tree(drafter, texts, rows) > 3 * ROWS


@pytest.mark.thorough
def test_many_random_texts_are_drafted_from_as_by_a_dictionary() -> None:
    for seed in range(150):
        texts, rows = cases(seed, vocab=2 + seed % 4)
        index = SuffixIndex.of(texts, 300)
        check_chain(Suffix(index, 0.2, SAMPLES, Chain(4)), texts, rows)
        check_tree(Suffix(index, 0.05, SAMPLES, StaticTree(complete_tree((6, 6)))), texts, rows)


def draft_after(row: list[int], drafter: Suffix, **options):
    return propose(drafter, texts_of([row]), **options)


@pytest.mark.full
def test_a_dynamic_tree_has_the_best_paths_and_room_at_the_end() -> None:
    # 1 2 is followed by 5 6 twice and by 7 8 once: shares 4/7 and 2/7; below them 6/7 and 3/4.
    index = SuffixIndex.of([[1, 2, 5, 6], [1, 2, 5, 6], [1, 2, 7, 8]], 300)
    drafter = Suffix(index, 0.0, SAMPLES, DynamicTree(2, 2, 4))
    draft = draft_after([1, 2], drafter)
    assert paths(draft) == {(5,), (5, 6), (7,)}
    draft = draft_after([1, 2], drafter.replace(least_share=0.29))
    assert paths(draft) == {(5,), (5, 6)}
    assert draft.is_packed
    assert draft.valid.tolist() == [[True, True, True, False]]
    assert paths(draft_after([2, 1], drafter)) == set()  # nothing is known


def test_the_longer_context_wins_however_often_the_shorter_one_occurs() -> None:
    index = SuffixIndex.of([[3, 1, 2, 9], *[[4, 1, 2, 8]] * 20], 300)
    drafter = Suffix(index, 0.0, SAMPLES, Chain(1))
    assert paths(draft_after([3, 1, 2], drafter)) == {(9,)}
    assert paths(draft_after([1, 2], drafter)) == {(8,)}
    # Of equally long contexts, that in the row's own text.
    assert paths(draft_after([1, 2, 7, 5, 1, 2], drafter)) == {(7,)}


@pytest.mark.full
def test_with_coupled_sampling_the_target_is_likely_to_draw_the_children() -> None:
    index = SuffixIndex.of([[1, 2, 5], [1, 2, 5], [1, 2, 7], [1, 2, 8]], 300)
    sampling, firsts = Sampling(temperature=1.0).rows(1, "coupled"), set()
    shares = np.array([4, 2, 2]) / 9
    for seed in range(20):
        drafter = Suffix(index, 0.0, SAMPLES, Chain(1))
        draft = draft_after([1, 2], drafter, seed=seed, rule="coupled")
        keys = position_keys(jax.random.split(jax.random.key(seed), 1), jnp.arange(2)[:, None])
        noise = np.asarray(noise_of_rows(keys[0], 11, sampling))[0, [5, 7, 8]]
        expected = [5, 7, 8][int(np.argmax(np.log(shares) + noise))]
        assert int(draft.tokens[0, 1]) == expected
        firsts.add(expected)
    assert len(firsts) > 1


@pytest.mark.full
def test_another_index_of_the_same_capacity_compiles_nothing(target) -> None:
    prompts = np.array([[1, 4, 2, 4, 2, 7]])
    plain = specjax.generate(target, None, prompts, max_new_tokens=24)
    drafter = Suffix.of_texts([[5, 6, 7]], 300, draft=DynamicTree(2, 3, 6))
    specjax.generate(target, drafter, prompts, max_new_tokens=24)
    before = compilations()
    drafter = drafter.replace(index=SuffixIndex.of([[4, 2], plain.tokens[0].tolist()], 300))
    result = specjax.generate(target, drafter, prompts, max_new_tokens=24)
    assert compilations() == before
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    assert result.stats.accepted.sum() > 12  # it has the answer


@pytest.mark.thorough
def test_rows_of_a_mesh_have_the_texts_of_plain_decoding(target) -> None:
    mesh = sharding.make_mesh(data=2, model=2)
    places = params.shardings(params.declare(target.config), mesh, target.config.axis_units)
    on_mesh = target.replace(params=jax.device_put(target.params, places), mesh=mesh)
    prompts = np.array([[1, 4, 2, 4, 2, 7], [3, 3, 5, 8, 1, 1]])
    plain = specjax.generate(target, None, prompts, max_new_tokens=10)
    drafter = Suffix.of_texts(plain.tokens.tolist(), draft=Chain(3))
    everywhere = sharding.named(mesh, (), {})
    index = jax.tree.map(lambda values: sharding.put(values, everywhere), drafter.index)
    for placed in (drafter, drafter.replace(index=index)):
        result = specjax.generate(on_mesh, placed, prompts, max_new_tokens=10)
        assert np.array_equal(result.tokens, plain.tokens)
        assert np.all(result.stats.accepted > 5)


@pytest.mark.full
def test_the_state_follows_the_text(target) -> None:
    drafter = Suffix.of_texts([[5, 6, 7]], 300, draft=Chain(2))
    prompts = np.array([[1, 4, 2, 4, 2, 7], [3, 3, 0, 0, 0, 0]])
    options = GenerationOptions(max_new_tokens=20)
    _, state = decoding.start(target, drafter, prompts, np.array([6, 2]), options)
    advance = jax.jit(lambda state: decoding.step(target, drafter, state)[0])
    for _ in range(5):
        state = advance(state)
    for row, length in enumerate(np.asarray(state.lengths)):
        assert state.drafter.lengths[row] == length - 1  # all but the root
        expected = state.tokens[row, : length - 1]
        np.testing.assert_array_equal(state.drafter.tokens[row, : length - 1], expected)


def test_rows_that_have_finished_draft_nothing() -> None:
    index = SuffixIndex.of([[1, 2, 5, 6]], 300)
    drafter = Suffix(index, 0.0, SAMPLES, Chain(1))
    draft = propose(drafter, texts_of([[1, 2], [1, 2]]), is_active=jnp.array([True, False]))
    assert draft.valid.tolist() == [[True, True], [True, False]]


def test_what_cannot_be_is_refused(target) -> None:
    vocab = target.config.vocab_size
    for wrong, message in (
        (Suffix(least_share=1.5), "Suffix(least_share=1.5): must be from 0 to 1"),
        (Suffix(samples=0), "Suffix(samples=0): must be from 1 to 64"),
        (Suffix(samples=65), "Suffix(samples=65): must be from 1 to 64"),
        (
            Suffix.of_texts([[1, vocab]]),
            f"Suffix(index=…): its largest token id is {vocab}, but the target has {vocab} tokens;"
            " give texts of the target's own tokenizer",
        ),
        (Suffix(draft=SampledTree((2, 2))), "looked up and not sampled"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            specjax.generate(target, wrong, [[1]])
    Suffix.of_texts([[1, vocab - 1]]).check(target)
