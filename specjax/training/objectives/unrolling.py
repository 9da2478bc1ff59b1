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

from specjax.drafters.features import FeatureDrafter, visible_in
from specjax.models.transformer import Output, Target
from specjax.training.contract import Batch, Metrics, TrainingMethod
from specjax.training.objectives.ahead import SIMULATED_STEPS, ahead, simulate
from specjax.training.objectives.windows import document_mask, first_tokens, score


def unroll(
    student: FeatureDrafter, batch: Batch, target: Target, features: jax.Array, steps: int, *, detach: bool, remat: bool = False
) -> Iterator[jax.Array]:
    """The drafter's states ``[B, T, H]`` of each step.

    A window of 5 tokens that are one document (T = 5: inputs are tokens 0 to 4, the last label is token 5), and 3 steps. The
    table says what is read at place t: the state, the token, and after @ the RoPE position. ``f`` is a feature, ``a`` a state
    of step 0, ``b`` one of step 1, each with its place::

                  t = 0     t = 1     t = 2     t = 3     t = 4    predicts token
        step 0    f0 1 @0   f1 2 @1   f2 3 @2   f3 4 @3   f4 5 @4       t + 2
        step 1    a0 2 @1   a1 3 @2   a2 4 @3   a3 5 @4   -             t + 3
        step 2    b0 3 @2   b1 4 @3   b2 5 @4   -         -             t + 4

    Where a line stands, the token lies beyond the window: something of no meaning is read there. `counted` leaves that out, and
    predictions of tokens beyond the window, too.

    The table is the same for 1 module and for 2. They differ in who reads, and in what it sees beside its own pair::

                  1 module                                          2 modules
        step 0    module 0: of step 0, those at 0 to t              module 0: of step 0, those at 0 to t
        step 1    module 0: of step 0, those at 0 to t              module 1: of step 1, those at 0 to t
        step 2    module 0: of step 0, those at 0 to t;             module 1: of step 1, those at 0 to t
                  of step 1, that at t

    Every module reads the text once as text. Module 1 reads at pair t what stands above at step 1 and place t - 1, and its
    states are then moved one to the left, to the places from which they are drafted. At its pair 0 there is no state of module
    0 to read, and no other pair sees that one. What follows the last module's first step is drafted: each place goes on alone,
    from its own state.

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
            mask = visible_in(module, place, causal)
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


class FeatureMethod(TrainingMethod):
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
