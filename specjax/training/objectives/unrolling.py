"""Training of a drafter on its own states: several draft steps from all positions of a window.

At step 0, the drafter reads at every position t the pair of the feature of t and token t + 1, and
predicts token t + 2. At step k, it reads its own state of step k - 1 instead of the feature, and
token t + 1 + k, and predicts token t + 2 + k, as in a chain that it drafts from position t. It
attends to the pairs with features up to t, and in each later step to its own position alone. HASS
calls this harmonized context alignment, EAGLE-3 calls it training-time test. The tokens are those
of the text, not drafted ones.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.drafters.features import FeatureDrafter, visible_in
from specjax.models.attention import Piece
from specjax.models.transformer import Target
from specjax.training.contract import Batch, Mean, TrainingMethod
from specjax.training.objectives.ahead import SIMULATED_STEPS, ahead, simulate
from specjax.training.objectives.windows import document_mask, positions, read


def unroll(
    student: FeatureDrafter,
    batch: Batch,
    target: Target,
    features: jax.Array,
    steps: int,
    *,
    detach: bool,
    remat: bool = False,
) -> Iterator[jax.Array]:
    """Yield the drafter's states ``[B, T, Hs]`` of each step.

    The example is a window of 5 tokens of one document (T = 5: the inputs are tokens 0 to 4, the
    last label is token 5) and 3 steps. The table shows what the drafter reads at place t: a state,
    a token, and after @ the RoPE position, which counts from the first token of the document.
    ``f`` is a feature, ``a`` a state of step 0, ``b`` a state of step 1, each with its place::

                  t = 0     t = 1     t = 2     t = 3     t = 4    predicts token
        step 0    f0 1 @0   f1 2 @1   f2 3 @2   f3 4 @3   f4 5 @4       t + 2
        step 1    a0 2 @1   a1 3 @2   a2 4 @3   a3 5 @4   -             t + 3
        step 2    b0 3 @2   b1 4 @3   b2 5 @4   -         -             t + 4

    A dash marks a token beyond the window, where the drafter reads meaningless values. `counted`
    leaves these places out, and also predictions of tokens beyond the window.

    The table is the same for 1 and for 2 modules. The module that reads differs, and so do the
    pairs that it attends to beside its own::

                  1 module                                2 modules
        step 0    module 0: pairs 0 to t of step 0        module 0: pairs 0 to t of step 0
        step 1    module 0: pairs 0 to t of step 0        module 1: pairs 0 to t of step 1
        step 2    module 0: pairs 0 to t of step 0,       module 1: pairs 0 to t of step 1
                  and pair t of step 1

    Every module reads the whole text once. Module 1 reads at pair t what the table shows at step 1
    and place t - 1. Its states are then shifted one position to the left, to the places from which
    they are drafted. Its pair 0 has no state of module 0, and no other pair attends to it. All
    steps after the first step of the last module are drafts: each place continues alone from its
    own state.

    Args:
        student: the drafter.
        batch: the windows.
        target: the target, whose embedding is used.
        features: ``[B, T, H]`` the feature of each token.
        steps: the number of steps.
        detach: whether to stop gradients from a step to the step before.
        remat: whether to recompute a step's activations for the gradient, to save memory.
    """
    count, last = features.shape[1], student.modules - 1
    segments = batch["segments"][:, :-1]
    causal, place = document_mask(segments), positions(segments)
    run = jax.checkpoint(type(student).run, static_argnums=(6,)) if remat else type(student).run
    embedded = student.embed(target, ahead(batch["tokens"], 1)[:, :count])
    states, mask, new = features, causal, ()
    for module in range(student.modules):
        if module:
            states = jnp.pad(states, ((0, 0), (1, 0), (0, 0)))[:, :-1]
            mask = visible_in(module, place, causal)
        states, new = run(
            student, states, embedded, place, mask, ((),) * student.sizes.num_layers, module
        )
        if module < steps:
            yield ahead(states, module)
    states = ahead(states, last)
    # By layer, the KV that the drafted steps attend to: that of the text with its mask, then one
    # entry of each step before, of the own place alone (None instead of a mask). As in drafting, a
    # window hides text alone: a draft is not deeper than the window.
    text, mask = new, ahead(mask, last)
    drafted: tuple[tuple[Piece, ...], ...] = ((),) * len(text)
    for step in range(student.modules, steps):
        states = jax.lax.stop_gradient(states) if detach else states
        embedded = student.embed(target, ahead(batch["tokens"], 1 + step)[:, :count])
        past = tuple(
            ((entry, student.in_window(layer, mask, place + step, place)), *steps_before)
            for layer, (entry, steps_before) in enumerate(zip(text, drafted, strict=True))
        )
        states, new = run(student, states, embedded, place + step, None, past, last)
        yield states
        drafted = tuple(
            (*before, (entry, None)) for before, entry in zip(drafted, new, strict=True)
        )


class FeatureMethod(TrainingMethod):
    """A method that trains a `FeatureDrafter` and evaluates it with `simulate`."""

    best_by: ClassVar[str] = "acceptance_length"

    def evaluation(self, student: FeatureDrafter, batch: Batch, target: Target) -> dict[str, Mean]:
        states, entries = read(target, batch, student.taps(target.config))
        features = student.features(states, entries)
        return simulate_unrolled(student, batch, target, states.hidden, features)


def simulate_unrolled(
    student: FeatureDrafter, batch: Batch, target: Target, hidden: jax.Array, features: jax.Array
) -> dict[str, Mean]:
    """Return the metrics of `simulate` for a feature drafter and the target's ``hidden`` states."""
    steps = unroll(student, batch, target, features, SIMULATED_STEPS, detach=True)
    predictions = (
        (partial(student.logits, target, module=min(step, student.modules - 1)), states)
        for step, states in enumerate(steps)
    )
    return simulate(target, hidden, batch, predictions, student.vocabulary(target))


def layer_sizes(intermediate_size: int) -> dict[str, Any]:
    """Return the sizes that a method overrides, as arguments of a drafter's ``init``."""
    return {"intermediate_size": intermediate_size} if intermediate_size else {}
