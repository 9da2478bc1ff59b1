"""Rows times weights, as each device does it best, the weights being floats or quantized (`specjax.models.quantization`).

Quantized weights are multiplied in one of two ways:

- **Whole numbers by whole numbers.** The row is rounded to whole numbers, with a scale of its own, and the products are summed
  up in 32 bits. A CPU does so: XLA converts weights to floats there, all of them at every call, which takes 14 to 40 times as
  long. One 8-bit number, a *limb*, for each of a row's is what "W8A8" means; with two, about 15 bits, hardly anything is
  rounded. Such sums do not depend on their order, so a row gives the same bits whatever stands beside it.
- **Floats by converted weights.** TPUs and GPUs convert weights on their way from memory to the units that multiply.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from specjax.models.quantization import QuantizedMatrix
from specjax.models.quantization.gptq import Watched
from specjax.models.quantization.weights import dequantize_matrix

Multiply = Callable[[jax.Array, jax.Array], jax.Array]
"""Of ``[..., n, in]`` with something else: ``[..., n, out]``."""


def product(x: jax.Array, weight: jax.Array | QuantizedMatrix | Watched) -> jax.Array:
    """``[n, out]`` the product of ``x [n, in]`` with ``weight [in, out]``."""
    if isinstance(weight, Watched):
        return _watched_product(x, weight.weight, weight.moments)
    if isinstance(weight, QuantizedMatrix):
        return quantized_product(x, weight).astype(x.dtype)
    if x.shape[0] != 1:
        return x @ weight
    of_eight = partial(_of_eight_rows, jnp.matmul)
    return jax.lax.platform_dependent(x, weight, cuda=_of_two_rows, tpu=of_eight, default=jnp.matmul)


def logits_of(x: jax.Array, head: jax.Array | QuantizedMatrix, is_rows: bool = False) -> jax.Array:
    """``[n, V]`` float32, the product of ``x [n, H]`` with a ``head [H, V]``; ``is_rows``: it is an embedding, ``[V, H]``."""
    if isinstance(head, QuantizedMatrix):
        return quantized_product(x, head)
    equation = "th,vh->tv" if is_rows else "th,hv->tv"
    multiply = partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
    return product_on_device(multiply, x, head)


@jax.custom_vjp
def _watched_product(x: jax.Array, weight: jax.Array, moments: jax.Array) -> jax.Array:
    """``x @ weight``; by ``moments`` its derivative is ``x^T x``, whatever it is a derivative of. See `Watched`."""
    return x @ weight


def _watch(x: jax.Array, weight: jax.Array, moments: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x @ weight, x


def _seen(x: jax.Array, _: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    """With zeros for x, which are not None: the products before this one are asked too."""
    moments = jnp.matmul(x.T, x, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return jnp.zeros_like(x), None, moments


_watched_product.defvjp(_watch, _seen)


def _of_two_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A product of one row as one of two, the second of zeros.

    XLA's GPU backend makes a small product of one row into a multiplication and a sum, and writes all that it multiplied to
    memory in between: 33 microseconds for the keys and values of an 8B model on an H100 where two rows take 7.
    """
    return (jnp.pad(x, ((0, 1), (0, 0))) @ weight)[:1]


def product_on_device(multiply: Multiply, x: jax.Array, other: jax.Array) -> jax.Array:
    """``[..., n, out]``, ``multiply(x, other)`` of rows ``x [..., n, in]``; of one row, as suits the device."""
    if x.shape[-2] != 1:
        return multiply(x, other)
    return jax.lax.platform_dependent(x, other, tpu=partial(_of_eight_rows, multiply), default=multiply)


def _of_eight_rows(multiply: Multiply, x: jax.Array, other: jax.Array) -> jax.Array:
    """The product of one row as that of eight, the others of zeros.

    XLA's TPU backend, too, makes a product of one row into a multiplication and a sum, away from the units that multiply
    matrices: by the compiler's estimate a step of Gemma 4 E2B on a v5e takes 28.9 million cycles so, and 6.6 million with
    eight rows, where its bytes take 8.4. The barrier hides the zeros from XLA; with two rows and none it is 7.3.
    """
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 7), (0, 0)])
    return multiply(jax.lax.optimization_barrier(filled), other)[..., :1, :]


# --- quantized weights ----------------------------------------------------------------------------------------------------


@jax.custom_jvp
def quantized_product(x: jax.Array, weight: QuantizedMatrix) -> jax.Array:
    """``[n, out]`` float32, the product of ``x [n, in]`` with a quantized ``weight [in, out]``.

    Its derivative is that of the product with the weights as floats: rounding has none that would be of use.
    """
    if weight.order is not None:
        x = x[:, weight.order]
    if weight.form.kind == "fp8":
        return _by_converted(x, weight)
    on_cpu = partial(_by_whole_numbers, _sums_on_cpu)
    elsewhere = partial(_by_whole_numbers, _sums) if weight.activations == 8 else _by_converted
    return jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=elsewhere)


@quantized_product.defjvp
def _derivative(factors: tuple[jax.Array, QuantizedMatrix], tangents: tuple[jax.Array, object]) -> tuple[jax.Array, jax.Array]:
    x, weight = factors
    return quantized_product(x, weight), jnp.matmul(tangents[0].astype(jnp.float32), dequantize_matrix(weight))


def _by_converted(x: jax.Array, weight: QuantizedMatrix) -> jax.Array:
    """Floats by converted values. Scales and zeros come in afterwards, group by group: to multiply the weights with
    their scales before the product would take seven times as long on a TPU v5e, by its compiler's estimate.

    One row stays one on a GPU. XLA joins the conversion with a product of one row there, so that nothing is written in between,
    as it is with floats (`_of_two_rows`). In groups there are sums of their own for each row, and XLA writes and reads them:
    eight rows in place of one would move more than twice the bytes. That is what the compiler says; no GPU was timed.
    """
    groups = weight.values.shape[0]

    def multiply(x: jax.Array, values: jax.Array) -> jax.Array:
        """``[..., n, in]`` by ``[..., out, in]``."""
        return jnp.einsum("...ni,...oi->...no", x, values.astype(x.dtype), preferred_element_type=jnp.float32)

    if groups == 1 and weight.zeros is None:
        return product_on_device(multiply, x, weight.values[0]) * weight.scales[0]
    rows = x.reshape(len(x), groups, -1).swapaxes(0, 1)
    found = product_on_device(multiply, rows, weight.values)  # [groups, n, out]
    if weight.zeros is not None:
        found = found - jnp.sum(rows, axis=-1, keepdims=True, dtype=jnp.float32) * weight.zeros.astype(jnp.float32)[:, None]
    return jnp.sum(found * weight.scales[:, None], axis=0)


def _by_whole_numbers(multiply: Multiply, x: jax.Array, weight: QuantizedMatrix) -> jax.Array:
    """Whole numbers by whole numbers, one group after the other.

    Args:
        multiply: int8 ``[n, in]`` by ``[out, in]``: int32 ``[n, out]``.
        x: ``[n, in]``.
        weight: ``[in, out]``.
    """
    groups, count = weight.values.shape[0], len(x)
    rows, steps = _limbs(x.astype(jnp.float32), weight.activations)
    rows = rows.reshape(len(rows), groups, -1).swapaxes(0, 1)

    def add(total: jax.Array, group: tuple[jax.Array, QuantizedMatrix]) -> tuple[jax.Array, None]:
        own, of_weight = group
        sums = multiply(own, of_weight.values.astype(jnp.int8))
        if of_weight.zeros is not None:
            sums = sums - own.sum(axis=1, keepdims=True, dtype=jnp.int32) * of_weight.zeros.astype(jnp.int32)
        found = sums[:count].astype(jnp.float32)
        if weight.activations > 8:  # exact: a product with a power of 2
            found = found * 256 + sums[count:].astype(jnp.float32)
        return total + found * of_weight.scales, None

    parts = weight.replace(order=None)  # pyright: ignore[reportAttributeAccessIssue]
    total = jnp.zeros((count, weight.values.shape[1]), jnp.float32)
    if groups == 1:
        total, _ = add(total, jax.tree.map(lambda part: part[0], (rows, parts)))
    else:
        total, _ = jax.lax.scan(add, total, (rows, parts))
    return total * steps


def _sums(rows: jax.Array, values: jax.Array) -> jax.Array:
    """int32 ``[n, out]``, the product of int8 ``rows [n, in]`` with ``values [out, in]``."""
    count = len(rows)
    if count == 1:  # a product of one row takes XLA's CPU backend 20 times as long as one of two
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    return jnp.einsum("ni,oi->no", rows, values, preferred_element_type=jnp.int32)[:count]


def _sums_on_cpu(rows: jax.Array, values: jax.Array) -> jax.Array:
    """As `_sums`, with what a CPU reads fastest on the left. The result is the same: sums of whole numbers have no order.

    YNNPACK, the library that multiplies here, rearranges its right matrix in every call, so the weights stand on the left. Long
    rows of weights are read faster than short ones, and up to four columns on the right take no longer than one. With one or
    two rows some columns are free: neighbouring outputs, ``w0`` and ``w1``, are then joined into one with that many times the
    inputs. The rows ``a`` and ``b`` stand on the right once for each of them, at its place, with zeros at the others'::

        [w0 w1]     [a b 0 0]     [a w0  b w0  a w1  b w1]
        [w2 w3]  x  [0 0 a b]  =  [a w2  b w2  a w3  b w3]

    Read row by row, that is ``[out, n]``. docs/results/quantization.md has what it gives.
    """
    count, (outputs, inputs) = len(rows), values.shape
    # A mesh of 2, 4, ... 32 devices then cuts between joined outputs, and none needs weights of another.
    together = next((many for many in (4, 2) if many * count <= 4 and outputs % (32 * many) == 0), 1)
    # Measured: small matrices, and more rows where the inputs are few, are as fast the other way round or faster.
    if together * count == 1 or values.size < 1 << 18 or (count > 4 and inputs < 1024):
        return _sums(rows, values)
    columns = jnp.eye(together, dtype=jnp.int8)[:, None, :, None] * rows[:, None, :]  # [together, n, together, in]
    columns = columns.reshape(together * count, together, inputs)
    joined = values.reshape(outputs // together, together, inputs)
    # In this order of the inputs' axes: in einsum's, by name, the weights would be transposed in memory first.
    found = jax.lax.dot_general(joined, columns, (((1, 2), (1, 2)), ((), ())), preferred_element_type=jnp.int32)
    # The barrier hides the transposition from XLA, which would exchange the two matrices for it.
    return jax.lax.optimization_barrier(found).reshape(outputs, count).T


def _limbs(x: jax.Array, activations: int) -> tuple[jax.Array, jax.Array]:
    """Rows ``x [n, in]`` as whole numbers times a step of their own.

    Returns:
        int8 ``[n, in]``, with 8 bits; with 16 ``[2 n, in]``, first 256ths of all rows' numbers and then what remains of them;
        and the steps ``[n, 1]``.
    """
    most = 127 if activations == 8 else 127 * 256 + 127
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    steps = jnp.where(largest == 0, 1, largest / most)  # what is not finite stays so
    numbers = jnp.round(x / steps).astype(jnp.int32)
    if activations == 8:
        return numbers.astype(jnp.int8), steps
    high = (numbers + 128) >> 8
    return jnp.concatenate([high, numbers - (high << 8)]).astype(jnp.int8), steps
