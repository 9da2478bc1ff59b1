"""DSpark (DeepSeek-AI 2026, github.com/deepseek-ai/DeepSpec): a DFlash with two more heads.

One is a Markov head, the other a confidence head.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from specjax.config import ConfigError
from specjax.drafters.checkpoints.dflash_config import Markov
from specjax.drafters.methods.dspark import DSpark
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.objectives.acceptance import (
    AcceptanceLoss,
    acceptance_loss_by_depth,
    acceptance_values,
    check_loss,
)
from specjax.training.objectives.blocks import BlockMethod, DraftedBlocks, weights_by_depth


@dataclass(frozen=True)
class DSparkTraining(BlockMethod):
    """The cross entropy to the text, the distance to the target, and the confidence head's loss.

    The distance to the target's distribution is ``sum |p - q|``, twice the total variation, as in
    equation 10 of the paper. The confidence head learns the acceptance probability of a sampled
    token, ``sum min(p, q)``. All terms are weighted by depth. For further fields see `BlockMethod`.

    Attributes:
        name: the name of the method.
        block_size: the number of tokens of a block. The anchor predicts the first one.
        markov_rank: the rank of the Markov head; 0 for none.
        markov: the kind of the Markov head.
        confidence: whether there is a confidence head.
        token_weight: the weight of the cross entropy.
        distance_weight: the weight of the distance, or of the loss that replaces it.
        loss: the distance, as published, or a loss of acceptance (arXiv 2602.23881) instead.
        eta: the parameter of the hybrid loss, see `losses.hybrid`.
        confidence_weight: the weight of the confidence head's cross entropy.
        gamma: depth d has the weight ``exp(-(d - 1) / gamma)``; 0 gives all depths the same weight.
        freeze_head: whether to freeze embedding and head, which start as the target's. Published
            drafters are trained so.

    Examples:
        >>> from specjax.training.methods import DSparkTraining
        >>> DSparkTraining(target="embedded").check(window=512)
        >>> DSparkTraining(target="embedded", markov_rank=0, confidence=False).check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.markov_rank=0, method.confidence=False: a DSpark ...
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
                f"method.markov_rank={self.markov_rank}, method.confidence={self.confidence}: a"
                " DSpark has at least one of the two heads"
            )
        self.check_minimum(0, "token_weight", "distance_weight", "confidence_weight", "gamma")
        check_loss(self.loss, "distance", self.eta)

    def options(self) -> Mapping[str, Any]:
        return {
            "markov_rank": self.markov_rank,
            "markov": self.markov,
            "confidence": self.confidence,
        }

    def each(self, student: DSpark, target: Target, drafted: DraftedBlocks) -> dict[str, jax.Array]:
        by_depth = list(_along(student, target, drafted.states, drafted.before))
        logits = jnp.stack([logits for logits, _ in by_depth], axis=-2)
        target_logits = target.head(drafted.hidden)
        values = {"token": losses.cross_entropy(logits, drafted.tokens)}
        if self.loss != "distance":
            log_p = jax.nn.log_softmax(target_logits)
            values |= acceptance_values(self.loss, log_p, logits)
        if self.loss == "distance" or student.config.confidence:
            difference = jax.nn.softmax(target_logits) - jax.nn.softmax(logits)
            values["distance"] = jnp.sum(jnp.abs(difference), axis=-1)
        if student.config.confidence:
            confidence = [logit for _, logit in by_depth if logit is not None]
            values["confidence"] = jnp.stack(confidence, axis=-1)
        return values

    def terms(self, values: dict[str, jax.Array], valid: jax.Array) -> dict[str, jax.Array]:
        weight = weights_by_depth(valid.shape, self.gamma)
        if self.loss == "distance":
            target_term = values["distance"]
        else:
            target_term = acceptance_loss_by_depth(self.loss, values, valid, self.eta)
        terms = {
            "token_loss": self.token_weight * weight * values["token"],
            f"{self.loss}_loss": self.distance_weight * weight * target_term,
        }
        if "confidence" in values:
            confidence = values["confidence"]
            acceptance = jax.lax.stop_gradient(1 - values["distance"] / 2)
            entropy = jnp.logaddexp(0.0, confidence) - acceptance * confidence
            terms["confidence_loss"] = self.confidence_weight * weight * entropy
        return terms

    def expected(
        self, student: DSpark, target: Target, states: jax.Array, before: jax.Array
    ) -> Iterator[jax.Array]:
        return (logits for logits, _ in _along(student, target, states, before))

    def frozen(self, path: str) -> bool:
        return self.freeze_head and path in ("params.embed", "params.lm_head")


def _along(
    student: DSpark, target: Target, states: jax.Array, before: jax.Array
) -> Iterator[tuple[jax.Array, jax.Array | None]]:
    """Yield the logits ``[..., V]`` of each depth, and the confidence logits ``[...]`` or None.

    Args:
        student: the drafter.
        target: the target.
        states: ``[..., D, H]`` the states of the blocks.
        before: ``[..., D]`` the text's token before each prediction.
    """
    memory = student.markov_memory(before.shape[:-1])
    for depth in range(before.shape[-1]):
        state = states[..., depth, :]
        logits, memory, confidence = student.after(
            student.logits(target, state), state, before[..., depth], memory
        )
        yield logits, confidence
