"""HASS (Zhang et al. 2024, arXiv 2408.15766): EAGLE-1's drafter, also trained on its own states."""

from dataclasses import dataclass
from typing import Literal

from specjax.drafters.methods.eagle import Eagle
from specjax.models.transformer import Target
from specjax.training.contract import Batch, Loss
from specjax.training.objectives.feature_loss import EagleMethod, feature_loss


@dataclass(frozen=True)
class HassTraining(EagleMethod):
    """EAGLE-1's loss over several aligned steps, and the top-k distillation loss.

    For further fields see `EagleMethod`.

    Attributes:
        name: the name of the method.
        steps: the number of alignment steps (section 3.2 of the paper).
        top_k: the number of tokens of the top-k loss (section 3.1).
        top_k_weight: the weight of the top-k loss.

    Examples:
        >>> from specjax.training.methods import HassTraining
        >>> HassTraining(target="embedded").check(window=512)
        >>> HassTraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give ...
    """

    name: Literal["hass"] = "hass"
    steps: int = 3
    top_k: int = 10
    top_k_weight: float = 1.0

    def check(self, window: int) -> None:
        super().check(window)
        self.check_minimum(1, "steps", "top_k")

    def objective(self, student: Eagle, batch: Batch, target: Target) -> Loss:
        return feature_loss(
            student,
            batch,
            target,
            steps=self.steps,
            token_weight=self.token_weight,
            top_k=min(self.top_k, target.config.vocab_size),
            top_k_weight=self.top_k_weight,
            noise=self.noise,
            remat=self.remat,
        )
