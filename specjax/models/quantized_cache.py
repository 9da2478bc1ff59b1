"""Parts of a cache in 8 bits: what is remembered of a token, as whole numbers and one scale for each head.

A context of many tokens then takes about half the memory that it takes in bfloat16, and a quarter of float32's. Keys and values
are rounded once, by the layer that makes them, before anything reads them. So the tokens of a call are seen just as rounded as
those in the cache, and a drafted token as it will be seen when it is committed: what verification compares is one model.
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
"""How a target remembers tokens: in the type of its activations, or in 8 bits with scales."""

_MOST = 127
_LEAST = 1e-30
"""The largest number of a vector counts as no less than this, so that its scale is none that a device flushes to 0."""


@struct.dataclass
class QuantizedPart:
    """One part of an entry in 8 bits; it stands for ``numbers * scales[..., None]``.

    Attributes:
        numbers: ``[B, heads, S, dim]`` int8, from -127 to 127.
        scales: ``[B, heads, S]`` float32. They have no axis of one number: a TPU would fill that up to 128.
    """

    numbers: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what it stands for."""
        return self.numbers.shape


Part = jax.Array | QuantizedPart
"""What one layer remembers of S tokens, or one part of it: ``[B, heads, S, dim]``."""


def quantize(x: Float[Array, "B heads S dim"]) -> QuantizedPart:
    """``x`` in 8 bits. Each head's vector of a token has a scale, by which its largest number becomes 127 or -127.

    Examples:
        >>> from specjax.models.quantized_cache import dequantize, quantize
        >>> part = quantize(jnp.array([[[[1.0, -0.5, 0.25, 0.1]]]]))
        >>> part.numbers.tolist()
        [[[[127, -64, 32, 13]]]]
        >>> np.asarray(dequantize(part), float).round(3).tolist()
        [[[[1.0, -0.504, 0.252, 0.102]]]]
    """
    wide = x.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), _LEAST) / _MOST
    return QuantizedPart(jnp.round(wide / scales[..., None]).astype(jnp.int8), scales)


def dequantize(part: Part) -> jax.Array:
    """What a part stands for: float32 of one in 8 bits, another as it is."""
    return part.numbers.astype(jnp.float32) * part.scales[..., None] if isinstance(part, QuantizedPart) else part


def quantized_as(part: Part, kept: Part) -> Part:
    """``part`` as ``kept`` is stored: in 8 bits, or in floats of its type."""
    if isinstance(kept, QuantizedPart):
        return part if isinstance(part, QuantizedPart) else quantize(part)
    return dequantize(part).astype(kept.dtype)


def is_part(node: object) -> bool:
    """For functions of trees that take a part as one leaf."""
    return isinstance(node, QuantizedPart)


def operand(part: Part, dtype: DTypeLike) -> jax.Array:
    """The factor of a product that a part is, before `rescaled`: numbers of 8 bits in ``dtype``, which has them all exactly."""
    return part.numbers.astype(dtype) if isinstance(part, QuantizedPart) else part


def rescaled(by_slot: jax.Array, part: Part, axes: Sequence[int]) -> jax.Array:
    """``by_slot``, scores or weights of a part's slots, times their scales, which lack the ``axes``. Of floats: as it is.

    A score is ``q . (numbers * scale)``, which is ``(q . numbers) * scale``, and a sum of weighted values likewise. So a scale
    is multiplied with one number of a slot, and not with all of its ``dim``.
    """
    return by_slot * jnp.expand_dims(part.scales, axes) if isinstance(part, QuantizedPart) else by_slot


def check_cache_type(name: str) -> None:
    """Refuse, with an InputError, what is no `CacheType`."""
    if name not in get_args(CacheType):
        raise InputError(f"cache_dtype={name!r}: must be one of {', '.join(get_args(CacheType))}")
