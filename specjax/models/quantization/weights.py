"""What a quantized matrix is, and how floats become one.

A weight is ``(value - zero) * scale``. The value is a number of 8 or 4 bits. Neighbouring inputs of one output, a *group*,
share the scale and the zero; one group may be all inputs. This is the layout of qwix's ``QArray`` (google/qwix), but that the
groups are an axis of their own, in front: a product over one group after the other then reads memory from end to end.
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
"""An array of numpy or of JAX: as a checkpoint is read nothing need go to a device, and GPTQ runs on one."""
BLOCK = 128
"""Outputs and inputs of a block of FP8 that share a scale, as DeepSeek-V3 has them (arXiv 2412.19437, section 3.3)."""

_TYPES = {"int8": "int8", "int4": "int4", "fp8": "float8_e4m3fn"}
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""By kind, the largest value on either side of 0 that is used."""


@struct.dataclass
class QuantizedMatrix:
    """A matrix ``[..., in, out]`` as quantized values with their scales. In a declaration its leaves are each a `Param`.

    Attributes:
        values: ``[..., groups, out, size]`` int8, int4 or float8_e4m3fn: the inputs of a group, ``groups * size`` in all.
        scales: ``[..., groups, out]`` float32.
        zeros: ``[..., groups, out]`` int8, what a value of weight 0 is; None: 0.
        order: ``[..., in]`` int32, the input that stands at each place: groups may be of inputs that are no neighbours
            (GPTQ's "act order"). None: they are.
        bits: 8, or 4 also where the values are held in int8, as on a CPU.
        activations: to how many bits a product rounds what the matrix is multiplied with, where it multiplies whole numbers:
            8, or 16, which is close to not at all.

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
        """``(..., in, out)``, as the matrix in floats has it."""
        *lead, groups, outputs, size = self.values.shape
        return (*lead, groups * size, outputs)

    @property
    def ndim(self) -> int:
        """Of the matrix in floats."""
        return len(self.shape)

    @property
    def form(self) -> "Form":
        """How it is quantized."""
        kind = "fp8" if jnp.dtype(self.values.dtype) == jnp.float8_e4m3fn else "int4" if self.bits == 4 else "int8"
        *_, groups, _, size = self.values.shape
        return Form(kind, 0 if groups == 1 else size, self.zeros is not None, self.order is not None, self.activations)


def is_quantized(value: Any) -> bool:
    """Whether ``value`` is a `QuantizedMatrix`; for ``is_leaf`` of `jax.tree.map`."""
    return isinstance(value, QuantizedMatrix)


def matrices_in(tree: Any) -> list[QuantizedMatrix]:
    """The quantized matrices of any pytree of parameters, or of their declarations."""
    return list(filter(is_quantized, jax.tree.leaves(tree, is_leaf=is_quantized)))


@dataclass(frozen=True)
class Form:
    """How a matrix is quantized.

    Attributes:
        kind: of its values.
        group: inputs that share a scale; 0: all of them.
        has_zeros: see `QuantizedMatrix`.
        is_ordered: see ``order`` of `QuantizedMatrix`.
        activations: see `QuantizedMatrix`.

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
        """Of a value."""
        return 4 if self.kind == "int4" else 8

    @property
    def dtype(self) -> np.dtype:
        """Of the values in memory, but for those of 4 bits on a CPU."""
        return jnp.dtype(_TYPES[self.kind])

    def fitting(self, inputs: int) -> "Form":
        """The same form for a matrix of so many ``inputs``: with its own group, or half of that and so on down to 16, if one of
        them divides the inputs; otherwise with one group."""
        size = self.group
        while size and inputs % size:
            size = size // 2 if size > 16 else 0
        return replace(self, group=size)

    def declare(self, param: Param, dtype: DTypeLike | None = None) -> QuantizedMatrix:
        """The declarations of the parts of a quantized matrix that is declared as one of floats.

        Args:
            param: the matrix, ``(..., in, out)``.
            dtype: of the values in memory; None: `dtype`.
        """
        *lead, inputs, outputs = _in_out(param, param.shape)
        *lead_axes, in_axis, out_axis = _in_out(param, param.axes)
        size = self.group or inputs
        groups = inputs // size
        units = param.units if groups == 1 or in_axis is None else int(np.gcd(param.units or groups, groups))
        of_groups = in_axis if groups > 1 else None

        def part(role: str, shape: tuple[int, ...], axes: tuple[str | None, ...], kind: str) -> Param:
            axes, within = (*lead_axes, *axes), param.within
            if within is not None:  # it is a part of what the stored tensor gives
                within = replace(within, axis=len(lead) - param.stacked + 1)
            is_rows = param.transposed or param.is_rows  # as it is stored
            name = f"{param.name}:{role}"
            return Param((*lead, *shape), axes, name, dtype=kind, units=units, within=within, is_rows=is_rows)

        values = part(
            "values",
            (groups, outputs, size),
            (of_groups, out_axis, in_axis if groups == 1 else None),
            jnp.dtype(self.dtype if dtype is None else dtype).name,
        )
        of_group = ((groups, outputs), (of_groups, out_axis))
        return QuantizedMatrix(
            values=values,
            scales=part("scales", *of_group, "float32"),
            zeros=part("zeros", *of_group, "int8") if self.has_zeros else None,
            order=Param((*lead, inputs), (*lead_axes, None), f"{param.name}:order", dtype="int32") if self.is_ordered else None,
            bits=self.bits,
            activations=self.activations,
        )


def _in_out(param: Param, of_axes: tuple[T, ...]) -> tuple[T, ...]:
    """What is said of each axis of ``param``, in the order ``(..., in, out)``."""
    return (*of_axes[:-2], of_axes[-1], of_axes[-2]) if param.is_rows else of_axes


def quantize_matrix(weights: np.ndarray, form: Form) -> QuantizedMatrix:
    """The matrix ``weights [..., in, out]`` in a ``form`` without zeros and order: each weight is the nearest number under the
    scale of its group, see `scales_of`."""
    rows = np.swapaxes(np.asarray(weights, np.float32), -1, -2)
    *lead, outputs, inputs = rows.shape
    size = form.group or inputs
    grouped = np.moveaxis(rows.reshape(*lead, outputs, inputs // size, size), -2, -3)  # [..., groups, out, size]
    scales = scales_of(grouped, form)
    return QuantizedMatrix(rounded(grouped, scales, form), scales, bits=form.bits, activations=form.activations)


def scales_of(grouped: Numbers, form: Form) -> Numbers:
    """``[...]`` the scales of groups of weights ``grouped [..., size]``: each is that of the largest weight; of 4 bits, which
    are few, a smaller one where that changes the weights less. What is not finite stays so."""
    xp = grouped.__array_namespace__()
    largest = xp.abs(grouped).max(axis=-1)
    best, least = _scales(largest, form), xp.full(largest.shape, np.inf, np.float32)
    if form.kind != "int4":
        return best
    for share in np.linspace(0.7, 1.0, 13, dtype=np.float32):
        scales = _scales(largest * share, form)
        with np.errstate(invalid="ignore"):
            lost = xp.square(rounded(grouped, scales, form) * scales[..., None] - grouped).sum(axis=-1)
        best, least = xp.where(lost < least, scales, best), xp.minimum(lost, least)
    return best


def _scales(largest: Numbers, form: Form) -> Numbers:
    xp = largest.__array_namespace__()
    return xp.where(largest == 0, np.float32(1), largest / np.float32(_LARGEST[form.kind])).astype(np.float32)


def rounded(grouped: Numbers, scales: Numbers, form: Form) -> Numbers:
    """``[..., size]`` the values of weights ``grouped [..., size]`` under their scales."""
    xp = grouped.__array_namespace__()
    with np.errstate(invalid="ignore"):
        numbers = xp.nan_to_num(grouped / scales[..., None])
    if form.kind == "fp8":
        return xp.clip(numbers, -448, 448).astype(jnp.float8_e4m3fn)
    return xp.clip(xp.rint(numbers), -_LARGEST[form.kind], _LARGEST[form.kind]).astype(np.int8)


def dequantize_matrix(matrix: QuantizedMatrix, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """``[..., in, out]`` the weights of a quantized ``matrix`` as floats."""
    values = matrix.values.astype(jnp.float32)
    if matrix.zeros is not None:
        values = values - matrix.zeros.astype(jnp.float32)[..., None]
    weights = values * matrix.scales[..., None]
    rows = jnp.moveaxis(weights, -3, -2)  # [..., out, groups, size]
    columns = jnp.swapaxes(rows.reshape(*rows.shape[:-2], -1), -1, -2)
    if matrix.order is not None:
        columns = jnp.take_along_axis(columns, jnp.argsort(matrix.order, axis=-1)[..., None], axis=-2)
    return columns.astype(dtype)


def rows_of(table: QuantizedMatrix, rows: jax.Array, dtype: DTypeLike) -> jax.Array:
    """``[..., in]`` the weights of the outputs ``rows`` of a quantized ``table [in, out]``: of an embedding those of tokens."""
    flat = rows.reshape(-1)
    zeros = None if table.zeros is None else table.zeros[:, flat]
    found = replace(table, values=table.values[:, flat], scales=table.scales[:, flat], zeros=zeros)
    return dequantize_matrix(found, dtype).T.reshape(*rows.shape, -1)
