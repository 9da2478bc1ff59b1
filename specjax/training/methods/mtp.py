"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules for a frozen target."""

from dataclasses import dataclass, replace
from typing import Literal

import jax

from specjax.config import ConfigError
from specjax.drafters.methods.mtp import MTP
from specjax.drafters.trained import open_drafter
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.training.contract import Batch, Metrics, StudentInputs
from specjax.training.objectives.ahead import Labels
from specjax.training.objectives.module_loss import check_modules, module_loss
from specjax.training.objectives.unrolling import FeatureMethod, layer_sizes
from specjax.training.objectives.windows import forward


@dataclass(frozen=True)
class MTPTraining(FeatureMethod):
    """The mean of the modules' cross entropies (equation 25 without its weight, which a frozen target has no use for).

    With more ``steps`` than modules the last module also learns to go on with its own states, as it does in drafts that are
    deeper than there are modules. For a single module that is close to FastMTP (Cai et al. 2025, arXiv 2509.18362), which gives
    later steps less weight.

    Attributes:
        name: the method.
        target: directory or hub id of the target.
        modules: how many, D.
        steps: tokens ahead to learn; 0 is as many as there are modules.
        intermediate_size: of their MLPs; 0 is the target's.
        labels: the text's own tokens, as in the paper, or the target's distribution.
        remat: work inner values out again for the gradient, and keep fewer.

    Examples:
        >>> from specjax.training.methods import MTPTraining
        >>> MTPTraining(target="embedded").check(window=512)
        >>> MTPTraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give its directory or hub id
    """

    name: Literal["mtp"] = "mtp"
    target: str = ""
    modules: int = 1
    steps: int = 0
    intermediate_size: int = 0
    labels: Labels = "text"
    remat: bool = False

    def check(self, window: int) -> None:
        super().check(window)
        check_modules(self.modules, window)
        if self.steps and not self.modules <= self.steps < window - 1:
            raise ConfigError(
                f"method.steps={self.steps}: must be 0, or from method.modules={self.modules} to {window - 2}, which is "
                "data.window less 2"
            )

    def init(self, key: jax.Array, given: StudentInputs) -> MTP:
        """Modules that are written with the tensors of those to begin with, if any."""
        student = MTP.init(given.frozen_target, key, modules=self.modules, **layer_sizes(self.intermediate_size))
        if not given.init_from:
            return student
        try:
            earlier = MTP.checkpoint_format.read_config(open_drafter(given.init_from))
        except InputError as error:
            raise ConfigError(f"init_from={given.init_from!r}: {error}") from None
        return replace(student, config=replace(student.config, experts_joined=earlier.experts_joined))

    def objective(self, student: MTP, batch: Batch, target: Target | None) -> tuple[jax.Array, Metrics]:
        """In nats."""
        assert target is not None
        output = forward(target, batch)
        loss, metrics = module_loss(student, batch, target, output, self.labels, steps=self.steps, remat=self.remat)
        return loss, {"loss": loss, **metrics}
