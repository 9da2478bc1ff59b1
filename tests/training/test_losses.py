"""Losses and objectives against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from specjax.models.transformer import Target
from specjax.training import losses, objectives
from tests.conftest import tiny_config, tiny_target

RNG = np.random.default_rng(0)
LOGITS, TEACHER = jnp.asarray(RNG.normal(size=(2, 3, 5, 11)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(0, 11, (3, 5)))


def as_torch(x: jax.Array) -> torch.Tensor:
    return torch.tensor(np.asarray(x))


def test_cross_entropy_equals_torch() -> None:
    expected = torch.nn.functional.cross_entropy(
        as_torch(LOGITS).flatten(0, 1), as_torch(LABELS).flatten().long(), reduction="none"
    )
    np.testing.assert_allclose(losses.cross_entropy(LOGITS, LABELS).reshape(-1), expected, atol=1e-4)


def test_forward_kl_equals_torch() -> None:
    expected = torch.nn.functional.kl_div(
        torch.log_softmax(as_torch(LOGITS), -1),
        torch.log_softmax(as_torch(TEACHER), -1),
        log_target=True,
        reduction="none",
    ).sum(-1)
    np.testing.assert_allclose(losses.forward_kl(TEACHER, LOGITS), expected, atol=1e-4)


def batch_of(documents: list[list[int]]) -> dict:
    tokens = [t for d in documents for t in d]
    owner = [i for i, d in enumerate(documents) for _ in d]
    return {"tokens": jnp.array([tokens]), "segments": jnp.array([owner])}


def test_documents_of_a_window_do_not_see_each_other() -> None:
    target = tiny_target()
    mask = objectives.document_mask(batch_of([[1, 2, 3], [4, 5]])["segments"])
    packed, _ = target.forward(jnp.array([[1, 2, 3, 4, 5]]), mask=mask)
    alone, _ = target.forward(jnp.array([[4, 5]]), positions=jnp.array([[3, 4]]))
    np.testing.assert_allclose(packed.logits[:, 3:], alone.logits, atol=1e-4)


def test_distilling_from_oneself_costs_nothing() -> None:
    target = tiny_target()
    loss, metrics = objectives.distill(target, batch_of([[1, 2, 3, 4], [5, 6]]), target)
    np.testing.assert_allclose(loss, 0, atol=1e-4)
    np.testing.assert_allclose(metrics["acceptance"], 1, atol=1e-4)
    assert metrics["agreement"] == 1


def test_a_teacher_gets_no_gradient() -> None:
    student, teacher = tiny_target(seed=1), tiny_target(seed=2)
    batch = batch_of([[1, 2, 3, 4]])
    gradient = jax.grad(lambda t: objectives.distill(student, batch, t)[0])(teacher)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_lm_loss_of_a_uniform_model_is_log_vocabulary() -> None:
    model = Target.init(tiny_config(), jax.random.key(0))
    model = model.replace(params=jax.tree.map(jnp.zeros_like, model.params))
    loss, _ = objectives.lm(model, batch_of([[1, 2, 3, 4]]))
    np.testing.assert_allclose(loss, np.log(11), atol=1e-4)
