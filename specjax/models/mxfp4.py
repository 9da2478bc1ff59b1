"""Weights in MXFP4, 4-bit numbers with a scale for each 32 of them, as gpt-oss has its experts (OCP Microscaling Formats 1.0).

Of a tensor NAME there are NAME_blocks, of type U8 and shape ``[experts, out, in / 32, 16]``, and NAME_scales, of type U8 and
shape ``[experts, out, in / 32]``. A byte of the blocks holds two numbers of 1 bit sign, 2 bits exponent and 1 bit mantissa, the
first one in its low half; a weight is such a number times ``2 ** (scale - 127)``. Scale 255 is not a number, and nor are then
its weights. NAME appears here as ``[experts, in, out]``, which is the unquantised tensor. Every weight below 2 ** 128 is exact
in bfloat16; there are no products in MXFP4 here.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.models.fields import CheckpointError, show

BLOCK = 32
"""Numbers that share a scale."""
_BYTES = BLOCK // 2
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the numbers of 3 bits; the fourth is the sign."""


class Mxfp4Tensor:
    """A tensor that is unpacked as its slices are read.

    Args:
        blocks: of a checkpoint; slices can be taken of it.
        scales: likewise.
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        """The shape, ``[experts, in, out]``."""
        experts, outputs, blocks, _ = self._blocks.get_shape()
        return [experts, blocks * BLOCK, outputs]

    def get_dtype(self) -> str:
        """The type as a header names it."""
        return "BF16"

    def __getitem__(self, part: tuple[slice, slice, slice]) -> np.ndarray:
        experts, inputs, outputs = (range(size)[one] for size, one in zip(self.get_shape(), part, strict=True))
        first = inputs.start // BLOCK
        of_blocks = slice(first, -(-inputs.stop // BLOCK))
        own = slice(inputs.start - first * BLOCK, inputs.stop - first * BLOCK, inputs.step)
        found = np.empty((len(experts), len(inputs), len(outputs)), jnp.bfloat16)
        for slot, expert in enumerate(experts):  # one by one: what is unpacked at a time is small beside the whole
            place = (slice(expert, expert + 1), part[2], of_blocks)
            found[slot] = unpack(self._blocks[*place, slice(None)][0], self._scales[place][0])[:, own].T
        return found


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The weights of blocks.

    Args:
        blocks: uint8 ``[..., blocks, 16]``.
        scales: uint8 ``[..., blocks]``.

    Returns:
        bfloat16 ``[..., blocks * 32]``.

    Examples:
        The numbers 2 and 4 stand for 1 and 2:

        >>> from specjax.models import mxfp4
        >>> weights = mxfp4.unpack(np.full((1, 16), 0x42, np.uint8), np.array([128], np.uint8))
        >>> weights.shape, weights[:4].tolist()
        ((32,), [2.0, 4.0, 2.0, 4.0])
    """
    pairs = _pairs()[scales.astype(np.uint16)[..., None] << 8 | blocks]
    return pairs.view(jnp.bfloat16).reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)


@cache
def _pairs() -> np.ndarray:
    """The two weights of every byte under every scale, ``[scale * 256 + byte]``, both as the bits of one whole number."""
    numbers = np.array([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], np.float32)
    byte = np.arange(256)
    pairs = numbers[np.stack([byte & 15, byte >> 4], -1)]
    with np.errstate(over="ignore"):  # of the largest scale, numbers of 2 and more
        weights = np.ldexp(pairs, np.arange(256)[:, None, None] - 127)
    weights[255] = np.nan
    return weights.astype(jnp.bfloat16).view(np.uint32).reshape(-1)


def unpacked(tensors: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The ``tensors`` of a checkpoint, with an `Mxfp4Tensor` in the place of each pair of blocks and scales. Reads no weights.

    Raises:
        CheckpointError: the scales of a tensor are missing, or not of its shape.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        whole, shape = name.removesuffix("_blocks"), tuple(tensor.get_shape())
        if whole == name or whole in tensors or tensor.get_dtype() != "U8" or len(shape) != 4:
            continue
        if shape[-1] != _BYTES:
            raise CheckpointError(
                f"{directory}: {show(name)} has shape {shape}: each block of MXFP4 must have {_BYTES} bytes: "
                "use the unquantised checkpoint"
            )
        scales = tensors.get(f"{whole}_scales")
        if scales is None:
            raise CheckpointError(
                f"{directory}: {show(name)} is in MXFP4, and its scales, {show(f'{whole}_scales')}, are missing: "
                "download the checkpoint again, or use the unquantised one"
            )
        of_scales = tuple(scales.get_shape())
        if of_scales != shape[:-1] or scales.get_dtype() != "U8":
            raise CheckpointError(
                f"{directory}: {show(f'{whole}_scales')} is {scales.get_dtype()} of shape {of_scales}: it must be "
                f"U8 of shape {shape[:-1]}, one for each block of {show(name)}: use the unquantised checkpoint"
            )
        del found[name], found[f"{whole}_scales"]
        found[whole] = Mxfp4Tensor(tensor, scales)
    return found
