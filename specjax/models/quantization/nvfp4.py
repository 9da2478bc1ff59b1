"""NVFP4: 4-bit floats with a scale for 16 of them, and one for the whole matrix.

ModelOpt and compressed-tensors write this format of NVIDIA's. A number has 1 bit sign, 2 bits
exponent and 1 bit mantissa, as in `mxfp4`; a byte holds two, the first one in its low half. The
scale of 16 neighbouring inputs is FP8 (e4m3), and that of the matrix float32. ModelOpt multiplies
by the second scale, and compressed-tensors divides by it. Twice a number is a whole number from -12
to 12, so that a matrix becomes an int8 matrix in groups of 16. Its weights have the same bits in
float32 as in both libraries, as long as no scale is below the normal numbers of float32; but zeros
have no sign.

The experts of a layer may be one tensor, ``[experts, in, out]``: so ModelOpt writes those of Llama
4 and gpt-oss.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.models.fields import CheckpointError, show
from specjax.models.quantization.mxfp4 import doubled
from specjax.models.quantization.stored import OneMatrix, StoredMatrix
from specjax.models.quantization.weights import Form

BLOCK = 16
"""The number of inputs that share a scale."""
_LARGEST = 12
"""Twice the largest number."""


class Scales:
    """The scales of a matrix, which are checked when they are read.

    Args:
        stored: the tensor; it supports slices.
        name: its name, for errors.
        place: the file that it is in, for errors.
    """

    def __init__(self, stored: Any, name: str, place: Any) -> None:
        self._stored, self._name, self._place = stored, name, place

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._stored.get_shape())

    def whole(self) -> np.ndarray:
        """Return all scales, float32."""
        return self[(slice(None),) * len(self.get_shape())]

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        scales = self.read(part)
        if not (scales > 0).all():
            self.refuse(scales)
        return scales

    def read(self, part: tuple[slice, ...]) -> np.ndarray:
        """Return a slice that is finite and has no negative numbers, but may have zeros."""
        scales = np.asarray(self._stored[part]).astype(np.float32)
        if not (np.isfinite(scales) & (scales >= 0)).all():
            self.refuse(scales)
        return scales

    def refuse(self, scales: np.ndarray) -> None:
        """Raise a `CheckpointError` about one of ``scales`` that is not above 0.

        One of 0 is named only if there is no worse one: a 0 may be permitted.
        """
        wrong = scales[~(np.isfinite(scales) & (scales > 0))]
        worse = wrong[wrong != 0]
        first = (worse if worse.size else wrong)[0]
        raise CheckpointError(
            f"{self._place}: {show(self._name)} has a scale of {first}: scales must be finite and"
            " above 0: download the checkpoint again"
        )

    def combined(self, scales: np.ndarray, factor: Any, divides: bool = False) -> np.ndarray:
        """Return the scales of doubled numbers: blocks' ``scales`` with that of the matrix.

        Args:
            scales: some of these scales.
            factor: the scale of the matrix; an array if experts have scales of their own.
            divides: whether ``factor`` is to be divided by.

        Raises:
            CheckpointError: float32 cannot hold the result.
        """
        with np.errstate(over="ignore", under="ignore"):
            result = (scales / factor if divides else scales * factor) * np.float32(0.5)
        wrong = ~np.isfinite(result) | ((result == 0) & (scales != 0))
        if wrong.any():
            raise CheckpointError(
                f"{self._place}: {show(self._name)} has a scale of {scales[wrong][0]}, which the"
                f" scale of the whole matrix turns into {result[wrong][0]}: scales must be finite"
                " and above 0: download the checkpoint again"
            )
        return result


def _block_scales(
    scales: Scales, part: tuple[slice, ...], numbers: Callable[[], np.ndarray], axis: int
) -> np.ndarray:
    """Return a slice of the scales of blocks.

    Where a block was too small for the range of FP8, older versions of ModelOpt wrote a scale of 0,
    and divided by it: all its numbers are the largest one, of either sign. Such a block is zeros.
    A block whose numbers are all 0 may have that scale too. All other scales of 0 are damage, and
    refused.

    Args:
        scales: the scales of all blocks.
        part: the slice.
        numbers: returns the doubled numbers of that slice's blocks; called if there are zeros.
        axis: the axis of the inputs.
    """
    factors = scales.read(part)
    if not (is_zero := factors == 0).any():
        return factors
    sizes = np.abs(numbers())
    shape = (*sizes.shape[:axis], sizes.shape[axis] // BLOCK, BLOCK, *sizes.shape[axis + 1 :])
    blocks = np.moveaxis(sizes.reshape(shape), axis + 1, -1)[is_zero]
    is_permitted = (blocks == _LARGEST).all(-1) | (blocks == 0).all(-1)
    if not is_permitted.all():
        scales.refuse(factors[is_zero][~is_permitted])
    return factors


def _bytes(size: int, inputs: slice) -> tuple[slice, slice]:
    """Return the bytes that hold some of ``size`` inputs, and where the inputs are in them."""
    indices = range(size)[inputs]
    first = indices.start // 2
    stop = max(indices.stop, indices.start)
    within = slice(indices.start - 2 * first, stop - 2 * first, indices.step)
    return slice(first, -(-stop // 2)), within


class Nvfp4Matrix(OneMatrix):
    """A matrix ``[out, in]`` in NVFP4.

    Args:
        packed: uint8 ``[out, in / 2]``.
        scales: the scales ``[out, in / 16]``, FP8.
        factor: the scale of the matrix.
        divides: whether ``factor`` is to be divided by, as in compressed-tensors.

    Examples:
        The code 2 is the number 1, and code 4 the number 2. Scales 2 and 0.5 cancel each other:

        >>> import jax.numpy as jnp
        >>> from specjax.models.quantization.nvfp4 import Nvfp4Matrix, Scales
        >>> class InMemory(np.ndarray):
        ...     def get_shape(self):
        ...         return list(self.shape)
        >>> packed = np.full((1, 8), 0x42, np.uint8).view(InMemory)
        >>> factors = np.full((1, 1), 2, jnp.float8_e4m3fn).view(InMemory)
        >>> matrix = Nvfp4Matrix(packed, Scales(factors, "q_proj.weight_scale", "a file"), 0.5)
        >>> matrix[:, 0:4].tolist(), matrix.form.kind
        ([[1.0, 2.0, 1.0, 2.0]], 'int8')
    """

    layout = "NVFP4"

    def __init__(self, packed: Any, scales: Scales, factor: float, divides: bool = False) -> None:
        outputs, size = packed.get_shape()
        super().__init__(Form("int8", BLOCK if 2 * size > BLOCK else 0), (outputs, 2 * size))
        self._stored, self._scales = packed, scales
        self._factor, self._divides = np.float32(factor), divides

    def numbers(self, outputs: slice, inputs: slice) -> np.ndarray:
        in_bytes, within = _bytes(self.shape[1], inputs)
        return doubled(self._stored[outputs, in_bytes])[:, within]

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        outputs, inputs = part
        if inputs.indices(self.shape[1]) != (0, self.shape[1], 1):
            return super().__getitem__(part)
        weights = self.numbers(outputs, inputs).astype(np.float32)
        blocks = weights.reshape(len(weights), self.groups, self.size)
        blocks *= self.scales(outputs)[..., None]  # broadcast: it takes an eighth of the time
        return weights

    def scales(self, outputs: slice) -> np.ndarray:
        factors = _block_scales(
            self._scales,
            (outputs, slice(None)),
            lambda: self.numbers(outputs, slice(None)),
            axis=1,
        )
        return self._scales.combined(factors, self._factor, self._divides)


class Nvfp4Experts(StoredMatrix):
    """The matrices of all experts in NVFP4, one tensor ``[experts, in, out]``.

    Args:
        packed: uint8 ``[experts, in / 2, out]``.
        scales: the scales ``[experts, in / 16, out]``, FP8.
        factors: the scale of each expert, ``[experts]``, or one for all, ``[1]``.
    """

    layout = "NVFP4"

    def __init__(self, packed: Any, scales: Scales, factors: np.ndarray) -> None:
        self._stored, self._scales = packed, scales
        experts, size, outputs = packed.get_shape()
        self._shape = [experts, 2 * size, outputs]
        self._groups = 2 * size // BLOCK
        self._factors = np.broadcast_to(factors, (experts,))
        self.form = Form("int8", BLOCK if self._groups > 1 else 0)

    def get_shape(self) -> list[int]:
        """Return the shape, ``[experts, in, out]``."""
        return list(self._shape)

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        experts, inputs, outputs = part
        weights = np.empty(
            [len(range(size)[piece]) for size, piece in zip(self._shape, part, strict=True)],
            np.float32,
        )
        groups = np.arange(self._shape[1])[inputs] // BLOCK
        for slot, expert in enumerate(range(self._shape[0])[experts]):  # little memory at a time
            alone = slice(expert, expert + 1)
            factors = self._scales_of(alone, outputs)[0]
            weights[slot] = self._numbers(alone, inputs, outputs)[0]
            weights[slot] *= factors[groups]
        return weights

    def shape_of(self, role: str) -> list[int]:
        """Return the shape of a part."""
        experts, _, outputs = self._shape
        return [experts, self._groups, outputs, *[BLOCK] * (role == "values")]

    def read(self, role: str, part: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of a part."""
        experts, groups, outputs = part[:3]
        if role == "scales":
            return self._scales_of(experts, outputs)[:, groups]
        first, last, _ = groups.indices(self._groups)
        last = max(first, last)
        numbers = self._numbers(experts, slice(first * BLOCK, last * BLOCK), outputs)
        blocks = numbers.reshape(len(numbers), last - first, BLOCK, numbers.shape[2])
        return np.moveaxis(blocks, 2, 3)[..., part[3]]

    def _numbers(self, experts: slice, inputs: slice, outputs: slice) -> np.ndarray:
        """Return twice the numbers, int8 ``[experts, inputs, outputs]``."""
        in_bytes, within = _bytes(self._shape[1], inputs)
        stored = self._stored[experts, in_bytes, outputs]
        by_input = doubled(np.ascontiguousarray(stored.swapaxes(1, 2)))
        return by_input.swapaxes(1, 2)[:, within]

    def _scales_of(self, experts: slice, outputs: slice) -> np.ndarray:
        """Return the scales, float32 ``[experts, groups, outputs]``."""
        factors = _block_scales(
            self._scales,
            (experts, slice(None), outputs),
            lambda: self._numbers(experts, slice(None), outputs),
            axis=1,
        )
        return self._scales.combined(factors, self._factors[experts, None, None])
