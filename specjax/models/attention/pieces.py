"""What is attended to, in pieces: the slots of a cache, the scratch of a draft, and what a call adds itself."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.models.cache import Cache, Entry, PagedCache, by_group, groups_of, read_pages

BLOCK = 512
"""Slots of a short cache that are attended to at a time; see `block_width`."""

LOOP = "cache_blocks"
"""What the loop over them is called in a compiled program."""


def block_width(slots: int, block: int) -> int:
    """How many slots of a cache with ``slots`` are attended to at a time; ``block`` of a short one.

    The last block is read whole, however few of its slots are filled: so only a long cache has wider ones.
    """
    return min(slots, block if slots < 8 * block else 2 * block)


@struct.dataclass
class Filled:
    """The slots of a cache, as attention reads them.

    Attributes:
        entry: ``[B, heads, S, dim]`` each part; with a table, pools ``[pages, heads, page, dim]``.
        count: ``[B]`` how many slots of each row hold something: the first ones.
        since: ``[B|1, T|1]`` the first slot that each query sees. None: all see all that is filled.
        table: ``[B, n]`` the pages of each row, as in `PagedCache`. None: the slots lie side by side.
        mesh: static, where the entry lives.
    """

    entry: Entry
    count: jax.Array
    since: jax.Array | None = None
    table: jax.Array | None = None
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def of(cls, cache: Cache, layer: int, since: jax.Array | None = None, mesh: Mesh | None = None) -> "Filled":
        """What a ``cache`` holds of a layer, which is a number in ``cache.layers``."""
        table = cache.table if isinstance(cache, PagedCache) else None
        return cls(cache.layers[layer], cache.filled, since, table, mesh)

    @property
    def slots(self) -> int:
        """Slots of a row, S."""
        slots = self.entry[0].shape[2]
        return slots if self.table is None else slots * self.table.shape[1]

    def block_width(self, block: int) -> int:
        """How many slots are attended to at a time, as the function of that name says; of a cache in pages, whole pages.

        Pages are put side by side before they are attended to: blocks of them are narrower, so that few are put there in vain.
        """
        if self.table is None:
            return block_width(self.slots, block)
        page = self.entry[0].shape[2]
        return min(self.slots, -(-block // (4 * page)) * page)

    def block(self, start: jax.Array | int, width: int) -> tuple[Entry, jax.Array]:
        """The entries of ``width`` slots that include those from ``start`` on, and ``[B, T|1, width]`` bool, which are visible.

        The last block of a cache begins earlier than asked, so that it ends with the cache; what an earlier block has shown is
        hidden in it. Of a cache in pages, ``start`` and ``width`` are whole numbers of pages.
        """
        first = jnp.minimum(start, self.slots - width)
        number = first + jnp.arange(width)
        is_filled = number < self.count[:, None]
        visible = is_filled[:, None] & (number >= start)
        if self.since is not None:
            visible &= number >= self.since[..., None]
        if self.table is None:
            return jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, first, width, axis=2), self.entry), visible
        page = self.entry[0].shape[2]
        pages = jax.lax.dynamic_slice_in_dim(self.table, first // page, width // page, axis=1)

        def read(pool: jax.Array) -> jax.Array:
            found = by_group(read_pages, groups_of(self.mesh), pool, pages)
            # What lies in a page beyond the text is another's, NaN perhaps, and 0 times NaN is NaN.
            return jnp.where(is_filled.reshape(len(found), 1, width, *(1,) * (found.ndim - 3)), found, 0)

        return jax.tree.map(read, self.entry), visible


Piece = tuple[Entry, jax.Array | None] | Filled
"""What one layer remembers of some tokens, to attend to, and ``[B|1, T|1, S]`` bool, which of them each query sees. None: there
is one for each query, its own, and it sees no other. Or the slots of a cache."""
