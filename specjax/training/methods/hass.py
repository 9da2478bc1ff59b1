"""HASS (Zhang et al. 2024, arXiv 2408.15766): EAGLE-1's drafter, also trained on its own states."""

from dataclasses import dataclass
from typing import Literal

from specjax.config import ConfigError
from specjax.drafters.methods.eagle import Eagle
from specjax.models.transformer import Target
from specjax.training.contract import Batch, Loss
from specjax.training.objectives.feature_loss import EagleMethod, feature_loss


@dataclass(frozen=True)
class HassTraining(EagleMethod):
    """EAGLE-1's loss over several aligned steps, and the top-k distillation loss.

    Attributes:
        name: the name of the method.
        target: directory or hub id of the target.
        lsa: whether the drafter reads the target's keys and values through layer self-attention
            (`EagleWithLayerAttention`).
        intermediate_size: the size of the drafter's MLP; 0 for the target's.
        steps: the number of alignment steps (section 3.2 of the paper).
        token_weight: the weight of the cross entropy.
        top_k: the number of tokens of the top-k loss (section 3.1).
        top_k_weight: the weight of the top-k loss.
        noise: see `specjax.training.methods.Eagle1Training`.
        remat: whether to recompute activations for the gradient, to save memory.

    Examples:
        >>> from specjax.training.methods import HassTraining
        >>> HassTraining(target="embedded").check(window=512)
        >>> HassTraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give ...
    """

    name: Literal["hass"] = "hass"
    target: str = ""
    lsa: bool = False
    intermediate_size: int = 0
    steps: int = 3
    token_weight: float = 0.1
    top_k: int = 10
    top_k_weight: float = 1.0
    noise: float = 0.2
    remat: bool = False

    def check(self, window: int) -> None:
        super().check(window)
        if self.steps < 1 or self.top_k < 1:
            raise ConfigError(
                f"method.steps={self.steps}, method.top_k={self.top_k}: must be at least 1"
            )

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
