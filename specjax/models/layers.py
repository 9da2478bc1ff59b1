"""The blocks of a decoder, as functions of their parameters."""

from collections.abc import Sequence
from functools import partial

import jax
from jax.sharding import Mesh

from specjax.models import mla, moe
from specjax.models.attention import Piece, attend
from specjax.models.cache import Entry
from specjax.models.config import ModelConfig
from specjax.models.params import Params
from specjax.models.primitives import linear, mlp, rms_norm
from specjax.models.rope import rotate


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

    A layer without keys of its own adds nothing: what it sees of the call's own tokens is the last piece of ``past``.

    Args:
        params: of the layer.
        config: its own (`ModelConfig.of_layer`).
        x: ``[B, T, H]``.
        rotations: of its RoPE at the tokens' positions.
        mask: which of the call's own tokens see each other.
        past: what came before.

    Returns:
        The attention output ``[B, T, H]``, and the call's own entry: its keys and values, or latents and rotated keys.
    """
    if config.mla is not None:
        own = mla.entry(params, config, x, rotations)
        pieces = [*past, (own, mask)]
        latents = attend(mla.queries(params, config, x, rotations), pieces, scale=mla.scale(config), values_part=0)
        return linear(params, "o", mla.head_values(params, config, latents)), own

    q = queries(params, config, x, rotations)
    if "k" not in params:
        return linear(params, "o", attend(q, past)), ()
    own = keys_values(params, config, x, rotations)
    return linear(params, "o", attend(q, [*past, (own, mask)])), own


def queries(params: Params, config: ModelConfig, x: jax.Array, rotations: tuple[jax.Array, jax.Array]) -> jax.Array:
    """``[B, T, heads, d]`` the rotated queries of ordinary attention, of states ``x [B, T, H]`` that have been normed."""
    # Without the barrier XLA rearranges the weights for a TPU, at every call of the decoding loop: a second copy of them.
    q = jax.lax.platform_dependent(linear(params, "q", x), tpu=jax.lax.optimization_barrier, default=lambda q: q)
    q = q.reshape(*x.shape[:2], config.num_heads, config.head_dim)
    return rotate(rms_norm(q, params["q_norm"], config.norm_eps) if config.qk_norm else q, *rotations)


def keys_values(params: Params, config: ModelConfig, x: jax.Array, rotations: tuple[jax.Array, jax.Array]) -> Entry:
    """The rotated keys and the values, ``[B, kv_heads, T, d]`` each, of states ``x [B, T, H]`` that have been normed."""
    shape = (*x.shape[:2], config.num_kv_heads, config.head_dim)
    k, v = linear(params, "k", x).reshape(shape), linear(params, "v", x).reshape(shape)
    k = rotate(rms_norm(k, params["k_norm"], config.norm_eps) if config.qk_norm else k, *rotations)
    return k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


@partial(jax.jit, static_argnames=("config", "mesh"))  # traced and lowered once for all layers alike
def decoder_layer(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    rotations: tuple[jax.Array, jax.Array],
    mask: jax.Array | None,
    past: Sequence[Piece] = (),
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Entry]:
    """One pre-norm decoder layer: the residual stream ``[B, T, H]`` after it, and the rest as in `attention`.

    ``config`` is the layer's own (`ModelConfig.of_layer`). ``mesh`` is where ``params`` live: experts that are split over it
    are run where they lie.
    """
    normed = rms_norm(x, params["input_norm"], config.norm_eps)
    attended, own = attention(params, config, normed, rotations, mask, past)
    x = x + attended
    normed = rms_norm(x, params["post_norm"], config.norm_eps)
    # By its parameters a layer is known as sparse: one configuration has layers of both kinds.
    mixed = moe.mixture(params, config, normed, mesh) if "router" in params else mlp(params, normed)
    return x + mixed, own
