"""Matrix products, with weights in floats or quantized, in the best way for each device.

Quantized weights (`specjax.models.quantization`) are multiplied in one of two ways:

- **Integers by integers.** The row is rounded to integers with a scale of its own, and the products
  are summed in 32 bits. A CPU does this: XLA would convert all weights to floats there at every
  call, which takes 14 to 40 times as long. One 8-bit number, a *limb*, for each number of a row is
  "W8A8". Two limbs have about 15 bits, and round hardly anything. Such sums do not depend on their
  order, so a row gives the same bits in any batch.
- **Floats by converted weights.** TPUs and GPUs convert weights on their way from memory to the
  matrix units.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from specjax.models.quantization import QuantizedMatrix
from specjax.models.quantization.gptq import Watched
from specjax.models.quantization.weights import dequantize_matrix

_SUMS_LIMIT = 256 * 2**20
"""The bytes of the sums of all groups above which they are computed in pieces, except on TPUs."""

Multiply = Callable[[jax.Array, jax.Array], jax.Array]
"""Multiplies ``[..., n, in]`` with a second array, to ``[..., n, out]``."""


def product(x: jax.Array, weight: jax.Array | QuantizedMatrix | Watched) -> jax.Array:
    """Return the product ``[n, out]`` of ``x [n, in]`` with ``weight [in, out]``."""
    if isinstance(weight, Watched):
        return _watched_product(x, weight.weight, weight.moments)
    if isinstance(weight, QuantizedMatrix):
        return quantized_product(x, weight).astype(x.dtype)
    if x.shape[0] != 1:
        return x @ weight
    padded_to_eight = partial(_of_eight_rows, jnp.matmul)
    return jax.lax.platform_dependent(
        x, weight, cuda=_of_two_rows, tpu=padded_to_eight, default=jnp.matmul
    )


def logits_of(x: jax.Array, head: jax.Array | QuantizedMatrix, is_rows: bool = False) -> jax.Array:
    """Return the product ``[n, V]`` of ``x [n, H]`` with a head ``[H, V]``, in float32.

    ``is_rows``: the head is an embedding, ``[V, H]``.
    """
    if isinstance(head, QuantizedMatrix):
        return quantized_product(x, head)
    equation = "th,vh->tv" if is_rows else "th,hv->tv"
    multiply = partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
    return product_on_device(multiply, x, head)


@jax.custom_vjp
def _watched_product(x: jax.Array, weight: jax.Array, moments: jax.Array) -> jax.Array:
    """Return ``x @ weight``; its derivative by ``moments`` is always ``x^T x``. See `Watched`."""
    return x @ weight


def _watch(x: jax.Array, weight: jax.Array, moments: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x @ weight, x


def _seen(x: jax.Array, _: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    """Return the derivatives: ``x^T x`` for the moments, zeros for x.

    The zeros are not None: the derivatives of earlier products are needed too.
    """
    moments = jnp.matmul(
        x.T, x, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return jnp.zeros_like(x), None, moments


_watched_product.defvjp(_watch, _seen)


def _of_two_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute a product of one row as one of two, with zeros in the second.

    XLA's GPU backend turns a small product of one row into a multiplication and a sum, and writes
    the intermediate products to memory: 33 microseconds for the keys and values of an 8B model on
    an H100, where two rows take 7.
    """
    return (jnp.pad(x, ((0, 1), (0, 0))) @ weight)[:1]


def product_on_device(multiply: Multiply, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Return ``multiply(x, matrix)`` for rows ``x [..., n, in]``; one row as suits the device."""
    if x.shape[-2] != 1:
        return multiply(x, matrix)
    return jax.lax.platform_dependent(
        x, matrix, tpu=partial(_of_eight_rows, multiply), default=multiply
    )


def _of_eight_rows(multiply: Multiply, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Compute a product of one row as one of eight, with zeros in the others.

    XLA's TPU backend also turns a product of one row into a multiplication and a sum, outside of
    the matrix units. By the compiler's estimate a step of Gemma 4 E2B on a v5e so takes 28.9
    million cycles, but 6.6 million with eight rows; its memory traffic takes 8.4 million. The
    barrier hides the zeros from XLA. Two rows without a barrier take 7.3 million.
    """
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 7), (0, 0)])
    return multiply(jax.lax.optimization_barrier(filled), matrix)[..., :1, :]


# --- quantized weights ---------------------------------------------------------------------------


@jax.custom_jvp
def quantized_product(x: jax.Array, weight: QuantizedMatrix) -> jax.Array:
    """Return the product of ``x [n, in]`` with a quantized ``weight [in, out]``, in float32.

    The derivative is that of the product with the weights in floats: the derivative of rounding is
    useless.
    """
    if weight.order is not None:
        x = x[:, weight.order]
    if weight.form.kind == "fp8":
        return _by_converted(x, weight)
    on_cpu = partial(_by_whole_numbers, _sums_on_cpu)
    elsewhere = partial(_by_whole_numbers, _sums) if weight.activations == 8 else _by_converted
    return jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=elsewhere)


@quantized_product.defjvp
def _derivative(
    factors: tuple[jax.Array, QuantizedMatrix], tangents: tuple[jax.Array, object]
) -> tuple[jax.Array, jax.Array]:
    x, weight = factors
    return quantized_product(x, weight), jnp.matmul(
        tangents[0].astype(jnp.float32), dequantize_matrix(weight)
    )


def _by_converted(x: jax.Array, weight: QuantizedMatrix) -> jax.Array:
    """Multiply floats by converted values.

    Scales and zeros are applied after the product, group by group: by the compiler's estimate,
    scaling the weights before the product takes seven times as long on a TPU v5e. On a GPU one row
    stays one: XLA fuses the conversion with a product of one row, so that nothing is written in
    between, unlike with floats (`_of_two_rows`). With groups, each row has a sum for every group,
    and XLA writes and reads them: eight rows in place of one would move more than twice the bytes.
    This is the compiler's estimate; no GPU was timed.

    For many rows these sums would fill a GPU's memory, so above `_SUMS_LIMIT` they are added up in
    pieces of some groups. For 512 rows and a matrix of 5120 x 17408 in groups of 16, the compiler
    for an H100 reserves 0.2 GB instead of 11.4; times were not measured. On a mesh that splits the
    inputs, each device then gathers the matrix. A TPU adds up the sums as they are computed, and
    writes none.
    """
    groups, outputs, _ = weight.values.shape
    if groups == 1 and weight.zeros is None:
        return product_on_device(_multiply, x, weight.values[0]) * weight.scales[0]
    rows = x.reshape(len(x), groups, -1).swapaxes(0, 1)
    parts = weight.replace(order=None)  # pyright: ignore[reportAttributeAccessIssue]
    size = len(x) * outputs * 4  # bytes of the sums of one group
    if groups * size <= _SUMS_LIMIT:
        return _sum_of_groups(rows, parts)
    together = next(
        count
        for count in range(groups, 0, -1)
        if count == 1 or (groups % count == 0 and count * size <= _SUMS_LIMIT)
    )
    in_pieces = partial(_sum_in_pieces, together)
    return jax.lax.platform_dependent(rows, parts, tpu=_sum_of_groups, default=in_pieces)


def _multiply(x: jax.Array, values: jax.Array) -> jax.Array:
    """Multiply ``[..., n, in]`` by ``[..., out, in]``."""
    return jnp.einsum(
        "...ni,...oi->...no", x, values.astype(x.dtype), preferred_element_type=jnp.float32
    )


def _sum_of_groups(rows: jax.Array, weight: QuantizedMatrix) -> jax.Array:
    """Return the product ``[n, out]`` of ``rows [groups, n, size]``: a sum over all groups."""
    sums = product_on_device(_multiply, rows, weight.values)  # [groups, n, out]
    if weight.zeros is not None:
        sums = (
            sums
            - jnp.sum(rows, axis=-1, keepdims=True, dtype=jnp.float32)
            * weight.zeros.astype(jnp.float32)[:, None]
        )
    return jnp.sum(sums * weight.scales[:, None], axis=0)


def _sum_in_pieces(together: int, rows: jax.Array, weight: QuantizedMatrix) -> jax.Array:
    """Return the same as `_sum_of_groups`, one piece of ``together`` groups after the other."""

    def add(total: jax.Array, piece: tuple[jax.Array, QuantizedMatrix]) -> tuple[jax.Array, None]:
        return total + _sum_of_groups(*piece), None

    pieces = jax.tree.map(lambda part: part.reshape(-1, together, *part.shape[1:]), (rows, weight))
    total = jnp.zeros((rows.shape[1], weight.values.shape[1]), jnp.float32)
    return jax.lax.scan(add, total, pieces)[0]


def _by_whole_numbers(multiply: Multiply, x: jax.Array, weight: QuantizedMatrix) -> jax.Array:
    """Multiply integers by integers, one group after the other.

    Args:
        multiply: multiplies int8 ``[n, in]`` by ``[out, in]``, to int32 ``[n, out]``.
        x: ``[n, in]``.
        weight: ``[in, out]``.
    """
    groups, count = weight.values.shape[0], len(x)
    rows, steps = _limbs(x.astype(jnp.float32), weight.activations)
    rows = rows.reshape(len(rows), groups, -1).swapaxes(0, 1)

    def add(total: jax.Array, group: tuple[jax.Array, QuantizedMatrix]) -> tuple[jax.Array, None]:
        inputs, matrix = group
        sums = multiply(inputs, matrix.values.astype(jnp.int8))
        if matrix.zeros is not None:
            sums = sums - inputs.sum(axis=1, keepdims=True, dtype=jnp.int32) * matrix.zeros.astype(
                jnp.int32
            )
        floats = sums[:count].astype(jnp.float32)
        if weight.activations > 8:  # exact: a product with a power of 2
            floats = floats * 256 + sums[count:].astype(jnp.float32)
        return total + floats * matrix.scales, None

    parts = weight.replace(order=None)  # pyright: ignore[reportAttributeAccessIssue]
    total = jnp.zeros((count, weight.values.shape[1]), jnp.float32)
    if groups == 1:
        total, _ = add(total, jax.tree.map(lambda part: part[0], (rows, parts)))
    else:
        total, _ = jax.lax.scan(add, total, (rows, parts))
    return total * steps


def _sums(rows: jax.Array, values: jax.Array) -> jax.Array:
    """Return the product of int8 ``rows [n, in]`` with ``values [out, in]``, int32 ``[n, out]``."""
    count = len(rows)
    if count == 1:  # one row takes XLA's CPU backend 20 times as long as two
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    return jnp.einsum("ni,oi->no", rows, values, preferred_element_type=jnp.int32)[:count]


def _sums_on_cpu(rows: jax.Array, values: jax.Array) -> jax.Array:
    """Return the same as `_sums`, with the matrix that a CPU reads fastest on the left.

    The result is bit-identical, since integer sums do not depend on their order. YNNPACK, the
    library that multiplies here, rearranges its right matrix in every call, so the weights are on
    the left. Long rows of weights are read faster than short ones, and up to four columns on the
    right take no longer than one. With one or two rows some columns are free: neighbouring outputs,
    ``w0`` and ``w1``, are then joined into one with that many times the inputs. The rows ``a`` and
    ``b`` are on the right once for each of them, at its place, with zeros elsewhere::

        [w0 w1]     [a b 0 0]     [a w0  b w0  a w1  b w1]
        [w2 w3]  x  [0 0 a b]  =  [a w2  b w2  a w3  b w3]

    Read row by row, that is ``[out, n]``. docs/results/quantization.md has the gains.
    """
    count, (outputs, inputs) = len(rows), values.shape
    # The factor 32: a mesh of up to 32 devices then cuts between joined outputs, and no device
    # needs the weights of another.
    together = next(
        (factor for factor in (4, 2) if factor * count <= 4 and outputs % (32 * factor) == 0), 1
    )
    # Measured: small matrices, and many rows with few inputs, are at least as fast the other way.
    if together * count == 1 or values.size < 1 << 18 or (count > 4 and inputs < 1024):
        return _sums(rows, values)
    # [together, n, together, in]
    columns = jnp.eye(together, dtype=jnp.int8)[:, None, :, None] * rows[:, None, :]
    columns = columns.reshape(together * count, together, inputs)
    joined = values.reshape(outputs // together, together, inputs)
    # dot_general keeps this order of axes. einsum would sort them by name, and so transpose the
    # weights in memory first.
    sums = jax.lax.dot_general(
        joined, columns, (((1, 2), (1, 2)), ((), ())), preferred_element_type=jnp.int32
    )
    # The barrier hides the transposition from XLA, which would swap the two matrices for it.
    return jax.lax.optimization_barrier(sums).reshape(outputs, count).T


def _limbs(x: jax.Array, activations: int) -> tuple[jax.Array, jax.Array]:
    """Convert rows ``x [n, in]`` to integers times a step for each row.

    Returns:
        int8 ``[n, in]`` for 8 bits; ``[2 n, in]`` for 16, first the high limbs (256ths) of all rows
        and then the low ones; and the steps ``[n, 1]``.
    """
    most = 127 if activations == 8 else 127 * 256 + 127
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    steps = jnp.where(largest == 0, 1, largest / most)  # infinities and NaN stay so
    numbers = jnp.round(x / steps).astype(jnp.int32)
    if activations == 8:
        return numbers.astype(jnp.int8), steps
    high = (numbers + 128) >> 8
    return jnp.concatenate([high, numbers - (high << 8)]).astype(jnp.int8), steps
