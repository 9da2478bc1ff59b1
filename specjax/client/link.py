"""The way to the server: a WebSocket, and the clock. Tests put a simulated network in its place."""

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

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException
from websockets.sync.client import ClientConnection, connect

from specjax.errors import InputError
from specjax.wire.messages import MOST_DOWN, PATH


class LinkLostError(ConnectionError):
    """There is no connection, or no longer.

    Attributes:
        code: with which the server closed it, as in `specjax.wire.FrameError`; None: it did not say.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class LinkRefusedError(RuntimeError):
    """The server answers, and will not take this client: a wrong key, say."""


class Link(Protocol):
    """What a client needs of a network."""

    def connect(self, timeout: float) -> None:
        """Begin anew. It does not wait: `is_open` tells what has become of it."""
        ...

    def is_open(self) -> bool:
        """Whether there is a connection by now. Raises `LinkLostError` where there will be none, or `LinkRefusedError` where
        it is no use to try again."""
        ...

    def send(self, frame: bytes) -> None:
        """Raises `LinkLostError`."""
        ...

    def receive(self, timeout: float) -> bytes | None:
        """The next frame, or None where none has come in ``timeout`` seconds. Raises `LinkLostError`."""
        ...

    def close(self) -> None:
        """Nothing more is sent."""
        ...

    def now(self) -> float:
        """Seconds of a clock that only goes forward."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class WebSocketLink:
    """A WebSocket.

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

    def __init__(self, url: str, api_key: str | None = None, certificate: str | Path | None = None) -> None:
        """Not connected yet.

        Args:
            url: ``ws://HOST:PORT`` or ``wss://HOST:PORT``.
            api_key: the server's, where it asks for one.
            certificate: file with the certificates to trust, in place of the system's.

        Raises:
            InputError: the address or the certificate is none.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise InputError(f"server={url!r}: give ws://HOST:PORT, or wss://HOST:PORT where the server has a certificate")
        self._url = url if parts.path.strip("/") else url.rstrip("/") + PATH
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._security: ssl.SSLContext | None = None
        if parts.scheme == "wss":
            try:
                self._security = ssl.create_default_context(cafile=None if certificate is None else str(certificate))
            except (OSError, ssl.SSLError) as error:
                raise InputError(f"certificate={str(certificate)!r}: cannot be read ({error})") from None
        elif certificate is not None:
            raise InputError(f"certificate={str(certificate)!r}: server={url!r} is not encrypted; give wss://")
        self._attempt: Future[ClientConnection] | None = None
        self._connection: ClientConnection | None = None

    def connect(self, timeout: float) -> None:
        """See `Link`."""
        self.close()
        self._attempt = _in_background(partial(self._connected, timeout))

    def is_open(self) -> bool:
        """See `Link`."""
        if self._attempt is not None and self._attempt.done():
            attempt, self._attempt = self._attempt, None
            self._connection = attempt.result()
        return self._connection is not None

    def _connected(self, timeout: float) -> ClientConnection:
        given: dict[str, Any] = {} if self._security is None else {"ssl": self._security}
        try:
            connection = connect(
                self._url,
                additional_headers=self._headers,
                open_timeout=timeout,
                close_timeout=0.1,
                max_size=MOST_DOWN,
                compression=None,
                proxy=None,
                **given,
            )
            return connection.__enter__()  # websockets asks for it since 17.1; `close` is what leaving would do
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (401, 403, 404, 426):
                why = {401: "a key is missing or wrong", 404: "it takes no drafts of clients (serve --drafts)"}
                raise LinkRefusedError(
                    f"server={self._url!r}: answers {status}; {why.get(status, 'it refuses this client')}"
                ) from None
            raise LinkLostError(f"the server answers {status}") from None
        except ssl.SSLCertVerificationError as error:
            raise LinkRefusedError(
                f"server={self._url!r}: its certificate is not trusted ({error.verify_message}); give certificate=FILE"
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
            self._attempt.add_done_callback(_close_if_made)  # it comes too late
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
    """What ``work`` gives, later. A process that ends does not wait for it."""
    attempt: Future[ClientConnection] = Future()

    def run() -> None:
        try:
            attempt.set_result(work())
        except BaseException as error:  # it is for who asks
            attempt.set_exception(error)

    threading.Thread(target=run, name="specjax-link", daemon=True).start()
    return attempt


def _close_if_made(attempt: "Future[ClientConnection]") -> None:
    if attempt.exception() is None:
        attempt.result().close()


def _lost(error: ConnectionClosed) -> LinkLostError:
    received = error.rcvd
    return LinkLostError(str(error), None if received is None else received.code)
