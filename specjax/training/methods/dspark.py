"""DSpark (DeepSeek-AI 2026, github.com/deepseek-ai/DeepSpec): a DFlash with a Markov head and a confidence head."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from specjax.config import ConfigError
from specjax.drafters.checkpoints.dflash_config import Markov
from specjax.drafters.methods.dspark import DSpark
from specjax.models.transformer import Target
from specjax.training.objectives.acceptance import AcceptanceLoss, acceptance_loss_by_depth, check_loss
from specjax.training.objectives.blocks import BlockMethod, DraftedBlocks, falling


@dataclass(frozen=True)
class DSparkTraining(BlockMethod):
    """Cross entropy to the text, the distance to the target's distribution, and what the confidence head should have said.

    The distance is ``sum |p - q|``, twice the total variation, as in the paper's equation 10. The confidence head learns the
    chance that a drawn token is accepted, ``sum min(p, q)``. All are weighed by depth. Further fields: `BlockMethod`.

    Attributes:
        name: the method.
        block_size: tokens of a block, of which the anchor predicts the first.
        markov_rank: of the Markov head; 0: none.
        markov: its kind.
        confidence: whether there is a confidence head.
        token_weight: of the cross entropy.
        distance_weight: of the distance, or of what is in its place.
        loss: the distance, as published, or in its place one of the losses of acceptance (arXiv 2602.23881).
        eta: of the hybrid one, see `losses.hybrid`.
        confidence_weight: of the confidence head's cross entropy.
        gamma: depth d weighs ``exp(-(d - 1) / gamma)``; 0: all alike.
        freeze_head: leave embedding and head as they begin, the target's own, as published.

    Examples:
        >>> from specjax.training.methods import DSparkTraining
        >>> DSparkTraining(target="embedded").check(window=512)
        >>> DSparkTraining(target="embedded", markov_rank=0, confidence=False).check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.markov_rank=0, method.confidence=False: a DSpark has at least one of the two heads
    """

    name: Literal["dspark"] = "dspark"
    block_size: int = 7
    markov_rank: int = 256
    markov: Markov = "vanilla"
    confidence: bool = True
    token_weight: float = 0.1
    distance_weight: float = 0.9
    loss: Literal["distance"] | AcceptanceLoss = "distance"
    eta: float = 3.0
    confidence_weight: float = 1.0
    gamma: float = 4.0
    freeze_head: bool = True
    kind: ClassVar[type[DSpark]] = DSpark

    def check(self, window: int) -> None:
        super().check(window)
        if self.markov_rank < 0 or not (self.markov_rank or self.confidence):
            raise ConfigError(
                f"method.markov_rank={self.markov_rank}, method.confidence={self.confidence}: a DSpark has at least one of the "
                "two heads"
            )
        weights = (self.token_weight, self.distance_weight, self.confidence_weight, self.gamma)
        if min(weights) < 0:
            raise ConfigError(f"method: token_weight, distance_weight, confidence_weight, gamma={weights}: must be at least 0")
        check_loss(self.loss, "distance", self.eta)

    def options(self) -> Mapping[str, Any]:
        return {"markov_rank": self.markov_rank, "markov": self.markov, "confidence": self.confidence}

    def each(self, student: DSpark, target: Target, drafted: DraftedBlocks) -> dict[str, jax.Array]:
        by_depth = list(_along(student, target, drafted.states, drafted.before))
        logits = jnp.stack([logits for logits, _ in by_depth], axis=-2)
        theirs = target.head(drafted.hidden)
        log_q, p = jax.nn.log_softmax(logits), jax.nn.softmax(theirs)
        token = -jnp.take_along_axis(log_q, drafted.tokens[..., None], axis=-1)[..., 0]
        distance = jnp.sum(jnp.abs(p - jnp.exp(log_q)), axis=-1)
        weight, apart = falling(token.shape, self.gamma), distance
        if self.loss != "distance":
            apart = acceptance_loss_by_depth(self.loss, jax.nn.log_softmax(theirs), log_q, drafted.valid, self.eta)
        terms = {"token_loss": self.token_weight * weight * token, f"{self.loss}_loss": self.distance_weight * weight * apart}
        if student.config.confidence:
            confidence = jnp.stack([said for _, said in by_depth if said is not None], axis=-1)
            kept = jax.lax.stop_gradient(1 - distance / 2)
            missed = jnp.logaddexp(0.0, confidence) - kept * confidence
            terms["confidence_loss"] = self.confidence_weight * weight * missed
        return terms

    def expected(self, student: DSpark, target: Target, states: jax.Array, before: jax.Array) -> Iterator[jax.Array]:
        return (logits for logits, _ in _along(student, target, states, before))

    def frozen(self, path: str) -> bool:
        return self.freeze_head and path in ("params.embed", "params.lm_head")


def _along(
    student: DSpark, target: Target, states: jax.Array, before: jax.Array
) -> Iterator[tuple[jax.Array, jax.Array | None]]:
    """At each depth of blocks that came to ``states [..., D, H]``, given the text's tokens ``before [..., D]``: the logits
    ``[..., V]``, and those of the confidence head ``[...]``, where there is one."""
    memory = student.markov_memory(before.shape[:-1])
    for depth in range(before.shape[-1]):
        here = states[..., depth, :]
        logits, memory, confidence = student.after(student.logits(target, here), here, before[..., depth], memory)
        yield logits, confidence
