"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a loss of tokens alone, over several draft steps."""

from dataclasses import dataclass
from typing import Literal

import jax

from specjax.drafters.methods.eagle3 import Eagle3
from specjax.models.transformer import Target
from specjax.training.contract import Batch, Loss, StudentInputs
from specjax.training.objectives.ahead import compared, decayed
from specjax.training.objectives.draft_vocabulary import (
    DraftLabels,
    Eagle3Method,
    token_loss,
    token_values,
)
from specjax.training.objectives.unrolling import unroll


@dataclass(frozen=True)
class Eagle3Training(Eagle3Method):
    """Training-time test: the sum over steps k of ``decay ** k`` times the loss of step k.

    For further fields see `Eagle3Method`.

    Attributes:
        name: the name of the method.
        norm_output: whether to feed back the normed state (EAGLE-3.1).
        steps: the number of steps of the training-time test.
        decay: the factor of the weight from one step to the next.

    Examples:
        >>> from specjax.training.methods import Eagle3Training
        >>> Eagle3Training(target="embedded").check(window=512)
        >>> Eagle3Training().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give ...
    """

    name: Literal["eagle3"] = "eagle3"
    norm_output: bool = False
    steps: int = 7
    decay: float = 0.8

    def check(self, window: int) -> None:
        super().check(window)
        self.check_minimum(1, "steps")
        self.check_window(window, "steps")

    def init(self, key: jax.Array, inputs: StudentInputs) -> Eagle3:
        options = self.options(inputs, norm_output=self.norm_output)
        return Eagle3.init(inputs.frozen_target, key, **options)

    def objective(self, student: Eagle3, batch: Batch, target: Target) -> Loss:
        """Return the loss, and the metrics.

        Positions at which the target's likeliest token cannot be drafted do not count.
        """
        labels = DraftLabels.of(student, target, batch)

        def values_of(
            student: Eagle3, step: int, states: jax.Array, labels: tuple[jax.Array, jax.Array]
        ) -> dict[str, jax.Array]:
            return token_values(self.loss, *labels, student.logits(target, states))

        values = compared(
            student,
            unroll(
                student,
                batch,
                target,
                labels.features,
                self.steps,
                detach=False,
                remat=self.remat,
            ),
            values_of,
            (labels.hidden, labels.log_total),
            lambda hidden, log_total: (labels.logits(hidden), log_total),
            numbers=student.config.draft_vocab_size,
            mesh=target.mesh,
        )
        return decayed(
            batch,
            values,
            lambda values, mask: token_loss(self.loss, values, mask, self.eta),
            self.decay,
            labels.can_be_drafted,
        )
