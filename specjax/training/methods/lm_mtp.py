"""Language modeling with multi-token prediction: a whole model, with modules for further tokens."""

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
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.contract import Batch, Loss, Mean, StudentInputs
from specjax.training.objectives.module_loss import module_loss
from specjax.training.objectives.unrolling import simulate_unrolled
from specjax.training.objectives.whole_model import (
    ModelSizes,
    WholeModelMethod,
    next_token,
    next_token_metrics,
)
from specjax.training.objectives.windows import read, read_student


@struct.dataclass
class ModelWithMTP:
    """A model and its MTP modules, which use the model's embedding and head."""

    model: Target
    mtp: MTP

    @property
    def config(self) -> ModelConfig:
        """The config of the model."""
        return self.model.config

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the model and the modules."""
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
        """Load a model and its modules that ``save_pretrained`` wrote."""
        mtp = MTP.from_pretrained(Path(path) / "mtp", dtype=dtype, mesh=mesh, weights=weights)
        return cls(Target.from_pretrained(path, dtype=dtype, mesh=mesh, weights=weights), mtp)

    def save_pretrained(self, path: str | Path, *, dtype: DTypeLike | None = None) -> None:
        """Save the model, and its modules in the folder ``mtp`` of its directory."""
        self.model.save_pretrained(path, dtype=dtype)
        self.mtp.save_pretrained(Path(path) / "mtp", dtype=dtype)


@dataclass(frozen=True)
class LmMTP(WholeModelMethod):
    """The next token's cross entropy plus ``weight`` times the modules' mean cross entropy.

    Both the model and its modules start from random weights.

    Attributes:
        name: the name of the method.
        model: the sizes of the model.
        modules: the number of modules, D.
        weight: lambda of equation 25 at the start.
        final_weight: lambda after ``falls_at``.
        falls_at: the share of the training after which lambda falls. DeepSeek-V3 uses 0.3, then 0.1
            in the last third.
        remat: whether to recompute activations for the gradient, to save memory.

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
    remat: bool = False
    needs_target: ClassVar[bool] = False

    def check(self, window: int) -> None:
        super().check(window)
        self.check_minimum(1, "modules")
        self.check_window(window, "modules")
        self.check_minimum(0, "weight", "final_weight")
        if not 0 <= self.falls_at <= 1:
            raise ConfigError(
                f"method.falls_at={self.falls_at}: must be a share of the training, from 0 to 1"
            )

    def init(self, key: jax.Array, inputs: StudentInputs) -> ModelWithMTP:
        """Return a model with the same random weights as without modules, and its modules.

        So a training with modules can be compared with one without.
        """
        model = super().init(key, inputs)
        return ModelWithMTP(
            model, MTP.init(model, jax.random.fold_in(key, 1), modules=self.modules)
        )

    def objective(self, student: ModelWithMTP, batch: Batch, target: Target | None) -> Loss:
        """Return the loss in nats, and the metrics."""
        model, hidden = student.model, read_student(student.model, batch, self.remat)
        entropies, _ = next_token(model, hidden, batch)
        lm_loss = losses.mean_over_positions(entropies, batch["loss_mask"])
        mtp_loss, metrics = module_loss(
            student.mtp, batch, model, hidden, "text", remat=self.remat, target_is_trained=True
        )
        weight = jnp.where(batch["progress"] < self.falls_at, self.weight, self.final_weight)
        loss = lm_loss + weight * mtp_loss
        return loss, {"loss": loss, "lm_loss": lm_loss, **metrics}

    def evaluation(
        self, student: ModelWithMTP, batch: Batch, target: Target | None
    ) -> dict[str, Mean]:
        """Return the metrics of held-out windows.

        ``loss`` is that of the next token alone, to show whether the modules improve the model.
        """
        model, hidden = student.model, read(student.model, batch)[0].hidden
        simulated = simulate_unrolled(student.mtp, batch, model, hidden, hidden)
        return {"loss": next_token_metrics(model, hidden, batch)["loss"], **simulated}
