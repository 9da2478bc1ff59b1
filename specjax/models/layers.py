"""The blocks of a decoder, as functions of their parameters."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.models import mla, moe
from specjax.models.attention import Piece, attend
from specjax.models.cache import Entry
from specjax.models.config import ModelConfig
from specjax.models.linear_attention import Context, linear_attention
from specjax.models.params import Params
from specjax.models.primitives import activate, apart, linear, mlp, rms_norm
from specjax.models.quantized_cache import CacheType, quantize
from specjax.models.rope import Rotations
from specjax.models.states import State


def attention(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    rotations: Rotations,
    mask: jax.Array | None,
    past: Sequence[Piece] = (),
    cache_dtype: CacheType = "float",
) -> tuple[jax.Array, Entry]:
    """Self-attention of one layer: over ``past``, and over the call's own tokens as ``mask [B|1, T, T]`` says (without one,
    each sees itself alone).

    ``past`` is only read: what the call adds is returned. So a pass may run inside a conditional, where XLA copies whatever
    is written.

    A layer without keys of its own adds nothing: what it sees of the call's own tokens is the last piece of ``past``.

    Args:
        params: of the layer.
        config: its own (`ModelConfig.of_layer`).
        x: ``[B, T, H]``.
        rotations: of its RoPE at the tokens' positions.
        mask: which of the call's own tokens see each other.
        past: what came before.
        cache_dtype: how the layer remembers tokens. Those of the call are seen as they will be remembered, or a token that is
            drafted would be scored otherwise than one that is decoded.

    Returns:
        The attention output ``[B, T, H]``, and the call's own entry: its keys and values, or latents and rotated keys.
    """
    if config.mla is not None:
        own = _remembered(mla.entry(params, config, x, rotations), cache_dtype)
        pieces = [*past, (own, mask)]
        latents = attend(mla.queries(params, config, x, rotations), pieces, scale=mla.scale(config), values_part=0)
        return linear(params, "o", mla.head_values(params, config, latents)), own

    q, gate = _gated_queries(params, config, x, rotations)
    own = _remembered(keys_values(params, config, x, rotations), cache_dtype) if "k" in params else ()
    pieces = [*past, (own, mask)] if own else past
    found = attend(q, pieces, scale=config.attention_scale, sinks=params.get("sinks"), cap=config.score_cap)
    return linear(params, "o", found if gate is None else found * jax.nn.sigmoid(gate)), own


def _remembered(entry: tuple[jax.Array, ...], cache_dtype: CacheType) -> Entry:
    return tuple(map(quantize, entry)) if cache_dtype == "int8" else entry


def queries(params: Params, config: ModelConfig, x: jax.Array, rotations: Rotations) -> jax.Array:
    """``[B, T, heads, d]`` the rotated queries of ordinary attention, of states ``x [B, T, H]`` that have been normed."""
    return _gated_queries(params, config, x, rotations)[0]


def _gated_queries(
    params: Params, config: ModelConfig, x: jax.Array, rotations: Rotations
) -> tuple[jax.Array, jax.Array | None]:
    """`queries`, and where the model has such the gates ``[B, T, heads * d]`` of what they find."""
    # Without the barrier XLA rearranges the weights for a TPU, at every call of the decoding loop: a second copy of them.
    q = apart(linear(params, "q", x))
    gate = None
    if config.gated_attention:  # beside the query of each head its gate
        q, gate = (half.reshape(*x.shape[:2], -1) for half in jnp.split(q.reshape(*x.shape[:2], config.num_heads, -1), 2, -1))
    return rotations.turn_queries(_heads(params, "q_norm", config, q)), gate


def keys_values(params: Params, config: ModelConfig, x: jax.Array, rotations: Rotations) -> tuple[jax.Array, jax.Array]:
    """The rotated keys and the values, ``[B, kv_heads, T, d]`` each, of states ``x [B, T, H]`` that have been normed."""
    k = linear(params, "k", x)
    v = k if config.keys_are_values else linear(params, "v", x)
    k = rotations.turn_keys(_heads(params, "k_norm", config, k))
    v = v.reshape(*x.shape[:2], config.num_kv_heads, config.head_dim)
    if config.value_norm:
        v = rms_norm(v, None, config.norm_eps)
    return k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def _heads(params: Params, norm: str, config: ModelConfig, x: jax.Array) -> jax.Array:
    """``[B, T, heads, d]`` the heads of queries or keys ``x [B, T, heads * d]``, normed where the model does so."""
    shape = (*x.shape[:2], -1, config.head_dim)
    if config.qk_norm_over_heads:
        return normed(params, norm, config, x).reshape(shape)
    return normed(params, norm, config, x.reshape(shape))


def normed(params: Params, name: str, config: ModelConfig, x: jax.Array) -> jax.Array:
    """``x`` after the norm of that name; where the layer has none, ``x``."""
    return rms_norm(x, params[name], config.norm_eps, config.norm_offset) if name in params else x


@partial(jax.jit, static_argnames=("config", "mesh", "cache_dtype"))  # traced and lowered once for all layers alike
def decoder_layer(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    rotations: Rotations,
    mask: jax.Array | None,
    past: Sequence[Piece] = (),
    mesh: Mesh | None = None,
    inputs: jax.Array | None = None,
    cache_dtype: CacheType = "float",
    context: Context | None = None,
) -> tuple[jax.Array, Entry | State]:
    """One decoder layer: the residual stream ``[B, T, H]`` after it, and the rest as in `attention`.

    A layer with linear attention is given a ``context``, which takes the place of rotations, mask and past; see
    `specjax.models.linear_attention`.

    ``config`` is the layer's own (`ModelConfig.of_layer`). ``mesh`` is where ``params`` live: experts that are split over it
    are run where they lie. ``inputs [B, T, P]`` are the tokens' inputs for this layer, where the model has such.
    """
    entering = normed(params, "input_norm", config, x)
    if context is not None:
        attended, own = linear_attention(params, config, entering, context)
    else:
        attended, own = attention(params, config, entering, rotations, mask, past, cache_dtype)
    x = _add(config, x, normed(params, "attention_out_norm", config, attended))
    x = _add(config, x, normed(params, "mlp_out_norm", config, _mixed(params, config, x, mesh)))
    if inputs is not None:
        gated = activate(linear(params, "per_layer_gate", x), config.activation) * inputs
        x = x + normed(params, "per_layer_out_norm", config, linear(params, "per_layer_out", gated))
    return (x * params["scalar"] if config.layer_scalars else x), own


def _add(config: ModelConfig, x: jax.Array, branch: jax.Array) -> jax.Array:
    return x + (branch if config.residual_scale == 1.0 else branch * config.residual_scale)


def _mixed(params: Params, config: ModelConfig, x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """What the layer's MLP, or its experts, or both, make of the residual stream ``x [B, T, H]``."""
    own = normed(params, "post_norm", config, x)
    # By its parameters a layer is known as sparse: one configuration has layers of both kinds.
    if "router" not in params:
        return mlp(params, own, activation=config.activation)
    if "gate" not in params:
        return moe.mixture(params, config, own, mesh)
    dense = normed(params, "mlp_own_norm", config, mlp(params, own, activation=config.activation))
    sparse = moe.mixture(params, config, normed(params, "mixture_norm", config, x), mesh, routed=x)
    return dense + normed(params, "mixture_out_norm", config, sparse)
