"""Loss atoms, a value for each position, and the two ways to average them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax.shape_checks import shape_checked


@shape_checked
def cross_entropy(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """``-log softmax(logits)[token]`` in nats.

    Examples:
        >>> from specjax.training import losses
        >>> logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25]]]))
        >>> losses.cross_entropy(logits, jnp.array([[0]])).shape
        (1, 1)
    """
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


@shape_checked
def next_token(logits: Float[Array, "B T V"], labels: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """The loss of plain language modelling, in nats.

    Examples:
        >>> from specjax.training import losses
        >>> logits = jnp.zeros((1, 4, 8))  # all 8 tokens are equally likely
        >>> mask = jnp.array([[True, True, False, False]])
        >>> loss = losses.next_token(logits, jnp.zeros((1, 4), int), mask)
        >>> round(float(loss), 3)  # half of log 8: half of the positions count
        1.04
    """
    return mean_over_positions(cross_entropy(logits, labels), mask)


@shape_checked
def soft_cross_entropy(target_logits: Float[Array, "B T V"], logits: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """``-sum p log q`` in nats, of the target's distribution p and the student's q.

    Examples:
        >>> from specjax.training import losses
        >>> even = jnp.zeros((1, 1, 2))
        >>> round(float(losses.soft_cross_entropy(even, even)[0, 0]), 3)  # log 2
        0.693
    """
    return -jnp.sum(jax.nn.softmax(target_logits) * jax.nn.log_softmax(logits), axis=-1)


@shape_checked
def forward_kl(target_logits: Float[Array, "*N V"], logits: Float[Array, "*N V"]) -> Float[Array, "*N"]:
    """``KL(target || student)`` in nats.

    Examples:
        >>> from specjax.training import losses
        >>> even = jnp.zeros((1, 1, 2))
        >>> float(losses.forward_kl(even, even)[0, 0])
        0.0
    """
    target = jax.nn.log_softmax(target_logits)
    return jnp.sum(jnp.exp(target) * (target - jax.nn.log_softmax(logits)), axis=-1)


@shape_checked
def log_acceptance(log_p: Float[Array, "*N V"], logits: Float[Array, "*N V"]) -> Float[Array, "*N"]:
    """``log a``, of the chance a = ``sum min(p, q)`` that a token drawn from the student's q is accepted by the target's p.

    The chance is 1 less the total variation (`specjax.evaluation.metrics.overlap`). ``-log a`` is the loss L_alpha of Samarin
    et al. 2026, arXiv 2602.23881; where p is one token it is the cross entropy. It is formed from logarithms and never comes to
    ``log 0``, so it has a gradient however small the chance is. Where p(x) = q(x) the gradient of the smaller of the two is the
    mean of both sides', so it is 0 where p and q are equal throughout.

    Args:
        log_p: ``[*N, V]`` the logarithm of the target's probability of each token that the student can draft. Of a student with
            a smaller vocabulary these are as they are, not scaled to a sum of 1: the rest is never accepted. SpecForge does so
            too (``core/lk_loss.py``, ``core/eagle3.py``); speculators scales them.
        logits: ``[*N, V]`` the student's.

    Examples:
        >>> from specjax.training import losses
        >>> log_p = jnp.log(jnp.array([0.6, 0.4]))
        >>> round(float(jnp.exp(losses.log_acceptance(log_p, jnp.zeros(2)))), 3)  # 0.5 of the first, 0.4 of the second
        0.9
    """
    log_p = jax.lax.stop_gradient(log_p)
    return jax.nn.logsumexp(jnp.minimum(log_p, jax.nn.log_softmax(logits)), axis=-1)


@shape_checked
def hybrid(kl: Float[Array, "*N"], log_a: Float[Array, "*N"], mask: Bool[Array, "*N"], eta: float) -> Float[Array, "*N"]:
    """``share KL(p || q) + (1 - share) (1 - a)``, the hybrid loss of Samarin et al. 2026, arXiv 2602.23881.

    The divergence has a strong gradient where q is far from p; the chance of acceptance a is what counts in the end. The share
    is ``exp(-eta mean(a))`` with no gradient of its own: one for all predictions of a depth, so call this once for each. So do
    the paper (section 4.4) and SpecForge; speculators gives each position its own share.

    Args:
        kl: ``[*N]``, see `forward_kl`. Of a student with a smaller vocabulary it is that to p scaled to a sum of 1 there.
        log_a: ``[*N]``, see `log_acceptance`.
        mask: which predictions the mean is taken of.
        eta: how soon the divergence makes room. The paper's is 3; SpecForge's ``kl_decay`` is 1.

    Examples:
        >>> from specjax.training import losses
        >>> kl, log_a, mask = jnp.array([2.0]), jnp.log(jnp.array([0.5])), jnp.array([True])
        >>> losses.hybrid(kl, log_a, mask, eta=0.0).tolist()  # the divergence alone
        [2.0]
        >>> round(float(losses.hybrid(kl, log_a, mask, eta=2.0)[0]), 3)  # exp(-1) 2 + (1 - exp(-1)) 0.5
        1.052
    """
    share = jax.lax.stop_gradient(jnp.exp(-eta * mean_over_labels(jnp.exp(log_a), mask)))
    return share * kl + (1 - share) * (1 - jnp.exp(log_a))


@shape_checked
def smooth_l1(predicted: Float[Array, "B T H"], wanted: Float[Array, "B T H"]) -> Float[Array, "B T"]:
    """SmoothL1 with beta 1, its mean over H: half the square of a difference below 1, and beyond it the difference less 1/2.

    Examples:
        >>> from specjax.training import losses
        >>> values = losses.smooth_l1(jnp.zeros((1, 2, 1)), jnp.array([[[0.5], [3.0]]]))
        >>> values.tolist()
        [[0.125, 2.5]]
    """
    size = jnp.abs(predicted.astype(jnp.float32) - wanted.astype(jnp.float32))
    return jnp.mean(jnp.where(size < 1, 0.5 * size * size, size - 0.5), axis=-1)


@shape_checked
def mean_over_positions(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """The values where ``mask`` counts them, summed and divided by all B*T positions. For losses.

    The divisor is the same in every batch, and so is the weight of a label. Divided by the labels that count, a label would
    weigh the more, the fewer others its batch happens to hold. EAGLE-3's published code divides by B*T too.

    Examples:
        >>> from specjax.training import losses
        >>> values, mask = jnp.array([[3.0, 1.0]]), jnp.array([[True, False]])
        >>> float(losses.mean_over_positions(values, mask))
        1.5
    """
    return jnp.sum(jnp.where(mask, values, 0)) / mask.size


@shape_checked
def mean_over_labels(values: Shaped[Array, "*N"], mask: Bool[Array, "*N"]) -> Float[Array, ""]:
    """The mean of the values that ``mask`` counts, 0 where it counts none. For what is reported: accuracies, acceptance.

    Examples:
        >>> from specjax.training import losses
        >>> values, mask = jnp.array([[3.0, 1.0]]), jnp.array([[True, False]])
        >>> float(losses.mean_over_labels(values, mask))
        3.0
    """
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(mask), 1)
