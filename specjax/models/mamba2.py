"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), as in Nemotron-H, Granite 4, Bamba and Falcon-H1.

A head keeps a state ``S [N, dh]``. A token has an input x of the size of a head, a step dt > 0, and
vectors B and C that a group of heads shares. With the decay ``a = exp(-dt exp(A_log))``::

    S' = a S + B (dt x)^T        y = S'^T C + D x

So a state decays, and a token adds a product of two vectors to it: this is the delta rule's state
with key B, query C and the value x times the step dt for the update
(`specjax.models.delta_rule`). Over a tree of tokens below S0, with g_n the product of the decays
from S0 to n along its path::

    y_n = g_n S0^T C_n + sum_a (g_n / g_a) (B_a . C_n) dt_a x_a + D x_n      a in anc(n) or n

and an accepted path that ends in m is written as ``S = g_m S0 + sum_a (g_m / g_a) B_a (dt_a
x_a)^T``. Of a drafted token these are kept, and never a state: B, x and the convolution's inputs in
the type of the activations, and dt and the logarithm of the decay in float32. A prompt is read in
chunks of 64 tokens.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from specjax.models.config import ModelConfig
from specjax.models.delta_rule import DeltaRuleInputs
from specjax.models.linear_attention import Context, convolve, follow
from specjax.models.memory import Mamba2
from specjax.models.params import Params
from specjax.models.primitives import apart, linear, products_in_turn, rms_norm, scaled
from specjax.models.states import State


def mamba2(
    params: Params, config: ModelConfig, x: jax.Array, context: Context
) -> tuple[jax.Array, tuple[jax.Array, ...] | State]:
    """Return the output ``[B, T, H]`` of one layer for normed hidden states ``x [B, T, H]``.

    The second result is the entry of the call's own tokens, or the state after them.
    """
    sizes = config.linear
    assert isinstance(sizes, Mamba2)
    batch, count = x.shape[:2]
    factors = config.factors
    if factors is not None:
        x = scaled(x, factors.state_in)
    gate, *projected, x = products_in_turn(params, ("z", "x", "b", "c"), x)
    step = linear(params, "step", x)
    if factors is not None:  # rounded to the type of the activations, as published
        gate, *projected, step = (
            part * factor
            for part, factor in zip((gate, *projected, step), factors.state_parts, strict=True)
        )
    convolved = tuple(
        apart(values).reshape(batch, count, heads, dim).transpose(0, 2, 1, 3)
        for values, (heads, dim) in zip(projected, sizes.convolved, strict=True)
    )
    step, log_decay = _steps(params, step)
    # Rounded once, before anything reads them: an entry has these, and not their products with the
    # step, so the result does not depend on which tokens were drafted.
    value, key, query = (
        part.astype(x.dtype) for part in convolve(params, "xbc", convolved, context)
    )
    tokens = DeltaRuleInputs(query, key, value, None, log_decay, step)
    y, memory = follow(tokens, context, convolved)
    y = y + params["skip"].astype(jnp.float32)[:, None, None] * value
    y = y.transpose(0, 2, 1, 3).reshape(batch, count, -1)
    return linear(params, "o", _gated(params, config, y, gate, x.dtype)), memory


def _gated(
    params: Params, config: ModelConfig, y: jax.Array, gate: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Return the input ``[B, T, heads * dh]`` of the output projection.

    ``y`` is the output of the rule in float32, and ``gate`` its gates. Each group of heads is
    normed.
    """
    sizes, gate = config.linear, jax.nn.silu(gate.astype(jnp.float32))
    assert isinstance(sizes, Mamba2)

    def normed(y: jax.Array) -> jax.Array:
        groups = y.reshape(*y.shape[:2], sizes.key_heads, -1)
        return rms_norm(groups, None, config.norm_eps).reshape(y.shape)

    if sizes.norm == "none":
        return (y * gate).astype(dtype)
    if sizes.norm == "before_gate":
        return (normed(y) * params["norm"].astype(jnp.float32) * gate).astype(dtype)
    return normed(y * gate).astype(dtype) * params["norm"]


def _steps(params: Params, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return dt and the logarithm of the decay, ``[B, heads, T]`` float32.

    ``step [B, T, heads]`` is the projection.
    """
    step = step.astype(jnp.float32).transpose(0, 2, 1)
    step = jax.nn.softplus(step + params["rate_bias"].astype(jnp.float32)[:, None])
    return step, -jnp.exp(params["log_rate"].astype(jnp.float32))[:, None] * step
