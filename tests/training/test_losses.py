"""Loss atoms against torch, speculators and formulas in NumPy, and the two averages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import losses

RNG = np.random.default_rng(0)
LOGITS, TARGET = jnp.asarray(RNG.normal(size=(2, 3, 5, 11)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(0, 11, (3, 5)))


def as_torch(x: jax.Array):
    from tests.with_torch import torch

    return torch.tensor(np.asarray(x))


def test_cross_entropy_equals_torch() -> None:
    from tests.with_torch import torch

    expected = torch.nn.functional.cross_entropy(
        as_torch(LOGITS).flatten(0, 1), as_torch(LABELS).flatten().long(), reduction="none"
    )
    np.testing.assert_allclose(
        jax.jit(losses.cross_entropy)(LOGITS, LABELS).reshape(-1), expected, atol=1e-4
    )


def test_forward_kl_equals_torch() -> None:
    from tests.with_torch import torch

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


# --- the chance of acceptance ---

SHARP, SHARP_TARGET = LOGITS * 3, TARGET * 3
PART = np.array([0, 3, 4, 7, 9])


def softmax(x) -> np.ndarray:
    x = np.exp(np.asarray(x, np.float64) - np.max(x, axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("ids", [np.arange(11), PART])
def test_the_chance_of_acceptance_is_what_p_and_q_have_in_common(ids) -> None:
    """Check that p in a vocabulary of 5 tokens stays as among 11: its sum bounds the chance."""
    log_p, logits = jax.nn.log_softmax(SHARP_TARGET)[..., ids], SHARP[..., ids]
    p, q = softmax(SHARP_TARGET)[..., ids], softmax(logits)
    expected = np.zeros((3, 5))
    for place in np.ndindex(3, 5):
        expected[place] = sum(min(a, b) for a, b in zip(p[place], q[place], strict=True))
    log_chance = jax.jit(losses.log_acceptance)(log_p, logits)
    np.testing.assert_allclose(np.exp(log_chance), expected, rtol=1e-5)
    assert np.all(np.exp(log_chance) <= p.sum(axis=-1) + 1e-6)


@pytest.mark.full
def test_the_losses_of_acceptance_are_those_of_speculators() -> None:
    """Compare the losses over all tokens.

    Speculators gives each position its own share of the divergence, so each is a batch here.
    """
    eager = pytest.importorskip(
        "speculators.losses.eager", reason="speculators 0.9 is not installed"
    )
    log_a = losses.log_acceptance(jax.nn.log_softmax(SHARP_TARGET), SHARP)
    kl = losses.forward_kl(SHARP_TARGET, SHARP)
    ours, theirs = as_torch(SHARP), as_torch(SHARP_TARGET)
    np.testing.assert_allclose(-log_a, eager.neg_log_acceptance_loss(ours, theirs), atol=1e-5)
    np.testing.assert_allclose(1 - jnp.exp(log_a), eager.tv_loss(ours, theirs), atol=1e-5)

    def of_position(kl, log_a):
        return losses.hybrid(kl[None], log_a[None], jnp.ones(1, bool), 3.0)[0]

    alone = jax.vmap(jax.vmap(of_position))(kl, log_a)
    np.testing.assert_allclose(alone, eager.lk_hybrid_loss(ours, theirs, eta=3.0), atol=1e-5)


def test_a_hybrid_has_one_share_of_the_divergence_for_all_that_count() -> None:
    kl, a = np.array([2.0, 1.0, 7.0]), np.array([0.5, 0.7, 0.1])
    share = np.exp(-2.0 * 0.6)
    loss = losses.hybrid(
        jnp.asarray(kl), jnp.log(jnp.asarray(a)), jnp.array([True, True, False]), 2.0
    )
    np.testing.assert_allclose(loss, share * kl + (1 - share) * (1 - a), rtol=1e-5)
    np.testing.assert_allclose(
        losses.hybrid(jnp.asarray(kl), jnp.log(jnp.asarray(a)), jnp.zeros(3, bool), 2.0), kl
    )


@pytest.mark.full
@pytest.mark.parametrize("loss", ["acceptance", "hybrid"])
def test_gradients_are_those_of_finite_differences(loss) -> None:
    """Compare with NumPy in 64 bits; the share of the hybrid is constant."""
    log_p, p, mask = (
        jax.nn.log_softmax(SHARP_TARGET)[..., PART],
        softmax(SHARP_TARGET)[..., PART],
        jnp.ones((3, 5), bool),
    )
    start = np.asarray(SHARP[..., PART], np.float64)

    def chance(x):
        return np.minimum(p, softmax(x)).sum(axis=-1)

    share = np.exp(-3.0 * chance(start).mean())

    def slow(x):
        if loss == "acceptance":
            return -np.log(chance(x)).sum()
        scaled = p / p.sum(axis=-1, keepdims=True)
        divergence = (scaled * np.log(scaled / softmax(x))).sum(axis=-1)
        return (share * divergence + (1 - share) * (1 - chance(x))).sum()

    def fast(x):
        log_a = losses.log_acceptance(log_p, x)
        if loss == "acceptance":
            return jnp.sum(-log_a)
        return jnp.sum(losses.hybrid(losses.forward_kl(log_p, x), log_a, mask, 3.0))

    value, gradient = jax.value_and_grad(fast)(SHARP[..., PART])
    np.testing.assert_allclose(value, slow(start), rtol=1e-5)
    for index in [(0, 0, 0), (0, 3, 2), (1, 1, 4), (2, 4, 1), (2, 0, 3)]:
        step = np.zeros_like(start)
        step[index] = 1e-5
        np.testing.assert_allclose(
            gradient[index], (slow(start + step) - slow(start - step)) / 2e-5, atol=2e-4
        )


@pytest.mark.full
def test_where_the_drafter_is_right_nothing_moves_and_where_it_is_far_off_it_still_learns() -> None:
    log_p = jax.nn.log_softmax(SHARP_TARGET)
    gradient = jax.grad(lambda x: jnp.sum(losses.log_acceptance(log_p, x)))
    np.testing.assert_allclose(gradient(SHARP_TARGET), 0.0, atol=1e-6)
    sure, wrong = jnp.array([200.0, 0.0, -200.0]), jnp.array([0.0, 200.0, -200.0])
    log_a = losses.log_acceptance(jax.nn.log_softmax(sure), wrong)
    # With 32 bits the chance itself would be rounded to 0.
    np.testing.assert_allclose(log_a, np.log(2) - 200.0, rtol=1e-5)
    push = jax.grad(lambda x: losses.log_acceptance(jax.nn.log_softmax(sure), x))(wrong)
    # Half of the chance lies at token 0, where q is smaller than p, and half at token 1, where p is
    # smaller.
    np.testing.assert_allclose(push, [0.5, -0.5, 0.0], atol=1e-5)


def test_no_gradient_reaches_the_target() -> None:
    pull = jax.grad(lambda x: jnp.sum(losses.log_acceptance(jax.nn.log_softmax(x), SHARP)))(
        SHARP_TARGET
    )
    assert not np.any(pull)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_soft_cross_entropy_is_the_mean_of_the_logarithms(offset) -> None:
    """A constant that is added to all logits changes neither the loss nor its gradient."""
    rng = np.random.default_rng(0)
    target_logits = 3 * rng.normal(size=(2, 3, 50))
    # Multiples of 1/64 are exact beside the offset.
    logits = np.round(64 * 3 * rng.normal(size=(2, 3, 50))) / 64

    def log_softmax(x: np.ndarray) -> np.ndarray:
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    p, log_q = np.exp(log_softmax(target_logits)), log_softmax(logits)
    arguments = jnp.float32(target_logits), jnp.float32(logits + offset)
    np.testing.assert_allclose(
        losses.soft_cross_entropy(*arguments), -(p * log_q).sum(axis=-1), rtol=1e-6
    )
    gradient = jax.grad(lambda x: losses.soft_cross_entropy(arguments[0], x).sum())(arguments[1])
    np.testing.assert_allclose(gradient, np.exp(log_q) - p, atol=1e-6)
