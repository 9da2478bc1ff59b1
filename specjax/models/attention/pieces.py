"""The pieces that attention reads: a cache's slots, a draft's scratch, the call's own tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.models.cache import (
    Cache,
    Entry,
    PagedCache,
    by_group,
    gather_entries,
    groups_of,
    read_pages,
)

BLOCK = 512
"""The number of slots of a short cache that attention reads at a time; see `block_width`."""

LOOP = "cache_blocks"
"""The name of the loop over the blocks of a cache in a compiled program."""

SHORT_ROWS = "short_rows"
"""The name of attention to the rows of a `Sparse` that are read as a whole."""

GATHERED = 2**14
"""The number of entries of a row that attention to a `Sparse` copies at a time.

If one query reads more, it is that number.
"""


def block_width(slots: int, block: int, page: int | None = None) -> int:
    """Return how many slots of a cache with ``slots`` slots to read at a time.

    It is ``block`` for a short cache. The last block is read whole, even if few of its slots are
    filled, so only a long cache has wider ones. In pages of ``page`` slots, it is some whole pages.
    Pages are copied to contiguous memory before attention reads them. Their blocks are narrower, so
    that fewer unfilled slots are copied in vain.
    """
    if page is not None:
        return min(slots, -(-block // (4 * page)) * page)
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
        """Return how many slots to read at a time, as `block_width`."""
        page = None if self.table is None else self.entry[0].shape[2]
        return block_width(self.slots, block, page)

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

    def gather(self, slots: jax.Array) -> Entry:
        """Return the entries at ``slots [B, n]`` of each row, in that order.

        In a paged cache, these entries alone are read, not their pages.
        """
        if self.table is None:
            return gather_entries((self.entry,), slots)[0]
        groups = groups_of(self.mesh)
        return PagedCache((self.entry,), self.table, self.count, groups=groups).gather(slots)[0]


@struct.dataclass
class Sparse:
    """The slots of a cache, of which each query reads a few (sparse attention).

    There are two ways to read them. All filled slots of a row are read once for all queries, and
    those that a query does not read are masked. Or the slots that each query reads are copied for
    it. Which is cheaper depends on the number of filled slots. The output of each row is that of
    the way that suits it, so that it never depends on other rows. The work is that of the batch: a
    long row lets slots be copied for all rows, and a short one lets blocks of all rows be read.

    Attributes:
        filled: the cache; its ``selected`` are the slots that each query reads.
        slots: ``[B, T, n]`` int32, the same slots in any order; the rest is arbitrary.
        visible: ``[B, T, n]`` bool, which of ``slots`` a query reads. They are filled ones.
        reach: static, the largest number of filled slots of a row that is read as a whole.
    """

    filled: Filled
    slots: jax.Array
    visible: jax.Array
    reach: int = struct.field(pytree_node=False)

    @property
    def entry(self) -> Entry:
        """The parts of the entries, as in `Filled`."""
        return self.filled.entry

    @property
    def short(self) -> Filled:
        """The slots of the rows that are read as a whole; the rest of the rows is empty."""
        return replace(self.filled, count=jnp.where(self._is_long, 0, self.filled.count))

    @property
    def _is_long(self) -> jax.Array:
        return self.filled.count > self.reach

    def groups(self) -> tuple[jax.Array, jax.Array]:
        """Return ``slots`` by groups of queries, and which of them a query of a long row reads.

        Both are ``[groups, B, width, n]``; the last group is filled up with queries that read
        nothing. A group has at most `GATHERED` slots of a row, or a single query.
        """
        _, queries, count = self.slots.shape
        groups = -(-queries // max(1, GATHERED // count))
        is_read = self.visible & self._is_long[:, None, None]
        return in_groups(self.slots, 1, groups), in_groups(is_read, 1, groups)

    def gather(self, slots: jax.Array, visible: jax.Array) -> Entry:
        """Return the entries ``[B * T, heads, width, dim]`` at ``slots [B, T, width]``.

        Those that are not ``visible [B, T, width]`` are 0: beyond the filled slots a page may hold
        NaN, and a weight of 0 does not remove these.
        """
        batch, queries, width = slots.shape
        entry = self.filled.gather(slots.reshape(batch, -1))

        def by_query(part: jax.Array) -> jax.Array:
            part = part.reshape(*part.shape[:2], queries, width, *part.shape[3:])
            part = jnp.moveaxis(part, 2, 1)
            is_read = visible.reshape(batch, queries, 1, width, *(1,) * (part.ndim - 4))
            return jnp.where(is_read, part, 0).reshape(-1, *part.shape[2:])

        return jax.tree.map(by_query, entry)


def in_groups(x: jax.Array, axis: int, groups: int) -> jax.Array:
    """Return an array with an axis divided into ``groups``, which come first.

    The last group is filled up with zeros.
    """
    before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    width = -(-size // groups)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, groups * width - size)
    divided = jnp.pad(x, padding).reshape(*before, groups, width, *after)
    return jnp.moveaxis(divided, axis, 0)


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


Piece = tuple[Entry, jax.Array | None] | Filled | Sparse | Shared
"""The entries of some tokens in one layer, and their mask; or the slots of a cache; or a context.

The mask is ``[B|1, T|1, S]`` bool: which of the S tokens each query sees. None: there is one token
for each query, its own, and the query sees no other.
"""
