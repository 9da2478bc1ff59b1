"""The server's side of the protocol of clients that draft, without sockets and threads.

A client drafts, and the engine verifies. Verification is coupled or greedy, so a verdict is a
function of the text's settings, its tokens so far, and the draft. A repeated message gets the same
answer, and a text that the server has forgotten continues unchanged after the client has sent it
again.

========= ==== ======================================== ========================================
message   way  content                                  answer
========= ==== ======================================== ========================================
Open      up   the prompt, the output so far, the       Opened; Told, during the prefill; Ready.
               sampling parameters, and how many tokens Or Refused
               were sent to the client before
Draft     up   a tree below the text, its               Verdict. A repeated draft: the same
               ``sequence``, and the length (``base``)  Verdict. If the client's text differs
               and the ``digest`` of the client's text  from the server's: Resync
Resume    up   on a new connection: length and digest   Ready; or Told and Ready; or Forgotten
               of the client's text, and how many
               tokens were sent to it
Close     up   the end of the session                   none
Opened    down the session's id, the bounds of drafts
Told      down hidden states of prefilled tokens
Ready     down the length below which drafts may come   Draft; one without a verdict is repeated
Verdict   down the accepted path and the next token     Draft
Resync    down the end of the server's text, from where Draft; or Resume, to get hidden states
               the client's may differ
Forgotten down there is no such session                 Open, with the whole text
Refused   down why a message was rejected               depends on its ``code``
========= ==== ======================================== ========================================

Rules:

- **One draft at a time.** ``sequence`` counts the drafts, and a repeated draft has the same number.
  Its verdict is stored until the next draft arrives.
- **Epochs.** Each Resume has a larger ``epoch``. A message with a smaller one is refused, because
  it was sent before the connection changed. A repeated Resume, of the same epoch, changes nothing,
  and neither does a repeated Open, of the same ``nonce``. During the prefill both are answered with
  Opened, so that the client knows that its message has arrived.
- **Disconnected clients.** A session without a connection is *away*. It stays for a while, and so
  does its row, unless another request needs the row.
- **Idle clients.** A waiting request may also get the row of a client that is connected but has
  sent no draft for a second. The session stays. Its next draft is verified after it has a row again
  and its text is prefilled again. A draft that is repeated meanwhile is answered with Opened.
- **Limits.** The number of sessions of one API key is limited; without keys, that of one address.
- **Resuming.** If the client lacks the newest verdict, Ready names the length before it, and the
  client repeats its draft. If it lacks more, the text is prefilled again in another row, from the
  client's length, and the hidden states that it lacks are sent.
- **Owners.** A session belongs to the owner that opened it. For others it does not exist.

Codes of Refused: ``version``, ``target``, ``drafter`` (the server has others), ``invalid`` (the
prompt or a parameter is invalid), ``draining`` (the server shuts down), ``full`` (there is no room
now), ``old_epoch``, ``not_ready`` (a draft before Ready), ``busy`` (a draft while another one is
verified), ``sequence`` (a number was skipped), ``over`` (a draft for a text that has ended).
"""

import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec import UNSET

from specjax import wire
from specjax.errors import InputError
from specjax.grammars import CompiledGrammar, Grammar
from specjax.sampling import SAMPLING_NAMES
from specjax.sampling_params import SamplingParams
from specjax.serving import clients
from specjax.serving.handle import EngineError
from specjax.serving.scheduler import QueueFullError
from specjax.wire import FrameError

TOLD_BYTES = 2**18
"""The bytes of hidden states per frame, or those of one token if that is more.

Small frames let the messages of other sessions through between them.
"""

MAX_UNSENT = 2**28
"""The upper limit of bytes that wait to be sent over a connection.

A client that is cut off for this reason may connect again and resume.
"""


CompileGrammar = Callable[[Grammar, Callable[[CompiledGrammar | InputError], None]], None]
"""A function that compiles a grammar in another thread.

It returns at once. When the grammar is compiled, or if it is already, it calls its second argument,
in any thread: with the compiled grammar, or with the reason why the grammar is refused.
"""


class Row(Protocol):
    """The row of a text in the engine, such as `specjax.serving.ClientRow`."""

    is_away: bool

    def verify(self, tokens: np.ndarray, parents: np.ndarray) -> None:
        """Submit a draft for verification. The listener gets the verdict."""

    def close(self) -> None:
        """Free the row."""


class RowEngine(Protocol):
    """The part of an engine that sessions use."""

    def open_row(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        listener: Callable[[Any], None],
        **options: Any,
    ) -> Row:
        """Request a row for a text. The engine calls the listener in another thread."""
        ...


@dataclass(frozen=True)
class Terms:
    """The terms on which a server accepts clients that draft.

    Attributes:
        nodes: the largest number of nodes of a draft, the root included.
        depth: the largest depth of a node; the root's is 0.
        capacity: the maximal length of a text in tokens.
        tells: the arrays of hidden states that clients are sent, with their shape for one token.
        target: the fingerprint of the target; empty: any is accepted.
        drafter: the fingerprint of the drafter; empty: any is accepted.
        away_seconds: how long a session without a connection stays.
        sessions: the largest number of sessions.
        sessions_per_owner: the largest number of sessions of one API key or, without keys, of
            one address; None: half of all, at least 1.
        unsent_bytes: the largest number of bytes that wait to be sent over a connection; None:
            the hidden states of two texts and a MiB, at most `MAX_UNSENT`.
        share_prefixes: whether all owners share prefixes. If not, each owner is a tenant of its
            own.

    Examples:
        >>> from specjax.serving.sessions import Terms
        >>> Terms(nodes=8, depth=4, capacity=1024, tells={"hidden": (16,)}).max_unsent_bytes
        1179648
    """

    nodes: int = 64
    depth: int = 16
    capacity: int = 4096
    tells: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    target: str = ""
    drafter: str = ""
    away_seconds: float = 120.0
    sessions: int = 256
    sessions_per_owner: int | None = None
    unsent_bytes: int | None = None
    share_prefixes: bool = False

    @property
    def max_of_owner(self) -> int:
        """The largest number of sessions of one API key or address."""
        if self.sessions_per_owner is None:
            return max(1, self.sessions // 2)
        return self.sessions_per_owner

    @property
    def max_unsent_bytes(self) -> int:
        """The largest number of bytes that wait to be sent over a connection."""
        of_text = 4 * self.capacity * sum(int(np.prod(shape)) for shape in self.tells.values())
        return (
            min(2 * of_text + 2**20, MAX_UNSENT) if self.unsent_bytes is None else self.unsent_bytes
        )


@dataclass
class SessionStatistics:
    """The counters of all sessions.

    Attributes:
        opened: sessions that were opened.
        rounds: drafts that were verified.
        round_trips: drafts that followed a verdict on the same connection.
        round_trip_seconds: the sum of their times from verdict to draft: the network in both
            directions, and the client.
        resumes: sessions that were resumed on another connection.
        bytes_up: bytes of received frames.
        bytes_down: bytes of sent frames.
        dropped: sessions that the server ended, for lack of rows or room, or after
            ``away_seconds``.
        sessions: sessions that exist now.
        away: sessions without a connection now.

    Examples:
        >>> from specjax.serving.sessions import SessionStatistics
        >>> SessionStatistics().rounds
        0
    """

    opened: int = 0
    rounds: int = 0
    round_trips: int = 0
    round_trip_seconds: float = 0.0
    resumes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    dropped: int = 0
    sessions: int = 0
    away: int = 0


class Connection:
    """A connection of a client.

    Attributes:
        owner: the owner of the sessions that are opened on it.
        counted_as: the name under which its sessions and rows count for the limits; empty: they do
            not count.
        unsent: the bytes that were passed to ``send`` and are not reported by `sent` yet.
        is_lost: whether it is closed.
    """

    def __init__(
        self,
        sessions: "Sessions",
        owner: str,
        send: Callable[[bytes], None],
        close: Callable[[FrameError], None],
        counted_as: str = "",
    ) -> None:
        self.owner, self.counted_as, self.unsent = owner, counted_as, 0
        self._sessions, self._send, self._close = sessions, send, close
        self.is_lost = False

    def receive(self, frame: bytes) -> None:
        """Process a frame of the client.

        Raises:
            FrameError: The frame is invalid, and the connection must be closed.
        """
        if not self.is_lost:
            self._sessions.receive(self, frame)

    def sent(self, count: int) -> None:
        """Note that ``count`` bytes have left the send queue."""
        self.unsent -= count

    def lost(self) -> None:
        """Note that the connection is closed. Its sessions are away."""
        self.is_lost = True
        self._sessions.leave(self)

    def send(self, message: wire.DownMessage) -> int:
        """Send a message, and return the number of bytes sent.

        If too many bytes wait already, nothing is sent, and the connection is closed.
        """
        if self.is_lost:
            return 0
        frame = wire.encode(message)
        if self.unsent + len(frame) > self._sessions.terms.max_unsent_bytes:
            self.lost()  # the session stays, so that the client can connect again and resume
            self._close(
                FrameError(
                    4408, f"{self.unsent} bytes wait to be read; the client must read faster"
                )
            )
            return 0
        self.unsent += len(frame)
        self._send(frame)
        return len(frame)


@dataclass
class _Session:
    """A session: one text of a client.

    Attributes:
        id: the id of the session, which the client cannot guess.
        owner: the owner that opened it.
        counted_as: the name under which it counts for the limits; empty: it does not count.
        precision: the format of the hidden states that are sent.
        params: the sampling parameters.
        grammar: the compiled grammar of ``params``; None: there is none, or the engine compiles it.
        prompt: the number of tokens of the prompt.
        text: the committed tokens, prompt included.
        nonce: the nonce of the Open that it began with.
        epoch: the newest epoch.
        row: its row in the engine; None: the text has ended, and needs none.
        row_index: the index of its row among those that it has had. Events of earlier rows are
            ignored.
        is_ready: whether the text is prefilled, and Ready was sent.
        sent_tokens: the number of tokens whose hidden states were sent.
        unsent_events: the events of the prefill that were not sent yet.
        sequence: the number of the newest draft; None: the next one may have any number.
        draft: the draft that is being verified.
        last_round: the newest verified draft and its verdict, for a client that lacks it.
        over: "stop" or "length" after the text has ended.
        connection: the client's connection; None: the session is away.
        away_since: when it lost its connection.
        answered_at: when the newest verdict was sent on this connection; None: none was.
        quiet_since: the time of the last message or event.
    """

    id: bytes
    owner: str
    counted_as: str
    precision: wire.Precision
    params: SamplingParams
    grammar: CompiledGrammar | None
    prompt: int
    text: "array[int]"
    nonce: bytes = b""
    epoch: int = 0
    row: Row | None = None
    row_index: int = 0
    is_ready: bool = False
    sent_tokens: int = 0
    unsent_events: deque[clients.RowFeatures | clients.RowReady] = field(default_factory=deque)
    sequence: int | None = 0
    draft: wire.DraftMessage | None = None
    last_round: tuple[wire.DraftMessage, wire.VerdictMessage] | None = None
    over: str = ""
    connection: Connection | None = None
    away_since: float = 0.0
    answered_at: float | None = None
    quiet_since: float = 0.0

    def is_of(self, owner: str, nonce: bytes) -> bool:
        """Return whether an Open with this ``nonce`` of this ``owner`` began the session."""
        return self.owner == owner and self.nonce == nonce


def _params_of(message: wire.OpenMessage) -> SamplingParams:
    """Return the sampling parameters of an Open."""
    return SamplingParams(
        **{name: getattr(message, name) for name in SAMPLING_NAMES if hasattr(message, name)},
        seed=message.seed,
        max_new_tokens=message.limit,
        eos_token_ids=None if message.eos is None else tuple(message.eos),
        grammar=None if message.grammar is UNSET else Grammar.of_source(message.grammar),
    )


class Sessions:
    """The sessions of all clients.

    All methods must be called in one thread, and none of them blocks. So there are no locks; events
    of the engine's thread come in by ``post``.

    Attributes:
        terms: the terms on which clients are accepted.
        statistics: the counters of all sessions.
        is_draining: whether new sessions are refused, because the server shuts down.

    Examples:
        >>> from specjax import wire
        >>> from specjax.serving.sessions import Sessions, Terms
        >>> class Rows:  # stands for the engine
        ...     def open_row(self, tokens, params, *, listener, **options):
        ...         return None
        >>> sessions, frames = Sessions(Rows(), Terms(), post=lambda work: None), []
        >>> connection = sessions.connect("me", frames.append, close=print)
        >>> tokens = wire.pack([5, 6], "int32")
        >>> request = wire.OpenMessage(nonce=bytes(16), tokens=tokens, prompt=2, limit=8)
        >>> connection.receive(wire.encode(request))
        >>> wire.decode_down(frames[0]).depth
        16
    """

    def __init__(
        self,
        engine: RowEngine,
        terms: Terms,
        *,
        post: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
        make_id: Callable[[], bytes] = partial(secrets.token_bytes, 16),
        compile_grammar: CompileGrammar | None = None,
    ) -> None:
        """Start without sessions.

        Args:
            engine: the engine, which prefills texts and verifies drafts.
            terms: the terms on which clients are accepted.
            post: a function, for any thread, that calls its argument later in the sessions' thread.
            clock: returns the time in seconds.
            make_id: returns sixteen bytes that cannot be guessed.
            compile_grammar: compiles the grammars of clients in another thread; None: the engine
                compiles each of them when it opens the row, in the sessions' thread.
        """
        self.terms, self.statistics, self.is_draining = terms, SessionStatistics(), False
        self._engine, self._post, self._clock, self._make_id = engine, post, clock, make_id
        self._sessions: dict[bytes, _Session] = {}
        self._compile_grammar = compile_grammar
        # The connections of Opens whose grammars are being compiled, by owner and nonce.
        self._compiling: dict[tuple[str, bytes], Connection] = {}

    @property
    def is_busy(self) -> bool:
        """True while a connected client has a text that has not ended."""
        return any(
            session.connection is not None and not session.over
            for session in self._sessions.values()
        )

    def connect(
        self,
        owner: str,
        send: Callable[[bytes], None],
        close: Callable[[FrameError], None],
        counted_as: str | None = None,
    ) -> Connection:
        """Return the connection of a new client.

        Args:
            owner: the owner of its sessions.
            send: sends a frame, at once or later. The caller reports it by `Connection.sent`.
            close: closes the connection because of an error.
            counted_as: the name under which its sessions and rows count for the limits, such as an
                address if there are no API keys; None: the owner. Empty: they do not count.
        """
        return Connection(self, owner, send, close, owner if counted_as is None else counted_as)

    def leave(self, connection: Connection) -> None:
        """Note that a connection is closed: its sessions are away."""
        for session in self._sessions.values():
            if session.connection is connection:
                session.connection, session.away_since = None, self._clock()
                if session.row is not None:
                    session.row.is_away = True
        self._count()

    def tick(self) -> None:
        """End the sessions that have been away for too long. It must be called now and then."""
        until = self._clock() - self.terms.away_seconds
        for session in list(self._sessions.values()):
            if session.connection is None and session.away_since <= until:
                self.statistics.dropped += 1
                self._end(session)

    def close(self) -> None:
        """End all sessions."""
        for session in list(self._sessions.values()):
            self._end(session)

    # --- messages of clients ----------------------------------------------------------------------

    def receive(self, connection: Connection, frame: bytes) -> None:
        """Process a frame, as `Connection.receive` describes."""
        self.statistics.bytes_up += len(frame)
        message = wire.decode_up(frame)
        if isinstance(message, wire.OpenMessage):
            if message.grammar is UNSET or self._compile_grammar is None:
                self._open(connection, message)
            else:
                self._open_compiled(connection, message, self._compile_grammar)
            return
        session = self._sessions.get(message.session)
        # For another owner a session does not exist, so that nobody learns of it.
        if session is None or session.owner != connection.owner:
            if not isinstance(message, wire.CloseMessage):
                self._send(connection, wire.ForgottenMessage(session=message.session))
        elif isinstance(message, wire.CloseMessage):
            self._end(session)
        elif isinstance(message, wire.ResumeMessage):
            self._resume(connection, session, message)
        elif session.connection is not connection or message.epoch != session.epoch:
            self._refuse_epoch(connection, session, message.epoch)
        else:
            self._draft(connection, session, message)

    def _open_compiled(
        self, connection: Connection, message: wire.OpenMessage, compile_grammar: CompileGrammar
    ) -> None:
        """Have the grammar of an Open compiled, and then open the session."""
        owner, nonce = key = connection.owner, message.nonce
        if any(session.is_of(owner, nonce) for session in self._sessions.values()):
            self._open(connection, message)  # the message was repeated
            return
        if key in self._compiling:
            self._compiling[key] = connection  # the answer goes to the newest connection
            return
        if (refusal := self._refusal(message)) is None:
            waiting = self._waiting_grammars(connection.counted_as)
            if waiting is not None:
                refusal = "full", f"{waiting} grammars wait to be compiled; try again later"
            try:
                grammar = _params_of(message).grammar
            except InputError as error:
                refusal = "invalid", str(error)
        if refusal is not None:
            self._send(connection, _refused(*refusal))
            return
        self._compiling[key] = connection

        def go_on(compiled: CompiledGrammar | InputError) -> None:
            newest = self._compiling.pop(key)
            if isinstance(compiled, InputError):
                code = "full" if isinstance(compiled, QueueFullError) else "invalid"
                self._send(newest, _refused(code, str(compiled)))
            elif not newest.is_lost:
                self._open(newest, message, compiled)

        def post(compiled: CompiledGrammar | InputError) -> None:
            self._post(partial(go_on, compiled))

        assert grammar is not None
        compile_grammar(grammar, post)

    def _waiting_grammars(self, counted_as: str) -> int | None:
        """Return how many grammars wait, if no other one may; None: there is room.

        The bounds are those of sessions: of one API key or address, and of all.
        """
        of_owner = sum(
            bool(counted_as) and waiting.counted_as == counted_as
            for waiting in self._compiling.values()
        )
        if of_owner >= self.terms.max_of_owner:
            return of_owner
        return len(self._compiling) if len(self._compiling) >= self.terms.sessions else None

    def _open(
        self,
        connection: Connection,
        message: wire.OpenMessage,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Open a session, and have its text prefilled. Its grammar may be compiled already."""
        same = [
            old for old in self._sessions.values() if old.is_of(connection.owner, message.nonce)
        ]
        before = same[0] if same else None
        if before is None and (refusal := self._refusal(message)) is not None:
            self._send(connection, _refused(*refusal))
            return
        if before is not None and before.connection is connection:  # the message was repeated
            self._send(connection, self._opened(before))
            if before.is_ready:
                self._send(
                    connection,
                    wire.ReadyMessage(
                        session=before.id, epoch=before.epoch, length=len(before.text)
                    ),
                )
            return
        # This is a late copy of the message: the client has resumed the session since.
        if before is not None and before.epoch:
            return
        # The Opened was lost with its connection, so the client cannot resume the session.
        if before is not None:
            # A repeated message is the same, and so is its grammar, unless the client is wrong.
            if before.params == _params_of(message):
                grammar = before.grammar
            self._end(before)
        try:
            to_end = self._session_to_end(connection.counted_as)
            session = _Session(
                self._make_id(),
                connection.owner,
                connection.counted_as,
                message.precision,
                _params_of(message),
                grammar,
                message.prompt,
                array("i", wire.unpack(message.tokens).tolist()),
                nonce=message.nonce,
                connection=connection,
            )
            self._read(session, message.known)
        except InputError as error:
            code = "full" if isinstance(error, QueueFullError) else "invalid"
            self._send(connection, _refused(code, str(error)))
            return
        if to_end is not None:  # only now, because a text that is refused must not end another one
            self.statistics.dropped += 1
            self._end(to_end)
        self._sessions[session.id] = session
        self.statistics.opened += 1
        self._count()
        self._send(connection, self._opened(session))

    def _opened(self, session: _Session) -> wire.OpenedMessage:
        terms = self.terms
        tells = {name: list(shape) for name, shape in terms.tells.items()}
        bounds = {"nodes": terms.nodes, "depth": terms.depth, "capacity": terms.capacity}
        return wire.OpenedMessage(session=session.id, epoch=session.epoch, tells=tells, **bounds)

    def _refusal(self, message: wire.OpenMessage) -> tuple[str, str] | None:
        """Return the code and the message of the refusal of an Open; None: it is accepted."""
        if self.is_draining:
            return "draining", "the server is shutting down"
        if message.version != wire.VERSION:
            return "version", f"version={message.version}: this server speaks {wire.VERSION}"
        for name in ("target", "drafter"):
            ours, theirs = getattr(self.terms, name), getattr(message, name)
            if ours and theirs and ours != theirs:
                return (
                    name,
                    (
                        f"{name}={theirs}: this server has {ours}; draft with the same weights as"
                        " the server has"
                    ),
                )
        return None

    def _session_to_end(self, counted_as: str) -> _Session | None:
        """Return the session to end for a new one; None: there is room.

        It is one whose text has ended, the quietest first, or else the one that has been away for
        the longest. If an API key or address has reached its limit, it is one of its own.

        Raises:
            QueueFullError: There is no room, and all sessions are in use.
        """
        terms, sessions = self.terms, list(self._sessions.values())
        of_owner = [
            session for session in sessions if counted_as and session.counted_as == counted_as
        ]
        if len(of_owner) >= terms.max_of_owner:
            sessions, of_whom = of_owner, " of this API key or address"
        elif len(sessions) >= terms.sessions:
            of_whom = ""
        else:
            return None
        may_go = [session for session in sessions if session.over or session.connection is None]
        if not may_go:
            raise QueueFullError(
                f"there are {len(sessions)} sessions{of_whom}, the most allowed; end one, or wait"
            )
        return min(
            may_go,
            key=lambda session: (
                not session.over,
                session.quiet_since if session.over else session.away_since,
            ),
        )

    def _read(self, session: _Session, sent_tokens: int) -> None:
        """Request a new row, in which the engine prefills the text.

        The client has the hidden states of the first ``sent_tokens`` tokens.
        """
        session.row_index += 1
        session.unsent_events.clear()
        session.is_ready, session.draft, session.last_round, session.over = False, None, None, ""
        # A client may claim any number. The last token has no hidden states before it is read.
        sent_tokens = min(sent_tokens, len(session.text))
        session.sent_tokens = min(sent_tokens, len(session.text) - 1)
        listener = partial(self._listen, session, session.row_index)
        try:
            session.row = self._engine.open_row(
                list(session.text),
                session.params,
                prompt_length=session.prompt,
                known=sent_tokens,
                listener=listener,
                owner=session.counted_as,
                tenant="" if self.terms.share_prefixes else session.owner,
                compiled_grammar=session.grammar,
            )
        except EngineError as error:
            raise FrameError(1011, f"{error}") from None

    def _draft(self, connection: Connection, session: _Session, draft: wire.DraftMessage) -> None:
        """Verify a draft, answer a repeated one, or refuse one that does not fit."""
        newest = session.sequence
        if newest is not None and draft.sequence < newest:
            # A late copy: the client has its verdict, because it has sent a newer draft since.
            return
        if newest is not None and draft.sequence == newest:
            self._repeat(connection, session, draft)
        elif session.draft is not None:
            self._refuse(
                connection,
                session,
                "busy",
                f"sequence={draft.sequence}: draft {newest} has no verdict yet; wait",
            )
        elif newest is not None and draft.sequence != newest + 1:
            self._refuse(
                connection,
                session,
                "sequence",
                f"sequence={draft.sequence}: the next is {newest + 1}",
            )
        elif not self._has(session, draft):
            self._resync(connection, session, draft)
        elif session.over:
            self._refuse(connection, session, "over", f"the text has ended ({session.over})")
        elif not session.is_ready or session.row is None:
            self._refuse(
                connection, session, "not_ready", "the text is being prefilled; wait for Ready"
            )
        else:
            self._verify(session, session.row, draft)

    def _repeat(self, connection: Connection, session: _Session, draft: wire.DraftMessage) -> None:
        """Answer a repeated draft: with its verdict, or with Opened while it has none."""
        before = session.draft or (session.last_round and session.last_round[0])
        if before is None or msgspec.structs.replace(draft, epoch=before.epoch) != before:
            raise FrameError(
                4400,
                f"sequence={draft.sequence}: another draft had this number; repeat the same one",
            )
        if session.draft is None and session.last_round is not None:
            self._send(
                connection, msgspec.structs.replace(session.last_round[1], epoch=session.epoch)
            )
        elif session.draft is not None:
            # It may wait long for a row, and the client must know that it has arrived.
            self._send(connection, self._opened(session))

    @staticmethod
    def _has(session: _Session, draft: wire.DraftMessage) -> bool:
        """Return whether a draft is below the session's text."""
        return draft.base == len(session.text) and draft.digest == wire.digest(session.text)

    def _resync(self, connection: Connection, session: _Session, draft: wire.DraftMessage) -> None:
        """Send the end of the server's text to a client that has another text.

        It begins after the client's text if that is a prefix of the server's, else after the
        prompt.
        """
        text, prompt = session.text, session.prompt
        is_begun = draft.base <= len(text) and draft.digest == wire.digest(text[: draft.base])
        tail = wire.pack(text[draft.base if is_begun else prompt :], "int32")
        self._send(
            connection,
            wire.ResyncMessage(
                session=session.id, epoch=session.epoch, length=len(text), tail=tail
            ),
        )

    def _verify(self, session: _Session, row: Row, draft: wire.DraftMessage) -> None:
        """Submit a draft to the engine."""
        tokens, parents = wire.unpack(draft.tokens), wire.unpack(draft.parents).astype(np.int32)
        parents[0] = -1  # unsigned bytes on the wire have no -1
        if tokens[0] != session.text[-1]:
            raise FrameError(
                4400,
                f"tokens[0]={tokens[0]}: the root is the newest committed token,"
                f" {session.text[-1]}",
            )
        row.is_away = False
        try:
            row.verify(tokens, parents)
        except InputError as error:
            raise FrameError(4400, str(error)) from None
        except EngineError as error:
            raise FrameError(1011, str(error)) from None
        session.draft, session.sequence, session.last_round = draft, draft.sequence, None
        if session.answered_at is not None:
            self.statistics.round_trips += 1
            self.statistics.round_trip_seconds += self._clock() - session.answered_at

    def _resume(
        self, connection: Connection, session: _Session, message: wire.ResumeMessage
    ) -> None:
        """Continue a session on this connection."""
        if message.epoch <= session.epoch:
            # If the message was repeated, the client waits for a sign that it has arrived.
            if message.epoch == session.epoch and session.connection is connection:
                # Nothing else may be sent for long, during the prefill or the wait for a row.
                if not session.is_ready:
                    self._send(connection, self._opened(session))
                self._send_ready(session, message)
            else:
                self._refuse_epoch(connection, session, message.epoch)
            return
        text, base = session.text, message.base
        if not session.prompt <= base <= len(text) or message.digest != wire.digest(text[:base]):
            self._end(session)
            self._send(connection, wire.ForgottenMessage(session=session.id))
            return
        self.statistics.resumes += 1
        session.connection, session.epoch, session.answered_at = connection, message.epoch, None
        session.quiet_since = self._clock()
        self._count()
        if session.row is not None:
            session.row.is_away = False
        if not self._can_continue(session, message):
            # Tokens that the client lacks are forgotten. Its next drafts lead to the same ones,
            # because a verdict depends on the text and the settings alone.
            del text[base:]
            self._read_again(session, message.known)
        else:
            self._send_ready(session, message)

    def _lacks_last_verdict(self, session: _Session, message: wire.ResumeMessage) -> bool:
        return session.last_round is not None and session.last_round[0].base == message.base

    def _send_ready(self, session: _Session, message: wire.ResumeMessage) -> None:
        """Send Ready if the text is prefilled, and the client lacks at most the last verdict."""
        if session.is_ready and (
            message.base == len(session.text) or self._lacks_last_verdict(session, message)
        ):
            self._send_to_client(
                session,
                wire.ReadyMessage(session=session.id, epoch=session.epoch, length=message.base),
            )

    def _can_continue(self, session: _Session, message: wire.ResumeMessage) -> bool:
        """Return whether the client can continue without another prefill.

        It has the text and its hidden states, or lacks only the last verdict.
        """
        sent_tokens = message.known if self.terms.tells else message.base
        if message.base == len(session.text):
            return sent_tokens >= session.sent_tokens or bool(session.over)
        return self._lacks_last_verdict(session, message) and sent_tokens >= message.base - 1

    def _read_again(self, session: _Session, sent_tokens: int) -> None:
        """Have the text prefilled in another row. The next draft may have any ``sequence``."""
        if session.row is not None:
            session.row.close()
        # The client may repeat its draft, or make a new one: both numbers must be accepted.
        session.row, session.sequence = None, None
        try:
            self._read(session, sent_tokens)
        except QueueFullError as error:
            connection = session.connection
            self._end(session)
            if connection is not None:
                self._refuse(connection, session, "full", str(error))
        except (FrameError, InputError) as error:
            self._end(session)
            raise error if isinstance(error, FrameError) else FrameError(4400, str(error)) from None

    def _refuse_epoch(self, connection: Connection, session: _Session, epoch: int) -> None:
        self._refuse(
            connection,
            session,
            "old_epoch",
            f"epoch={epoch}: the session is at {session.epoch}; resume it",
        )

    def _refuse(self, connection: Connection, session: _Session, code: str, message: str) -> None:
        self._send(connection, _refused(code, message, session.id))

    # --- events of the engine ---------------------------------------------------------------------

    def _listen(self, session: _Session, row_index: int, event: Any) -> None:
        """Pass an event of a row to the sessions' thread. The engine's thread calls it."""
        # The index of the row as it was when the row was opened: the session may have another one
        # when the event arrives.
        self._post(partial(self._handle_event, session, row_index, event))

    def _handle_event(self, session: _Session, row_index: int, event: Any) -> None:
        """Handle an event of a row, unless the session has ended or has another row by now."""
        if row_index != session.row_index or session.id not in self._sessions:
            return
        if isinstance(event, clients.RowFeatures | clients.RowReady):
            # If there are unsent events, a call of `_send_next` is posted already.
            is_sending = bool(session.unsent_events)
            session.unsent_events.extend(
                _pieces(event) if isinstance(event, clients.RowFeatures) else [event]
            )
            if not is_sending:
                self._send_next(session, row_index)
        elif isinstance(event, clients.DraftVerified):
            self._answer(session, event)
        elif isinstance(event, clients.RowDropped):
            self.statistics.dropped += 1
            connection = session.connection
            self._end(session)
            if connection is not None:
                self._send(connection, wire.ForgottenMessage(session=session.id))

    def _send_next(self, session: _Session, row_index: int) -> None:
        """Send one event of a prefill, and post the next, so that others are served in between."""
        if row_index != session.row_index or session.id not in self._sessions:
            return
        event = session.unsent_events.popleft()
        if isinstance(event, clients.RowFeatures):
            session.sent_tokens = max(session.sent_tokens, event.start + event.count)
            arrays, start, count = self._packed(session, event.arrays), event.start, event.count
            self._send_to_client(
                session,
                wire.ToldMessage(
                    session=session.id, epoch=session.epoch, start=start, count=count, arrays=arrays
                ),
            )
        else:
            session.is_ready, session.quiet_since = True, self._clock()
            session.sent_tokens = len(session.text) - 1
            ready = wire.ReadyMessage(
                session=session.id, epoch=session.epoch, length=len(session.text)
            )
            self._send_to_client(session, ready)
        if session.unsent_events:
            self._post(partial(self._send_next, session, row_index))

    def _answer(self, session: _Session, event: clients.DraftVerified) -> None:
        """Append a verdict to the text, store it, and send it."""
        draft = session.draft
        if draft is None:
            return
        tokens = wire.unpack(draft.tokens)
        session.text.extend([*(int(tokens[node]) for node in event.accepted), event.token])
        session.sent_tokens = len(session.text) - 1
        verdict = wire.VerdictMessage(
            session=session.id,
            epoch=session.epoch,
            sequence=draft.sequence,
            accepted=list(event.accepted),
            token=event.token,
            arrays=self._packed(session, event.arrays),
            over=event.over,  # pyright: ignore[reportArgumentType] - the same literals
            seconds=event.seconds,
            grammar_completed=(
                UNSET if event.grammar_completed is None else event.grammar_completed
            ),
        )
        # Stored until the next draft: if the verdict is lost on the way, the draft is repeated.
        session.draft, session.last_round, session.over = None, (draft, verdict), event.over
        self.statistics.rounds += 1
        # Others can have the row at once. The session stays, for a client that lacks the verdict.
        if event.over and session.row is not None:
            session.row.close()
            session.row = None
        session.quiet_since = self._clock()
        session.answered_at = None if session.connection is None else session.quiet_since
        self._send_to_client(session, verdict)

    @staticmethod
    def _packed(session: _Session, arrays: Mapping[str, np.ndarray]) -> dict[str, wire.ArrayBytes]:
        return {name: wire.pack(array, session.precision) for name, array in arrays.items()}

    # --- both -------------------------------------------------------------------------------------

    def _end(self, session: _Session) -> None:
        """End a session, and close its row."""
        self._sessions.pop(session.id, None)
        session.connection = None
        if session.row is not None:
            session.row.close()
            session.row = None
        self._count()

    def _send_to_client(self, session: _Session, message: wire.DownMessage) -> None:
        """Send to the session's client. Without a connection the message is dropped.

        A client that resumes gets what it lacks: the stored verdict, or another prefill.
        """
        if session.connection is not None:
            self._send(session.connection, message)

    def _send(self, connection: Connection, message: wire.DownMessage) -> None:
        self.statistics.bytes_down += connection.send(message)

    def _count(self) -> None:
        self.statistics.sessions = len(self._sessions)
        self.statistics.away = sum(
            session.connection is None for session in self._sessions.values()
        )


def _refused(code: str, message: str, session: bytes = b"") -> wire.RefusedMessage:
    """Return a Refused that can be encoded: an error may quote what a client has sent."""
    text = message.encode(errors="replace").decode()[:1000]
    return wire.RefusedMessage(code=code, message=text, session=session)


def _pieces(event: clients.RowFeatures) -> list[clients.RowFeatures]:
    """Split hidden states into pieces, one per frame."""
    token_bytes = sum(value.size * 4 for value in event.arrays.values()) // max(event.count, 1)
    step = max(TOLD_BYTES // max(token_bytes, 1), 1)
    pieces = [slice(first, min(first + step, event.count)) for first in range(0, event.count, step)]
    return [
        clients.RowFeatures(
            event.start + piece.start,
            piece.stop - piece.start,
            {name: value[piece] for name, value in event.arrays.items()},
        )
        for piece in pieces
    ]
