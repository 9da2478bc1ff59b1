"""Parts of objectives, each against a loop over windows, places and depths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.transformer import Output
from specjax.training.objectives.ahead import ahead, behind, compared, counted, decayed
from specjax.training.objectives.blocks import DraftedBlocks, dpace, weights_by_depth
from specjax.training.objectives.draft_vocabulary import token_loss, token_values
from specjax.training.objectives.windows import document_mask, positions

OWNERS = np.array([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6]])
MASK = np.random.default_rng(0).random((2, 10)) < 0.8
BATCH = {
    "tokens": jnp.asarray(np.random.default_rng(1).integers(0, 9, OWNERS.shape)),
    "segments": jnp.asarray(OWNERS),
    "loss_mask": jnp.asarray(MASK),
}


def test_a_prediction_counts_where_all_that_it_reads_is_of_one_document_and_its_label_is_under_the_mask() -> (  # noqa: E501, RUF100
    None
):
    """Check that label t + 2 + k counts if its input, token t + 1 + k, is under the mask.

    The label itself may belong to the next document.
    """
    for step in range(4):
        counts = np.asarray(counted(BATCH, step))
        for row, t in np.ndindex(2, 10):
            newest = t + 1 + step
            expects = newest < 10 and MASK[row, newest] and OWNERS[row, t] == OWNERS[row, newest]
            assert counts[row, t] == expects, (step, row, t)


def test_documents_see_themselves_alone_and_know_their_places() -> None:
    visible, place = (
        np.asarray(document_mask(BATCH["segments"])),
        np.asarray(positions(BATCH["segments"])),
    )
    for row in range(2):
        for t in range(11):
            document = [u for u in range(t + 1) if OWNERS[row, u] == OWNERS[row, t]]
            assert np.flatnonzero(visible[row, t]).tolist() == document
            assert place[row, t] == len(document) - 1


@pytest.mark.full
def test_what_goes_ahead_comes_back_behind() -> None:
    numbers = jnp.arange(20.0).reshape(2, 10, 1)
    np.testing.assert_array_equal(ahead(numbers, 3)[:, :7, 0], numbers[:, 3:, 0])
    np.testing.assert_array_equal(behind(ahead(numbers, 2), 2)[:, 2:], numbers[:, 2:])


def test_later_steps_weigh_less_and_are_compared_where_the_target_says_it() -> None:
    values, counting = [jnp.full((2, 10), 10.0**step) for step in range(3)], []

    def loss_of(values: jax.Array, mask: jax.Array) -> jax.Array:
        counting.append(np.asarray(mask))
        # A single label: the mean over 20 positions is the value.
        return jnp.where(jnp.cumsum(mask.ravel()).reshape(mask.shape) == 1, 20 * values, 0.0)

    total, metrics = decayed(BATCH, values, loss_of, 0.5)
    assert total == 1 + 0.5 * 10 + 0.25 * 100 and metrics["loss_2"] == 100
    for step, mask in enumerate(counting):
        np.testing.assert_array_equal(
            mask[:, 1 + step :], np.asarray(counted(BATCH, step))[:, : 9 - step]
        )
        assert not mask[:, : 1 + step].any()


def test_a_prediction_is_compared_where_the_target_predicts_the_same_token() -> None:
    """Step k predicts token t + 2 + k from position t; the target does so from t + 1 + k."""
    positions = jnp.broadcast_to(jnp.arange(10.0), (2, 10))
    distances = compared(
        jnp.zeros(()),
        [positions[..., None]] * 3,
        lambda student, step, states, labels: labels - states[..., 0],
        (positions,),
        lambda positions: positions,
        numbers=1,
    )
    for step, distance in enumerate(distances):
        np.testing.assert_array_equal(distance[:, 1 + step :], 1 + step)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_weights_of_dpace_are_what_the_length_loses_without_a_depth(alpha) -> None:
    rng = np.random.default_rng(0)
    right, depths = rng.random((2, 3, 5)).astype(np.float32), rng.integers(0, 6, (2, 3))
    valid = np.arange(5) < depths[..., None]
    weights = dpace(jnp.asarray(right), jnp.asarray(valid), alpha)
    for row, block in np.ndindex(2, 3):
        count = depths[row, block]
        smooth = [
            (1 - alpha) * chance + alpha for chance in right[row, block, :count].astype(float)
        ]
        slow = [sum(np.prod(smooth[: m + 1]) for m in range(d, count)) for d in range(count)]
        np.testing.assert_allclose(weights[row, block, :count], slow, rtol=1e-5)
        assert not np.any(weights[row, block, count:])


def test_weights_fall_from_one_by_depth() -> None:
    np.testing.assert_allclose(
        weights_by_depth((2, 4), 2.0), np.tile(np.exp([0, -0.5, -1, -1.5]), (2, 1)), rtol=1e-6
    )
    np.testing.assert_array_equal(weights_by_depth((2, 4), 0.0), np.ones((2, 4)))


def test_a_block_is_compared_with_what_comes_after_its_anchor() -> None:
    """Check the tokens of a block.

    The anchor at place t is token t + 1. Depth d has token t + 1 + d, which the target predicts at
    t + d.
    """
    hidden, depth = jnp.arange(20.0).reshape(2, 10, 1), 3
    valid = jnp.asarray(np.random.default_rng(2).random((2, 10, depth)) < 0.5)
    at, output = jnp.array([[4, 0], [1, 5]]), Output(hidden=hidden, taps=hidden, logits=hidden)
    drafted = DraftedBlocks.at(at, BATCH, output, jnp.zeros((2, 2, depth, 1)), valid)
    for row, block, d in np.ndindex(2, 2, depth):
        t = int(at[row, block])
        assert drafted.tokens[row, block, d] == BATCH["tokens"][row, t + 2 + d]
        assert drafted.before[row, block, d] == BATCH["tokens"][row, t + 1 + d]
        assert drafted.hidden[row, block, d, 0] == 10 * row + t + 1 + d
        assert drafted.valid[row, block, d] == valid[row, t, d]


def test_a_token_is_accepted_with_its_chance_among_all_tokens() -> None:
    """Check a drafter that has three of the target's five tokens."""
    rng = np.random.default_rng(0)
    whole, ours, ids = (
        rng.normal(size=(1, 2, 5)) * 2,
        rng.normal(size=(1, 2, 3)) * 2,
        np.array([0, 2, 3]),
    )
    total = np.log(np.exp(whole).sum(-1))
    arguments = (
        jnp.asarray(whole[..., ids], jnp.float32),
        jnp.asarray(total, jnp.float32),
        jnp.asarray(ours, jnp.float32),
    )
    p, q = (
        np.exp(whole - total[..., None])[..., ids],
        np.exp(ours) / np.exp(ours).sum(-1, keepdims=True),
    )
    mask = jnp.ones((1, 2), bool)
    np.testing.assert_allclose(
        token_loss("acceptance", token_values("acceptance", *arguments), mask, 0.0),
        -np.log(np.minimum(p, q).sum(-1)),
        rtol=1e-5,
    )
    scaled = p / p.sum(-1, keepdims=True)
    np.testing.assert_allclose(
        token_loss("cross_entropy", token_values("cross_entropy", *arguments), mask, 0.0),
        -(scaled * np.log(q)).sum(-1),
        rtol=1e-5,
    )
