"""Medusa-1 (Cai et al. 2024, arXiv 2401.10774, section 2.2.1): heads for a frozen target."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from specjax.config import ConfigError
from specjax.drafters.methods.medusa import Medusa
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.contract import Batch, Loss, Mean, StudentInputs, TrainingMethod
from specjax.training.objectives.ahead import (
    SIMULATED_STEPS,
    Labels,
    behind,
    counted_behind,
    label_entropy,
    simulate,
)
from specjax.training.objectives.chunks import by_chunks
from specjax.training.objectives.windows import read


@dataclass(frozen=True)
class MedusaTraining(TrainingMethod):
    """The sum over the heads i of ``decay ** (i + 1)`` times the cross entropy i + 2 tokens ahead.

    Attributes:
        name: the name of the method.
        target: directory or hub id of the target.
        heads: the number of heads.
        blocks: the number of residual blocks in each head.
        decay: the factor of the weight from one head to the next.
        labels: the tokens of the text, as in the paper, or the target's distribution.
        remat: whether to recompute activations for the gradient, to save memory.

    Examples:
        >>> from specjax.training.methods import MedusaTraining
        >>> MedusaTraining(target="embedded").check(window=512)
        >>> MedusaTraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give ...
    """

    name: Literal["medusa"] = "medusa"
    target: str = ""
    heads: int = 5
    blocks: int = 1
    decay: float = 0.8
    labels: Labels = "text"
    remat: bool = False
    best_by: ClassVar[str] = "acceptance_length"

    def check(self, window: int) -> None:
        super().check(window)
        self.check_minimum(1, "heads")
        self.check_minimum(0, "blocks")
        if self.decay <= 0:
            raise ConfigError(f"method.decay={self.decay}: must be above 0")
        self.check_window(window, "heads")

    def init(self, key: jax.Array, inputs: StudentInputs) -> Medusa:
        return Medusa.init(inputs.frozen_target, key, heads=self.heads, blocks=self.blocks)

    def objective(self, student: Medusa, batch: Batch, target: Target) -> Loss:
        """Return the loss in nats, and the metrics."""
        hidden, tokens = read(target, batch)[0].hidden, batch["tokens"][:, 1:]

        def entropy_of(
            student: Medusa, states: jax.Array, tokens: jax.Array, hidden: jax.Array, head: int
        ) -> jax.Array:
            expected = tokens if self.labels == "text" else target.head(hidden)
            return label_entropy(self.labels, expected, student.head(head, states))

        total, metrics = jnp.zeros(()), {}
        for head in range(self.heads):
            compare = partial(entropy_of, head=head)
            # One head after the other: the gradients of all heads would fill the memory.
            entropy = by_chunks(
                jax.checkpoint(compare) if self.remat else compare,
                (behind(hidden, 1 + head), tokens, hidden),
                numbers=target.config.vocab_size,
                mesh=target.mesh,
                student=student,
            )
            loss = losses.mean_over_positions(entropy, counted_behind(batch, head))
            total += self.decay ** (head + 1) * loss
            metrics[f"loss_{head}"] = loss
        return total, {"loss": total, **metrics}

    def evaluation(self, student: Medusa, batch: Batch, target: Target) -> dict[str, Mean]:
        hidden = read(target, batch)[0].hidden
        heads = range(min(self.heads, SIMULATED_STEPS))
        predictions = ((partial(student.head, head), hidden) for head in heads)
        return simulate(target, hidden, batch, predictions)
