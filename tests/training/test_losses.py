"""Loss atoms against torch, and the two averages."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from specjax.training import losses

RNG = np.random.default_rng(0)
LOGITS, TARGET = jnp.asarray(RNG.normal(size=(2, 3, 5, 11)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(0, 11, (3, 5)))


def as_torch(x: jax.Array) -> torch.Tensor:
    return torch.tensor(np.asarray(x))


def test_cross_entropy_equals_torch() -> None:
    expected = torch.nn.functional.cross_entropy(
        as_torch(LOGITS).flatten(0, 1), as_torch(LABELS).flatten().long(), reduction="none"
    )
    np.testing.assert_allclose(jax.jit(losses.cross_entropy)(LOGITS, LABELS).reshape(-1), expected, atol=1e-4)


def test_forward_kl_equals_torch() -> None:
    expected = torch.nn.functional.kl_div(
        torch.log_softmax(as_torch(LOGITS), -1),
        torch.log_softmax(as_torch(TARGET), -1),
        log_target=True,
        reduction="none",
    ).sum(-1)
    np.testing.assert_allclose(jax.jit(losses.forward_kl)(TARGET, LOGITS), expected, atol=1e-4)


def test_a_label_weighs_the_same_in_every_batch_and_a_report_is_a_mean() -> None:
    values = jnp.array([[1.0, 2.0, jnp.nan], [4.0, jnp.inf, 5.0]])
    mask = jnp.array([[True, True, False], [True, False, False]])
    np.testing.assert_allclose(losses.mean_over_positions(values, mask), 7 / 6)
    np.testing.assert_allclose(losses.mean_over_labels(values, mask), 7 / 3)
    assert losses.mean_over_labels(values, jnp.zeros_like(mask)) == 0
