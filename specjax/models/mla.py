"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in its absorbed form.

With c the latent of a token, a head's key is ``[W_uk c, rope(k)]`` and its value ``W_uv c``. A query ``[q, rope(r)]`` meets
that key as ``q . W_uk c + rope(r) . rope(k)``, which is ``W_uk^T q . c + rope(r) . rope(k)``. So the query is taken to the
latents once, and no key is ever made; likewise ``W_uv`` is applied once, to the latent that a head has attended to. What a
layer remembers of a token is c and rope(k), whatever the number of heads.
"""

import math

import jax
import jax.numpy as jnp

from specjax.models.config import MLA, ModelConfig
from specjax.models.params import Params
from specjax.models.primitives import linear, rms_norm
from specjax.models.rope import Rotations

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents. The published models have this number in their code, whatever their config.json says."""


def queries(params: Params, config: ModelConfig, x: jax.Array, rotations: Rotations) -> tuple[jax.Array, jax.Array]:
    """The queries of states ``x [B, T, H]``: ``[B, T, heads, kv_lora_rank]``, which meet latents, and the rotated
    ``[B, T, heads, qk_rope_head_dim]``, which meet rotated keys."""
    mla = _sizes(config)
    if mla.q_lora_rank is None:
        q = linear(params, "q", x)
    else:
        q = linear(params, "q_b", rms_norm(linear(params, "q_a", x), params["q_a_norm"], LATENT_EPS))
    q = q.reshape(*x.shape[:2], config.num_heads, mla.qk_head_dim)
    plain, turned = jnp.split(q, [mla.qk_nope_head_dim], axis=-1)
    to_keys, _ = _up_projections(params, config)
    return jnp.einsum("bthd,lhd->bthl", plain, to_keys), _rotate(mla, turned, rotations)


def entry(params: Params, config: ModelConfig, x: jax.Array, rotations: Rotations) -> tuple[jax.Array, jax.Array]:
    """What the layer remembers of states ``x [B, T, H]``: the latents ``[B, 1, T, kv_lora_rank]``, normed, and the rotated keys
    ``[B, 1, T, qk_rope_head_dim]``."""
    mla = _sizes(config)
    latents, keys = jnp.split(linear(params, "kv_a", x), [mla.kv_lora_rank], axis=-1)
    latents = rms_norm(latents, params["kv_a_norm"], LATENT_EPS)
    return latents[:, None], _rotate(mla, keys[:, :, None], rotations).transpose(0, 2, 1, 3)


def scale(config: ModelConfig) -> float:
    """What scores are multiplied with: ``1 / sqrt(d)``, and YaRN's temperature where ``mscale_all_dim`` asks for it."""
    mla, rope = _sizes(config), config.rope
    temperature = 1.0
    if rope.kind != "default" and rope.mscale_all_dim and rope.factor > 1:
        temperature = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return mla.qk_head_dim**-0.5 * temperature**2


def head_values(params: Params, config: ModelConfig, latents: jax.Array) -> jax.Array:
    """``[B, T, heads v_head_dim]`` the heads' values, from the latents ``[B, T, heads kv_lora_rank]`` that they attended to."""
    mla = _sizes(config)
    latents = latents.reshape(*latents.shape[:2], config.num_heads, mla.kv_lora_rank)
    _, to_values = _up_projections(params, config)
    return jnp.einsum("bthl,lhd->bthd", latents, to_values).reshape(*latents.shape[:2], -1)


def _up_projections(params: Params, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """``W_uk [latent, heads, qk_nope_head_dim]`` and ``W_uv [latent, heads, v_head_dim]``."""
    mla = _sizes(config)
    both = params["kv_b"].reshape(mla.kv_lora_rank, config.num_heads, mla.qk_nope_head_dim + mla.v_head_dim)
    to_keys, to_values = jnp.split(both, [mla.qk_nope_head_dim], axis=-1)
    return to_keys, to_values


def _rotate(mla: MLA, x: jax.Array, rotations: Rotations) -> jax.Array:
    """``x [B, T, heads, d]`` turned. Interleaved pairs are put apart first, in queries and keys alike: no score changes."""
    if mla.rope_interleaved:
        x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    return rotations.turn_keys(x)


def _sizes(config: ModelConfig) -> MLA:
    assert config.mla is not None
    return config.mla
