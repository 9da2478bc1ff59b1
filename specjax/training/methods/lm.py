"""Plain language modeling: a whole model that predicts the next token of the text."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.contract import Batch, Loss, Mean
from specjax.training.objectives.whole_model import (
    ModelSizes,
    WholeModelMethod,
    next_token,
    next_token_metrics,
)
from specjax.training.objectives.windows import read, read_student


@dataclass(frozen=True)
class Lm(WholeModelMethod):
    """A whole model from random weights: the cross entropy of the text's next token.

    Attributes:
        name: the name of the method.

    Examples:
        >>> from specjax.training.methods import Lm
        >>> Lm().check(window=512)
        >>> Lm().needs_target
        False
    """

    name: Literal["lm"] = "lm"
    model: ModelSizes = ModelSizes()
    remat: bool = False
    needs_target: ClassVar[bool] = False

    def objective(self, student: Target, batch: Batch, target: Target | None) -> Loss:
        """Return the loss in nats, and the metrics.

        The end of a document is predicted like any other token.
        """
        hidden, mask = read_student(student, batch, self.remat), batch["loss_mask"]
        entropies, is_right = next_token(student, hidden, batch)
        loss = losses.mean_over_positions(entropies, mask)
        return loss, {"loss": loss, "accuracy": losses.mean_over_labels(is_right, mask)}

    def evaluation(self, student: Target, batch: Batch, target: Target | None) -> dict[str, Mean]:
        return next_token_metrics(student, read(student, batch)[0].hidden, batch)
