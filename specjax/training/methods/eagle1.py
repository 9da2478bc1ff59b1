"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077): a loss of the target's next feature and its token."""

from dataclasses import dataclass
from typing import Literal

from specjax.drafters.methods.eagle import Eagle
from specjax.models.transformer import Target
from specjax.training.contract import Batch, Loss
from specjax.training.objectives.feature_loss import EagleMethod, feature_loss


@dataclass(frozen=True)
class Eagle1Training(EagleMethod):
    """SmoothL1 of the feature plus ``token_weight`` times the cross entropy (section 4.1).

    For further fields see `EagleMethod`.

    Attributes:
        name: the name of the method.

    Examples:
        >>> from specjax.training.methods import Eagle1Training
        >>> Eagle1Training(target="embedded").check(window=512)
        >>> Eagle1Training().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give ...
    """

    name: Literal["eagle1"] = "eagle1"

    def objective(self, student: Eagle, batch: Batch, target: Target) -> Loss:
        return feature_loss(
            student,
            batch,
            target,
            token_weight=self.token_weight,
            noise=self.noise,
            remat=self.remat,
        )
