"""The blocks of a dense decoder, as functions of their parameters."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.models.cache import Entry
from specjax.models.config import ModelConfig
from specjax.models.params import Params
from specjax.models.rope import rotate
from specjax.shape_checks import shape_checked


@shape_checked
def rms_norm(x: Float[Array, "... H"], weight: Float[Array, " H"], eps: float) -> Float[Array, "... H"]:
    """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), in float32, returned in ``x``'s dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return weight * y.astype(x.dtype)


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    """``x @ W + b``; the bias is added where the model declares one."""
    # Rows and tokens as one axis: the gradient of a product over two takes XLA's CPU backend several times as long.
    y = (x.reshape(-1, x.shape[-1]) @ params[name]).reshape(*x.shape[:-1], -1)
    bias = params.get(f"{name}_bias")
    return y if bias is None else y + bias


Piece = tuple[Entry, jax.Array | None]
"""Keys and values of one layer to attend to, and ``[B|1, T|1, S]`` bool, which of them each query sees. None: there is one for
each query, its own, and it sees no other."""


def attend(q: Float[Array, "B T heads d"], pieces: Sequence[Piece]) -> Float[Array, "B T heads_d"]:
    """Grouped-query attention over several pieces as if they were one. Scores and softmax in float32.

    This is the one place where queries meet keys: another kind of attention (windows, compressed keys, a fused kernel) enters
    here and nowhere else.

    Args:
        q: the queries.
        pieces: what is committed, what a draft holds in scratch, and what the call itself adds.
    """
    batch, count, heads, d = q.shape
    kv_heads = pieces[0][0][0].shape[1]
    # Axes in the order in which the products give and take them: another order costs a transposed copy.
    q = q.reshape(batch, count, kv_heads, heads // kv_heads, d).transpose(0, 2, 1, 3, 4) * d**-0.5

    def score(keys: jax.Array, visible: jax.Array | None) -> jax.Array:
        if visible is None:
            return jnp.einsum("bktd,bktgd->bktg", keys, q, preferred_element_type=jnp.float32)[..., None]
        # Keys first: with the queries first XLA's CPU backend would transpose all keys instead of the scores.
        scores = jnp.einsum("bksd,bktgd->bkstg", keys, q, preferred_element_type=jnp.float32).transpose(0, 1, 3, 4, 2)
        return jnp.where(visible[:, None, :, None], scores, jnp.finfo(jnp.float32).min)

    scores = [score(keys, visible) for (keys, _), visible in pieces]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    sizes = np.cumsum([part.shape[-1] for part in scores])[:-1]

    def gather(weights: jax.Array, values: jax.Array, visible: jax.Array | None) -> jax.Array:
        weights = weights.astype(values.dtype)
        if visible is None:
            return weights.astype(jnp.float32) * values[:, :, :, None].astype(jnp.float32)
        return jnp.einsum("bktgs,bksd->bktgd", weights, values, preferred_element_type=jnp.float32)

    weighted = zip(jnp.split(weights, sizes, axis=-1), pieces, strict=True)
    attended = functools.reduce(jnp.add, [gather(weight, values, seen) for weight, ((_, values), seen) in weighted])
    return attended.astype(q.dtype).transpose(0, 2, 1, 3, 4).reshape(batch, count, heads * d)


def attention(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    rotations: tuple[jax.Array, jax.Array],
    mask: jax.Array | None,
    past: Sequence[Piece] = (),
) -> tuple[jax.Array, Entry]:
    """Self-attention of one layer: over ``past``, and over the call's own tokens as ``mask [B|1, T, T]`` says (without one,
    each sees itself alone).

    ``past`` is only read: what the call adds is returned. So a pass may run inside a conditional, where XLA copies whatever
    is written.

    Returns:
        The attention output ``[B, T, H]``, and the call's own keys and values.
    """

    def heads(name: str, count: int) -> jax.Array:
        return linear(params, name, x).reshape(*x.shape[:2], count, config.head_dim)

    q, k, v = heads("q", config.num_heads), heads("k", config.num_kv_heads), heads("v", config.num_kv_heads)
    if config.qk_norm:
        q = rms_norm(q, params["q_norm"], config.norm_eps)
        k = rms_norm(k, params["k_norm"], config.norm_eps)
    q, k = rotate(q, *rotations), rotate(k, *rotations).transpose(0, 2, 1, 3)
    own = (k, v.transpose(0, 2, 1, 3))
    return linear(params, "o", attend(q, [*past, (own, mask)])), own


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """The gated MLP, ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv 2002.05202)."""
    return linear(params, "down", jax.nn.silu(linear(params, "gate", x)) * linear(params, "up", x))


def decoder_layer(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    rotations: tuple[jax.Array, jax.Array],
    mask: jax.Array | None,
    past: Sequence[Piece] = (),
) -> tuple[jax.Array, Entry]:
    """One pre-norm decoder layer: the residual stream ``[B, T, H]`` after it, and the rest as in `attention`."""
    normed = rms_norm(x, params["input_norm"], config.norm_eps)
    attended, own = attention(params, config, normed, rotations, mask, past)
    x = x + attended
    return x + mlp(params, rms_norm(x, params["post_norm"], config.norm_eps)), own
