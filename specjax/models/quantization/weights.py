"""Quantized matrices, and their computation from floats.

A weight is ``(value - zero) * scale``. The value is a number of 8 or 4 bits. Consecutive inputs of
one output, a *group*, share the scale and the zero point; one group may be all inputs. The layout
is that of qwix's ``QArray`` (google/qwix), except that groups are a separate axis in front: a
product over one group after the other then reads memory sequentially.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike

from specjax.models.params import Param

T = TypeVar("T")
Kind = Literal["int8", "int4", "fp8"]
Numbers = Any
"""An array of numpy or of JAX.

A checkpoint can so be read without going to a device, and GPTQ can run on one.
"""
BLOCK = 128
"""The outputs and inputs of an FP8 block that shares a scale, as in DeepSeek-V3.

See arXiv 2412.19437, section 3.3.
"""

EMBEDDINGS = ("embed_tokens", "embeddings")
"""The last parts of the names of embeddings in checkpoints."""

_TYPES = {"int8": "int8", "int4": "int4", "fp8": "float8_e4m3fn"}
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""The largest magnitude that is used, by kind."""


@struct.dataclass
class QuantizedMatrix:
    """A matrix ``[..., in, out]`` as quantized values with their scales.

    In a declaration its leaves are a `Param` each.

    Attributes:
        values: ``[..., groups, out, size]`` int8, int4 or float8_e4m3fn: the inputs of each group,
            ``groups * size`` in all.
        scales: ``[..., groups, out]`` float32.
        zeros: ``[..., groups, out]`` int8, the zero points; None: 0.
        order: ``[..., in]`` int32, the index of the input at each place, if the inputs of a group
            are not contiguous (GPTQ's "act order"). None: they are.
        bits: 8 or 4. Values of 4 bits may be stored in int8, as on a CPU.
        activations: the number of bits to which an integer product rounds the matrix's inputs: 8,
            or 16, which changes almost nothing.

    Examples:
        >>> from specjax.models.quantization import Form
        >>> from specjax.models.quantization.weights import quantize_matrix, dequantize_matrix
        >>> weights = np.array([[1.0, 0.5], [-2.0, 0.25]], np.float32)
        >>> quantized = quantize_matrix(weights, Form("int8"))
        >>> quantized.shape, quantized.values.tolist()
        ((2, 2), [[[64, -127], [127, 64]]])
        >>> float(jnp.max(jnp.abs(dequantize_matrix(quantized) - weights))) < 2 / 127
        True
    """

    values: Any
    scales: Any
    zeros: Any = None
    order: Any = None
    bits: int = struct.field(pytree_node=False, default=8)
    activations: int = struct.field(pytree_node=False, default=16)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix in floats, ``(..., in, out)``."""
        *lead, groups, outputs, size = self.values.shape
        return (*lead, groups * size, outputs)

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix in floats."""
        return len(self.shape)

    @property
    def form(self) -> "Form":
        """The form in which it is quantized."""
        kind: Kind = "int4" if self.bits == 4 else "int8"
        if jnp.dtype(self.values.dtype) == jnp.float8_e4m3fn:
            kind = "fp8"
        *_, groups, _, size = self.values.shape
        return Form(
            kind,
            0 if groups == 1 else size,
            self.zeros is not None,
            self.order is not None,
            self.activations,
        )


def is_quantized(value: Any) -> bool:
    """Return True for a `QuantizedMatrix`; for ``is_leaf`` of `jax.tree.map`."""
    return isinstance(value, QuantizedMatrix)


def matrices_in(tree: Any) -> list[QuantizedMatrix]:
    """Return the quantized matrices of any pytree of parameters or declarations."""
    return list(filter(is_quantized, jax.tree.leaves(tree, is_leaf=is_quantized)))


@dataclass(frozen=True)
class Form:
    """The format of a quantized matrix.

    Attributes:
        kind: the type of its values.
        group: the number of inputs that share a scale; 0 for all of them.
        has_zeros: whether it has zero points; see `QuantizedMatrix`.
        is_ordered: whether it has an ``order``; see `QuantizedMatrix`.
        activations: the bits of the activations; see `QuantizedMatrix`.

    Examples:
        >>> from specjax.models.quantization import Form
        >>> Form("int4", group=128).bits
        4
    """

    kind: Kind
    group: int = 0
    has_zeros: bool = False
    is_ordered: bool = False
    activations: int = 16

    @property
    def bits(self) -> int:
        """The number of bits of a value."""
        return 4 if self.kind == "int4" else 8

    @property
    def dtype(self) -> np.dtype:
        """The type of the values in memory, except for values of 4 bits on a CPU."""
        return jnp.dtype(_TYPES[self.kind])

    def fitting(self, inputs: int) -> "Form":
        """Return the same form for a matrix with ``inputs`` inputs.

        The group size is halved, down to 16, until it divides the inputs. If none does, there is
        one group.
        """
        size = self.group
        while size and inputs % size:
            size = size // 2 if size > 16 else 0
        return replace(self, group=size)

    def declare(self, param: Param, dtype: DTypeLike | None = None) -> QuantizedMatrix:
        """Return the declarations of the parts of a quantized matrix.

        Args:
            param: the declaration of the matrix in floats, ``(..., in, out)``.
            dtype: the type of the values in memory; None for `dtype`.
        """
        *lead, inputs, outputs = _in_out(param, param.shape)
        *lead_axes, in_axis, out_axis = _in_out(param, param.axes)
        size = self.group or inputs
        groups = inputs // size
        if groups == 1 or in_axis is None:
            units = param.units
        else:
            units = int(np.gcd(param.units or groups, groups))
        group_axis = in_axis if groups > 1 else None

        def part(
            role: str, shape: tuple[int, ...], axes: tuple[str | None, ...], kind: str
        ) -> Param:
            axes, within = (*lead_axes, *axes), param.within
            if within is not None:  # the parameter is a slice of the stored tensor's outputs
                within = replace(within, axis=len(lead) - param.stacked + 1)
            is_rows = param.transposed or param.is_rows  # as it is stored
            name = f"{param.name}:{role}"
            return Param(
                (*lead, *shape), axes, name, dtype=kind, units=units, within=within, is_rows=is_rows
            )

        values = part(
            "values",
            (groups, outputs, size),
            (group_axis, out_axis, in_axis if groups == 1 else None),
            jnp.dtype(self.dtype if dtype is None else dtype).name,
        )
        of_group = ((groups, outputs), (group_axis, out_axis))
        return QuantizedMatrix(
            values=values,
            scales=part("scales", *of_group, "float32"),
            zeros=part("zeros", *of_group, "int8") if self.has_zeros else None,
            order=Param((*lead, inputs), (*lead_axes, None), f"{param.name}:order", dtype="int32")
            if self.is_ordered
            else None,
            bits=self.bits,
            activations=self.activations,
        )


def _in_out(param: Param, of_axes: tuple[T, ...]) -> tuple[T, ...]:
    """Return a tuple with one item for each axis of ``param`` in the order ``(..., in, out)``."""
    return (*of_axes[:-2], of_axes[-1], of_axes[-2]) if param.is_rows else of_axes


def quantize_matrix(weights: np.ndarray, form: Form) -> QuantizedMatrix:
    """Quantize ``weights [..., in, out]`` to a form without zeros and order.

    Each weight becomes the nearest number under the scale of its group, see `scales_of`.
    """
    rows = np.swapaxes(np.asarray(weights, np.float32), -1, -2)
    *lead, outputs, inputs = rows.shape
    size = form.group or inputs
    # [..., groups, out, size]
    grouped = np.moveaxis(rows.reshape(*lead, outputs, inputs // size, size), -2, -3)
    scales = scales_of(grouped, form)
    return QuantizedMatrix(
        rounded(grouped, scales, form), scales, bits=form.bits, activations=form.activations
    )


def scales_of(grouped: Numbers, form: Form) -> Numbers:
    """Return the scales ``[...]`` of groups of weights ``grouped [..., size]``.

    The scale maps the largest weight to the largest value. For 4 bits, which have few values, a
    smaller scale is used if it reduces the error. Infinities and NaN stay so.
    """
    xp = grouped.__array_namespace__()
    largest = xp.abs(grouped).max(axis=-1)
    best, least = _scales(largest, form), xp.full(largest.shape, np.inf, np.float32)
    if form.kind != "int4":
        return best
    for share in np.linspace(0.7, 1.0, 13, dtype=np.float32):
        scales = _scales(largest * share, form)
        with np.errstate(invalid="ignore"):
            # One expression: a name for the difference would keep another copy of the matrix alive.
            lost = xp.square(rounded(grouped, scales, form) * scales[..., None] - grouped).sum(
                axis=-1
            )
        # A comparison with NaN is false, so a group that is not finite keeps its first scale.
        best, least = xp.where(lost < least, scales, best), xp.minimum(lost, least)
    return best


def _scales(largest: Numbers, form: Form) -> Numbers:
    xp = largest.__array_namespace__()
    # A group of zeros has a scale of 1, because a division by 0 would give NaN.
    scales = xp.where(largest == 0, np.float32(1), largest / np.float32(_LARGEST[form.kind]))
    return scales.astype(np.float32)


def rounded(grouped: Numbers, scales: Numbers, form: Form) -> Numbers:
    """Return the values ``[..., size]`` of weights ``grouped [..., size]`` under their scales."""
    xp = grouped.__array_namespace__()
    # An infinity divided by an infinite scale is NaN, which no integer type has. Any number will do
    # there, because its product with the scale is not finite.
    with np.errstate(invalid="ignore"):
        numbers = xp.nan_to_num(grouped / scales[..., None])
    if form.kind == "fp8":  # the type has no infinities: a larger number would become NaN
        return xp.clip(numbers, -448, 448).astype(jnp.float8_e4m3fn)
    return xp.clip(xp.rint(numbers), -_LARGEST[form.kind], _LARGEST[form.kind]).astype(np.int8)


def dequantize_matrix(matrix: QuantizedMatrix, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return the weights of a quantized matrix as floats, ``[..., in, out]``."""
    values = matrix.values.astype(jnp.float32)
    if matrix.zeros is not None:
        values = values - matrix.zeros.astype(jnp.float32)[..., None]
    weights = values * matrix.scales[..., None]
    rows = jnp.moveaxis(weights, -3, -2)  # [..., out, groups, size]
    columns = jnp.swapaxes(rows.reshape(*rows.shape[:-2], -1), -1, -2)
    if matrix.order is not None:
        columns = jnp.take_along_axis(
            columns, jnp.argsort(matrix.order, axis=-1)[..., None], axis=-2
        )
    return columns.astype(dtype)


def rows_of(table: QuantizedMatrix, rows: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the weights ``[..., in]`` of some outputs of ``table [in, out]``: embeddings."""
    flat = rows.reshape(-1)
    zeros = None if table.zeros is None else table.zeros[:, flat]
    selected = replace(
        table, values=table.values[:, flat], scales=table.scales[:, flat], zeros=zeros
    )
    return dequantize_matrix(selected, dtype).T.reshape(*rows.shape, -1)
