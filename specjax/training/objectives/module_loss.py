"""The loss of multi-token prediction modules.

It is from DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 24 and 25.
"""

import jax.numpy as jnp

from specjax.drafters.methods.mtp import MTP
from specjax.models.transformer import Output, Target
from specjax.training.contract import Batch, Loss
from specjax.training.objectives.ahead import Labels, prediction_loss
from specjax.training.objectives.unrolling import unroll


def module_loss(
    student: MTP,
    batch: Batch,
    target: Target,
    output: Output,
    labels: Labels,
    *,
    steps: int = 0,
    remat: bool = False,
) -> Loss:
    """Return the mean of the cross entropies of all steps, and each of them.

    Args:
        student: the modules.
        batch: the windows.
        target: the target, whose embedding and head the modules use.
        output: the target's output at the windows.
        labels: the kind of labels.
        steps: the number of tokens ahead; 0 for the number of modules. In steps beyond the modules,
            the last module continues from its own states.
        remat: see `unroll`.
    """
    last = student.modules - 1
    states_by_step = unroll(
        student, batch, target, output.hidden, steps or student.modules, detach=False, remat=remat
    )
    loss_by_step = [
        prediction_loss(
            labels, output, batch, step, student.logits(target, states, min(step, last))
        )
        for step, states in enumerate(states_by_step)
    ]
    mean = sum(loss_by_step, jnp.zeros(())) / len(loss_by_step)
    return mean, {f"loss_{step}": loss for step, loss in enumerate(loss_by_step)}
