"""The chance of acceptance itself as the loss (Samarin et al. 2026, arXiv 2602.23881), in place of a method's published one."""

from functools import partial
from typing import Literal, get_args

import jax
from jaxtyping import Array, Bool, Float

from specjax.config import ConfigError
from specjax.shape_checks import shape_checked
from specjax.training import losses

AcceptanceLoss = Literal["acceptance", "hybrid"]
"""``-log a``, or a blend of the KL divergence and ``1 - a``; a is the chance that a drawn token is accepted."""


def check_loss(loss: str, published: str, eta: float) -> None:
    """Refuse a ``loss`` that is neither ``published`` nor an `AcceptanceLoss`, and an ``eta`` below 0.

    Raises:
        ConfigError: one of the two.
    """
    names = (published, *get_args(AcceptanceLoss))
    if loss not in names:
        raise ConfigError(f"method.loss={loss!r}: must be one of {', '.join(names)}")
    if eta < 0:
        raise ConfigError(f"method.eta={eta}: must be at least 0")


@shape_checked
def acceptance_loss(
    loss: AcceptanceLoss, log_p: Float[Array, "*N V"], logits: Float[Array, "*N V"], mask: Bool[Array, "*N"], eta: float
) -> Float[Array, "*N"]:
    """The loss of predictions of one depth.

    Args:
        loss: which.
        log_p: the target's log-probabilities of the tokens that can be drafted, see `losses.log_acceptance`. The divergence is
            that to their distribution scaled to a sum of 1, as in SpecForge.
        logits: the drafter's.
        mask: which predictions count.
        eta: see `losses.hybrid`.
    """
    log_a = losses.log_acceptance(log_p, logits)
    return -log_a if loss == "acceptance" else losses.hybrid(losses.forward_kl(log_p, logits), log_a, mask, eta)


@shape_checked
def acceptance_loss_by_depth(
    loss: AcceptanceLoss, log_p: Float[Array, "*N D V"], logits: Float[Array, "*N D V"], mask: Bool[Array, "*N D"], eta: float
) -> Float[Array, "*N D"]:
    """The same of predictions of D depths."""
    one = partial(acceptance_loss, loss, eta=eta)
    return jax.vmap(one, in_axes=(-2, -2, -1), out_axes=-1)(log_p, logits, mask)
