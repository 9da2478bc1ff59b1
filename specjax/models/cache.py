"""What attention remembers: the cache of committed tokens, and small scratch arrays for drafted ones.

A layer remembers one or more arrays of every token: its *entry*. For ordinary attention these are keys and values; the model
declares how many parts an entry has and how large they are (`ModelConfig.entry_parts`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Int

from specjax import sharding

Entry = tuple[jax.Array, ...]
"""What one layer remembers of S tokens: its parts, each ``[B, heads, S, dim]``. A head's tokens lie side by side, as attention
reads them, so that it needs no transposed copy."""

Other = tuple[Entry, jax.Array]
"""Tokens beside a cache, as a kernel reads them: ``[B, heads, n, dim]`` each part, and ``[B, R, n]`` int8, which of them each
of R queries sees."""


def empty_entries(
    parts: Sequence[tuple[int, int]], *, layers: int, batch: int, slots: int, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> tuple[Entry, ...]:
    """Zeros for ``slots`` tokens a row in each of ``layers`` layers; ``parts`` are the ``(heads, dim)`` of an entry's parts."""

    def buffer(heads: int, dim: int) -> jax.Array:
        empty = jnp.zeros((batch, heads, slots, dim), dtype)
        return sharding.constrain(empty, ("batch", "kv_heads", None, None), {"kv_heads": heads}, mesh)

    return tuple(tuple(buffer(heads, dim) for heads, dim in parts) for _ in range(layers))


def gather_entries(entries: Sequence[Entry], tokens: Int[Array, "B n"]) -> tuple[Entry, ...]:
    """The entries of each row's ``tokens``, in that order; what stands at a negative number does not matter."""

    def gather(buffer: jax.Array) -> jax.Array:
        return jnp.take_along_axis(buffer, jnp.maximum(tokens, 0)[:, None, :, None], axis=2)

    return jax.tree.map(gather, tuple(entries))


def place_entries(scratch: Sequence[Entry], new: Sequence[Entry], offset: Any, after: jax.Array) -> tuple[Entry, ...]:
    """``scratch`` with ``new`` entries at slots ``offset …`` of every row.

    Args:
        scratch: each layer's, of drafted tokens.
        new: each layer's, of further ones.
        offset: one number for all rows.
        after: any array that was worked out from everything that was read of ``scratch`` before. XLA then writes in place;
            otherwise it copies all of it first, and does so before anything else, which keeps a TPU from fetching weights.
    """
    offset, _ = jax.lax.optimization_barrier((offset, after))

    def place(buffer: jax.Array, values: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, values.astype(buffer.dtype), offset, axis=2)

    return jax.tree.map(place, tuple(scratch), tuple(new))


@struct.dataclass
class KVCache:
    """The entries of committed tokens, and nothing else: slot ``i`` of a row holds the token at position ``i``.

    Rolling back is a smaller ``length``: what lies at or above it has no meaning. Attention reads it with weight 0, so it must
    be finite, as zeros are.

    Attributes:
        layers: one `Entry` of ``S`` slots a layer. A tuple of separate buffers and not one stacked array: XLA updates those in
            place in a donated loop, and copies the stacked one.
        length: ``[B]`` int32, the number of committed tokens of each row.
    """

    layers: tuple[Entry, ...]
    length: jax.Array

    @classmethod
    def create(
        cls,
        parts: Sequence[tuple[int, int]],
        *,
        layers: int,
        batch: int,
        capacity: int,
        dtype: Any = jnp.float32,
        mesh: Mesh | None = None,
    ) -> "KVCache":
        """An empty cache of ``capacity`` slots a row for ``batch`` rows; ``parts`` as in `empty_entries`."""
        entries = empty_entries(parts, layers=layers, batch=batch, slots=capacity, dtype=dtype, mesh=mesh)
        return cls(layers=entries, length=jnp.zeros(batch, jnp.int32))

    @property
    def capacity(self) -> int:
        """Number of slots of a row, S."""
        return self.layers[0][0].shape[2]

    @property
    def filled(self) -> Int[Array, " B"]:
        """How many slots of each row may be read: the first ones."""
        return self.length

    def of_layers(self, start: int, stop: int) -> "KVCache":
        """The cache of the layers from ``start`` up to, and without, ``stop``."""
        return replace(self, layers=self.layers[start:stop])

    def append(self, new: Sequence[Entry], count: Int[Array, " B"], after: jax.Array) -> "KVCache":
        """Commit the first ``count [B]`` of each row's ``new`` entries, ``n`` a row.

        What does not fit is dropped, never clamped onto live slots.

        Args:
            new: by layer.
            count: 0 leaves a row as it is.
            after: ``[B, …]`` any array whose first element in each row was worked out from everything that was read of this
                cache: the write waits for it.
        """
        count = _known_after(count, after)
        step = jnp.arange(new[0][0].shape[2])[None]
        # Beyond `count` the destination is out of range, where a scatter in drop mode writes nothing.
        slots = jnp.where(step < count[:, None], self.length[:, None] + step, self.capacity)
        layers = jax.tree.map(lambda buffer, values: _set_slots(buffer, slots, values), self.layers, tuple(new))
        return KVCache(layers=layers, length=self.length + count)


@struct.dataclass
class RingCache:
    """A cache of few slots: some that stay, and a ring for the newest tokens.

    The first ``kept`` slots hold tokens for good: those at the positions 0, 1, 2, …, or others that were chosen. The token at
    position p goes to slot ``kept + (p - base) % R`` of the R others, where it takes the place of the one R positions before.
    Keys carry the rotation of their own positions, and attention does not ask for the order of slots.

    Attributes:
        layers: one `Entry` of S slots a layer.
        length: ``[B]`` int32, the number of tokens that each row has been given so far.
        base: ``[B]`` int32, the position of the first token in the ring, at least ``kept``.
        kept: static, slots that stay.
    """

    layers: tuple[Entry, ...]
    length: jax.Array
    base: jax.Array
    kept: int = struct.field(pytree_node=False)

    @classmethod
    def around(cls, empty: tuple[Entry, ...], kept: int) -> "RingCache":
        """A cache of the slots of ``empty`` entries, by layer, of which the first ``kept`` stay."""
        batch = empty[0][0].shape[0]
        return cls(layers=empty, length=jnp.zeros(batch, jnp.int32), base=jnp.full(batch, kept, jnp.int32), kept=kept)

    @property
    def slots(self) -> int:
        """Number of slots of a row, S."""
        return self.layers[0][0].shape[2]

    @property
    def filled(self) -> Int[Array, " B"]:
        """How many slots of each row may be read: the first ones."""
        return jnp.minimum(self.length, self.slots)

    def slot_of(self, positions: Int[Array, "B n"]) -> Int[Array, "B n"]:
        """The slot that the token at each of the ``positions`` goes to."""
        base = self.base[:, None]
        in_ring = self.kept + (positions - base) % (self.slots - self.kept)
        return jnp.where(positions < self.kept, positions, in_ring)

    def newest_at(self, length: Int[Array, " B"]) -> Int[Array, "B S"]:
        """The position of the token in each slot of the ring, and of each kept slot its number, when a row has ``length``
        tokens; at or beyond ``length`` where there is none."""
        slot = jnp.arange(self.slots)[None]
        ring, base, last = self.slots - self.kept, self.base[:, None], length[:, None] - 1
        newest = last - (last - base - (slot - self.kept)) % ring
        # A ring that is not full yet: the slot's first token is still to come.
        return jnp.where(slot < self.kept, slot, jnp.where(newest < base, newest + ring, newest))

    def append(self, new: Sequence[Entry], count: Int[Array, " B"], after: jax.Array) -> "RingCache":
        """Give it the first ``count [B]`` of each row's ``new`` entries; arguments as in `KVCache.append`.

        Of more than the ring can hold, the newest stay.
        """
        count = _known_after(count, after)
        step = jnp.arange(new[0][0].shape[2])[None]
        positions = self.length[:, None] + step
        is_newest = step >= count[:, None] - (self.slots - self.kept)
        slots = jnp.where((step < count[:, None]) & ((positions < self.kept) | is_newest), self.slot_of(positions), self.slots)
        layers = jax.tree.map(lambda buffer, values: _set_slots(buffer, slots, values), self.layers, tuple(new))
        return replace(self, layers=layers, length=self.length + count)


Cache = KVCache | RingCache
"""What a model remembers of the tokens before."""


def _set_slots(buffer: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """``buffer [B, heads, S, dim]`` with ``values [B, heads, n, dim]`` at each row's ``slots [B, n]``."""

    def one(buffer: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
        return buffer.at[slots].set(values.astype(buffer.dtype), mode="drop")

    # Mapped over rows and heads, so that a mesh which splits them needs no exchange.
    return jax.vmap(jax.vmap(one, in_axes=(0, None, 0)))(buffer, slots, values)


def _known_after(count: Int[Array, " B"], read: jax.Array) -> Int[Array, " B"]:
    """``count``, in a way that the compiler can only work out once ``read [B, …]`` is known.

    XLA updates a buffer in place where the write waits for every read of it, and otherwise copies the whole buffer first.
    What is written depends on ``count``, and what was read is in ``read``: this makes the one wait for the other.
    """
    first = read.reshape(read.shape[0], -1)[:, 0]
    return count + (jnp.abs(jnp.sign(first)) > 1)  # which is never true
