"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692).

It is the `specjax.models.delta_rule` with a decay for each row of the table. Queries, keys and
values go through a short convolution first, as in `specjax.models.linear_attention`. Decays and
output gates are made by projections through a smaller size.
"""

import jax
import jax.numpy as jnp

from specjax.models.config import ModelConfig
from specjax.models.delta_rule import DeltaRuleInputs
from specjax.models.linear_attention import Context, convolve, follow, unit
from specjax.models.memory import KimiDeltaAttention
from specjax.models.params import Params
from specjax.models.primitives import apart, linear, products_in_turn, rms_norm
from specjax.models.states import State


def kimi_delta_attention(
    params: Params, config: ModelConfig, x: jax.Array, context: Context
) -> tuple[jax.Array, tuple[jax.Array, ...] | State]:
    """Return the output ``[B, T, H]`` of one layer for normed hidden states ``x [B, T, H]``.

    The second result is the entry of the call's own tokens, or the state after them.
    """
    sizes = config.linear
    assert isinstance(sizes, KimiDeltaAttention)

    def heads(values: jax.Array) -> jax.Array:  # [B, T, heads * dim] -> [B, heads, T, dim]
        return values.reshape(*x.shape[:2], sizes.key_heads, -1).transpose(0, 2, 1, 3)

    *projected, x = products_in_turn(params, ("q", "k", "v"), x)
    convolved = tuple(heads(apart(values)) for values in projected)
    q, k, v = convolve(params, "qkv", convolved, context)
    beta = jax.nn.sigmoid(heads(linear(params, "beta", x).astype(jnp.float32)))[..., 0]
    decay = linear(params, "decay", linear(params, "decay_in", x)).astype(jnp.float32)
    step = jax.nn.softplus(heads(decay + params["rate_bias"].astype(jnp.float32)))
    log_alpha = -jnp.exp(params["log_rate"].astype(jnp.float32))[..., None] * step
    tokens = DeltaRuleInputs(unit(q) * sizes.key_dim**-0.5, unit(k), v, beta, log_alpha)
    y, memory = follow(tokens, context, convolved)
    gate = heads(linear(params, "output_gate", linear(params, "output_gate_in", x))).astype(
        jnp.float32
    )
    normed = rms_norm(y, params["norm"].astype(jnp.float32), config.norm_eps)
    gated = (normed * jax.nn.sigmoid(gate)).astype(x.dtype)
    return linear(params, "o", gated.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)), memory
