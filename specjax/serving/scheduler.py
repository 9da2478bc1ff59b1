"""The scheduler of continuous batching: which requests have rows and pages. Plain Python.

The scheduler computes nothing. It decides which chunks to prefill and how far rows may grow; the
engine does that on the device and reports the results.

**Rows.** Waiting requests get rows in the order of their submission. Only requests that wait for a
program to be compiled are passed by later ones.

**Preemption.** If the pages run out, the newest request is preempted. It loses its row and pages,
but no text: it waits, and is prefilled again with its output so far as part of its prompt. The
oldest request always finishes, because it is preempted last, and because `Scheduler.submit` refuses
a request that needs more pages than there are.

**Chunked prefill.** The prompts in rows take turns, one chunk at a time. The prompt with the fewest
chunks left comes first, so a short prompt does not wait for a long one. After `MAX_PASSED` chunks
of others it is the turn of the oldest prompt, so none waits for ever.

**Clients.** A client drafts on another machine and holds its row: after the prefill its text grows
only when the client sends a draft. Such a row may be lost in two ways.

- It is *dropped* for good if the client is disconnected ("away") and another request needs the row
  or pages. The longest away goes first. The row of a connected client is dropped only if a request
  with a row needs pages, and the client's request is newer or all other rows are held by clients,
  who may stay inactive for long. The client has to open a row again.
- It is *suspended* if the client is idle, that is, could draft but has not for ``idle_seconds``,
  and another request needs the row or pages. The client's next draft puts its request at the end of
  the queue. When the request has a row, its text is prefilled again, and no waiting request takes
  the row before the draft is verified. So each turn advances a client, and the queue moves whenever
  a text ends or a client becomes idle.

The clients of one owner have at most ``client_rows`` rows at a time. Their further requests wait,
and requests of others pass them.
"""

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from specjax.errors import InputError
from specjax.serving.pages import PagePool, Prefix, chunk_key

MAX_PASSED = 3
"""The number of chunks of newer prompts that may be prefilled before one of the oldest prompt."""


class QueueFullError(InputError):
    """The queue is full: the largest number of requests is waiting."""


@dataclass(eq=False)
class Request:
    """A request, from its submission to its end.

    Attributes:
        order: its place in the order of submissions. A suspended request gets a new one when its
            client drafts again.
        tokens: the token ids of the prompt and of the output so far.
        prompt_length: the number of tokens of the prompt.
        max_new_tokens: the largest number of tokens after the prompt.
        state: the state of the request. That of a client is "held" after its prefill. It may become
            "suspended" until the client's next draft, or "dropped" for good.
        row: its row; None while it has none.
        preemptions: how often it was preempted after its prefill had begun.
        shares: the largest number of prompt tokens that prefix caching may save; None: no limit.
        cached: the number of prompt tokens that prefix caching saved.
        is_client: whether it is a client's request.
        owner: the client's owner, whose clients share a limit of rows. Empty: there is no limit.
        away: when the client was disconnected, as a count of departures; None: it is connected.
        idle_since: since when the client could draft and has not, by the scheduler's clock; None:
            it cannot draft now, or it has drafted.
        needs: the programs that it needs compiled, see `Scheduler.hold_back`; None: those of all
            requests.
        salt: the scope of prefix caching. Only prompts with the same salt share prefixes.
    """

    order: int
    tokens: list[int]
    prompt_length: int
    max_new_tokens: int
    state: Literal[
        "waiting", "reading", "running", "held", "suspended", "done", "cancelled", "dropped"
    ] = "waiting"
    row: int | None = None
    preemptions: int = 0
    shares: int | None = None
    cached: int = 0
    is_client: bool = False
    owner: str = ""
    away: int | None = None
    idle_since: float | None = None
    needs: str | None = None
    salt: str = ""

    @property
    def max_length(self) -> int:
        """The maximal length of the text, prompt and output."""
        return self.prompt_length + self.max_new_tokens


@dataclass(frozen=True)
class PrefillChunk:
    """A chunk of a prompt to prefill now.

    Attributes:
        request: the request.
        row: the row of the request.
        start: the number of tokens before the chunk. Their pages are in the table.
        width: the number of tokens to compute, padding included.
        count: the number of tokens of the prompt in the chunk.
        is_first: whether the request is new in the row. Its first ``start`` tokens are shared.
        is_last: whether the prompt is prefilled after this chunk. Its last token is left out,
            because the first decoding step computes it.
        prefix_state: the prefix state at ``start`` if ``is_first``, as passed to
            `Scheduler.was_read`; None at 0.
    """

    request: Request
    row: int
    start: int
    width: int
    count: int
    is_first: bool
    is_last: bool
    prefix_state: Any


@dataclass
class _RowHolder:
    """The contents of a row that is in use.

    Attributes:
        request: the request that has the row.
        read: the number of tokens that are prefilled; None: the first chunk was not scheduled yet.
        prefixes: the prefixes that it shares.
        pages: the pages after those, which belong to this row alone.
    """

    request: Request
    read: int | None = None
    prefixes: list[Prefix] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Scheduler:
    """The assignment of rows and pages to requests; the module's docstring has its rules.

    It is not thread-safe: the engine calls it with its lock.

    Attributes:
        table: ``[rows, n]`` int32, the block table: the pages of each row, as
            `specjax.models.cache.PagedCache` stores them.
        preemptions: the number of preemptions of all requests.
        suspensions: how often a request of an idle client was suspended.
        dropped: the clients' requests that were dropped. `specjax.serving.clients.Clients` informs
            the clients, and clears the list.

    Examples:
        >>> from specjax.serving.scheduler import Scheduler
        >>> scheduler = Scheduler(rows=2, pages=8, page=4, chunk=4, capacity=16)
        >>> request = scheduler.submit([5, 6, 7, 8, 9, 5], max_new_tokens=3)
        >>> for _ in range(2):
        ...     (chunk,) = scheduler.next_reads()
        ...     print(chunk.start, chunk.count, chunk.is_last)
        ...     scheduler.was_read(chunk, prefix_state=None)
        0 4 False
        4 1 True
        >>> scheduler.reserve(4)  # no request is preempted
        []
        >>> scheduler.decoded(row=0, tokens=[1, 2, 3], done=True)
        >>> request.tokens, scheduler.idle
        ([5, 6, 7, 8, 9, 5, 1, 2, 3], True)
    """

    def __init__(
        self,
        *,
        rows: int,
        pages: int,
        page: int,
        chunk: int,
        capacity: int,
        last_widths: Sequence[int] = (),
        shards: int = 1,
        max_waiting: int | None = None,
        prefix_states: int | None = None,
        client_rows: int | None = None,
        idle_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a scheduler whose rows and pages are free.

        Args:
            rows: the number of rows, a multiple of ``shards``.
            pages: the number of pages of each shard.
            page: tokens per page.
            chunk: tokens per chunk of prefill, a multiple of ``page``.
            capacity: the maximal length of a text in tokens, prompt and output.
            last_widths: the widths below ``chunk`` that the last chunk of a prompt may have.
            shards: the number of equal groups of rows. Each has a pool of pages.
            max_waiting: the largest number of waiting requests, beyond those that free rows will
                take; None: no limit.
            prefix_states: the largest number of prefix states in each shard; None: no limit.
            client_rows: the largest number of rows for the clients of one owner; None: no limit.
            idle_seconds: seconds without a draft after which a client is idle.
            clock: returns the time in seconds.
        """
        self._page, self._chunk, self._capacity = page, chunk, capacity
        self._widths = (*sorted(last_widths), chunk)
        self._max_waiting = max_waiting
        self._prefix_states = prefix_states
        self._pools = [PagePool(pages, prefix_states) for _ in range(shards)]
        self._rows: list[_RowHolder | None] = [None] * rows
        self._max_rows, self._held_back = rows, frozenset[str]()
        self._waiting: list[Request] = []
        self._submitted = 0
        # Per shard, the chunks of newer prompts since the last chunk of the oldest one.
        self._passed = [0] * shards
        self._ahead = page  # the argument of the newest call of `reserve`
        self._departures = 0
        self._client_rows, self._idle_seconds, self._clock = client_rows, idle_seconds, clock
        self._suspended: set[Request] = set()
        self._scheduled_at = clock()  # when rows were given out last
        self.preemptions = self.suspensions = 0
        self.dropped: list[Request] = []
        self.table = np.full((rows, -(-capacity // page)), pages, np.int32)

    # --- requests ---------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        *,
        prompt_length: int | None = None,
        shares: int | None = None,
        is_client: bool = False,
        owner: str = "",
        needs: str | None = None,
        salt: str = "",
    ) -> Request:
        """Add a request to the queue, and return it.

        Args:
            tokens: the token ids of the prompt, and of the output so far.
            max_new_tokens: the largest number of tokens after the prompt, the output so far
                included. With 0 the prompt is prefilled, and nothing is generated.
            prompt_length: the number of tokens of the prompt; None: all of ``tokens``.
            shares: the largest number of tokens that prefix caching may save; None: no limit.
            is_client: whether the request is a client's, which holds its row after the prefill.
            owner: the client's owner, see `Request.owner`.
            needs: the programs that the request needs compiled, see `Request.needs`.
            salt: the scope of prefix caching, see `Request.salt`.

        Raises:
            InputError: The request can never be served. The message says why.
            QueueFullError: Too many requests wait.
        """
        length = len(tokens) if prompt_length is None else prompt_length
        if not tokens or max_new_tokens < 0:
            raise InputError(
                f"prompt of {len(tokens)} tokens, max_new_tokens={max_new_tokens}: must be at least"
                " 1, and at least 0"
            )
        if length + max_new_tokens > self._capacity:
            raise InputError(
                f"prompt ({length} tokens) plus max_new_tokens={max_new_tokens} make"
                f" {length + max_new_tokens} tokens, but there is room for {self._capacity};"
                " shorten the prompt, or give a larger capacity"
            )
        # The last token of a text is never read, so it needs no place in a page.
        needed, total = -(-(length + max_new_tokens - 1) // self._page), self._pools[0].total
        if needed > total:
            raise InputError(
                f"prompt ({length} tokens) plus max_new_tokens={max_new_tokens} need {needed} pages"
                f" of {self._page} tokens, but there are {total}; shorten the prompt, or give more"
                " pages"
            )
        # Rows that a waiting request may take count as free.
        in_use = sum(row is not None and not self._may_lose_row(row.request) for row in self._rows)
        free = max(0, self._max_rows - in_use)
        if (
            self._max_waiting is not None
            and (queue_length := self._queue_length()) >= self._max_waiting + free
        ):
            raise QueueFullError(
                f"{queue_length} requests wait, and the queue is full (max_waiting); try again"
                " later"
            )
        request = Request(
            self._next_order(),
            list(tokens),
            length,
            max_new_tokens,
            shares=shares,
            needs=needs,
            salt=salt,
        )
        request.is_client, request.owner = is_client, owner
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Cancel a request in any state. If it has ended, nothing happens."""
        if request.state == "waiting":
            self._waiting.remove(request)
        elif request.state == "suspended":
            self._suspended.remove(request)
        elif request.row is not None:
            self._leave(request)
        else:
            return
        request.state = "cancelled"

    def limit_rows(self, max_rows: int) -> None:
        """Limit the number of rows in use. Requests that have a row keep it."""
        self._max_rows = max_rows

    def hold_back(self, needs: Collection[str]) -> None:
        """Give no rows to requests with these `Request.needs`, until the next call.

        The engine calls it with the needs whose programs are not compiled yet. Other requests pass
        those that are held back.
        """
        self._held_back = frozenset(needs)

    def set_away(self, request: Request, is_away: bool) -> None:
        """Note that a client is disconnected ("away"), or connected again."""
        if is_away != (request.away is not None):
            self._departures += 1
            request.away = self._departures if is_away else None

    def may_draft(self, request: Request) -> None:
        """Note that a client can send its next draft: from now on it may become idle."""
        if request.state == "held":
            request.idle_since = self._clock()

    def has_drafted(self, request: Request) -> None:
        """Note that a client has sent a draft, and is not idle.

        If its request was suspended, it joins the end of the queue.
        """
        request.idle_since = None
        if request.state == "suspended":
            self._suspended.remove(request)
            request.state, request.order = "waiting", self._next_order()
            self._waiting.append(request)

    def is_idle(self, request: Request) -> bool:
        """Return whether a client has sent no draft for so long that its row may be suspended."""
        if request.state != "held" or request.idle_since is None:
            return False
        return self._clock() - request.idle_since >= self._idle_seconds

    def seconds_until_idle(self) -> float | None:
        """Return the seconds until a client becomes idle and a waiting request may get its row.

        None: no request waits, or no client will become idle.
        """
        if not self._waiting:
            return None
        requests = [self._holder(row).request for row in self.held]
        starts = [request.idle_since for request in requests if request.idle_since is not None]
        # This includes clients that became idle after rows were last given out. Otherwise the
        # engine's thread would sleep on, because nothing else wakes it.
        pending = [start for start in starts if self._scheduled_at - start < self._idle_seconds]
        return max(0.0, min(pending) + self._idle_seconds - self._clock()) if pending else None

    def _next_order(self) -> int:
        self._submitted += 1
        return self._submitted - 1

    def _queue_length(self) -> int:
        """Return the number of waiting requests, as far as they count for ``max_waiting``.

        Of one owner's clients at most ``client_rows`` count, so that it cannot fill the queue.
        """
        if self._client_rows is None:
            return len(self._waiting)
        of_owner = Counter(request.owner for request in self._waiting if request.owner)
        return len(self._waiting) - sum(
            max(0, count - self._client_rows) for count in of_owner.values()
        )

    # --- prompts ----------------------------------------------------------------------------------

    def next_reads(self, budget: int | None = None) -> list[PrefillChunk]:
        """Return the chunks to prefill now, at most one per shard.

        Free rows are given to waiting requests first. Chunks begin at multiples of ``chunk``,
        whether or not a prefix is shared, so prefix caching does not change how a text is rounded.
        With several shards, all chunks are computed with the width of the widest.

        Args:
            budget: the largest number of tokens to compute per chunk; None: no limit.
        """
        self._give_rows()
        chunks = [self._next_read(shard, budget) for shard in range(len(self._pools))]
        return [chunk for chunk in chunks if chunk is not None]

    def was_read(self, chunk: PrefillChunk, prefix_state: Any) -> None:
        """Note that the engine has prefilled a chunk, and cache it as a prefix if it is full.

        Args:
            chunk: the chunk.
            prefix_state: the prefix state at its end.
        """
        row = self._rows[chunk.row]
        if row is None or row.request is not chunk.request:  # the request was cancelled meanwhile
            return
        row.read = chunk.start + chunk.count
        if chunk.count == self._chunk:
            above = row.prefixes[-1] if row.prefixes else None
            key = chunk_key(chunk.request.tokens, chunk.start, row.read, chunk.request.salt)
            count = self._chunk // self._page
            row.prefixes.append(
                self._pool(chunk.row).register(above, key, tuple(row.pages[:count]), prefix_state)
            )
            del row.pages[:count]
            # The pages change if another row has cached the same chunk meanwhile.
            self._fill(chunk.row)
        if chunk.is_last and chunk.request.is_client:
            chunk.request.state = "held"
        elif chunk.is_last and chunk.request.max_new_tokens:
            chunk.request.state = "running"
        elif chunk.is_last:
            self._leave(chunk.request)
            chunk.request.state = "done"

    def can_go_on(self) -> bool:
        """Give rows to waiting requests, and return whether any row can be prefilled or decoded."""
        self._give_rows()
        return any(self._holder(row).request.state != "held" for row in self._occupied)

    def _give_rows(self) -> None:
        """Give rows to the queue's head, in the shard that will have the most pages left."""
        self._scheduled_at = self._clock()
        while request := self._next_waiting():
            if self._has_all_its_rows(request.owner):
                # Idle before away: a suspended client continues by itself, a dropped one must open
                # a row again.
                self._take_client_row(self._rows_of(request.owner), is_idle_first=True)
                continue
            free = [row for row, holder in enumerate(self._rows) if holder is None]
            # While wider programs are being compiled, some free rows cannot be used.
            free = free if self.occupied < self._max_rows else []
            if not free:
                if not self._take_client_row(self._occupied):
                    return
                continue
            # Of shards with as many pages left, the one with the fewest requests.
            shards = {self._shard(row) for row in free}
            shard = max(
                shards, key=lambda shard: (self._left(shard), -len(self._of_shard(shard)), -shard)
            )
            row = next(row for row in free if self._shard(row) == shard)
            # The rows in use will grow, too. A request without enough pages for all would be
            # preempted at once.
            holders = [self._holder(index) for index in self._of_shard(shard)]
            missing = [self._missing(holder, self._goal(holder.request)) for holder in holders]
            needed = self._pages_needed(request, shard) + sum(max(0, pages) for pages in missing)
            if holders and self._pools[shard].available < needed:
                if not self._take_client_row(self._of_shard(shard)):
                    return
                continue
            self._waiting.remove(request)
            request.state, request.row = "reading", row
            self._rows[row] = _RowHolder(request)

    def _next_waiting(self) -> Request | None:
        """Return the first waiting request that is not held back and whose owner may have a row."""
        for request in self._waiting:
            if request.needs in self._held_back:
                continue
            rows = self._rows_of(request.owner) if self._has_all_its_rows(request.owner) else []
            if not rows or any(self._may_lose_row(self._holder(row).request) for row in rows):
                return request
        return None

    def _rows_of(self, owner: str) -> list[int]:
        """Return the rows of the clients of an ``owner``."""
        return [row for row in self._occupied if owner and self._holder(row).request.owner == owner]

    def _has_all_its_rows(self, owner: str) -> bool:
        """Return whether the clients of an ``owner`` have as many rows as they may."""
        return (
            bool(owner)
            and self._client_rows is not None
            and len(self._rows_of(owner)) >= self._client_rows
        )

    def _may_lose_row(self, request: Request) -> bool:
        """Return whether a client's row may be taken for a request that waits."""
        return request.away is not None or self.is_idle(request)

    def _goal(self, request: Request) -> int:
        """Return the largest number of KV entries of a text after the next decode call."""
        return min(len(request.tokens) - 1 + self._ahead, request.max_length - 1)

    def _pages_needed(self, request: Request, shard: int) -> int:
        """Return the pages that a ``request`` would need beside the shared ones that are in use."""
        chain = self._prefixes_of(request, shard)
        shared = sum(len(prefix.pages) for prefix in chain if prefix.holders)
        pages = len(request.tokens) // self._page + 1
        if any(self._holder(row).request.state == "held" for row in self._of_shard(shard)):
            # Clients may hold their pages for long. So a request starts only with pages for its
            # first decode call as well, because it might not get them later.
            pages = max(pages, -(-self._goal(request) // self._page))
        return pages - shared

    def _prefixes_of(self, request: Request, shard: int) -> list[Prefix]:
        """Return the cached prefixes that a ``request`` may share."""
        if request.shares is None:
            max_reused = len(request.tokens) - 1
        else:
            max_reused = min(request.shares, len(request.tokens) - 1)
        return self._pools[shard].find(request.tokens, self._chunk, max_reused, request.salt)

    def _left(self, shard: int) -> int:
        """Return the pages that a ``shard`` will have left when its prompts are prefilled."""
        holders = [self._holder(row) for row in self._of_shard(shard)]
        missing = [self._missing(holder, len(holder.request.tokens) - 1) for holder in holders]
        return self._pools[shard].available - sum(max(0, pages) for pages in missing)

    def _next_read(self, shard: int, budget: int | None) -> PrefillChunk | None:
        """Return the next chunk to prefill in a ``shard``; None: none that fits the budget."""
        reading = [
            row for row in self._of_shard(shard) if self._holder(row).request.state == "reading"
        ]
        if not reading:
            return None
        reading.sort(key=lambda row: self._holder(row).request.order)
        oldest = index = reading[0]  # `min` below also returns the oldest of several equals
        if self._passed[shard] < MAX_PASSED:
            index = min(reading, key=self._chunks_left)
        row = self._holder(index)
        request, to_read = row.request, len(row.request.tokens) - 1
        if is_first := row.read is None:
            chain = self._prefixes_of(request, shard)
            start = len(chain) * self._chunk
            if not request.preemptions:  # afterwards it may find prefixes that it has cached itself
                request.cached = start
        else:
            chain, start = row.prefixes, row.read or 0
        count = min(to_read - start, self._chunk)
        width = next(width for width in self._widths if width >= count)
        # Nothing has changed so far: the same chunk is found again in the next turn.
        if budget is not None and width > budget:
            return None
        if is_first:
            self._pools[shard].go_on_from(chain)
            row.prefixes, row.read = chain, start
            self._fill(index)
        if not self._grow(index, start + count):
            return None
        prefix_state = chain[-1].prefix_state if is_first and chain else None
        self._passed[shard] = 0 if index == oldest else self._passed[shard] + 1
        return PrefillChunk(
            request, index, start, width, count, is_first, start + count == to_read, prefix_state
        )

    def _chunks_left(self, index: int) -> int:
        """Return the number of chunks left to prefill in a row, at least 1: one may be empty."""
        row = self._holder(index)
        start = row.read
        if start is None:
            start = len(self._prefixes_of(row.request, self._shard(index))) * self._chunk
        return max(1, -(-(len(row.request.tokens) - 1 - start) // self._chunk))

    # --- decoding ---------------------------------------------------------------------------------

    def reserve(self, ahead: int) -> list[Request]:
        """Allocate pages for ``ahead`` more tokens in each running row, within its maximal length.

        Returns:
            The requests that were preempted for that, oldest first.
        """
        self._ahead = ahead
        before = {self._holder(row).request for row in self._occupied}
        # The oldest first, so that no row grows that is then preempted for an older one.
        for index in sorted(self.running, key=lambda row: self._holder(row).request.order):
            row = self._rows[index]
            if row is None:  # it was preempted for an older one
                continue
            self._grow(index, self._goal(row.request))
        return sorted(
            (request for request in before if request.state == "waiting"),
            key=lambda request: request.order,
        )

    def make_room(self, request: Request, ahead: int) -> bool:
        """Allocate pages for ``ahead`` more tokens in a held row, within its maximal length.

        Returns:
            False if the row was dropped, because there are not enough pages.
        """
        assert request.row is not None
        return self._grow(request.row, min(len(request.tokens) - 1 + ahead, request.max_length - 1))

    def decoded(self, row: int, tokens: Sequence[int], done: bool) -> None:
        """Append new ``tokens`` to the text of a row, and free the row if the text is ``done``."""
        request = self._holder(row).request
        request.tokens.extend(tokens)
        if done:
            self._leave(request)
            request.state = "done"

    def swap(self, order: Sequence[int]) -> None:
        """Reorder the rows as on the device: row i becomes the former row ``order[i]``.

        Rows stay within their shards.
        """
        self._rows = [self._rows[row] for row in order]
        self.table = self.table[list(order)]
        for index in self._occupied:
            self._holder(index).request.row = index

    def clear(self) -> None:
        """Cancel all requests, and free all rows and pages.

        It works after any failure, because it makes new pools and does not use the old ones.
        """
        for request in [
            *self._waiting,
            *self._suspended,
            *(row.request for row in self._rows if row is not None),
        ]:
            request.state, request.row = "cancelled", None
        self._waiting.clear()
        self._suspended.clear()
        self._rows = [None] * len(self._rows)
        # New pools also free what the device has stored for prefixes: their prefix states.
        self._pools = [PagePool(pool.total, self._prefix_states) for pool in self._pools]
        self.table[:] = self._pools[0].total

    def check(self) -> None:
        """Check that requests, rows, pages and the table agree.

        Raises:
            RuntimeError: Two of them contradict each other. The message says which.
        """
        orders = [request.order for request in self._waiting]
        is_waiting = all(
            request.state == "waiting" and request.row is None for request in self._waiting
        )
        if orders != sorted(set(orders)) or not is_waiting:
            raise RuntimeError(
                f"waiting: requests {orders} must wait, without a row, in the order of their"
                " submission"
            )
        if any(
            request.state != "suspended" or request.row is not None for request in self._suspended
        ):
            raise RuntimeError(
                "suspended: a request in this set still has a row, or is in another state"
            )
        for shard, pool in enumerate(self._pools):
            holders = [self._holder(row) for row in self._of_shard(shard)]
            prefixes = [prefix for holder in holders for prefix in holder.prefixes]
            pool.check([page for holder in holders for page in holder.pages], prefixes)
        for index, row in enumerate(self._rows):
            self._check_row(index, row)

    def _check_row(self, index: int, row: _RowHolder | None) -> None:
        """Raise RuntimeError if a row does not agree with its request or its line of the table."""
        if row is None:
            pages = []
        else:
            pages = [*(page for prefix in row.prefixes for page in prefix.pages), *row.pages]
        unused = self.table.shape[1] - len(pages)
        if self.table[index].tolist() != pages + [self._pool(index).total] * unused:
            raise RuntimeError(f"row {index}: the table does not have the pages {pages}")
        if row is None:
            return
        request = row.request
        if request.row != index or request.state not in ("reading", "running", "held"):
            raise RuntimeError(f"row {index}: its request is {request.state}, in row {request.row}")
        if request.idle_since is not None and request.state != "held":
            raise RuntimeError(
                f"row {index}: its request is {request.state}, but idle_since is set"
            )
        if len(request.tokens) > request.max_length or not 0 <= (row.read or 0) < max(
            len(request.tokens), 1
        ):
            raise RuntimeError(
                f"row {index}: {row.read or 0} of {len(request.tokens)} tokens are read, and the"
                f" limit is {request.max_length}"
            )

    # --- the state --------------------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        """The rows in which texts are generated."""
        return self._in_state("running")

    @property
    def reading(self) -> list[int]:
        """The rows whose prompts are being prefilled."""
        return self._in_state("reading")

    @property
    def held(self) -> list[int]:
        """The rows of clients after their prefill."""
        return self._in_state("held")

    def _in_state(self, state: str) -> list[int]:
        return [row for row in self._occupied if self._holder(row).request.state == state]

    @property
    def occupied(self) -> int:
        """The number of rows that have a request in any state."""
        return len(self._occupied)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a row."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """True if no request waits, is prefilled or runs."""
        return not self._waiting and len(self.held) == self.occupied

    @property
    def free_pages(self) -> int:
        """The number of pages that can be allocated now, in all shards."""
        return sum(pool.available for pool in self._pools)

    def request_of(self, row: int) -> Request | None:
        """Return the request that has a row, or None."""
        holder = self._rows[row]
        return None if holder is None else holder.request

    # --- pages ------------------------------------------------------------------------------------

    def _grow(self, index: int, tokens: int) -> bool:
        """Allocate pages for ``tokens`` tokens in a row, and preempt other requests if necessary.

        Returns:
            False if the row itself was preempted, as the newest.
        """
        row, pool = self._holder(index), self._pool(index)
        missing = self._missing(row, tokens)
        if missing <= 0:
            return True
        while (pages := pool.take(missing)) is None:
            rows = self._of_shard(self._shard(index))
            if self._take_client_row(rows):
                if self._rows[index] is not row:  # it was this row
                    return False
                continue
            victim = self._victim(index, rows)
            self._remove(self._holder(victim).request)
            if victim == index:
                return False
        row.pages += pages
        self._fill(index)
        return True

    def _missing(self, row: _RowHolder, tokens: int) -> int:
        """Return how many more pages ``tokens`` tokens need; not positive if there are enough."""
        present = len(row.prefixes) * (self._chunk // self._page) + len(row.pages)
        return -(-tokens // self._page) - present

    def _victim(self, index: int, rows: Sequence[int]) -> int:
        """Return which of ``rows`` loses its pages for row ``index``, one of them: the newest."""
        of_clients = set(rows) & set(self.held)
        if index not in of_clients and len(of_clients) == len(rows) - 1 and of_clients:
            # All other rows are clients', who may stay inactive for long. If this row, the only one
            # that can finish by itself, were preempted, nothing would advance.
            rows = list(of_clients)
        return max(rows, key=lambda row: self._holder(row).request.order)

    def _take_client_row(self, rows: Sequence[int], is_idle_first: bool = False) -> bool:
        """Take the row of an inactive client among ``rows``, and return False if there is none.

        It is the client that has been away for the longest; or, if none is away, the one that has
        been idle for the longest. With ``is_idle_first``, idle clients come before those away.
        """
        requests = [self._holder(row).request for row in rows]
        away = [(request.away, request) for request in requests if request.away is not None]
        idle = [
            (request.idle_since, request)
            for request in requests
            if request.idle_since is not None and self.is_idle(request)
        ]
        if away and not (is_idle_first and idle):
            self._remove(min(away, key=lambda pair: pair[0])[1])
        elif idle:
            self._suspend(min(idle, key=lambda pair: pair[0])[1])
        return bool(away or idle)

    def _suspend(self, request: Request) -> None:
        """Take the row of an idle client's request, until the client's next draft."""
        self._leave(request)
        request.state = "suspended"
        self._suspended.add(request)
        self.suspensions += 1

    def _remove(self, request: Request) -> None:
        """Drop a request that is held or whose client is away; preempt any other."""
        if request.state != "held" and request.away is None:
            self._preempt(request)
            return
        self._leave(request)
        request.state = "dropped"
        self.dropped.append(request)

    def _preempt(self, request: Request) -> None:
        """Take the row of a ``request``, and put it back into the queue in its original order."""
        assert request.row is not None
        # A request without pages loses no work, and does not count as preempted. It loses its row
        # so that it does not pass an older request that was preempted.
        if self._holder(request.row).read is not None:
            request.preemptions += 1
            self.preemptions += 1
        self._leave(request)
        request.state = "waiting"
        insort(self._waiting, request, key=lambda queued: queued.order)

    def _leave(self, request: Request) -> None:
        """Free the row and the pages of a request."""
        index = request.row
        assert index is not None
        row, pool = self._holder(index), self._pool(index)
        # The last chunk first. It is then the least recently used one, and is evicted before the
        # chunks above it, without which it is of no use.
        for prefix in row.prefixes[::-1]:
            pool.let_go(prefix)
        pool.give_back(row.pages)
        # That page does not exist, so later calls write nothing for the row. The call that the
        # device is at may still write to the old pages, but it ends before any call that has a
        # table in which they are another row's.
        self.table[index] = pool.total
        self._rows[index] = None
        request.row = request.idle_since = None

    def _fill(self, index: int) -> None:
        """Write the pages of a row to its line of the table."""
        row = self._holder(index)
        pages = [page for prefix in row.prefixes for page in prefix.pages] + row.pages
        self.table[index, : len(pages)] = pages

    @property
    def _occupied(self) -> list[int]:
        return [index for index, row in enumerate(self._rows) if row is not None]

    def _holder(self, index: int) -> _RowHolder:
        row = self._rows[index]
        assert row is not None
        return row

    def _of_shard(self, shard: int) -> list[int]:
        """Return the rows of a ``shard`` that have a request."""
        return [row for row in self._occupied if self._shard(row) == shard]

    def _shard(self, row: int) -> int:
        return row * len(self._pools) // len(self._rows)

    def _pool(self, row: int) -> PagePool:
        return self._pools[self._shard(row)]
