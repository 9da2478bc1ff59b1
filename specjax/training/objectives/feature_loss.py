"""The loss of EAGLE-1 and HASS, whose drafter predicts features. HASS adds steps and a term."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specjax.drafters.methods.eagle import Eagle
from specjax.drafters.methods.eagle_layer_attention import EagleWithLayerAttention
from specjax.models.transformer import Target
from specjax.sampling import likeliest
from specjax.training import losses
from specjax.training.contract import Batch, Loss, StudentInputs
from specjax.training.objectives.ahead import counted, expected
from specjax.training.objectives.unrolling import FeatureMethod, layer_sizes, unroll
from specjax.training.objectives.windows import score


@dataclass(frozen=True)
class EagleMethod(FeatureMethod):
    """A method that trains EAGLE-1's drafter.

    Attributes:
        target: directory or hub id of the target.
        lsa: whether the drafter reads the target's keys and values through layer self-attention
            (`EagleWithLayerAttention`).
        intermediate_size: the size of the drafter's MLP; 0 for the target's.
        token_weight: the weight of the cross entropy.
        noise: the width of the uniform noise on the features that the drafter reads, in a window of
            512 tokens.
        remat: whether to recompute activations for the gradient, to save memory.

    Examples:
        >>> from specjax.training.objectives.feature_loss import EagleMethod
        >>> EagleMethod(target="embedded", lsa=True).check(window=512)
    """

    target: str = ""
    lsa: bool = False
    intermediate_size: int = 0
    token_weight: float = 0.1
    noise: float = 0.2
    remat: bool = False

    def init(self, key: jax.Array, inputs: StudentInputs) -> Eagle:
        """Return a drafter with random weights."""
        kind = EagleWithLayerAttention if self.lsa else Eagle
        return kind.init(inputs.frozen_target, key, **layer_sizes(self.intermediate_size))


def feature_loss(
    student: Eagle,
    batch: Batch,
    target: Target,
    *,
    steps: int = 1,
    token_weight: float = 0.1,
    top_k: int = 10,
    top_k_weight: float = 0.0,
    noise: float = 0.0,
    remat: bool = False,
) -> Loss:
    """Return the mean over the steps of SmoothL1 of the feature plus cross entropies of the token.

    Args:
        student: the drafter.
        batch: the windows.
        target: the target, whose features are predicted.
        steps: the number of steps, see `unroll`. States are detached between steps.
        token_weight: the weight of the cross entropy to the target's distribution.
        top_k: the number of the target's likeliest tokens in the last term.
        top_k_weight: the weight of the last term, the cross entropy over these tokens alone, whose
            probabilities are not scaled to a sum of 1 (HASS, equation 3).
        noise: the width of the uniform noise on the features that the drafter reads, in a window of
            512 tokens; in one of T tokens it is multiplied by 512 / T. Features of layer
            self-attention are learnt, and get no noise.
        remat: see `unroll`.

    Returns:
        The loss in nats, and the metrics.
    """
    output, entries = score(target, batch)
    summarise = jax.checkpoint(type(student).features) if remat else type(student).features
    features = summarise(student, output, entries)
    count = features.shape[1]
    if noise and not isinstance(student, EagleWithLayerAttention):
        width = noise * 512 / count
        features = features + jax.random.uniform(
            batch["key"], features.shape, features.dtype, -width / 2, width / 2
        )
    total, metrics = jnp.zeros(()), {}
    for step, states in enumerate(
        unroll(student, batch, target, features, steps, detach=True, remat=remat)
    ):
        mask = counted(batch, step)
        target_states, target_logits = expected(output, step)
        logits = student.logits(target, states)
        feature_term = losses.mean_over_positions(losses.smooth_l1(states, target_states), mask)
        token_term = losses.mean_over_positions(
            losses.soft_cross_entropy(target_logits, logits), mask
        )
        loss = feature_term + token_weight * token_term
        if top_k_weight:
            best, tokens = likeliest(jax.nn.softmax(target_logits), top_k)
            top_k_term = -jnp.sum(
                best * jnp.take_along_axis(jax.nn.log_softmax(logits), tokens, axis=-1), axis=-1
            )
            loss += top_k_weight * losses.mean_over_positions(top_k_term, mask)
        total += loss / steps
        metrics |= {f"feature_loss_{step}": feature_term, f"token_loss_{step}": token_term}
    return total, {"loss": total, **metrics}
