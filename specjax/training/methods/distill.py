"""Distillation: a draft model, which is a small whole model, learns the target's distribution."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax

from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.contract import Batch, Loss, Mean
from specjax.training.objectives.ahead import agreement
from specjax.training.objectives.chunks import by_chunks
from specjax.training.objectives.whole_model import ModelSizes, WholeModelMethod
from specjax.training.objectives.windows import read, read_student


@dataclass(frozen=True)
class Distill(WholeModelMethod):
    """A draft model from random weights: the forward KL divergence to the target's distribution.

    Attributes:
        name: the name of the method.
        target: directory or hub id of the target to learn from.

    Examples:
        >>> from specjax.training.methods import Distill
        >>> Distill(target="embedded").check(window=512)
        >>> Distill().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give ...
    """

    name: Literal["distill"] = "distill"
    target: str = ""
    model: ModelSizes = ModelSizes()
    remat: bool = False
    best_by: ClassVar[str] = "acceptance"

    def objective(self, student: Target, batch: Batch, target: Target) -> Loss:
        """Return the loss in nats, and the metrics.

        The metric ``acceptance`` is beta = sum min(p, q), the probability that rejection sampling
        accepts a token sampled from the student (Leviathan et al. 2023, Definition 3.1 and Theorem
        3.5). The metric ``agreement`` is its greedy counterpart.
        """
        hidden, mask = read_student(student, batch, self.remat), batch["loss_mask"]
        divergence, is_right, accepted = _compared(student, hidden, target, batch)
        loss = losses.mean_over_positions(divergence, mask)
        return loss, {
            "loss": loss,
            "acceptance": losses.mean_over_labels(accepted, mask),
            "agreement": losses.mean_over_labels(is_right, mask),
        }

    def evaluation(self, student: Target, batch: Batch, target: Target) -> dict[str, Mean]:
        hidden = read(student, batch)[0].hidden
        divergence, is_right, accepted = _compared(student, hidden, target, batch)
        mask = batch["loss_mask"]
        return {
            "loss": Mean.over_positions(divergence, mask, batch),
            "acceptance": Mean.over_labels(accepted, mask),
            "agreement": Mean.over_labels(is_right, mask),
        }


def _compared(
    student: Target, hidden: jax.Array, target: Target, batch: Batch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the divergence from the target, and the `agreement` with it, ``[B, T]`` each.

    ``hidden [B, T, H]`` are the student's states.
    """

    def compare(
        student: Target, hidden: jax.Array, expected: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits, target_logits = student.head(hidden), target.head(expected)
        return losses.forward_kl(target_logits, logits), *agreement(logits, target_logits)

    return by_chunks(
        compare,
        (hidden, read(target, batch)[0].hidden),
        numbers=target.config.vocab_size,
        mesh=target.mesh,
        student=student,
    )
