"""The blocks of a dense decoder, as functions of their parameters."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax import cache as kv
from specjax.models.config import ModelConfig
from specjax.models.params import Params
from specjax.models.rope import rotate
from specjax.typed import typed


@typed
def rms_norm(x: Float[Array, "... H"], weight: Float[Array, " H"], eps: float) -> Float[Array, "... H"]:
    """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), in float32, returned in ``x``'s dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return weight * y.astype(x.dtype)


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    """``x @ W + b``; the bias is added where the model declares one."""
    y = x @ params[name]
    bias = params.get(f"{name}_bias")
    return y if bias is None else y + bias


@typed
def attend(
    q: Float[Array, "B T heads d"],
    keys: Float[Array, "B S kv_heads d"],
    values: Float[Array, "B S kv_heads d"],
    visible: Bool[Array, "#B T S"],
) -> Float[Array, "B T heads_d"]:
    """Grouped-query attention; query t sees slot s where ``visible``. Scores and softmax in float32."""
    batch, count, heads, d = q.shape
    kv_heads = keys.shape[2]
    q = q.reshape(batch, count, kv_heads, heads // kv_heads, d) * d**-0.5
    # Axes in the order in which the products give and take them: another order costs a transposed copy of the scores.
    scores = jnp.einsum("btkgd,bskd->bktgs", q, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    attended = jnp.einsum("bktgs,bskd->bktgd", weights, values)
    return attended.transpose(0, 2, 1, 3, 4).reshape(batch, count, heads * d)


def attention(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    rotations: tuple[jax.Array, jax.Array],
    visible: jax.Array,
    slots: tuple[jax.Array, jax.Array] | None,
    start: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Self-attention of one layer over its cache, or over the call alone when ``slots`` is None.

    Returns:
        The attention output ``[B, T, H]`` and the layer's cache with the call's keys and values written at ``start``.
    """

    def heads(name: str, count: int) -> jax.Array:
        return linear(params, name, x).reshape(*x.shape[:2], count, config.head_dim)

    q, k, v = heads("q", config.num_heads), heads("k", config.num_kv_heads), heads("v", config.num_kv_heads)
    if config.qk_norm:
        q = rms_norm(q, params["q_norm"], config.norm_eps)
        k = rms_norm(k, params["k_norm"], config.norm_eps)
    q, k = rotate(q, *rotations), rotate(k, *rotations)
    if slots is not None:
        assert start is not None
        slots = (kv.write(slots[0], k, start), kv.write(slots[1], v, start))
        k, v = slots
    return linear(params, "o", attend(q, k, v, visible)), slots


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """The gated MLP, ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv 2002.05202)."""
    return linear(params, "down", jax.nn.silu(linear(params, "gate", x)) * linear(params, "up", x))


def decoder_layer(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    rotations: tuple[jax.Array, jax.Array],
    visible: jax.Array,
    slots: tuple[jax.Array, jax.Array] | None = None,
    start: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """One pre-norm decoder layer: the residual stream ``[B, T, H]`` after it, and the layer's cache."""
    normed = rms_norm(x, params["input_norm"], config.norm_eps)
    attended, slots = attention(params, config, normed, rotations, visible, slots, start)
    x = x + attended
    return x + mlp(params, rms_norm(x, params["post_norm"], config.norm_eps)), slots
