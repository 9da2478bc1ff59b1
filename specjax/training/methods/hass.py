"""HASS (Zhang et al. 2024, arXiv 2408.15766): EAGLE-1's drafter, trained on its own states too."""

from dataclasses import dataclass
from typing import Literal

import jax

from specjax.config import ConfigError
from specjax.drafters.methods.eagle import Eagle
from specjax.models.transformer import Target
from specjax.training.contract import Batch, Metrics
from specjax.training.objectives.feature_loss import EagleMethod, feature_loss


@dataclass(frozen=True)
class HassTraining(EagleMethod):
    """EAGLE-1's loss over several aligned steps, and the top-k distillation loss.

    Attributes:
        name: the method.
        target: directory or hub id of the target.
        lsa: whether it reads the layers' keys and values through layer self-attention (see `EagleWithLayerAttention`).
        intermediate_size: of the drafter's MLP; 0 is the target's.
        steps: of alignment (section 3.2 of the paper).
        token_weight: of the cross entropy.
        top_k: tokens of the top-k loss (section 3.1).
        top_k_weight: of that loss.
        noise: as EAGLE-1's.
        remat: work inner values out again for the gradient, and keep fewer.

    Examples:
        >>> from specjax.training.methods import HassTraining
        >>> HassTraining(target="embedded").check(window=512)
        >>> HassTraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give its directory or hub id
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
            raise ConfigError(f"method.steps={self.steps}, method.top_k={self.top_k}: must be at least 1")

    def objective(self, student: Eagle, batch: Batch, target: Target | None) -> tuple[jax.Array, Metrics]:
        assert target is not None
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
