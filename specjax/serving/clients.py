"""The rows of clients in an engine: texts whose drafts come from other machines.

A client opens a row. The engine prefills its text, and sends the client the hidden states that its
drafter needs. Then the client sends drafts, one at a time, and gets a verdict for each. Between two
drafts the row waits, and takes memory alone.
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
from specjax.errors import GrammarError, InputError, LogitsError
from specjax.grammars import Matcher
from specjax.serving.device import EngineDevice
from specjax.serving.pages import Tenant
from specjax.serving.scheduler import PrefillChunk, Request, Scheduler


@dataclass(frozen=True)
class RowFeatures:
    """The hidden states of prefilled tokens that a client's drafter needs.

    Attributes:
        start: the position of the first token in the text.
        count: the number of tokens.
        arrays: the arrays by name, each ``[count, …]``, see
            `specjax.drafters.Drafter.remote_inputs`.

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
    """The event that the text is prefilled, and the client may send drafts.

    The root of the first draft is the last token of the text.

    Attributes:
        length: the number of tokens of the text.

    Examples:
        >>> from specjax.serving import RowReady
        >>> RowReady(length=6).length
        6
    """

    length: int


@dataclass(frozen=True)
class DraftVerified:
    """The verdict on a draft.

    Attributes:
        accepted: the indices of the accepted nodes, from the root's child downwards.
        token: the token after them, which is the next root. If an accepted node ends the text, it
            is that node's token.
        arrays: the hidden states of the root and the accepted tokens that the client's drafter
            needs, by name, each ``[1 + len(accepted), …]``.
        over: whether the text has ended: at a stop token ("stop"), at its limit ("length"), or not
            ("").
        seconds: the time of the verification.
        grammar_completed: whether the text satisfies its grammar as a whole; None if it has none,
            or has not ended.

    Examples:
        >>> from specjax.serving import DraftVerified
        >>> checked = DraftVerified(accepted=(2, 5), token=7, arrays={}, over="", seconds=0.01)
        >>> len(checked.accepted) + 1  # emitted tokens
        3
    """

    accepted: tuple[int, ...]
    token: int
    arrays: dict[str, np.ndarray]
    over: Literal["", "stop", "length"]
    seconds: float
    grammar_completed: bool | None = None


@dataclass(frozen=True)
class RowDropped:
    """The event that the client has lost its row. It is the last event of the row.

    The client may open another row with the text so far.

    Attributes:
        reason: the reason, for users.

    Examples:
        >>> from specjax.serving import RowDropped
        >>> RowDropped("another text needs the row").reason
        'another text needs the row'
    """

    reason: str


RowEvent = RowFeatures | RowReady | DraftVerified | RowDropped
"""The events that the listener of a `ClientRow` is called with.

Examples:
    >>> from specjax.serving import RowDropped, RowEvent, RowReady
    >>> events: list[RowEvent] = [RowReady(length=6), RowDropped("the engine is closed")]
    >>> [type(event).__name__ for event in events]
    ['RowReady', 'RowDropped']
"""


@dataclass(frozen=True)
class ClientStatistics:
    """The counters of the rows of clients.

    Attributes:
        rows: rows that clients have now.
        away: rows whose clients are disconnected now.
        dropped: rows that were dropped for good.
        preempted: rows of idle clients that were suspended, until the client's next draft.
        calls: calls of the target that verified drafts of clients.
        drafts: verified drafts.
        drafted: drafted tokens, roots not counted.
        accepted: drafted tokens that were accepted and emitted.
        generated: generated tokens.

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
    """The row of a client, whose text grows with each draft. `Engine.open_row` returns it.

    The engine's thread calls the listener with one `RowEvent` after another, and waits until it
    returns. The methods may be called from any thread, and from the listener.

    Attributes:
        prompt_length: the number of tokens of the prompt.
        max_length: the maximal length of the text, prompt and output.
        matcher: the position of the text in its grammar; None without one. The engine's thread
            alone uses it.

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

    def __init__(
        self,
        clients: "Clients",
        request: Request,
        settings: dict[str, Any],
        listener: Listener,
        sent_tokens: int,
        matcher: Matcher | None = None,
    ) -> None:
        """Make the row of a submitted request, for `specjax.serving.Engine.open_row`."""
        self._clients = clients
        self.request = request
        self.settings = settings
        self.listener = listener
        self.sent_tokens = sent_tokens
        self.matcher = matcher
        self.draft: tuple[np.ndarray, np.ndarray] | None = None
        self.is_ready = False
        self.prompt_length, self.max_length = request.prompt_length, request.max_length

    @property
    def length(self) -> int:
        """The number of tokens of the text, the root included."""
        return len(self.request.tokens)

    @property
    def tokens(self) -> list[int]:
        """The token ids of the text; the last one is the root's."""
        with self._clients.wake:
            return list(self.request.tokens)

    @property
    def is_away(self) -> bool:
        """True while the client is disconnected. Its row is then the first that others may get.

        The server sets it.
        """
        return self.request.away is not None

    @is_away.setter
    def is_away(self, is_away: bool) -> None:
        self._clients.set_away(self, is_away)

    def verify(self, tokens: np.ndarray, parents: np.ndarray) -> None:
        """Submit a draft for verification. The listener gets the verdict as `DraftVerified`.

        The next draft may be submitted after that. If the row was dropped or closed, nothing
        happens.

        Args:
            tokens: ``[n]`` token ids. The first one is the root's, the newest token of the text.
            parents: ``[n]`` the index of each node's parent, which is smaller than its own; -1 for
                the root.

        Raises:
            InputError: The draft is invalid, or the row cannot take one now. The message says why.
        """
        self._clients.submit_draft(self, np.asarray(tokens), np.asarray(parents))

    def close(self) -> None:
        """Free the row. The listener gets no further events, except one that it is handling now."""
        self._clients.close(self)


class Clients:
    """The rows of an engine's clients.

    The engine's thread alone calls `verify`, `was_read`, `deliver` and `end`.

    Attributes:
        drafts: the bounds of drafts that clients may send; None: there are no clients.
        wake: the engine's lock, which is notified when the thread has something to do.
        rows: the rows by request, while the request waits, is prefilled, is held or is suspended.
    """

    def __init__(
        self, device: EngineDevice, scheduler: Scheduler, wake: threading.Condition
    ) -> None:
        """Start without rows."""
        self.drafts, self.wake = device.clients, wake
        self._device, self._scheduler = device, scheduler
        self._vocabulary = device.target.config.vocab_size
        self.rows: dict[Request, ClientRow] = {}
        # Events to deliver, in order. The hidden states of a prompt are still arrays on the device.
        self._events: list[
            tuple[ClientRow, RowEvent | tuple[PrefillChunk, dict[str, jax.Array]]]
        ] = []
        self._counts = {"calls": 0, "drafts": 0, "drafted": 0, "accepted": 0, "generated": 0}
        self._dropped = 0

    # --- for clients, in any thread ---------------------------------------------------------------

    def open(
        self,
        tokens: Sequence[int],
        prompt_length: int,
        max_new_tokens: int,
        sent_tokens: int,
        settings: dict[str, Any],
        listener: Listener,
        *,
        owner: str,
        tenant: Tenant,
        matcher: Matcher | None,
    ) -> ClientRow:
        """Open a row, as `specjax.serving.Engine.open_row` describes. It needs the lock."""
        if not 1 <= prompt_length <= len(tokens):
            raise InputError(
                f"prompt_length={prompt_length}: must be from 1 to the {len(tokens)} tokens of the"
                " text"
            )
        if len(tokens) >= prompt_length + max_new_tokens:
            raise InputError(
                f"max_new_tokens={max_new_tokens}: the text has {len(tokens) - prompt_length}"
                " tokens after its prompt already; give more"
            )
        if sent_tokens < 0:
            raise InputError(f"known={sent_tokens}: must be at least 0")
        # Prefix caching may save those tokens alone whose hidden states the client does not need.
        shares = None if self._device.remote_drafter is None else sent_tokens
        request = self._scheduler.submit(
            tokens,
            max_new_tokens,
            prompt_length=prompt_length,
            shares=shares,
            is_client=True,
            owner=owner,
            tenant=tenant,
            needs="clients" if matcher is None else "clients' grammars",
        )
        row = ClientRow(self, request, settings, listener, sent_tokens, matcher)
        self.rows[request] = row
        self.wake.notify_all()
        return row

    def submit_draft(self, row: ClientRow, tokens: np.ndarray, parents: np.ndarray) -> None:
        """Submit a draft, as `ClientRow.verify` describes."""
        # Without the lock, because it looks at nothing but the draft.
        self._check(tokens, parents)
        with self.wake:
            if row.request.state in ("dropped", "cancelled"):
                return
            if row.request.state == "done":
                raise InputError("tokens: the text is over, and takes no more drafts")
            if not row.is_ready:
                raise InputError(
                    "tokens: the text is not prefilled yet; wait for RowReady before the first"
                    " draft"
                )
            if row.draft is not None:
                raise InputError(
                    "tokens: the previous draft has no verdict yet; send drafts one at a time"
                )
            newest = row.request.tokens[-1]
            if tokens[0] != newest:
                raise InputError(
                    f"tokens: the root is {tokens[0]}, but the text's newest token is {newest};"
                    " draft below that"
                )
            row.draft = tokens.astype(np.int32), parents.astype(np.int32)
            self._scheduler.has_drafted(row.request)
            self.wake.notify_all()

    def _check(self, tokens: np.ndarray, parents: np.ndarray) -> None:
        """Raise InputError if a draft is malformed or too large."""
        assert self.drafts is not None
        nodes, depth = self.drafts.nodes, self.drafts.depth
        if tokens.ndim != 1 or tokens.shape != parents.shape or not 1 <= len(tokens) <= nodes:
            raise InputError(
                f"tokens of shape {tokens.shape}, parents of {parents.shape}: give both for 1 to"
                f" {nodes} nodes"
            )
        if not (
            np.issubdtype(tokens.dtype, np.integer) and np.issubdtype(parents.dtype, np.integer)
        ):
            raise InputError(
                f"tokens are {tokens.dtype}, and parents {parents.dtype}; give whole numbers"
            )
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise InputError(f"tokens: ids must be from 0 to {self._vocabulary - 1}")
        above = parents.astype(np.int64)
        if above[0] != -1 or np.any(above[1:] < 0) or np.any(above[1:] >= np.arange(1, len(above))):
            raise InputError(
                "parents: the root's must be -1, and each other node's the index of a node"
                " before it"
            )
        if (deepest := tree.depths(above).max()) > depth:
            raise InputError(f"parents: the draft is {deepest} deep, but may be {depth} deep")

    def set_away(self, row: ClientRow, is_away: bool) -> None:
        """Set `ClientRow.is_away`."""
        with self.wake:
            self._scheduler.set_away(row.request, is_away)
            self.wake.notify_all()

    def close(self, row: ClientRow) -> None:
        """Close a row, as `ClientRow.close` describes."""
        with self.wake:
            if self.rows.pop(row.request, None) is not None:
                self._scheduler.cancel(row.request)
            self._events = [
                (recipient, event) for recipient, event in self._events if recipient is not row
            ]
            row.draft = None
            self.wake.notify_all()

    # --- for the engine, with its lock ------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if a draft in a row waits for its verdict, or an event waits for delivery."""
        has_draft = any(
            row.draft is not None and request.state == "held" for request, row in self.rows.items()
        )
        return has_draft or bool(self._events or self._scheduler.dropped)

    @property
    def are_drafting(self) -> bool:
        """True if an active client has a row. Then the engine keeps its decode calls short."""
        placed = [request for request in self.rows if request.row is not None]
        return any(
            request.away is None and not self._scheduler.is_idle(request) for request in placed
        )

    @property
    def statistics(self) -> ClientStatistics:
        """The counters of the rows of clients."""
        placed = [request for request in self.rows if request.row is not None]
        away = sum(request.away is not None for request in placed)
        suspensions = self._scheduler.suspensions
        return ClientStatistics(
            rows=len(placed),
            away=away,
            dropped=self._dropped,
            preempted=suspensions,
            **self._counts,
        )

    def was_read(self, chunk: PrefillChunk, features: dict[str, jax.Array]) -> None:
        """Record that a chunk of a client's text was queued on the device.

        Args:
            chunk: the chunk.
            features: the hidden states for the client, which the device may still be computing.
        """
        row = self.rows.get(chunk.request)
        if row is None:
            return
        if features and chunk.start + chunk.count > row.sent_tokens:
            self._events.append((row, (chunk, features)))
        # A client that was suspended has had the event before.
        if chunk.request.state == "held" and not row.is_ready:
            row.is_ready = True
            self._events.append((row, RowReady(length=len(chunk.request.tokens))))

    # --- for the engine's thread, without the lock ------------------------------------------------

    def verify(self) -> None:
        """Verify all waiting drafts in one call, and deliver the verdicts."""
        with self.wake:
            drafts = self._take_drafts()
            table = self._scheduler.table.copy()
            rows = [row.request.row for row, _ in drafts]
        if not drafts:
            return
        self._device.wait()  # so that the time of queued prefill chunks does not count
        started = time.perf_counter()
        trees, matchers = [draft for _, draft in drafts], [row.matcher for row, _ in drafts]
        for matcher in filter(None, matchers):
            matcher.begin_step()
        failed: dict[int, Exception] = {}
        legal = None
        if any(matchers):
            legal = self._device.legal_after(trees, matchers, failed.__setitem__)
        checked = jax.device_get(self._device.verify(table, rows, trees, legal))  # pyright: ignore[reportArgumentType]
        seconds = time.perf_counter() - started
        with self.wake:
            self._counts["calls"] += 1
            for index, (row, draft) in enumerate(drafts):
                try:
                    if index in failed:
                        raise failed[index]
                    self._take(row, draft, checked, index, seconds)
                except Exception as error:  # only this row ends
                    self.give_up(row, error)
        self.deliver()

    def _take_drafts(self) -> list[tuple[ClientRow, tuple[np.ndarray, np.ndarray]]]:
        """Return the waiting drafts whose rows have pages for the longest verdict."""
        if self.drafts is None:
            return []
        # The oldest first, so that a row that is dropped for another one's pages is the newer one.
        for request, row in sorted(self.rows.items(), key=lambda pair: pair[0].order):
            if row.draft is not None and request.state == "held":
                self._scheduler.make_room(request, self.drafts.depth + 1)
        # Look again, because `make_room` may have dropped rows.
        in_rows = [row for request, row in self.rows.items() if request.state == "held"]
        return [(row, row.draft) for row in in_rows if row.draft is not None]

    def _take(
        self,
        row: ClientRow,
        draft: tuple[np.ndarray, np.ndarray],
        checked: remote_drafts.VerifiedRows,
        index: int,
        seconds: float,
    ) -> None:
        """Record the verdict on a draft. It needs the lock."""
        count, done, request = int(checked.count[index]), bool(checked.done[index]), row.request
        if request.state != "held" or request.row is None:  # the row was closed meanwhile
            return
        if checked.failed[index]:
            raise LogitsError([request.row], [len(request.tokens) + count])
        row.draft = None
        tokens = checked.tokens[index, :count].tolist()
        is_full = len(request.tokens) + count >= request.max_length
        if row.matcher is not None:
            row.matcher.append(tokens)
            done = done or row.matcher.is_over
            if not is_full and row.matcher.is_stuck:
                raise GrammarError([request.row])
        self._scheduler.decoded(request.row, tokens, done)
        # The newest token, the next root, has no hidden states yet: the target has not read it.
        row.sent_tokens = len(request.tokens) - 1
        if request.shares is not None:
            request.shares = row.sent_tokens  # for the case that it is prefilled again
        if done:
            del self.rows[request]
        self._counts["drafts"] += 1
        self._counts["drafted"] += len(draft[0]) - 1
        self._counts["accepted"] += int(checked.accepted[index])
        self._counts["generated"] += count
        # Copies: a view would keep the arrays of all rows in memory until it is sent.
        arrays = {name: np.array(array[index, :count]) for name, array in checked.told.items()}
        over, completed = "", None
        if done:
            is_stopped = tokens[-1] in row.settings["stop_token_ids"]
            if row.matcher is not None:
                completed = row.matcher.is_complete
                is_stopped = is_stopped or (row.matcher.is_over and not is_full)
            over = "stop" if is_stopped else "length"
        accepted = tuple(checked.path[index, 1:count].tolist())
        self._events.append(
            (row, DraftVerified(accepted, tokens[-1], arrays, over, seconds, completed))
        )

    def deliver(self, wait: bool = True) -> None:
        """Deliver the events to the listeners.

        Args:
            wait: whether to wait for hidden states that are still being computed; otherwise the
                delivery ends at the first such event, because the order must stay.
        """
        while True:
            with self.wake:
                self._note_dropped()
                if not self._events:
                    return
                row, event = self._events[0]
                if not wait and isinstance(event, tuple) and not _are_here(event[1]):
                    return
                del self._events[0]
                # The client can draft from now on, and not since the verification: it must not
                # count as idle because its event waited for delivery.
                if isinstance(event, RowReady | DraftVerified) and row.draft is None:
                    self._scheduler.may_draft(row.request)
            if isinstance(event, tuple):
                # Without the lock, because it may wait for the device.
                try:
                    features = _unsent_features(row.sent_tokens, *event)
                except Exception as error:  # only this row ends
                    with self.wake:
                        self.give_up(row, error)
                    continue
                if not features.count:  # the text was prefilled again, and the client has them
                    continue
                row.sent_tokens = features.start + features.count
                row.request.shares = row.sent_tokens  # for the case that it is prefilled again
                event = features
            # Without the lock, because a listener may take long, or call the engine.
            self._call(row, event)

    def give_up(self, row: ClientRow, error: Exception) -> None:
        """End a row with an ``error`` that concerns it alone, and inform its client.

        It needs the lock.

        Raises:
            RuntimeError: Rows or pages are inconsistent, so that no text can continue.
        """
        _LOGGER.error("a client's row ended with an error; the others continue", exc_info=error)
        self.rows.pop(row.request, None)
        self._events = [
            (recipient, event) for recipient, event in self._events if recipient is not row
        ]
        reason = (
            str(error)
            if isinstance(error, LogitsError | InputError)
            else "an error of the server; see its log"
        )
        self._events.append((row, RowDropped(reason)))
        row.draft = None
        self._scheduler.cancel(row.request)
        self._scheduler.check()

    def end(self, reason: str) -> None:
        """Inform all clients that the engine has ended. The engine clears the scheduler."""
        with self.wake:
            rows = list(self.rows.values())
            self.rows.clear()
            self._events.clear()
        for row in rows:
            self._call(row, RowDropped(reason))

    def _note_dropped(self) -> None:
        """Add an event for each row that the scheduler has dropped. It needs the lock."""
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
        except Exception:  # a listener's error must not end the engine's thread
            self.close(row)
            _LOGGER.exception("a client's listener failed, and its row is closed")


def _are_here(arrays: dict[str, jax.Array]) -> bool:
    """Return whether the device has computed all ``arrays``."""
    return all(array.is_ready() for array in arrays.values())  # pyright: ignore[reportAttributeAccessIssue]


def _unsent_features(
    sent_tokens: int, chunk: PrefillChunk, arrays: dict[str, jax.Array]
) -> RowFeatures:
    """Return the hidden states of a chunk beyond the tokens whose states were sent already."""
    first = max(0, sent_tokens - chunk.start)
    count = max(0, chunk.count - first)
    cut = {
        name: np.asarray(array)[0, first : first + count].copy() for name, array in arrays.items()
    }
    return RowFeatures(start=chunk.start + first, count=count, arrays=cut)
