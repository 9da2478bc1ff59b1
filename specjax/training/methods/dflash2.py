"""DFlash2 (z-lab 2026, github.com/z-lab/dflash): a DFlash with convolutions and a selector."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from specjax.config import ConfigError
from specjax.drafters.methods.dflash2 import DFlash2
from specjax.models.transformer import Target
from specjax.training.objectives.blocks import DraftedBlocks, TokenMethod


@dataclass(frozen=True)
class DFlash2Training(TokenMethod):
    """DFlash's cross entropy, and the selector's cross entropy among its candidates.

    The selector reads the text's token before each candidate. If the right token is not a
    candidate, it replaces the last one, as in speculators. With ``labels: target``, the right token
    is the target's likeliest. Both terms are weighted by depth; D-PACE weights each by its own
    probabilities. The option ``loss`` replaces the first term alone. For further fields see
    `TokenMethod`.

    Attributes:
        name: the name of the method.
        block_size: the number of tokens of a block, with the anchor.
        gamma: depth d has the weight ``exp(-(d - 1) / gamma)``; 0 gives all depths the same weight.
        conv_kernel_size: the width of the convolution kernels in tokens.
        conv_group_size: the number of channels that share the dynamic part of a kernel; it must
            divide the target's hidden size.
        selector_rank: the rank of the selector's codebooks.
        selector_top_k: the number of candidates at each depth.
        selector_weight: the weight of the selector's cross entropy.

    Examples:
        >>> from specjax.training.methods import DFlash2Training
        >>> DFlash2Training(target="embedded").check(window=512)
        >>> DFlash2Training(target="embedded", block_size=4, conv_kernel_size=5).check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.conv_kernel_size=5: must be at least 1, and at most ...
    """

    name: Literal["dflash2"] = "dflash2"
    block_size: int = 8
    gamma: float = 4.0
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    selector_weight: float = 1.0
    kind: ClassVar[type[DFlash2]] = DFlash2

    def check(self, window: int) -> None:
        super().check(window)
        if not 1 <= self.conv_kernel_size <= self.block_size:
            raise ConfigError(
                f"method.conv_kernel_size={self.conv_kernel_size}: must be at least 1, and at most "
                f"method.block_size={self.block_size}"
            )
        self.check_minimum(1, "conv_group_size", "selector_rank", "selector_top_k")
        self.check_minimum(0, "selector_weight")

    def options(self) -> Mapping[str, Any]:
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        return {**super().options(), **{name: getattr(self, name) for name in names}}

    def each(
        self, student: DFlash2, target: Target, drafted: DraftedBlocks
    ) -> dict[str, jax.Array]:
        logits = student.logits(target, drafted.states)
        if self.labels == "text":
            right = drafted.tokens
        else:
            right = jnp.argmax(target.head(drafted.hidden), axis=-1)
        values = self.token_values(logits, target, drafted)
        return {**values, "selector": _selector_loss(student, logits, drafted, right)}

    def terms(self, values: dict[str, jax.Array], valid: jax.Array) -> dict[str, jax.Array]:
        entropy = values["selector"]
        selector = self.weighed(entropy, jnp.exp(-entropy), valid)
        return {
            "token_loss": self.token_loss(values, valid),
            "selector_loss": self.selector_weight * selector,
        }

    def expected(
        self, student: DFlash2, target: Target, states: jax.Array, before: jax.Array
    ) -> Iterator[jax.Array]:
        return (
            student.expected(target, states[..., depth, :], before[..., depth])
            for depth in range(before.shape[-1])
        )


def _selector_loss(
    student: DFlash2, logits: jax.Array, drafted: DraftedBlocks, right: jax.Array
) -> jax.Array:
    """Return the selector's cross entropy ``[B, A, D]`` to the tokens ``right [B, A, D]``.

    ``logits [B, A, D, V]`` are those of the block.
    """
    _, ids = student.candidates(logits)
    is_there = jnp.any(ids == right[..., None], axis=-1)
    ids = ids.at[..., -1].set(jnp.where(is_there, ids[..., -1], right))
    scores = jnp.take_along_axis(logits, ids, axis=-1)
    log_q = jax.nn.log_softmax(
        student.selected(scores, ids, student.selector_context(drafted.states), drafted.before)
    )
    return -jnp.sum(jnp.where(ids == right[..., None], log_q, 0.0), axis=-1)
