"""A bad network between a client and a server on one machine: a TCP proxy without privileges.

    with Proxy(server_port, FOUR_G) as proxy:
        talk_to(proxy.port)
        proxy.cut()  # nothing passes, and nobody is told
        proxy.restore()

The bytes are treated as TCP over such a network treats them: they arrive late and in order, and
none is missing as long as the connection lives. See `Conditions` for the delays. Slow start,
congestion, and the pause of TCP after an interruption are not modelled.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Any, Literal

from specjax.errors import InputError

SEGMENT = 1448
"""The bytes of a segment in an Ethernet frame of 1500."""
PIECE = 16_384
"""The maximum number of bytes of a read from a connection. They are delayed as a whole."""
IN_FLIGHT = 256
"""The maximum number of pieces in one direction. Further ones make the sender wait."""
LEAST_TIMER = 0.2
"""The minimum seconds that Linux adds to a round trip before it repeats a segment (TCP_RTO_MIN)."""

Way = Literal["up", "down"]


@dataclass(frozen=True)
class Conditions:
    """The properties of a network.

    Attributes:
        round_trip: mean round trip in seconds. Each way takes half of it.
        jitter: standard deviation of a round trip in seconds. Each way has an independent gamma
            distribution, which is never negative and has this mean and deviation, even if they are
            of the same size.
        rate: bits per second each way; 0 is no limit.
        loss: probability that a segment is lost.
    """

    round_trip: float = 0.0
    jitter: float = 0.0
    rate: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("round_trip", "jitter", "rate"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name}={getattr(self, name)}: must be at least 0, and finite")
        if not 0 <= self.loss <= 0.5:
            raise InputError(f"loss={self.loss}: must be from 0 to 0.5")
        if self.jitter and not self.round_trip:
            raise InputError(f"jitter={self.jitter}: needs a round_trip above 0")

    @property
    def timer(self) -> float:
        """The seconds until a sender without an answer sends again, as Linux computes them."""
        return self.round_trip + max(LEAST_TIMER, 4 * self.jitter)


NONE = Conditions()
FOUR_G = Conditions(round_trip=0.021, jitter=0.019, rate=20e6, loss=0.001)
"""The 4G network of Zimmer et al. (arXiv 2410.03804)."""
FIVE_G = Conditions(round_trip=0.010, jitter=0.010, loss=0.001)
"""The 5G network of the same paper; the rate has no limit."""
PRESETS = {"none": NONE, "4g": FOUR_G, "5g": FIVE_G}


class Line:
    """The arrival times of the bytes in one direction of a connection. It has no clock.

    Attributes:
        lost: number of lost segments so far.
    """

    def __init__(self, conditions: Conditions, random: Random) -> None:
        self.conditions, self.lost = conditions, 0
        self._random = random
        self._free = self._newest = (
            0.0  # when the next byte can leave, and when the newest one arrives
        )

    def arrival(self, now: float, size: int) -> float:
        """Return when a piece of ``size`` bytes arrives that is sent ``now``.

        It arrives after all earlier pieces.
        """
        conditions = self.conditions
        self._free = max(self._free, now) + (8 * size / conditions.rate if conditions.rate else 0.0)
        self._newest = max(self._newest, self._free + self._way() + self._sent_again(size))
        return self._newest

    def _way(self) -> float:
        mean, variance = self.conditions.round_trip / 2, self.conditions.jitter**2 / 2
        return self._random.gammavariate(mean**2 / variance, variance / mean) if variance else mean

    def _sent_again(self, size: int) -> float:
        """Return the seconds by which lost segments delay a piece.

        If three segments follow, their acknowledgements tell the sender within a round trip. Most
        messages here have one or two segments. Then the sender's timer must run out, which takes
        twice as long every time.
        """
        if not self.conditions.loss:
            return 0.0
        segments = -(-size // SEGMENT)
        longest = 0.0
        for behind in reversed(range(segments)):
            waited, timer = 0.0, self.conditions.timer
            while self._random.random() < self.conditions.loss:
                self.lost += 1
                is_told = behind >= 3 and not waited
                waited += self.conditions.round_trip if is_told else timer
                timer *= 1 if is_told else 2
            longest = max(longest, waited)
        return longest


@dataclass
class Counted:
    """The traffic so far.

    Attributes:
        connections: number of connections of clients.
        up: bytes from clients to the server.
        down: bytes from the server to clients.
        lost: number of repeated segments.
    """

    connections: int = 0
    up: int = 0
    down: int = 0
    lost: int = 0


class Proxy:
    """A proxy that listens at a port and passes bytes on to a server, delayed, in its own thread.

    With the same ``seed``, the n-th piece of a connection has the same delay, if the sender cuts
    its data the same way.

    Attributes:
        port: the port at 127.0.0.1.
        conditions: the network; may be changed at any time for later bytes.
        counted: the traffic so far.
    """

    def __init__(
        self, port: int, conditions: Conditions = NONE, *, host: str = "127.0.0.1", seed: int = 0
    ) -> None:
        """Listen in front of the server at ``host`` and ``port``."""
        self.port, self.conditions, self.counted = 0, conditions, Counted()
        self._there, self._seed = (host, port), seed
        # Bytes until the connection ends.
        self._remaining: dict[Way, int | None] = {"up": None, "down": None}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._open = asyncio.Event()
        self._open.set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    def __enter__(self) -> "Proxy":
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- what can be done to it ---

    def cut(self) -> None:
        """Hold back all bytes from now on without closing anything: both sides wait.

        New connections appear to succeed, because the system's buffer accepts them, but lead
        nowhere yet.
        """
        self._call(self._set_open(False))

    def restore(self) -> None:
        """Deliver what was held back."""
        self._call(self._set_open(True))

    def reset(self, after: float = 0.0) -> None:
        """Reset all connections (RST, to both sides), now or ``after`` some seconds.

        Bytes that are under way are lost.
        """
        if after:
            self._loop.call_soon_threadsafe(self._loop.call_later, after, self._reset_all)
        else:
            self._call(self._reset_now())

    def end_after(self, count: int, way: Way = "down") -> None:
        """End the connection on both sides after ``count`` more bytes in a direction.

        So half a message arrives. Later connections are not affected.
        """
        self._call(self._set_left(way, count))

    # --- in its thread ---

    def _call(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(timeout=30)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._reset_all()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _set_open(self, is_open: bool) -> None:
        (self._open.set if is_open else self._open.clear)()

    async def _set_left(self, way: Way, count: int) -> None:
        self._remaining[way] = count

    async def _reset_now(self) -> None:
        self._reset_all()

    def _reset_all(self) -> None:
        for end in list(self._ends):
            _reset(end)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):  # by `_close`: asyncio would print it as an error
            await self._pass_between(reader, writer)

    async def _pass_between(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a client's connection until it ends."""
        self.counted.connections += 1
        number = self.counted.connections
        self._ends.add(writer)
        ends = [writer]
        try:
            await self._open.wait()
            there = await asyncio.open_connection(*self._there)
            ends.append(there[1])
            self._ends.add(there[1])
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry("up", number, reader, there[1]))
                group.create_task(self._carry("down", number, there[0], writer))
        except* _EndedError:
            pass  # closed below
        # One side has reset the connection, or the server is not there: reset the other side, too.
        except* OSError:
            for end in ends:
                _reset(end)
        except* asyncio.CancelledError:
            pass  # the proxy is closed; asyncio would print that the task was cancelled
        finally:
            for end in ends:
                self._ends.discard(end)
                end.close()

    async def _carry(
        self, way: Way, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry one direction of a connection."""
        line = Line(self.conditions, Random(f"{self._seed} {number} {way}"))
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT)

        async def take() -> None:
            data = b"begin"
            while data:
                data = await reader.read(PIECE)
                line.conditions, lost = self.conditions, line.lost
                arrival = line.arrival(self._loop.time(), len(data))
                self.counted.lost += line.lost - lost
                await under_way.put((arrival, data))

        async def give() -> None:
            data = b"begin"
            while data:
                arrival, data = await under_way.get()
                await asyncio.sleep(max(arrival - self._loop.time(), 0.0))
                await self._open.wait()
                await self._pass_on(way, data, writer)
            writer.write_eof()

        async with asyncio.TaskGroup() as group:
            group.create_task(take())
            group.create_task(give())

    async def _pass_on(self, way: Way, data: bytes, writer: asyncio.StreamWriter) -> None:
        remaining = self._remaining[way]
        is_last = remaining is not None and remaining <= len(data) and bool(data)
        data = data[:remaining] if is_last else data
        writer.write(data)
        await writer.drain()
        setattr(self.counted, way, getattr(self.counted, way) + len(data))
        if remaining is not None:
            self._remaining[way] = None if is_last else remaining - len(data)
        if is_last:
            raise _EndedError


class _EndedError(Exception):
    """The number of bytes that may pass is reached."""


def _reset(end: asyncio.StreamWriter) -> None:
    """Close a connection with RST, and drop what is not sent yet."""
    if (connection := end.get_extra_info("socket")) is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.transport.abort()
