"""Penalties, biases and banned words of rows that requests join and leave.

`specjax.adjustments` explains them. The host keeps the `Adjustments` of all rows beside the decode
state, and puts them into it for the calls in which some row has any. So all other calls run the
programs without them.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from specjax.adjustments import BEFORE_TEXT, NO_TOKEN, Adjustments
from specjax.decoding.row_arrays import HostOrDevice
from specjax.decoding.state import DecodeState, place_adjustments
from specjax.models.transformer import Target


def empty(target: Target, *, rows: int, words: int, word_tokens: int) -> Adjustments:
    """Return the adjustments of rows that have none.

    Args:
        target: the target.
        rows: the number of rows.
        words: the largest number of banned words of two tokens or more in a row.
        word_tokens: the largest number of tokens of such a word.

    Examples:
        >>> from specjax.decoding import adjusted_rows
        >>> adjustments = adjusted_rows.empty(target, rows=2, words=4, word_tokens=3)
        >>> adjustments.bias.shape, adjustments.words.shape
        ((2, 16), (2, 4, 3))
    """
    vocab_size = target.config.vocab_size

    @jax.jit
    def make() -> Adjustments:
        adjustments = Adjustments(
            counts=jnp.zeros((rows, vocab_size), jnp.int32),
            bias=jnp.zeros((rows, vocab_size), jnp.float32),
            words=jnp.full((rows, words, word_tokens), NO_TOKEN, jnp.int32),
            tail=jnp.full((rows, word_tokens - 1), BEFORE_TEXT, jnp.int32),
        )
        return place_adjustments(adjustments, target)

    return make()


def neutral(adjustments: Adjustments) -> Adjustments:
    """Return the adjustments of one row that has none, on the host, with the sizes of others."""
    _, words, word_tokens = adjustments.words.shape
    size = adjustments.counts.shape[1]
    return Adjustments.of_texts([[]], [0], size, sizes=(words, word_tokens))


@partial(jax.jit, donate_argnames="adjustments")
def put(adjustments: Adjustments, row: ArrayLike, text: Adjustments) -> Adjustments:
    """Replace the adjustments of a row by those of ``text``, which has one row."""
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new.astype(leaf.dtype), row, 0),
        adjustments,
        jax.tree.map(jnp.asarray, text),
    )


@partial(jax.jit, donate_argnames="adjustments")
def rearrange(adjustments: Adjustments, order: HostOrDevice) -> Adjustments:
    """Permute the rows, as `specjax.decoding.rows.rearrange` does."""
    return jax.tree.map(lambda leaf: leaf[order], adjustments)


def with_adjustments(state: DecodeState, adjustments: Adjustments | None) -> DecodeState:
    """Return a state with these adjustments, or without any."""
    return replace(state, sampling=replace(state.sampling, adjustments=adjustments))
