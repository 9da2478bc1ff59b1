"""Pages of one pool: who holds them, and which of them hold the beginning of a prompt that others share. Plain Python."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ChunkKey = tuple[int | str, ...]
"""The tokens of a chunk, and the one after it; before those of a first chunk the salt, if it has one: see `chunk_key`."""


def chunk_key(tokens: Sequence[int], start: int, end: int, salt: str = "") -> ChunkKey:
    """Return what a chunk of a prompt is known by. Only prompts of the same ``salt`` share chunks.

    Examples:
        >>> from specjax.serving.pages import chunk_key
        >>> chunk_key([7, 8, 9, 1], 0, 2), chunk_key([7, 8, 9, 1], 0, 2, "mine")
        ((7, 8, 9), ('mine', 7, 8, 9))
    """
    key = tuple(tokens[start : end + 1])
    return (salt, *key) if salt and start == 0 else key  # a later chunk is found below the first one


DROPPED = object()
"""Stands where a prefix state was."""


@dataclass(eq=False)
class Prefix:
    """A whole chunk of a prompt that has been read: its pages are never written again, and any number of rows may hold them.

    A drafter pairs each token with the one after it. So what is remembered of a chunk depends on the token after it, too, and a
    prompt shares the chunk only where that token is the same.

    Attributes:
        above: the chunk before it; None for a first one.
        key: what it is known by, below ``above``.
        pages: its own, in order.
        prefix_state: what was known at its end beside its pages; for whoever goes on from there. `DROPPED`: nobody can, for it
            took too much memory.
        holders: rows that hold it.
        below: the chunks that extend it.
        used: when it was last taken or given up, by the pool's own clock.
        last_used: when its prefix state was made, or a text last went on from it, by that clock.
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
    """The pages of one pool, and its prefixes.

    A page is free, or a row's own, or a prefix's. A prefix that no row holds stays as long as nobody needs its pages. Prefix
    states are not in pages: where they are large, as the states of a target with linear attention are, only those are kept that
    were made, or gone on from, last.

    Attributes:
        total: pages.

    Examples:
        >>> from specjax.serving.pages import PagePool
        >>> pool = PagePool(4)
        >>> pages = pool.take(3)
        >>> pool.available, pool.take(2)  # too few: nothing is taken
        (1, None)
        >>> prefix = pool.register(None, (7, 8, 9), tuple(pages[:1]), prefix_state=None)
        >>> pool.find([7, 8, 9, 1], chunk=2, max_length=3) == [prefix]
        True
    """

    def __init__(self, total: int, prefix_states: int | None = None) -> None:
        """A pool of ``total`` free pages, whose prefixes keep so many ``prefix_states``; None: all."""
        self.total = total
        self._prefix_states = prefix_states
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

    def find(self, tokens: Sequence[int], chunk: int, max_length: int, salt: str = "") -> list[Prefix]:
        """Return the longest chain of prefixes that ``tokens`` with this ``salt`` begin with.

        It has at most ``max_length`` tokens in all, and its last prefix has its prefix state.
        """
        chain: list[Prefix] = []
        known = self._first
        for end in range(chunk, max_length + 1, chunk):
            prefix = known.get(chunk_key(tokens, end - chunk, end, salt))
            if prefix is None:
                break
            chain.append(prefix)
            known = prefix.below
        while chain and chain[-1].prefix_state is DROPPED:
            chain.pop()
        return chain

    def go_on_from(self, chain: Sequence[Prefix]) -> None:
        """A row holds a whole ``chain``, and its text goes on from the last one's prefix state."""
        for prefix in chain:
            self._hold(prefix)
        if chain:
            chain[-1].last_used = self._now()

    def let_go(self, prefix: Prefix) -> None:
        """A row holds it no more."""
        prefix.holders -= 1
        prefix.used = self._now()

    def register(self, above: Prefix | None, key: ChunkKey, pages: tuple[int, ...], prefix_state: Any) -> Prefix:
        """Make a row's own ``pages`` a prefix, which that row holds. Where there is one of this ``key`` already, the row holds
        that one in their place, which has a prefix state again, and they are free."""
        known = self._first if above is None else above.below
        if key in known:
            self.give_back(pages)
        else:
            known[key] = Prefix(above, key, pages, prefix_state)
            self._prefixes.add(known[key])
        prefix = known[key]
        prefix.prefix_state, prefix.last_used = prefix_state, self._now()
        self._hold(prefix)
        self._drop_prefix_states()
        return prefix

    def forget_prefixes(self) -> None:
        """Drop every prefix that nobody holds."""
        while unheld := [prefix for prefix in self._prefixes if not prefix.holders and not prefix.below]:
            for prefix in unheld:
                self._drop(prefix)

    def check(self, row_pages: Sequence[int], row_prefixes: Sequence[Prefix]) -> None:
        """Compare the pool with what its rows have.

        Args:
            row_pages: the pages that rows have for themselves.
            row_prefixes: the prefixes that rows hold, each as often as it is held.

        Raises:
            RuntimeError: a page has no owner or two, or a prefix is held by more or fewer rows than it counts.
        """
        pages = sorted([*self._free, *row_pages, *(page for prefix in self._prefixes for page in prefix.pages)])
        if pages != list(range(self.total)):
            raise RuntimeError(f"pages: {len(pages)} are free, a row's or a prefix's, and each of {self.total} must be so once")
        holders = Counter(map(id, row_prefixes))
        if not self._prefixes.issuperset(row_prefixes):
            raise RuntimeError("prefixes: a row holds one that the pool has dropped")
        for prefix in self._prefixes:
            if prefix.holders != holders[id(prefix)]:
                raise RuntimeError(f"prefixes: {holders[id(prefix)]} rows hold one that counts {prefix.holders} holders")

    def _drop_prefix_states(self) -> None:
        """Those that were made or gone on from longest ago, as many as there are too many. Of a text's chunks the last one's
        is the newest, and is what the text's next turn needs."""
        if self._prefix_states is None:
            return
        kept = [prefix for prefix in self._prefixes if prefix.prefix_state is not DROPPED]
        too_many = max(0, len(kept) - self._prefix_states)
        for prefix in sorted(kept, key=lambda prefix: prefix.last_used)[:too_many]:
            prefix.prefix_state = DROPPED

    def _hold(self, prefix: Prefix) -> None:
        """A row holds ``prefix``, and holds those before it already."""
        prefix.holders += 1
        prefix.used = self._now()

    def _now(self) -> int:
        self._clock += 1
        return self._clock

    def _drop(self, prefix: Prefix) -> None:
        del (self._first if prefix.above is None else prefix.above.below)[prefix.key]
        self._prefixes.remove(prefix)
        self._free.extend(prefix.pages)
