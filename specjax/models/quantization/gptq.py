"""GPTQ: rounds a matrix so that its products change little (Frantar et al. 2022, arXiv 2210.17323).

What should stay the same are not the weights, but the products ``X W`` with the layer's inputs X.
The rounding error ``W - Q`` costs ``trace((W - Q)^T H (W - Q))``, with the second moments
``H = X^T X`` of the inputs. So the weights are rounded one input after the other, and the weights
of later inputs compensate the error as far as possible.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.models.quantization.weights import Form, QuantizedMatrix, rounded, scales_of

DAMPING = 0.01
"""The share of the mean second moment that is added to each input's own.

GPTQ's authors do so (section 3.3): inputs that are nearly sums of others then do not compensate
errors with large weights.
"""
_ROWS = 128
"""The maximum number of inputs of a block.

The errors before a block are compensated by one product for all of its rows.
"""
_HIGHEST = jax.lax.Precision.HIGHEST  # "float32" on an accelerator is less by default


@struct.dataclass
class Watched:
    """A matrix of floats whose inputs are recorded.

    It replaces a parameter, and its products are the same. The derivative of anything computed from
    such products, with respect to ``moments``, is the sum of ``x^T x`` over all rows x that the
    matrix was multiplied with. This is not a true derivative. It is a way to get numbers out of a
    pass, from inside scans and experts too, without changing the layers.

    Attributes:
        weight: ``[..., in, out]``.
        moments: ``[..., in, in]`` float32.

    Examples:
        >>> from specjax.models.quantization.gptq import Watched
        >>> from specjax.models.products import product
        >>> watched = Watched.of(jnp.ones((2, 3)))
        >>> rows = jnp.array([[1.0, 2.0], [0.0, 1.0]])
        >>> total = lambda moments: product(rows, watched.replace(moments=moments)).sum()
        >>> jax.grad(total)(watched.moments).tolist()
        [[1.0, 2.0], [2.0, 5.0]]
    """

    weight: jax.Array
    moments: jax.Array

    @classmethod
    def of(cls, weight: jax.Array) -> "Watched":
        """Return a watched matrix with moments of zero."""
        inputs = weight.shape[-2]
        return cls(weight, jnp.zeros((*weight.shape[:-2], inputs, inputs), jnp.float32))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.weight.shape


@partial(jax.jit, static_argnames="form")
def gptq(
    weights: Float[Array, "... n m"], moments: Float[Array, "... n n"], form: Form
) -> QuantizedMatrix:
    """Quantize a matrix so that its products with its inputs change little.

    The scales of a group are computed when its first row is reached, from the weights as they are
    then.

    Args:
        weights: one matrix ``[in, out]``, or several.
        moments: the second moments ``X^T X`` of the inputs, for each matrix. If all are 0, nothing
            is known, and the weights are rounded to the nearest numbers.
        form: the form of the result, without zeros and order.
    """
    if weights.ndim > 2:  # one after the other, since all at once may not fit into memory
        return jax.lax.map(lambda pair: gptq(*pair, form), (weights, moments))
    inputs, outputs = weights.shape
    size, weights = form.group or inputs, weights.astype(jnp.float32)
    follow, rows = followings(moments), form.group or math.gcd(inputs, _ROWS)
    whole = scales_of(weights.T, form)

    def round_block(
        lost: jax.Array, first: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Round the rows from ``first`` on.

        ``lost [in, out]`` has the errors of all rows before, and 0 from there on.
        """
        columns = jax.lax.dynamic_slice_in_dim(follow, first, rows, axis=1)
        original = jax.lax.dynamic_slice_in_dim(weights, first, rows)
        within = jax.lax.dynamic_slice_in_dim(columns, first, rows)
        shift = jnp.matmul(columns.T, lost, precision=_HIGHEST)
        scales = whole
        # The scales fit the rows as they would be after compensation without rounding.
        if form.group:
            as_floats = original + jax.scipy.linalg.solve_triangular(
                within.T, shift, lower=True, unit_diagonal=True
            )
            scales = scales_of(as_floats.T, form)

        def round_row(errors: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            target = (
                original[row] + shift[row] + jnp.matmul(within[:, row], errors, precision=_HIGHEST)
            )
            value = rounded(target[:, None], scales, form)[:, 0]
            return errors.at[row].set(original[row] - value.astype(jnp.float32) * scales), value

        errors, values = jax.lax.scan(round_row, jnp.zeros_like(original), jnp.arange(rows))
        return jax.lax.dynamic_update_slice_in_dim(lost, errors, first, axis=0), (values, scales)

    _, (values, scales) = jax.lax.scan(
        round_block, jnp.zeros_like(weights), jnp.arange(0, inputs, rows)
    )
    values = values.reshape(inputs // size, size, outputs).swapaxes(1, 2)
    return QuantizedMatrix(
        values, scales if form.group else whole[None], bits=form.bits, activations=form.activations
    )


def followings(moments: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Return ``U``: in ``U[i, j]`` the share of the errors of input i that input j compensates.

    It is 0 on and below the diagonal, since only later inputs compensate. GPTQ derives the
    compensation step by step from the Cholesky factor of H's inverse. With
    ``H = (1 + U) D (1 + U)^T`` and D diagonal, the same result follows from the errors
    ``e = W - Q`` alone: row j is the nearest to ``W[j] + sum over i < j of U[i, j] e[i]`` (LDLQ:
    Chee et al. 2023, arXiv 2307.13304, section 3 and theorem 6). So nothing is inverted.
    """
    mean = jnp.trace(moments) / len(moments)
    damped = moments + jnp.where(mean == 0, 1, DAMPING * mean) * jnp.eye(len(moments))
    factor = jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]  # reversed: the upper factor
    return jnp.triu(factor / jnp.diag(factor), 1)
