"""The blocks of a decoder, as functions of their parameters."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.models import mla, moe, sparse_attention
from specjax.models.attention import Piece, attend
from specjax.models.cache import Entry
from specjax.models.config import LayerFactors, ModelConfig
from specjax.models.kimi_delta_attention import kimi_delta_attention
from specjax.models.linear_attention import Context, linear_attention
from specjax.models.mamba2 import mamba2
from specjax.models.memory import (
    KimiDeltaAttention,
    LinearAttention,
    Mamba2,
    ShortConvolution,
    StateSizes,
)
from specjax.models.params import Params
from specjax.models.primitives import activate, apart, linear, mlp, rms_norm, scaled
from specjax.models.quantized_cache import CacheType, quantize
from specjax.models.rope import Rotations, separate_pairs
from specjax.models.short_convolution import short_convolution
from specjax.models.sparse_attention import Selection
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
    """Compute the self-attention of one layer, over ``past`` and the call's own tokens.

    ``past`` is only read; the call's own entry is returned. So a pass may run inside a conditional,
    where XLA copies everything that is written. A layer without keys of its own returns no entry:
    the last piece of ``past`` then has the call's own tokens.

    Args:
        params: the parameters of the layer.
        config: the configuration of the layer (`ModelConfig.of_layer`).
        x: ``[B, T, H]`` the normed hidden states.
        rotations: the rotations of its RoPE at the tokens' positions.
        mask: ``[B|1, T, T]`` which of the call's own tokens see each other; None: each sees itself
            alone.
        past: the tokens before.
        cache_dtype: the format of the layer's cache. The call's own tokens are rounded like it too,
            or else a drafted token would not have the same score as a decoded one.

    Returns:
        The attention output ``[B, T, H]``, and the call's own entry: its keys and values, or
        latents and rotated keys.
    """
    if config.mla is not None:
        return _latent_attention(params, config, x, rotations, mask, past, cache_dtype)[:2]

    q, gate = _gated_queries(params, config, x, rotations)
    entry = (
        _remembered(keys_values(params, config, x, rotations), cache_dtype) if "k" in params else ()
    )
    pieces = [*past, (entry, mask)] if entry else past
    attended = attend(
        q, pieces, scale=config.attention_scale, sinks=params.get("sinks"), cap=config.score_cap
    )
    if config.gated_heads:
        gate = jnp.repeat(linear(params, "head_gate", x), config.value_size, axis=-1)
    if config.gated_values:
        gate = linear(params, "value_gate", x)
    return linear(params, "o", attended if gate is None else attended * jax.nn.sigmoid(gate)), entry


def _latent_attention(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    rotations: Rotations,
    mask: jax.Array | None,
    past: Sequence[Piece] = (),
    cache_dtype: CacheType = "float",
    selection: Selection | None = None,
) -> tuple[jax.Array, Entry, Selection | None]:
    """Compute `attention` of a layer with latents.

    If the model has an indexer, it reads the tokens that the layer's own indexer selects, or those
    of ``selection``. They are returned as well.
    """
    parts = mla.entry(params, config, x, rotations)
    if "indexer" in params:
        parts += (sparse_attention.index_key(params["indexer"], config, x, rotations),)
    entry = _remembered(parts, cache_dtype)
    pieces: list[Piece] = [*past, (entry, mask)]
    latents = None
    if "indexer" in params:
        latents = mla.query_latents(params, x)
        selection = sparse_attention.select(
            params["indexer"], config, x, latents, rotations, pieces
        )
    attended = attend(
        mla.queries(params, config, x, rotations, latents),
        sparse_attention.selected(config, pieces, selection),
        scale=mla.scale(config),
        values_part=0,
    )
    return linear(params, "o", mla.head_values(params, config, attended)), entry, selection


def _remembered(parts: tuple[jax.Array, ...], cache_dtype: CacheType) -> Entry:
    return tuple(map(quantize, parts)) if cache_dtype == "int8" else parts


def queries(params: Params, config: ModelConfig, x: jax.Array, rotations: Rotations) -> jax.Array:
    """Return the rotated queries ``[B, T, heads, d]`` of ordinary attention.

    ``x [B, T, H]`` are normed hidden states.
    """
    return _gated_queries(params, config, x, rotations)[0]


def _gated_queries(
    params: Params, config: ModelConfig, x: jax.Array, rotations: Rotations
) -> tuple[jax.Array, jax.Array | None]:
    """Return `queries`, and the gates ``[B, T, heads * d]`` of the attention output, or None."""
    # Without the barrier XLA rearranges the weights for a TPU at every call of the decoding loop,
    # into a second copy.
    q = apart(linear(params, "q", x))
    gate = None
    if config.gated_attention:  # the projection has each head's query followed by its gate
        q, gate = (
            half.reshape(*x.shape[:2], -1)
            for half in jnp.split(q.reshape(*x.shape[:2], config.num_heads, -1), 2, -1)
        )
    return _turned(params, "q_norm", config, q, rotations.turn_queries, rotations), gate


def keys_values(
    params: Params, config: ModelConfig, x: jax.Array, rotations: Rotations
) -> tuple[jax.Array, jax.Array]:
    """Return the rotated keys and the values, ``[B, kv_heads, T, d]`` each.

    ``x [B, T, H]`` are normed hidden states.
    """
    k = linear(params, "k", x)
    v = k if config.keys_are_values else linear(params, "v", x)
    if config.factors is not None:
        k = scaled(k, config.factors.key)
    k = _turned(params, "k_norm", config, k, rotations.turn_keys, rotations)
    v = v.reshape(*x.shape[:2], config.num_kv_heads, config.value_size)
    if config.value_scale != 1.0:
        v = scaled(v, config.value_scale)
    if config.value_norm:
        v = rms_norm(v, None, config.norm_eps)
    return k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def _turned(
    params: Params,
    norm: str,
    config: ModelConfig,
    x: jax.Array,
    turn: Callable[[jax.Array], jax.Array],
    rotations: Rotations,
) -> jax.Array:
    """Return the rotated heads ``[B, T, heads, d]`` of queries or keys ``x [B, T, heads * d]``.

    They are normed before ``turn`` rotates them, or after.
    """
    if config.qk_norm_after_rope:
        return normed(params, norm, config, turn(x.reshape(*x.shape[:2], -1, config.head_dim)))
    heads = _heads(params, norm, config, x)
    if config.rope_interleaved:
        heads = separate_pairs(heads, 2 * rotations.cos.shape[-1])
    if config.qk_unit_norm_in_all_layers:
        heads = rms_norm(heads, None, config.norm_eps)
    if config.qk_unit_norm_in_rope_layers and config.rope.kind != "none":
        return rms_norm(turn(heads), None, config.norm_eps)
    return turn(heads)


def _heads(params: Params, norm: str, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return the heads ``[B, T, heads, d]`` of queries or keys ``x [B, T, heads * d]``.

    They are normed if the model has QK norms.
    """
    shape = (*x.shape[:2], -1, config.head_dim)
    if config.qk_norm_over_heads:
        return normed(params, norm, config, x).reshape(shape)
    return normed(params, norm, config, x.reshape(shape))


def normed(params: Params, name: str, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return ``x`` after the norm of that name, or ``x`` if the layer has none."""
    return rms_norm(x, params[name], config.norm_eps, config.norm_offset) if name in params else x


def _normed_after(params: Params, name: str, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return `normed` of the output of attention or MLP, whose norm may have another epsilon."""
    if config.post_norm_eps is None or name not in params:
        return normed(params, name, config, x)
    return rms_norm(x, params[name], config.post_norm_eps, config.norm_offset)


WITH_STATE: dict[type[StateSizes | None], Callable[..., tuple[jax.Array, Any]]] = {
    LinearAttention: linear_attention,
    Mamba2: mamba2,
    KimiDeltaAttention: kimi_delta_attention,
    ShortConvolution: short_convolution,
}
"""The layers that keep a state, by the class of its sizes (see `specjax.models.memory`).

Each takes the parameters, the layer's configuration, normed hidden states ``[B, T, H]`` and a
`Context`, and returns its output and the entry of the tokens, or the state after them.
"""


# Jitted so that layers of the same configuration are traced and lowered once.
@partial(jax.jit, static_argnames=("config", "mesh", "cache_dtype"))
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
    selection: Selection | None = None,
) -> tuple[jax.Array, Entry | State, Selection | None]:
    """Run one decoder layer.

    A layer may also have attention or an MLP alone, as its parameters show.

    Args:
        params: the parameters of the layer.
        config: the configuration of the layer (`ModelConfig.of_layer`).
        x: ``[B, T, H]`` the residual stream before it.
        rotations: as in `attention`.
        mask: which of the call's own tokens see each other.
        past: the entries of the tokens before, in pieces.
        mesh: the mesh of ``params``: sharded experts run on their devices.
        inputs: ``[B, T, P]`` the inputs of this layer for each token, if the model has them.
        cache_dtype: the format of the layer's cache.
        context: what a layer with a state reads in place of rotations, mask and past, or beside
            them; see `specjax.models.linear_attention`.
        selection: in a model with an indexer, the keys that a layer without one reads: those that
            the layer before has returned. None: all tokens that it sees.

    Returns:
        Three values. The residual stream after the layer. Its entry: keys and values, a state,
        both, or () without attention. The keys that its queries have read; None without an indexer.
    """
    entry: Entry | State = ()
    if "o" in params:
        entering = normed(params, "input_norm", config, x)
        if config.indexer is not None:
            attended, entry, selection = _latent_attention(
                params, config, entering, rotations, mask, past, cache_dtype, selection
            )
        else:
            attended, entry = _remembering(
                params, config, entering, rotations, mask, past, cache_dtype, context
            )
        x = _add(config, x, _normed_after(params, "attention_out_norm", config, attended))
    if "down" in params or "router" in params:
        mixed = _mixed(params, config, x, mesh)
        x = _add(config, x, _normed_after(params, "mlp_out_norm", config, mixed))
    if inputs is not None:
        gated = activate(linear(params, "per_layer_gate", x), config.activation) * inputs
        x = x + normed(params, "per_layer_out_norm", config, linear(params, "per_layer_out", gated))
    return (x * params["scalar"] if config.layer_scalars else x), entry, selection


def _remembering(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    rotations: Rotations,
    mask: jax.Array | None,
    past: Sequence[Piece],
    cache_dtype: CacheType,
    context: Context | None,
) -> tuple[jax.Array, Any]:
    """Return the output of the layer's attention, or its state, or both, and its entry."""
    if context is None or config.linear is None:
        return attention(params, config, x, rotations, mask, past, cache_dtype)
    read = WITH_STATE[type(config.linear)]
    if not config.linear.beside_attention:
        return read(params, config, x, context)
    factors = config.factors or LayerFactors()
    y, nodes = read(params["state"], config, x, context)
    attended, entry = attention(
        params, config, scaled(x, factors.attention_in), rotations, mask, past, cache_dtype
    )
    parts = (nodes,) if isinstance(nodes, State) else nodes
    y, attended = scaled(y, factors.state_out), scaled(attended, factors.attention_out)
    return y + attended, (*entry, *parts)


def _add(config: ModelConfig, x: jax.Array, branch: jax.Array) -> jax.Array:
    return x + (branch if config.residual_scale == 1.0 else scaled(branch, config.residual_scale))


def _mixed(params: Params, config: ModelConfig, x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Return the output of the layer's MLP, or its experts, or both, for ``x [B, T, H]``."""
    entering = normed(params, "post_norm", config, x)
    # The parameters show whether a layer is sparse: one configuration may have layers of both
    # kinds.
    if "router" not in params:
        return mlp(
            params,
            entering,
            activation=config.activation,
            factors=config.factors,
            limit=config.mlp_limit,
        )
    if "down" not in params:
        return moe.mixture(params, config, entering, mesh)
    dense = normed(
        params, "mlp_own_norm", config, mlp(params, entering, activation=config.activation)
    )
    sparse = moe.mixture(params, config, normed(params, "mixture_norm", config, x), mesh, routed=x)
    return dense + normed(params, "mixture_out_norm", config, sparse)
