"""Distillation: a draft model, which is a small whole model, learns the target's distribution."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from specjax.evaluation.metrics import overlap
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.contract import Batch, Loss, Mean
from specjax.training.objectives.ahead import agreement
from specjax.training.objectives.chunks import by_chunks
from specjax.training.objectives.whole_model import ModelSizes, WholeModelMethod
from specjax.training.objectives.windows import forward, read


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
    best_by: ClassVar[str] = "acceptance"

    def objective(self, student: Target, batch: Batch, target: Target) -> Loss:
        """Return the loss in nats, and the metrics.

        The metric ``acceptance`` is beta = sum min(p, q), the probability that rejection sampling
        accepts a token sampled from the student (Leviathan et al. 2023, Definition 3.1 and Theorem
        3.5). The metric ``agreement`` is its greedy counterpart.
        """
        mask = batch["loss_mask"]
        target_logits, logits = forward(target, batch).logits, forward(student, batch).logits
        loss = losses.mean_over_positions(losses.forward_kl(target_logits, logits), mask)
        accepted = overlap(jax.nn.softmax(target_logits), jax.nn.softmax(logits))
        agreed = jnp.argmax(logits, -1) == jnp.argmax(target_logits, -1)
        return loss, {
            "loss": loss,
            "acceptance": losses.mean_over_labels(accepted, mask),
            "agreement": losses.mean_over_labels(agreed, mask),
        }

    def evaluation(self, student: Target, batch: Batch, target: Target) -> dict[str, Mean]:
        def compare(states: jax.Array, expected: jax.Array) -> tuple[jax.Array, ...]:
            logits, target_logits = student.head(states), target.head(expected)
            return losses.forward_kl(target_logits, logits), *agreement(logits, target_logits)

        divergence, is_right, accepted = by_chunks(
            compare,
            (read(student, batch)[0].hidden, read(target, batch)[0].hidden),
            numbers=target.config.vocab_size,
            mesh=target.mesh,
        )
        mask = batch["loss_mask"]
        return {
            "loss": Mean.over_positions(divergence, mask, batch),
            "acceptance": Mean.over_labels(accepted, mask),
            "agreement": Mean.over_labels(is_right, mask),
        }
