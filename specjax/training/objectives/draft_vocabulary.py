"""Drafters with a vocabulary of their own: which tokens are in it, and what they learn of a target that has more."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.config import ConfigError
from specjax.drafters.eagle3 import Eagle3
from specjax.models.transformer import Output, Target
from specjax.sampling import argmax


def wanted(student: Eagle3, target: Target, output: Output) -> tuple[jax.Array, jax.Array]:
    """The target's logits ``[B, T, Vd]`` of the tokens that ``student`` can draft, and ``[B|1, T|1]`` bool, where its likeliest
    token is one of them."""
    vocabulary = student.vocabulary(target)
    if vocabulary is None:
        return output.logits, jnp.ones((1, 1), bool)
    can_be_drafted = jnp.any(argmax(output.logits)[..., None] == vocabulary.ids, axis=-1)
    return student.drafted_logits(target, output.hidden), can_be_drafted


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """``[size]`` the most frequent tokens by ``counts [V]``, ascending; of equally frequent ones the lower ids.

    Raises:
        ConfigError: the vocabulary is smaller than that.
    """
    if size > len(counts):
        raise ConfigError(f"method.draft_vocab_size={size}: the target has {len(counts)} tokens; give 0 for all of them")
    return np.sort(np.argsort(-counts, kind="stable")[:size])
