"""The pages of one pool: their allocation, and prefix caching. Plain Python, without JAX."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Tenant(NamedTuple):
    """The tenant that a request belongs to. Requests of different tenants share no prefixes.

    Attributes:
        name: the application's name of the tenant, such as a hash of its API key.
        salt: a request's own ``cache_salt``, which divides a tenant further.
    """

    name: str = ""
    salt: str = ""


NO_TENANT = Tenant()
"""The tenant of requests that name none. They share prefixes with each other."""

ChunkKey = tuple[Tenant | int, ...]
"""The tokens of a chunk and the next token, which identify it; see `chunk_key`."""


def chunk_key(tokens: Sequence[int], start: int, end: int, tenant: Tenant = NO_TENANT) -> ChunkKey:
    """Return the key that identifies a chunk of a prompt below the chunk before it.

    The key of a first chunk begins with the ``tenant``. So only prompts of the same tenant share
    chunks.

    Examples:
        >>> from specjax.serving.pages import Tenant, chunk_key
        >>> chunk_key([7, 8, 9, 1], 0, 2, Tenant("shop"))
        (Tenant(name='shop', salt=''), 7, 8, 9)
        >>> chunk_key([7, 8, 9, 1], 2, 3, Tenant("shop"))
        (9, 1)
    """
    key = tuple(tokens[start : end + 1])
    # Later chunks are looked up below the first one.
    return key if start else (tenant, *key)


DROPPED = object()
"""The value of `Prefix.prefix_state` after the prefix state was dropped."""


@dataclass(eq=False)
class Prefix:
    """A full chunk of a prefilled prompt. Its pages are read-only, and rows share them.

    A drafter pairs each token with the next one. So the entries of a chunk depend on the token
    after the chunk, too, and a prompt shares the chunk only if it has the same token there.

    Attributes:
        above: the chunk before it; None for the first chunk of a prompt.
        key: its key below ``above``, see `chunk_key`.
        pages: the pages of this chunk, in order.
        prefix_state: the state at the end of the chunk, from which another text with the same
            prefix continues. `DROPPED`: it was dropped to save memory; no text can continue here.
        holders: the number of rows that use it.
        below: the chunks that follow it, by key.
        used: when a row last began or stopped using it, by the pool's clock.
        last_used: when its prefix state was last created or reused, by the same clock.
    """

    above: "Prefix | None"
    key: ChunkKey
    pages: tuple[int, ...]
    prefix_state: Any
    holders: int = 0
    below: "dict[ChunkKey, Prefix]" = field(default_factory=dict)
    used: int = 0
    last_used: int = 0


class PagePool:
    """A pool of pages, and the prefixes in it.

    A page is free, or belongs to one row, or to a prefix. A prefix that no row uses stays until its
    pages are needed. Prefix states are not in pages. If they are large, as those of a target with
    tables in its states, only the most recently used ones stay.

    Attributes:
        total: the number of pages.

    Examples:
        >>> from specjax.serving.pages import PagePool, chunk_key
        >>> pool = PagePool(4)
        >>> pages = pool.take(3)
        >>> pool.available, pool.take(2)  # too few: nothing is taken
        (1, None)
        >>> key = chunk_key([7, 8, 9, 1], start=0, end=2)
        >>> prefix = pool.register(None, key, tuple(pages[:1]), prefix_state=None)
        >>> pool.find([7, 8, 9, 1], chunk=2, max_length=3) == [prefix]
        True
    """

    def __init__(self, total: int, prefix_states: int | None = None) -> None:
        """Make a pool of ``total`` free pages.

        Args:
            total: the number of pages.
            prefix_states: the largest number of prefix states; None: no limit.
        """
        self.total = total
        self._prefix_states = prefix_states
        self._free = list(range(total))[::-1]
        self._first: dict[ChunkKey, Prefix] = {}
        self._clock = 0
        self._prefixes: set[Prefix] = set()

    @property
    def available(self) -> int:
        """The number of pages that are free, or belong to prefixes that no row uses."""
        return len(self._free) + sum(
            len(prefix.pages) for prefix in self._prefixes if not prefix.holders
        )

    def take(self, count: int) -> list[int] | None:
        """Allocate ``count`` pages, and return them.

        If too few are free, prefixes that no row uses are evicted.

        Returns:
            The pages; None, and nothing changes, if too few are available.
        """
        if count > len(self._free):
            if count > self.available:
                return None
            # A row that uses a chunk also uses the chunks before it. So below an unused chunk there
            # is always an unused leaf.
            while count > len(self._free):
                unheld = (
                    prefix for prefix in self._prefixes if not prefix.holders and not prefix.below
                )
                self._drop(min(unheld, key=lambda prefix: prefix.used))
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return pages

    def take_free(self, count: int) -> list[int] | None:
        """Allocate ``count`` pages that are free, and return them. Nothing is evicted.

        Returns:
            The pages; None, and nothing changes, if too few are free.
        """
        return self.take(count) if count <= len(self._free) else None

    def give_back(self, pages: Sequence[int]) -> None:
        """Free the ``pages`` of a row. They must not belong to a prefix."""
        self._free.extend(pages)

    def find(
        self, tokens: Sequence[int], chunk: int, max_length: int, tenant: Tenant = NO_TENANT
    ) -> list[Prefix]:
        """Return the longest chain of the ``tenant``'s prefixes that ``tokens`` begin with.

        The chain has at most ``max_length`` tokens, and its last prefix has a prefix state.
        """
        chain: list[Prefix] = []
        candidates = self._first
        for end in range(chunk, max_length + 1, chunk):
            prefix = candidates.get(chunk_key(tokens, end - chunk, end, tenant))
            if prefix is None:
                break
            chain.append(prefix)
            candidates = prefix.below
        # Pages alone are not enough: a text continues only where the state is stored as well.
        while chain and chain[-1].prefix_state is DROPPED:
            chain.pop()
        return chain

    def go_on_from(self, chain: Sequence[Prefix]) -> None:
        """Note that a row uses a ``chain``, and continues from its last prefix state."""
        for prefix in chain:
            self._hold(prefix)
        if chain:
            chain[-1].last_used = self._now()

    def let_go(self, prefix: Prefix) -> None:
        """Note that a row has stopped using ``prefix``."""
        prefix.holders -= 1
        prefix.used = self._now()

    def register(
        self, above: Prefix | None, key: ChunkKey, pages: tuple[int, ...], prefix_state: Any
    ) -> Prefix:
        """Make ``pages`` of a row a prefix that the row uses, and return the prefix.

        If a prefix of this ``key`` exists already, the row uses that one, with the new prefix
        state, and its own ``pages`` are freed.
        """
        siblings = self._first if above is None else above.below
        if key in siblings:  # another row has prefilled the same chunk meanwhile
            self.give_back(pages)
        else:
            siblings[key] = Prefix(above, key, pages, prefix_state)
            self._prefixes.add(siblings[key])
        prefix = siblings[key]
        # Also if the prefix existed: its own state may be dropped.
        prefix.prefix_state, prefix.last_used = prefix_state, self._now()
        self._hold(prefix)
        self._drop_prefix_states()
        return prefix

    def drop_prefix_state(self, prefix: Prefix) -> None:
        """Drop a prefix state that will hardly be used, if their number is limited."""
        if self._prefix_states is not None:
            prefix.prefix_state = DROPPED

    def forget_prefixes(self) -> None:
        """Evict all prefixes that no row uses."""
        while unheld := [
            prefix for prefix in self._prefixes if not prefix.holders and not prefix.below
        ]:
            for prefix in unheld:
                self._drop(prefix)

    def check(self, row_pages: Sequence[int], row_prefixes: Sequence[Prefix]) -> None:
        """Compare the pool with the pages and prefixes of its rows.

        Args:
            row_pages: the pages that belong to rows alone.
            row_prefixes: the prefixes that rows use, each once per row. A chunk that is being read
                once more counts like a row.

        Raises:
            RuntimeError: A page has no owner or two, or a prefix counts another number of rows than
                use it.
        """
        pages = sorted(
            [*self._free, *row_pages, *(page for prefix in self._prefixes for page in prefix.pages)]
        )
        if pages != list(range(self.total)):
            raise RuntimeError(
                f"pages: {len(pages)} are free or in use, but each of the {self.total} must be"
                " exactly once"
            )
        holders = Counter(map(id, row_prefixes))
        if not self._prefixes.issuperset(row_prefixes):
            raise RuntimeError("prefixes: a row uses a prefix that the pool has evicted")
        for prefix in self._prefixes:
            if prefix.holders != holders[id(prefix)]:
                raise RuntimeError(
                    f"prefixes: {holders[id(prefix)]} rows use a prefix that counts"
                    f" {prefix.holders}"
                )

    def _drop_prefix_states(self) -> None:
        """Drop the least recently used prefix states until the limit holds.

        The newest one of a text, which the next turn of a chat needs, is that of its last chunk.
        """
        if self._prefix_states is None:
            return
        with_state = [prefix for prefix in self._prefixes if prefix.prefix_state is not DROPPED]
        too_many = max(0, len(with_state) - self._prefix_states)
        for prefix in sorted(with_state, key=lambda prefix: prefix.last_used)[:too_many]:
            prefix.prefix_state = DROPPED

    def _hold(self, prefix: Prefix) -> None:
        """Count a row that begins to use ``prefix``, and already uses the prefixes above it."""
        prefix.holders += 1
        prefix.used = self._now()

    def _now(self) -> int:
        # A counter, not a time: the order of two uses is always known, and tests repeat it.
        self._clock += 1
        return self._clock

    def _drop(self, prefix: Prefix) -> None:
        del (self._first if prefix.above is None else prefix.above.below)[prefix.key]
        self._prefixes.remove(prefix)
        self._free.extend(prefix.pages)
