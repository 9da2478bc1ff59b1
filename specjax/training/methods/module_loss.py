"""The loss of multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 24 and 25)."""

import jax
import jax.numpy as jnp

from specjax.config import ConfigError
from specjax.drafters.mtp import MTP
from specjax.models.transformer import Output, Target
from specjax.training.methods.ahead import Labels, prediction_loss
from specjax.training.methods.base import Batch, Metrics
from specjax.training.methods.unrolling import unroll


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
