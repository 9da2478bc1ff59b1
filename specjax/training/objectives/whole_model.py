"""The sizes and the random weights of a student that is or contains a whole model."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from specjax.config import ConfigError
from specjax.errors import InputError
from specjax.models import config_json
from specjax.models.config import LinearAttention, ModelConfig, Rope
from specjax.models.families import FAMILIES
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.contract import Batch, Mean, StudentInputs, TrainingMethod
from specjax.training.objectives.chunks import by_chunks
from specjax.training.tokenizer import END_OF_TEXT


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model to train from random weights. The vocabulary is the tokenizer's.

    A ``qwen3_5_text`` is a hybrid model: its ``linear_layers`` have linear attention with the sizes
    of ``linear``, and its other layers have gated attention. A ``llama`` has no linear attention,
    and ignores ``linear``.
    """

    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 12
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 1024
    rope: Rope = Rope()
    linear: LinearAttention | None = None
    linear_layers: tuple[int, ...] = ()
    model_type: Literal["llama", "qwen3_5_text"] = "llama"

    def check(self, window: int) -> None:
        """Raise ConfigError for invalid sizes, or a window that exceeds the positions."""
        if window > self.max_positions:
            raise ConfigError(
                f"data.window={window} is longer than"
                f" method.model.max_positions={self.max_positions}"
            )
        if self.rope.kind in ("yarn", "llama3") and self.rope.original_max_positions is None:
            raise ConfigError(
                f"method.model.rope.kind={self.rope.kind}: it needs"
                " method.model.rope.original_max_positions, the number of positions before scaling"
            )
        if (self.model_type == "llama") != (not self.linear_layers):
            raise ConfigError(
                f"method.model.model_type={self.model_type!r} with"
                f" method.model.linear_layers={list(self.linear_layers)}: a qwen3_5_text has some"
                " layers with linear attention, and a llama has none"
            )
        try:
            # Fail now if the model could not be saved.
            config_json.format_config(self._config(vocab_size=1), "float32")
        except InputError as error:
            raise ConfigError(f"method.model: {error}") from None

    def _config(self, **vocabulary: Any) -> ModelConfig:
        sizes = {**vars(self), "linear": self.linear if self.linear_layers else None}
        return ModelConfig(
            **sizes, **FAMILIES[self.model_type].switches, **vocabulary, tie_embeddings=True
        )

    def init(self, key: jax.Array, inputs: StudentInputs) -> Target:
        """Return a model with random weights. ``key`` is consumed.

        If there is a target, the model has its vocabulary and its end tokens.
        """
        end, target = inputs.tokenizer.token_to_id(END_OF_TEXT), inputs.target
        if target is None:
            vocabulary = {
                "vocab_size": inputs.tokenizer.get_vocab_size(),
                "bos_token_id": end,
                "eos_token_ids": () if end is None else (end,),
            }
        else:  # the target's vocabulary may be padded to more tokens than its tokenizer has
            vocabulary = {
                name: getattr(target.config, name)
                for name in ("vocab_size", "bos_token_id", "eos_token_ids")
            }
        return Target.init(self._config(**vocabulary), key, mesh=inputs.mesh)


class WholeModelMethod(TrainingMethod):
    """A method that trains a whole model from random weights.

    Its subclasses declare the fields again, after ``name``.

    Attributes:
        model: the sizes of the model.
        remat: whether to recompute activations for the gradient, to save memory.
    """

    model: ModelSizes = ModelSizes()
    remat: bool = False
    whole_model: ClassVar[bool] = True

    def check(self, window: int) -> None:
        super().check(window)
        self.model.check(window)

    def init(self, key: jax.Array, inputs: StudentInputs) -> Any:
        return self.model.init(key, inputs)


def next_token(model: Target, hidden: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the cross entropy of each next token, and whether it is the likeliest, ``[B, T]``.

    ``hidden [B, T, H]`` are the model's states.
    """

    def compare(model: Target, hidden: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.head(hidden)
        return losses.cross_entropy(logits, labels), jnp.argmax(logits, axis=-1) == labels

    return by_chunks(
        compare,
        (hidden, batch["tokens"][:, 1:]),
        numbers=model.config.vocab_size,
        mesh=model.mesh,
        student=model,
    )


def next_token_metrics(model: Target, hidden: jax.Array, batch: Batch) -> dict[str, Mean]:
    """Return the loss of the next token and the accuracy, of a model's states ``[B, T, H]``."""
    entropies, is_right = next_token(model, hidden, batch)
    mask = batch["loss_mask"]
    return {
        "loss": Mean.over_positions(entropies, mask, batch),
        "accuracy": Mean.over_labels(is_right, mask),
    }
