"""The pieces that attention reads: a cache's slots, a draft's scratch, the call's own tokens."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.models.cache import Cache, Entry, PagedCache, by_group, groups_of, read_pages

BLOCK = 512
"""The number of slots of a short cache that attention reads at a time; see `block_width`."""

LOOP = "cache_blocks"
"""The name of the loop over the blocks of a cache in a compiled program."""


def block_width(slots: int, block: int) -> int:
    """Return how many slots of a cache with ``slots`` slots to read at a time.

    It is ``block`` for a short cache. The last block is read whole, even if few of its slots are
    filled, so only a long cache has wider ones.
    """
    return min(slots, block if slots < 8 * block else 2 * block)


@struct.dataclass
class Filled:
    """The slots of a cache, as attention reads them.

    Attributes:
        entry: the parts of the entries, ``[B, heads, S, dim]`` each; with a table, pools
            ``[pages, heads, page, dim]``.
        count: ``[B]`` the number of filled slots of each row: the first ones.
        since: ``[B|1, T|1]`` the first slot that each query sees. None: all filled slots are
            visible.
        table: ``[B, n]`` the pages of each row, as in `PagedCache`. None: the slots are contiguous.
        selected: ``[B, T, S]`` bool, the slots that each query reads of those that it sees (sparse
            attention). None: all of them.
        mesh: static, the mesh that the entry is on.
    """

    entry: Entry
    count: jax.Array
    since: jax.Array | None = None
    table: jax.Array | None = None
    selected: jax.Array | None = None
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def of(
        cls, cache: Cache, layer: int, since: jax.Array | None = None, mesh: Mesh | None = None
    ) -> "Filled":
        """Return the slots of one layer of a cache; ``layer`` is an index of ``cache.layers``."""
        table = cache.table if isinstance(cache, PagedCache) else None
        return cls(cache.layers[layer], cache.filled, since, table, mesh=mesh)

    @property
    def slots(self) -> int:
        """The number of slots of a row, S."""
        slots = self.entry[0].shape[2]
        return slots if self.table is None else slots * self.table.shape[1]

    def block_width(self, block: int) -> int:
        """Return how many slots to read at a time, as `block_width`; whole pages if paged.

        Pages are copied to contiguous memory before attention reads them. Their blocks are
        narrower, so that fewer unfilled slots are copied in vain.
        """
        if self.table is None:
            return block_width(self.slots, block)
        page = self.entry[0].shape[2]
        return min(self.slots, -(-block // (4 * page)) * page)

    def block(self, start: jax.Array | int, width: int) -> tuple[Entry, jax.Array]:
        """Return the entries of ``width`` slots, and ``[B, T|1, width]`` bool, which are visible.

        The slots include those from ``start`` on. The last block of a cache begins earlier than
        ``start``, so that it ends with the cache; the slots that an earlier block has shown are
        masked in it. In a paged cache ``start`` and ``width`` must be whole numbers of pages.
        """
        first = jnp.minimum(start, self.slots - width)
        number = first + jnp.arange(width)
        is_filled = number < self.count[:, None]
        visible = is_filled[:, None] & (number >= start)
        if self.since is not None:
            visible &= number >= self.since[..., None]
        if self.selected is not None:
            visible &= jax.lax.dynamic_slice_in_dim(self.selected, first, width, axis=2)
        if self.table is None:
            return jax.tree.map(
                lambda part: jax.lax.dynamic_slice_in_dim(part, first, width, axis=2), self.entry
            ), visible
        page = self.entry[0].shape[2]
        pages = jax.lax.dynamic_slice_in_dim(self.table, first // page, width // page, axis=1)

        def read(pool: jax.Array) -> jax.Array:
            tokens = by_group(read_pages, groups_of(self.mesh), pool, pages)
            # A page may hold stale values of another text beyond the filled slots. They may be NaN,
            # and a weight of 0 does not remove these, since 0 times NaN is NaN.
            return jnp.where(
                is_filled.reshape(len(tokens), 1, width, *(1,) * (tokens.ndim - 3)), tokens, 0
            )

        return jax.tree.map(read, self.entry), visible


@struct.dataclass
class Shared:
    """The entries of a context that several rows of queries attend to, each to a range of it.

    The rows of the queries are those of the context, each of them A times in a row. In training,
    these are A blocks of one window.

    Attributes:
        entry: the parts of the entries, ``[B, heads, S, dim]`` each.
        first: ``[B * A, T|1]`` the first token of the context that each query sees.
        last: ``[B * A, T|1]`` the last one.
        mesh: static, the mesh that the entry is on.
    """

    entry: Entry
    first: jax.Array
    last: jax.Array
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)


Piece = tuple[Entry, jax.Array | None] | Filled | Shared
"""The entries of some tokens in one layer, and their mask; or the slots of a cache; or a context.

The mask is ``[B|1, T|1, S]`` bool: which of the S tokens each query sees. None: there is one token
for each query, its own, and the query sees no other.
"""
