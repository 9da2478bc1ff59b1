"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) for a frozen target."""

from dataclasses import dataclass, replace
from typing import Literal

import jax

from specjax.config import ConfigError
from specjax.drafters.methods.mtp import MTP
from specjax.drafters.trained import open_drafter
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.training.contract import Batch, Loss, StudentInputs
from specjax.training.objectives.ahead import Labels
from specjax.training.objectives.module_loss import module_loss
from specjax.training.objectives.unrolling import FeatureMethod, layer_sizes
from specjax.training.objectives.windows import read


@dataclass(frozen=True)
class MTPTraining(FeatureMethod):
    """The mean of the modules' cross entropies: equation 25 without its weight.

    A frozen target has no loss of its own to weigh them against. With more ``steps`` than modules,
    the last module also learns to continue from its own states, as in drafts that are deeper than
    the number of modules. For a single module, this is close to FastMTP (Cai et al. 2025, arXiv
    2509.18362), which gives later steps less weight.

    Attributes:
        name: the name of the method.
        target: directory or hub id of the target.
        modules: the number of modules, D.
        steps: the number of tokens ahead to learn; 0 for the number of modules.
        intermediate_size: the size of the modules' MLPs; 0 for the target's.
        labels: the tokens of the text, as in the paper, or the target's distribution.
        remat: whether to recompute activations for the gradient, to save memory.

    Examples:
        >>> from specjax.training.methods import MTPTraining
        >>> MTPTraining(target="embedded").check(window=512)
        >>> MTPTraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give ...
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
        self.check_minimum(1, "modules")
        self.check_window(window, "modules")
        if self.steps and not self.modules <= self.steps < window - 1:
            raise ConfigError(
                f"method.steps={self.steps}: must be 0, or from method.modules={self.modules} to"
                f" {window - 2}, which is data.window less 2"
            )

    def init(self, key: jax.Array, inputs: StudentInputs) -> MTP:
        """Return modules with random weights.

        With ``init_from``, their checkpoint will have the same form as the earlier one's.
        """
        student = MTP.init(
            inputs.frozen_target, key, modules=self.modules, **layer_sizes(self.intermediate_size)
        )
        if not inputs.init_from:
            return student
        try:
            earlier = MTP.checkpoint_format.read_config(open_drafter(inputs.init_from))
        except InputError as error:
            raise ConfigError(f"init_from={inputs.init_from!r}: {error}") from None
        return replace(
            student, config=replace(student.config, experts_joined=earlier.experts_joined)
        )

    def objective(self, student: MTP, batch: Batch, target: Target) -> Loss:
        """Return the loss in nats, and the metrics."""
        hidden = read(target, batch)[0].hidden
        loss, metrics = module_loss(
            student, batch, target, hidden, self.labels, steps=self.steps, remat=self.remat
        )
        return loss, {"loss": loss, **metrics}
