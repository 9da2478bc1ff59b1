"""Distillation: a small whole model, a draft model, learns the target's distribution."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from specjax.evaluation.metrics import overlap
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.contract import Batch, Metrics, StudentInputs, TrainingMethod
from specjax.training.objectives.whole_model import ModelSizes
from specjax.training.objectives.windows import forward


@dataclass(frozen=True)
class Distill(TrainingMethod):
    """A draft model from random weights: forward KL to the target's distribution.

    Attributes:
        name: the method.
        target: directory or hub id of the target to learn from.

    Examples:
        >>> from specjax.training.methods import Distill
        >>> Distill(target="embedded").check(window=512)
        >>> Distill().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give its directory or hub id
    """

    name: Literal["distill"] = "distill"
    target: str = ""
    model: ModelSizes = ModelSizes()
    whole_model: ClassVar[bool] = True
    best_by: ClassVar[str] = "acceptance"

    def check(self, window: int) -> None:
        super().check(window)
        self.model.check(window)

    def init(self, key: jax.Array, given: StudentInputs) -> Target:
        return self.model.init(key, given)

    def objective(self, student: Target, batch: Batch, target: Target | None) -> tuple[jax.Array, Metrics]:
        """In nats.

        ``acceptance`` is beta = sum min(p, q), the chance that rejection sampling keeps a token drawn from the student
        (Leviathan et al. 2023, Definition 3.1 and Theorem 3.5); ``agreement`` is its greedy counterpart.
        """
        assert target is not None
        mask = batch["loss_mask"]
        theirs, ours = forward(target, batch).logits, forward(student, batch).logits
        loss = losses.mean_over_positions(losses.forward_kl(theirs, ours), mask)
        accepted = overlap(jax.nn.softmax(theirs), jax.nn.softmax(ours))
        agreed = jnp.argmax(ours, -1) == jnp.argmax(theirs, -1)
        return loss, {
            "loss": loss,
            "acceptance": losses.mean_over_labels(accepted, mask),
            "agreement": losses.mean_over_labels(agreed, mask),
        }
