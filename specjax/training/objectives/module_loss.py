"""The loss of multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 24 and 25)."""

import jax
import jax.numpy as jnp

from specjax.config import ConfigError
from specjax.drafters.methods.mtp import MTP
from specjax.models.transformer import Output, Target
from specjax.training.contract import Batch, Metrics
from specjax.training.objectives.ahead import Labels, prediction_loss
from specjax.training.objectives.unrolling import unroll


def check_modules(modules: int, window: int) -> None:
    """Refuse numbers of modules that a window of so many tokens has no labels for."""
    if modules < 1:
        raise ConfigError(f"method.modules={modules}: must be at least 1")
    if modules + 1 >= window:
        raise ConfigError(f"method.modules={modules}: data.window={window} is too short; give at least modules + 2")


def module_loss(
    student: MTP, batch: Batch, target: Target, output: Output, labels: Labels, *, steps: int = 0, remat: bool = False
) -> tuple[jax.Array, Metrics]:
    """The mean of the steps' cross entropies, and each of them.

    Args:
        student: the modules.
        batch: the windows.
        target: whose embedding and head they use.
        output: the target's at the windows.
        labels: what is predicted.
        steps: how many tokens ahead; those beyond the modules are the last one's, which goes on with its own states. 0: as many
            as there are modules.
        remat: as in `unroll`.
    """
    last = student.modules - 1
    states_by_step = unroll(student, batch, target, output.hidden, steps or student.modules, detach=False, remat=remat)
    each = [
        prediction_loss(labels, output, batch, step, student.logits(target, states, min(step, last)))
        for step, states in enumerate(states_by_step)
    ]
    return sum(each, jnp.zeros(())) / len(each), {f"loss_{step}": loss for step, loss in enumerate(each)}
