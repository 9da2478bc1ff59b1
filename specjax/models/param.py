"""The declaration of one parameter: shape, logical axes, initial value and Hugging Face name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from specjax import sharding

Params = dict[str, Any]

Init = Literal["normal", "ones", "zeros", "log_rates"]
"""The initial value of a new model's parameter.

``log_rates`` are logarithms of uniform numbers from 0 to 16 (Mamba-2's initialisation).
"""


@dataclass(frozen=True)
class Within:
    """The slice of a stored tensor that a parameter occupies, along one axis.

    It is every ``step``-th index from ``start`` on, as many as the parameter's size along that
    axis.

    Attributes:
        axis: the axis of the stored tensor; of a stacked parameter, the axis of one of its tensors,
            without the stack.
        size: the size of that axis in the stored tensor.
        start: the first index.
        step: the distance between indices.

    Examples:
        Queries in a fused tensor, and the first of two interleaved projections:

        >>> from specjax.models.param import Param, Within
        >>> name = "self_attn.qkv_proj.weight"
        >>> within = Within(axis=0, size=8)
        >>> Param((6, 4), (None, "heads"), name, transposed=True, within=within).stored_shape
        (8, 6)
        >>> within = Within(axis=2, size=6, step=2)
        >>> gate = Param((2, 6, 3), ("experts", None, None), "experts.gate_up_proj", within=within)
        >>> gate.stored_part(np.s_[1:2, :, 1:3])
        (slice(1, 2, 1), slice(0, 6, 1), slice(2, 5, 2))
    """

    axis: int
    size: int
    start: int = 0
    step: int = 1


@dataclass(frozen=True)
class Param:
    """The declaration of one parameter.

    Attributes:
        shape: the shape in use.
        axes: the logical axes (see `specjax.sharding`).
        name: the name in a Hugging Face checkpoint. With ``{}`` there is one tensor for each index
            of the first axis, and its name has the index there: the experts of a layer, which are
            published one by one and used as one array.
        init: the initial value of a new model.
        stddev: the standard deviation of a normal ``init``.
        transposed: whether the checkpoint swaps the last two axes.
        dtype: the type of this parameter, if it is fixed: an index table is "int32". None: the
            model's.
        stored_dtype: the type in the checkpoint, if it differs from ``dtype``.
        units: the number of indivisible units of its sharded axis, if it is specific to this
            parameter: layers may differ in heads. None: as in other parameters.
        within: the slice of the tensor of that name that this parameter is, if several share one.
            None: all of it.
        unit_axes: the number of axes of size 1 that it has in front in the checkpoint.
        is_product: whether it is a matrix that is only used in products of
            `specjax.models.primitives`, so that it may be quantized (see
            `specjax.models.quantization`).
        is_rows: whether such a matrix is ``(out, in)`` and its rows are looked up too: an
            embedding.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    name: str
    init: Init = "normal"
    stddev: float = 0.02
    transposed: bool = False
    dtype: str | None = None
    stored_dtype: str | None = None
    units: int | None = None
    within: Within | None = None
    unit_axes: int = 0
    is_product: bool = False
    is_rows: bool = False

    def __post_init__(self) -> None:
        within = self.within
        if within is not None:
            assert 0 <= within.axis < len(self._turned_shape), (
                f"{self.name}: there is no axis {within.axis}"
            )
            assert within.start >= 0 and within.step >= 1, (
                f"{self.name}: {within} must ascend from 0"
            )
            assert self._places(within).stop - within.step < within.size, (
                f"{self.name}: {within} is too short for {self.shape}"
            )

    @property
    def stacked(self) -> bool:
        """True if it is several tensors in the checkpoint."""
        return "{}" in self.name

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of its tensors in the checkpoint, in the order of the first axis."""
        if self.stacked:
            return tuple(self.name.replace("{}", str(i)) for i in range(self.shape[0]))
        return (self.name,)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors in the checkpoint, whole even if it is only a slice."""
        shape = list(self._turned_shape)
        if self.within is not None:
            shape[self.within.axis] = self.within.size
        return tuple(shape)

    @property
    def _turned_shape(self) -> tuple[int, ...]:
        """The shape in use, without the axis of a stack, with the checkpoint's axes."""
        return self._turned(self.shape[1:] if self.stacked else self.shape, (1,) * self.unit_axes)

    def _turned(self, axes: tuple[Any, ...], units: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*units, *((*axes[:-2], *axes[:-3:-1]) if self.transposed else axes))

    def _places(self, within: Within) -> range:
        """Return the indices of the stored axis that this parameter occupies."""
        return range(
            within.start, within.start + within.step * self._turned_shape[within.axis], within.step
        )

    def stored_part(self, part: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return where a part of this parameter is in its tensor in the checkpoint.

        Args:
            part: a slice of each axis in use, without the first axis if it is stacked.
        """
        places = [range(size) for size in self._turned_shape]
        units = (slice(None),) * self.unit_axes
        if self.within is not None:
            places[self.within.axis] = self._places(self.within)
        ranges = [
            indices[piece] for indices, piece in zip(places, self._turned(part, units), strict=True)
        ]
        return tuple(
            slice(indices.start, indices[-1] + 1 if indices else indices.start, indices.step)
            for indices in ranges
        )

    def place(self, mesh: Mesh, units: Mapping[str, int]) -> NamedSharding:
        """Return the sharding of this parameter on ``mesh``.

        ``units`` are as in `sharding.partition`; this parameter's own take precedence.
        """
        if self.units is None:
            own_units = {}
        else:
            own_units = {axis: self.units for axis in self.axes if axis is not None}
        return sharding.named(mesh, self.axes, {**units, **own_units})

    def initialise(self, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return a random value in ``dtype``, or in the parameter's own; consumes ``key``."""
        dtype = self.dtype or dtype
        if self.init == "normal":
            return (self.stddev * jax.random.normal(key, self.shape, jnp.float32)).astype(dtype)
        if self.init == "log_rates":
            rates = jax.random.uniform(key, self.shape, jnp.float32, 0.01, 16.0)
            return jnp.log(rates).astype(dtype)
        return jnp.full(self.shape, 1.0 if self.init == "ones" else 0.0, dtype)


def matrix(
    name: str,
    inputs: tuple[int, str | None],
    outputs: tuple[int, str | None],
    stddev: float = 0.02,
    units: int | None = None,
    is_product: bool = True,
) -> Param:
    """Declare the weight ``(in, out)`` of a linear layer, from size and logical axis of each side.

    ``units`` and ``is_product`` are as in `Param`.
    """
    shape, axes = (inputs[0], outputs[0]), (inputs[1], outputs[1])
    return Param(
        shape,
        axes,
        f"{name}.weight",
        stddev=stddev,
        transposed=True,
        units=units,
        is_product=is_product,
    )


def norm(name: str, size: int, offset: float = 0.0) -> Param:
    """Declare the weight ``[size]`` of an RMSNorm, to which ``offset`` is added: the sum is 1."""
    return Param((size,), (None,), f"{name}.weight", "zeros" if offset else "ones")
