"""Predictions further ahead than the next token: what they stand for, where they count, and what they would be worth.

At step k, from every position t of a window at once, a drafter predicts token t + 2 + k. Of the target it knows the states up
to t, and of the text the tokens up to t + 1 + k.
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
from specjax.training.contract import Batch, Metrics

Labels = Literal["text", "target"]
"""What is predicted: the text's own tokens, or the target's distribution at their places."""


def ahead(values: jax.Array, by: int) -> jax.Array:
    """``values [B, T, ...]`` moved ``by`` places to the left; zeros, False or nothing of meaning come in on the right."""
    padding = [(0, 0), (0, by)] + [(0, 0)] * (values.ndim - 2)
    return jnp.pad(values, padding)[:, by:]


def behind(values: jax.Array, by: int) -> jax.Array:
    """``values [B, T, ...]`` moved ``by`` places to the right, as `ahead` moves them to the left."""
    padding = [(0, 0), (by, 0)] + [(0, 0)] * (values.ndim - 2)
    return jnp.pad(values, padding)[:, : values.shape[1]]


@shape_checked
def counted(batch: Batch, step: int) -> Bool[Array, "B T"]:
    """Where the prediction of ``step`` counts: all that was read for it is of one document, and its label is under the mask.

    After the last token of a document the target's distribution is as good as anywhere: it says that the text ends there.
    """
    segments = batch["segments"]
    count = segments.shape[1] - 1
    same = segments[:, :count] == ahead(segments, 1 + step)[:, :count]  # beyond the window nothing is under the mask
    return ahead(batch["loss_mask"], 1 + step) & same


def expected(output: Output, step: int) -> tuple[jax.Array, jax.Array]:
    """What the states of ``step`` stand for: the target's hidden states ``[B, T, H]`` and its logits ``[B, T, V]``."""
    return ahead(output.hidden, 1 + step), ahead(output.logits, 1 + step)


def prediction_loss(labels: Labels, output: Output, batch: Batch, step: int, logits: jax.Array) -> jax.Array:
    """The mean cross entropy of ``logits [B, T, V]``, the predictions of ``step``, in nats."""
    if labels == "text":
        each = losses.cross_entropy(logits, ahead(batch["tokens"], 2 + step)[:, : logits.shape[1]])
    else:
        each = losses.soft_cross_entropy(expected(output, step)[1], logits)
    return losses.mean_over_positions(each, counted(batch, step))


def decayed(
    batch: Batch,
    states: Iterable[jax.Array],
    loss_of: Callable[[jax.Array, jax.Array], jax.Array],
    decay: float,
    whole: ArrayLike = True,
) -> tuple[jax.Array, Metrics]:
    """The sum over steps k of ``decay ** k`` times their losses, and each of these (EAGLE-3's, arXiv 2503.01840).

    Args:
        batch: the windows.
        states: ``[B, T, H]`` of each step.
        loss_of: the loss of states ``[B, T, H]`` that stand where the distributions do which they predict; of these the
            positions under a mask ``[B, T]`` count.
        decay: of the later steps' weight.
        whole: ``[B, T]`` bool, which distributions count at all.
    """
    total, metrics = jnp.zeros(()), {}
    for step, of_step in enumerate(states):
        # The states go to the places whose distribution they predict: they are narrow, and the distributions are wide.
        loss = loss_of(behind(of_step, 1 + step), behind(counted(batch, step), 1 + step) & whole)
        total += decay**step * loss
        metrics |= {f"loss_{step}": loss}
    return total, {"loss": total, **metrics}


SIMULATED_STEPS = 5
"""Drafted tokens of the chains that evaluations simulate, the same for all drafters, so that their figures compare."""


def simulate(output: Output, batch: Batch, predicted: Iterable[jax.Array], vocabulary: Vocabulary | None = None) -> Metrics:
    """What chains of `SIMULATED_STEPS` drafted tokens would be worth, from every position of the windows.

    Simulated, because the tokens are the text's. Where the target would not have written them, so would no draft be accepted
    beyond them; on text that the target wrote itself nothing is left out.

    Args:
        output: the target's at the windows.
        batch: the windows.
        predicted: the drafter's logits ``[B, T, Vd]`` of each step. Where there are fewer, the chains are shorter.
        vocabulary: of these logits; None is the target's.

    Returns:
        ``accuracy_k``: how often the drafter's likeliest token at step k is the target's, whatever came before.
        ``acceptance_length``: tokens that a greedy step of decoding emits, the target's own included; over the positions at
        which all steps count. ``acceptance_length_sampled``: the same at temperature 1, with the probability
        ``sum(min(p, q))`` of each step in place of agreement.
    """
    whole = functools.reduce(jnp.logical_and, [counted(batch, step) for step in range(SIMULATED_STEPS)])
    still, drafted = jnp.where(whole, 1.0, 0.0), jnp.where(whole, 1.0, 0.0)
    length, sampled = jnp.ones(()), jnp.ones(())
    metrics = {}
    for step, ours in enumerate(predicted):
        theirs = expected(output, step)[1]
        likeliest, q = jnp.argmax(ours, axis=-1), jax.nn.softmax(ours)
        if vocabulary is not None:
            likeliest, q = vocabulary.ids[likeliest], vocabulary.widen(q)
        right = likeliest == jnp.argmax(theirs, axis=-1)
        still, drafted = still * right, drafted * overlap(jax.nn.softmax(theirs), q)
        length += losses.mean_over_labels(still, whole)
        sampled += losses.mean_over_labels(drafted, whole)
        metrics[f"accuracy_{step}"] = losses.mean_over_labels(right, counted(batch, step))
    return {"acceptance_length": length, "acceptance_length_sampled": sampled, **metrics}
