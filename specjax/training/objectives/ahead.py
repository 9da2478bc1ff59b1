"""Predictions further ahead than the next token: their labels, masks, losses and acceptance.

At step k, a drafter predicts token t + 2 + k, from all positions t of a window at once. It has the
target's states up to t, and the tokens of the text up to t + 1 + k.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from specjax.drafters.candidates import Vocabulary
from specjax.evaluation.metrics import overlap
from specjax.models.transformer import Target
from specjax.shape_checks import shape_checked
from specjax.training import losses
from specjax.training.contract import Batch, Loss, Mean
from specjax.training.objectives.chunks import by_chunks, width_of

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


def counted_behind(batch: Batch, step: int) -> Bool[Array, "B T"]:
    """Return the same as `counted`, each at the position of the distribution that it predicts."""
    return behind(counted(batch, step), 1 + step)


def label_entropy(labels: Labels, expected: jax.Array, logits: jax.Array) -> jax.Array:
    """Return the cross entropy ``[...]`` of predictions ``logits [..., V]``, in nats.

    ``expected`` are the tokens of the text, ``[...]``, or the target's logits, ``[..., V]``.
    """
    if labels == "text":
        return losses.cross_entropy(logits, expected)
    return losses.soft_cross_entropy(expected, logits)


def compared(
    student: Any,
    states: Iterable[jax.Array],
    values_of: Callable[[Any, int, jax.Array, Any], Any],
    arrays: Sequence[Any],
    labels_of: Callable[..., Any],
    *,
    numbers: int,
    mesh: Mesh | None = None,
) -> list[Any]:
    """Compare the predictions of each step with the labels, by chunks of positions.

    All steps of a chunk are compared with the same labels. So the target's logits are computed once
    for all steps, and exist for one chunk at a time.

    Args:
        student: the weights that are trained.
        states: ``[B, T, H]`` the states of each step. They are shifted to the positions of the
            distributions that they predict: token t + 2 + k, which step k predicts from t, is
            compared at position t + 1 + k.
        values_of: returns a pytree of ``[B, n]`` values from the student, the step, its states
            ``[B, n, H]`` at n positions, and the labels there.
        arrays: pytrees of ``[B, T, ...]`` from which the labels are computed.
        labels_of: returns the labels at n positions from these arrays, ``[B, n, ...]``.
        numbers: see `chunks.width_of`.
        mesh: see `chunks.width_of`.

    Returns:
        For each step the values ``[B, T]`` at all positions.
    """
    # Shift the states and not the logits: [B, T, H] is smaller than [B, T, V].
    shifted = [behind(of_step, 1 + step) for step, of_step in enumerate(states)]
    rows, count = shifted[0].shape[:2]
    # The steps of a chunk are computed one after the other for the gradient, too.
    is_small = width_of(rows, count, numbers * len(shifted), mesh) >= count
    values_of_step = values_of if is_small else jax.checkpoint(values_of, static_argnums=1)

    def compare(student: Any, states: list[jax.Array], *arrays: Any) -> list[Any]:
        labels = labels_of(*arrays)
        return [
            values_of_step(student, step, of_step, labels) for step, of_step in enumerate(states)
        ]

    return by_chunks(compare, (shifted, *arrays), numbers, mesh, student=student)


def decayed(
    batch: Batch,
    values: Sequence[Any],
    loss_of: Callable[[Any, jax.Array], jax.Array],
    decay: float,
    whole: ArrayLike = True,
) -> Loss:
    """Return the sum over steps k of ``decay ** k`` times their losses, and each of the losses.

    This is the loss of EAGLE-3, arXiv 2503.01840.

    Args:
        batch: the windows.
        values: the values of each step, see `compared`.
        loss_of: returns the losses ``[B, T]`` from the values of a step and the mask ``[B, T]`` of
            those that count.
        decay: the factor of the weight from one step to the next.
        whole: ``[B, T]`` bool which distributions count at all.
    """
    total, metrics = jnp.zeros(()), {}
    for step, of_step in enumerate(values):
        mask = counted_behind(batch, step) & whole
        loss = losses.mean_over_positions(loss_of(of_step, mask), mask)
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
