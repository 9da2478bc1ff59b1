"""Caches of committed tokens, and small scratch arrays for drafted tokens.

A layer stores one or more arrays for every token: its *entry*. In ordinary attention these are keys
and values. The model declares how many parts a layer's entry has and how large they are
(`ModelConfig.entry_parts`). A layer that shares the entries of an earlier layer has an entry
without parts, ``()``.

A part is one array, or two if it is quantized to 8 bits (`specjax.models.quantized_cache`). The
functions here treat both alike: slots are the third axis of every array.

A layer may store committed tokens differently: in a `State` of fixed size for the whole text
(`specjax.models.memory`). Its drafted tokens have entries too. Those of an accepted path are
written into the state when they are committed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Int

from specjax.models.memory import LayerMemory, Parts
from specjax.models.quantized_cache import Part, QuantizedPart
from specjax.models.states import State, by_heads, empty_nodes

Entry = tuple[Part, ...]
"""The parts that one layer stores of S tokens, each ``[B, heads, S, dim]``, or ``[B, heads, S]``.

The tokens of a head are contiguous, as attention reads them, so that attention needs no transposed
copy.
"""

Entries = tuple[Entry, ...]
"""The entries of some layers, in the order of the layers."""

ExtraTokens = tuple[Entry, jax.Array]
"""Tokens that a kernel attends to beside the cache, such as a draft's scratch: entry and mask.

The parts are ``[B, heads, n, dim]``. The mask ``[B, R, n]`` int8 says which of the n tokens each of
the R queries sees.
"""


def empty_entries(
    layers: Sequence[LayerMemory | Parts],
    *,
    batch: int,
    slots: int,
    dtype: DTypeLike = jnp.float32,
    activations: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> Entries:
    """Return entries of zeros for ``slots`` committed or drafted tokens of each row.

    Args:
        layers: the memory of each layer.
        batch: the number of rows.
        slots: the number of tokens of a row.
        dtype: the type of the parts. Parts of int8 have scales.
        activations: the type of the activations, some of which the entries of layers with a state
            hold: the inputs of the convolution. None for ``dtype``.
        mesh: the mesh to put the arrays on.
    """

    def buffer(heads: int, dim: int) -> Part:
        empty = _placed(jnp.zeros((batch, heads, slots, dim), dtype), mesh)
        if empty.dtype != jnp.int8:
            return empty
        return QuantizedPart(empty, _placed(jnp.zeros((batch, heads, slots), jnp.float32), mesh))

    def entry(memory: LayerMemory) -> Entry:
        parts = tuple(buffer(heads, dim) for heads, dim in memory.parts)
        if memory.state is None:
            return parts
        return parts + empty_nodes(memory.state, batch, slots, activations or dtype, mesh)

    return tuple(entry(LayerMemory.of(memory)) for memory in layers)


def empty_states(
    layers: Sequence[LayerMemory | Parts],
    *,
    batch: int,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
) -> tuple[State | None, ...]:
    """Return the states of empty rows by layer; None for layers with entries.

    If no layer has a state the result is ``()``. ``dtype`` is the type of the activations.
    """
    sizes = [LayerMemory.of(memory).state for memory in layers]
    states = [None if size is None else State.zeros(size, batch, dtype, mesh) for size in sizes]
    return tuple(states) if any(states) else ()


def _placed(array: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Return an array ``[B, heads, …]``, or a pool, on its devices of the mesh."""
    return by_heads(array, array.shape[1], mesh)


def num_slots(entries: Sequence[Entry]) -> int:
    """Return the length of the axis of tokens, such as the number of slots of a row, S.

    For pools it is the size of a page. At least one layer must have an entry.
    """
    return jax.tree.leaves(tuple(entries))[0].shape[2]


def gather_entries(entries: Sequence[Entry], indices: Int[Array, "B *heads n"]) -> Entries:
    """Return the entries at each row's or each head's ``indices``, in that order.

    The entries at negative indices are arbitrary.
    """
    by_head = _by_head(indices)

    def gather(buffer: jax.Array) -> jax.Array:
        return jnp.take_along_axis(
            buffer, by_head if buffer.ndim == 3 else by_head[..., None], axis=2
        )

    return jax.tree.map(gather, tuple(entries))


def _by_head(indices: Int[Array, "B *heads n"]) -> Int[Array, "B heads n"]:
    """Return the indices as ``[B, heads|1, n]``, with 0 for negative ones."""
    return jnp.maximum(indices if indices.ndim == 3 else indices[:, None], 0)


def place_entries(
    scratch: Sequence[Entry], new: Sequence[Entry], offset: ArrayLike, after: jax.Array
) -> Entries:
    """Return ``scratch`` with ``new`` entries at the slots from ``offset`` on of every row.

    For example, a draft model has read the nodes of depth 1, two of them in slots 0 and 1 of a
    scratch of 4, and now reads the two nodes of depth 2. Their pass attends to slots 0 and 1, and
    computes ``hidden`` and the entries ``new``::

        slots before      a    b    -    -
        the pass reads    a    b              and returns hidden, new = (c, d)
        slots after       a    b    c    d    place_entries(scratch, new, offset=2, after=hidden)

    ``hidden`` is the end of the pass: when it is computed, every layer has finished reading the
    slots. ``new`` alone does not guarantee this. A layer's entry is computed before its own
    attention has read the scratch, and the first layer's before all others.

    Args:
        scratch: the entries of drafted tokens by layer.
        new: the entries of further tokens by layer.
        offset: the first slot to write, the same for all rows.
        after: any array that depends on everything that was read of ``scratch`` before. XLA then
            writes in place. If it does not depend on all of those reads, the result is the same,
            but XLA may copy the whole scratch at the start of every call. (On a TPU, that copy also
            delays the prefetch of weights.) See `_count_depending_on` for how to notice it.
    """
    offset, _ = jax.lax.optimization_barrier((offset, after))

    def place(buffer: jax.Array, values: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(
            buffer, values.astype(buffer.dtype), offset, axis=2
        )

    return jax.tree.map(place, tuple(scratch), tuple(new))


@struct.dataclass
class KVCache:
    """The entries of committed tokens: slot ``i`` of a row holds the token at position ``i``.

    A smaller ``length`` rolls the cache back: slots at or above it have no meaning. Attention reads
    these with weight 0, so they must be finite, as zeros are.

    Attributes:
        layers: one `Entry` of ``S`` slots for each layer; the parts may differ by layer. It is a
            tuple of separate buffers, not one stacked array: XLA updates separate buffers in place
            in a donated loop, and copies a stacked one. ``()`` for a layer with a state.
        length: ``[B]`` int32, the number of committed tokens of each row. It also counts tokens
            that did not fit.
        states: the states by layer, and None for layers without one; ``()`` if no layer has one. A
            smaller ``length`` does not roll them back.
    """

    layers: Entries
    length: jax.Array
    states: tuple[State | None, ...] = ()

    @classmethod
    def create(
        cls,
        layers: Sequence[LayerMemory | Parts],
        *,
        batch: int,
        capacity: int,
        dtype: DTypeLike = jnp.float32,
        activations: DTypeLike | None = None,
        mesh: Mesh | None = None,
    ) -> "KVCache":
        """Return an empty cache of ``capacity`` slots for each of ``batch`` rows.

        The other arguments are those of `empty_entries`.
        """
        parts = [LayerMemory.of(memory).parts for memory in layers]
        return cls(
            layers=empty_entries(parts, batch=batch, slots=capacity, dtype=dtype, mesh=mesh),
            length=jnp.zeros(batch, jnp.int32),
            states=empty_states(layers, batch=batch, dtype=activations or dtype, mesh=mesh),
        )

    @property
    def capacity(self) -> int:
        """The number of slots of a row, S."""
        return num_slots(self.layers)

    @property
    def filled(self) -> Int[Array, " B"]:
        """The number of filled slots of each row. They are its first slots."""
        return self.length

    def gather(self, positions: Int[Array, "B *heads n"]) -> Entries:
        """Return the entries of the tokens at each row's or each head's ``positions``.

        See `gather_entries`.
        """
        return gather_entries(self.layers, positions)

    def of_layers(self, layers: Sequence[int]) -> "KVCache":
        """Return the cache of some layers alone, in the order of their indices ``layers``."""
        return replace(
            self, layers=_chosen(self.layers, layers), states=_chosen(self.states, layers)
        )

    def append(
        self, new: Sequence[Entry | State], count: Int[Array, " B"], after: jax.Array
    ) -> "KVCache":
        """Commit the first ``count [B]`` of each row's ``n`` new entries.

        The entries of tokens that do not fit are dropped. They never overwrite filled slots. But
        ``length`` counts these tokens, so the caller must make sure that all fit.

        Args:
            new: by layer, the entry of the n tokens. A layer with a state may instead have the
                `State` after the ``count`` tokens, which replaces the old one.
            count: the number of tokens to commit; 0 leaves a row as it is, except that a `State`
                in ``new`` is taken as it is.
            after: ``[B, …]`` any array whose first element in each row depends on everything that
                was read of this cache: the write waits for it. A wrong array costs only time, see
                `_count_depending_on`.
        """
        count = _count_depending_on(count, after)
        entries, states = split_entries_and_states(self.states, new, count)
        step = jnp.arange(num_slots(entries))[None]
        # Beyond `count` the destination is out of range, where a scatter in drop mode writes
        # nothing.
        slots = jnp.where(step < count[:, None], self.length[:, None] + step, self.capacity)
        layers = jax.tree.map(
            lambda buffer, values: _set_slots(buffer, slots, values), self.layers, entries
        )
        return KVCache(layers=layers, length=self.length + count, states=states)


def _chosen(values: tuple[Any, ...], layers: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[layer] for layer in layers) if values else ()


def split_entries_and_states(
    states: tuple[State | None, ...], new: Sequence[Entry | State], count: Int[Array, " B"]
) -> tuple[Entries, tuple[State | None, ...]]:
    """Return the entries that go into slots, and the states after the first ``count [B]`` tokens.

    See `State.take`.
    """
    if not states:
        return tuple(new), ()  # pyright: ignore[reportReturnType]
    entries: list[Entry] = []
    after: list[State | None] = []
    for state, update in zip(states, new, strict=True):
        entry, state_after = (update, None) if state is None else state.take(update, count)
        entries.append(entry)  # pyright: ignore[reportArgumentType]
        after.append(state_after)
    return tuple(entries), tuple(after)


@struct.dataclass
class PagedCache:
    """A `KVCache` in pages: rows take only the memory that they need, and may share a prefix.

    All rows have one pool of pages. The page table of a row says which pages hold its tokens: the
    token at position p is in page ``table[row, p // page]``, at offset ``p % page``. The caller
    must make tables in which no page is written by two rows. A page that no row reads may hold
    anything, NaN too.

    Attributes:
        layers: one `Entry` for each layer, whose parts are pools ``[pages, heads, page, dim]``.
            They have no row axis.
        table: ``[B, n]`` int32, the pages of each row in order. Unused columns have the index
            ``pages``, which is out of range, so that writes there are dropped. They are not -1: JAX
            would take that for the last page.
        length: ``[B]`` int32, the number of committed tokens of each row.
        states: as in `KVCache`. They have a row axis and are not paged.
        groups: static. On a mesh whose data axis splits the rows into groups, each group has its
            own part of every pool, and counts its pages from 0.

    Examples:
        >>> from specjax.models.cache import PagedCache
        >>> _, entries = target.read(prompts)
        >>> empty = target.new_cache(batch=2, capacity=16)
        >>> cache = PagedCache.like(empty, pages=3, page=8)
        >>> cache = cache.with_table(jnp.array([[2, 3], [0, 3]]))  # page 3: none
        >>> cache = cache.append(entries, jnp.array([6, 6]), after=jnp.ones((2, 1)))
        >>> sixth = cache.gather(jnp.array([[5], [5]]))  # the entries of the sixth tokens
        >>> np.array_equal(sixth[0][0][:, :, 0], entries[0][0][:, :, 5])
        True
    """

    layers: Entries
    table: jax.Array
    length: jax.Array
    states: tuple[State | None, ...] = ()
    groups: int = struct.field(pytree_node=False, default=1)

    @classmethod
    def like(
        cls, cache: KVCache, *, pages: int, page: int, mesh: Mesh | None = None
    ) -> "PagedCache":
        """Return an empty paged cache for the rows of ``cache``, with at least its capacity.

        Args:
            cache: the cache to replace; only its shapes are read.
            pages: the number of pages of the pool, for each group.
            page: the number of tokens of a page.
            mesh: the mesh to put the arrays on.
        """
        batch = cache.length.shape[0]
        groups = groups_of(mesh)

        def pool(part: jax.Array) -> jax.Array:
            return _placed(
                jnp.zeros((groups * pages, part.shape[1], page, *part.shape[3:]), part.dtype), mesh
            )

        return cls(
            layers=jax.tree.map(pool, cache.layers),
            table=jnp.full((batch, -(-cache.capacity // page)), pages, jnp.int32),
            length=jnp.zeros(batch, jnp.int32),
            states=cache.states,
            groups=groups,
        )

    @property
    def page(self) -> int:
        """The number of tokens of a page."""
        return num_slots(self.layers)

    @property
    def pages(self) -> int:
        """The number of pages of the pool, for each group."""
        return jax.tree.leaves(self.layers)[0].shape[0] // self.groups

    @property
    def capacity(self) -> int:
        """The maximum number of tokens of a row."""
        return self.table.shape[1] * self.page

    @property
    def filled(self) -> Int[Array, " B"]:
        """The number of filled slots of each row. They are its first slots."""
        return self.length

    def with_table(self, table: Int[Array, "B n"]) -> "PagedCache":
        """Return the cache with other pages for its rows."""
        return replace(self, table=table)

    def of_layers(self, layers: Sequence[int]) -> "PagedCache":
        """Return the cache of some layers alone; see `KVCache.of_layers`."""
        return replace(
            self, layers=_chosen(self.layers, layers), states=_chosen(self.states, layers)
        )

    def gather(self, positions: Int[Array, "B *heads n"]) -> Entries:
        """Return the entries at some positions; see `KVCache.gather`."""
        pages, slots = self._slots(_by_head(positions))
        return jax.tree.map(
            lambda pool: by_group(_gather_paged, self.groups, pool, pages, slots), self.layers
        )

    def append(
        self, new: Sequence[Entry | State], count: Int[Array, " B"], after: jax.Array
    ) -> "PagedCache":
        """Commit new entries, as `KVCache.append`. Tokens without a page are dropped."""
        count = _count_depending_on(count, after)
        entries, states = split_entries_and_states(self.states, new, count)
        step = jnp.arange(num_slots(entries))[None]
        positions = self.length[:, None] + step
        pages, slots = self._slots(positions)
        # `no_page` is out of range, and a scatter with mode="drop" writes nothing there. Positions
        # beyond the capacity need it, too: `_slots` has clamped them to the row's last page.
        no_page = jax.tree.leaves(self.layers)[0].shape[0]
        pages = jnp.where((step < count[:, None]) & (positions < self.capacity), pages, no_page)
        layers = jax.tree.map(
            lambda pool, values: by_group(_set_paged, self.groups, pool, pages, slots, values),
            self.layers,
            entries,
        )
        return replace(self, layers=layers, length=self.length + count, states=states)

    def _slots(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the page of each of the ``positions [B, …]``, and the offset in that page."""
        column = jnp.minimum(positions // self.page, self.table.shape[1] - 1)
        flat = column.reshape(positions.shape[0], -1)
        pages = jnp.take_along_axis(self.table, flat, axis=1).reshape(positions.shape)
        return pages, positions % self.page


def groups_of(mesh: Mesh | None) -> int:
    """Return the number of groups into which a mesh splits the rows."""
    return 1 if mesh is None else mesh.shape["data"]


def by_group(
    function: Callable[..., jax.Array], groups: int, pool: jax.Array, *row_arrays: jax.Array
) -> jax.Array:
    """Compute ``function(pool, *row_arrays)`` for each group of rows and its part of the pool.

    Groups are independent, so on a mesh this needs no communication between devices.

    Args:
        function: a function of a pool ``[pages, …]`` and of arrays ``[B, …]``, whose result has
            pages or rows first.
        groups: the number of groups.
        pool: the pools of all groups, one after the other.
        row_arrays: the arrays of all groups, one after the other.
    """
    if groups == 1:
        return function(pool, *row_arrays)
    # The size of a group is computed, because reshape cannot infer it (-1) for an array without
    # elements, such as the taps of a drafter without taps.
    split = [x.reshape(groups, x.shape[0] // groups, *x.shape[1:]) for x in (pool, *row_arrays)]
    results = jax.vmap(function)(*split)
    return results.reshape(groups * results.shape[1], *results.shape[2:])


def read_pages(pool: jax.Array, pages: Int[Array, "B n"]) -> jax.Array:
    """Return one part of the entries in the pages of each row, ``[B, heads, n * page, …]``.

    The tokens are in the order of the pages. If a page is out of range, its entries are arbitrary.
    """
    paged = pool.at[pages].get(mode="clip")  # [B, n, heads, page, …]
    return jnp.moveaxis(paged, 2, 1).reshape(paged.shape[0], paged.shape[2], -1, *paged.shape[4:])


def _gather_paged(pool: jax.Array, pages: jax.Array, slots: jax.Array) -> jax.Array:
    """Return one part of the entries at ``slots`` of ``pages [B, heads|1, n]``.

    The result is ``[B, heads, n, …]``.
    """
    pages, slots = (
        jnp.broadcast_to(x, (x.shape[0], pool.shape[1], x.shape[2])) for x in (pages, slots)
    )
    gather = jax.vmap(
        lambda head_pool, page, slot: head_pool.at[page, slot].get(mode="clip"),
        in_axes=1,
        out_axes=1,
    )
    return gather(pool, pages, slots)


def _set_paged(pool: jax.Array, pages: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """Return ``pool`` with ``values [B, heads, n, …]`` at ``slots [B, n]`` of ``pages [B, n]``."""
    # Heads are explicit indices, not a slice: for a slice the TPU compiler wants all heads of a
    # slot contiguous, and copies the whole pool into that layout. With explicit indices, too, the
    # compiler knows that heads do not move between the devices of a mesh.
    heads = jnp.arange(pool.shape[1])[:, None]
    return pool.at[pages[:, None], heads, slots[:, None]].set(
        values.astype(pool.dtype), mode="drop"
    )


@struct.dataclass
class RingCache:
    """A cache of few slots: some that are never overwritten, and a ring for the newest tokens.

    The first ``kept`` slots are permanent. They hold the first tokens of the text (`Streaming`), or
    tokens that were selected after the prefill (`SnapKV`). The other R = S - kept slots are a ring:
    a token at position p >= kept goes to slot ``kept + (p - base) % R``, and overwrites the token
    at p - R. Keys carry the rotation of their own positions, and attention does not depend on the
    order of slots.

    Attributes:
        layers: one `Entry` of S slots for each layer.
        length: ``[B]`` int32, the number of tokens of each row's text so far. Many of them may have
            no slot any more.
        base: ``[B]`` int32, the position of the first token in the ring, at least ``kept``.
        kept: static, the number of slots that are never overwritten.
        states: as in `KVCache`; they include all tokens.
    """

    layers: Entries
    length: jax.Array
    base: jax.Array
    kept: int = struct.field(pytree_node=False)
    states: tuple[State | None, ...] = ()

    @classmethod
    def around(cls, empty: KVCache, num_kept: int) -> "RingCache":
        """Return a ring cache in the slots of an empty cache, with ``num_kept`` permanent slots."""
        base = jnp.full_like(empty.length, num_kept)
        return cls(
            layers=empty.layers, length=empty.length, base=base, kept=num_kept, states=empty.states
        )

    @property
    def slots(self) -> int:
        """The number of slots of a row, S."""
        return num_slots(self.layers)

    @property
    def filled(self) -> Int[Array, " B"]:
        """The number of filled slots of each row. They are its first slots."""
        return jnp.minimum(self.length, self.slots)

    def slot_of(self, positions: Int[Array, "B n"]) -> Int[Array, "B n"]:
        """Return the slot of the token at each of the ``positions``."""
        base = self.base[:, None]
        in_ring = self.kept + (positions - base) % (self.slots - self.kept)
        return jnp.where(positions < self.kept, positions, in_ring)

    def positions_by_slot(self, length: Int[Array, " B"]) -> Int[Array, "B S"]:
        """Return the position of the token in each slot when a row has ``length`` tokens.

        It is ``length`` or more for a slot of the ring that is still empty. For a permanent slot it
        is the slot's index.
        """
        slot = jnp.arange(self.slots)[None]
        ring, base, last = self.slots - self.kept, self.base[:, None], length[:, None] - 1
        newest = last - (last - base - (slot - self.kept)) % ring
        # If the ring is not full yet, a slot may be empty: its position is that of a future token.
        return jnp.where(slot < self.kept, slot, jnp.where(newest < base, newest + ring, newest))

    def append(
        self, new: Sequence[Entry | State], count: Int[Array, " B"], after: jax.Array
    ) -> "RingCache":
        """Append the first ``count [B]`` of each row's ``new`` entries, as `KVCache.append`.

        If the ring cannot hold all of them, the newest stay.
        """
        count = _count_depending_on(count, after)
        entries, states = split_entries_and_states(self.states, new, count)
        step = jnp.arange(num_slots(entries))[None]
        positions = self.length[:, None] + step
        is_newest = step >= count[:, None] - (self.slots - self.kept)
        slots = jnp.where(
            (step < count[:, None]) & ((positions < self.kept) | is_newest),
            self.slot_of(positions),
            self.slots,
        )
        layers = jax.tree.map(
            lambda buffer, values: _set_slots(buffer, slots, values), self.layers, entries
        )
        return replace(self, layers=layers, length=self.length + count, states=states)


Cache = KVCache | PagedCache | RingCache
"""The cache of a model, of any layout."""


def _set_slots(buffer: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """Return ``buffer [B, heads, S, …]`` with ``values [B, heads, n, …]`` at ``slots [B, n]``."""
    return jax.lax.platform_dependent(buffer, slots, values, tpu=_set_by_head, default=_set_by_row)


def _set_by_row(buffer: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    # Mapped over rows and heads, so that a mesh which splits them needs no exchange.
    return jax.vmap(jax.vmap(_set_of_head, in_axes=(0, None, 0)))(buffer, slots, values)


def _set_by_head(buffer: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """Set slots as `_set_by_row`, but with separate indices for each head.

    If all heads share the indices, XLA writes all heads of a slot at once, and chooses a layout in
    which they are contiguous. A TPU's attention reads another layout. So XLA would convert the
    whole cache in every step, if a chip has more than one head.
    """
    slots = jnp.broadcast_to(slots[:, None], (*buffer.shape[:2], slots.shape[1]))
    return jax.vmap(jax.vmap(_set_of_head))(buffer, slots, values)


def _set_of_head(buffer: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    return buffer.at[slots].set(values.astype(buffer.dtype), mode="drop")


def _count_depending_on(count: Int[Array, " B"], dependency: jax.Array) -> Int[Array, " B"]:
    """Return ``count``, in a form that the compiler can compute only after ``dependency [B, …]``.

    XLA updates a buffer in place if the write waits for every read of it; otherwise it may copy the
    whole buffer first. The slots that are written depend on ``count``. So if ``dependency`` depends
    on everything that was read, the write waits for the reads.

    For example, one step of plain decoding, with a cache of 3 tokens and room for 8::

        layer 0    entry 0 of the root    attention reads slots 0 to 2 of buffer 0
        layer 1    entry 1 of the root    attention reads slots 0 to 2 of buffer 1
        the end    hidden                 append(entries, count=1, after=hidden) fills slot 3

    By data flow alone, the write of entry 0 into buffer 0 may come before layer 0 has read that
    buffer, because an entry is computed before its attention begins. XLA may then keep both
    versions, and copy buffer 0. If ``count`` depends on ``hidden``, there is one order and one
    version. Do not pass an entry or the hidden state between two layers in place of ``hidden``:
    these are computed before later layers have read their buffers.

    A wrong ``after`` never changes the text. But the compiler may then copy whole buffers in every
    step. This moves more memory than attention itself, which reads only the filled slots. Such
    copies show up in the compiled program as a ``copy`` of an array of the buffer's shape:
    tests/decoding/test_loop.py looks for these on a CPU, and ``specjax plan compile`` counts them
    ("copies of the cache") for the device that it compiles for.
    """
    first = dependency.reshape(dependency.shape[0], -1)[:, 0]
    return count + (jnp.abs(jnp.sign(first)) > 1)  # never true, but XLA cannot know
