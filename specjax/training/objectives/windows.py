"""Reading the windows of a batch with a model: documents lie end to end in them, and must not see each other."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.models.cache import Entry
from specjax.models.transformer import Output, Target
from specjax.shape_checks import shape_checked
from specjax.training.contract import Batch


@shape_checked
def document_mask(segments: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """A token sees itself and what precedes it in its own document, never another document."""
    count = segments.shape[1]
    return jnp.tril(jnp.ones((count, count), bool)) & (segments[:, :, None] == segments[:, None, :])


@shape_checked
def first_tokens(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """The tokens with which a document begins in its window."""
    return jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)


def score(model: Target, batch: Batch, taps: Sequence[int] = ()) -> tuple[Output, tuple[Entry, ...]]:
    """What ``model`` gives at the T inputs of ``batch``, and what its layers remember of them; ``taps`` as in `Target.run`."""
    return model.score(batch["tokens"][:, :-1], documents=batch["segments"][:, :-1], taps=taps)


def forward(model: Target, batch: Batch, taps: Sequence[int] = ()) -> Output:
    """What ``model`` gives at each of the T inputs of ``batch``; ``taps`` as in `Target.run`."""
    return score(model, batch, taps)[0]
