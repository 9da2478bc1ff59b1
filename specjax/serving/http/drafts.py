"""The WebSocket of clients that draft: it receives and sends frames.

`specjax.serving.sessions` has the protocol and runs in the event loop. Frames to send wait in a
queue, so that a client that reads slowly does not delay others.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from specjax.serving.http.places import network_of, networks
from specjax.serving.sessions import (
    CompileGrammar,
    Connection,
    Sessions,
    SessionStatistics,
    Terms,
)
from specjax.wire import MOST_UP, FrameError
from specjax.wire.messages import MOST_GRAMMAR

CLOSING = 5.0
"""The seconds that a client has to read the close frame."""


class Drafts:
    """The clients of a server that draft.

    Attributes:
        sessions: the clients' sessions.
        max_frame_bytes: the largest size of a received frame in bytes.
    """

    def __init__(
        self,
        engine: Any,
        sessions_per_owner: int | None = None,
        trusted: Sequence[str] = (),
        compile_grammar: CompileGrammar | None = None,
        *,
        share_prefixes: bool = False,
    ) -> None:
        """Start without clients.

        Args:
            engine: an engine that accepts drafts of clients.
            sessions_per_owner: the limit of `specjax.serving.sessions.Terms`.
            trusted: addresses or networks without a limit of sessions, such as proxies.
            compile_grammar: the argument of `specjax.serving.sessions.Sessions`.
            share_prefixes: as in `specjax.serving.sessions.Terms`.
        """
        bounds = engine.client_drafts
        tells = bounds.tells(engine.target)
        terms = Terms(
            nodes=bounds.nodes,
            depth=bounds.depth,
            capacity=engine.capacity,
            tells=tells,
            target=engine.target.fingerprint(),
            drafter="" if bounds.drafter is None else bounds.drafter.fingerprint(),
            sessions_per_owner=sessions_per_owner,
            share_prefixes=share_prefixes,
        )
        self._trusted = networks(trusted)
        has_grammars = engine.has_grammars
        self.sessions = Sessions(
            engine,
            terms,
            post=self._post,
            compile_grammar=compile_grammar if has_grammars else None,
        )
        self.max_frame_bytes = min(
            MOST_UP, 4 * engine.capacity + 4096 + 4 * MOST_GRAMMAR * has_grammars
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def statistics(self) -> SessionStatistics:
        """The counters of all sessions."""
        return self.sessions.statistics

    def _post(self, work: Callable[[], None]) -> None:
        """Call ``work`` in the event loop. Any thread may call it."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed, and so are all connections
            self._loop.call_soon_threadsafe(work)

    def _network_of(self, websocket: WebSocket) -> str:
        """Return the network of a client without an API key; empty: it is unknown, or a proxy's."""
        network = network_of(
            "" if websocket.client is None else websocket.client.host, self._trusted
        )
        return "" if network is None else str(network)

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection until the client or the server closes it."""
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
    """Process frames until the client disconnects (None), or sends an invalid one (its error)."""
    while (message := await websocket.receive())["type"] != "websocket.disconnect":
        try:
            if (frame := message.get("bytes")) is None:
                return FrameError(4400, "the frame is text; send binary frames")
            connection.receive(frame)
        except FrameError as error:
            return error
    return None


async def _write(
    websocket: WebSocket, connection: Connection, waiting: "asyncio.Queue[bytes]"
) -> None:
    """Send the waiting frames, each after the one before has left."""
    with suppress(WebSocketDisconnect):
        while True:
            frame = await waiting.get()
            await websocket.send_bytes(frame)
            connection.sent(len(frame))


async def _close(websocket: WebSocket, error: FrameError) -> None:
    """Close a connection with a reason, which may have 123 bytes. Do not wait for a slow reader."""
    reason = error.message.encode()[:120].decode(errors="ignore")
    with suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
        async with asyncio.timeout(CLOSING):
            await websocket.close(error.code, reason)
