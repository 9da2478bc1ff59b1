"""DFlash (z-lab 2025): the tokens of a block from one pass, the nearer ones before the further ones."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from specjax.config import ConfigError
from specjax.drafters.dflash import DFlash
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.objectives.acceptance import AcceptanceLoss, acceptance_loss_by_depth, check_loss
from specjax.training.objectives.ahead import Labels
from specjax.training.objectives.blocks import BlockMethod, Drafted, dpace, falling

_NEVER = -1e9
"""The log-probability of what never happens: finite, so that 0 times it is 0."""


@dataclass(frozen=True)
class DFlashTraining(BlockMethod):
    """Cross entropy at every depth of every block, weighed by depth. Further fields: `BlockMethod`.

    Attributes:
        name: the method.
        labels: the text's own tokens, as published, or the target's distribution.
        loss: of a token: the cross entropy, as published, or one of the losses of acceptance (arXiv 2602.23881).
        eta: of the hybrid one, see `losses.hybrid`.
        gamma: depth d weighs ``exp(-(d - 1) / gamma)``; published are 7 for blocks of 16 and 4 for blocks of 8. 0: all alike.
        dpace: weigh the depths by D-PACE with this number in place of ``gamma``; published is 0.5. -1: do not. What it goes by
            is the label's probability, or the chance of acceptance where that is the loss.

    Examples:
        >>> from specjax.training.methods import DFlashTraining
        >>> DFlashTraining(target="embedded").check(window=512)
        >>> DFlashTraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give its directory or hub id
    """

    name: Literal["dflash"] = "dflash"
    labels: Labels = "text"
    loss: Literal["cross_entropy"] | AcceptanceLoss = "cross_entropy"
    eta: float = 3.0
    gamma: float = 7.0
    dpace: float = -1.0

    def check(self, window: int) -> None:
        super().check(window)
        if self.gamma < 0 or not (self.dpace == -1 or 0 <= self.dpace <= 1):
            raise ConfigError(
                f"method.gamma={self.gamma}, method.dpace={self.dpace}: must be at least 0, and from 0 to 1, or -1 for none"
            )
        check_loss(self.loss, "cross_entropy", self.eta)
        if self.loss == "acceptance" and self.labels == "text":
            raise ConfigError(
                "method.loss='acceptance', method.labels='text': of one token that is the cross entropy; give labels='target'"
            )

    def each(self, student: DFlash, target: Target, drafted: Drafted) -> dict[str, jax.Array]:
        log_q = jax.nn.log_softmax(student.logits(target, drafted.states))
        if self.loss == "cross_entropy":
            if self.labels == "target":
                each = -jnp.sum(jax.nn.softmax(target.head(drafted.hidden)) * log_q, axis=-1)
            else:
                each = -jnp.take_along_axis(log_q, drafted.tokens[..., None], axis=-1)[..., 0]
            right = jnp.exp(-each)
        else:
            if self.labels == "target":
                log_p = jax.nn.log_softmax(target.head(drafted.hidden))
            else:  # the distribution that has nothing but the text's token
                log_p = jnp.where(jnp.arange(log_q.shape[-1]) == drafted.tokens[..., None], 0.0, _NEVER)
            each = acceptance_loss_by_depth(self.loss, log_p, log_q, drafted.valid, self.eta)
            right = jnp.exp(losses.log_acceptance(log_p, log_q))
        if self.dpace >= 0:
            return {"token_loss": dpace(right, drafted.valid, self.dpace) * each}
        return {"token_loss": falling(each.shape, self.gamma) * each}
