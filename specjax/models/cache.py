"""The key/value cache: preallocated buffers and a length. Rolling back is changing the length."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Int

from specjax import sharding


@struct.dataclass
class KVCache:
    """Keys and values of every committed token, and scratch space above them.

    Slot ``i`` of a row holds the token at position ``i``. Slots at or above ``length`` hold rejected drafts or nothing:
    nobody may read them before writing them.

    Attributes:
        layers: one ``(keys, values)`` pair a layer, each ``[B, kv_heads, S, head_dim]``: a head's slots lie side by side, as
            attention reads them, so that it needs no transposed copy. A tuple of separate buffers and not one stacked array:
            XLA updates those in place in a donated loop, and copies the stacked one.
        length: ``[B]`` int32, the number of committed slots of each row.
    """

    layers: tuple[tuple[jax.Array, jax.Array], ...]
    length: jax.Array

    @classmethod
    def create(
        cls,
        *,
        layers: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: Any = jnp.float32,
        mesh: Mesh | None = None,
    ) -> "KVCache":
        """An empty cache of ``capacity`` slots a row for ``batch`` rows."""

        def buffer() -> jax.Array:
            empty = jnp.zeros((batch, kv_heads, capacity, head_dim), dtype)
            return sharding.constrain(empty, ("batch", "kv_heads", None, None), {"kv_heads": kv_heads}, mesh)

        return cls(
            layers=tuple((buffer(), buffer()) for _ in range(layers)),
            length=jnp.zeros(batch, jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """Number of slots of a row, S."""
        return self.layers[0][0].shape[2]

    @property
    def committed(self) -> jax.Array:
        """``[B, S]`` bool, the slots that may be read."""
        return jnp.arange(self.capacity)[None] < self.length[:, None]

    def first(self, slots: int) -> "KVCache":
        """The first ``slots`` slots of every row, to read from."""
        if slots == self.capacity:
            return self
        return replace(self, layers=tuple((keys[:, :, :slots], values[:, :, :slots]) for keys, values in self.layers))

    def visible(self, above: jax.Array) -> jax.Array:
        """``[B, T, S]`` bool, the slots that each of T tokens sees: the committed ones, and above them those it is told to.

        Args:
            above: ``[B, T, n]`` bool, of the slots ``length … length+n`` of each row.
        """
        number = jnp.broadcast_to(
            (jnp.arange(self.capacity)[None] - self.length[:, None])[:, None], (*above.shape[:2], self.capacity)
        )
        told = jnp.take_along_axis(above, jnp.clip(number, 0, above.shape[-1] - 1), axis=-1)
        return (number < 0) | (told & (number < above.shape[-1]))

    def write(self, new: Sequence[tuple[jax.Array, jax.Array]], after: jax.Array, offset: Any = 0) -> "KVCache":
        """Put each layer's ``new`` keys and values ``[B, kv_heads, T, head_dim]`` at slots ``length+offset …`` of each row.

        ``length`` stays as it is. Layers beyond those given are left alone. What falls outside the buffer is dropped, never
        clamped onto live slots.

        Args:
            new: by layer.
            after: ``[B, …]`` any array that depends, row by row, on everything that was read from this cache. XLA updates a
                buffer in place only where the write depends on every read of it, and copies it otherwise.
            offset: slots above ``length`` to leave out, a number or a scalar array.
        """
        first = after.reshape(after.shape[0], -1)[:, :1]
        nothing = (jnp.abs(jnp.sign(first)) > 1).astype(jnp.int32)  # 0 for every float, which the compiler does not know
        slots = self.length[:, None] + offset + nothing + jnp.arange(new[0][0].shape[2])[None]
        written = tuple(
            (_set_slots(keys, slots, k), _set_slots(values, slots, v))
            for (keys, values), (k, v) in zip(self.layers, new, strict=False)
        )
        return replace(self, layers=written + self.layers[len(written) :])

    def keep(self, path: Int[Array, "B D"] | None, count: Int[Array, " B"]) -> "KVCache":
        """Commit the first ``count`` nodes of ``path`` and drop everything else above ``length``.

        Args:
            path: ``[B, n]`` numbers of the accepted nodes in order; number ``i`` lies in slot ``length + i``. What stands
                beyond ``count`` does not matter. None says that the path is 0, 1, 2, … (a chain): nothing moves then, and
                this is one addition.
            count: ``[B]`` number of nodes to commit, 0 to leave a row as it is. -1 takes its newest slot back.
        """
        if path is None:
            return replace(self, length=self.length + count)
        step = jnp.arange(path.shape[1])[None]
        source = self.length[:, None] + path
        # Beyond the accepted path the destination is out of range, where a scatter in drop mode writes nothing.
        target = jnp.where(step < count[:, None], self.length[:, None] + step, self.capacity)

        def move(buffer: jax.Array) -> jax.Array:
            return _set_slots(buffer, target, jnp.take_along_axis(buffer, source[:, None, :, None], axis=2))

        return KVCache(
            layers=tuple((move(keys), move(values)) for keys, values in self.layers),
            length=self.length + count,
        )


def _set_slots(buffer: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """``buffer [B, kv_heads, S, head_dim]`` with ``values [B, kv_heads, n, head_dim]`` at each row's ``slots [B, n]``."""

    def one(buffer: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
        return buffer.at[slots].set(values.astype(buffer.dtype), mode="drop")

    # Mapped over rows and heads, so that a mesh which splits them needs no exchange.
    return jax.vmap(jax.vmap(one, in_axes=(0, None, 0)))(buffer, slots, values)
