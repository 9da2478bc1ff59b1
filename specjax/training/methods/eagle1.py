"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077): the drafter learns to predict the target's next feature, and its tokens."""

from dataclasses import dataclass
from typing import Literal

import jax

from specjax.drafters.methods.eagle import Eagle
from specjax.models.transformer import Target
from specjax.training.contract import Batch, Metrics
from specjax.training.objectives.feature_loss import EagleMethod, feature_loss


@dataclass(frozen=True)
class Eagle1Training(EagleMethod):
    """Section 4.1 of the paper: SmoothL1 of the feature plus ``token_weight`` times the cross entropy of its tokens.

    Attributes:
        name: the method.
        target: directory or hub id of the target.
        lsa: whether it reads the layers' keys and values through layer self-attention (see `EagleWithLayerAttention`).
        intermediate_size: of the drafter's MLP; 0 is the target's.
        token_weight: of the cross entropy.
        noise: width of the uniform noise on the features that the drafter reads, in a window of 512 tokens.
        remat: work inner values out again for the gradient, and keep fewer.

    Examples:
        >>> from specjax.training.methods import Eagle1Training
        >>> Eagle1Training(target="embedded").check(window=512)
        >>> Eagle1Training().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give its directory or hub id
    """

    name: Literal["eagle1"] = "eagle1"
    target: str = ""
    lsa: bool = False
    intermediate_size: int = 0
    token_weight: float = 0.1
    noise: float = 0.2
    remat: bool = False

    def objective(self, student: Eagle, batch: Batch, target: Target | None) -> tuple[jax.Array, Metrics]:
        assert target is not None
        return feature_loss(student, batch, target, token_weight=self.token_weight, noise=self.noise, remat=self.remat)
