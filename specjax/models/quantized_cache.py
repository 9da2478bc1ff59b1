"""The 8-bit cache: int8 numbers with one scale for each head of a token.

A long context takes about half the memory of a bfloat16 cache, and a quarter of a float32 one. Keys
and values are rounded once, by the layer that computes them, before anything reads them. So the
tokens of a call are read exactly as those in the cache are, and a drafted token as it will be read
after it is committed: drafting and verification see one model.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from specjax.errors import InputError

CacheType = Literal["float", "int8"]
"""The format of a target's cache: the type of its activations, or int8 with scales."""

_MOST = 127
_LEAST = 1e-30
"""The lower bound of a vector's largest number: a device flushes smaller scales to 0."""


@struct.dataclass
class QuantizedPart:
    """One part of an entry in 8 bits; its value is ``numbers * scales[..., None]``.

    Attributes:
        numbers: ``[B, heads, S, dim]`` int8, from -127 to 127.
        scales: ``[B, heads, S]`` float32. They have no trailing axis of size 1: a TPU would pad
            that to 128.
    """

    numbers: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part in floats."""
        return self.numbers.shape


Part = jax.Array | QuantizedPart
"""One part of the entries of S tokens: ``[B, heads, S, dim]``, in floats or in 8 bits."""


def quantize(x: Float[Array, "B heads S dim"]) -> QuantizedPart:
    """Quantize ``x`` to 8 bits.

    Each head's vector of a token has one scale, which maps its largest number to 127 or -127.

    Examples:
        >>> from specjax.models.quantized_cache import dequantize, quantize
        >>> part = quantize(jnp.array([[[[1.0, -0.5, 0.25, 0.1]]]]))
        >>> part.numbers.tolist()
        [[[[127, -64, 32, 13]]]]
        >>> np.asarray(dequantize(part), float).round(3).tolist()
        [[[[1.0, -0.504, 0.252, 0.102]]]]
    """
    # The scale is computed in float32, since bfloat16 would round it before the numbers are.
    wide = x.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), _LEAST) / _MOST
    return QuantizedPart(jnp.round(wide / scales[..., None]).astype(jnp.int8), scales)


def dequantize(part: Part) -> jax.Array:
    """Return a part in floats: a quantized one in float32, any other as it is."""
    if isinstance(part, QuantizedPart):
        return part.numbers.astype(jnp.float32) * part.scales[..., None]
    return part


def quantized_as(part: Part, stored: Part) -> Part:
    """Convert ``part`` to the format of ``stored``: 8 bits, or floats of its type."""
    if isinstance(stored, QuantizedPart):
        return part if isinstance(part, QuantizedPart) else quantize(part)
    return dequantize(part).astype(stored.dtype)


def is_part(node: object) -> bool:
    """Return True for a part in 8 bits; for ``is_leaf`` of `jax.tree.map`."""
    return isinstance(node, QuantizedPart)


def operand(part: Part, dtype: DTypeLike) -> jax.Array:
    """Return a part as the factor of a matrix product, before `rescaled`.

    Numbers of 8 bits are converted to ``dtype``, which represents all of them exactly.
    """
    return part.numbers.astype(dtype) if isinstance(part, QuantizedPart) else part


def rescaled(by_slot: jax.Array, part: Part, axes: Sequence[int]) -> jax.Array:
    """Multiply scores or weights of slots with the scales of a part; floats have none.

    A score is ``q . (numbers * scale)``, which equals ``(q . numbers) * scale``, and a sum of
    weighted values likewise. So a scale is multiplied with one number of a slot, not with all of
    its ``dim``. ``axes`` are the axes of ``by_slot`` that the scales lack.
    """
    return (
        by_slot * jnp.expand_dims(part.scales, axes) if isinstance(part, QuantizedPart) else by_slot
    )


def check_cache_type(name: str) -> None:
    """Refuse, with an InputError, a name that is not a `CacheType`."""
    if name not in get_args(CacheType):
        raise InputError(f"cache_dtype={name!r}: must be one of {', '.join(get_args(CacheType))}")
