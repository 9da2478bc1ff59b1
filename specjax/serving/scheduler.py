"""Who has a row, and which pages: the decisions of continuous batching, in plain Python.

The scheduler computes nothing. It says what is to be read and how far rows may go, the engine does it on the device, and tells
what came of it. First come, first served: requests have rows in the order in which they came, but for those that wait for a
program to be compiled, which others pass. Where pages run out the newest request gives way. It loses no text: it waits, and is
read again, with what it has generated so far as a part of its prompt.

The prompts of those who have rows take turns, a piece at a time. The one with the fewest pieces left comes first, so that a
short prompt does not wait for a long one. No prompt waits for ever: after `MAX_PASSED` pieces of others it is the oldest one's
turn.

The oldest request always comes to its end: it is the last to give way, and `Scheduler.submit` refuses what would need more
pages than there are.

A client, whose drafts come from elsewhere, holds its row: once its prompt is read, the client says when the text goes on, and
nothing is decoded. A row that is held may be dropped; then the client must ask anew. Rows of clients that are away go first,
longest away first, also for whoever waits. Those of other clients go where a text that has a row needs pages: as any that is
newer, and where all other texts are clients' (nobody knows when they go on).

A client that could draft and has not done so for `Scheduler`'s ``idle_seconds`` is idle. Where others need its row or its
pages it is suspended: it loses both, and keeps its text. With its next draft it joins the end of the line. When it has a row
again its text is read, and who only waits does not get that row before the draft has its verdict. So each turn brings a client
on, and the line moves whenever a text ends or a client becomes idle.

Clients of one owner have at most ``client_rows`` rows at a time. Their other requests wait, and those of others pass them.
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
"""Pieces of newer prompts that may be read, one after another, before one of the oldest prompt is."""


class QueueFullError(InputError):
    """As many requests wait as may."""


@dataclass(eq=False)
class Request:
    """A request, from its submission to its end.

    Attributes:
        order: its place in the order of submissions; of a client that comes back after it was suspended, that of its return.
        tokens: prompt and what was generated so far.
        prompt_length: tokens of the prompt.
        max_new_tokens: new tokens.
        state: where it is. A client's is held once its prompt is read. Then it may be suspended, and comes back with the
            client's next draft; or dropped, and does not come back.
        row: its row, while it has one.
        preemptions: how often it had to give way after its prompt was begun.
        shares: most tokens that need not be computed, where another prompt that begins alike was read; None: any number.
        cached: tokens that another prompt had read when its own was begun.
        is_client: whether it is a client's.
        owner: whose it is; of one owner's clients only so many have rows at a time. Empty: they are not counted.
        away: since when the client is away, by the scheduler's count of departures; None: it is not.
        idle_since: since when its client could draft and has not, by the scheduler's clock; None: it could not, or has drafted.
        needs: what it waits for beside a row, see `Scheduler.hold_back`; None: nothing.
        salt: only prompts with the same one share what was read of them.
    """

    order: int
    tokens: list[int]
    prompt_length: int
    max_new_tokens: int
    state: Literal["waiting", "reading", "running", "held", "suspended", "done", "cancelled", "dropped"] = "waiting"
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
        """Most tokens of prompt and output."""
        return self.prompt_length + self.max_new_tokens


@dataclass(frozen=True)
class PrefillChunk:
    """A piece of a prompt that is to be read now.

    Attributes:
        request: whose.
        row: its row.
        start: how many tokens are committed before it. Their pages are in the table.
        width: tokens to compute.
        count: of those, how many count: from ``start`` on.
        is_first: the row is new on the device, and begins with ``start`` tokens that another one has read.
        is_last: afterwards the prompt is read, but for its last token, with which decoding begins.
        prefix_state: where ``is_first``, what `Scheduler.was_read` was told at ``start``; None at 0.
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
    """What a request that has a row holds.

    Attributes:
        request: whose row it is.
        read: tokens of its prompt that are committed; None: its first piece has not been given out.
        prefixes: chunks that it shares.
        pages: its own, after those.
    """

    request: Request
    read: int | None = None
    prefixes: list[Prefix] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Scheduler:
    """Rows and pages for requests. See the module. Not for several threads at once.

    Attributes:
        table: ``[rows, n]`` int32 the pages of each row, as `specjax.models.cache.PagedCache` has them.
        preemptions: of all requests.
        suspensions: how often an idle client has lost its row to others.
        dropped: clients' requests that have lost their rows, for whoever is to tell them.

    Examples:
        >>> from specjax.serving.scheduler import Scheduler
        >>> scheduler = Scheduler(rows=2, pages=8, page=4, chunk=4, capacity=16)
        >>> request = scheduler.submit([5, 6, 7, 8, 9, 5], max_new_tokens=3)
        >>> for _ in range(2):
        ...     (read,) = scheduler.next_reads()
        ...     print(read.start, read.count, read.is_last)
        ...     scheduler.was_read(read, prefix_state=None)
        0 4 False
        4 1 True
        >>> scheduler.reserve(4)  # nobody has to give way
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
        """All rows and pages free.

        Args:
            rows: texts at a time, a multiple of ``shards``.
            pages: of each shard.
            page: tokens of a page.
            chunk: tokens of a prompt that are read at a time, a multiple of ``page``.
            capacity: most tokens of a text, prompt and output.
            last_widths: numbers of tokens, below ``chunk``, that the last piece of a prompt may be computed as.
            shards: equal groups of rows, with a pool of pages each.
            max_waiting: most requests that wait, beside as many as rows are free; None: any number.
            prefix_states: from the ends of how many chunks of prompts, in each shard, other texts may go on; None: all.
            client_rows: most rows that the clients of one owner have at a time; None: any number.
            idle_seconds: after which a client that sends no draft is idle.
            clock: seconds.
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
        self._passed = [0] * shards  # pieces of others that were read since the last one of the oldest prompt
        self._ahead = page  # what `reserve` was asked for last
        self._departures = 0
        self._client_rows, self._idle_seconds, self._clock = client_rows, idle_seconds, clock
        self._suspended: set[Request] = set()
        self._looked_at = clock()  # when rows were given out last
        self.preemptions = self.suspensions = 0
        self.dropped: list[Request] = []
        self.table = np.full((rows, -(-capacity // page)), pages, np.int32)

    # --- requests ------------------------------------------------------------------------------------------------------

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
        """A request for at most ``max_new_tokens`` tokens after a prompt; with 0 the prompt is read, and that is all.

        Args:
            tokens: the prompt, and what of the text there is already.
            max_new_tokens: new tokens, those among them.
            prompt_length: tokens of the prompt; None: all of them.
            shares: as `Request.shares`: with 0, all is computed, whoever has read a part of it before.
            is_client: its row is held when the prompt is read.
            owner: as `Request.owner`.
            needs: as `Request.needs`.
            salt: as `Request.salt`.

        Raises:
            InputError: it can never be served; says why.
            QueueFullError: too many wait.
        """
        length = len(tokens) if prompt_length is None else prompt_length
        if not tokens or max_new_tokens < 0:
            raise InputError(
                f"prompt of {len(tokens)} tokens, max_new_tokens={max_new_tokens}: must be at least 1, and at least 0"
            )
        if length + max_new_tokens > self._capacity:
            raise InputError(
                f"prompt ({length} tokens) plus max_new_tokens={max_new_tokens} make {length + max_new_tokens} tokens, and "
                f"there is room for {self._capacity}: shorten the prompt, or give a larger capacity"
            )
        needed, total = -(-(length + max_new_tokens - 1) // self._page), self._pools[0].total
        if needed > total:
            raise InputError(
                f"prompt ({length} tokens) plus max_new_tokens={max_new_tokens} need {needed} pages of {self._page} tokens, "
                f"and there are {total}: shorten the prompt, or give more pages"
            )
        taken = sum(row is not None and not self._may_lose_row(row.request) for row in self._rows)
        free = max(0, self._max_rows - taken)
        if self._max_waiting is not None and (length_of_line := self._length_of_line()) >= self._max_waiting + free:
            raise QueueFullError(f"{length_of_line} requests wait, and no more may (max_waiting): try again later")
        request = Request(self._next_order(), list(tokens), length, max_new_tokens, shares=shares, needs=needs, salt=salt)
        request.is_client, request.owner = is_client, owner
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End it, wherever it is; nothing happens where it has ended."""
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
        """Give out at most so many rows at a time, from now on. Texts that have a row keep it."""
        self._max_rows = max_rows

    def hold_back(self, needs: Collection[str]) -> None:
        """Give no row to requests that need one of these, until this is called again. The others pass them."""
        self._held_back = frozenset(needs)

    def set_away(self, request: Request, is_away: bool) -> None:
        """A client is away, or here again."""
        if is_away != (request.away is not None):
            self._departures += 1
            request.away = self._departures if is_away else None

    def may_draft(self, request: Request) -> None:
        """A client whose row is held has all that it needs for its next draft: from now on it may become idle."""
        if request.state == "held":
            request.idle_since = self._clock()

    def has_drafted(self, request: Request) -> None:
        """A client has sent a draft: it is not idle. If it was suspended it waits for a row, behind those who wait already."""
        request.idle_since = None
        if request.state == "suspended":
            self._suspended.remove(request)
            request.state, request.order = "waiting", self._next_order()
            self._waiting.append(request)

    def is_idle(self, request: Request) -> bool:
        """Whether a client has a row, and has sent no draft for so long that others may have the row."""
        if request.state != "held" or request.idle_since is None:
            return False
        return self._clock() - request.idle_since >= self._idle_seconds

    def seconds_until_idle(self) -> float | None:
        """Seconds until a client becomes idle whose row somebody may have who waits; None: nobody waits, or no client may."""
        if not self._waiting:
            return None
        requests = [self._holder(row).request for row in self.held]
        starts = [request.idle_since for request in requests if request.idle_since is not None]
        # One that has become idle since rows were given out last is to be looked at once more: nobody else would wake us.
        not_seen_idle = [start for start in starts if self._looked_at - start < self._idle_seconds]
        return max(0.0, min(not_seen_idle) + self._idle_seconds - self._clock()) if not_seen_idle else None

    def _next_order(self) -> int:
        self._submitted += 1
        return self._submitted - 1

    def _length_of_line(self) -> int:
        """How many wait. Of one owner's clients only so many count as it may have rows, lest it fills the line for all."""
        if self._client_rows is None:
            return len(self._waiting)
        of_owner = Counter(request.owner for request in self._waiting if request.owner)
        return len(self._waiting) - sum(max(0, count - self._client_rows) for count in of_owner.values())

    # --- prompts -------------------------------------------------------------------------------------------------------

    def next_reads(self, budget: int | None = None) -> list[PrefillChunk]:
        """Return what is to be read of prompts now: at most one piece a shard, of at most ``budget`` tokens to compute.

        Free rows are given to those who wait first. The module says whose turn it is. Pieces begin at multiples of ``chunk``,
        whatever other prompts share: so a text is computed in the same way, whoever was there before. (With shards, a last
        piece is as wide as the widest that is read beside it.)
        """
        self._give_rows()
        reads = [self._next_read(shard, budget) for shard in range(len(self._pools))]
        return [read for read in reads if read is not None]

    def was_read(self, read: PrefillChunk, prefix_state: Any) -> None:
        """Note that the engine has read it. ``prefix_state``, what is known now beside its pages, is kept with the chunk."""
        row = self._rows[read.row]
        if row is None or row.request is not read.request:  # cancelled meanwhile
            return
        row.read = read.start + read.count
        if read.count == self._chunk:
            above = row.prefixes[-1] if row.prefixes else None
            key = chunk_key(read.request.tokens, read.start, row.read, read.request.salt)
            count = self._chunk // self._page
            row.prefixes.append(self._pool(read.row).register(above, key, tuple(row.pages[:count]), prefix_state))
            del row.pages[:count]
            self._fill(read.row)  # another prompt may have read the same chunk meanwhile, into pages of its own
        if read.is_last and read.request.is_client:
            read.request.state = "held"
        elif read.is_last and read.request.max_new_tokens:
            read.request.state = "running"
        elif read.is_last:
            self._leave(read.request)
            read.request.state = "done"

    def can_go_on(self) -> bool:
        """Give rows to those who wait. Whether there is anything to read or to decode: otherwise clients hold all that others
        could have."""
        self._give_rows()
        return any(self._holder(row).request.state != "held" for row in self._occupied)

    def _give_rows(self) -> None:
        """Free rows to the head of the line, in the shard that will have the most pages left."""
        self._looked_at = self._clock()
        while request := self._head_of_line():
            if self._has_all_its_rows(request.owner):  # an idle client loses nothing, one that is away its session
                self._make_way(self._rows_of(request.owner), is_idle_first=True)
                continue
            free = [row for row, holder in enumerate(self._rows) if holder is None]
            free = free if self.occupied < self._max_rows else []
            if not free:
                if not self._make_way(self._occupied):
                    return
                continue
            shards = {self._shard(row) for row in free}
            shard = max(shards, key=lambda shard: (self._left(shard), -len(self._of_shard(shard)), -shard))
            row = next(row for row in free if self._shard(row) == shard)
            # Those who have a row go on as well. Who came when there is too little for all would have to give way at once.
            others = [self._holder(other) for other in self._of_shard(shard)]
            theirs = sum(max(0, self._missing(other, self._goal(other.request))) for other in others)
            if others and self._pools[shard].available < self._wanted(request, shard) + theirs:
                if not self._make_way(self._of_shard(shard)):
                    return
                continue
            self._waiting.remove(request)
            request.state, request.row = "reading", row
            self._rows[row] = _RowHolder(request)

    def _head_of_line(self) -> Request | None:
        """Who is to have the next row: the first of those that need nothing else, and whose owner may have it."""
        for request in self._waiting:
            if request.needs in self._held_back:
                continue
            rows = self._rows_of(request.owner) if self._has_all_its_rows(request.owner) else []
            if not rows or any(self._may_lose_row(self._holder(row).request) for row in rows):
                return request
        return None

    def _rows_of(self, owner: str) -> list[int]:
        """The rows that the clients of an ``owner`` have."""
        return [row for row in self._occupied if owner and self._holder(row).request.owner == owner]

    def _has_all_its_rows(self, owner: str) -> bool:
        """Whether the clients of an ``owner`` have as many rows as they may."""
        return bool(owner) and self._client_rows is not None and len(self._rows_of(owner)) >= self._client_rows

    def _may_lose_row(self, request: Request) -> bool:
        """Whether a client's row may be given to who only waits."""
        return request.away is not None or self.is_idle(request)

    def _goal(self, request: Request) -> int:
        """Entries that a text may come to in the next decode call, as far as it may grow at all."""
        return min(len(request.tokens) - 1 + self._ahead, request.max_length - 1)

    def _wanted(self, request: Request, shard: int) -> int:
        """Pages that a ``request`` would need beside those that others hold for it already."""
        chain = self._prefixes_of(request, shard)
        shared = sum(len(prefix.pages) for prefix in chain if prefix.holders)
        pages = len(request.tokens) // self._page + 1
        if any(self._holder(row).request.state == "held" for row in self._of_shard(shard)):
            # For those who hold rows nobody knows when they let go: it is not to begin what it could not go on with.
            pages = max(pages, -(-self._goal(request) // self._page))
        return pages - shared

    def _prefixes_of(self, request: Request, shard: int) -> list[Prefix]:
        """What others have read of its prompt, and it may take."""
        max_reused = len(request.tokens) - 1 if request.shares is None else min(request.shares, len(request.tokens) - 1)
        return self._pools[shard].find(request.tokens, self._chunk, max_reused, request.salt)

    def _left(self, shard: int) -> int:
        """Pages that will be left in a ``shard`` when the prompts there are read."""
        holders = [self._holder(row) for row in self._of_shard(shard)]
        missing = [self._missing(holder, len(holder.request.tokens) - 1) for holder in holders]
        return self._pools[shard].available - sum(max(0, pages) for pages in missing)

    def _next_read(self, shard: int, budget: int | None) -> PrefillChunk | None:
        """Return the next piece of the prompt of a ``shard`` whose turn it is."""
        reading = [row for row in self._of_shard(shard) if self._holder(row).request.state == "reading"]
        if not reading:
            return None
        reading.sort(key=lambda row: self._holder(row).request.order)
        oldest = index = reading[0]  # and the first of several with as few pieces left
        if self._passed[shard] < MAX_PASSED:
            index = min(reading, key=self._pieces_left)
        row = self._holder(index)
        request, to_read = row.request, len(row.request.tokens) - 1
        if is_first := row.read is None:
            chain = self._prefixes_of(request, shard)
            start = len(chain) * self._chunk
            if not request.preemptions:  # later it may find what it has read itself
                request.cached = start
        else:
            chain, start = row.prefixes, row.read or 0
        count = min(to_read - start, self._chunk)
        width = next(width for width in self._widths if width >= count)
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
        return PrefillChunk(request, index, start, width, count, is_first, start + count == to_read, prefix_state)

    def _pieces_left(self, index: int) -> int:
        """How many pieces of a row's prompt are to be read; at least 1, for the last may be empty."""
        row = self._holder(index)
        start = row.read
        if start is None:
            start = len(self._prefixes_of(row.request, self._shard(index))) * self._chunk
        return max(1, -(-(len(row.request.tokens) - 1 - start) // self._chunk))

    # --- decoding ------------------------------------------------------------------------------------------------------

    def reserve(self, ahead: int) -> list[Request]:
        """See to it that every running row has pages for ``ahead`` tokens more, or for all that it may still become.

        Returns:
            The requests that had to give way. (So may some in `next_reads`: `Request.preemptions` counts both.)
        """
        self._ahead = ahead
        before = {self._holder(row).request for row in self._occupied}
        for index in sorted(self.running, key=lambda row: self._holder(row).request.order):
            row = self._rows[index]
            if row is None:  # it has given way
                continue
            self._grow(index, self._goal(row.request))
        return sorted((request for request in before if request.state == "waiting"), key=lambda request: request.order)

    def make_room(self, request: Request, ahead: int) -> bool:
        """See to it that a row that is held has pages for ``ahead`` tokens more, or for all that it may still become. False:
        it has been dropped."""
        assert request.row is not None
        return self._grow(request.row, min(len(request.tokens) - 1 + ahead, request.max_length - 1))

    def decoded(self, row: int, tokens: Sequence[int], done: bool) -> None:
        """A row that runs or is held has come to new ``tokens``; ``done``: its text is finished."""
        request = self._holder(row).request
        request.tokens.extend(tokens)
        if done:
            self._leave(request)
            request.state = "done"

    def swap(self, order: Sequence[int]) -> None:
        """Rows were rearranged on the device: row i holds now what row ``order[i]`` held, of the same shard."""
        self._rows = [self._rows[row] for row in order]
        self.table = self.table[list(order)]
        for index in self._occupied:
            self._holder(index).request.row = index

    def clear(self) -> None:
        """Cancel every request, and make all rows and pages free. It relies on nothing, and so it helps after any failure."""
        for request in [*self._waiting, *self._suspended, *(row.request for row in self._rows if row is not None)]:
            request.state, request.row = "cancelled", None
        self._waiting.clear()
        self._suspended.clear()
        self._rows = [None] * len(self._rows)
        self._pools = [PagePool(pool.total, self._prefix_states) for pool in self._pools]
        self.table[:] = self._pools[0].total

    def check(self) -> None:
        """Compare what is kept of requests, rows and pages in several places.

        Raises:
            RuntimeError: two of them contradict each other; the message says which.
        """
        numbers = [request.order for request in self._waiting]
        if numbers != sorted(set(numbers)) or any(each.state != "waiting" or each.row is not None for each in self._waiting):
            raise RuntimeError(f"waiting: requests {numbers} must wait, without a row, in the order of their submission")
        if any(request.state != "suspended" or request.row is not None for request in self._suspended):
            raise RuntimeError("suspended: a request in this set still has a row, or is in another state")
        for shard, pool in enumerate(self._pools):
            holders = [self._holder(row) for row in self._of_shard(shard)]
            prefixes = [prefix for holder in holders for prefix in holder.prefixes]
            pool.check([page for holder in holders for page in holder.pages], prefixes)
        for index, row in enumerate(self._rows):
            self._check_row(index, row)

    def _check_row(self, index: int, row: _RowHolder | None) -> None:
        """Refuse a row whose request or whose line of the table says something else."""
        pages = [] if row is None else [*(page for prefix in row.prefixes for page in prefix.pages), *row.pages]
        unused = self.table.shape[1] - len(pages)
        if self.table[index].tolist() != pages + [self._pool(index).total] * unused:
            raise RuntimeError(f"row {index}: the table does not have the pages {pages}")
        if row is None:
            return
        request = row.request
        if request.row != index or request.state not in ("reading", "running", "held"):
            raise RuntimeError(f"row {index}: its request is {request.state}, in row {request.row}")
        if request.idle_since is not None and request.state != "held":
            raise RuntimeError(f"row {index}: its request is {request.state}, and its client is said to be able to draft")
        if len(request.tokens) > request.max_length or not 0 <= (row.read or 0) < max(len(request.tokens), 1):
            raise RuntimeError(
                f"row {index}: {row.read or 0} of {len(request.tokens)} tokens are read, and there may be {request.max_length}"
            )

    # --- what there is -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        """The rows in which texts are generated."""
        return self._in_state("running")

    @property
    def reading(self) -> list[int]:
        """The rows whose prompts are not read to the end."""
        return self._in_state("reading")

    @property
    def held(self) -> list[int]:
        """The rows that clients hold, and whose prompts are read."""
        return self._in_state("held")

    def _in_state(self, state: str) -> list[int]:
        return [row for row in self._occupied if self._holder(row).request.state == state]

    @property
    def occupied(self) -> int:
        """How many rows have a text, running or not."""
        return len(self._occupied)

    @property
    def waiting(self) -> int:
        """How many requests have no row."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing waits, is read or runs."""
        return not self._waiting and len(self.held) == self.occupied

    @property
    def free_pages(self) -> int:
        """Pages that could be taken now, of all shards."""
        return sum(pool.available for pool in self._pools)

    def request_of(self, row: int) -> Request | None:
        """Whose text a row has."""
        holder = self._rows[row]
        return None if holder is None else holder.request

    # --- pages ---------------------------------------------------------------------------------------------------------

    def _grow(self, index: int, tokens: int) -> bool:
        """See to it that a row has pages for ``tokens``. Others give way first, and at last it does itself: False."""
        row, pool = self._holder(index), self._pool(index)
        missing = self._missing(row, tokens)
        if missing <= 0:
            return True
        while (taken := pool.take(missing)) is None:
            rows = self._of_shard(self._shard(index))
            if self._make_way(rows):
                if self._rows[index] is not row:
                    return False
                continue
            giving = self._next_to_give_way(index, rows)
            self._give_way(self._holder(giving).request)
            if giving == index:
                return False
        row.pages += taken
        self._fill(index)
        return True

    def _missing(self, row: _RowHolder, tokens: int) -> int:
        """How many pages more ``tokens`` need."""
        held = len(row.prefixes) * (self._chunk // self._page) + len(row.pages)
        return -(-tokens // self._page) - held

    def _next_to_give_way(self, index: int, rows: Sequence[int]) -> int:
        """Which of ``rows`` is to give way to row ``index``, one of them: the newest."""
        held = set(rows) & set(self.held)
        if index not in held and len(held) == len(rows) - 1 and held:
            rows = list(held)  # without it nobody would go on: clients may do nothing for long
        return max(rows, key=lambda row: self._holder(row).request.order)

    def _make_way(self, rows: Sequence[int], is_idle_first: bool = False) -> bool:
        """Take the row of a client that does nothing: of those in ``rows`` the one that has been away for the longest, or else
        the one that has been idle for the longest; with ``is_idle_first`` the other way round. False: there is none."""
        requests = [self._holder(row).request for row in rows]
        away = [(request.away, request) for request in requests if request.away is not None]
        idle = [
            (request.idle_since, request) for request in requests if request.idle_since is not None and self.is_idle(request)
        ]
        if away and not (is_idle_first and idle):
            self._give_way(min(away, key=lambda pair: pair[0])[1])
        elif idle:
            self._suspend(min(idle, key=lambda pair: pair[0])[1])
        return bool(away or idle)

    def _suspend(self, request: Request) -> None:
        """Take the row of an idle client's request. The request waits for the client's next draft."""
        self._leave(request)
        request.state = "suspended"
        self._suspended.add(request)
        self.suspensions += 1

    def _give_way(self, request: Request) -> None:
        """Its row is free. A client's request whose prompt is read, or whose client is away, is dropped; others wait again."""
        if request.state != "held" and request.away is None:
            self._preempt(request)
            return
        self._leave(request)
        request.state = "dropped"
        self.dropped.append(request)

    def _preempt(self, request: Request) -> None:
        """Take the row of a ``request``, which waits again, before those that came later."""
        assert request.row is not None
        # Who has a row and no pages yet goes, too, lest it passes one who was there before it; but it loses nothing.
        if self._holder(request.row).read is not None:
            request.preemptions += 1
            self.preemptions += 1
        self._leave(request)
        request.state = "waiting"
        insort(self._waiting, request, key=lambda each: each.order)

    def _leave(self, request: Request) -> None:
        """Its row and pages are free."""
        index = request.row
        assert index is not None
        row, pool = self._holder(index), self._pool(index)
        for prefix in row.prefixes[::-1]:
            pool.let_go(prefix)
        pool.give_back(row.pages)
        self.table[index] = pool.total
        self._rows[index] = None
        request.row = request.idle_since = None

    def _fill(self, index: int) -> None:
        """Write the row's line of the table."""
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
        """The occupied rows of a ``shard``."""
        return [row for row in self._occupied if self._shard(row) == shard]

    def _shard(self, row: int) -> int:
        return row * len(self._pools) // len(self._rows)

    def _pool(self, row: int) -> PagePool:
        return self._pools[self._shard(row)]
