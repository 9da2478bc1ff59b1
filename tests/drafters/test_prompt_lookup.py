"""Compare the search on the device with a slow, obvious one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import PromptLookup
from specjax.drafters.text_search import RowTexts
from specjax.drafts.shapes import Chain
from specjax.sampling import Sampling

GREEDY = Sampling(temperature=0.0)


def oracle(text: list[int], max_ngram: int, length: int) -> list[int]:
    """Return the tokens after the latest occurrence of the longest suffix that occurs earlier.

    They are repeated up to ``length`` tokens.
    """
    for n in range(min(max_ngram, len(text) - 1), 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                followed = text[start + n :]
                return (followed * length)[:length]
    return []


@pytest.mark.full
@pytest.mark.parametrize("vocab", [2, 4, 30])  # token 0 is an ordinary token
@pytest.mark.parametrize("max_ngram", [1, 3])
def test_search_equals_the_oracle(vocab, max_ngram) -> None:
    rng = np.random.default_rng(vocab)
    rows, capacity = 200, 24
    drafter = PromptLookup(max_ngram=max_ngram, draft=Chain(4))
    tokens = rng.integers(0, vocab, (rows, capacity))  # arbitrary beyond a row's length
    lengths = rng.integers(1, capacity, rows)
    state = RowTexts(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths - 1))
    root = jnp.asarray(tokens[np.arange(rows), lengths - 1])
    keys = jax.random.split(jax.random.key(0), rows)
    draft, _ = drafter.propose(None, state, root, GREEDY.rows(rows), keys, jnp.ones(rows, bool))
    assert draft.q is None
    matches = 0
    for row in range(rows):
        expected = oracle(tokens[row, : lengths[row]].tolist(), max_ngram, 4)
        drafted = np.asarray(draft.drafted[row])
        assert np.asarray(draft.tokens[row, 1:])[drafted].tolist() == expected
        assert drafted.tolist() == [i < len(expected) for i in range(4)]
        matches += bool(expected)
    assert matches > 0


@pytest.mark.full
def test_the_state_follows_the_text(target) -> None:
    """Check after every step that the drafter's copy of the text equals the engine's.

    Rows have different lengths.
    """
    drafter = PromptLookup(draft=Chain(3))
    prompts = np.array([[1, 4, 2, 4, 2, 7], [3, 3, 0, 0, 0, 0]])
    _, state = decoding.start(
        target, drafter, prompts, np.array([6, 2]), GenerationOptions(max_new_tokens=30)
    )
    advance = jax.jit(lambda state: decoding.step(target, drafter, state))
    accepted = 0
    for _ in range(15):
        state, info = advance(state)
        accepted += int(info.accepted.sum())
        np.testing.assert_array_equal(state.drafter.lengths, state.lengths - 1)  # all but the root
        for row, length in enumerate(np.asarray(state.lengths)):
            np.testing.assert_array_equal(
                state.drafter.tokens[row, : length - 1], state.tokens[row, : length - 1]
            )
    assert accepted > 0


@pytest.mark.full
def test_the_root_is_the_first_node() -> None:
    assert look_up([7, 8, 7], length=2) == [7, 8, 7]


def look_up(text: list[int], length: int) -> list[int]:
    """Return the draft after ``text``, starting with its last token."""
    state = RowTexts(tokens=jnp.array([[*text[:-1], 0]]), lengths=jnp.array([len(text) - 1]))
    draft, _ = PromptLookup(draft=Chain(length)).propose(
        None,
        state,
        jnp.array(text[-1:]),
        GREEDY.rows(1),
        jax.random.split(jax.random.key(0), 1),
        jnp.ones(1, bool),
    )
    return draft.tokens[0][: 1 + int(draft.length[0])].tolist()


@pytest.mark.full
def test_a_text_that_repeats_itself_is_copied_beyond_its_end() -> None:
    assert look_up([7, 7, 7, 7], length=8) == [7] * 9
    assert look_up([5, 1, 2, 3, 1, 2, 3], length=5) == [3, 1, 2, 3, 1, 2]
