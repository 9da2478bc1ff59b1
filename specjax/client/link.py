"""The connection to the server, a WebSocket, and the clock. Tests replace both by a simulation."""

import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
    WebSocketException,
)
from websockets.sync.client import ClientConnection, connect

from specjax.errors import InputError
from specjax.wire.messages import MOST_DOWN, PATH


class LinkLostError(ConnectionError):
    """The error that there is no connection, or not any more.

    Attributes:
        code: the close code of the server, as in `specjax.wire.FrameError`; None if it sent none.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class LinkRefusedError(RuntimeError):
    """The error that the server refuses this client, for instance because of a wrong API key."""


class Link(Protocol):
    """The network as a client uses it."""

    def connect(self, timeout: float) -> None:
        """Start to connect, and return at once. `is_open` reports the result."""
        ...

    def is_open(self) -> bool:
        """Return whether the connection is open.

        Raises:
            LinkLostError: The attempt has failed, and another one may succeed.
            LinkRefusedError: Every further attempt would fail as well.
        """
        ...

    def send(self, frame: bytes) -> None:
        """Send a frame, or raise `LinkLostError`."""
        ...

    def receive(self, timeout: float) -> bytes | None:
        """Return the next frame, or None if none comes within ``timeout`` seconds.

        Raises:
            LinkLostError: The connection is lost.
        """
        ...

    def close(self) -> None:
        """Close the connection, or abandon the attempt to connect."""
        ...

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for some seconds."""
        ...


class WebSocketLink:
    """A connection over a WebSocket.

    Examples:
        >>> from specjax.client.link import WebSocketLink
        >>> link = WebSocketLink("ws://127.0.0.1:9")
        >>> link.connect(timeout=1.0)
        >>> try:
        ...     while not link.is_open():
        ...         link.sleep(0.01)
        ... except ConnectionError:
        ...     print("nobody is there")
        nobody is there
    """

    def __init__(
        self, url: str, api_key: str | None = None, certificate: str | Path | None = None
    ) -> None:
        """Make a link that is not connected yet.

        Args:
            url: ``ws://HOST:PORT`` or ``wss://HOST:PORT``.
            api_key: the server's API key, if it requires one.
            certificate: a file with the certificates to trust, instead of the system's.

        Raises:
            InputError: The address is invalid, or the certificate cannot be used.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise InputError(
                f"server={url!r}: give ws://HOST:PORT, or wss://HOST:PORT if the server has a"
                " certificate"
            )
        self._url = url if parts.path.strip("/") else url.rstrip("/") + PATH
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._security: ssl.SSLContext | None = None
        if parts.scheme == "wss":
            try:
                self._security = ssl.create_default_context(
                    cafile=None if certificate is None else str(certificate)
                )
            except (OSError, ssl.SSLError) as error:
                raise InputError(
                    f"certificate={str(certificate)!r}: the file cannot be read ({error})"
                ) from None
        elif certificate is not None:
            raise InputError(
                f"certificate={str(certificate)!r}: server={url!r} is not encrypted; give"
                " wss://HOST:PORT"
            )
        self._attempt: Future[ClientConnection] | None = None
        self._connection: ClientConnection | None = None

    def connect(self, timeout: float) -> None:
        """See `Link`."""
        self.close()
        self._attempt = _in_background(partial(self._connected, timeout))

    def is_open(self) -> bool:
        """See `Link`."""
        if self._attempt is not None and self._attempt.done():
            # Cleared first: `result` raises the error of an attempt that has failed.
            attempt, self._attempt = self._attempt, None
            self._connection = attempt.result()
        return self._connection is not None

    def _connected(self, timeout: float) -> ClientConnection:
        security: dict[str, Any] = {} if self._security is None else {"ssl": self._security}
        try:
            connection = connect(
                self._url,
                additional_headers=self._headers,
                open_timeout=timeout,
                close_timeout=0.1,  # `close` runs in the loop of the text, which it must not delay
                max_size=MOST_DOWN,
                compression=None,
                proxy=None,
                **security,
            )
            # websockets requires it since 17.1; `close` does what __exit__ would do.
            return connection.__enter__()
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (401, 403, 404, 426):
                reasons = {
                    401: "a key is missing or wrong",
                    404: "it takes no drafts of clients (serve --drafts)",
                }
                raise LinkRefusedError(
                    f"server={self._url!r}: it answers {status};"
                    f" {reasons.get(status, 'it refuses this client')}"
                ) from None
            raise LinkLostError(f"the server answers {status}") from None
        except ssl.SSLCertVerificationError as error:
            raise LinkRefusedError(
                f"server={self._url!r}: its certificate is not trusted ({error.verify_message});"
                " give certificate=FILE"
            ) from None
        except InvalidURI as error:
            raise LinkRefusedError(f"server={self._url!r}: {error}") from None
        except (OSError, InvalidHandshake, WebSocketException, EOFError) as error:
            raise LinkLostError(str(error)) from None

    def send(self, frame: bytes) -> None:
        """See `Link`."""
        try:
            self._open.send(frame)
        except ConnectionClosed as error:
            raise _lost(error) from None
        except OSError as error:
            raise LinkLostError(str(error)) from None

    def receive(self, timeout: float) -> bytes | None:
        """See `Link`."""
        try:
            frame = self._open.recv(timeout=max(timeout, 0.0))
        except TimeoutError:
            return None
        except ConnectionClosed as error:
            raise _lost(error) from None
        return frame if isinstance(frame, bytes) else b""

    def close(self) -> None:
        """See `Link`."""
        if self._attempt is not None:
            # The attempt cannot be interrupted, so its connection is closed as soon as it is open.
            self._attempt.add_done_callback(_close_if_made)
            self._attempt = None
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError, WebSocketException):
                connection.close()

    def now(self) -> float:
        """See `Link`."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """See `Link`."""
        time.sleep(seconds)

    @property
    def _open(self) -> ClientConnection:
        if self._connection is None:
            raise LinkLostError("not connected")
        return self._connection


def _in_background(work: Callable[[], ClientConnection]) -> "Future[ClientConnection]":
    """Run ``work`` in a thread, and return a future of its result.

    The thread is a daemon, so a process that ends does not wait for it. An executor's threads are
    not daemons.
    """
    attempt: Future[ClientConnection] = Future()

    def run() -> None:
        try:
            attempt.set_result(work())
        except BaseException as error:  # whoever reads the result must see it
            attempt.set_exception(error)

    threading.Thread(target=run, name="specjax-link", daemon=True).start()
    return attempt


def _close_if_made(attempt: "Future[ClientConnection]") -> None:
    if attempt.exception() is None:
        attempt.result().close()


def _lost(error: ConnectionClosed) -> LinkLostError:
    received = error.rcvd
    return LinkLostError(str(error), None if received is None else received.code)
