"""The draft model's own cache, against reading the whole text again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import engine
from specjax.drafters import DraftModel, EarlyExit
from specjax.errors import InputError
from specjax.sampling import Sampling, probabilities
from specjax.tree import Chain
from tests.conftest import tiny_target

PROMPTS = np.array([[1, 4, 2, 4, 2, 7], [3, 0, 0, 0, 0, 0], [5, 9, 10, 0, 0, 0]])
LENGTHS = np.array([6, 1, 3])
SAMPLING = Sampling(temperature=0.8)


@pytest.mark.parametrize("kind", ["unlike the target", "the target itself"])
def test_q_is_the_models_own_distribution_after_every_step(target, kind) -> None:
    """Through accepted, partly accepted and fully accepted drafts, every q equals the one computed without a cache."""
    model = target if kind == "the target itself" else tiny_target(seed=5, num_layers=1)
    drafter = DraftModel(model=model, draft=Chain(3))
    _, state = engine._start(target, drafter, PROMPTS, LENGTHS, 40, SAMPLING, None, (), "block")
    rows = SAMPLING.rows(3)
    propose = jax.jit(drafter.propose)
    advance = jax.jit(lambda state: engine.step(target, drafter, state))
    counts = set()
    for _ in range(8):
        root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]
        draft, _ = propose(target, state.drafter, root, rows, state.keys)
        for row, length in enumerate(np.asarray(state.lengths)):
            text = np.concatenate([state.tokens[row, :length], draft.tokens[row, 1:]])
            logits = model.forward(jnp.asarray(text)[None])[0].logits[0]
            expected = probabilities(logits[None], SAMPLING.rows(1))[0, length - 1 : length + 2]
            np.testing.assert_allclose(draft.q[row, :3], expected, atol=1e-5)
        np.testing.assert_array_equal(draft.q[:, 3], 0)  # the last node has no child
        state, info = advance(state)
        counts |= set(np.asarray(info.emitted).tolist())
    assert counts == {4} if kind == "the target itself" else len(counts) > 1


def test_early_exit_drafts_with_the_first_layers(target) -> None:
    drafter = EarlyExit(layers=2, draft=Chain(3))
    _, state = engine._start(target, drafter, PROMPTS, LENGTHS, 40, SAMPLING, None, (), "block")
    advance = jax.jit(lambda state: engine.step(target, drafter, state))
    for _ in range(4):
        root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]
        lent = state.drafter.replace(cache=state.cache)
        draft, after = drafter.propose(target, lent, root, SAMPLING.rows(3), state.keys)
        np.testing.assert_array_equal(after.cache.length, state.cache.length)
        for row, length in enumerate(np.asarray(state.lengths)):
            text = np.concatenate([state.tokens[row, :length], draft.tokens[row, 1:]])
            logits = target.forward(jnp.asarray(text)[None], layers=2)[0].logits[0]
            expected = probabilities(logits[None], SAMPLING.rows(1))[0, length - 1 : length + 2]
            np.testing.assert_allclose(draft.q[row, :3], expected, atol=1e-5)
        state, _ = advance(state)


def test_init_and_round_trip(target, tmp_path) -> None:
    drafter = DraftModel.init(target, jax.random.key(0), draft=Chain(2), hidden_size=8)
    assert drafter.model.config.vocab_size == target.config.vocab_size
    assert drafter.model.config.num_layers == 1
    drafter.save_pretrained(tmp_path)
    again = DraftModel.from_pretrained(tmp_path, draft=Chain(2))
    jax.tree.map(np.testing.assert_array_equal, drafter.model.params, again.model.params)
    drafter.check(target)
    with pytest.raises(InputError, match="vocabulary"):
        drafter.check(tiny_target(vocab_size=12))
