"""Training a drafter on what it will meet while it drafts: several steps at all positions of a window at once.

At step 0 the drafter reads, at every position t, the pair (feature of t, token t + 1), and predicts token t + 2. At step k it
reads its own state of step k - 1 in the feature's place, and token t + 1 + k, and predicts token t + 2 + k: as in a chain that
it drafts from position t on. Of the pairs with features it sees those up to t, and of each later step its own place alone.
HASS calls this harmonised context alignment, EAGLE-3 training-time test. Tokens are the text's, not the drafter's own.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.drafters.features import FeatureDrafter, seen_by
from specjax.models.transformer import Output, Target
from specjax.training.methods.ahead import SIMULATED_STEPS, ahead, simulate
from specjax.training.methods.base import Batch, Method, Metrics
from specjax.training.methods.windows import document_mask, first_tokens, score


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
    count, last = features.shape[1], student.modules - 1
    causal, place = document_mask(batch["segments"][:, :-1]), places(batch["segments"][:, :-1])
    run = jax.checkpoint(type(student).run, static_argnums=(6,)) if remat else type(student).run
    every = jnp.broadcast_to(jnp.arange(count), features.shape[:2])
    embedded = student.embed(target, ahead(batch["tokens"], 1)[:, :count])
    states, mask, new = features, causal, ()
    for module in range(student.modules):
        if module:
            states = jnp.pad(states, ((0, 0), (1, 0), (0, 0)))[:, :-1]
            mask = seen_by(module, place, causal)
        states, new = run(student, states, embedded, every, mask, ((),) * student.sizes.num_layers, module)
        if module < steps:
            yield ahead(states, module)
    states = ahead(states, last)
    past = tuple(((entry, ahead(mask, last)),) for entry in new)
    for step in range(student.modules, steps):
        states = jax.lax.stop_gradient(states) if detach else states
        embedded = student.embed(target, ahead(batch["tokens"], 1 + step)[:, :count])
        states, new = run(student, states, embedded, every + step, None, past, last)
        yield states
        past = tuple((*before, (entry, None)) for before, entry in zip(past, new, strict=True))


def places(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """How far each token is from the first one of its document in the window."""
    index = jnp.arange(segments.shape[1])
    return index - jax.lax.cummax(jnp.where(first_tokens(segments), index, 0), axis=1)


class FeatureMethod(Method):
    """A method that trains a `FeatureDrafter`: held-out windows are judged by `simulate`."""

    best_by: ClassVar[str] = "acceptance_length"

    def evaluation(self, student: FeatureDrafter, batch: Batch, target: Target | None) -> Metrics:
        assert target is not None
        output, entries = score(target, batch, student.taps(target.config))
        return simulate_unrolled(student, batch, target, output, student.features(output, entries))


def simulate_unrolled(student: FeatureDrafter, batch: Batch, target: Target, output: Output, features: jax.Array) -> Metrics:
    """`simulate` of a drafter of ``features``, given the target's ``output`` at the windows."""
    steps = unroll(student, batch, target, features, SIMULATED_STEPS, detach=True)
    logits = (student.logits(target, states, min(step, student.modules - 1)) for step, states in enumerate(steps))
    return simulate(output, batch, logits, student.vocabulary(target))


def layer_sizes(intermediate_size: int) -> dict[str, Any]:
    """The sizes that a method's options override, as a drafter's ``init`` takes them."""
    return {"intermediate_size": intermediate_size} if intermediate_size else {}
