"""MXFP4: 4-bit floats with one scale for 32 of them, as in gpt-oss (OCP Microscaling Formats 1.0).

A tensor NAME is stored as NAME_blocks, of type U8 and shape ``[experts, out, in / 32, 16]``, and
NAME_scales, of type U8 and shape ``[experts, out, in / 32]``. A byte of the blocks holds two
numbers of 1 bit sign, 2 bits exponent and 1 bit mantissa, the first one in its low half. A weight
is such a number times ``2 ** (scale - 127)``. Scale 255 means NaN. Here NAME is
``[experts, in, out]``, the unquantized tensor; every weight below 2 ** 128 is exact in bfloat16. It
can also stay quantized without rounding: twice such a number is a whole number from -12 to 12, an
int8 in groups of 32 with scales ``2 ** (scale - 128)``.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.models.fields import CheckpointError, show
from specjax.models.quantization.stored import StoredMatrix
from specjax.models.quantization.weights import Form

BLOCK = 32
"""The number of values that share a scale."""
_BYTES = BLOCK // 2
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of the 3-bit numbers; the fourth bit is the sign."""


class Mxfp4Tensor(StoredMatrix):
    """A tensor whose slices are unpacked when they are read.

    Args:
        blocks: the blocks of a checkpoint; it supports slices.
        scales: the scales of a checkpoint; it supports slices.
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales
        self._experts, self._outputs, self._groups, _ = blocks.get_shape()
        self.form = Form("int8", BLOCK if self._groups > 1 else 0)

    def get_shape(self) -> list[int]:
        """Return the shape, ``[experts, in, out]``."""
        return [self._experts, self._groups * BLOCK, self._outputs]

    def get_dtype(self) -> str:
        """Return the type as a header names it."""
        return "BF16"

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        experts, inputs, outputs = (
            range(size)[piece] for size, piece in zip(self.get_shape(), part, strict=True)
        )
        first = inputs.start // BLOCK
        of_blocks = slice(first, -(-inputs.stop // BLOCK))
        within = slice(inputs.start - first * BLOCK, inputs.stop - first * BLOCK, inputs.step)
        weights = np.empty((len(experts), len(inputs), len(outputs)), jnp.bfloat16)
        for slot, expert in enumerate(experts):  # one by one, so that little is unpacked at a time
            place = (slice(expert, expert + 1), part[2], of_blocks)
            rows = unpack(self._blocks[*place, slice(None)][0], self._scales[place][0])
            weights[slot] = rows[:, within].T
        return weights

    def shape_of(self, role: str) -> list[int]:
        """Return the shape of a part."""
        return [self._experts, self._groups, self._outputs, *[BLOCK] * (role == "values")]

    def read(self, role: str, part: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of a part."""
        experts, groups, outputs = part[:3]
        if role == "values":
            blocks = self._blocks[experts, outputs, groups, slice(None)]
            return np.moveaxis(doubled(blocks), 2, 1)[..., part[3]]
        scales = self._scales[experts, outputs, groups]
        powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 128)
        return np.where(scales == 255, np.float32(np.nan), powers).swapaxes(1, 2)


def doubled(blocks: np.ndarray) -> np.ndarray:
    """Return twice the unscaled numbers of ``blocks [..., n]`` uint8, as int8 ``[..., 2 n]``.

    Examples:
        >>> from specjax.models.quantization import mxfp4
        >>> mxfp4.doubled(np.full((1, 16), 0x97, np.uint8))[0, :4].tolist()
        [12, -1, 12, -1]
    """
    flat, pairs = np.ascontiguousarray(blocks).reshape(-1), np.empty(blocks.size, np.uint16)
    for start in range(0, len(flat), _AT_ONCE):  # an index takes eight times its byte
        part = slice(start, start + _AT_ONCE)
        np.take(_doubled_pairs(), flat[part], out=pairs[part], mode="clip")
    return pairs.view(np.int8).reshape(*blocks.shape[:-1], 2 * blocks.shape[-1])


@cache
def _doubled_pairs() -> np.ndarray:
    """Return the two doubled numbers of every byte as one whole number: one look-up for two."""
    byte = np.arange(256)
    pairs = (2 * _numbers()).astype(np.int8)[np.stack([byte & 15, byte >> 4], -1)]
    return pairs.view(np.uint16).reshape(-1)


def _numbers() -> np.ndarray:
    return np.array([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)], np.float32)


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the weights of blocks.

    Args:
        blocks: uint8 ``[..., blocks, 16]``.
        scales: uint8 ``[..., blocks]``.

    Returns:
        bfloat16 ``[..., blocks * 32]``.

    Examples:
        The codes 2 and 4 are the numbers 1 and 2, and scale 128 doubles them:

        >>> from specjax.models.quantization import mxfp4
        >>> weights = mxfp4.unpack(np.full((1, 16), 0x42, np.uint8), np.array([128], np.uint8))
        >>> weights.shape, weights[:4].tolist()
        ((32,), [2.0, 4.0, 2.0, 4.0])
    """
    pairs = _pairs()[scales.astype(np.uint16)[..., None] << 8 | blocks]
    return pairs.view(jnp.bfloat16).reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)


@cache
def _pairs() -> np.ndarray:
    """Return the two weights of every byte under every scale, ``[scale * 256 + byte]``.

    Both weights are the bits of one whole number, so that one look-up returns two weights.
    """
    byte = np.arange(256)
    pairs = _numbers()[np.stack([byte & 15, byte >> 4], -1)]
    with np.errstate(over="ignore"):  # numbers of 2 and more overflow under the largest scale
        weights = np.ldexp(pairs, np.arange(256)[:, None, None] - 127)
    weights[255] = np.nan
    return weights.astype(jnp.bfloat16).view(np.uint32).reshape(-1)


_AT_ONCE = 1 << 18
"""The bytes that are looked up at once."""


def unpacked(tensors: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the tensors of a checkpoint with an `Mxfp4Tensor` for each pair of blocks and scales.

    No weights are read.

    Raises:
        CheckpointError: The scales of a tensor are missing, or have the wrong shape.
    """
    unpacked_tensors = dict(tensors)
    for name, tensor in tensors.items():
        whole, shape = name.removesuffix("_blocks"), tuple(tensor.get_shape())
        if (
            whole == name
            or whole in tensors
            or tensor.get_dtype() != "U8"
            or len(shape) != 4
            or 0 in shape
        ):
            continue
        if shape[-1] != _BYTES:
            raise CheckpointError(
                f"{directory}: {show(name)} has shape {shape}: each block of MXFP4 must have"
                f" {_BYTES} bytes: use the unquantized checkpoint"
            )
        scales = tensors.get(f"{whole}_scales")
        if scales is None:
            raise CheckpointError(
                f"{directory}: {show(name)} is in MXFP4, and its scales, {show(f'{whole}_scales')},"
                " are missing: download the checkpoint again, or use the unquantized one"
            )
        scales_shape = tuple(scales.get_shape())
        if scales_shape != shape[:-1] or scales.get_dtype() != "U8":
            raise CheckpointError(
                f"{directory}: {show(f'{whole}_scales')} is {scales.get_dtype()} of shape"
                f" {scales_shape}: it must be U8 of shape {shape[:-1]}, one for each block of"
                f" {show(name)}: use the unquantized checkpoint"
            )
        del unpacked_tensors[name], unpacked_tensors[f"{whole}_scales"]
        unpacked_tensors[whole] = Mxfp4Tensor(tensor, scales)
    return unpacked_tensors
