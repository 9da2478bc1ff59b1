"""The one definition of the distribution that tokens are drawn from.

The target and every drafter warp their logits here. Losslessness is a statement about *this* distribution.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.errors import InputError
from specjax.typed import typed


@struct.dataclass
class RowSampling:
    """Sampling settings of each row, as arrays. Made by `Sampling.rows`.

    Attributes:
        temperature: ``[B]``; 0 is argmax.
        top_k: ``[B]`` int32; 0 is no limit.
        top_p: ``[B]``.
        min_p: ``[B]``.
        greedy: known before tracing that every row is greedy: no distribution is ever formed.
        truncated: known before tracing that some row has a top_k, top_p or min_p: without one, nothing is sorted.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    greedy: bool = struct.field(pytree_node=False)
    truncated: bool = struct.field(pytree_node=False)


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens: each setting one number, or one number a row.

    The logits are divided by ``temperature`` (0: argmax), then restricted to the ``top_k`` most probable tokens (0: no
    limit), then to the smallest set of most probable tokens whose mass reaches ``top_p``, then to tokens at least ``min_p``
    times as probable as the most probable. Tokens that tie with the last one kept are kept.
    """

    temperature: Any = 1.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0

    def rows(self, batch: int) -> RowSampling:
        """These settings for each of ``batch`` rows.

        Raises:
            InputError: a setting is out of its range, or has another number of rows.
        """
        temperature = self._row("temperature", batch, lambda x: (x >= 0) & np.isfinite(x), "at least 0; 0 is greedy")
        top_k = self._row("top_k", batch, lambda x: (x >= 0) & (x == np.floor(x)), "a whole number, 0 for no limit")
        top_p = self._row("top_p", batch, lambda x: (x > 0) & (x <= 1), "in (0, 1]; 1 is no limit")
        min_p = self._row("min_p", batch, lambda x: (x >= 0) & (x <= 1), "in [0, 1]; 0 is no limit")
        return RowSampling(
            temperature=jnp.asarray(temperature, jnp.float32),
            top_k=jnp.asarray(top_k, jnp.int32),
            top_p=jnp.asarray(top_p, jnp.float32),
            min_p=jnp.asarray(min_p, jnp.float32),
            greedy=bool(np.all(temperature == 0)),
            truncated=bool(np.any(top_k > 0) or np.any(top_p < 1) or np.any(min_p > 0)),
        )

    def _row(self, name: str, batch: int, good: Any, meaning: str) -> np.ndarray:
        value = np.asarray(getattr(self, name), np.float64)
        if value.ndim > 1 or (value.ndim == 1 and len(value) != batch):
            raise InputError(f"{name} has shape {value.shape}: give one number, or one for each of the {batch} rows")
        value = np.broadcast_to(value, (batch,))
        if not np.all(good(value)):
            raise InputError(f"{name}={value[~good(value)][0]:g}: must be {meaning}")
        return value


@typed
def probabilities(logits: Float[Array, "B *nodes V"], sampling: RowSampling) -> Float[Array, "B *nodes V"]:
    """The distribution that each row's tokens are drawn from, float32.

    A greedy row's is one-hot at its argmax (the lowest id among ties).
    """
    logits = logits.astype(jnp.float32)
    one_hot = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    if sampling.greedy:
        return one_hot

    def row(values: jax.Array) -> jax.Array:  # [B] -> [B, 1, …, 1]
        return values.reshape(-1, *(1,) * (logits.ndim - 1))

    greedy = row(sampling.temperature) == 0
    scaled = logits / jnp.where(greedy, 1.0, row(sampling.temperature))
    if sampling.truncated:
        scaled = jnp.where(scaled >= _threshold(scaled, sampling, row), scaled, -jnp.inf)
    return jnp.where(greedy, one_hot, jax.nn.softmax(scaled, axis=-1))


def _threshold(scaled: jax.Array, sampling: RowSampling, row: Any) -> jax.Array:
    """The smallest scaled logit that survives top-k, then top-p, then min-p: ``[B, …, 1]``."""
    vocab = scaled.shape[-1]
    ordered = -jnp.sort(-scaled, axis=-1)
    top_k = jnp.where(row(sampling.top_k) == 0, vocab, jnp.minimum(row(sampling.top_k), vocab))
    kth = jnp.take_along_axis(ordered, jnp.broadcast_to(top_k - 1, (*ordered.shape[:-1], 1)), axis=-1)
    # Mass strictly before each token, among those that top-k kept: a token is needed while it is below top_p.
    mass = jax.nn.softmax(jnp.where(ordered >= kth, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    needed = ((before < row(sampling.top_p)) & (mass > 0)) | (row(sampling.top_p) >= 1)
    nucleus = jnp.min(jnp.where(needed, ordered, jnp.inf), axis=-1, keepdims=True)
    floor = ordered[..., :1] + jnp.log(row(sampling.min_p))  # log 0 = -inf: no floor
    return jnp.maximum(jnp.maximum(kth, nucleus), floor)


@typed
def draw(p: Float[Array, "B V"], keys: Any) -> Int[Array, " B"]:
    """One token a row from unnormalised probabilities; consumes the row keys ``[B]``. A token of probability 0 never comes."""
    return jax.vmap(lambda key, row: jax.random.categorical(key, jnp.log(row)))(keys, p)


def split_keys(keys: jax.Array, count: int) -> jax.Array:
    """``[count, B]`` new keys from row keys ``[B]``; consumes them. A row's keys do not depend on its neighbours."""
    return jnp.moveaxis(jax.vmap(lambda key: jax.random.split(key, count))(keys), 0, 1)
