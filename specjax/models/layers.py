"""The blocks of a decoder, as functions of their parameters."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from specjax.models import mla, moe
from specjax.models.cache import Entry
from specjax.models.config import ModelConfig
from specjax.models.params import Params
from specjax.models.primitives import linear, mlp, rms_norm
from specjax.models.rope import rotate

Piece = tuple[Entry, jax.Array | None]
"""What one layer remembers of some tokens, to attend to, and ``[B|1, T|1, S]`` bool, which of them each query sees. None: there
is one for each query, its own, and it sees no other."""


def attend(
    q: Float[Array, "B T heads d"] | tuple[jax.Array, ...],
    pieces: Sequence[Piece],
    *,
    scale: float | None = None,
    values_part: int = 1,
) -> Float[Array, "B T heads_d"]:
    """Grouped-query attention over several pieces as if they were one. Scores and softmax in float32.

    This is the one place where queries meet keys: another kind of attention (windows, compressed keys, a fused kernel) enters
    here and nowhere else.

    Args:
        q: the queries, which meet the first part of an entry. A tuple ``[B, T, heads, d_i]`` meets the first parts one by one,
            and the products are added: latent attention meets the latents and the rotated keys.
        pieces: what is committed, what a draft holds in scratch, and what the call itself adds.
        scale: of the scores; by default ``d ** -0.5``.
        values_part: which part of an entry is attended to: the second, or, in latent attention, the latents again.
    """
    given = q if isinstance(q, tuple) else (q,)
    batch, count, heads, d = given[0].shape
    kv_heads = pieces[0][0][0].shape[1]
    factor = d**-0.5 if scale is None else scale

    def group(q: jax.Array) -> jax.Array:
        # Axes in the order in which the products give and take them: another order costs a transposed copy.
        return q.reshape(batch, count, kv_heads, heads // kv_heads, q.shape[-1]).transpose(0, 2, 1, 3, 4) * factor

    grouped = [group(part) for part in given]

    def multiply(keys: jax.Array, q: jax.Array, visible: jax.Array | None) -> jax.Array:
        if visible is None:
            return jnp.einsum("bktd,bktgd->bktg", keys, q, preferred_element_type=jnp.float32)[..., None]
        # Keys first: with the queries first XLA's CPU backend would transpose all keys instead of the scores.
        return jnp.einsum("bksd,bktgd->bkstg", keys, q, preferred_element_type=jnp.float32).transpose(0, 1, 3, 4, 2)

    def score(entry: Entry, visible: jax.Array | None) -> jax.Array:
        products = [multiply(keys, part, visible) for keys, part in zip(entry, grouped, strict=False)]
        scores = functools.reduce(jnp.add, products)
        return scores if visible is None else jnp.where(visible[:, None, :, None], scores, jnp.finfo(jnp.float32).min)

    scores = [score(entry, visible) for entry, visible in pieces]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    sizes = np.cumsum([part.shape[-1] for part in scores])[:-1]

    def gather(weights: jax.Array, values: jax.Array, visible: jax.Array | None) -> jax.Array:
        weights = weights.astype(values.dtype)
        if visible is None:
            return weights.astype(jnp.float32) * values[:, :, :, None].astype(jnp.float32)
        return jnp.einsum("bktgs,bksd->bktgd", weights, values, preferred_element_type=jnp.float32)

    weighted = zip(jnp.split(weights, sizes, axis=-1), pieces, strict=True)
    attended = functools.reduce(jnp.add, [gather(weight, entry[values_part], seen) for weight, (entry, seen) in weighted])
    return attended.astype(given[0].dtype).transpose(0, 2, 1, 3, 4).reshape(batch, count, -1)


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
        The attention output ``[B, T, H]``, and the call's own entry: its keys and values, or latents and rotated keys.
    """
    if config.mla is not None:
        own = mla.entry(params, config, x, rotations)
        pieces = [*past, (own, mask)]
        latents = attend(mla.queries(params, config, x, rotations), pieces, scale=mla.scale(config), values_part=0)
        return linear(params, "o", mla.head_values(params, config, latents)), own

    q, own = queries(params, config, x, rotations), keys_values(params, config, x, rotations)
    return linear(params, "o", attend(q, [*past, (own, mask)])), own


def queries(params: Params, config: ModelConfig, x: jax.Array, rotations: tuple[jax.Array, jax.Array]) -> jax.Array:
    """``[B, T, heads, d]`` the rotated queries of ordinary attention, of states ``x [B, T, H]`` that have been normed."""
    q = linear(params, "q", x).reshape(*x.shape[:2], config.num_heads, config.head_dim)
    return rotate(rms_norm(q, params["q_norm"], config.norm_eps) if config.qk_norm else q, *rotations)


def keys_values(params: Params, config: ModelConfig, x: jax.Array, rotations: tuple[jax.Array, jax.Array]) -> Entry:
    """The rotated keys and the values, ``[B, kv_heads, T, d]`` each, of states ``x [B, T, H]`` that have been normed."""
    shape = (*x.shape[:2], config.num_kv_heads, config.head_dim)
    k, v = linear(params, "k", x).reshape(shape), linear(params, "v", x).reshape(shape)
    k = rotate(rms_norm(k, params["k_norm"], config.norm_eps) if config.qk_norm else k, *rotations)
    return k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


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

    ``mesh`` is where ``params`` live: experts that are split over it are run where they lie.
    """
    normed = rms_norm(x, params["input_norm"], config.norm_eps)
    attended, own = attention(params, config, normed, rotations, mask, past)
    x = x + attended
    normed = rms_norm(x, params["post_norm"], config.norm_eps)
    # By its parameters a layer is known as sparse: one configuration has layers of both kinds.
    mixed = moe.mixture(params, config, normed, mesh) if "router" in params else mlp(params, normed)
    return x + mixed, own
