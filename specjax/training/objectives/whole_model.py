"""What the methods share whose student is a whole model: its sizes, and its random weights."""

from dataclasses import dataclass

import jax

from specjax.config import ConfigError
from specjax.models.config import ModelConfig, Rope
from specjax.models.transformer import Target
from specjax.training.contract import Given
from specjax.training.tokenizer import END_OF_TEXT


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model to train from random weights; the vocabulary is the tokenizer's."""

    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 12
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 1024
    rope: Rope = Rope()

    def check(self, window: int) -> None:
        """Refuse sizes that cannot read ``window`` tokens."""
        if window > self.max_positions:
            raise ConfigError(f"data.window={window} is longer than method.model.max_positions={self.max_positions}")
        if self.rope.kind in ("yarn", "llama3") and self.rope.original_max_positions is None:
            raise ConfigError(
                f"method.model.rope.kind={self.rope.kind}: needs method.model.rope.original_max_positions, the number "
                "of positions that are stretched"
            )

    def init(self, key: jax.Array, given: Given) -> Target:
        """A model with random weights; consumes ``key``. Beside a target it has that one's vocabulary and end tokens."""
        end, target = given.tokenizer.token_to_id(END_OF_TEXT), given.target
        if target is None:
            vocabulary = {
                "vocab_size": given.tokenizer.get_vocab_size(),
                "bos_token_id": end,
                "eos_token_ids": () if end is None else (end,),
            }
        else:  # whose vocabulary may be padded beyond its tokenizer's
            vocabulary = {name: getattr(target.config, name) for name in ("vocab_size", "bos_token_id", "eos_token_ids")}
        return Target.init(ModelConfig(**vars(self), **vocabulary, tie_embeddings=True), key, mesh=given.mesh)
