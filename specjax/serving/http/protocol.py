"""HTTP/1.1 by uvicorn and h11, with bounds on what a client may leave undone.

uvicorn waits for ever for the rest of a request's head, and for a reader that has stopped reading. Here both have deadlines,
and there are only so many connections. What is no HTTP at all is answered with an error object, too.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specjax.serving.http.errors import error_object
from specjax.serving.http.responses import encode

REQUEST_SECONDS = 45.0
"""In which a request has to be there, body included: more than the application waits for a body, which it answers with 408."""

READER_SECONDS = 60.0
"""In which a reader that has fallen behind has to catch up."""

MAX_CONNECTIONS = 1024
"""At a time."""


class Protocol(H11Protocol):
    """A connection."""

    request_seconds = REQUEST_SECONDS
    reader_seconds = READER_SECONDS
    max_connections = MAX_CONNECTIONS
    _request_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A client has connected."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, "too many connections; try again later", ("retry-after", "1"))
            return
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """It has sent something."""
        if self._request_timer is None and not self._is_answering:
            self._await_request()
        super().data_received(data)
        if self.conn.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
            self._request_timer = _cancelled(self._request_timer)

    def pause_writing(self) -> None:
        """It does not read as fast as is written."""
        super().pause_writing()
        if self._reader_timer is None:
            self._reader_timer = self.loop.call_later(self.reader_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It has caught up."""
        self._reader_timer = _cancelled(self._reader_timer)
        super().resume_writing()

    def on_response_complete(self) -> None:
        """A request is answered."""
        super().on_response_complete()
        if self.transport.is_closing():  # what is written is still to be read
            self._reader_timer = _cancelled(self._reader_timer)
            self._reader_timer = self.loop.call_later(self.reader_seconds, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self._refuse(400, msg)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        self._request_timer = self.loop.call_later(self.request_seconds, self.transport.abort)

    def _stop_timers(self) -> None:
        self._request_timer = _cancelled(self._request_timer)
        self._reader_timer = _cancelled(self._reader_timer)

    def _refuse(self, status: int, message: str, *headers: tuple[str, str]) -> None:
        """Answer with an error, if nothing has been answered yet, and close."""
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encode(error_object(status, message))
            head: Any = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
            answer = h11.Response(status_code=status, headers=[*head, *headers])
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._stop_timers()
        self.transport.close()
        self._reader_timer = self.loop.call_later(self.reader_seconds, self.transport.abort)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
