"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) and their published scalings.

Angles are computed from positions. There is no table, so there is no maximum position.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.models.config import Rope
from specjax.shape_checks import shape_checked


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Return the radians per position of each rotated pair, and a factor of cos and sin.

    The factor is 1 except for yarn.

    Returns:
        ``([n / 2] float32, attention factor)``; n is how many of a head's numbers are rotated.
    """
    if rope.kind == "none":
        return np.zeros(head_dim // 2, np.float32), 1.0
    if rope.kind == "proportional":
        return _proportional(rope, head_dim), 1.0
    head_dim = int(head_dim * rope.turned)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    base = (1.0 / rope.theta**exponents).astype(np.float32)
    if rope.kind == "default":
        return base, 1.0
    if rope.kind == "linear":
        return base / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    return _yarn(rope, base, head_dim), _yarn_attention_factor(rope)


def _proportional(rope: Rope, head_dim: int) -> np.ndarray:
    """Return Gemma 4's frequencies: those of a whole head, with 0 beyond the first share."""
    turned = 2 * int(rope.turned * head_dim // 2)
    frequencies = (
        1.0 / rope.theta ** (np.arange(0, turned, 2, dtype=np.float32) / head_dim) / rope.factor
    )
    return np.pad(frequencies, (0, (head_dim - turned) // 2)).astype(np.float32)


def _llama3(rope: Rope, base: np.ndarray) -> np.ndarray:
    """Return Llama 3.1's frequencies.

    Long wavelengths are stretched by ``factor``, short ones stay, and those in between are blended.
    """
    assert rope.original_max_positions is not None
    # Full turns within the original context.
    turns = rope.original_max_positions * base / (2 * np.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1 - smooth) * base / rope.factor + smooth * base).astype(np.float32)


def _yarn(rope: Rope, base: np.ndarray, head_dim: int) -> np.ndarray:
    """Return YaRN's frequencies, interpolated by parts (Peng et al. 2023, arXiv 2309.00071)."""

    def dimension(turns: float) -> float:
        assert rope.original_max_positions is not None
        return (
            head_dim
            * math.log(rope.original_max_positions / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    # If clipping leaves low above high, the ramp falls. This is odd, but transformers does the
    # same.
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return (base / rope.factor * ramp + base * (1 - ramp)).astype(np.float32)


def _yarn_attention_factor(rope: Rope) -> float:
    """Return YaRN's temperature of the attention logits, as a factor of cos and sin."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


class Rotations(NamedTuple):
    """The rotations of heads at some positions.

    Attributes:
        cos: ``[B, T, 1, half]`` the cosines of the angles.
        sin: ``[B, T, 1, half]`` the sines of the angles.
        queries: ``[B, T, 1, 1]`` a further factor of queries, but not keys; None for none.
    """

    cos: jax.Array
    sin: jax.Array
    queries: jax.Array | None = None

    def turn_queries(self, x: jax.Array) -> jax.Array:
        """Return queries ``[B, T, heads, d]``, rotated and scaled."""
        turned = rotate(x, self.cos, self.sin)
        return turned if self.queries is None else turned * self.queries.astype(x.dtype)

    def turn_keys(self, x: jax.Array) -> jax.Array:
        """Return keys ``[B, T, heads, d]``, rotated."""
        return rotate(x, self.cos, self.sin)


@shape_checked
def rotations(rope: Rope, head_dim: int, positions: Int[Array, "B T"]) -> Rotations:
    """Return the rotations at ``positions``, computed once a call and shared by layers."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    places = positions[..., None, None].astype(jnp.float32)
    angles = places * jnp.asarray(frequencies)
    grown = None
    if rope.query_growth and rope.original_max_positions is not None:
        steps = jnp.floor((places + rope.growth_offset) / rope.original_max_positions)
        grown = 1.0 + rope.query_growth * jnp.log1p(steps)
    return Rotations(jnp.cos(angles) * factor, jnp.sin(angles) * factor, grown)


def separate_pairs(x: jax.Array, turned: int) -> jax.Array:
    """Return ``x [..., d]`` with the pairs of its first ``turned`` numbers as halves of these.

    A pair ``(x_0, x_1)`` of neighbours is then one as `rotate` expects it. In queries and keys
    alike this changes no score.
    """
    pairs = x[..., :turned]
    return jnp.concatenate([pairs[..., 0::2], pairs[..., 1::2], x[..., turned:]], axis=-1)


@shape_checked
def rotate(
    x: Float[Array, "B T heads d"],
    cos: Float[Array, "#B T 1 half"],
    sin: Float[Array, "#B T 1 half"],
) -> Float[Array, "B T heads d"]:
    """Rotate each head's pairs ``(x_i, x_{i + n/2})``, Hugging Face's pairing, in float32.

    The result has ``x``'s dtype. n is twice the number of angles; numbers beyond the first n stay
    as they are.
    """
    turned = 2 * cos.shape[-1]
    if turned < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :turned], cos, sin), x[..., turned:]], axis=-1)
    # A TPU takes a microsecond for every operation, and splitting and joining halves are two of
    # them, in every layer.
    return jax.lax.platform_dependent(x, cos, sin, tpu=_rotate_by_product, default=_rotate_halves)


def _rotate_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _rotate_by_product(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Return the same bits as `_rotate_halves`, by a matrix product that swaps the halves.

    It is exact: each of its sums has only one term that is not zero.
    """
    half = x.shape[-1] // 2
    identity, zeros = jnp.eye(half, dtype=x.dtype), jnp.zeros((half, half), x.dtype)
    # (left, right) becomes (-right, left)
    quarter_turn = jnp.block([[zeros, identity], [-identity, zeros]])
    # At its default precision a TPU would round float32 to bfloat16 first.
    turned = jnp.matmul(x, quarter_turn, precision="highest", preferred_element_type=jnp.float32)
    cos, sin = (jnp.concatenate([part, part], axis=-1) for part in (cos, sin))
    return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)
