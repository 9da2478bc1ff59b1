"""JetSpec (arXiv 2606.18394): a DFlash with causal blocks that learns the target's distribution."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from specjax.config import ConfigError
from specjax.drafters.methods.dflash import DFlash
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.objectives.acceptance import (
    AcceptanceLoss,
    acceptance_loss_by_depth,
    acceptance_values,
    check_loss,
)
from specjax.training.objectives.blocks import BlockMethod, DraftedBlocks


@dataclass(frozen=True)
class JetSpecTraining(BlockMethod):
    """The forward KL divergence to the target's distribution, times the square of the temperature.

    For further fields see `BlockMethod`.

    Attributes:
        name: the name of the method.
        temperature: the temperature of both distributions.
        loss: the divergence, as published, or a loss of acceptance (arXiv 2602.23881) at that
            temperature, which is not multiplied by its square.
        eta: the parameter of the hybrid loss, see `losses.hybrid`.

    Examples:
        >>> from specjax.training.methods import JetSpecTraining
        >>> JetSpecTraining(target="embedded").check(window=512)
        >>> JetSpecTraining(target="embedded", temperature=0.0).check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.temperature=0.0: must be above 0
    """

    name: Literal["jetspec"] = "jetspec"
    temperature: float = 1.0
    loss: Literal["kl"] | AcceptanceLoss = "kl"
    eta: float = 3.0

    def check(self, window: int) -> None:
        super().check(window)
        if self.temperature <= 0:
            raise ConfigError(f"method.temperature={self.temperature}: must be above 0")
        check_loss(self.loss, "kl", self.eta)

    def options(self) -> Mapping[str, Any]:
        return {"variant": {"causal": True}}

    def each(self, student: DFlash, target: Target, drafted: DraftedBlocks) -> dict[str, jax.Array]:
        log_p = jax.nn.log_softmax(target.head(drafted.hidden) / self.temperature)
        log_q = jax.nn.log_softmax(student.logits(target, drafted.states) / self.temperature)
        if self.loss != "kl":
            return acceptance_values(self.loss, log_p, log_q)
        return {"kl": losses.forward_kl(log_p, log_q)}

    def terms(self, values: dict[str, jax.Array], valid: jax.Array) -> dict[str, jax.Array]:
        if self.loss != "kl":
            loss = acceptance_loss_by_depth(self.loss, values, valid, self.eta)
            return {f"{self.loss}_loss": loss}
        return {"kl": self.temperature**2 * values["kl"]}
