"""Loss atoms, a value for each position."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.shape_checks import shape_checked


@shape_checked
def cross_entropy(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """``-log softmax(logits)[token]`` in nats."""
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


@shape_checked
def forward_kl(teacher_logits: Float[Array, "B T V"], logits: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """``KL(teacher || student)`` in nats."""
    teacher = jax.nn.log_softmax(teacher_logits)
    return jnp.sum(jnp.exp(teacher) * (teacher - jax.nn.log_softmax(logits)), axis=-1)
