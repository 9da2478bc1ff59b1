"""Penalties, biases and banned words: what rows change about the logits before temperature.

The order: repetition, frequency and presence penalties, then biases, then banned and allowed
tokens. `adjusted` is the only definition, for the target and every drafter.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

_IN_PROMPT = 1 << 30
"""Is added to the count of a token that the prompt contains."""

NO_TOKEN = -1
"""Fills up paths and words. It is no token's id."""

BEFORE_TEXT = -2
"""Stands in `Adjustments.tail` for a position before the generated text. It matches no word."""


@struct.dataclass
class Adjustments:
    """The tokens that each row has generated, and those that it bans or prefers.

    The strengths of the penalties are fields of `specjax.sampling.RowSampling`.

    Attributes:
        counts: ``[B, V]`` int32, how often each token was generated, the root included; with
            2**30 added if the prompt contains it.
        bias: ``[B, V]`` float32, which is added to the logits; -inf bans a token.
        words: ``[B, W, L]`` int32, banned words of at least two tokens, filled up in front with -1.
            A word of -1 alone bans nothing. W may be 0.
        tail: ``[B, L - 1]`` int32, the newest generated tokens, the root last; -2 where fewer were
            generated.

    Examples:
        >>> from specjax.adjustments import Adjustments
        >>> start = Adjustments.of_texts([[3, 1], [2]], [2, 1], vocab_size=4)
        >>> later = start.after(jnp.array([[1, 1], [0, 3]]), jnp.array([2, 1]))
        >>> (later.counts % 2**30).tolist()  # the second row emits one token
        [[0, 2, 0, 0], [1, 0, 0, 0]]
    """

    counts: jax.Array
    bias: jax.Array
    words: jax.Array
    tail: jax.Array

    @classmethod
    def of_texts(
        cls,
        texts: list[list[int]],
        prompt_lengths: list[int],
        vocab_size: int,
        bias: np.ndarray | None = None,
        words: list[list[list[int]]] | None = None,
        sizes: tuple[int, int] | None = None,
    ) -> "Adjustments":
        """Return the adjustments of rows, on the host.

        Args:
            texts: the prompt of each row, and what was generated already.
            prompt_lengths: the number of tokens of each row's prompt.
            vocab_size: the number of tokens of the target, V.
            bias: ``[B, V]``, see the attribute; None for zeros.
            words: the banned words of each row, of two tokens or more; None for none.
            sizes: W and L; None for what these words need.
        """
        words = words or [[] for _ in texts]
        most = max(map(len, words), default=0)
        longest = max((len(word) for row in words for word in row), default=1)
        most, longest = sizes or (most, longest)
        packed = np.full((len(texts), most, longest), NO_TOKEN, np.int32)
        for row, row_words in enumerate(words):
            for index, word in enumerate(row_words):
                packed[row, index, longest - len(word) :] = word
        counts = np.zeros((len(texts), vocab_size), np.int32)
        tail = np.full((len(texts), longest - 1), BEFORE_TEXT, np.int32)
        for row, (text, length) in enumerate(zip(texts, prompt_lengths, strict=True)):
            generated = np.asarray(text[length:], np.int32)
            counts[row] = np.bincount(generated, minlength=vocab_size)
            counts[row, np.unique(np.asarray(text[:length], np.int32))] += _IN_PROMPT
            newest = generated[max(len(generated) - longest + 1, 0) :] if longest > 1 else []
            tail[row, longest - 1 - len(newest) :] = newest
        if bias is None:
            bias = np.zeros(counts.shape, np.float32)
        on_host: Any = {"counts": counts, "bias": bias, "words": packed, "tail": tail}
        return cls(**on_host)

    def after(self, emitted: jax.Array, count: jax.Array) -> "Adjustments":
        """Return the adjustments after the first ``count [B]`` of the tokens ``emitted [B, n]``."""
        is_new = jnp.arange(emitted.shape[1])[None] < count[:, None]
        # Beyond the vocabulary, where `drop` leaves the other tokens out.
        ids = jnp.where(is_new, emitted, self.counts.shape[1])
        counts = jax.vmap(lambda counts, ids: counts.at[ids].add(1, mode="drop"))(self.counts, ids)
        return replace(self, counts=counts, tail=_newest(self.tail, emitted, count))


def adjusted(
    logits: jax.Array,
    adjustments: Adjustments,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
    path: jax.Array | None = None,
    ids: jax.Array | None = None,
) -> jax.Array:
    """Return the logits after penalties, biases and bans.

    A token counts as often as it was generated, the path included. With count c the penalties are

    - repetition r: the logit is divided by r if it is positive, else multiplied by it, if c > 0 or
      the prompt contains the token (Keskar et al. 2019, arXiv 1909.05858, section 4.1);
    - frequency f and presence s: f * c is subtracted, and s if c > 0, as in OpenAI's API.

    Args:
        logits: ``[B, …, V]`` the logits of tokens below nodes.
        adjustments: those of the rows.
        repetition: ``[B]``; 1 for no penalty.
        frequency: ``[B]``; 0 for no penalty.
        presence: ``[B]``; 0 for no penalty.
        path: ``[B, …, K]`` int32, the tokens from below the root to each node, the node last, and
            then -1; None if nothing is known about the path.
        ids: ``[V]`` or ``[B, V]``, the target's ids of the tokens, if the logits are for another
            vocabulary.

    Examples:
        >>> from specjax.adjustments import Adjustments, adjusted
        >>> seen = Adjustments.of_texts([[0, 1, 1]], [1], vocab_size=3)
        >>> one = jnp.ones(1)
        >>> adjusted(jnp.full((1, 3), 4.0), seen, 2 * one, one, 0.5 * one).tolist()
        [[2.0, -0.5, 4.0]]
    """
    counts, bias = adjustments.counts, adjustments.bias
    token_ids = jnp.arange(logits.shape[-1], dtype=jnp.int32) if ids is None else ids
    if ids is not None:
        counts, bias = (_of_ids(values, ids) for values in (counts, bias))
    between = (logits.shape[0], *(1,) * (logits.ndim - 2))
    if token_ids.ndim == 2:
        token_ids = token_ids.reshape(*between, -1)
    counts, bias = (values.reshape(*between, -1) for values in (counts, bias))
    repetition, frequency, presence = (
        values.reshape(*between, 1) for values in (repetition, frequency, presence)
    )
    # The loop is unrolled and its comparisons are fused: no array of these counts is stored.
    tokens_above = [] if path is None else [path[..., i, None] for i in range(path.shape[-1])]
    for token in tokens_above:
        counts = counts + (token == token_ids)
    logits = logits.astype(jnp.float32)
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, penalised, logits)
    generated = (counts & (_IN_PROMPT - 1)).astype(jnp.float32)
    logits = logits - frequency * generated - jnp.where(generated > 0, presence, 0.0) + bias
    return _without_words(logits, adjustments, path, token_ids)


def _without_words(
    logits: jax.Array, adjustments: Adjustments, path: jax.Array | None, token_ids: jax.Array
) -> jax.Array:
    """Ban the last tokens of words whose other tokens end the text and the path."""
    words, tail = adjustments.words, adjustments.tail
    if not words.shape[1]:
        return logits
    between = (logits.shape[0], *(1,) * (logits.ndim - 2))
    tail = jnp.broadcast_to(tail.reshape(*between, -1), (*logits.shape[:-1], tail.shape[-1]))
    if path is not None:
        path = jnp.broadcast_to(path, (*logits.shape[:-1], path.shape[-1]))
        tail = _newest(tail, path, jnp.sum(path >= 0, axis=-1))
    words = words.reshape(*between, *words.shape[1:])
    starts, last = words[..., :-1], words[..., -1]
    is_match = jnp.all((starts == tail[..., None, :]) | (starts == NO_TOKEN), axis=-1)
    banned = jnp.where(is_match, last, NO_TOKEN)  # [B, …, W]

    def ban(logits: jax.Array) -> jax.Array:
        def ban_one(index: jax.Array, logits: jax.Array) -> jax.Array:
            token = jnp.take(banned, index, axis=-1)[..., None]
            return jnp.where(token == token_ids, -jnp.inf, logits)

        return jax.lax.fori_loop(0, banned.shape[-1], ban_one, logits)

    # The beginning of a word is rare, and the comparisons read the vocabulary once for each word.
    return jax.lax.cond(jnp.any(banned >= 0), ban, lambda logits: logits, logits)


def _newest(tail: jax.Array, tokens: jax.Array, count: jax.Array) -> jax.Array:
    """Append the first ``count […]`` of ``tokens […, n]`` to ``tail […, m]``; keep the last m."""
    size = tail.shape[-1]
    index = count[..., None] + jnp.arange(size)
    return jnp.take_along_axis(jnp.concatenate([tail, tokens], axis=-1), index, axis=-1)


def _of_ids(values: jax.Array, ids: jax.Array) -> jax.Array:
    """Select the values ``[B, n]`` of the tokens ``ids``, ``[n]`` or ``[B, n]``."""
    if ids.ndim == 1:
        return jnp.take(values, ids, axis=1)
    return jnp.take_along_axis(values, ids, axis=1)
