"""Predictions further ahead than the next token: their labels, masks, losses and acceptance.

At step k, a drafter predicts token t + 2 + k, from all positions t of a window at once. It has the
target's states up to t, and the tokens of the text up to t + 1 + k.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from specjax.drafters.candidates import Vocabulary
from specjax.evaluation.metrics import overlap
from specjax.models.transformer import Output, Target
from specjax.shape_checks import shape_checked
from specjax.training import losses
from specjax.training.contract import Batch, Loss, Mean
from specjax.training.objectives.chunks import by_chunks

Labels = Literal["text", "target"]
"""The labels: the tokens of the text, or the target's distribution at their positions."""

Predictions = tuple[Callable[[Any], jax.Array], Any]
"""A function from states ``[B, n, ...]`` to logits ``[B, n, Vd]``, and states ``[B, T, ...]``."""


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


def agreement(
    logits: jax.Array, target_logits: jax.Array, vocabulary: Vocabulary | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return how far predictions agree with the target.

    Args:
        logits: ``[..., Vd]`` the drafter's logits.
        target_logits: ``[..., V]`` the target's logits at the same predictions.
        vocabulary: the vocabulary of the drafter's logits; None for the target's.

    Returns:
        ``[...]`` bool whether the two likeliest tokens are the same, and ``[...]`` float32 the
        acceptance probability ``sum(min(p, q))`` at temperature 1.
    """
    likeliest, q = jnp.argmax(logits, axis=-1), jax.nn.softmax(logits)
    p = jax.nn.softmax(target_logits)
    if vocabulary is not None:
        # A token that cannot be drafted has q = 0, and adds nothing to the sum.
        likeliest, p = vocabulary.ids[likeliest], vocabulary.noise(p)
    return likeliest == jnp.argmax(target_logits, axis=-1), overlap(p, q)


def simulate(
    target: Target,
    hidden: jax.Array,
    batch: Batch,
    steps: Iterable[Predictions],
    vocabulary: Vocabulary | None = None,
) -> dict[str, Mean]:
    """Return the metrics of `chain_metrics` for predictions from all positions of the windows.

    One step after the other is computed, and each by chunks of positions.

    Args:
        target: the target.
        hidden: ``[B, T, H]`` the target's hidden states at the windows.
        batch: the windows.
        steps: for each step a function from states ``[B, n, ...]`` to logits ``[B, n, Vd]``, and
            the states ``[B, T, ...]`` of all positions. If there are fewer than `SIMULATED_STEPS`,
            the chains are shorter.
        vocabulary: the vocabulary of these logits; None for the target's.
    """

    def agreements() -> Iterator[tuple[jax.Array, jax.Array]]:
        for step, (logits_of, states) in enumerate(steps):

            def compare(
                states: Any, expected: jax.Array, logits_of: Any = logits_of
            ) -> tuple[jax.Array, jax.Array]:
                return agreement(logits_of(states), target.head(expected), vocabulary)

            yield by_chunks(
                compare,
                (states, ahead(hidden, 1 + step)),
                numbers=target.config.vocab_size,
                mesh=target.mesh,
            )

    return chain_metrics(batch, agreements())


def chain_metrics(
    batch: Batch, agreements: Iterable[tuple[jax.Array, jax.Array]]
) -> dict[str, Mean]:
    """Return the metrics of chains of `SIMULATED_STEPS` drafted tokens from every position.

    The drafting is simulated: each step reads the tokens of the text, not the drafted ones. If the
    target generated the text itself, the result is exact. Otherwise, the target may disagree with
    the text, and no real draft would be accepted beyond that token.

    Args:
        batch: the windows.
        agreements: the `agreement` of each step, two arrays ``[B, T]``.

    Returns:
        ``accuracy_k``: how often the drafter's likeliest token at step k is the target's, whatever
        came before. ``acceptance_k``: the mean acceptance probability of a token drawn at step k,
        whatever came before. ``acceptance_length``: the mean number of tokens that a step of greedy
        decoding emits, with the bonus token, over the positions where all steps count.
        ``acceptance_length_sampled``: the same at temperature 1, from the acceptance probabilities.
    """
    whole = functools.reduce(
        jnp.logical_and, [counted(batch, step) for step in range(SIMULATED_STEPS)]
    )
    # For each position, whether all steps up to this one are accepted, and the probability of that.
    all_accepted, probability = jnp.where(whole, 1.0, 0.0), jnp.where(whole, 1.0, 0.0)
    length, sampled_length = jnp.zeros(whole.shape), jnp.zeros(whole.shape)
    accuracy, acceptance = {}, {}
    for step, (is_right, accepted) in enumerate(agreements):
        all_accepted, probability = all_accepted * is_right, probability * accepted
        length, sampled_length = length + all_accepted, sampled_length + probability
        counts = counted(batch, step)
        accuracy[f"accuracy_{step}"] = Mean.over_labels(is_right, counts)
        acceptance[f"acceptance_{step}"] = Mean.over_labels(accepted, counts)
    # The target's own token comes after the accepted ones.
    return {
        "acceptance_length": Mean.over_labels(length, whole, base=1.0),
        "acceptance_length_sampled": Mean.over_labels(sampled_length, whole, base=1.0),
        **accuracy,
        **acceptance,
    }
