"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules for a frozen target."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from specjax.config import ConfigError
from specjax.drafters.mtp import MTP
from specjax.models.transformer import Output, Target
from specjax.training.methods.ahead import Labels, prediction_loss
from specjax.training.methods.base import Batch, Given, Metrics
from specjax.training.methods.unrolling import FeatureMethod, layer_sizes, unroll
from specjax.training.methods.windows import read


@dataclass(frozen=True)
class MTPTraining(FeatureMethod):
    """The mean of the modules' cross entropies (equation 25 without its weight, which a frozen target has no use for).

    Attributes:
        name: the method.
        target: directory or hub id of the target.
        modules: how many, D.
        intermediate_size: of their MLPs; 0 is the target's.
        labels: the text's own tokens, as in the paper, or the target's distribution.
        remat: work inner values out again for the gradient, and keep fewer.
    """

    name: Literal["mtp"] = "mtp"
    target: str = ""
    modules: int = 1
    intermediate_size: int = 0
    labels: Labels = "text"
    remat: bool = False

    def check(self, window: int) -> None:
        super().check(window)
        check_modules(self.modules, window)

    def init(self, key: jax.Array, given: Given) -> MTP:
        return MTP.init(given.frozen_target, key, modules=self.modules, **layer_sizes(self.intermediate_size))

    def objective(self, student: MTP, batch: Batch, target: Target | None) -> tuple[jax.Array, Metrics]:
        """In nats."""
        assert target is not None
        loss, metrics = module_loss(student, batch, target, read(target, batch), self.labels, remat=self.remat)
        return loss, {"loss": loss, **metrics}


def check_modules(modules: int, window: int) -> None:
    """Refuse numbers of modules that a window of so many tokens has no labels for."""
    if modules < 1:
        raise ConfigError(f"method.modules={modules}: must be at least 1")
    if modules + 1 >= window:
        raise ConfigError(f"method.modules={modules}: data.window={window} is too short; give at least modules + 2")


def module_loss(
    student: MTP, batch: Batch, target: Target, output: Output, labels: Labels, *, remat: bool = False
) -> tuple[jax.Array, Metrics]:
    """The mean of the modules' cross entropies, and each of them; ``output`` is the target's at the windows."""
    states_of_modules = unroll(student, batch, target, output.hidden, student.modules, detach=False, remat=remat)
    each = [
        prediction_loss(labels, output, batch, module, student.logits(target, states, module))
        for module, states in enumerate(states_of_modules)
    ]
    return sum(each, jnp.zeros(())) / len(each), {f"loss_{module}": loss for module, loss in enumerate(each)}
