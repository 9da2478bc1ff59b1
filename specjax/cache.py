"""The key/value cache: preallocated buffers and a length. Rolling back is changing the length."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from specjax import sharding
from specjax.typed import typed


@struct.dataclass
class KVCache:
    """Keys and values of every committed token, and scratch space above them.

    Slot ``i`` of a row holds the token at position ``i``. Slots at or above ``length`` hold rejected drafts or nothing:
    nobody may read them before writing them.

    Attributes:
        layers: one ``(keys, values)`` pair a layer, each ``[B, S, kv_heads, head_dim]``. A tuple of separate buffers and
            not one stacked array: XLA updates those in place in a donated loop, and copies the stacked one.
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
            empty = jnp.zeros((batch, capacity, kv_heads, head_dim), dtype)
            return sharding.constrain(empty, ("batch", None, "kv_heads", None), {"kv_heads": kv_heads}, mesh)

        return cls(
            layers=tuple((buffer(), buffer()) for _ in range(layers)),
            length=jnp.zeros(batch, jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """Number of slots of a row, S."""
        return self.layers[0][0].shape[1]

    def keep(self, path: Int[Array, "B D"] | None, count: Int[Array, " B"]) -> "KVCache":
        """Commit the first ``count`` nodes of ``path`` and drop everything else above ``length``.

        Args:
            path: ``[B, D+1]`` node numbers of the accepted path, root first; node ``n`` lies in slot ``length + n``. None
                says that the path is 0, 1, 2, … (a chain): nothing moves then, and this is one addition.
            count: ``[B]`` number of nodes to commit, 0 to leave a row as it is.
        """
        if path is None:
            return replace(self, length=self.length + count)
        rows = jnp.arange(path.shape[0])[:, None]
        step = jnp.arange(path.shape[1])[None]
        source = self.length[:, None] + path
        # Beyond the accepted path the destination is out of range, where a scatter in drop mode writes nothing.
        target = jnp.where(step < count[:, None], self.length[:, None] + step, self.capacity)

        def move(buffer: jax.Array) -> jax.Array:
            return buffer.at[rows, target].set(buffer[rows, source], mode="drop")

        return KVCache(
            layers=tuple((move(keys), move(values)) for keys, values in self.layers),
            length=self.length + count,
        )


@typed
def write(buffer: Float[Array, "B S K d"], new: Float[Array, "B T K d"], start: Int[Array, " B"]) -> Float[Array, "B S K d"]:
    """Put ``new`` at slots ``start … start+T`` of each row. What falls outside the buffer is dropped, never clamped."""
    rows = jnp.arange(new.shape[0])[:, None]
    slots = start[:, None] + jnp.arange(new.shape[1])[None]
    return buffer.at[rows, slots].set(new.astype(buffer.dtype), mode="drop")


def visible_slots(cache: KVCache, count: int, mask: jax.Array | None) -> jax.Array:
    """Which slots each of the ``count`` tokens of a call may attend to, once they are written at ``length``.

    Args:
        cache: the cache before the call.
        count: T, the number of tokens in the call.
        mask: ``[B|1, T, T]`` bool, which tokens of the call see each other; None is causal.

    Returns:
        ``[B, T, S]`` bool: every slot below ``length``, and of the call's own slots those that ``mask`` shows.
    """
    slot = jnp.arange(cache.capacity)[None, :] - cache.length[:, None]  # [B, S]; 0 is the call's first token
    if mask is None:
        return slot[:, None, :] <= jnp.arange(count)[None, :, None]
    index = jnp.clip(slot, 0, count - 1)[:, None, :]
    mask = jnp.broadcast_to(mask, (slot.shape[0], count, count))
    inside = jnp.take_along_axis(mask, jnp.broadcast_to(index, (*mask.shape[:2], index.shape[-1])), axis=2)
    own = (slot >= 0) & (slot < count)
    return (slot < 0)[:, None, :] | (own[:, None, :] & inside)
