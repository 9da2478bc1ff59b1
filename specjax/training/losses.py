"""Elementary losses with one value per position, and the two ways to average them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax.shape_checks import shape_checked


@shape_checked
def cross_entropy(logits: Float[Array, "*N V"], tokens: Int[Array, "*N"]) -> Float[Array, "*N"]:
    """Return ``-log softmax(logits)[token]`` in nats.

    Examples:
        >>> from specjax.training import losses
        >>> logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25]]]))
        >>> losses.cross_entropy(logits, jnp.array([[0]])).shape
        (1, 1)
    """
    token_logits = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - token_logits


@shape_checked
def next_token(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Return the loss of plain language modeling in nats.

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
def soft_cross_entropy(
    target_logits: Float[Array, "*N V"], logits: Float[Array, "*N V"]
) -> Float[Array, "*N"]:
    """Return ``-sum p log q`` in nats, for the target's distribution p and the student's q.

    Examples:
        >>> from specjax.training import losses
        >>> even = jnp.zeros((1, 1, 2))
        >>> round(float(losses.soft_cross_entropy(even, even)[0, 0]), 3)  # log 2
        0.693
    """
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    # Since p sums to 1, the mean of log q is that of the shifted logits, minus the log of their
    # sum. It is a product of vectors: XLA's CPU backend takes ten times as long for a sum of
    # products over a large vocabulary.
    mean = jnp.einsum(
        "...v,...v->...",
        jax.nn.softmax(target_logits),
        shifted,
        precision=jax.lax.Precision.HIGHEST,
    )
    return jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)) - mean


@shape_checked
def forward_kl(
    target_logits: Float[Array, "*N V"], logits: Float[Array, "*N V"]
) -> Float[Array, "*N"]:
    """Return ``KL(target || student)`` in nats.

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
    """Return ``log a``, with the acceptance probability a = ``sum min(p, q)``.

    It is the probability that the target with distribution p accepts a token that is sampled from
    the student's distribution q, which is 1 minus the total variation
    (`specjax.evaluation.metrics.overlap`). ``-log a`` is the loss L_alpha of Samarin et al. 2026,
    arXiv 2602.23881. If p is a single token, it is the cross entropy. It is computed from
    logarithms and never takes ``log 0``, so it has a gradient however small a is. Where p(x) =
    q(x), the gradient of the minimum is the mean of both sides, so it is 0 if p and q are equal
    everywhere.

    Args:
        log_p: ``[*N, V]`` the target's log-probability of each token that the student can draft.
            For a student with a smaller vocabulary, they are not scaled to a sum of 1, because all
            other tokens are never accepted. SpecForge does the same (``core/lk_loss.py``,
            ``core/eagle3.py``); speculators scales them.
        logits: ``[*N, V]`` the student's logits.

    Examples:
        >>> from specjax.training import losses
        >>> log_p = jnp.log(jnp.array([0.6, 0.4]))
        >>> log_acceptance = losses.log_acceptance(log_p, jnp.zeros(2))
        >>> round(float(jnp.exp(log_acceptance)), 3)  # 0.5 of the first token, 0.4 of the second
        0.9
    """
    log_p = jax.lax.stop_gradient(log_p)  # the target is not trained
    return jax.nn.logsumexp(jnp.minimum(log_p, jax.nn.log_softmax(logits)), axis=-1)


@shape_checked
def hybrid(
    kl: Float[Array, "*N"], log_a: Float[Array, "*N"], mask: Bool[Array, "*N"], eta: float
) -> Float[Array, "*N"]:
    """Return ``share KL(p || q) + (1 - share) (1 - a)``, a loss of Samarin et al. 2026.

    See arXiv 2602.23881. The divergence has a strong gradient if q is far from p; the acceptance
    probability a is the quantity that matters in the end. The share is ``exp(-eta mean(a))``,
    without a gradient. It is the same for all predictions of one depth, so call this function once
    for each depth. The paper (section 4.4) and SpecForge do the same; speculators has a share for
    each position.

    Args:
        kl: ``[*N]`` see `forward_kl`. For a student with a smaller vocabulary, p is scaled to a sum
            of 1 over that vocabulary.
        log_a: ``[*N]`` see `log_acceptance`.
        mask: ``[*N]`` the predictions that count in the mean.
        eta: how fast the weight moves from the divergence to the acceptance. It is 3 in the paper;
            SpecForge's ``kl_decay`` is 1.

    Examples:
        >>> from specjax.training import losses
        >>> kl, log_a, mask = jnp.array([2.0]), jnp.log(jnp.array([0.5])), jnp.array([True])
        >>> losses.hybrid(kl, log_a, mask, eta=0.0).tolist()  # the divergence alone
        [2.0]
        >>> round(float(losses.hybrid(kl, log_a, mask, eta=2.0)[0]), 3)  # 2 / e + 0.5 * (1 - 1 / e)
        1.052
    """
    share = jax.lax.stop_gradient(jnp.exp(-eta * mean_over_labels(jnp.exp(log_a), mask)))
    return share * kl + (1 - share) * (1 - jnp.exp(log_a))


@shape_checked
def smooth_l1(
    predicted: Float[Array, "B T H"], expected: Float[Array, "B T H"]
) -> Float[Array, "B T"]:
    """Return the mean over H of SmoothL1 with beta 1.

    SmoothL1 is half the square of a difference below 1, and otherwise the difference minus 1/2.

    Examples:
        >>> from specjax.training import losses
        >>> values = losses.smooth_l1(jnp.zeros((1, 2, 1)), jnp.array([[[0.5], [3.0]]]))
        >>> values.tolist()
        [[0.125, 2.5]]
    """
    difference = jnp.abs(predicted.astype(jnp.float32) - expected.astype(jnp.float32))
    return jnp.mean(
        jnp.where(difference < 1, 0.5 * difference * difference, difference - 0.5), axis=-1
    )


@shape_checked
def mean_over_positions(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Return the sum of the values under the mask, divided by all B*T positions. Use it for losses.

    The divisor is the same in every batch, so a label always has the same weight. With the number
    of labels that count as divisor, a label would weigh more in a batch with fewer of them.
    EAGLE-3's published code divides by B*T as well.

    Examples:
        >>> from specjax.training import losses
        >>> values, mask = jnp.array([[3.0, 1.0]]), jnp.array([[True, False]])
        >>> float(losses.mean_over_positions(values, mask))
        1.5
    """
    # Selected, not multiplied: a value that does not count may be NaN, and 0 times NaN is NaN.
    return jnp.sum(jnp.where(mask, values, 0)) / mask.size


@shape_checked
def mean_over_labels(values: Shaped[Array, "*N"], mask: Bool[Array, "*N"]) -> Float[Array, ""]:
    """Return the mean of the values under the mask, or 0 if it is empty. Use it for metrics.

    Examples:
        >>> from specjax.training import losses
        >>> values, mask = jnp.array([[3.0, 1.0]]), jnp.array([[True, False]])
        >>> float(losses.mean_over_labels(values, mask))
        3.0
    """
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(mask), 1)
