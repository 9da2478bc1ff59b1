"""The common parts of all layers: the norms, the linear layer, the gated MLP."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models.config import Activation, LayerFactors
from specjax.models.params import Params
from specjax.models.products import logits_of, product
from specjax.models.quantization import QuantizedMatrix
from specjax.shape_checks import shape_checked

LEAST = float(jnp.finfo(jnp.float32).min) / 2
"""The initial maximum score of a query that has met no key.

It is below every score, and above the value that masks one.
"""


@shape_checked
def rms_norm(
    x: Float[Array, "... H"], weight: Float[Array, " H"] | None, eps: float, offset: float = 0.0
) -> Float[Array, "... H"]:
    """Apply RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), in float32.

    The result has ``x``'s dtype.

    Args:
        x: the input.
        weight: the factor of the result; None for no factor.
        eps: avoids a division by 0 for a vector of zeros.
        offset: added to ``weight``: Gemma 2 and 3 store it minus 1.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    if weight is None:
        return y.astype(x.dtype)
    if offset:  # in float32: near 1, bfloat16 has few digits
        return (y * (weight.astype(jnp.float32) + offset)).astype(x.dtype)
    return weight * y.astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Apply LayerNorm (Ba et al. 2016, arXiv 1607.06450) to the last axis, in float32.

    The result has ``x``'s dtype; ``eps`` is added to the variance.
    """
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (y * weight + bias).astype(x.dtype)


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    """Return ``x @ W + b``; without a bias if the model declares none."""
    # Rows and tokens are one axis: the gradient of a product over two axes takes XLA's CPU backend
    # several times as long.
    y = product(x.reshape(-1, x.shape[-1]), params[name]).reshape(*x.shape[:-1], -1)
    bias = params.get(f"{name}_bias")
    return y if bias is None else y + bias


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Return ``x`` multiplied by a constant in float32, in ``x``'s dtype.

    So only the product is rounded, as by torch. JAX alone rounds the constant to that dtype first:
    in bfloat16 by up to 0.4%, the same way at every token.
    """
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def vocabulary_logits(x: jax.Array, weight: jax.Array | QuantizedMatrix) -> jax.Array:
    """Return the product of ``x [..., H]`` with a head ``[H, V]``, ``[..., V]`` float32."""
    return _logits(x, weight)


def embedding_logits(x: jax.Array, embed: jax.Array | QuantizedMatrix) -> jax.Array:
    """Return the same as `vocabulary_logits` for an embedding ``[V, H]`` that is also the head."""
    return _logits(x, embed, is_rows=True)


def _logits(x: jax.Array, head: jax.Array | QuantizedMatrix, is_rows: bool = False) -> jax.Array:
    flat = x.reshape(-1, x.shape[-1])  # as in `linear`
    return logits_of(flat, head, is_rows).reshape(*x.shape[:-1], -1)


def mlp(
    params: Params,
    x: jax.Array,
    prefix: str = "",
    activation: Activation = "silu",
    factors: LayerFactors | None = None,
    limit: float | None = None,
) -> jax.Array:
    """Return the gated MLP, ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv 2002.05202).

    Without a gate it is ``down(activation(up(x)))``. ``prefix`` is the prefix of its parameters'
    names. With ``factors`` gate and output are multiplied by theirs. The gated unit has a
    ``limit``, or None; see `gated_unit`.
    """
    if f"{prefix}gate" in params:
        gate = linear(params, f"{prefix}gate", x)
        gate = gate if factors is None else scaled(gate, factors.gate)
        gated = gated_unit(gate, linear(params, f"{prefix}up", x), activation, limit)
    else:
        gated = activate(linear(params, f"{prefix}up", x), activation)
    y = linear(params, f"{prefix}down", apart(gated) if x.ndim == 3 and x.shape[1] > 1 else gated)
    return y if factors is None else scaled(y, factors.down)


def gated_unit(
    gate: jax.Array, up: jax.Array, activation: Activation, limit: float | None = None
) -> jax.Array:
    """Return the product of the activated ``gate`` and ``up``.

    With a ``limit`` (Step-3.5) the activated gate is at most the limit, and ``up`` within it on
    both sides.
    """
    gate = activate(gate, activation)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * up


def apart(x: jax.Array) -> jax.Array:
    """Return ``x`` behind a barrier on a TPU, so that it is not fused with later operations.

    XLA's TPU backend otherwise fuses a product with what follows, in a layout that suits the
    latter. Weights are then rearranged at every call, or the product of a few rows takes several
    times as long.
    """
    return jax.lax.platform_dependent(x, tpu=jax.lax.optimization_barrier, default=lambda x: x)


def products_in_turn(params: Params, names: Sequence[str], x: jax.Array) -> list[jax.Array]:
    """Return `linear` of ``x`` with each of the ``names``, and then ``x``, for what follows.

    A GPU computes the products one after the other. XLA's GPU backend otherwise merges products of
    the same rows into one if a matrix is below 32 MB, and first concatenates all of their weights,
    at every call: a step of Qwen3.5-9B moved a third more bytes.
    """

    def in_turn(*both: jax.Array) -> tuple[jax.Array, ...]:
        return jax.lax.optimization_barrier(both)

    outputs = []
    for name in names:
        x, y = jax.lax.platform_dependent(
            x, linear(params, name, x), cuda=in_turn, default=lambda *both: both
        )
        outputs.append(y)
    return [*outputs, x]


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Return ``x`` through an activation. Gemma's GELU is the tanh approximation.

    See Hendrycks and Gimpel 2016, arXiv 1606.08415. ``relu2`` is the square of a ReLU (So et al.
    2021, arXiv 2109.08668).
    """
    if activation == "relu2":
        return jnp.square(jax.nn.relu(x))
    if activation == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=activation == "gelu_tanh")


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Return ``x`` soft-capped to ``-cap … cap`` (Gemma 2, arXiv 2408.00118, section 2).

    Without a cap it returns ``x``.
    """
    return x if cap is None else cap * jnp.tanh(x / cap)
