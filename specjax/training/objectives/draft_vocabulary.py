"""Drafters with a smaller vocabulary than the target: its tokens, and the labels and loss."""

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


def draft_labels(student: Eagle3, target: Target, output: Output) -> tuple[jax.Array, jax.Array]:
    """Return the target's logits over the draft vocabulary, and where they are of use.

    Returns:
        The target's logits ``[B, T, Vd]`` of the tokens that the student can draft, and ``[B|1,
        T|1]`` bool whether the target's likeliest token is one of them.
    """
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
    """Return the loss of each prediction of one depth.

    For the cross entropy, the target's distribution is restricted to the draft vocabulary and
    scaled to a sum of 1. For the losses of acceptance it is not scaled, because a token is accepted
    with its probability among all tokens.

    Args:
        loss: the name of the loss.
        theirs: the target's logits over the draft vocabulary, see `draft_labels`.
        log_total: the log-sum-exp of all of the target's logits.
        logits: the drafter's logits.
        mask: the predictions that count.
        eta: see `losses.hybrid`.
    """
    if loss == "cross_entropy":
        return losses.soft_cross_entropy(theirs, logits)
    return acceptance_loss(loss, theirs - log_total[..., None], logits, mask, eta)


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """Return the ids of the most frequent tokens, ascending; the lower ids among equal counts.

    Args:
        counts: ``[V]`` the count of each token.
        size: the number of ids to return.

    Raises:
        ConfigError: The vocabulary has fewer tokens.
    """
    if size > len(counts):
        raise ConfigError(
            f"method.draft_vocab_size={size}: the target has {len(counts)} tokens; give 0 for all"
            " of them"
        )
    return np.sort(np.argsort(-counts, kind="stable")[:size])
