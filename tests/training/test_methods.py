"""The objectives of the methods that train whole models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import losses
from specjax.training.methods import Distill, Lm
from specjax.training.objectives.windows import forward
from tests.conftest import tiny_target

TARGET = tiny_target(num_layers=1)


def batch_of(documents: list[list[int]], mask: list[int] | None = None) -> dict:
    tokens = [t for d in documents for t in d]
    owner = [i for i, d in enumerate(documents) for _ in d]
    counted = np.ones(len(tokens) - 1, bool) if mask is None else np.array(mask, bool)
    return {
        "tokens": jnp.array([tokens]),
        "segments": jnp.array([owner]),
        "loss_mask": jnp.asarray(counted[None]),
    }


def test_documents_of_a_window_do_not_see_each_other() -> None:
    @jax.jit
    def both():
        packed = forward(TARGET, batch_of([[1, 2, 3], [4, 5, 6]])).logits
        alone, _ = TARGET.forward(jnp.array([[4, 5]]), positions=jnp.array([[3, 4]]))
        return packed[:, 3:], alone.logits

    np.testing.assert_allclose(*both(), atol=1e-4)


@pytest.fixture(scope="module")
def lm():
    return jax.jit(Lm().objective)


def test_lm_loss_of_a_uniform_model_is_log_vocabulary(lm) -> None:
    uniform = jax.tree.map(jnp.zeros_like, TARGET)
    loss, _ = lm(uniform, batch_of([[1, 2, 3, 4], [5, 6]]), None)
    np.testing.assert_allclose(loss, np.log(11), atol=1e-4)


def test_labels_outside_the_mask_change_nothing(lm) -> None:
    mask = [0, 1, 1, 0, 0]
    batch = batch_of([[1, 2, 3, 4, 5, 6]], mask)
    loss, metrics = lm(TARGET, batch, None)
    logits = jax.jit(forward)(TARGET, batch).logits
    terms = np.asarray(losses.cross_entropy(logits, batch["tokens"][:, 1:]))[0]
    np.testing.assert_allclose(loss, (terms[1] + terms[2]) / 5, rtol=1e-5)
    hits = np.argmax(logits, -1)[0] == np.arange(2, 7)
    np.testing.assert_allclose(metrics["accuracy"], (float(hits[1]) + hits[2]) / 2, rtol=1e-6)
    # The last token is only a label, outside the mask.
    other_loss, _ = lm(TARGET, batch_of([[1, 2, 3, 4, 5, 9]], mask), None)
    np.testing.assert_array_equal(other_loss, loss)


def test_distilling_from_oneself_costs_nothing_and_what_is_masked_never_does() -> None:
    distill = jax.jit(Distill().objective)
    batch = batch_of([[1, 2, 3, 4], [5, 6]])
    loss, metrics = distill(TARGET, batch, TARGET)
    np.testing.assert_allclose(loss, 0, atol=1e-4)
    np.testing.assert_allclose(metrics["acceptance"], 1, atol=1e-4)
    assert metrics["agreement"] == 1
    student = tiny_target(seed=1, num_layers=1)
    first, _ = distill(student, batch, TARGET)
    masked, metrics = distill(student, batch_of([[1, 2, 3, 4], [5, 6]], [0, 0, 0, 0, 0]), TARGET)
    assert first > 0.1
    assert masked == metrics["acceptance"] == metrics["agreement"] == 0
