"""What attention remembers: caches of committed tokens, and small scratch arrays for drafted ones.

A layer remembers one or more arrays of every token: its *entry*. For ordinary attention these are keys and values; the model
declares how many parts a layer's entry has and how large they are (`ModelConfig.entry_parts`). A layer that reads the entries
of another one remembers nothing: its entry has no parts.

A part is an array, or two where it is kept in 8 bits (`specjax.models.quantized_cache`). Here both are moved alike: slots are
the third axis of every array.

A layer with linear attention remembers committed tokens otherwise: in a `State`, one for the whole text. Drafted tokens have
entries there too, and those of an accepted path are written into the state when they are committed.
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

from specjax.models.config import LinearAttention
from specjax.models.quantized_cache import Part, QuantizedPart
from specjax.models.states import State, by_heads, empty_nodes

Entry = tuple[Part, ...]
"""What one layer remembers of S tokens: its parts, each ``[B, heads, S, dim]``, or ``[B, heads, S]`` where it is one number. A
head's tokens lie side by side, as attention reads them, so that it needs no transposed copy."""

Other = tuple[Entry, jax.Array]
"""Tokens beside a cache, as a kernel reads them: ``[B, heads, n, dim]`` each part, and ``[B, R, n]`` int8, which of them each
of R queries sees."""


Parts = Sequence[tuple[int, int]]
"""``(heads, dim)`` of each part of a layer's entry."""

Memory = Parts | LinearAttention
"""How a layer remembers, as `ModelConfig.memory` says: by entries of these parts, or by a state of these sizes."""


def empty_entries(
    layers: Sequence[Memory],
    *,
    batch: int,
    slots: int,
    dtype: DTypeLike = jnp.float32,
    activations: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> tuple[Entry, ...]:
    """Zeros for ``slots`` tokens a row, committed or drafted; ``layers`` says how each layer remembers. Parts of int8 have
    scales. Layers with a state remember of a drafted token what is of the type of the ``activations``; None: of ``dtype``."""

    def buffer(heads: int, dim: int) -> Part:
        empty = _placed(jnp.zeros((batch, heads, slots, dim), dtype), mesh)
        if empty.dtype != jnp.int8:
            return empty
        return QuantizedPart(empty, _placed(jnp.zeros((batch, heads, slots), jnp.float32), mesh))

    def entry(memory: Memory) -> Entry:
        if isinstance(memory, LinearAttention):
            return empty_nodes(memory, batch, slots, activations or dtype, mesh)
        return tuple(buffer(heads, dim) for heads, dim in memory)

    return tuple(map(entry, layers))


def empty_states(
    layers: Sequence[Memory], *, batch: int, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> tuple[State | None, ...]:
    """Those of rows of which nothing has been read, by layer; None of layers that have entries. Without any, ``()``. ``dtype``
    is that of the activations."""
    of_layers = [State.zeros(memory, batch, dtype, mesh) if isinstance(memory, LinearAttention) else None for memory in layers]
    return tuple(of_layers) if any(of_layers) else ()


def _placed(array: jax.Array, mesh: Mesh | None) -> jax.Array:
    """An ``array [B, heads, …]``, or a pool, on the ``mesh`` where it is to live."""
    return by_heads(array, array.shape[1], mesh)


def slots_of(entries: Sequence[Entry]) -> int:
    """How many tokens a row the entries of some layers are of, S; at least one layer has an entry of its own."""
    return jax.tree.leaves(tuple(entries))[0].shape[2]


def gather_entries(entries: Sequence[Entry], tokens: Int[Array, "B *heads n"]) -> tuple[Entry, ...]:
    """The entries of each row's ``tokens``, in that order, or of each head's; what stands at a negative number does not
    matter."""
    by_head = _by_head(tokens)

    def gather(buffer: jax.Array) -> jax.Array:
        return jnp.take_along_axis(buffer, by_head if buffer.ndim == 3 else by_head[..., None], axis=2)

    return jax.tree.map(gather, tuple(entries))


def _by_head(tokens: Int[Array, "B *heads n"]) -> Int[Array, "B heads n"]:
    """``[B, heads|1, n]``, 0 for negative numbers."""
    return jnp.maximum(tokens if tokens.ndim == 3 else tokens[:, None], 0)


def place_entries(scratch: Sequence[Entry], new: Sequence[Entry], offset: ArrayLike, after: jax.Array) -> tuple[Entry, ...]:
    """``scratch`` with ``new`` entries at slots ``offset …`` of every row.

    For example, a draft model has read the nodes of depth 1, two of them in slots 0 and 1 of a scratch of 4, and now reads
    the two of depth 2. Their pass attends to slots 0 and 1, and comes to ``hidden`` and to the entries ``new``::

        slots before        a    b    -    -
        the pass reads      a    b                 and gives hidden, new = (c, d)
        slots afterwards    a    b    c    d       place_entries(scratch, new, offset=2, after=hidden)

    ``hidden`` is the end of the pass: when it is known, every layer has read what it wanted of the slots. ``new`` alone does
    not say so. A layer's entry is known before its own attention has read the scratch, and the first layer's before all others.

    Args:
        scratch: each layer's, of drafted tokens.
        new: each layer's, of further ones.
        offset: one number for all rows.
        after: any array that was worked out from everything that was read of ``scratch`` before. XLA then writes in place. With
            a wrong one it may copy all of the scratch at every call, and does so before anything else, which keeps a TPU from
            fetching weights; what comes out is the same. See `_known_after` for how it is noticed.
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
        layers: one `Entry` of ``S`` slots a layer, whose parts may differ by layer. A tuple of separate buffers and not
            one stacked array: XLA updates those in place in a donated loop, and copies the stacked one. ``()`` of a layer that
            has a state.
        length: ``[B]`` int32, the number of committed tokens of each row.
        states: by layer, the state of those that have one, and None of the others; ``()`` where no layer has. A smaller
            ``length`` does not roll them back.
    """

    layers: tuple[Entry, ...]
    length: jax.Array
    states: tuple[State | None, ...] = ()

    @classmethod
    def create(
        cls,
        layers: Sequence[Memory],
        *,
        batch: int,
        capacity: int,
        dtype: DTypeLike = jnp.float32,
        activations: DTypeLike | None = None,
        mesh: Mesh | None = None,
    ) -> "KVCache":
        """An empty cache of ``capacity`` slots a row for ``batch`` rows; arguments as in `empty_entries`."""
        parts = [() if isinstance(memory, LinearAttention) else memory for memory in layers]
        return cls(
            layers=empty_entries(parts, batch=batch, slots=capacity, dtype=dtype, mesh=mesh),
            length=jnp.zeros(batch, jnp.int32),
            states=empty_states(layers, batch=batch, dtype=activations or dtype, mesh=mesh),
        )

    @property
    def capacity(self) -> int:
        """Number of slots of a row, S."""
        return slots_of(self.layers)

    @property
    def filled(self) -> Int[Array, " B"]:
        """How many slots of each row may be read: the first ones."""
        return self.length

    def gather(self, positions: Int[Array, "B *heads n"]) -> tuple[Entry, ...]:
        """The entries of the tokens at each row's ``positions``, or each head's, as `gather_entries`."""
        return gather_entries(self.layers, positions)

    def of_layers(self, layers: Sequence[int]) -> "KVCache":
        """The cache of the layers of those numbers alone, in that order."""
        return replace(self, layers=_chosen(self.layers, layers), states=_chosen(self.states, layers))

    def append(self, new: Sequence[Entry | State], count: Int[Array, " B"], after: jax.Array) -> "KVCache":
        """Commit the first ``count [B]`` of each row's ``new`` entries, ``n`` a row.

        What does not fit is dropped, never clamped onto live slots.

        Args:
            new: by layer. Of a layer with a state it may be the state after those tokens.
            count: 0 leaves a row as it is.
            after: ``[B, …]`` any array whose first element in each row was worked out from everything that was read of this
                cache: the write waits for it. A wrong one costs time alone, see `_known_after`.
        """
        count = _known_after(count, after)
        entries, states = committed(self.states, new, count)
        step = jnp.arange(slots_of(entries))[None]
        # Beyond `count` the destination is out of range, where a scatter in drop mode writes nothing.
        slots = jnp.where(step < count[:, None], self.length[:, None] + step, self.capacity)
        layers = jax.tree.map(lambda buffer, values: _set_slots(buffer, slots, values), self.layers, entries)
        return KVCache(layers=layers, length=self.length + count, states=states)


def _chosen(values: tuple[Any, ...], layers: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[layer] for layer in layers) if values else ()


def committed(
    states: tuple[State | None, ...], new: Sequence[Entry | State], count: Int[Array, " B"]
) -> tuple[tuple[Entry, ...], tuple[State | None, ...]]:
    """What of ``new`` goes into slots, ``()`` of layers with a state; and the ``states`` after the first ``count [B]``."""
    if not states:
        return tuple(new), ()  # pyright: ignore[reportReturnType]
    entries: list[Entry] = []
    after: list[State | None] = []
    for state, own in zip(states, new, strict=True):
        if isinstance(own, State):
            entries.append(())
            after.append(own)
        else:
            entries.append(own if state is None else ())
            after.append(None if state is None else state.append(own, count))
    return tuple(entries), tuple(after)


@struct.dataclass
class PagedCache:
    """A `KVCache` whose slots lie in pages, so that rows take the memory that their texts need, and may share a beginning.

    All rows have one pool of pages. A row's table says which pages hold its tokens: the token at position p lies in page
    ``table[row, p // page]``, at place ``p % page``. Whoever makes the table sees to it that no page is written by two rows. A
    page that nobody reads may hold anything, NaN too.

    Attributes:
        layers: one `Entry` a layer, whose parts are pools ``[pages, heads, page, dim]``. They have no row axis.
        table: ``[B, n]`` int32, the pages of each row in order. What is not used is ``pages``, which is out of range: never -1,
            which is the last page.
        length: ``[B]`` int32, the number of committed tokens of each row.
        states: as in `KVCache`: they have a row axis, and are in no page.
        groups: static. On a mesh whose data axis splits the rows in groups, each group has its own part of every pool, and
            counts the pages in it from 0.

    Examples:
        >>> from specjax.models.cache import PagedCache
        >>> _, entries = target.read(prompts)
        >>> empty = target.new_cache(batch=2, capacity=16)
        >>> cache = PagedCache.like(empty, pages=3, page=8)
        >>> cache = cache.with_table(jnp.array([[2, 3], [0, 3]]))  # page 3: none
        >>> cache = cache.append(entries, jnp.array([6, 6]), after=jnp.ones((2, 1)))
        >>> one = cache.gather(jnp.array([[5], [5]]))  # what is remembered of the sixth tokens
        >>> np.array_equal(one[0][0][:, :, 0], entries[0][0][:, :, 5])
        True
    """

    layers: tuple[Entry, ...]
    table: jax.Array
    length: jax.Array
    states: tuple[State | None, ...] = ()
    groups: int = struct.field(pytree_node=False, default=1)

    @classmethod
    def like(cls, cache: KVCache, *, pages: int, page: int, mesh: Mesh | None = None) -> "PagedCache":
        """An empty cache in place of ``cache``, for as many rows, each of which can hold at least as many tokens.

        Args:
            cache: whose shapes alone count.
            pages: of the pool, of every group.
            page: tokens of a page.
            mesh: where it is to live.
        """
        batch = cache.length.shape[0]
        groups = groups_of(mesh)

        def pool(part: jax.Array) -> jax.Array:
            return _placed(jnp.zeros((groups * pages, part.shape[1], page, *part.shape[3:]), part.dtype), mesh)

        return cls(
            layers=jax.tree.map(pool, cache.layers),
            table=jnp.full((batch, -(-cache.capacity // page)), pages, jnp.int32),
            length=jnp.zeros(batch, jnp.int32),
            states=cache.states,
            groups=groups,
        )

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return slots_of(self.layers)

    @property
    def pages(self) -> int:
        """Pages of the pool, of every group."""
        return jax.tree.leaves(self.layers)[0].shape[0] // self.groups

    @property
    def capacity(self) -> int:
        """Most tokens of a row."""
        return self.table.shape[1] * self.page

    @property
    def filled(self) -> Int[Array, " B"]:
        """How many tokens of each row may be read: the first ones."""
        return self.length

    def with_table(self, table: Int[Array, "B n"]) -> "PagedCache":
        """The cache with other pages for its rows."""
        return replace(self, table=table)

    def of_layers(self, layers: Sequence[int]) -> "PagedCache":
        """As `KVCache.of_layers`."""
        return replace(self, layers=_chosen(self.layers, layers), states=_chosen(self.states, layers))

    def gather(self, positions: Int[Array, "B *heads n"]) -> tuple[Entry, ...]:
        """As `KVCache.gather`."""
        pages, slots = self._slots(_by_head(positions))
        return jax.tree.map(lambda pool: by_group(_gather_paged, self.groups, pool, pages, slots), self.layers)

    def append(self, new: Sequence[Entry | State], count: Int[Array, " B"], after: jax.Array) -> "PagedCache":
        """As `KVCache.append`. What a row has no page for is dropped."""
        count = _known_after(count, after)
        entries, states = committed(self.states, new, count)
        step = jnp.arange(slots_of(entries))[None]
        positions = self.length[:, None] + step
        pages, slots = self._slots(positions)
        number = jax.tree.leaves(self.layers)[0].shape[0]  # out of range, where a scatter in drop mode writes nothing
        pages = jnp.where((step < count[:, None]) & (positions < self.capacity), pages, number)
        layers = jax.tree.map(
            lambda pool, values: by_group(_set_paged, self.groups, pool, pages, slots, values), self.layers, entries
        )
        return replace(self, layers=layers, length=self.length + count, states=states)

    def _slots(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The page of each of the ``positions [B, …]``, and its place there."""
        column = jnp.minimum(positions // self.page, self.table.shape[1] - 1).reshape(positions.shape[0], -1)
        return jnp.take_along_axis(self.table, column, axis=1).reshape(positions.shape), positions % self.page


def groups_of(mesh: Mesh | None) -> int:
    """In how many groups a mesh splits the rows."""
    return 1 if mesh is None else mesh.shape["data"]


def by_group(function: Callable[..., jax.Array], groups: int, pool: jax.Array, *of_rows: jax.Array) -> jax.Array:
    """``function(pool, *of_rows)`` for each group of rows and its own part of the pool. A mesh exchanges nothing.

    Args:
        function: of a pool ``[pages, …]`` and of arrays ``[B, …]``; what it gives has pages or rows first.
        groups: how many.
        pool: of all groups, one after the other.
        of_rows: likewise.
    """
    if groups == 1:
        return function(pool, *of_rows)
    # Not -1 for the size: an array may be empty, as the taps of a drafter that asks for none.
    split = [x.reshape(groups, x.shape[0] // groups, *x.shape[1:]) for x in (pool, *of_rows)]
    found = jax.vmap(function)(*split)
    return found.reshape(groups * found.shape[1], *found.shape[2:])


def read_pages(pool: jax.Array, pages: Int[Array, "B n"]) -> jax.Array:
    """``[B, heads, n page, …]`` the tokens in ``pages`` of each row, in order. What stands in a page out of range does not
    matter."""
    found = pool.at[pages].get(mode="clip")  # [B, n, heads, page, …]
    return jnp.moveaxis(found, 2, 1).reshape(found.shape[0], found.shape[2], -1, *found.shape[4:])


def _gather_paged(pool: jax.Array, pages: jax.Array, slots: jax.Array) -> jax.Array:
    """``[B, heads, n, …]`` the tokens at ``slots`` of ``pages``, ``[B, heads|1, n]`` both."""
    pages, slots = (jnp.broadcast_to(x, (x.shape[0], pool.shape[1], x.shape[2])) for x in (pages, slots))
    gather = jax.vmap(lambda of_head, page, slot: of_head.at[page, slot].get(mode="clip"), in_axes=1, out_axes=1)
    return gather(pool, pages, slots)


def _set_paged(pool: jax.Array, pages: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """``pool`` with ``values [B, heads, n, …]`` at ``slots [B, n]`` of ``pages [B, n]``."""
    # Heads are counted out, not written as a whole: a TPU's compiler wants what is written as a whole side by side, and copies
    # the pool to have heads beside the numbers of a value. It still sees that each head stays where a mesh has it.
    heads = jnp.arange(pool.shape[1])[:, None]
    return pool.at[pages[:, None], heads, slots[:, None]].set(values.astype(pool.dtype), mode="drop")


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
        states: as in `KVCache`; they have seen all tokens.
    """

    layers: tuple[Entry, ...]
    length: jax.Array
    base: jax.Array
    kept: int = struct.field(pytree_node=False)
    states: tuple[State | None, ...] = ()

    @classmethod
    def around(cls, empty: KVCache, kept: int) -> "RingCache":
        """A cache of the slots of an ``empty`` one, of which the first ``kept`` stay."""
        base = jnp.full_like(empty.length, kept)
        return cls(layers=empty.layers, length=empty.length, base=base, kept=kept, states=empty.states)

    @property
    def slots(self) -> int:
        """Number of slots of a row, S."""
        return slots_of(self.layers)

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

    def append(self, new: Sequence[Entry | State], count: Int[Array, " B"], after: jax.Array) -> "RingCache":
        """Give it the first ``count [B]`` of each row's ``new`` entries; arguments as in `KVCache.append`.

        Of more than the ring can hold, the newest stay.
        """
        count = _known_after(count, after)
        entries, states = committed(self.states, new, count)
        step = jnp.arange(slots_of(entries))[None]
        positions = self.length[:, None] + step
        is_newest = step >= count[:, None] - (self.slots - self.kept)
        slots = jnp.where((step < count[:, None]) & ((positions < self.kept) | is_newest), self.slot_of(positions), self.slots)
        layers = jax.tree.map(lambda buffer, values: _set_slots(buffer, slots, values), self.layers, entries)
        return replace(self, layers=layers, length=self.length + count, states=states)


Cache = KVCache | PagedCache | RingCache
"""What a model remembers of the tokens before."""


def _set_slots(buffer: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """``buffer [B, heads, S, …]`` with ``values [B, heads, n, …]`` at each row's ``slots [B, n]``."""
    return jax.lax.platform_dependent(buffer, slots, values, tpu=_set_by_head, default=_set_by_row)


def _set_by_row(buffer: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    # Mapped over rows and heads, so that a mesh which splits them needs no exchange.
    return jax.vmap(jax.vmap(_set_of_head, in_axes=(0, None, 0)))(buffer, slots, values)


def _set_by_head(buffer: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """The same, each head with slots of its own. XLA writes all heads of a slot at once where they share it, and lays them side
    by side for that, which is not how a TPU's attention reads them: it copied every cache with several heads on a chip, in
    every step."""
    slots = jnp.broadcast_to(slots[:, None], (*buffer.shape[:2], slots.shape[1]))
    return jax.vmap(jax.vmap(_set_of_head))(buffer, slots, values)


def _set_of_head(buffer: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    return buffer.at[slots].set(values.astype(buffer.dtype), mode="drop")


def _known_after(count: Int[Array, " B"], read: jax.Array) -> Int[Array, " B"]:
    """``count``, in a way that the compiler can only work out once ``read [B, …]`` is known.

    XLA updates a buffer in place where the write waits for every read of it, and otherwise copies the whole buffer first.
    What is written depends on ``count``, and what was read is in ``read``: this makes the one wait for the other.

    For example, one step of plain decoding, with a cache of 3 tokens and room for 8::

        layer 0     entry 0 of the root     attention reads slots 0 to 2 of buffer 0
        layer 1     entry 1 of the root     attention reads slots 0 to 2 of buffer 1
        the end     hidden                  append(entries, count=1, after=hidden) writes slot 3 of both buffers

    By the data alone the write of entry 0 into buffer 0 may come before layer 0 has read that buffer, for an entry is known
    before its attention begins. XLA may then keep both versions, and copies buffer 0 for the one or the other. With ``count``
    worked out from ``hidden`` there is one order left, and one version. An entry in the place of ``hidden`` would be known too
    early, and so would the states in the middle of the layers: the later ones have not read yet.

    A wrong ``after`` never makes a wrong text. It leaves to the compiler whether there are copies of whole buffers in every
    step, each read and written from end to end, where attention reads the filled part once. They are noticed in the compiled
    program, as a ``copy`` of an array of the buffer's shape: tests/decoding/test_loop.py looks for these on a CPU, and
    ``specjax plan compile`` counts them ("copies of the cache") for the device that it compiles for.
    """
    first = read.reshape(read.shape[0], -1)[:, 0]
    return count + (jnp.abs(jnp.sign(first)) > 1)  # which is never true
