"""The scheduler of continuous batching: which requests have rows and pages. Plain Python.

The scheduler computes nothing. It decides which chunks to prefill and how far rows may grow; the
engine does that on the device and reports the results.

**Rows.** Waiting requests get rows in the order of their `Request.rank`: those with the lowest
priority number first, and among equals in the order of their submission. Others pass only those
that wait for a program to be compiled, and those of clients whose owner has all its rows. A request
that has waited for ``urgent_after`` decode calls goes before all numbers, until it ends.

**Preemption.** If a row needs pages and its shard has none free, prefixes that no row uses are
evicted, and then the rows of inactive clients are taken. If that is not enough, the request of the
shard with the last rank is preempted: of those with the highest number, the newest. It loses its
row and pages, but no text: it waits, and is prefilled again with its output so far as part of its
prompt. Without clients, the request with the first rank of a shard always finishes: it is preempted
last, and `Scheduler.submit` refuses a request that needs more pages than there are.

**Chunked prefill.** The prompts in rows take turns, one chunk at a time. The prompt with the fewest
chunks left comes first, so a short prompt does not wait for a long one. After
`MAX_CHUNKS_BEFORE_OLDEST` chunks of others it is the turn of the oldest prompt, so none waits for
ever.

**Clients.** A client drafts on another machine and holds its row: after the prefill its text grows
only when the client sends a draft. Such a row may be lost in two ways.

- It is *dropped* for good if the client is disconnected ("away") and another request needs the row
  or pages. The client that has been away for the longest goes first. A connected client loses its
  row only for pages that a row of its shard needs (perhaps its own), and only in two cases: its
  request is the newest of the shard; or all rows of the shard are held by clients, except the row
  that needs pages. In the second case the newest of the clients' requests is dropped, because
  clients may stay inactive for long. The client has to open a row again.
- It is *suspended* if the client is idle, that is, could draft but has not for ``idle_seconds``,
  and another request needs the row or pages. The client's next draft puts its request at the end of
  the queue. When the request has a row, its text is prefilled again, and no waiting request takes
  the row before the draft is verified, unless the client disconnects. So, as long as there are
  pages, a client that gets a row has at least one draft verified. The queue moves whenever a text
  ends or a client becomes idle.

The clients of one owner have at most ``client_rows`` rows at a time. Their further requests wait,
and requests of others pass them.

**Rereading.** What decoding wrote is not shared. A text that has ended is read once more instead,
along the chunks of a prompt, and its chunks become prefixes. That happens only while no request
waits, is prefilled or runs, and only with pages that are free: no prefix is evicted for it, and no
request loses a row or pages. No row or page is held between two such chunks.
"""

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from specjax.errors import InputError
from specjax.serving.ended_texts import EndedText, EndedTexts
from specjax.serving.pages import NO_TENANT, PagePool, Prefix, Tenant, chunk_key

MAX_CHUNKS_BEFORE_OLDEST = 3
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
        away: a number that is larger for clients that were disconnected later; None: the client is
            connected.
        idle_since: since when the client could draft and has not, by the scheduler's clock; None:
            it cannot draft now, or it has drafted.
        needs: the programs that it needs compiled, see `Scheduler.hold_back`; None: only those that
            every request needs.
        tenant: whose request it is. Only prompts of the same tenant share prefixes.
        priority: its number; requests with lower numbers go first.
        waits_since: the number of decode calls that had been made when it began to wait.
        is_urgent: whether it has waited so long that it goes before all numbers.
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
    tenant: Tenant = NO_TENANT
    priority: int = 0
    waits_since: int = 0
    is_urgent: bool = False

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The rank among all requests: the smallest gets a row first, and is preempted last."""
        return not self.is_urgent, 0 if self.is_urgent else self.priority, self.order

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
        is_last: whether this is the prompt's last chunk. It ends before the prompt's last token,
            which the first decoding step reads.
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


@dataclass(frozen=True, eq=False)
class RereadChunk(PrefillChunk):
    """A chunk of an ended text, to read once more in a row that is free.

    Its ``request`` stands for the text alone: it is in no queue and has no row. The chunk is full
    and never the last one, so no text is decoded after it.

    Attributes:
        pages: the pages of the text up to the chunk's end, in order. They are not in the
            scheduler's table.
        text: the ended text.
        prefixes: the prefixes before the chunk.
    """

    pages: tuple[int, ...]
    text: EndedText
    prefixes: tuple[Prefix, ...]

    @property
    def new_pages(self) -> tuple[int, ...]:
        """The pages of the chunk itself."""
        return self.pages[sum(len(prefix.pages) for prefix in self.prefixes) :]


@dataclass
class _RowContents:
    """The contents of a row that is in use.

    Attributes:
        request: the request that has the row.
        prefilled: the number of tokens that are prefilled, or whose prefill is queued on the
            device; None: the first chunk was not scheduled yet.
        prefixes: the prefixes that it shares.
        pages: the pages after those, which belong to this row alone.
    """

    request: Request
    prefilled: int | None = None
    prefixes: list[Prefix] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    @property
    def all_pages(self) -> list[int]:
        """The pages of the row's text, in order."""
        return [*(page for prefix in self.prefixes for page in prefix.pages), *self.pages]


class Scheduler:
    """The assignment of rows and pages to requests; the module's docstring has its rules.

    It is not thread-safe: the engine calls it with its lock.

    Attributes:
        table: ``[rows, n]`` int32, the page tables of all rows, as
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
        urgent_after: int = 256,
        reread: bool = True,
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
            urgent_after: the number of decode calls after which a waiting request goes before all
                priority numbers.
            reread: whether texts that have ended are stored, for `next_rereads`.
            clock: returns the time in seconds.
        """
        self._page, self._chunk, self._capacity = page, chunk, capacity
        self._widths = (*sorted(last_widths), chunk)
        self._max_waiting = max_waiting
        self._prefix_states = prefix_states
        self._pools = [PagePool(pages, prefix_states) for _ in range(shards)]
        self._rows: list[_RowContents | None] = [None] * rows
        self._max_rows, self._held_back = rows, frozenset[str]()
        self._waiting: list[Request] = []
        self._submitted = 0
        # Per shard, the chunks of newer prompts since the last chunk of the oldest one.
        self._chunks_since_oldest = [0] * shards
        self._last_ahead = page  # the argument of the newest call of `reserve`
        self._away_changes = 0  # how often a client was disconnected or connected again
        self._client_rows, self._idle_seconds, self._clock = client_rows, idle_seconds, clock
        self._urgent_after, self._calls = urgent_after, 0
        # Texts of more tokens than all pages hold could not be read once more anyway.
        self._reread, self._ended = reread, EndedTexts(most_tokens=shards * pages * page)
        # The chunks that are being read once more, at most one per shard.
        self._rereads: list[RereadChunk] = []
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
        tenant: Tenant = NO_TENANT,
        priority: int = 0,
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
            tenant: whose request it is, see `Request.tenant`.
            priority: the request's number, see `Request.priority`.

        Raises:
            InputError: The request can never be served. The message says why.
            QueueFullError: Too many requests wait.
        """
        length = len(tokens) if prompt_length is None else prompt_length
        if not tokens or max_new_tokens < 0:
            raise InputError(
                f"prompt of {len(tokens)} tokens, max_new_tokens={max_new_tokens}: the prompt must"
                " have at least 1 token, and max_new_tokens must be at least 0"
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
        in_use = sum(
            contents is not None and not self._may_lose_row(contents.request)
            for contents in self._rows
        )
        free_rows = max(0, self._max_rows - in_use)
        if (
            self._max_waiting is not None
            and (queue_length := self._queue_length()) >= self._max_waiting + free_rows
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
            tenant=tenant,
            priority=priority,
            waits_since=self._calls,
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
            self._free_row(request)
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
            self._away_changes += 1
            request.away = self._away_changes if is_away else None

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
            request.waits_since = self._calls
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
        requests = [self._contents(row).request for row in self.held]
        starts = [request.idle_since for request in requests if request.idle_since is not None]
        # The clients that were not idle yet when rows were last given out. If one has become idle
        # since, the result is 0, because nothing else would wake the engine's thread.
        pending = [start for start in starts if self._scheduled_at - start < self._idle_seconds]
        return max(0.0, min(pending) + self._idle_seconds - self._clock()) if pending else None

    def _next_order(self) -> int:
        self._submitted += 1
        return self._submitted - 1

    def _queue_length(self) -> int:
        """Return the length of the queue, to compare with ``max_waiting``.

        At most ``client_rows`` waiting requests of one owner count, so that one owner cannot fill
        the queue for others.
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

        Free rows are given to waiting requests first. Chunks begin at multiples of ``chunk``. So a
        prompt is cut into the same chunks with and without a shared prefix, and rounding is the
        same. With several shards, all chunks are computed with the width of the widest.

        Args:
            budget: the largest number of tokens to compute per chunk; None: no limit.
        """
        self._give_rows()
        chunks = [self._next_chunk(shard, budget) for shard in range(len(self._pools))]
        return [chunk for chunk in chunks if chunk is not None]

    def was_read(self, chunk: PrefillChunk, prefix_state: Any) -> None:
        """Note that a chunk was queued on the device, and cache it as a prefix if it is full.

        The device makes calls in order, so later calls may use the pages although the chunk may not
        be computed yet.

        Args:
            chunk: the chunk.
            prefix_state: the prefix state at its end.
        """
        contents = self._rows[chunk.row]
        # The request may have been cancelled meanwhile, and the row may have another one.
        if contents is None or contents.request is not chunk.request:
            return
        contents.prefilled = end = chunk.start + chunk.count
        if chunk.count == self._chunk:
            above = contents.prefixes[-1] if contents.prefixes else None
            key = chunk_key(chunk.request.tokens, chunk.start, end, chunk.request.tenant)
            pages_per_chunk = self._chunk // self._page
            pages = tuple(contents.pages[:pages_per_chunk])
            prefix = self._pool(chunk.row).register(above, key, pages, prefix_state)
            contents.prefixes.append(prefix)
            del contents.pages[:pages_per_chunk]
            # The pages change if another row has cached the same chunk meanwhile.
            self._write_table_row(chunk.row)
        if chunk.is_last and chunk.request.is_client:
            chunk.request.state = "held"
        elif chunk.is_last and chunk.request.max_new_tokens:
            chunk.request.state = "running"
        elif chunk.is_last:
            self._free_row(chunk.request)
            chunk.request.state = "done"

    def next_rereads(self) -> list[RereadChunk]:
        """Return the chunks of ended texts to read once more now, at most one per shard.

        There are none unless the scheduler is idle. `was_reread` must follow before the next call
        that gives rows out. A text is dropped once all of its full chunks are prefixes, or if its
        shard has too few free pages, or has evicted what was read once more.
        """
        if not self.idle:
            return []
        chunks = (self._next_reread(shard) for shard in range(len(self._pools)))
        self._rereads = [chunk for chunk in chunks if chunk is not None]
        return list(self._rereads)

    def was_reread(self, chunk: RereadChunk, prefix_state: Any) -> None:
        """Note that such a chunk was queued on the device, and make it a prefix.

        The arguments are those of `was_read`.
        """
        self._rereads.remove(chunk)
        pool, text, prefixes = self._pools[chunk.text.shard], chunk.text, list(chunk.prefixes)
        above = prefixes[-1] if prefixes else None
        # The next turn continues at the end of this text, or where its own tokens begin to differ.
        # That is rarely in between, so a text takes the place of one large prefix state.
        if above is not None and above is text.newest and above.holders == 1:
            pool.drop_prefix_state(above)
        end = chunk.start + chunk.count
        key = chunk_key(text.tokens, chunk.start, end, text.tenant)
        text.read = end
        text.newest = pool.register(above, key, chunk.new_pages, prefix_state)
        for prefix in [*prefixes, text.newest][::-1]:
            pool.let_go(prefix)

    def _next_reread(self, shard: int) -> RereadChunk | None:
        """Return the next chunk of an ended text of a ``shard``, and allocate its pages."""
        pool, size = self._pools[shard], self._chunk
        rows = (row for row, contents in enumerate(self._rows) if contents is None)
        row = next((row for row in rows if self._shard(row) == shard), None)
        while row is not None and (text := self._ended.first(shard)) is not None:
            length = len(text.tokens)
            chain = pool.find(text.tokens, size, length - 1, text.tenant)
            start = len(chain) * size
            # No chunk twice: its pages were needed meanwhile, and may be again.
            goes_on = text.read <= start and start + size < length
            pages = pool.take_free(size // self._page) if goes_on else None
            if pages is None:
                self._ended.remove(text)
                continue
            pool.go_on_from(chain)
            return RereadChunk(
                request=Request(-1, list(text.tokens), length, 0, "reading", tenant=text.tenant),
                row=row,
                start=start,
                width=size,
                count=size,
                is_first=True,
                is_last=False,
                prefix_state=chain[-1].prefix_state if chain else None,
                pages=(*(page for prefix in chain for page in prefix.pages), *pages),
                text=text,
                prefixes=tuple(chain),
            )
        return None

    def _note_end(self, request: Request, length: int) -> None:
        """Store the first ``length`` tokens of a text that ends, if some chunk is no prefix yet."""
        if not self._reread or request.row is None:
            return
        if (length - 1) // self._chunk > len(self._contents(request.row).prefixes):
            tokens, shard = request.tokens[:length], self._shard(request.row)
            self._ended.add(EndedText(tokens, request.tenant, shard))

    def can_go_on(self) -> bool:
        """Give rows to waiting requests, and return whether any row can be prefilled or decoded."""
        self._give_rows()
        return any(self._contents(row).request.state != "held" for row in self._occupied)

    def _give_rows(self) -> None:
        """Give rows to waiting requests, each in the shard that will have the most pages left."""
        self._scheduled_at = self._clock()
        while request := self._next_waiting():
            if self._is_at_row_limit(request.owner):
                # Idle before away: a suspended client continues by itself, a dropped one must open
                # a row again.
                self._take_client_row(self._rows_of(request.owner), is_idle_first=True)
                continue
            free = [row for row, contents in enumerate(self._rows) if contents is None]
            # While wider programs are being compiled, some free rows cannot be used.
            free = free if self.occupied < self._max_rows else []
            if not free:
                if not self._take_client_row(self._occupied):
                    return
                continue
            # Among shards with equally many pages left, take the one with the fewest requests.
            shard = max(
                {self._shard(row) for row in free},
                key=lambda shard: (
                    self._pages_after_prefill(shard),
                    -len(self._of_shard(shard)),
                    -shard,
                ),
            )
            row = next(row for row in free if self._shard(row) == shard)
            # Leave pages for the next decode call of the rows in this shard. Otherwise they would
            # lack pages at once, and this request, as the newest, would be preempted.
            in_shard = [self._contents(used) for used in self._of_shard(shard)]
            missing = [
                self._missing(contents, self._entries_after_call(contents.request))
                for contents in in_shard
            ]
            needed = self._pages_needed(request, shard) + sum(max(0, pages) for pages in missing)
            if in_shard and self._pools[shard].available < needed:
                if not self._take_client_row(self._of_shard(shard)):
                    return
                continue
            self._waiting.remove(request)
            request.state, request.row = "reading", row
            self._rows[row] = _RowContents(request)

    def _next_waiting(self) -> Request | None:
        """Return the first waiting request that is not held back and whose owner may have a row."""
        for request in self._waiting:
            request.is_urgent |= self._calls - request.waits_since >= self._urgent_after
        for request in sorted(self._waiting, key=lambda request: request.rank):
            if request.needs in self._held_back:
                continue
            rows = self._rows_of(request.owner) if self._is_at_row_limit(request.owner) else []
            if not rows or any(self._may_lose_row(self._contents(row).request) for row in rows):
                return request
        return None

    def _rows_of(self, owner: str) -> list[int]:
        """Return the rows of the clients of an ``owner``."""
        return [
            row for row in self._occupied if owner and self._contents(row).request.owner == owner
        ]

    def _is_at_row_limit(self, owner: str) -> bool:
        """Return whether the clients of an ``owner`` have as many rows as they may."""
        return (
            bool(owner)
            and self._client_rows is not None
            and len(self._rows_of(owner)) >= self._client_rows
        )

    def _may_lose_row(self, request: Request) -> bool:
        """Return whether a client's row may be taken for a request that waits."""
        return request.away is not None or self.is_idle(request)

    def _entries_after_call(self, request: Request) -> int:
        """Return the largest number of KV entries of a text after a decode call like the last one.

        Before the first call of `reserve`, a page of new tokens is assumed.
        """
        return min(len(request.tokens) - 1 + self._last_ahead, request.max_length - 1)

    def _pages_needed(self, request: Request, shard: int) -> int:
        """Return how many of the available pages a ``request`` would take.

        Cached prefixes that a row uses cost nothing. Those that no row uses count, because
        `PagePool.available` has their pages.
        """
        chain = self._prefixes_of(request, shard)
        shared = sum(len(prefix.pages) for prefix in chain if prefix.holders)
        pages = len(request.tokens) // self._page + 1
        if any(self._contents(row).request.state == "held" for row in self._of_shard(shard)):
            # Clients may hold their pages for long. So a request starts only with pages for its
            # first decode call as well, because it might not get them later.
            pages = max(pages, -(-self._entries_after_call(request) // self._page))
        return pages - shared

    def _prefixes_of(self, request: Request, shard: int) -> list[Prefix]:
        """Return the cached prefixes that a ``request`` may share."""
        if request.shares is None:
            max_reused = len(request.tokens) - 1
        else:
            max_reused = min(request.shares, len(request.tokens) - 1)
        return self._pools[shard].find(request.tokens, self._chunk, max_reused, request.tenant)

    def _pages_after_prefill(self, shard: int) -> int:
        """Return the pages that a ``shard`` will have left when its prompts are prefilled."""
        in_shard = [self._contents(row) for row in self._of_shard(shard)]
        missing = [
            self._missing(contents, len(contents.request.tokens) - 1) for contents in in_shard
        ]
        return self._pools[shard].available - sum(max(0, pages) for pages in missing)

    def _next_chunk(self, shard: int, budget: int | None) -> PrefillChunk | None:
        """Return the next chunk to prefill in a ``shard``.

        None: no prompt is being prefilled, the chunk does not fit the budget, or its row was taken
        because there are too few pages.
        """
        reading = [
            row for row in self._of_shard(shard) if self._contents(row).request.state == "reading"
        ]
        if not reading:
            return None
        reading.sort(key=lambda row: self._contents(row).request.order)
        oldest = row = reading[0]  # `min` below also returns the oldest of several equals
        if self._chunks_since_oldest[shard] < MAX_CHUNKS_BEFORE_OLDEST:
            row = min(reading, key=self._chunks_remaining)
        contents = self._contents(row)
        request, to_read = contents.request, len(contents.request.tokens) - 1
        if is_first := contents.prefilled is None:
            chain = self._prefixes_of(request, shard)
            start = len(chain) * self._chunk
            if not request.preemptions:  # afterwards it may find prefixes that it has cached itself
                request.cached = start
        else:
            chain, start = contents.prefixes, contents.prefilled or 0
        count = min(to_read - start, self._chunk)
        width = next(width for width in self._widths if width >= count)
        # Nothing has changed so far, so the next turn begins with the same chunk.
        if budget is not None and width > budget:
            return None
        if is_first:
            self._pools[shard].go_on_from(chain)
            contents.prefixes, contents.prefilled = chain, start
            self._write_table_row(row)
        if not self._grow(row, start + count):
            return None
        prefix_state = chain[-1].prefix_state if is_first and chain else None
        if row == oldest:
            self._chunks_since_oldest[shard] = 0
        else:
            self._chunks_since_oldest[shard] += 1
        return PrefillChunk(
            request, row, start, width, count, is_first, start + count == to_read, prefix_state
        )

    def _chunks_remaining(self, row: int) -> int:
        """Return the number of chunks still to prefill in a row, at least 1: one may be empty."""
        contents = self._contents(row)
        start = contents.prefilled
        if start is None:
            start = len(self._prefixes_of(contents.request, self._shard(row))) * self._chunk
        return max(1, -(-(len(contents.request.tokens) - 1 - start) // self._chunk))

    # --- decoding ---------------------------------------------------------------------------------

    def reserve(self, ahead: int) -> list[Request]:
        """Allocate pages for ``ahead`` more tokens in each running row, within its maximal length.

        Returns:
            The requests that were preempted for that, oldest first.
        """
        self._last_ahead = ahead
        self._calls += 1
        before = {self._contents(row).request for row in self._occupied}
        # In the order of ranks: otherwise a row could get pages, and be preempted a moment later
        # for one with an earlier rank.
        for row in sorted(self.running, key=lambda row: self._contents(row).request.rank):
            contents = self._rows[row]
            if contents is None:  # it was preempted for an earlier one
                continue
            self._grow(row, self._entries_after_call(contents.request))
        return sorted(
            (request for request in before if request.state == "waiting"),
            key=lambda request: request.order,
        )

    def make_room(self, request: Request, ahead: int) -> bool:
        """Allocate pages for ``ahead`` more tokens in a held row, within its maximal length.

        Returns:
            False if the row was lost, because there are not enough pages.
        """
        assert request.row is not None
        return self._grow(request.row, min(len(request.tokens) - 1 + ahead, request.max_length - 1))

    def decoded(
        self, row: int, tokens: Sequence[int], done: bool, *, has_failed: bool = False
    ) -> None:
        """Append new ``tokens`` to the text of a row, and free the row if the text is ``done``.

        A text that ``has_failed`` is not read once more.
        """
        request = self._contents(row).request
        request.tokens.extend(tokens)
        if done:
            if not has_failed:
                self._note_end(request, len(request.tokens))
            self._free_row(request)
            request.state = "done"

    def cut(self, request: Request, length: int) -> None:
        """End a text after its first ``length`` tokens, because of a stop string.

        Like `cancel`, it does nothing if the request has ended.
        """
        self._note_end(request, length)
        self.cancel(request)

    def swap(self, order: Sequence[int]) -> None:
        """Reorder the rows as on the device: row i becomes the former row ``order[i]``.

        ``order`` must keep every row within its shard.
        """
        self._rows = [self._rows[row] for row in order]
        self.table = self.table[list(order)]
        for row in self._occupied:
            self._contents(row).request.row = row

    def clear(self) -> None:
        """Cancel all requests, and free all rows and pages.

        It works after any failure, because it makes new pools and does not use the old ones.
        """
        for request in [
            *self._waiting,
            *self._suspended,
            *(contents.request for contents in self._rows if contents is not None),
        ]:
            request.state, request.row = "cancelled", None
        self._waiting.clear()
        self._suspended.clear()
        self._ended.clear()
        self._rereads = []
        self._rows = [None] * len(self._rows)
        # New pools also free what the device has stored for prefixes: their prefix states.
        self._pools = [PagePool(pool.total, self._prefix_states) for pool in self._pools]
        self.table[:] = self._pools[0].total

    def check(self) -> None:
        """Check that requests, rows, pages and the table agree.

        Raises:
            RuntimeError: They do not agree. The message says what is wrong.
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
            in_shard = [self._contents(row) for row in self._of_shard(shard)]
            prefixes = [prefix for contents in in_shard for prefix in contents.prefixes]
            pages = [page for contents in in_shard for page in contents.pages]
            for chunk in [chunk for chunk in self._rereads if chunk.text.shard == shard]:
                prefixes += chunk.prefixes
                pages += chunk.new_pages
            pool.check(pages, prefixes)
        for row, contents in enumerate(self._rows):
            self._check_row(row, contents)

    def _check_row(self, row: int, contents: _RowContents | None) -> None:
        """Raise RuntimeError if a row does not agree with its request or its line of the table."""
        pages = [] if contents is None else contents.all_pages
        unused = self.table.shape[1] - len(pages)
        if self.table[row].tolist() != pages + [self._pool(row).total] * unused:
            raise RuntimeError(f"row {row}: the table does not have the pages {pages}")
        if contents is None:
            return
        request, prefilled = contents.request, contents.prefilled or 0
        if request.row != row or request.state not in ("reading", "running", "held"):
            raise RuntimeError(f"row {row}: its request is {request.state}, in row {request.row}")
        if request.idle_since is not None and request.state != "held":
            raise RuntimeError(f"row {row}: its request is {request.state}, but idle_since is set")
        length = len(request.tokens)
        if length > request.max_length or not 0 <= prefilled < max(length, 1):
            raise RuntimeError(
                f"row {row}: {prefilled} of {length} tokens are read, and the limit is"
                f" {request.max_length}"
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
        return [row for row in self._occupied if self._contents(row).request.state == state]

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
        """True if no request waits, is prefilled or runs, and no ended text is read once more."""
        return not self._waiting and len(self.held) == self.occupied and not self._rereads

    @property
    def has_ended_texts(self) -> bool:
        """True if an ended text is to be read once more, as far as pages are free."""
        return len(self._ended) > 0

    @property
    def free_pages(self) -> int:
        """The number of pages that can be allocated now, in all shards."""
        return sum(pool.available for pool in self._pools)

    def request_of(self, row: int) -> Request | None:
        """Return the request that has a row, or None."""
        contents = self._rows[row]
        return None if contents is None else contents.request

    # --- pages ------------------------------------------------------------------------------------

    def _grow(self, row: int, tokens: int) -> bool:
        """Allocate pages for ``tokens`` tokens in a row, and take other rows if necessary.

        The rows of inactive clients are taken first, and then that of `_victim`.

        Returns:
            False if the row itself was taken: its request was preempted, dropped or suspended.
        """
        contents, pool = self._contents(row), self._pool(row)
        missing = self._missing(contents, tokens)
        if missing <= 0:
            return True
        while (pages := pool.take(missing)) is None:
            rows = self._of_shard(self._shard(row))
            if self._take_client_row(rows):
                if self._rows[row] is not contents:  # it was this row
                    return False
                continue
            victim = self._victim(row, rows)
            self._remove(self._contents(victim).request)
            if victim == row:
                return False
        contents.pages += pages
        self._write_table_row(row)
        return True

    def _missing(self, contents: _RowContents, tokens: int) -> int:
        """Return how many more pages ``tokens`` tokens need; not positive if there are enough."""
        present = len(contents.prefixes) * (self._chunk // self._page) + len(contents.pages)
        return -(-tokens // self._page) - present

    def _victim(self, growing: int, rows: Sequence[int]) -> int:
        """Return the row to take so that the row ``growing`` gets pages.

        It is the one of ``rows`` with the last rank, which may be ``growing`` itself. There is one
        exception: the only row that no client holds is not taken for its own growth.
        """
        of_clients = set(rows) & set(self.held)
        # The row ``growing`` can finish by itself, but clients may stay inactive for long. If it
        # were preempted, nothing would advance. So the last of the clients' rows is taken.
        if growing not in of_clients and len(of_clients) == len(rows) - 1 and of_clients:
            rows = list(of_clients)
        return max(rows, key=lambda row: self._contents(row).request.rank)

    def _take_client_row(self, rows: Sequence[int], is_idle_first: bool = False) -> bool:
        """Take the row of an inactive client among ``rows``, and return False if there is none.

        It is the client that has been away for the longest; or, if none is away, the one that has
        been idle for the longest. With ``is_idle_first``, idle clients come before those away.
        """
        requests = [self._contents(row).request for row in rows]
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
        self._free_row(request)
        request.state = "suspended"
        self._suspended.add(request)
        self.suspensions += 1

    def _remove(self, request: Request) -> None:
        """Drop a request that is held or whose client is away; preempt any other."""
        if request.state != "held" and request.away is None:
            self._preempt(request)
            return
        self._free_row(request)
        request.state = "dropped"
        self.dropped.append(request)

    def _preempt(self, request: Request) -> None:
        """Take the row of a ``request``, and put it back into the queue in its original order."""
        assert request.row is not None
        # If no chunk was scheduled yet, no work is lost, and nothing is counted. The row is taken
        # all the same, so that the request does not start before an older one that was preempted.
        if self._contents(request.row).prefilled is not None:
            request.preemptions += 1
            self.preemptions += 1
        self._free_row(request)
        request.state, request.waits_since = "waiting", self._calls
        insort(self._waiting, request, key=lambda queued: queued.order)

    def _free_row(self, request: Request) -> None:
        """Free the row and the pages of a request."""
        row = request.row
        assert row is not None
        contents, pool = self._contents(row), self._pool(row)
        # The last chunk first, so that it counts as the least recently used one.
        for prefix in contents.prefixes[::-1]:
            pool.let_go(prefix)
        pool.give_back(contents.pages)
        # ``total`` is not the number of a page, so later calls write nothing for this row. The call
        # that is running now may still write to the old pages. That is safe, because calls run in
        # order: it ends before any call whose table gives these pages to another row.
        self.table[row] = pool.total
        self._rows[row] = None
        request.row = request.idle_since = None

    def _write_table_row(self, row: int) -> None:
        """Write the pages of a row to its line of the table."""
        pages = self._contents(row).all_pages
        self.table[row, : len(pages)] = pages

    @property
    def _occupied(self) -> list[int]:
        return [row for row, contents in enumerate(self._rows) if contents is not None]

    def _contents(self, row: int) -> _RowContents:
        contents = self._rows[row]
        assert contents is not None
        return contents

    def _of_shard(self, shard: int) -> list[int]:
        """Return the rows of a ``shard`` that have a request."""
        return [row for row in self._occupied if self._shard(row) == shard]

    def _shard(self, row: int) -> int:
        return row * len(self._pools) // len(self._rows)

    def _pool(self, row: int) -> PagePool:
        return self._pools[self._shard(row)]
