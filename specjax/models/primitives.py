"""What layers of every kind are made of: the norm, the linear layer, the gated MLP."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models.config import Activation
from specjax.models.params import Params
from specjax.shape_checks import shape_checked

LEAST = float(jnp.finfo(jnp.float32).min) / 2
"""The largest attention score of a query that has met no key yet: below every score, and above what hides one."""


@shape_checked
def rms_norm(
    x: Float[Array, "... H"], weight: Float[Array, " H"] | None, eps: float, offset: float = 0.0
) -> Float[Array, "... H"]:
    """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), in float32, returned in ``x``'s dtype.

    Args:
        x: what is normed.
        weight: multiplies the result; None: nothing does.
        eps: keeps a vector of zeros from being divided by 0.
        offset: is added to ``weight``: Gemma 2 and 3 store it less 1.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    if weight is None:
        return y.astype(x.dtype)
    if offset:  # in float32: near 1, bfloat16 has few digits
        return (y * (weight.astype(jnp.float32) + offset)).astype(x.dtype)
    return weight * y.astype(x.dtype)


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    """``x @ W + b``; the bias is added where the model declares one."""
    # Rows and tokens as one axis: the gradient of a product over two takes XLA's CPU backend several times as long.
    y = _product(x.reshape(-1, x.shape[-1]), params[name]).reshape(*x.shape[:-1], -1)
    bias = params.get(f"{name}_bias")
    return y if bias is None else y + bias


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``[n, out]`` the product of ``x [n, in]`` with ``weight [in, out]``."""
    if x.shape[0] != 1:
        return x @ weight
    of_eight = partial(_of_eight_rows, jnp.matmul)
    return jax.lax.platform_dependent(x, weight, cuda=_product_of_two_rows, tpu=of_eight, default=jnp.matmul)


def _product_of_two_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A product of one row as one of two, the second of zeros.

    XLA's GPU backend makes a small product of one row into a multiplication and a sum, and writes all that it multiplied to
    memory in between: 33 microseconds for the keys and values of an 8B model on an H100 where two rows take 7.
    """
    return (jnp.pad(x, ((0, 1), (0, 0))) @ weight)[:1]


Multiply = Callable[[jax.Array, jax.Array], jax.Array]
"""Of ``[..., n, in]`` with something else: ``[..., n, out]``."""


def product_of_one_row(multiply: Multiply, x: jax.Array, other: jax.Array) -> jax.Array:
    """``[..., 1, out]``, ``multiply(x, other)`` of one row ``x [..., 1, in]``, as suits the device."""
    return jax.lax.platform_dependent(x, other, tpu=partial(_of_eight_rows, multiply), default=multiply)


def _of_eight_rows(multiply: Multiply, x: jax.Array, other: jax.Array) -> jax.Array:
    """The product of one row as that of eight, the others of zeros.

    XLA's TPU backend, too, makes a product of one row into a multiplication and a sum, away from the units that multiply
    matrices: by the compiler's estimate a step of Gemma 4 E2B on a v5e takes 28.9 million cycles so, and 6.6 million with
    eight rows, where its bytes take 8.4. The barrier hides the zeros from XLA; with two rows and none it is 7.3.
    """
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 7), (0, 0)])
    return multiply(jax.lax.optimization_barrier(filled), other)[..., :1, :]


def vocabulary_logits(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``[..., V]`` float32, the product of states ``x [..., H]`` with a head's ``weight [H, V]``."""
    return _logits(partial(jnp.matmul, preferred_element_type=jnp.float32), x, weight)


def embedding_logits(x: jax.Array, embed: jax.Array) -> jax.Array:
    """As `vocabulary_logits`, with an embedding ``[V, H]`` that is the head too."""
    return _logits(partial(jnp.einsum, "th,vh->tv", preferred_element_type=jnp.float32), x, embed)


def _logits(multiply: Multiply, x: jax.Array, head: jax.Array) -> jax.Array:
    flat = x.reshape(-1, x.shape[-1])  # as in `linear`
    logits = product_of_one_row(multiply, flat, head) if len(flat) == 1 else multiply(flat, head)
    return logits.reshape(*x.shape[:-1], -1)


def mlp(params: Params, x: jax.Array, prefix: str = "", activation: Activation = "silu") -> jax.Array:
    """The gated MLP, ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv 2002.05202); ``prefix`` starts its names."""
    gated = activate(linear(params, f"{prefix}gate", x), activation) * linear(params, f"{prefix}up", x)
    return linear(params, f"{prefix}down", gated)


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """``x`` through an activation; Gemma's GELU is the one with a tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    return jax.nn.silu(x) if activation == "silu" else jax.nn.gelu(x, approximate=True)


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """``x`` bent into the range from ``-cap`` to ``cap`` (Gemma 2, arXiv 2408.00118, section 2); None: as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)
