"""Drafts from clients, over a WebSocket: frames in, frames out, and who is too slow.

What the frames mean is told in `specjax.serving.sessions`, which runs in the event loop. What is to be sent waits in a queue,
so that nobody waits for a client that reads slowly.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from specjax.serving.http.places import network_of, networks
from specjax.serving.sessions import Connection, Sessions, SessionStatistics, Terms
from specjax.wire import MOST_UP, FrameError

CLOSING = 5.0
"""Seconds in which a client may take what a connection is closed with."""


class Drafts:
    """Clients that draft, at a server.

    Attributes:
        sessions: their texts.
        max_frame_bytes: bytes of a frame that comes.
    """

    def __init__(self, engine: Any, sessions_per_owner: int | None = None, trusted: Sequence[str] = ()) -> None:
        """At an ``engine`` that takes drafts of clients.

        Args:
            engine: the engine.
            sessions_per_owner: as in `specjax.serving.sessions.Terms`.
            trusted: addresses, or networks, from which any number of sessions may come: proxies.
        """
        taken = engine.client_drafts
        tells = taken.tells(engine.target)
        terms = Terms(
            nodes=taken.nodes,
            depth=taken.depth,
            capacity=engine.capacity,
            tells=tells,
            target=engine.target.fingerprint(),
            drafter="" if taken.drafter is None else taken.drafter.fingerprint(),
            sessions_per_owner=sessions_per_owner,
        )
        self._trusted = networks(trusted)
        self.sessions = Sessions(engine, terms, post=self._post)
        self.max_frame_bytes = min(MOST_UP, 4 * engine.capacity + 4096)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def statistics(self) -> SessionStatistics:
        """What has happened."""
        return self.sessions.statistics

    def _post(self, work: Callable[[], None]) -> None:
        """From the engine's thread. When the loop is closed, nobody listens any more."""
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def _network_of(self, websocket: WebSocket) -> str:
        """The address of a client without a key, or its network; empty where nobody knows it, or a proxy is between."""
        network = network_of("" if websocket.client is None else websocket.client.host, self._trusted)
        return "" if network is None else str(network)

    async def serve(self, websocket: WebSocket) -> None:
        """One connection, until one of both ends it."""
        self._loop = asyncio.get_running_loop()
        await websocket.accept()
        waiting: asyncio.Queue[bytes] = asyncio.Queue()
        cut: asyncio.Future[FrameError] = self._loop.create_future()
        owner = websocket.scope["specjax.owner"]
        counted_as = owner or self._network_of(websocket)
        connection = self.sessions.connect(owner, waiting.put_nowait, cut.set_result, counted_as)
        reading = asyncio.ensure_future(_read(websocket, connection))
        writing = asyncio.ensure_future(_write(websocket, connection, waiting))
        ends: list[asyncio.Future[Any]] = [reading, writing, cut]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            connection.lost()
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        for error in (end.result() for end in done):
            if error is not None:
                await _close(websocket, error)


async def _read(websocket: WebSocket, connection: Connection) -> FrameError | None:
    """Follow what the client says, until it goes, or says what is not to be followed."""
    while (message := await websocket.receive())["type"] != "websocket.disconnect":
        try:
            if (frame := message.get("bytes")) is None:
                return FrameError(4400, "a frame of text; send binary ones")
            connection.receive(frame)
        except FrameError as error:
            return error
    return None


async def _write(websocket: WebSocket, connection: Connection, waiting: "asyncio.Queue[bytes]") -> None:
    """Send what waits, a frame when the one before has been taken."""
    with suppress(WebSocketDisconnect):
        while True:
            frame = await waiting.get()
            await websocket.send_bytes(frame)
            connection.sent(len(frame))


async def _close(websocket: WebSocket, error: FrameError) -> None:
    """Say why, in the 123 bytes that there are for it. Who does not read is not waited for."""
    reason = error.message.encode()[:120].decode(errors="ignore")
    with suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
        async with asyncio.timeout(CLOSING):
            await websocket.close(error.code, reason)
