"""The earlier answers of each tenant, which its later texts draft from.

Agents write again what they wrote before. So the engine keeps the newest answers of each tenant in
a `SuffixIndex`. The drafter `specjax.drafters.Suffix` copies from it, and the tables of
`specjax.drafters.TokenRecycling` begin with it. Acceptance can be seen in the time of an answer, so
what one tenant wrote must change no draft of another one: each has an index of its own, with a size
of its own, and its oldest answers go for its own new ones alone. Only whether a new tenant finds a
place, among so many, depends on others.

The host inserts each answer into the sorted index of its tenant, in a thread of low priority. No
step of a single process waits for that: until it is done, drafts come from the index before. For
several processes see `specjax.serving.over_hosts`.
"""

import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.arguments import is_whole
from specjax.drafters import Drafter
from specjax.drafters.suffix_index import SHORTEST_CONTEXT, SuffixIndex
from specjax.errors import InputError
from specjax.serving.pages import Tenant
from specjax.serving.threads import lower_priority

MOST_TENANTS = 1024
"""The largest number of tenants whose answers are kept."""

MOST_SALTS = 64
"""The largest number of tenants of one name, which differ in their salts. The idlest goes first."""

IDLE_SECONDS = 3600.0
"""The seconds without an answer after which a tenant may lose its answers to a new tenant."""

LARGEST_CAPACITY = 2**22
"""The largest number of tokens that are kept for a tenant: sorting them takes some seconds."""

NO_SEGMENT = -1
"""The segment of rows that draft from no earlier answer."""

_LOGGER = logging.getLogger(__name__)
_Drafters = TypeVar("_Drafters")


@dataclass(eq=False)
class _TenantAnswers:
    """The answers of a tenant.

    Attributes:
        texts: the token ids of each answer, the oldest first.
        version: a number that no other answers have had.
        size: the number of tokens that the texts need in an index.
        last_used: when the newest answer came.
        index: the sorted answers, in numpy arrays without room for more; None: none was sorted yet.
        sorted_version: the version of the answers in ``index``.
        removed: the number of places at the beginning of the newest sort's texts that have gone
            since it began.
        unsorted: the number of ``texts`` that came since the newest sort began.
    """

    texts: deque[np.ndarray] = field(default_factory=deque)
    version: int = 0
    size: int = 0
    last_used: float = 0.0
    index: SuffixIndex | None = None
    sorted_version: int = 0
    removed: int = 0
    unsorted: int = 0

    def add(self, text: np.ndarray, capacity: int) -> None:
        """Add a text, and remove the oldest ones that have no room beside it."""
        self.texts.append(text)
        self.size += len(text) + 1
        self.unsorted += 1
        while self.size > capacity:
            needed = len(self.texts.popleft()) + 1
            self.size -= needed
            if self.unsorted > len(self.texts):  # it came since the sort
                self.unsorted -= 1
            else:
                self.removed += needed

    def changes(self) -> "Changes":
        """Return what changed since the newest sort. Now another one begins."""
        new = list(itertools.islice(reversed(self.texts), self.unsorted))[::-1]
        end = self.removed + self.size - sum(len(text) + 1 for text in new)
        changes = Changes(self.version, self.sorted_version, self.index, new, self.removed, end)
        self.removed = self.unsorted = 0
        return changes


class Changes(NamedTuple):
    """The differences between the answers of a tenant and those in its sorted index.

    Attributes:
        version: the version of the answers.
        sorted_version: the version of those in ``index``; 0: there are none.
        index: the sorted answers; None: there are none.
        texts: the texts that are not in ``index``.
        begin: the first place of ``index`` that stays.
        end: the place behind the last one that stays.
    """

    version: int
    sorted_version: int
    index: SuffixIndex | None
    texts: list[np.ndarray]
    begin: int
    end: int

    def applied(self) -> SuffixIndex:
        """Return the sorted answers with the new ones and without those that went."""
        texts: Any = self.texts
        if self.index is None:
            return SuffixIndex.on_host(texts)
        return self.index.with_texts(texts, self.begin, self.end)


class EarlierAnswers:
    """The newest answers of each tenant, sorted in a thread of low priority.

    All methods may be called from any thread.

    Examples:
        >>> from specjax.serving.earlier_answers import EarlierAnswers
        >>> from specjax.serving.pages import Tenant
        >>> answers = EarlierAnswers(capacity=8)
        >>> answers.add(Tenant("a", ""), [5, 7, 8])
        >>> answers.add(Tenant("a", ""), [5, 7, 8, 6, 4])  # 10 tokens with the ends: the first goes
        >>> answers.wait()
        >>> version, index = answers.newest(Tenant("a", ""))
        >>> version, index.sizes.tolist(), answers.newest(Tenant("b", ""))
        (2, [5], None)
        >>> answers.close()
    """

    def __init__(
        self,
        capacity: int,
        *,
        most_tenants: int = MOST_TENANTS,
        most_salts: int = MOST_SALTS,
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread.

        Args:
            capacity: the number of tokens that are kept for each tenant. An answer needs one more
                than it has.
            most_tenants: the largest number of tenants whose answers are kept. A new one beyond it
                takes the place of the tenant that has had no answer for longest, if that is at
                least ``idle_seconds``; otherwise nothing is kept for the new one.
            most_salts: the largest number of tenants of one name.
            idle_seconds: see ``most_tenants``.
            clock: returns the time in seconds.
        """
        self.capacity = capacity
        self._most_tenants, self._most_salts = most_tenants, most_salts
        self._idle_seconds, self._clock = idle_seconds, clock
        # One counter for all, so that a tenant that comes back has no version that it had before.
        self._versions = itertools.count(1)
        self._tenants: OrderedDict[Tenant, _TenantAnswers] = OrderedDict()  # the newest last
        self._unsorted: OrderedDict[Tenant, None] = OrderedDict()
        self._is_sorting = self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="specjax-answers", daemon=True)
        self._thread.start()

    def add(self, tenant: Tenant, tokens: Sequence[int]) -> None:
        """Add the token ids of an answer. Of a long one its end is kept."""
        text = np.asarray(tokens[-(self.capacity - 1) :], np.int32)
        if len(text) <= SHORTEST_CONTEXT:  # nothing follows a context
            return
        with self._changed:
            if (answers := self._answers_of(tenant)) is None:
                return
            answers.add(text, self.capacity)
            answers.version = next(self._versions)
            answers.last_used = self._clock()
            self._tenants.move_to_end(tenant)
            self._unsorted[tenant] = None
            self._changed.notify_all()

    def newest(self, tenant: Tenant) -> tuple[int, SuffixIndex] | None:
        """Return the newest sorted answers of a tenant, and their version; None: there are none."""
        with self._changed:
            answers = self._tenants.get(tenant)
            if answers is None or answers.index is None:
                return None
            return answers.sorted_version, answers.index

    def wait(self) -> None:
        """Wait until all answers are sorted."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or not (self._unsorted or self._is_sorting)
            )

    def close(self) -> None:
        """End the thread, and drop all answers."""
        with self._changed:
            self._is_closed = True
            self._tenants.clear()
            self._unsorted.clear()
            self._changed.notify_all()
        self._thread.join()

    def _answers_of(self, tenant: Tenant) -> _TenantAnswers | None:
        """Return the answers of a tenant, new ones if need be; None: there is no place."""
        if tenant in self._tenants:
            return self._tenants[tenant]
        of_name = [present for present in self._tenants if present.name == tenant.name]
        if len(of_name) >= self._most_salts:
            self._drop(of_name[0])
        elif len(self._tenants) >= self._most_tenants:
            idlest = next(iter(self._tenants))
            if self._clock() - self._tenants[idlest].last_used < self._idle_seconds:
                return None
            self._drop(idlest)
        self._tenants[tenant] = _TenantAnswers()
        return self._tenants[tenant]

    def _drop(self, tenant: Tenant) -> None:
        """Drop the answers of a tenant."""
        self._tenants.pop(tenant, None)
        self._unsorted.pop(tenant, None)

    def _sorted(self, changes: Changes) -> SuffixIndex:
        """Return the answers of a tenant after ``changes``. It needs no lock."""
        return changes.applied()

    def _run(self) -> None:
        """Sort whatever changes. This is the body of the thread."""
        lower_priority()
        while self._sort_next():
            pass

    def _sort_next(self) -> bool:
        """Wait until the answers of some tenant change, and sort them. Return False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._unsorted)
            if self._is_closed:
                return False
            tenant, _ = self._unsorted.popitem(last=False)
            answers = self._tenants[tenant]
            changes, self._is_sorting = answers.changes(), True
        index = None
        try:
            index = self._sorted(changes)
        except Exception:  # such as too little memory: only drafts of this tenant are lost
            _LOGGER.exception("earlier answers of a tenant cannot be sorted; they are dropped")
        with self._changed:
            if index is None:
                self._drop(tenant)
            else:
                answers.index, answers.sorted_version = index, changes.version
            self._is_sorting = False
            self._changed.notify_all()
        return True


class TenantSegments:
    """The tenants whose answers are in the segments of an index on the device.

    Examples:
        >>> from specjax.serving.earlier_answers import TenantSegments
        >>> from specjax.serving.pages import Tenant
        >>> a, b, c = (Tenant(name, "") for name in "abc")
        >>> segments = TenantSegments(2)
        >>> segments.place(a, 1, in_use=[]), segments.place(b, 1, in_use=[a])
        ((0, True), (1, True))
        >>> segments.place(a, 1, in_use=[b]), segments.place(a, 2, in_use=[b])  # a new version
        ((0, False), (0, True))
        >>> segments.place(c, 1, in_use=[a])  # in place of b
        (1, True)
    """

    def __init__(self, count: int) -> None:
        """Begin with ``count`` segments without a tenant."""
        self._free = list(range(count))
        self._placed: OrderedDict[Tenant, tuple[int, int]] = OrderedDict()  # the newest last

    def place(self, tenant: Tenant, version: int, in_use: Collection[Tenant]) -> tuple[int, bool]:
        """Return the segment of a tenant, and whether this version must be written into it.

        Args:
            tenant: the tenant.
            version: the version of its answers.
            in_use: the tenants of other rows. They keep their segments.

        Returns:
            `NO_SEGMENT` and False if all segments are in use.
        """
        segment, placed_version = self._placed.pop(tenant, (NO_SEGMENT, 0))
        if segment == NO_SEGMENT and self._free:
            segment = self._free.pop(0)
        if segment == NO_SEGMENT:
            replaced = next((it for it in self._placed if it not in in_use), None)
            if replaced is None:
                return NO_SEGMENT, False
            segment, _ = self._placed.pop(replaced)
        self._placed[tenant] = segment, version
        return segment, placed_version != version


def with_index(drafter: _Drafters, answers: SuffixIndex | None) -> _Drafters:
    """Return a drafter, or the drafters of a list, with the index of ``answers`` to draft from."""
    return jax.tree.map(
        lambda part: replace(part, answers=answers) if _takes_answers(part) else part,
        drafter,
        is_leaf=_takes_answers,
    )


def _takes_answers(part: Any) -> bool:
    """Return whether a part is a drafter with a field for the index, see `Drafter.in_segment`."""
    return isinstance(part, Drafter) and hasattr(part, "answers")


def index_bytes(rows: int, capacity: int, mesh: Mesh | None = None) -> int:
    """Return the bytes of the index, with a segment for each row, on all devices together.

    Each device of a mesh has the whole index.
    """
    devices = 1 if mesh is None else mesh.size
    return devices * 2 * 4 * rows * (capacity + 1) if capacity else 0


def check_capacity(capacity: int, rows: int) -> None:
    """Check the number of tokens of answers that are kept for each tenant.

    Raises:
        InputError: It is out of range.
    """
    if not is_whole(capacity) or not (capacity == 0 or 1024 <= capacity <= LARGEST_CAPACITY):
        raise InputError(
            f"earlier_answers={capacity!r}: give from 1,024 to {LARGEST_CAPACITY:,} tokens for each"
            " tenant, or 0 for none"
        )
    if rows * (capacity + 1) >= 2**31:  # places are 32-bit numbers
        raise InputError(
            f"earlier_answers={capacity}: too many for rows={rows}; give at most"
            f" {2**31 // rows - 2:,}"
        )


def check_answers(capacity: int, drafter: Drafter) -> None:
    """Check that an engine with a drafter can keep so many tokens of answers for each tenant.

    Raises:
        InputError: It cannot. The message says why.
    """
    parts = jax.tree.leaves(drafter, is_leaf=_takes_answers)
    if capacity and not any(map(_takes_answers, parts)):
        raise InputError(
            f"earlier_answers={capacity}: the drafter does not use them; give a suffix drafter"
            " (--drafter suffix) or token recycling, alone or together with others"
        )
