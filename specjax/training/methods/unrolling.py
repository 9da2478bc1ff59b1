"""Training a drafter on what it will meet while it drafts: several steps at all positions of a window at once.

At step 0 the drafter reads, at every position t, the pair (feature of t, token t + 1), and predicts token t + 2. At step k it
reads its own state of step k - 1 in the feature's place, and token t + 1 + k, and predicts token t + 2 + k: as in a chain that
it drafts from position t on. Of the pairs with features it sees those up to t, and of each later step its own place alone.
HASS calls this harmonised context alignment, EAGLE-3 training-time test. Tokens are the text's, not the drafter's own.
"""

import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.drafters.features import FeatureDrafter
from specjax.evaluation.metrics import overlap
from specjax.models.transformer import Output, Target
from specjax.shape_checks import shape_checked
from specjax.training import losses
from specjax.training.methods.base import Batch, Method, Metrics
from specjax.training.methods.windows import document_mask, read


def unroll(
    student: FeatureDrafter, batch: Batch, target: Target, features: jax.Array, steps: int, *, detach: bool, remat: bool = False
) -> Iterator[jax.Array]:
    """The drafter's states ``[B, T, H]`` of each step.

    Args:
        student: the drafter.
        batch: the windows.
        target: whose embedding is used.
        features: ``[B, T, H]`` at each token.
        steps: how many.
        detach: whether no gradient flows from a step into the one before.
        remat: whether a step's inner values are worked out again for the gradient, and not kept.
    """
    count = features.shape[1]
    causal = document_mask(batch["segments"][:, :-1])
    run = jax.checkpoint(type(student).run, static_argnums=()) if remat else type(student).run
    states, past = features, ((),) * student.sizes.num_layers
    for step in range(steps):
        embedded = student.embed(target, ahead(batch["tokens"], 1 + step)[:, :count])
        positions = jnp.broadcast_to(step + jnp.arange(count), (features.shape[0], count))
        mask = causal if step == 0 else None
        states, new = run(student, states, embedded, positions, mask, past)
        yield states
        states = jax.lax.stop_gradient(states) if detach else states
        past = tuple((*before, (entry, mask)) for before, entry in zip(past, new, strict=True))


def ahead(values: jax.Array, by: int) -> jax.Array:
    """``values [B, T, ...]`` moved ``by`` places to the left; zeros, False or nothing of meaning come in on the right."""
    padding = [(0, 0), (0, by)] + [(0, 0)] * (values.ndim - 2)
    return jnp.pad(values, padding)[:, by:]


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
    assert output.logits is not None
    return ahead(output.hidden, 1 + step), ahead(output.logits, 1 + step)


SIMULATED_STEPS = 5
"""Drafted tokens of the chains that evaluations simulate, the same for all drafters, so that their figures compare."""


def simulate(student: FeatureDrafter, batch: Batch, target: Target) -> Metrics:
    """What chains of `SIMULATED_STEPS` drafted tokens would be worth, from every position of the windows.

    Simulated, because the tokens are the text's. Where the target would not have written them, so would no draft be accepted
    beyond them; on text that the target wrote itself nothing is left out.

    Returns:
        ``accuracy_k``: how often the drafter's likeliest token at step k is the target's, whatever came before.
        ``acceptance_length``: tokens that a greedy step of decoding emits, the target's own included; over the positions at
        which all steps count. ``acceptance_length_sampled``: the same at temperature 1, with the probability
        ``sum(min(p, q))`` of each step in place of agreement.
    """
    output = read(target, batch, student.taps(target.config))
    vocabulary = student.vocabulary(target)
    whole = functools.reduce(jnp.logical_and, [counted(batch, step) for step in range(SIMULATED_STEPS)])
    still, drafted = jnp.where(whole, 1.0, 0.0), jnp.where(whole, 1.0, 0.0)
    length, sampled = jnp.ones(()), jnp.ones(())
    metrics = {}
    states_of_steps = unroll(student, batch, target, student.features(output), SIMULATED_STEPS, detach=True)
    for step, states in enumerate(states_of_steps):
        theirs, ours = expected(output, step)[1], student.logits(target, states)
        likeliest, q = jnp.argmax(ours, axis=-1), jax.nn.softmax(ours)
        if vocabulary is not None:
            likeliest, q = vocabulary.ids[likeliest], vocabulary.widen(q)
        right = likeliest == jnp.argmax(theirs, axis=-1)
        still, drafted = still * right, drafted * overlap(jax.nn.softmax(theirs), q)
        length += losses.mean_over_labels(still, whole)
        sampled += losses.mean_over_labels(drafted, whole)
        metrics[f"accuracy_{step}"] = losses.mean_over_labels(right, counted(batch, step))
    return {"acceptance_length": length, "acceptance_length_sampled": sampled, **metrics}


class FeatureMethod(Method):
    """A method that trains a `FeatureDrafter`: held-out windows are judged by `simulate`."""

    best_by: ClassVar[str] = "acceptance_length"

    def evaluation(self, student: FeatureDrafter, batch: Batch, target: Target | None) -> Metrics:
        assert target is not None
        return simulate(student, batch, target)


def layer_sizes(intermediate_size: int) -> dict[str, Any]:
    """The sizes that a method's options override, as ``init`` of a `FeatureDrafter` takes them."""
    return {"intermediate_size": intermediate_size} if intermediate_size else {}


@shape_checked
def smooth_l1(predicted: Float[Array, "B T H"], wanted: Float[Array, "B T H"]) -> Float[Array, "B T"]:
    """SmoothL1 with beta 1, its mean over H: half the square of a difference below 1, and beyond it the difference less 1/2."""
    size = jnp.abs(predicted.astype(jnp.float32) - wanted.astype(jnp.float32))
    return jnp.mean(jnp.where(size < 1, 0.5 * size * size, size - 0.5), axis=-1)
