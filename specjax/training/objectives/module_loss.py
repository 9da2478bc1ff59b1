"""The loss of multi-token prediction modules.

It is from DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 24 and 25.
"""

import jax
import jax.numpy as jnp

from specjax.drafters.methods.mtp import MTP
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.contract import Batch, Loss
from specjax.training.objectives.ahead import Labels, compared, counted_behind, label_entropy
from specjax.training.objectives.unrolling import unroll


def module_loss(
    student: MTP,
    batch: Batch,
    target: Target,
    hidden: jax.Array,
    labels: Labels,
    *,
    steps: int = 0,
    remat: bool = False,
    target_is_trained: bool = False,
) -> Loss:
    """Return the mean of the cross entropies of all steps, and each of them.

    Args:
        student: the modules.
        batch: the windows.
        target: the target, whose embedding and head the modules use.
        hidden: ``[B, T, H]`` the target's hidden states at the windows.
        labels: the kind of labels.
        steps: the number of tokens ahead; 0 for the number of modules. In steps beyond the modules,
            the last module continues from its own states.
        remat: see `unroll`.
        target_is_trained: whether the target is trained together with the modules.
    """
    last = student.modules - 1
    states_by_step = unroll(
        student, batch, target, hidden, steps or student.modules, detach=False, remat=remat
    )

    def values_of(
        trained: tuple[MTP, Target | None], step: int, states: jax.Array, expected: jax.Array
    ) -> jax.Array:
        modules, model = trained
        logits = modules.logits(model or target, states, min(step, last))
        return label_entropy(labels, expected, logits)

    def labels_of(tokens: jax.Array, hidden: jax.Array) -> jax.Array:
        return tokens if labels == "text" else target.head(hidden)

    entropies = compared(
        (student, target if target_is_trained else None),
        states_by_step,
        values_of,
        (batch["tokens"][:, 1:], hidden),
        labels_of,
        numbers=target.config.vocab_size,
        mesh=target.mesh,
    )
    loss_by_step = [
        losses.mean_over_positions(entropy, counted_behind(batch, step))
        for step, entropy in enumerate(entropies)
    ]
    mean = sum(loss_by_step, jnp.zeros(())) / len(loss_by_step)
    return mean, {f"loss_{step}": loss for step, loss in enumerate(loss_by_step)}
