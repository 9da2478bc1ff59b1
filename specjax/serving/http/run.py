"""The server process: it listens, serves until a signal arrives, and shuts down gracefully."""

import ipaddress
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from specjax.errors import InputError
from specjax.serving.http.app import answer_starting, make_app
from specjax.serving.http.drafts import Drafts
from specjax.serving.http.places import Places
from specjax.serving.http.protocol import ConnectionLimits, Door, SocketProtocol
from specjax.serving.http.service import Service

PING_SECONDS = 20.0
"""The seconds between two WebSocket pings, and the seconds to answer one."""

ACCEPTED = 64
"""The number of connections that are accepted at once, before they are counted.

Each has an open file, of which a process may often have only 1024.
"""

WAITING = 2048
"""The largest number of connections that wait to be accepted."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to ``host`` and ``port``; 0 is any free port.

    It does not listen before `starting` or `serve`.

    Raises:
        InputError: The address does not exist or is in use.

    Examples:
        >>> from specjax.serving.http.run import bind
        >>> bound = bind("127.0.0.1", 0)
        >>> bound.getsockname()[0]
        '127.0.0.1'
        >>> bound.close()
    """
    if not 0 <= port <= 65535:
        raise InputError(f"port={port}: must be from 0 to 65535; 0 is any free port")
    try:
        if not host:
            raise OSError("no name")
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"host={host!r}: no such host ({error}); give a name or an address of this machine"
        ) from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit these: a client that vanishes is noticed, and a client that
        # does not read has a small send buffer.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise InputError(
            f"host={host!r}, port={port}: cannot listen there ({error.strerror}); give another port"
        ) from None
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Return whether only this machine can reach a socket.

    Examples:
        >>> from specjax.serving.http.run import bind, is_loopback
        >>> with bind("localhost", 0) as bound:
        ...     is_loopback(bound)
        True
    """
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def check_tls(certificate: str, key: str) -> None:
    """Check the files for TLS. Both are empty for a server without TLS.

    Args:
        certificate: the PEM file with the server's certificate and the intermediate ones.
        key: the PEM file with its private key, without a password.

    Raises:
        InputError: One of the files is missing or unreadable, or they do not match.

    Examples:
        >>> from specjax.serving.http.run import check_tls
        >>> check_tls("", "")
    """
    if bool(certificate) != bool(key):
        raise InputError(f"tls_cert={certificate!r}, tls_key={key!r}: give both, or none")
    if not certificate:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            certificate, key, password=lambda: ""
        )
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise InputError(
            f"tls_cert={certificate!r}, tls_key={key!r}: cannot be used ({error}); give a"
            " certificate and its key as PEM files, the key without a password"
        ) from None


def address(bound: socket.socket, has_tls: bool = False) -> str:
    """Return the URL of a bound socket, for a browser.

    Examples:
        >>> from specjax.serving.http.run import address, bind
        >>> with bind("127.0.0.1", 0) as bound:
        ...     address(bound).startswith("http://127.0.0.1:")
        True
    """
    host, port = bound.getsockname()[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@contextmanager
def starting(
    bound: socket.socket,
    *,
    bounds: ConnectionLimits = ConnectionLimits(),
    tls: tuple[str, str] | None = None,
) -> Iterator[None]:
    """Answer every request with 503 until the block ends. Then the socket is ready for `serve`.

    A thread answers, so that the block can load models and compile.

    Args:
        bound: the bound socket.
        bounds: the limits on connections and slow clients.
        tls: the files of certificate and key, as for `serve`.

    Examples:
        >>> import urllib.error, urllib.request
        >>> from specjax.serving.http.run import address, bind, starting
        >>> with bind("127.0.0.1", 0) as bound, starting(bound):
        ...     try:
        ...         urllib.request.urlopen(address(bound) + "/health")
        ...     except urllib.error.HTTPError as error:
        ...         error.code
        503
    """
    server = _Listening(_config(answer_starting, bounds, tls))
    # uvicorn closes its socket at the end. With a duplicate, new connections wait at ``bound``
    # until `serve` accepts them.
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [bound.dup()]}, name="specjax-starting", daemon=True
    )
    bound.listen()
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def serve(
    service: Service,
    bound: socket.socket,
    *,
    bounds: ConnectionLimits = ConnectionLimits(),
    drain_seconds: float = 30.0,
    message: str = "",
    tls: tuple[str, str] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT. Then refuse new requests, and finish those that run.

    Args:
        service: the service.
        bound: the bound socket.
        bounds: the limits on connections and slow clients.
        drain_seconds: the seconds after which requests that still run are cancelled.
        message: a message to print when the server is ready.
        tls: the files of certificate and key, see `check_tls`; None: there is no TLS.

    Returns:
        The exit status: 0, or 128 plus the number of a second signal that ended the server early.
    """
    server = _Server(
        _config(make_app(service), bounds, tls, service.drafts), service, drain_seconds, message
    )
    server.run(sockets=[bound])
    return server.status


def _config(
    app: ASGIApp,
    bounds: ConnectionLimits,
    tls: tuple[str, str] | None,
    drafts: Drafts | None = None,
) -> uvicorn.Config:
    security = None
    if tls is not None:
        security = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        security.load_cert_chain(*tls)
    door = partial(Door, bounds, Places(bounds.connections, bounds.trusted), security)
    return uvicorn.Config(
        app,
        http=door,  # pyright: ignore[reportArgumentType] - a function that makes a protocol will do
        ws=(partial(SocketProtocol, bounds) if drafts is not None else "none"),  # pyright: ignore[reportArgumentType] - as above
        ws_max_size=drafts.max_frame_bytes if drafts is not None else 0,
        # Tokens and hidden states hardly compress, and a small frame could decompress to a huge
        # one.
        ws_per_message_deflate=False,
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_SECONDS,
        backlog=ACCEPTED,
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=5,
    )


class _Listening(uvicorn.Server):
    """A server whose queue of connections is longer than the number accepted at once.

    asyncio has one parameter, the backlog, for both.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and then extend the queue."""
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(WAITING)


class _Server(_Listening):
    """A server that still listens while it drains, so that new requests get an error.

    uvicorn would stop listening at once.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, drain_seconds: float, message: str
    ) -> None:
        super().__init__(config)
        self.status = 0
        self._service, self._drain_seconds, self._message = service, drain_seconds, message
        self._until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, and end at the second one."""
        if self._until is None:
            self._until = time.monotonic() + self._drain_seconds
            self._service.drain()
            return
        self.status = 128 + signal.Signals(sig)
        self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server is to end. uvicorn calls it ten times per second."""
        if self._message:
            print(self._message, flush=True)
            self._message = ""
        if self._until is not None and (
            not self._service.is_busy or time.monotonic() >= self._until
        ):
            self.should_exit = True
        if self._service.drafts is not None:
            self._service.drafts.sessions.tick()
        if self.should_exit:
            self._service.cancel_all()
        return await super().on_tick(counter)
