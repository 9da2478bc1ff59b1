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
def forward_kl(target_logits: Float[Array, "B T V"], logits: Float[Array, "B T V"]) -> Float[Array, "B T"]:
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
def mean_over_labels(values: Shaped[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """The mean of the values that ``mask`` counts, 0 where it counts none. For what is reported: accuracies, acceptance.

    Examples:
        >>> from specjax.training import losses
        >>> values, mask = jnp.array([[3.0, 1.0]]), jnp.array([[True, False]])
        >>> float(losses.mean_over_labels(values, mask))
        3.0
    """
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(mask), 1)
