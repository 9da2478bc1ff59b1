"""Rounding a matrix by what it is multiplied with: GPTQ (Frantar et al. 2022, arXiv 2210.17323).

What has to stay are not the weights but the products ``X W`` with the inputs X that a layer sees. What rounding loses,
``W - Q``, costs ``trace((W - Q)^T H (W - Q))``, with the second moments ``H = X^T X`` of the inputs. So the weights of one
input after the other are rounded, and what they lose is made up for, as far as can be, by those of the inputs behind it.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.models.quantization.weights import Form, QuantizedMatrix, rounded, scales_of

DAMPING = 0.01
"""Of the mean second moment, is added to each input's own, as GPTQ's authors do (section 3.3): so that inputs which are nearly
sums of others do not make up for errors with large weights."""
_ROWS = 128
"""Inputs of a block, at most: what was lost before a block is brought in by one product for all of its rows."""
_HIGHEST = jax.lax.Precision.HIGHEST


@struct.dataclass
class Watched:
    """A matrix of floats whose inputs are looked at: it takes its place among the parameters, and gives the same products.

    The derivative of anything that is made of such products, by ``moments``, is the sum of ``x^T x`` over all the rows x that
    the matrix was multiplied with. It is no derivative of anything; it is how numbers come out of a pass, from inside of scans
    and experts too, without a word about them in the layers.

    Attributes:
        weight: ``[..., in, out]``.
        moments: ``[..., in, in]`` float32.

    Examples:
        >>> from specjax.models.quantization.gptq import Watched
        >>> from specjax.models.products import product
        >>> watched = Watched.of(jnp.ones((2, 3)))
        >>> rows = jnp.array([[1.0, 2.0], [0.0, 1.0]])
        >>> seen = jax.grad(lambda moments: product(rows, watched.replace(moments=moments)).sum())(watched.moments)
        >>> seen.tolist()
        [[1.0, 2.0], [2.0, 5.0]]
    """

    weight: jax.Array
    moments: jax.Array

    @classmethod
    def of(cls, weight: jax.Array) -> "Watched":
        """With nothing seen yet."""
        inputs = weight.shape[-2]
        return cls(weight, jnp.zeros((*weight.shape[:-2], inputs, inputs), jnp.float32))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.weight.shape


@partial(jax.jit, static_argnames="form")
def gptq(weights: Float[Array, "... n m"], moments: Float[Array, "... n n"], form: Form) -> QuantizedMatrix:
    """The matrix ``weights`` in a ``form`` without zeros and order, rounded so that its products change little.

    The scales of a group are chosen as its first row is reached, for the weights as they then are.

    Args:
        weights: the matrix ``[in, out]``, or several.
        moments: of its inputs, ``X^T X``; of each, where there are several. Where all are 0, nothing is known, and the weights
            become the nearest numbers.
        form: how it is quantized.
    """
    if weights.ndim > 2:  # one after the other, as they need not fit in side by side
        return jax.lax.map(lambda each: gptq(*each, form), (weights, moments))
    inputs, outputs = weights.shape
    size, weights = form.group or inputs, weights.astype(jnp.float32)
    follow, rows = followings(moments), form.group or math.gcd(inputs, _ROWS)
    whole = scales_of(weights.T, form)

    def of_block(lost: jax.Array, first: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Rows ``first`` and on; ``lost [in, out]`` is what all before them lose, and 0 from there on."""
        columns = jax.lax.dynamic_slice_in_dim(follow, first, rows, axis=1)
        block = jax.lax.dynamic_slice_in_dim(weights, first, rows)
        within = jax.lax.dynamic_slice_in_dim(columns, first, rows)
        owed = jnp.matmul(columns.T, lost, precision=_HIGHEST)
        scales = whole
        if form.group:  # for the rows as they would best be now, were none of them rounded
            as_floats = block + jax.scipy.linalg.solve_triangular(within.T, owed, lower=True, unit_diagonal=True)
            scales = scales_of(as_floats.T, form)

        def of_row(own: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            met = block[row] + owed[row] + jnp.matmul(within[:, row], own, precision=_HIGHEST)
            value = rounded(met[:, None], scales, form)[:, 0]
            return own.at[row].set(block[row] - value.astype(jnp.float32) * scales), value

        own, values = jax.lax.scan(of_row, jnp.zeros_like(block), jnp.arange(rows))
        return jax.lax.dynamic_update_slice_in_dim(lost, own, first, axis=0), (values, scales)

    _, (values, scales) = jax.lax.scan(of_block, jnp.zeros_like(weights), jnp.arange(0, inputs, rows))
    values = values.reshape(inputs // size, size, outputs).swapaxes(1, 2)
    return QuantizedMatrix(values, scales if form.group else whole[None], bits=form.bits, activations=form.activations)


def followings(moments: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """``U``: by which share of what input i's weights lose those of each input j behind it are to grow, in ``U[i, j]``. What is
    not above the diagonal is 0.

    GPTQ finds by the Cholesky factor of H's inverse, step by step, what all the rest should become after an error. With ``H =
    (1 + U) D (1 + U)^T``, D diagonal, the same choices follow from the errors ``e = W - Q`` alone: row j is the nearest to
    ``W[j] + sum over i < j of U[i, j] e[i]`` (LDLQ: Chee et al. 2023, arXiv 2307.13304, section 3 and theorem 6). So nothing is
    inverted.
    """
    mean = jnp.trace(moments) / len(moments)
    damped = moments + jnp.where(mean == 0, 1, DAMPING * mean) * jnp.eye(len(moments))
    factor = jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]  # the one above the diagonal
    return jnp.triu(factor / jnp.diag(factor), 1)
