"""Drafters with a vocabulary of their own: which tokens are in it, and what they learn of a target that has more."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from specjax.config import ConfigError
from specjax.drafters.methods.eagle3 import Eagle3
from specjax.models.transformer import Output, Target
from specjax.sampling import argmax
from specjax.shape_checks import shape_checked
from specjax.training import losses
from specjax.training.objectives.acceptance import AcceptanceLoss, acceptance_loss


def wanted(student: Eagle3, target: Target, output: Output) -> tuple[jax.Array, jax.Array]:
    """The target's logits ``[B, T, Vd]`` of the tokens that ``student`` can draft, and ``[B|1, T|1]`` bool, where its likeliest
    token is one of them."""
    vocabulary = student.vocabulary(target)
    if vocabulary is None:
        return output.logits, jnp.ones((1, 1), bool)
    can_be_drafted = jnp.any(argmax(output.logits)[..., None] == vocabulary.ids, axis=-1)
    return student.drafted_logits(target, output.hidden), can_be_drafted


@shape_checked
def token_loss(
    loss: Literal["cross_entropy"] | AcceptanceLoss,
    theirs: Float[Array, "B T Vd"],
    log_total: Float[Array, "B T"],
    logits: Float[Array, "B T Vd"],
    mask: Bool[Array, "B T"],
    eta: float,
) -> Float[Array, "B T"]:
    """The loss of predictions of one depth.

    The cross entropy is that to the target's distribution over the tokens that can be drafted, scaled to a sum of 1. A token is
    accepted with its probability among all tokens: no drafter is accepted more often than the target says what can be drafted.

    Args:
        loss: which.
        theirs: the target's logits of the tokens that can be drafted, see `wanted`.
        log_total: the logarithm of the sum of the exponentials of all its logits.
        logits: the drafter's.
        mask: which predictions count.
        eta: see `losses.hybrid`.
    """
    if loss == "cross_entropy":
        return losses.soft_cross_entropy(theirs, logits)
    return acceptance_loss(loss, theirs - log_total[..., None], logits, mask, eta)


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """``[size]`` the most frequent tokens by ``counts [V]``, ascending; of equally frequent ones the lower ids.

    Raises:
        ConfigError: the vocabulary is smaller than that.
    """
    if size > len(counts):
        raise ConfigError(f"method.draft_vocab_size={size}: the target has {len(counts)} tokens; give 0 for all of them")
    return np.sort(np.argsort(-counts, kind="stable")[:size])
