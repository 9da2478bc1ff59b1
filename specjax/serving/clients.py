"""Clients' rows in an engine: texts whose drafts come from elsewhere, and what became of each draft.

A client opens a row; the engine reads the text, and tells the client what its drafter must know of it. From then on the client
sends drafts, one at a time, and each comes back as a verdict. Between two drafts the row waits, and takes nothing but memory.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from specjax.decoding import remote_drafts
from specjax.drafts import tree
from specjax.errors import InputError, LogitsError
from specjax.serving.device import EngineDevice
from specjax.serving.scheduler import PrefillChunk, Request, Scheduler


@dataclass(frozen=True)
class RowFeatures:
    """What a client's drafter must know of tokens that the target has read.

    Attributes:
        start: the number of the first of them, counted from the beginning of the text.
        count: of tokens.
        arrays: by name, each ``[count, …]``: see `specjax.drafters.Drafter.remote_inputs`.

    Examples:
        >>> from specjax.serving import RowFeatures
        >>> RowFeatures(start=0, count=2, arrays={"features": np.zeros((2, 16))}).count
        2
    """

    start: int
    count: int
    arrays: dict[str, np.ndarray]


@dataclass(frozen=True)
class RowReady:
    """The text is read, all but its last token, which is the root of the first draft: drafts may come.

    Attributes:
        length: tokens of the text.

    Examples:
        >>> from specjax.serving import RowReady
        >>> RowReady(length=6).length
        6
    """

    length: int


@dataclass(frozen=True)
class DraftVerified:
    """What became of a draft.

    Attributes:
        accepted: the numbers of the accepted nodes, from the root's child downwards.
        token: that comes after them, and is the next root. Where an accepted node ends the text, it is that node's.
        arrays: what the client's drafter must know of the root and of the accepted tokens, by name, each
            ``[1 + len(accepted), …]``.
        over: whether the text is over: at an end-of-sequence token ("stop"), at its limit ("length"), or not ("").
        seconds: that verification took.

    Examples:
        >>> from specjax.serving import DraftVerified
        >>> checked = DraftVerified(accepted=(2, 5), token=7, arrays={}, over="", seconds=0.01)
        >>> len(checked.accepted) + 1  # tokens that were emitted
        3
    """

    accepted: tuple[int, ...]
    token: int
    arrays: dict[str, np.ndarray]
    over: Literal["", "stop", "length"]
    seconds: float


@dataclass(frozen=True)
class RowDropped:
    """The client has no row any more, and hears nothing more. It may open another one with the text as it is.

    Attributes:
        reason: for whoever reads it.

    Examples:
        >>> from specjax.serving import RowDropped
        >>> RowDropped("another text needs the row").reason
        'another text needs the row'
    """

    reason: str


RowEvent = RowFeatures | RowReady | DraftVerified | RowDropped
"""What the listener of a `ClientRow` is called with.

Examples:
    >>> from specjax.serving import RowDropped, RowEvent, RowReady
    >>> heard: list[RowEvent] = [RowReady(length=6), RowDropped("the engine is closed")]
    >>> [type(event).__name__ for event in heard]
    ['RowReady', 'RowDropped']
"""


@dataclass(frozen=True)
class ClientStatistics:
    """What clients have, and what became of their drafts.

    Attributes:
        rows: that clients have.
        away: of those, rows of clients that are away.
        dropped: rows that clients have lost to others for good.
        preempted: rows of idle clients that were given to others, until the client's next draft.
        calls: of the target, for drafts of clients.
        drafts: that were verified.
        drafted: tokens in them, roots not counted.
        accepted: of those, emitted.
        generated: tokens.

    Examples:
        >>> from specjax.serving import ClientDrafts, Engine
        >>> sizes = {"rows": 1, "widths": (1,), "capacity": 32}
        >>> clients = ClientDrafts(nodes=4, depth=3)
        >>> with Engine(target, drafts=(None,), clients=clients, **sizes) as engine:
        ...     statistics = engine.statistics.clients
        >>> statistics.rows, statistics.calls
        (0, 0)
    """

    rows: int
    away: int
    dropped: int
    preempted: int
    calls: int
    drafts: int
    drafted: int
    accepted: int
    generated: int


Listener = Callable[[RowEvent], None]

_LOGGER = logging.getLogger(__name__)


class ClientRow:
    """A client's place in an engine: its text, which goes on with each draft. Made by `specjax.serving.Engine.open_row`.

    Its listener is called from the engine's thread, with one `RowEvent` after another, and must be quick. Methods may be called
    from any thread, and from the listener.

    Attributes:
        prompt_length: tokens of the prompt.
        max_length: most tokens of the text, prompt and output.

    Examples:
        >>> import queue
        >>> from specjax.serving import DraftVerified, ClientDrafts, Engine, RowReady
        >>> events = queue.SimpleQueue()
        >>> sizes = {"rows": 1, "widths": (1,), "capacity": 32}
        >>> clients = ClientDrafts(nodes=4, depth=3)
        >>> with Engine(target, drafts=(None,), clients=clients, **sizes) as engine:
        ...     row = engine.open_row(
        ...         prompts[0].tolist(), max_new_tokens=8, listener=events.put
        ...     )
        ...     ready = events.get()
        ...     first, second = plain.tokens[0, 6:8]
        ...     row.verify(
        ...         np.array([row.tokens[-1], first, second]), parents=np.array([-1, 0, 1])
        ...     )
        ...     checked = events.get()
        ...     row.close()
        >>> ready, checked.accepted, [checked.token] == plain.tokens[0, 8:9].tolist()
        (RowReady(length=6), (1, 2), True)
    """

    def __init__(self, clients: "Clients", request: Request, settings: dict[str, Any], listener: Listener, known: int) -> None:
        """By `specjax.serving.Engine.open_row`."""
        self._clients, self.request, self.settings, self.listener = clients, request, settings, listener
        self.known = known
        self.draft: tuple[np.ndarray, np.ndarray] | None = None
        self.is_ready = False
        self.prompt_length, self.max_length = request.prompt_length, request.max_length

    @property
    def length(self) -> int:
        """How many tokens the text has, the root included."""
        return len(self.request.tokens)

    @property
    def tokens(self) -> list[int]:
        """The text's token ids, the root's last."""
        with self._clients.wake:
            return list(self.request.tokens)

    @property
    def is_away(self) -> bool:
        """Whether the client is away: then its row is the first to be given to somebody else. To be set."""
        return self.request.away is not None

    @is_away.setter
    def is_away(self, is_away: bool) -> None:
        self._clients.set_away(self, is_away)

    def verify(self, tokens: np.ndarray, parents: np.ndarray) -> None:
        """Submit a draft for verification, one at a time. The result comes to the listener as `DraftVerified`.

        Nothing happens where the row has been dropped or closed: the listener is told of that.

        Args:
            tokens: ``[n]`` token ids, first the root's, which is the text's newest token.
            parents: ``[n]`` of each node the number of its parent, which is smaller than its own; -1 for the root.

        Raises:
            InputError: there is no such draft for this row now; says why.
        """
        self._clients.ask(self, np.asarray(tokens), np.asarray(parents))

    def close(self) -> None:
        """Give the row back. The listener hears nothing more, but for what it is being told just now."""
        self._clients.close(self)


class Clients:
    """The rows that an engine's clients have. It is the engine's: `verify`, `was_read`, `deliver` and `end` are called from the
    engine's thread alone.

    Attributes:
        drafts: what programs are compiled for; None: there are no clients.
        wake: the engine's lock; notified where there is something to do.
        rows: of requests that wait, are read or are held.
    """

    def __init__(self, device: EngineDevice, scheduler: Scheduler, wake: threading.Condition) -> None:
        """No rows."""
        self.drafts, self.wake = device.clients, wake
        self._device, self._scheduler = device, scheduler
        self._vocabulary = device.target.config.vocab_size
        self.rows: dict[Request, ClientRow] = {}
        # What the listeners have yet to hear. What they are told of a prompt is still on the device.
        self._events: list[tuple[ClientRow, RowEvent | tuple[PrefillChunk, dict[str, jax.Array]]]] = []
        self._counts = {"calls": 0, "drafts": 0, "drafted": 0, "accepted": 0, "generated": 0}
        self._dropped = 0

    # --- what clients ask for ------------------------------------------------------------------------------------------

    def open(
        self,
        tokens: Sequence[int],
        prompt_length: int,
        max_new_tokens: int,
        known: int,
        settings: dict[str, Any],
        listener: Listener,
        owner: str = "",
    ) -> ClientRow:
        """As `specjax.serving.Engine.open_row`. To be called with the lock."""
        if not 1 <= prompt_length <= len(tokens):
            raise InputError(f"prompt_length={prompt_length}: must be from 1 to the {len(tokens)} tokens that are given")
        if len(tokens) >= prompt_length + max_new_tokens:
            raise InputError(
                f"max_new_tokens={max_new_tokens}: the text has {len(tokens) - prompt_length} tokens after its prompt already; "
                "give more"
            )
        if known < 0:
            raise InputError(f"known={known}: must be at least 0")
        # What need not be told need not be computed, where another text begins alike.
        shares = None if self._device.remote_drafter is None else known
        request = self._scheduler.submit(
            tokens, max_new_tokens, prompt_length=prompt_length, shares=shares, is_client=True, owner=owner, needs="clients"
        )
        row = ClientRow(self, request, settings, listener, known)
        self.rows[request] = row
        self.wake.notify_all()
        return row

    def ask(self, row: ClientRow, tokens: np.ndarray, parents: np.ndarray) -> None:
        """`ClientRow.verify`."""
        self._check(tokens, parents)
        with self.wake:
            if row.request.state in ("dropped", "cancelled"):
                return
            if row.request.state == "done":
                raise InputError("tokens: the text is over, and takes no more drafts")
            if not row.is_ready:
                raise InputError("tokens: the text is not read yet: wait for RowReady before the first draft")
            if row.draft is not None:
                raise InputError("tokens: there is a draft already that has no verdict: one at a time")
            newest = row.request.tokens[-1]
            if tokens[0] != newest:
                raise InputError(f"tokens: the root is {tokens[0]}, and the text's newest token is {newest}: draft below that")
            row.draft = tokens.astype(np.int32), parents.astype(np.int32)
            self._scheduler.has_drafted(row.request)
            self.wake.notify_all()

    def _check(self, tokens: np.ndarray, parents: np.ndarray) -> None:
        """Refuse what is no draft, or too large."""
        assert self.drafts is not None
        nodes, depth = self.drafts.nodes, self.drafts.depth
        if tokens.ndim != 1 or tokens.shape != parents.shape or not 1 <= len(tokens) <= nodes:
            raise InputError(f"tokens of shape {tokens.shape}, parents of {parents.shape}: give both for 1 to {nodes} nodes")
        if not (np.issubdtype(tokens.dtype, np.integer) and np.issubdtype(parents.dtype, np.integer)):
            raise InputError(f"tokens are {tokens.dtype}, parents {parents.dtype}: give whole numbers")
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise InputError(f"tokens: ids must be from 0 to {self._vocabulary - 1}")
        above = parents.astype(np.int64)
        if above[0] != -1 or np.any(above[1:] < 0) or np.any(above[1:] >= np.arange(1, len(above))):
            raise InputError("parents: the root's must be -1, and each other node's the number of a node before it")
        if (deepest := tree.depths(above).max()) > depth:
            raise InputError(f"parents: the draft is {deepest} deep, and may be {depth} deep")

    def set_away(self, row: ClientRow, is_away: bool) -> None:
        """`ClientRow.is_away`."""
        with self.wake:
            self._scheduler.set_away(row.request, is_away)
            self.wake.notify_all()

    def close(self, row: ClientRow) -> None:
        """`ClientRow.close`."""
        with self.wake:
            if self.rows.pop(row.request, None) is not None:
                self._scheduler.cancel(row.request)
            self._events = [(other, event) for other, event in self._events if other is not row]
            row.draft = None
            self.wake.notify_all()

    # --- what the engine asks, with its lock ---------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a draft that has a row waits for its verdict, or somebody is to be told something."""
        has_draft = any(row.draft is not None and request.state == "held" for request, row in self.rows.items())
        return has_draft or bool(self._events or self._scheduler.dropped)

    @property
    def are_drafting(self) -> bool:
        """Whether a client has a row that is neither away nor idle. Then nothing else may take long."""
        placed = [request for request in self.rows if request.row is not None]
        return any(request.away is None and not self._scheduler.is_idle(request) for request in placed)

    @property
    def statistics(self) -> ClientStatistics:
        """What they have, and what became of their drafts."""
        placed = [request for request in self.rows if request.row is not None]
        away = sum(request.away is not None for request in placed)
        suspensions = self._scheduler.suspensions
        return ClientStatistics(rows=len(placed), away=away, dropped=self._dropped, preempted=suspensions, **self._counts)

    def was_read(self, read: PrefillChunk, told: dict[str, jax.Array]) -> None:
        """A piece of a client's text is being read by the device; what it is ``told`` comes from there."""
        row = self.rows.get(read.request)
        if row is None:
            return
        if told and read.start + read.count > row.known:
            self._events.append((row, (read, told)))
        if read.request.state == "held" and not row.is_ready:  # it is not told again after it was suspended
            row.is_ready = True
            self._events.append((row, RowReady(length=len(read.request.tokens))))

    # --- what the engine asks, without it ------------------------------------------------------------------------------

    def verify(self) -> None:
        """Verify all drafts that wait, in one call, and tell their clients."""
        with self.wake:
            asked = self._take_drafts()
            table = self._scheduler.table.copy()
            numbers = [row.request.row for row, _ in asked]
        if not asked:
            return
        self._device.wait()  # what is still being read is none of the verdicts' time
        started = time.perf_counter()
        checked = jax.device_get(self._device.verify(table, numbers, [draft for _, draft in asked]))  # pyright: ignore[reportArgumentType]
        seconds = time.perf_counter() - started
        with self.wake:
            self._counts["calls"] += 1
            for index, (row, draft) in enumerate(asked):
                try:
                    self._take(row, draft, checked, index, seconds)
                except Exception as error:  # this row's: the others have their verdicts
                    self.give_up(row, error)
        self.deliver()

    def _take_drafts(self) -> list[tuple[ClientRow, tuple[np.ndarray, np.ndarray]]]:
        """The drafts that wait, of rows that have pages for what may be accepted, the oldest row's first."""
        if self.drafts is None:
            return []
        for request, row in sorted(self.rows.items(), key=lambda each: each[0].order):
            # One that gives way to an older one is not there any more.
            if row.draft is not None and request.state == "held":
                self._scheduler.make_room(request, self.drafts.depth + 1)
        asked = []
        for request, row in self.rows.items():
            if row.draft is not None and request.state == "held":
                asked.append((row, row.draft))
        return asked

    def _take(
        self,
        row: ClientRow,
        draft: tuple[np.ndarray, np.ndarray],
        checked: remote_drafts.VerifiedRows,
        index: int,
        seconds: float,
    ) -> None:
        """Note what became of a draft."""
        count, done, request = int(checked.count[index]), bool(checked.done[index]), row.request
        if request.state != "held" or request.row is None:  # closed meanwhile
            return
        if checked.failed[index]:
            raise LogitsError([request.row], [len(request.tokens) + count])
        row.draft = None
        tokens = checked.tokens[index, :count].tolist()
        self._scheduler.decoded(request.row, tokens, done)
        row.known = len(request.tokens) - 1
        if request.shares is not None:
            request.shares = row.known  # if it must be read again
        if done:
            del self.rows[request]
        self._counts["drafts"] += 1
        self._counts["drafted"] += len(draft[0]) - 1
        self._counts["accepted"] += int(checked.accepted[index])
        self._counts["generated"] += count
        arrays = {name: np.array(array[index, :count]) for name, array in checked.told.items()}
        over = ("stop" if tokens[-1] in row.settings["stop_token_ids"] else "length") if done else ""
        accepted = tuple(checked.path[index, 1:count].tolist())
        self._events.append((row, DraftVerified(accepted, tokens[-1], arrays, over, seconds)))

    def deliver(self, wait: bool = True) -> None:
        """Call the listeners with what there is for them; without ``wait``, only until something is still on the device."""
        while True:
            with self.wake:
                self._note_dropped()
                if not self._events:
                    return
                row, event = self._events[0]
                if not wait and isinstance(event, tuple) and not _are_here(event[1]):
                    return
                del self._events[0]
                if isinstance(event, RowReady | DraftVerified) and row.draft is None:
                    self._scheduler.may_draft(row.request)
            if isinstance(event, tuple):
                try:
                    told = _told_of(row.known, *event)
                except Exception as error:  # this row's: the others hear what is theirs
                    with self.wake:
                        self.give_up(row, error)
                    continue
                if not told.count:  # it has been read again, and was told before
                    continue
                row.known = told.start + told.count
                row.request.shares = row.known  # if it must be read again
                event = told
            self._call(row, event)

    def give_up(self, row: ClientRow, error: Exception) -> None:
        """End a row with an ``error`` that is its own, and tell its client. To be called with the lock.

        Raises:
            RuntimeError: rows or pages contradict each other: nobody can go on.
        """
        _LOGGER.error("a client's row ended with an error; the others continue", exc_info=error)
        self.rows.pop(row.request, None)
        self._events = [(other, event) for other, event in self._events if other is not row]
        reason = str(error) if isinstance(error, LogitsError) else "an error of the server; its log says more"
        self._events.append((row, RowDropped(reason)))
        row.draft = None
        self._scheduler.cancel(row.request)
        self._scheduler.check()

    def end(self, reason: str) -> None:
        """Tell every client that there will be no more verdicts. The engine clears the scheduler."""
        with self.wake:
            rows = list(self.rows.values())
            self.rows.clear()
            self._events.clear()
        for row in rows:
            self._call(row, RowDropped(reason))

    def _note_dropped(self) -> None:
        """Who has lost its row is to hear it."""
        for request in self._scheduler.dropped:
            row = self.rows.pop(request, None)
            if row is not None:
                self._dropped += 1
                row.draft = None
                self._events.append((row, RowDropped("another text needs the row, or its memory")))
        self._scheduler.dropped.clear()

    def _call(self, row: ClientRow, event: RowEvent) -> None:
        try:
            row.listener(event)
        except Exception:  # the client's: others have nothing to do with it
            self.close(row)
            _LOGGER.exception("a client's listener failed, and its row is closed")


def _are_here(arrays: dict[str, jax.Array]) -> bool:
    """Whether the device has made all of ``arrays``."""
    return all(array.is_ready() for array in arrays.values())  # pyright: ignore[reportAttributeAccessIssue]


def _told_of(known: int, read: PrefillChunk, arrays: dict[str, jax.Array]) -> RowFeatures:
    """Of a piece that was read, what goes beyond the tokens that are known."""
    first = max(0, known - read.start)
    count = max(0, read.count - first)
    cut = {name: np.asarray(array)[0, first : first + count].copy() for name, array in arrays.items()}
    return RowFeatures(start=read.start + first, count=count, arrays=cut)
