"""Predictions further ahead than the next token: their labels, masks, losses and acceptance.

At step k, a drafter predicts token t + 2 + k, from all positions t of a window at once. It has the
target's states up to t, and the tokens of the text up to t + 1 + k.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from specjax.drafters.candidates import Vocabulary
from specjax.evaluation.metrics import overlap
from specjax.models.transformer import Output
from specjax.shape_checks import shape_checked
from specjax.training import losses
from specjax.training.contract import Batch, Loss, Metrics

Labels = Literal["text", "target"]
"""The labels: the tokens of the text, or the target's distribution at their positions."""


def ahead(values: jax.Array, by: int) -> jax.Array:
    """Shift ``values [B, T, ...]`` by some positions to the left, and pad the right end with 0."""
    padding = [(0, 0), (0, by)] + [(0, 0)] * (values.ndim - 2)
    return jnp.pad(values, padding)[:, by:]


def behind(values: jax.Array, by: int) -> jax.Array:
    """Shift ``values [B, T, ...]`` by some positions to the right, and pad the left end with 0."""
    padding = [(0, 0), (by, 0)] + [(0, 0)] * (values.ndim - 2)
    return jnp.pad(values, padding)[:, : values.shape[1]]


@shape_checked
def counted(batch: Batch, step: int) -> Bool[Array, "B T"]:
    """Return the positions whose prediction of this step counts.

    All tokens that the prediction depends on must be of one document, and its label must be under
    the loss mask. The distribution after the last token of a document counts as well: it says that
    the text ends.
    """
    segments = batch["segments"]
    count = segments.shape[1] - 1
    # Beyond the end of the window, the segments are padding, but the shifted mask is False there.
    same = segments[:, :count] == ahead(segments, 1 + step)[:, :count]
    return ahead(batch["loss_mask"], 1 + step) & same


def expected(output: Output, step: int) -> tuple[jax.Array, jax.Array]:
    """Return the hidden states ``[B, T, H]`` and logits ``[B, T, V]`` that a step predicts."""
    return ahead(output.hidden, 1 + step), ahead(output.logits, 1 + step)


def prediction_loss(
    labels: Labels, output: Output, batch: Batch, step: int, logits: jax.Array
) -> jax.Array:
    """Return the mean cross entropy of the predictions ``logits [B, T, V]`` of a step, in nats."""
    if labels == "text":
        entropies = losses.cross_entropy(
            logits, ahead(batch["tokens"], 2 + step)[:, : logits.shape[1]]
        )
    else:
        entropies = losses.soft_cross_entropy(expected(output, step)[1], logits)
    return losses.mean_over_positions(entropies, counted(batch, step))


def decayed(
    batch: Batch,
    states: Iterable[jax.Array],
    loss_of: Callable[[jax.Array, jax.Array], jax.Array],
    decay: float,
    whole: ArrayLike = True,
) -> Loss:
    """Return the sum over steps k of ``decay ** k`` times their losses, and each of the losses.

    This is the loss of EAGLE-3, arXiv 2503.01840.

    Args:
        batch: the windows.
        states: ``[B, T, H]`` the states of each step.
        loss_of: returns the loss of states ``[B, T, H]`` under a mask ``[B, T]``. Each state stands
            at the position of the distribution that it predicts.
        decay: the factor of the weight from one step to the next.
        whole: ``[B, T]`` bool which distributions count at all.
    """
    total, metrics = jnp.zeros(()), {}
    for step, step_states in enumerate(states):
        # Shift the states to the distributions: [B, T, H] is smaller than [B, T, V].
        loss = loss_of(
            behind(step_states, 1 + step), behind(counted(batch, step), 1 + step) & whole
        )
        total += decay**step * loss
        metrics |= {f"loss_{step}": loss}
    return total, {"loss": total, **metrics}


SIMULATED_STEPS = 5
"""The length of the chains that evaluations simulate.

It is the same for all drafters, so that their metrics can be compared.
"""


def simulate(
    output: Output,
    batch: Batch,
    predicted: Iterable[jax.Array],
    vocabulary: Vocabulary | None = None,
) -> Metrics:
    """Return the metrics of chains of `SIMULATED_STEPS` drafted tokens from every position.

    The drafting is simulated: each step reads the tokens of the text, not the drafted ones. If the
    target generated the text itself, the result is exact. Otherwise, the target may disagree with
    the text, and no real draft would be accepted beyond that token.

    Args:
        output: the target's output at the windows.
        batch: the windows.
        predicted: the drafter's logits ``[B, T, Vd]`` of each step. If there are fewer steps, the
            chains are shorter.
        vocabulary: the vocabulary of these logits; None for the target's.

    Returns:
        ``accuracy_k``: how often the drafter's likeliest token at step k is the target's, whatever
        came before. ``acceptance_length``: the mean number of tokens that a step of greedy decoding
        emits, with the bonus token, over the positions where all steps count.
        ``acceptance_length_sampled``: the same at temperature 1, from the acceptance probability
        ``sum(min(p, q))`` of each step.
    """
    whole = functools.reduce(
        jnp.logical_and, [counted(batch, step) for step in range(SIMULATED_STEPS)]
    )
    # For each position, whether all steps up to this one are accepted, and the probability of that.
    all_accepted, probability = jnp.where(whole, 1.0, 0.0), jnp.where(whole, 1.0, 0.0)
    length, sampled_length = jnp.ones(()), jnp.ones(())
    metrics = {}
    for step, logits in enumerate(predicted):
        target_logits = expected(output, step)[1]
        likeliest, q = jnp.argmax(logits, axis=-1), jax.nn.softmax(logits)
        if vocabulary is not None:
            likeliest, q = vocabulary.ids[likeliest], vocabulary.widen(q)
        is_right = likeliest == jnp.argmax(target_logits, axis=-1)
        all_accepted = all_accepted * is_right
        probability = probability * overlap(jax.nn.softmax(target_logits), q)
        length += losses.mean_over_labels(all_accepted, whole)
        sampled_length += losses.mean_over_labels(probability, whole)
        metrics[f"accuracy_{step}"] = losses.mean_over_labels(is_right, counted(batch, step))
    return {"acceptance_length": length, "acceptance_length_sampled": sampled_length, **metrics}
