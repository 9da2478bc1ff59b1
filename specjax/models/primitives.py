"""What layers of every kind are made of: the norm, the linear layer, the gated MLP."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models.params import Params
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


def vocabulary_logits(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``[..., V]`` float32, the product of states ``x [..., H]`` with a head's ``weight [H, V]``."""
    flat = x.reshape(-1, x.shape[-1])  # as in `linear`
    return jnp.matmul(flat, weight, preferred_element_type=jnp.float32).reshape(*x.shape[:-1], -1)


def mlp(params: Params, x: jax.Array, prefix: str = "") -> jax.Array:
    """The gated MLP, ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv 2002.05202); ``prefix`` starts its names."""
    gated = jax.nn.silu(linear(params, f"{prefix}gate", x)) * linear(params, f"{prefix}up", x)
    return linear(params, f"{prefix}down", gated)
