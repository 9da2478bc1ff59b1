"""DFlash (z-lab 2025): the tokens of a block from one pass, the nearer ones before the further ones."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from specjax.config import ConfigError
from specjax.drafters.dflash import DFlash
from specjax.models.transformer import Target
from specjax.training.objectives.ahead import Labels
from specjax.training.objectives.blocks import BlockMethod, Drafted, dpace, falling


@dataclass(frozen=True)
class DFlashTraining(BlockMethod):
    """Cross entropy at every depth of every block, weighed by depth. Further fields: `BlockMethod`.

    Attributes:
        name: the method.
        labels: the text's own tokens, as published, or the target's distribution.
        gamma: depth d weighs ``exp(-(d - 1) / gamma)``; published are 7 for blocks of 16 and 4 for blocks of 8. 0: all alike.
        dpace: weigh the depths by D-PACE with this number in place of ``gamma``; published is 0.5. -1: do not.

    Examples:
        >>> from specjax.training.methods import DFlashTraining
        >>> DFlashTraining(target="embedded").check(window=512)
        >>> DFlashTraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give its directory or hub id
    """

    name: Literal["dflash"] = "dflash"
    labels: Labels = "text"
    gamma: float = 7.0
    dpace: float = -1.0

    def check(self, window: int) -> None:
        super().check(window)
        if self.gamma < 0 or not (self.dpace == -1 or 0 <= self.dpace <= 1):
            raise ConfigError(
                f"method.gamma={self.gamma}, method.dpace={self.dpace}: must be at least 0, and from 0 to 1, or -1 for none"
            )

    def each(self, student: DFlash, target: Target, drafted: Drafted) -> dict[str, jax.Array]:
        log_q = jax.nn.log_softmax(student.logits(target, drafted.states))
        if self.labels == "target":
            entropy = -jnp.sum(jax.nn.softmax(target.head(drafted.hidden)) * log_q, axis=-1)
        else:
            entropy = -jnp.take_along_axis(log_q, drafted.tokens[..., None], axis=-1)[..., 0]
        if self.dpace >= 0:
            return {"token_loss": dpace(jnp.exp(-entropy), drafted.valid, self.dpace) * entropy}
        return {"token_loss": falling(entropy.shape, self.gamma) * entropy}
