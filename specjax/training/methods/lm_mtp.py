"""A whole model that learns the next token and those after it: multi-token prediction beside plain language modelling."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax.config import ConfigError
from specjax.drafters.methods.mtp import MTP
from specjax.models.config import ModelConfig
from specjax.models.quantization import schemes
from specjax.models.transformer import Output, Target
from specjax.training import losses
from specjax.training.contract import Batch, Metrics, StudentInputs, TrainingMethod
from specjax.training.objectives.module_loss import check_modules, module_loss
from specjax.training.objectives.unrolling import simulate_unrolled
from specjax.training.objectives.whole_model import ModelSizes
from specjax.training.objectives.windows import forward


@struct.dataclass
class ModelWithMTP:
    """A model and its MTP modules, which use its embedding and its head."""

    model: Target
    mtp: MTP

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.model.config

    @property
    def mesh(self) -> Mesh | None:
        """Where both lie."""
        return self.model.mesh

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: DTypeLike | None = None,
        mesh: Mesh | None = None,
        weights: schemes.Weights = schemes.FLOATS,
    ) -> "ModelWithMTP":
        """Read what ``save_pretrained`` wrote."""
        mtp = MTP.from_pretrained(Path(path) / "mtp", dtype=dtype, mesh=mesh, weights=weights)
        return cls(Target.from_pretrained(path, dtype=dtype, mesh=mesh, weights=weights), mtp)

    def save_pretrained(self, path: str | Path, *, dtype: DTypeLike | None = None) -> None:
        """Write the model, and its modules into the folder ``mtp`` in it."""
        self.model.save_pretrained(path, dtype=dtype)
        self.mtp.save_pretrained(Path(path) / "mtp", dtype=dtype)


@dataclass(frozen=True)
class LmMTP(TrainingMethod):
    """A model and its modules from random weights: the next token's cross entropy, and ``weight`` times the modules' mean.

    Attributes:
        name: the method.
        model: sizes of the model.
        modules: how many, D.
        weight: lambda of equation 25, at the beginning.
        final_weight: lambda from ``falls_at`` on.
        falls_at: share of the training after which it falls. DeepSeek-V3: 0.3, and 0.1 for the last third.

    Examples:
        >>> from specjax.training.methods import LmMTP
        >>> LmMTP().check(window=512)
        >>> LmMTP().needs_target
        False
    """

    name: Literal["lm+mtp"] = "lm+mtp"
    model: ModelSizes = ModelSizes()
    modules: int = 1
    weight: float = 0.3
    final_weight: float = 0.1
    falls_at: float = 0.67
    needs_target: ClassVar[bool] = False
    whole_model: ClassVar[bool] = True

    def check(self, window: int) -> None:
        super().check(window)
        self.model.check(window)
        check_modules(self.modules, window)
        if self.weight < 0 or self.final_weight < 0:
            raise ConfigError(f"method.weight={self.weight}, method.final_weight={self.final_weight}: must be at least 0")
        if not 0 <= self.falls_at <= 1:
            raise ConfigError(f"method.falls_at={self.falls_at}: must be a share of the training, from 0 to 1")

    def init(self, key: jax.Array, given: StudentInputs) -> ModelWithMTP:
        """The model is drawn from the same numbers as without modules, so that the two can be compared."""
        model = self.model.init(key, given)
        return ModelWithMTP(model, MTP.init(model, jax.random.fold_in(key, 1), modules=self.modules))

    def objective(self, student: ModelWithMTP, batch: Batch, target: Target | None) -> tuple[jax.Array, Metrics]:
        """In nats."""
        output = forward(student.model, batch)
        own = _own_loss(output, batch)
        ahead, metrics = module_loss(student.mtp, batch, student.model, output, "text")
        weight = jnp.where(batch["progress"] < self.falls_at, self.weight, self.final_weight)
        loss = own + weight * ahead
        return loss, {"loss": loss, "lm_loss": own, **metrics}

    def evaluation(self, student: ModelWithMTP, batch: Batch, target: Target | None) -> Metrics:
        """``loss`` is the model's own: what the modules do for it is the question."""
        output = forward(student.model, batch)
        simulated = simulate_unrolled(student.mtp, batch, student.model, output, output.hidden)
        return {"loss": _own_loss(output, batch), **simulated}


def _own_loss(output: Output, batch: Batch) -> jax.Array:
    """The model's, of the next token."""
    return losses.next_token(output.logits, batch["tokens"][:, 1:], batch["loss_mask"])
