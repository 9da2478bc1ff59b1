"""HTTP/1.1 by uvicorn and h11, and WebSockets by websockets, with limits on slow clients.

uvicorn waits for ever for the rest of a request's head, and for a client that has stopped reading;
it neither counts nor times TLS handshakes. Here all of them have deadlines, and the number of
connections is limited (`specjax.serving.http.places`). Data that is not HTTP is answered with an
error object, too.
"""

import asyncio
import base64
import binascii
import socket
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from specjax.serving.http.errors import error_object
from specjax.serving.http.places import PROBES, ConnectionPlace, Places
from specjax.serving.http.responses import encode
from specjax.wire import PATH


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits on connections and slow clients.

    Attributes:
        request_seconds: the seconds within which a request must arrive, its body included. It is
            more than the application waits for a body, so that the application's error comes first.
        reader_seconds: the seconds after which a client that has read nothing is disconnected.
        connections: the largest number of connections. One address may have a quarter.
        trusted: addresses or networks without a limit of their own.
        handshake_seconds: the seconds for the TLS handshake, and again for the end of TLS.
        probe_seconds: the limit in place of ``request_seconds`` for connections that only probes
            may use.

    Examples:
        >>> from specjax.serving.http.protocol import ConnectionLimits
        >>> ConnectionLimits().reader_seconds
        60.0
    """

    request_seconds: float = 45.0
    reader_seconds: float = 60.0
    connections: int = 512  # below 1024, a common limit of open files per process
    trusted: tuple[str, ...] = ()
    handshake_seconds: float = 10.0
    probe_seconds: float = 5.0


MAX_PARTS = 1024
"""The largest number of parts of a WebSocket message.

Its bytes are limited, but parts may be empty.
"""

MAX_PONGS = 2**16
"""The largest number of bytes of pongs that a client may leave unread."""


class _Watched(asyncio.Protocol):
    """A connection that is closed if its client stops reading."""

    _bounds: ConnectionLimits
    _place: ConnectionPlace
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the place of the connection."""
        self._place.leave()
        self._reader_timer = _cancelled(self._reader_timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the timer, because the client has not read all that was written."""
        super().pause_writing()
        self._start_reader_timer()

    def resume_writing(self) -> None:
        """Stop the timer, because the client has read everything."""
        self._reader_timer = _cancelled(self._reader_timer)
        super().resume_writing()

    def _start_reader_timer(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(
            self._bounds.reader_seconds, self._check_reader, unread
        )

    def _check_reader(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() < unread:
            self._start_reader_timer()
        else:
            self._drop()

    def _drop(self) -> None:
        """Reset the connection at once. Unsent data is discarded, as the client does not read."""
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class Protocol(_Watched, H11Protocol):
    """An HTTP connection."""

    def __init__(self, bounds: ConnectionLimits, place: ConnectionPlace, **options: Any) -> None:
        """Make the protocol of a counted connection.

        Args:
            bounds: the limits on slow clients.
            place: the connection's place.
            options: uvicorn's arguments of a protocol.
        """
        super().__init__(**options)
        self._bounds, self._place = bounds, place
        self._request_timer: asyncio.TimerHandle | None = None
        if place.refusal:
            self.app = _OnlyProbes(self.app, place)

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Start the timers of a new connection."""
        super().connection_made(transport)
        # With these limits, writing pauses until the client has read everything, so that the timer
        # sees whether it reads at all. With TLS, high=0 would pause for ever.
        transport.set_write_buffer_limits(high=1, low=0)
        self._place.on_give_way(self._give_way)
        self._start_request_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of the request."""
        self._request_timer = _cancelled(self._request_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        if self._is_answered_first:
            self.cycle.keep_alive = False
            return
        if self._request_timer is None and not self._is_answering:
            self._start_request_timer()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and self.conn.their_state is not h11.SEND_BODY:
            self._request_timer = _cancelled(self._request_timer)
        if self._is_answering and self._place.refusal:
            self.cycle.keep_alive = False  # a reserved place is for one request
        if self._is_answered_first and self.conn.trailing_data[0]:
            self.cycle.keep_alive = False
            self.flow.resume_reading()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection to a `SocketProtocol`."""
        self._request_timer = _cancelled(self._request_timer)
        # asyncio will call `resume_writing` of the new protocol.
        self._reader_timer = _cancelled(self._reader_timer)
        super().handle_websocket_upgrade(event)
        protocol = self.transport.get_protocol()
        assert isinstance(protocol, SocketProtocol)
        protocol.keep(self._place)

    def _should_upgrade(self) -> bool:
        """Return whether a request opens a WebSocket.

        On other paths its upgrade headers are ignored. So are they while the client has not read
        the previous answer.
        """
        is_requested = self.scope["path"] == PATH and _is_handshake(
            self.scope["method"], self.headers
        )
        # Before the first answer, unread bytes may be TLS's own: session tickets, if the request
        # arrives together with the end of the handshake.
        is_unread = self.cycle is not None and self.transport.get_write_buffer_size() > 0
        return (
            is_requested and super()._should_upgrade() and not is_unread and not self._place.refusal
        )

    def send_400_response(self, msg: str) -> None:
        """Answer data that is not HTTP."""
        self._refuse(400, msg)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_answered_first(self) -> bool:
        """True while a request has arrived and is not answered yet.

        Further data is then not read (no pipelining): the connection is closed after the answer,
        and the client may send its next request on another one. uvicorn would store the data and
        stop reading, and so not notice that the client disconnects.
        """
        return self._is_answering and self.conn.their_state is h11.DONE

    def _start_request_timer(self) -> None:
        bounds = self._bounds
        if self._place.refusal:
            seconds = min(bounds.request_seconds, bounds.probe_seconds)
        else:
            seconds = bounds.request_seconds
        self._request_timer = self.loop.call_later(
            seconds, self._give_way if self._place.refusal else self._drop
        )

    def _give_way(self) -> None:
        """Close the connection for another one. A client without a request gets an error first."""
        if self._place.has_no_request and self.scheme == "http":
            self._refuse(503, self._place.refusal, ("retry-after", "1"))
        else:
            self._drop()

    def _refuse(self, status: int, message: str, *headers: tuple[str, str]) -> None:
        """Send an error if no answer has begun, and close the connection."""
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encode(error_object(status, message))
            head: Any = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            answer = h11.Response(
                status_code=status, headers=[*head, *headers], reason=HTTPStatus(status).phrase
            )
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._request_timer = _cancelled(self._request_timer)
        self.transport.close()


class _OnlyProbes:
    """The application of a reserved connection: it answers one probe, and refuses the rest."""

    def __init__(self, app: Any, place: ConnectionPlace) -> None:
        self._app, self._place = app, place

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._place.has_no_request = False

        async def send_last(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        if scope["path"] in PROBES and scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send_last)
            return
        body = encode(error_object(503, self._place.refusal))
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"1"),
        ]
        await send_last({"type": "http.response.start", "status": 503, "headers": head})
        await send_last({"type": "http.response.body", "body": body, "more_body": False})


class Door(asyncio.Protocol):
    """A connection that was just accepted.

    It is counted and makes the TLS handshake within a time limit; then a `Protocol` takes over.
    """

    def __init__(
        self,
        bounds: ConnectionLimits,
        places: Places,
        security: ssl.SSLContext | None,
        **options: Any,
    ) -> None:
        """Make the first protocol of a connection.

        Args:
            bounds: the limits on slow clients.
            places: the places of all connections.
            security: the TLS context; None: there is no TLS.
            options: uvicorn's arguments of a protocol.
        """
        self._bounds = bounds
        self._places = places
        self._security = security
        self._options = options
        # uvicorn waits at its shutdown until this set is empty.
        self._connections: set[Any] = options["server_state"].connections
        self._early: list[bytes] = []
        self._negotiation: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Count the connection, and begin the TLS handshake if there is one."""
        peer = transport.get_extra_info("peername")
        self._transport, self._place = transport, self._places.take(peer[0] if peer else "")
        if self._security is None:
            self._become_protocol(transport)
            return
        self._connections.add(self)
        self._place.on_give_way(transport.abort)
        transport.pause_reading()  # until `start_tls` reads: the handshake must not arrive here
        self._negotiation = asyncio.get_running_loop().create_task(
            self._negotiate(transport, self._security)
        )

    def data_received(self, data: bytes) -> None:
        """Store data that arrives together with the end of the handshake."""
        self._early.append(data)

    def shutdown(self) -> None:
        """Abort the connection, because the server ends."""
        self._transport.abort()

    async def _negotiate(self, transport: asyncio.Transport, security: ssl.SSLContext) -> None:
        """Make the TLS handshake. Done by asyncio's server, it would precede the counting."""
        secure: asyncio.Transport | None = None
        try:
            if transport.is_closing():
                return
            secure = await asyncio.get_running_loop().start_tls(
                transport,
                self,
                security,
                server_side=True,
                ssl_handshake_timeout=self._bounds.handshake_seconds,
                ssl_shutdown_timeout=self._bounds.handshake_seconds,
            )
        except OSError:  # the client speaks no TLS, is too slow, or has disconnected
            pass
        finally:
            self._connections.discard(self)
            if secure is None:
                transport.abort()
                self._place.leave()
        if secure is not None:
            self._become_protocol(secure)

    def _become_protocol(self, transport: asyncio.Transport) -> None:
        protocol = Protocol(self._bounds, self._place, **self._options)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        for data in self._early:
            # The first data may have made it a `SocketProtocol`.
            reader: Any = transport.get_protocol()
            if not transport.is_closing():
                reader.data_received(data)


class SocketProtocol(_Watched, WebSocketsSansIOProtocol):
    """A connection that has become a WebSocket."""

    def __init__(self, bounds: ConnectionLimits, **options: Any) -> None:
        """Make the protocol, with uvicorn's arguments as ``options``."""
        super().__init__(**options)
        self._bounds = bounds

    def keep(self, place: ConnectionPlace) -> None:
        """Take over the ``place`` of the HTTP connection."""
        self._place = place

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        super().data_received(data)
        # If the head is malformed, uvicorn would wait for another one.
        if not self.handshake_initiated:
            body = encode(error_object(400, "the head of the request is malformed"))
            head = (
                "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length:"
                f" {len(body)}\r\n"
            )
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            self.transport.close()

    async def send(self, message: Any) -> None:
        """Send a message of the application."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            # The application has refused the WebSocket. Otherwise uvicorn would log an error.
            self.handshake_complete = True

    def handle_cont(self, event: Frame) -> None:
        """Process a part of a message."""
        if len(self.frames) >= MAX_PARTS:
            self.conn.fail(1009, f"the message has more than {MAX_PARTS} parts")
            self.handle_parser_exception()
        else:
            super().handle_cont(event)

    def handle_ping(self) -> None:
        """Answer a ping, and disconnect a client that does not read the answers."""
        super().handle_ping()
        if self.transport.get_write_buffer_size() > MAX_PONGS:
            self._drop()

    def keepalive_timeout(self) -> None:
        """Close the connection, because a ping was not answered."""
        super().keepalive_timeout()
        if self.transport.get_write_buffer_size():
            self._drop()


def _is_handshake(method: str, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return whether a request is a valid WebSocket handshake."""
    values = dict(headers)
    try:
        key = base64.b64decode(values.get(b"sec-websocket-key", b"").strip(), validate=True)
    except binascii.Error:
        return False
    has_body = b"transfer-encoding" in values or values.get(b"content-length", b"0") != b"0"
    return (
        method == "GET"
        and len(key) == 16
        and values.get(b"sec-websocket-version") == b"13"
        and not has_body
    )


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
