"""The loss of EAGLE-1 and HASS, whose drafter predicts features. HASS adds steps and a term."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specjax.drafters.methods.eagle import Eagle
from specjax.drafters.methods.eagle_layer_attention import EagleWithLayerAttention
from specjax.models.transformer import Target
from specjax.sampling import likeliest
from specjax.training import losses
from specjax.training.contract import Batch, Loss, StudentInputs, row_keys
from specjax.training.objectives.ahead import behind, compared, counted_behind
from specjax.training.objectives.unrolling import FeatureMethod, layer_sizes, unroll
from specjax.training.objectives.windows import read


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
    output, entries = read(target, batch)
    summarise = jax.checkpoint(type(student).features) if remat else type(student).features
    features = summarise(student, output, entries)
    count = features.shape[1]
    if noise and not isinstance(student, EagleWithLayerAttention):
        width = noise * 512 / count
        features = features + jax.vmap(
            lambda key: jax.random.uniform(
                key, features.shape[1:], features.dtype, -width / 2, width / 2
            )
        )(row_keys(batch))
    states = list(unroll(student, batch, target, features, steps, detach=True, remat=remat))

    def values_of(
        student: Eagle, step: int, states: jax.Array, target_logits: jax.Array
    ) -> dict[str, jax.Array]:
        logits = student.logits(target, states)
        values = {"token": losses.soft_cross_entropy(target_logits, logits)}
        if top_k_weight:
            best, tokens = likeliest(jax.nn.softmax(target_logits), top_k)
            log_q = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens, axis=-1)
            values["top_k"] = -jnp.sum(best * log_q, axis=-1)
        return values

    values = compared(
        student,
        states,
        values_of,
        (output.hidden,),
        target.head,
        numbers=target.config.vocab_size,
        mesh=target.mesh,
    )
    total, metrics = jnp.zeros(()), {}
    for step, (of_step, step_states) in enumerate(zip(values, states, strict=True)):
        mask = counted_behind(batch, step)
        distance = losses.smooth_l1(behind(step_states, 1 + step), output.hidden)
        feature_term = losses.mean_over_positions(distance, mask)
        token_term = losses.mean_over_positions(of_step["token"], mask)
        loss = feature_term + token_weight * token_term
        if top_k_weight:
            loss += top_k_weight * losses.mean_over_positions(of_step["top_k"], mask)
        total += loss / steps
        metrics |= {f"feature_loss_{step}": feature_term, f"token_loss_{step}": token_term}
    return total, {"loss": total, **metrics}
