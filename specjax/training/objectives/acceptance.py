"""Losses from the acceptance probability itself, instead of a method's published loss.

They are from Samarin et al. 2026, arXiv 2602.23881.
"""

from functools import partial
from typing import Literal, get_args

import jax
from jaxtyping import Array, Bool, Float

from specjax.config import ConfigError
from specjax.shape_checks import shape_checked
from specjax.training import losses

AcceptanceLoss = Literal["acceptance", "hybrid"]
"""``-log a``, or a mix of the KL divergence and ``1 - a``, with the acceptance probability a."""


def check_loss(loss: str, published: str, eta: float) -> None:
    """Check the options ``loss`` and ``eta`` of a method.

    Raises:
        ConfigError: ``loss`` is neither ``published`` nor an `AcceptanceLoss`, or ``eta`` is below
            0.
    """
    names = (published, *get_args(AcceptanceLoss))
    if loss not in names:
        raise ConfigError(f"method.loss={loss!r}: must be one of {', '.join(names)}")
    if eta < 0:
        raise ConfigError(f"method.eta={eta}: must be at least 0")


@shape_checked
def acceptance_values(
    loss: AcceptanceLoss, log_p: Float[Array, "*N V"], logits: Float[Array, "*N V"]
) -> dict[str, Float[Array, "*N"]]:
    """Return what a loss needs to know of each prediction.

    Args:
        loss: the name of the loss.
        log_p: the target's log-probabilities of the tokens that can be drafted, see
            `losses.log_acceptance`. For the divergence, they are scaled to a sum of 1, as in
            SpecForge.
        logits: the drafter's logits.
    """
    values = {"log_acceptance": losses.log_acceptance(log_p, logits)}
    if loss == "hybrid":
        values["kl"] = losses.forward_kl(log_p, logits)
    return values


@shape_checked
def acceptance_loss(
    loss: AcceptanceLoss,
    values: dict[str, Float[Array, "*N"]],
    mask: Bool[Array, "*N"],
    eta: float,
) -> Float[Array, "*N"]:
    """Return the loss of each prediction of one depth.

    Args:
        loss: the name of the loss.
        values: the `acceptance_values` of all predictions of that depth.
        mask: the predictions that count.
        eta: see `losses.hybrid`.
    """
    if loss == "acceptance":
        return -values["log_acceptance"]
    return losses.hybrid(values["kl"], values["log_acceptance"], mask, eta)


@shape_checked
def acceptance_loss_by_depth(
    loss: AcceptanceLoss,
    values: dict[str, Float[Array, "*N D"]],
    mask: Bool[Array, "*N D"],
    eta: float,
) -> Float[Array, "*N D"]:
    """Return the `acceptance_loss` of each prediction of D depths."""
    loss_of_depth = partial(acceptance_loss, loss, eta=eta)
    return jax.vmap(loss_of_depth, in_axes=(-1, -1), out_axes=-1)(values, mask)
