"""Pages of one pool: who holds them, and which of them hold the beginning of a prompt that others share. Plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ChunkKey = tuple[int, ...]
"""The tokens of a chunk, and the one after it."""


@dataclass(eq=False)
class Prefix:
    """A whole chunk of a prompt that has been read: its pages are never written again, and any number of rows may hold them.

    A drafter pairs each token with the one after it. So what is remembered of a chunk depends on the token after it, too, and a
    prompt shares the chunk only where that token is the same.

    Attributes:
        above: the chunk before it; None for a first one.
        key: what it is known by, below ``above``.
        pages: its own, in order.
        border: what the drafter knew at its end; for whoever goes on from there.
        holders: rows that hold it.
        below: the chunks that extend it.
        used: when it was last taken or given up, by the pool's own clock.
    """

    above: "Prefix | None"
    key: ChunkKey
    pages: tuple[int, ...]
    border: Any
    holders: int = 0
    below: "dict[ChunkKey, Prefix]" = field(default_factory=dict)
    used: int = 0


class PagePool:
    """The pages of one pool, and its prefixes.

    A page is free, or a row's own, or a prefix's. A prefix that no row holds stays as long as nobody needs its pages.

    Attributes:
        total: pages.

    Examples:
        >>> from specjax.serving.pages import PagePool
        >>> pool = PagePool(4)
        >>> pages = pool.take(3)
        >>> pool.available, pool.take(2)  # too few: nothing is taken
        (1, None)
        >>> prefix = pool.register(None, (7, 8, 9), tuple(pages[:1]), border=None)
        >>> pool.find([7, 8, 9, 1], chunk=2, most=3) == [prefix]
        True
    """

    def __init__(self, total: int) -> None:
        """A pool of ``total`` free pages."""
        self.total = total
        self._free = list(range(total))[::-1]
        self._first: dict[ChunkKey, Prefix] = {}
        self._clock = 0
        self._prefixes: set[Prefix] = set()

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones, and those of prefixes that nobody holds."""
        return len(self._free) + sum(len(prefix.pages) for prefix in self._prefixes if not prefix.holders)

    def take(self, count: int) -> list[int] | None:
        """``count`` pages, for which prefixes that nobody holds may have to go; None, and nothing happens, where there are too
        few."""
        if count > len(self._free):
            if count > self.available:
                return None
            # Whoever holds a chunk holds those before it. So of one that nobody holds the last extension is held by nobody.
            while count > len(self._free):
                unheld = (prefix for prefix in self._prefixes if not prefix.holders and not prefix.below)
                self._drop(min(unheld, key=lambda prefix: prefix.used))
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """A row's own ``pages`` are free again."""
        self._free.extend(pages)

    def find(self, tokens: Sequence[int], chunk: int, most: int) -> list[Prefix]:
        """The longest chain of prefixes that ``tokens`` begin with, of at most ``most`` tokens in all."""
        chain: list[Prefix] = []
        known = self._first
        for end in range(chunk, most + 1, chunk):
            prefix = known.get(tuple(tokens[end - chunk : end + 1]))
            if prefix is None:
                break
            chain.append(prefix)
            known = prefix.below
        return chain

    def hold(self, prefix: Prefix) -> None:
        """A row holds ``prefix``, and holds those before it already."""
        prefix.holders += 1
        self._touch(prefix)

    def let_go(self, prefix: Prefix) -> None:
        """A row holds it no more."""
        prefix.holders -= 1
        self._touch(prefix)

    def register(self, above: Prefix | None, key: ChunkKey, pages: tuple[int, ...], border: Any) -> Prefix | None:
        """Make a row's own ``pages`` a prefix, which that row holds. None where there is one of this ``key``: they stay its
        own."""
        known = self._first if above is None else above.below
        if key in known:
            return None
        prefix = Prefix(above, key, pages, border)
        known[key] = prefix
        self._prefixes.add(prefix)
        self.hold(prefix)
        return prefix

    def forget_prefixes(self) -> None:
        """Drop every prefix that nobody holds."""
        while unheld := [prefix for prefix in self._prefixes if not prefix.holders and not prefix.below]:
            for prefix in unheld:
                self._drop(prefix)

    def _touch(self, prefix: Prefix) -> None:
        self._clock += 1
        prefix.used = self._clock

    def _drop(self, prefix: Prefix) -> None:
        del (self._first if prefix.above is None else prefix.above.below)[prefix.key]
        self._prefixes.remove(prefix)
        self._free.extend(prefix.pages)
