"""HTTP/1.1 by uvicorn and h11, and WebSockets by websockets, with bounds on what a client may leave undone.

uvicorn waits for ever for the rest of a request's head, and for a reader that has stopped reading; it counts and times no
handshake of TLS. Here all of them have deadlines, and there are only so many connections (`specjax.serving.http.places`). What
is no HTTP at all is answered with an error object, too.
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
    """What a client may leave undone.

    Attributes:
        request_seconds: in which a request has to be there, its body included. More than the application waits for a body, so
            that its answer comes first.
        reader_seconds: after which a reader that has taken nothing is dropped.
        connections: at a time; a quarter of them may be of one address.
        trusted: addresses or networks of which more may be.
        handshake_seconds: in which TLS has to be agreed on, and as long for its end.
        probe_seconds: in place of ``request_seconds``, where nothing but a probe is answered.

    Examples:
        >>> from specjax.serving.http.protocol import ConnectionLimits
        >>> ConnectionLimits().reader_seconds
        60.0
    """

    request_seconds: float = 45.0
    reader_seconds: float = 60.0
    connections: int = 512  # below the 1024 files that a process may often have open
    trusted: tuple[str, ...] = ()
    handshake_seconds: float = 10.0
    probe_seconds: float = 5.0


MAX_PARTS = 1024
"""Parts of one message of a WebSocket. Its bytes are bounded, but parts may be empty."""

MAX_PONGS = 2**16
"""Bytes of answers to pings that a client may leave unread."""


class _Watched(asyncio.Protocol):
    """A connection whose reader has to take something now and then."""

    _bounds: ConnectionLimits
    _place: ConnectionPlace
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._place.leave()
        self._reader_timer = _cancelled(self._reader_timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """It has not taken all that was written."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """It has."""
        self._reader_timer = _cancelled(self._reader_timer)
        super().resume_writing()

    def _await_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(self._bounds.reader_seconds, self._look_after_reader, left)

    def _look_after_reader(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._await_reader()
        else:
            self._drop()

    def _drop(self) -> None:
        """Close at once. What is still to be sent is thrown away, in place of waiting for a reader that does not come."""
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class Protocol(_Watched, H11Protocol):
    """A connection."""

    def __init__(self, bounds: ConnectionLimits, place: ConnectionPlace, **given: Any) -> None:
        """``given``: what uvicorn gives to a protocol."""
        super().__init__(**given)
        self._bounds, self._place = bounds, place
        self._request_timer: asyncio.TimerHandle | None = None
        if place.refusal:
            self.app = _OnlyProbes(self.app, place)

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A client has connected."""
        super().connection_made(transport)
        # Writing pauses until the reader has taken everything: so it is known whether it takes anything at all. (With TLS a
        # limit of 0 would pause it for ever.)
        transport.set_write_buffer_limits(high=1, low=0)
        self._place.on_give_way(self._give_way)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._request_timer = _cancelled(self._request_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """It has sent something."""
        if self._is_answered_first:
            self.cycle.keep_alive = False
            return
        if self._request_timer is None and not self._is_answering:
            self._await_request()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and self.conn.their_state is not h11.SEND_BODY:
            self._request_timer = _cancelled(self._request_timer)
        if self._is_answering and self._place.refusal:
            self.cycle.keep_alive = False  # the place is for the next one
        if self._is_answered_first and self.conn.trailing_data[0]:
            self.cycle.keep_alive = False
            self.flow.resume_reading()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """From now on it is a `SocketProtocol`, and no request is waited for."""
        self._request_timer = _cancelled(self._request_timer)
        self._reader_timer = _cancelled(self._reader_timer)  # the other one is told when everything has been taken
        super().handle_websocket_upgrade(event)
        protocol = self.transport.get_protocol()
        assert isinstance(protocol, SocketProtocol)
        protocol.keep(self._place)

    def _should_upgrade(self) -> bool:
        """Whether a request begins a WebSocket. Elsewhere than where there is one it is a request like others, whatever it says
        of upgrades. And so it is where something of an answer is still to be read."""
        is_asked = self.scope["path"] == PATH and _is_handshake(self.scope["method"], self.headers)
        # Before the first answer there may be TLS's own: tickets, where the end of its handshake and the request come together.
        is_unread = self.cycle is not None and self.transport.get_write_buffer_size() > 0
        return is_asked and super()._should_upgrade() and not is_unread and not self._place.refusal

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self._refuse(400, msg)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_answered_first(self) -> bool:
        """Whether a request is there and not answered yet. What comes after it is not read: the connection is closed when it is
        answered, and the next request may be sent again on another one. uvicorn would keep it and stop reading, and so not see
        that the client goes away."""
        return self._is_answering and self.conn.their_state is h11.DONE

    def _await_request(self) -> None:
        bounds = self._bounds
        seconds = min(bounds.request_seconds, bounds.probe_seconds) if self._place.refusal else bounds.request_seconds
        self._request_timer = self.loop.call_later(seconds, self._give_way if self._place.refusal else self._drop)

    def _give_way(self) -> None:
        """Close, for others; with a word to who has asked for nothing yet and takes it at once."""
        if self._place.is_silent and self.scheme == "http":
            self._refuse(503, self._place.refusal, ("retry-after", "1"))
        else:
            self._drop()

    def _refuse(self, status: int, message: str, *headers: tuple[str, str]) -> None:
        """Answer with an error, if nothing has been answered yet, and close."""
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encode(error_object(status, message))
            head: Any = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
            answer = h11.Response(status_code=status, headers=[*head, *headers], reason=HTTPStatus(status).phrase)
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._request_timer = _cancelled(self._request_timer)
        self.transport.close()


class _OnlyProbes:
    """An application that answers probes alone, and says ``Connection: close``."""

    def __init__(self, app: Any, place: ConnectionPlace) -> None:
        self._app, self._place = app, place

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._place.is_silent = False

        async def send_last(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        if scope["path"] in PROBES and scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send_last)
            return
        body = encode(error_object(503, self._place.refusal))
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"retry-after", b"1")]
        await send_last({"type": "http.response.start", "status": 503, "headers": head})
        await send_last({"type": "http.response.body", "body": body, "more_body": False})


class Door(asyncio.Protocol):
    """A connection that has just been accepted: it is counted, agrees on TLS in the time that there is for it, and goes on as a
    `Protocol`."""

    def __init__(self, bounds: ConnectionLimits, places: Places, security: ssl.SSLContext | None, **given: Any) -> None:
        """``given``: what uvicorn gives to a protocol."""
        self._bounds, self._places, self._security, self._given = bounds, places, security, given
        self._connections: set[Any] = given["server_state"].connections  # uvicorn waits at the end until it is empty
        self._early: list[bytes] = []
        self._agreeing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A client has connected."""
        peer = transport.get_extra_info("peername")
        self._transport, self._place = transport, self._places.take(peer[0] if peer else "")
        if self._security is None:
            self._go_in(transport)
            return
        self._connections.add(self)
        self._place.on_give_way(transport.abort)
        transport.pause_reading()  # until TLS reads
        self._agreeing = asyncio.get_running_loop().create_task(self._agree(transport, self._security))

    def data_received(self, data: bytes) -> None:
        """What came with the end of the handshake."""
        self._early.append(data)

    def shutdown(self) -> None:
        """The server ends."""
        self._transport.abort()

    async def _agree(self, transport: asyncio.Transport, security: ssl.SSLContext) -> None:
        """The handshake of TLS. asyncio would count nothing before its end."""
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
        except OSError:  # it does not speak TLS, takes too long, or has gone: nobody is to be told
            pass
        finally:
            self._connections.discard(self)
            if secure is None:
                transport.abort()
                self._place.leave()
        if secure is not None:
            self._go_in(secure)

    def _go_in(self, transport: asyncio.Transport) -> None:
        protocol = Protocol(self._bounds, self._place, **self._given)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        for data in self._early:
            reader: Any = transport.get_protocol()  # a WebSocket by now, perhaps
            if not transport.is_closing():
                reader.data_received(data)


class SocketProtocol(_Watched, WebSocketsSansIOProtocol):
    """A connection that has become a WebSocket."""

    def __init__(self, bounds: ConnectionLimits, **given: Any) -> None:
        """``given``: what uvicorn gives to a protocol."""
        super().__init__(**given)
        self._bounds = bounds

    def keep(self, place: ConnectionPlace) -> None:
        """It goes on as the connection that has this ``place``."""
        self._place = place

    def data_received(self, data: bytes) -> None:
        """It has sent something."""
        super().data_received(data)
        if not self.handshake_initiated:  # the head cannot be read, and uvicorn would wait for another one
            body = encode(error_object(400, "the head of the request cannot be read"))
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            self.transport.close()

    async def send(self, message: Any) -> None:
        """The application says something."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True  # by a refusal: uvicorn would log an error

    def handle_cont(self, event: Frame) -> None:
        """A part of a message."""
        if len(self.frames) >= MAX_PARTS:
            self.conn.fail(1009, f"a message of more than {MAX_PARTS} parts")
            self.handle_parser_exception()
        else:
            super().handle_cont(event)

    def handle_ping(self) -> None:
        """It is to be answered; not for ever to who reads no answers."""
        super().handle_ping()
        if self.transport.get_write_buffer_size() > MAX_PONGS:
            self._drop()

    def keepalive_timeout(self) -> None:
        """A ping has not been answered."""
        super().keepalive_timeout()
        if self.transport.get_write_buffer_size():
            self._drop()


def _is_handshake(method: str, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a request can begin a WebSocket."""
    given = dict(headers)
    try:
        key = base64.b64decode(given.get(b"sec-websocket-key", b"").strip(), validate=True)
    except binascii.Error:
        return False
    has_body = b"transfer-encoding" in given or given.get(b"content-length", b"0") != b"0"
    return method == "GET" and len(key) == 16 and given.get(b"sec-websocket-version") == b"13" and not has_body


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
