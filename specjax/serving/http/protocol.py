"""HTTP/1.1 by uvicorn and h11, with bounds on what a client may leave undone.

uvicorn waits for ever for the rest of a request's head, and for a reader that has stopped reading. Here both have deadlines,
and there are only so many connections. What is no HTTP at all is answered with an error object, too.
"""

import asyncio
import socket
import struct
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specjax.serving.http.errors import error_object
from specjax.serving.http.responses import encode


@dataclass(frozen=True)
class Bounds:
    """What a client may leave undone.

    Attributes:
        request_seconds: in which a request has to be there, its body included. More than the application waits for a body, so
            that its answer comes first.
        reader_seconds: after which a reader that has taken nothing is dropped.
        connections: at a time.

    Examples:
        >>> from specjax.serving.http.protocol import Bounds
        >>> Bounds().reader_seconds
        60.0
    """

    request_seconds: float = 45.0
    reader_seconds: float = 60.0
    connections: int = 512  # below the 1024 files that a process may often have open


class Protocol(H11Protocol):
    """A connection."""

    def __init__(self, bounds: Bounds, **given: Any) -> None:
        """``given``: what uvicorn gives to a protocol."""
        super().__init__(**given)
        self._bounds = bounds
        self._request_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A client has connected."""
        super().connection_made(transport)
        # Writing pauses until the reader has taken everything: so it is known whether it takes anything at all.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self._bounds.connections:
            self._refuse(503, "too many connections; try again later", ("retry-after", "1"))
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._request_timer = _cancelled(self._request_timer)
        self._reader_timer = _cancelled(self._reader_timer)
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
        if self._is_answered_first and self.conn.trailing_data[0]:
            self.cycle.keep_alive = False
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """It has not taken all that was written."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """It has."""
        self._reader_timer = _cancelled(self._reader_timer)
        super().resume_writing()

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
        self._request_timer = self.loop.call_later(self._bounds.request_seconds, self._drop)

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


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
