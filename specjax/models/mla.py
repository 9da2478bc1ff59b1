"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in its absorbed form.

With c the latent of a token, a head's key is ``[W_uk c, rope(k)]`` and its value ``W_uv c``. The
score of a query ``[q, rope(r)]`` with that key is ``q . W_uk c + rope(r) . rope(k)``, which equals
``W_uk^T q . c + rope(r) . rope(k)``. So the query is mapped to the latent space once, and no key is
ever computed; likewise ``W_uv`` is applied once, to the attention output over latents. A layer
stores c and rope(k) for each token, for any number of heads.
"""

import math

import jax
import jax.numpy as jnp

from specjax.models.config import MLA, ModelConfig
from specjax.models.params import Params
from specjax.models.primitives import linear, rms_norm
from specjax.models.rope import Rotations, separate_pairs

LATENT_EPS = 1e-6
"""The epsilon of the norms of latents.

The published models have it in their code, regardless of config.json.
"""


def query_latents(params: Params, x: jax.Array) -> jax.Array:
    """Return the normed latents ``[B, T, q_lora_rank]`` of the queries of ``x [B, T, H]``."""
    return rms_norm(linear(params, "q_a", x), params["q_a_norm"], LATENT_EPS)


def queries(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    rotations: Rotations,
    latents: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the queries of hidden states ``x [B, T, H]``.

    ``latents`` are their `query_latents`, if these were computed already.

    The first ones, ``[B, T, heads, kv_lora_rank]``, are multiplied with latents; the rotated ones,
    ``[B, T, heads, qk_rope_head_dim]``, with rotated keys.
    """
    mla = _sizes(config)
    if mla.q_lora_rank is None:
        q = linear(params, "q", x)
    else:
        q = linear(params, "q_b", query_latents(params, x) if latents is None else latents)
    q = q.reshape(*x.shape[:2], config.num_heads, mla.qk_head_dim)
    plain, turned = jnp.split(q, [mla.qk_nope_head_dim], axis=-1)
    to_keys, _ = _up_projections(params, config)
    return jnp.einsum("bthd,lhd->bthl", plain, to_keys), _rotate(mla, turned, rotations)


def entry(
    params: Params, config: ModelConfig, x: jax.Array, rotations: Rotations
) -> tuple[jax.Array, jax.Array]:
    """Return the entry of hidden states ``x [B, T, H]``.

    It is the normed latents ``[B, 1, T, kv_lora_rank]`` and the rotated keys
    ``[B, 1, T, qk_rope_head_dim]``.
    """
    mla = _sizes(config)
    latents, keys = jnp.split(linear(params, "kv_a", x), [mla.kv_lora_rank], axis=-1)
    latents = rms_norm(latents, params["kv_a_norm"], LATENT_EPS)
    return latents[:, None], _rotate(mla, keys[:, :, None], rotations).transpose(0, 2, 1, 3)


def scale(config: ModelConfig) -> float:
    """Return the factor of scores: ``1 / sqrt(d)``, with YaRN's temperature.

    The temperature is 1 unless ``mscale_all_dim`` is set.
    """
    mla, rope = _sizes(config), config.rope
    temperature = 1.0
    if rope.kind != "default" and rope.mscale_all_dim and rope.factor > 1:
        temperature = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    # The temperature applies to queries and to keys, so it is squared.
    return mla.qk_head_dim**-0.5 * temperature**2


def head_values(params: Params, config: ModelConfig, latents: jax.Array) -> jax.Array:
    """Return the heads' values ``[B, T, heads v_head_dim]``.

    ``latents`` is the attention output ``[B, T, heads kv_lora_rank]``.
    """
    mla = _sizes(config)
    latents = latents.reshape(*latents.shape[:2], config.num_heads, mla.kv_lora_rank)
    _, to_values = _up_projections(params, config)
    return jnp.einsum("bthl,lhd->bthd", latents, to_values).reshape(*latents.shape[:2], -1)


def _up_projections(params: Params, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Return ``W_uk [latent, heads, qk_nope_head_dim]``, ``W_uv [latent, heads, v_head_dim]``."""
    mla = _sizes(config)
    both = params["kv_b"].reshape(
        mla.kv_lora_rank, config.num_heads, mla.qk_nope_head_dim + mla.v_head_dim
    )
    to_keys, to_values = jnp.split(both, [mla.qk_nope_head_dim], axis=-1)
    return to_keys, to_values


def _rotate(mla: MLA, x: jax.Array, rotations: Rotations) -> jax.Array:
    """Rotate ``x [B, T, heads, d]``.

    Interleaved pairs are separated into halves first, in queries and keys alike, which changes no
    score.
    """
    if mla.rope_interleaved:
        x = separate_pairs(x, x.shape[-1])
    return rotations.turn_keys(x)


def _sizes(config: ModelConfig) -> MLA:
    assert config.mla is not None
    return config.mla
