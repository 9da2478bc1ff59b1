"""Texts whose drafts come from clients: the protocol, without sockets, threads or a clock of its own.

A client drafts, the engine verifies. Verification is coupled or greedy, so a verdict follows from the text's settings, its
tokens so far, and the draft. Whatever is asked twice has the same answer, and a text that the server has forgotten goes on as
it would have, once the client has sent it anew.

========= ==== ===================================================== =====================================================
message   way  says                                                  is answered with
========= ==== ===================================================== =====================================================
Open      up   a prompt, what of the text is there already, how to   Opened; Told, as the text is read; Ready. Or Refused
               draw, how many tokens the client has been told of
Draft     up   a tree below the text: its ``sequence``, the length   Verdict. The same one again: the same Verdict again.
               of the text (``base``) and its ``digest``             Another text than the server's: Resync
Resume    up   over a new connection: length and digest of the       Ready, or what follows Opened; Forgotten
               client's text, and how much it was told of
Close     up   the text is not wanted any more                       nothing
Opened    down the session, and the bounds of drafts
Told      down what the drafter needs of tokens that were read
Ready     down a draft below so many tokens may come                 Draft; if one has no verdict yet, the same again
Verdict   down the accepted path and the token that follows it       Draft
Resync    down the server's text from where the client's may differ  Draft, or Resume by who has not been told of it
Forgotten down there is no such session (any more)                   Open, with the whole text
Refused   down why a message was not followed                        what its ``code`` calls for
========= ==== ===================================================== =====================================================

Rules:

- One draft at a time. ``sequence`` counts them; who sends a draft again sends the same one under the same number. Its verdict
  is kept until the next draft comes.
- A Resume brings a greater ``epoch``, and what is said under a smaller one is refused: it was under way while the connection
  changed. A Resume that comes twice, under one epoch, changes nothing the second time. Nor does an Open, which has a ``nonce``.
  While the text is read, either is answered with Opened, so that the client knows that it was heard.
- A session that has lost its connection is *away*. It is kept for a while, and so is its row, unless somebody else needs that.
  The row of a client that is connected, but sends no draft for a second, is given to somebody who waits, too; then the
  session stays, and its next draft has its verdict once there is a row and the text is read again. A draft that is sent
  again meanwhile is answered with Opened, so that the client knows that it was heard.
- Of one API key, or of one address where there are no keys, only so many sessions are taken.
- Who resumes may lack something. If it is the newest verdict, Ready names the length before it, and the client sends its draft
  again. Otherwise the text is read anew from where the client is, in another row, and what it was not told is told.
- A session belongs to whoever has opened it. To others it does not exist.

Codes of Refused: ``version``, ``target``, ``drafter`` (this server has others), ``invalid`` (a prompt or a setting that cannot
be used), ``draining`` (no new texts: the server shuts down), ``full`` (no room for this text now), ``old_epoch``,
``not_ready`` (a draft before Ready), ``busy`` (a draft while another one is verified), ``sequence`` (a number was left out),
``over`` (a draft for a text that has ended).
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

from specjax import wire
from specjax.errors import InputError
from specjax.sampling import SAMPLING_NAMES
from specjax.sampling_params import SamplingParams
from specjax.serving import clients
from specjax.serving.handle import EngineError
from specjax.serving.scheduler import QueueFullError
from specjax.wire import FrameError

TOLD_BYTES = 2**18
"""What is told of a chunk of a prompt comes in frames of so many bytes, or of one token: small ones wait between them."""

MAX_UNSENT = 2**28
"""Bytes that may wait to be sent over a connection, however much there is to be told. Who is cut off goes on from there."""


class Row(Protocol):
    """A text's place in the engine."""

    is_away: bool

    def verify(self, tokens: np.ndarray, parents: np.ndarray) -> None:
        """Verify a draft; what comes of it is told to the listener."""

    def close(self) -> None:
        """It is not wanted any more."""


class RowEngine(Protocol):
    """What sessions need of an engine."""

    def open_row(
        self, tokens: Sequence[int], params: SamplingParams, *, listener: Callable[[Any], None], **options: Any
    ) -> Row:
        """Begin to read a text. The listener is told of it from another thread."""
        ...


@dataclass(frozen=True)
class Terms:
    """What a server takes from clients, and how much of it.

    Attributes:
        nodes: most of a draft, the root among them.
        depth: most of a draft, the root's being 0.
        capacity: most tokens of a text.
        tells: arrays that are told of each token, with the shape of one token.
        target: fingerprint of the target; empty: any is accepted.
        drafter: likewise of the drafter.
        away_seconds: that a session without a connection is kept.
        sessions: most of them.
        sessions_per_owner: most of one API key, or of one address where there are no keys; None: half of all, at least 1.
        unsent_bytes: most that may wait to be sent over a connection; None: what is told of two whole texts, and a MiB, but no
            more than `MAX_UNSENT`.

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

    @property
    def max_of_owner(self) -> int:
        """Most sessions of one API key, or of one address."""
        return max(1, self.sessions // 2) if self.sessions_per_owner is None else self.sessions_per_owner

    @property
    def max_unsent_bytes(self) -> int:
        """Most bytes that may wait to be sent over a connection."""
        told = 4 * self.capacity * sum(int(np.prod(shape)) for shape in self.tells.values())
        return min(2 * told + 2**20, MAX_UNSENT) if self.unsent_bytes is None else self.unsent_bytes


@dataclass
class SessionStatistics:
    """What has happened so far.

    Attributes:
        opened: texts.
        rounds: drafts that were verified.
        round_trips: drafts that followed a verdict over the same connection.
        round_trip_seconds: of those together, from the verdict to the draft: the network there and back, and the client.
        resumes: sessions that went on over another connection.
        bytes_up: of frames that came.
        bytes_down: of frames that went.
        dropped: rows that were given to others or lost, and sessions that were away for too long.
        sessions: that there are.
        away: of those, without a connection.

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
    """A client that can be spoken to.

    Attributes:
        owner: whom its sessions belong to.
        counted_as: with what other sessions and rows those that are opened here are counted; empty: with none.
        unsent: bytes that were handed to ``send`` and are not `sent`.
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
        self._is_lost = False

    def receive(self, frame: bytes) -> None:
        """The client has sent a frame.

        Raises:
            FrameError: the connection has to be closed.
        """
        if not self._is_lost:
            self._sessions.receive(self, frame)

    def sent(self, count: int) -> None:
        """So many bytes have been taken."""
        self.unsent -= count

    def lost(self) -> None:
        """The connection is no more. Its sessions are away."""
        self._is_lost = True
        self._sessions.leave(self)

    def send(self, message: wire.DownMessage) -> int:
        """Send a message, unless too much is waiting already: then the client is cut off. How many bytes went."""
        if self._is_lost:
            return 0
        frame = wire.encode(message)
        if self.unsent + len(frame) > self._sessions.terms.max_unsent_bytes:
            self.lost()
            self._close(FrameError(4408, f"{self.unsent} bytes wait to be read; read faster"))
            return 0
        self.unsent += len(frame)
        self._send(frame)
        return len(frame)


@dataclass
class _Session:
    """A text.

    Attributes:
        id: what it is called.
        owner: whom it belongs to.
        counted_as: with what other sessions and rows it is counted; empty: with none.
        precision: of what comes down.
        params: the sampling parameters.
        prompt: how many of its tokens are the prompt.
        text: committed tokens.
        nonce: of the Open that it began with.
        epoch: the newest.
        row: its place in the engine; None: it needs none, for the text has ended.
        number: of the row among those that it has had: what earlier ones say is not listened to.
        is_ready: whether the text is read.
        told: how many tokens have been told of, from the first on.
        untold: what the engine has said of the text as it was read, and the client has yet to hear.
        sequence: of the newest draft; None: the next may have any.
        draft: that is being verified.
        kept: the newest draft that was verified, and what came of it.
        over: "stop" or "length": the text has ended.
        connection: where it is listened to; None: it is away.
        away_since: when it went.
        answered_at: when the newest verdict was sent over this connection; None: none was.
        quiet_since: when something last happened that the client may answer, or it last spoke.
    """

    id: bytes
    owner: str
    counted_as: str
    precision: wire.Precision
    params: SamplingParams
    prompt: int
    text: "array[int]"
    nonce: bytes = b""
    epoch: int = 0
    row: Row | None = None
    number: int = 0
    is_ready: bool = False
    told: int = 0
    untold: deque[clients.RowFeatures | clients.RowReady] = field(default_factory=deque)
    sequence: int | None = 0
    draft: wire.DraftMessage | None = None
    kept: tuple[wire.DraftMessage, wire.VerdictMessage] | None = None
    over: str = ""
    connection: Connection | None = None
    away_since: float = 0.0
    answered_at: float | None = None
    quiet_since: float = 0.0

    def is_of(self, owner: str, nonce: bytes) -> bool:
        """Whether it is the session that an Open with this ``nonce`` of this ``owner`` began."""
        return self.owner == owner and self.nonce == nonce


def _params_of(message: wire.OpenMessage) -> SamplingParams:
    """Return the sampling parameters that a client asks for."""
    return SamplingParams(
        **{name: getattr(message, name) for name in SAMPLING_NAMES if hasattr(message, name)},
        seed=message.seed,
        max_new_tokens=message.limit,
        eos_token_ids=None if message.eos is None else tuple(message.eos),
    )


class Sessions:
    """The texts of all clients.

    Everything is called in one thread, the sessions' own, and nothing waits.

    Attributes:
        terms: what is taken.
        statistics: what has happened.
        is_draining: no new texts are taken.

    Examples:
        >>> from specjax import wire
        >>> from specjax.serving.sessions import Sessions, Terms
        >>> class Rows:  # an engine's part of it
        ...     def open_row(self, tokens, params, *, listener, **options):
        ...         return None
        >>> sessions, heard = Sessions(Rows(), Terms(), post=lambda work: None), []
        >>> connection = sessions.connect("me", heard.append, close=print)
        >>> asked = wire.OpenMessage(nonce=bytes(16), tokens=wire.pack([5, 6], "int32"), prompt=2, limit=8)
        >>> connection.receive(wire.encode(asked))
        >>> wire.decode_down(heard[0]).depth
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
    ) -> None:
        """Of an ``engine``.

        Args:
            engine: what reads texts and verifies drafts.
            terms: what is taken.
            post: has something done in the sessions' thread, from any thread, later.
            clock: seconds.
            make_id: sixteen bytes that nobody guesses.
        """
        self.terms, self.statistics, self.is_draining = terms, SessionStatistics(), False
        self._engine, self._post, self._clock, self._make_id = engine, post, clock, make_id
        self._sessions: dict[bytes, _Session] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a client is waiting for more of a text."""
        return any(session.connection is not None and not session.over for session in self._sessions.values())

    def connect(
        self,
        owner: str,
        send: Callable[[bytes], None],
        close: Callable[[FrameError], None],
        counted_as: str | None = None,
    ) -> Connection:
        """A client has come.

        Args:
            owner: whom its sessions belong to.
            send: hands a frame to the client, at once or later; `Connection.sent` says when it has gone.
            close: the client has to be cut off.
            counted_as: what limits of sessions and rows go by, such as an address where nobody has a key; None: the owner.
                Empty: there are no limits.
        """
        return Connection(self, owner, send, close, owner if counted_as is None else counted_as)

    def leave(self, connection: Connection) -> None:
        """A connection is no more: its sessions are away."""
        for session in self._sessions.values():
            if session.connection is connection:
                session.connection, session.away_since = None, self._clock()
                if session.row is not None:
                    session.row.is_away = True
        self._count()

    def tick(self) -> None:
        """End the sessions that have been away for too long. To be called now and then."""
        until = self._clock() - self.terms.away_seconds
        for session in list(self._sessions.values()):
            if session.connection is None and session.away_since <= until:
                self.statistics.dropped += 1
                self._end(session)

    def close(self) -> None:
        """End all of them."""
        for session in list(self._sessions.values()):
            self._end(session)

    # --- what clients say --------------------------------------------------------------------------------------------

    def receive(self, connection: Connection, frame: bytes) -> None:
        """Follow a frame, as `Connection.receive`."""
        self.statistics.bytes_up += len(frame)
        message = wire.decode_up(frame)
        if isinstance(message, wire.OpenMessage):
            self._open(connection, message)
            return
        session = self._sessions.get(message.session)
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

    def _open(self, connection: Connection, asked: wire.OpenMessage) -> None:
        """A text begins."""
        before = next((each for each in self._sessions.values() if each.is_of(connection.owner, asked.nonce)), None)
        if before is None and (refusal := self._refusal(asked)) is not None:
            self._send(connection, wire.RefusedMessage(code=refusal[0], message=refusal[1][:1000]))
            return
        if before is not None and before.connection is connection:  # it has come twice
            self._send(connection, self._opened(before))
            if before.is_ready:
                self._send(connection, wire.ReadyMessage(session=before.id, epoch=before.epoch, length=len(before.text)))
            return
        if before is not None and before.epoch:  # a late copy: the client knows its session, and has resumed it
            return
        if before is not None:  # over a connection that was lost: nobody knows its session
            self._end(before)
        try:
            goes = self._who_goes(connection.counted_as)
            session = _Session(
                self._make_id(),
                connection.owner,
                connection.counted_as,
                asked.precision,
                _params_of(asked),
                asked.prompt,
                array("i", wire.unpack(asked.tokens).tolist()),
                nonce=asked.nonce,
                connection=connection,
            )
            self._read(session, asked.known)
        except InputError as error:
            code = "full" if isinstance(error, QueueFullError) else "invalid"
            self._send(connection, wire.RefusedMessage(code=code, message=str(error)[:1000]))
            return
        if goes is not None:
            self.statistics.dropped += 1
            self._end(goes)
        self._sessions[session.id] = session
        self.statistics.opened += 1
        self._count()
        self._send(connection, self._opened(session))

    def _opened(self, session: _Session) -> wire.OpenedMessage:
        terms = self.terms
        tells = {name: list(shape) for name, shape in terms.tells.items()}
        bounds = {"nodes": terms.nodes, "depth": terms.depth, "capacity": terms.capacity}
        return wire.OpenedMessage(session=session.id, epoch=session.epoch, tells=tells, **bounds)

    def _refusal(self, asked: wire.OpenMessage) -> tuple[str, str] | None:
        """Why a text is not taken, and the word for it."""
        if self.is_draining:
            return "draining", "the server is shutting down"
        if asked.version != wire.VERSION:
            return "version", f"version={asked.version}: this server speaks {wire.VERSION}"
        for name in ("target", "drafter"):
            ours, theirs = getattr(self.terms, name), getattr(asked, name)
            if ours and theirs and ours != theirs:
                return name, f"{name}={theirs}: this server has {ours}; draft with the same weights as the server has"
        return None

    def _who_goes(self, counted_as: str) -> _Session | None:
        """Where there is no room for one more session: the text that ended first, or else the client that left first. Where
        one key or address has all the sessions that it may have, it is one of those."""
        terms, sessions = self.terms, list(self._sessions.values())
        of_owner = [session for session in sessions if counted_as and session.counted_as == counted_as]
        if len(of_owner) >= terms.max_of_owner:
            sessions, of_whom = of_owner, " of this API key or address"
        elif len(sessions) >= terms.sessions:
            of_whom = ""
        else:
            return None
        may_go = [session for session in sessions if session.over or session.connection is None]
        if not may_go:
            raise QueueFullError(f"there are {len(sessions)} sessions{of_whom}, and no more are taken; end one, or wait")
        return min(may_go, key=lambda session: (not session.over, session.quiet_since if session.over else session.away_since))

    def _read(self, session: _Session, known: int) -> None:
        """Have the engine read the text, in a new row. Of the first ``known`` tokens nothing is told."""
        session.number += 1
        session.untold.clear()
        session.is_ready, session.draft, session.kept, session.over = False, None, None, ""
        known = min(known, len(session.text))
        session.told = min(known, len(session.text) - 1)
        listener = partial(self._listen, session, session.number)
        try:
            session.row = self._engine.open_row(
                list(session.text),
                session.params,
                prompt_length=session.prompt,
                known=known,
                listener=listener,
                owner=session.counted_as,
            )
        except EngineError as error:
            raise FrameError(1011, f"{error}") from None

    def _draft(self, connection: Connection, session: _Session, draft: wire.DraftMessage) -> None:
        """A draft: it is verified, or was already, or does not fit."""
        newest = session.sequence
        if newest is not None and draft.sequence < newest:
            return  # the client has had the answer: it has sent a newer one since
        if newest is not None and draft.sequence == newest:
            self._again(connection, session, draft)
        elif session.draft is not None:
            self._refuse(connection, session, "busy", f"sequence={draft.sequence}: draft {newest} has no verdict yet; wait")
        elif newest is not None and draft.sequence != newest + 1:
            self._refuse(connection, session, "sequence", f"sequence={draft.sequence}: the next is {newest + 1}")
        elif not self._has(session, draft):
            self._resync(connection, session, draft)
        elif session.over:
            self._refuse(connection, session, "over", f"the text has ended ({session.over})")
        elif not session.is_ready or session.row is None:
            self._refuse(connection, session, "not_ready", "the text is being read; wait for Ready")
        else:
            self._verify(session, session.row, draft)

    def _again(self, connection: Connection, session: _Session, draft: wire.DraftMessage) -> None:
        """The newest draft once more. While it waits to be verified the answer is that it was heard."""
        before = session.draft or (session.kept and session.kept[0])
        if before is None or msgspec.structs.replace(draft, epoch=before.epoch) != before:
            raise FrameError(4400, f"sequence={draft.sequence}: another draft had this number; send the same one again")
        if session.draft is None and session.kept is not None:
            self._send(connection, msgspec.structs.replace(session.kept[1], epoch=session.epoch))
        elif session.draft is not None:  # it may wait for a row for long, and the client is to know that it was heard
            self._send(connection, self._opened(session))

    @staticmethod
    def _has(session: _Session, draft: wire.DraftMessage) -> bool:
        """Whether a draft is below the session's text."""
        return draft.base == len(session.text) and draft.digest == wire.digest(session.text)

    def _resync(self, connection: Connection, session: _Session, draft: wire.DraftMessage) -> None:
        """The client has another text. What follows the tokens that it has for certain is sent: its own, or the prompt's."""
        text, prompt = session.text, session.prompt
        is_begun = draft.base <= len(text) and draft.digest == wire.digest(text[: draft.base])
        tail = wire.pack(text[draft.base if is_begun else prompt :], "int32")
        self._send(connection, wire.ResyncMessage(session=session.id, epoch=session.epoch, length=len(text), tail=tail))

    def _verify(self, session: _Session, row: Row, draft: wire.DraftMessage) -> None:
        tokens, parents = wire.unpack(draft.tokens), wire.unpack(draft.parents).astype(np.int32)
        parents[0] = -1
        if tokens[0] != session.text[-1]:
            raise FrameError(4400, f"tokens[0]={tokens[0]}: the root is the newest committed token, {session.text[-1]}")
        row.is_away = False
        try:
            row.verify(tokens, parents)
        except InputError as error:
            raise FrameError(4400, str(error)) from None
        except EngineError as error:
            raise FrameError(1011, str(error)) from None
        session.draft, session.sequence, session.kept = draft, draft.sequence, None
        if session.answered_at is not None:
            self.statistics.round_trips += 1
            self.statistics.round_trip_seconds += self._clock() - session.answered_at

    def _resume(self, connection: Connection, session: _Session, asked: wire.ResumeMessage) -> None:
        """A text goes on over this connection."""
        if asked.epoch <= session.epoch:
            if asked.epoch == session.epoch and session.connection is connection:  # it has come twice
                if not session.is_ready:  # and while the text is read, or waits for a row, nothing else may come for long
                    self._send(connection, self._opened(session))
                self._say_ready(session, asked)
            else:
                self._refuse_epoch(connection, session, asked.epoch)
            return
        text, base = session.text, asked.base
        if not session.prompt <= base <= len(text) or asked.digest != wire.digest(text[:base]):
            self._end(session)
            self._send(connection, wire.ForgottenMessage(session=session.id))
            return
        self.statistics.resumes += 1
        session.connection, session.epoch, session.answered_at = connection, asked.epoch, None
        session.quiet_since = self._clock()
        self._count()
        if session.row is not None:
            session.row.is_away = False
        if not self._goes_on(session, asked):
            del text[base:]
            self._read_anew(session, asked.known)
        else:
            self._say_ready(session, asked)

    def _say_ready(self, session: _Session, asked: wire.ResumeMessage) -> None:
        """Where the text is read, and the client has it; or all but what its newest draft has added, whose verdict it lacks."""
        kept = session.kept is not None and session.kept[0].base == asked.base
        if session.is_ready and (kept or asked.base == len(session.text)):
            self._say(session, wire.ReadyMessage(session=session.id, epoch=session.epoch, length=asked.base))

    def _goes_on(self, session: _Session, asked: wire.ResumeMessage) -> bool:
        """Whether the client has what it needs: the text and what is told of it, or else the draft whose verdict it lacks.

        If not, the text is read anew from where the client is.
        """
        known = asked.known if self.terms.tells else asked.base
        if asked.base == len(session.text):
            return known >= session.told or bool(session.over)
        return session.kept is not None and session.kept[0].base == asked.base and known >= asked.base - 1

    def _read_anew(self, session: _Session, known: int) -> None:
        """In another row. The client may go on counting its drafts from wherever it is."""
        if session.row is not None:
            session.row.close()
        session.row, session.sequence = None, None
        try:
            self._read(session, known)
        except QueueFullError as error:
            connection = session.connection
            self._end(session)
            if connection is not None:
                self._refuse(connection, session, "full", str(error)[:1000])
        except (FrameError, InputError) as error:
            self._end(session)
            raise error if isinstance(error, FrameError) else FrameError(4400, str(error)) from None

    def _refuse_epoch(self, connection: Connection, session: _Session, epoch: int) -> None:
        self._refuse(connection, session, "old_epoch", f"epoch={epoch}: the session is at {session.epoch}; resume it")

    def _refuse(self, connection: Connection, session: _Session, code: str, message: str) -> None:
        self._send(connection, wire.RefusedMessage(code=code, message=message, session=session.id))

    # --- what the engine says ----------------------------------------------------------------------------------------

    def _listen(self, session: _Session, number: int, event: Any) -> None:
        """In the engine's thread: of a row of a session."""
        self._post(partial(self._follow, session, number, event))

    def _follow(self, session: _Session, number: int, event: Any) -> None:
        """What a row says, unless the session has another one by now, or has ended."""
        if number != session.number or session.id not in self._sessions:
            return
        if isinstance(event, clients.RowFeatures | clients.RowReady):
            is_telling = bool(session.untold)  # then the rest follows
            session.untold.extend(_pieces(event) if isinstance(event, clients.RowFeatures) else [event])
            if not is_telling:
                self._tell(session, number)
        elif isinstance(event, clients.DraftVerified):
            self._answer(session, event)
        elif isinstance(event, clients.RowDropped):
            self.statistics.dropped += 1
            connection = session.connection
            self._end(session)
            if connection is not None:
                self._send(connection, wire.ForgottenMessage(session=session.id))

    def _tell(self, session: _Session, number: int) -> None:
        """One piece of what is told of a text as it is read. The rest follows, and others are served in between."""
        if number != session.number or session.id not in self._sessions:
            return
        event = session.untold.popleft()
        if isinstance(event, clients.RowFeatures):
            session.told = max(session.told, event.start + event.count)
            arrays, start, count = self._packed(session, event.arrays), event.start, event.count
            self._say(
                session, wire.ToldMessage(session=session.id, epoch=session.epoch, start=start, count=count, arrays=arrays)
            )
        else:
            session.is_ready, session.told, session.quiet_since = True, len(session.text) - 1, self._clock()
            self._say(session, wire.ReadyMessage(session=session.id, epoch=session.epoch, length=len(session.text)))
        if session.untold:
            self._post(partial(self._tell, session, number))

    def _answer(self, session: _Session, event: clients.DraftVerified) -> None:
        """A draft has been verified: the text grows, and the verdict is kept."""
        draft = session.draft
        if draft is None:
            return
        tokens = wire.unpack(draft.tokens)
        session.text.extend([*(int(tokens[node]) for node in event.accepted), event.token])
        session.told = len(session.text) - 1
        verdict = wire.VerdictMessage(
            session=session.id,
            epoch=session.epoch,
            sequence=draft.sequence,
            accepted=list(event.accepted),
            token=event.token,
            arrays=self._packed(session, event.arrays),
            over=event.over,  # pyright: ignore[reportArgumentType] - one of the words
            seconds=event.seconds,
        )
        session.draft, session.kept, session.over = None, (draft, verdict), event.over
        self.statistics.rounds += 1
        if event.over and session.row is not None:
            session.row.close()
            session.row = None
        session.quiet_since = self._clock()
        session.answered_at = None if session.connection is None else session.quiet_since
        self._say(session, verdict)

    @staticmethod
    def _packed(session: _Session, arrays: Mapping[str, np.ndarray]) -> dict[str, wire.ArrayBytes]:
        return {name: wire.pack(array, session.precision) for name, array in arrays.items()}

    # --- both --------------------------------------------------------------------------------------------------------

    def _end(self, session: _Session) -> None:
        """The session is no more."""
        self._sessions.pop(session.id, None)
        session.connection = None
        if session.row is not None:
            session.row.close()
            session.row = None
        self._count()

    def _say(self, session: _Session, message: wire.DownMessage) -> None:
        """To who listens. What is said while nobody does is either kept, or told again."""
        if session.connection is not None:
            self._send(session.connection, message)

    def _send(self, connection: Connection, message: wire.DownMessage) -> None:
        self.statistics.bytes_down += connection.send(message)

    def _count(self) -> None:
        self.statistics.sessions = len(self._sessions)
        self.statistics.away = sum(session.connection is None for session in self._sessions.values())


def _pieces(event: clients.RowFeatures) -> list[clients.RowFeatures]:
    """The same in pieces, each for a frame."""
    each = sum(value.size * 4 for value in event.arrays.values()) // max(event.count, 1)
    step = max(TOLD_BYTES // max(each, 1), 1)
    pieces = [slice(first, min(first + step, event.count)) for first in range(0, event.count, step)]
    return [
        clients.RowFeatures(
            event.start + piece.start,
            piece.stop - piece.start,
            {name: value[piece] for name, value in event.arrays.items()},
        )
        for piece in pieces
    ]
