"""A client and a server on a simulated network and clock, with faults that follow from a seed.

The client, the server's sessions and the engine with its rows are the real ones. The socket, the
clock, and the time of drafting and verifying are simulated. The simulation waits for everything
that the engine's thread does between two calls, so a schedule always runs in the same way.
"""

import heapq
import itertools
import queue
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from specjax.client.device import ClientDevice
from specjax.client.events import CommittedEvent, ProvisionalEvent, RetractedEvent, TextEvent
from specjax.client.exchange import Exchange, ExchangeRequest
from specjax.client.link import LinkLostError
from specjax.client.writer import Patience, Writer
from specjax.serving.clients import DraftVerified
from specjax.serving.sessions import Sessions, Terms
from specjax.wire import FrameError

HEALED = 20.0
"""Seconds after which no new fault begins. A fault that has begun ends within 12 more seconds."""


def most_seconds(faults: "Faults", limit: int) -> float:
    """Return the seconds after which an unfinished text counts as hanging.

    Without faults a round takes the time of two messages, and emits at least one token. Twenty
    seconds are added for timeouts.
    """
    return HEALED + 12 + 20 + limit * (2 * faults.delay[1] + 0.1)


@dataclass
class Faults:
    """The kinds of faults, and how often each occurs.

    Attributes:
        delay: the shortest and the longest time of a message in seconds. Messages may overtake each
            other.
        lost: the share of messages that are lost.
        doubled: the share of messages that arrive twice.
        resets: the times at which connections are reset, in seconds.
        holes: the times between which nothing arrives, and nobody is notified.
        restarts: the times at which the server forgets everything, and how long it is down.
        kills: the times at which the client is killed. It then continues from its journal.
    """

    delay: tuple[float, float] = (0.015, 0.015)
    lost: float = 0.0
    doubled: float = 0.0
    resets: list[float] = field(default_factory=list)
    holes: list[tuple[float, float]] = field(default_factory=list)
    restarts: list[tuple[float, float]] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)

    @classmethod
    def drawn(cls, seed: int) -> "Faults":
        """Draw some of every kind of fault."""
        draw = random.Random(seed)

        def times(most: int) -> list[float]:
            return sorted(
                draw.uniform(0, 3.0 if draw.random() < 0.7 else HEALED)
                for _ in range(draw.randint(0, most))
            )

        least = draw.choice([0.001, 0.01, 0.1])
        return cls(
            delay=(least, least * draw.choice([1, 3, 20])),
            lost=draw.choice([0, 0, 0.05, 0.3]),
            doubled=draw.choice([0, 0, 0.1, 0.3]),
            resets=times(4),
            holes=[(at, at + draw.choice([0.5, 3, 12])) for at in times(2)],
            restarts=[(at, draw.choice([0.0, 0.5, 5.0])) for at in times(2)],
            kills=times(2),
        )


class World:
    """The clock, and the actions that are due at later times."""

    def __init__(self, seed: int, faults: Faults, most: float) -> None:
        self.now, self.faults, self.draw = 0.0, faults, random.Random(seed)
        self.most = most  # seconds after which the text counts as hanging
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self.down_until = 0.0
        self.frames: list[bytes] = []  # all that were sent, in both directions

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(when, self.now), next(self._number), what))

    def advance(self, until: float, unless: Callable[[], bool] = lambda: False) -> None:
        """Advance the clock to ``until``, or until ``unless`` holds, and run what is due."""
        while not unless() and self._due and self._due[0][0] <= until:
            self.now, _, what = heapq.heappop(self._due)
            what()
        if not unless():
            self.now = max(self.now, until)
        assert self.now < self.most, f"not finished after {self.now:.0f} s"

    def is_cut(self, when: float) -> bool:
        return any(begin <= when < end for begin, end in self.faults.holes)

    def carry(self, frame: bytes, deliver: Callable[[bytes], None]) -> None:
        """Deliver a frame after a delay, unless it is lost."""
        self.frames.append(frame)
        healed, copies = self.now >= HEALED, 1
        if self.is_cut(self.now) or (not healed and self.draw.random() < self.faults.lost):
            copies = 0
        elif not healed and self.draw.random() < self.faults.doubled:
            copies = 2
        for _ in range(copies):
            when = self.now + self.draw.uniform(*self.faults.delay)
            self.at(when, lambda: None if self.is_cut(self.now) else deliver(frame))


class Server:
    """The sessions of a real engine. If the server is killed, it forgets them."""

    def __init__(self, world: World, engine, terms: Terms, seconds: float = 0.01) -> None:
        self.world, self._engine, self._terms, self._seconds = world, engine, terms, seconds
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ids = random.Random(world.draw.random())
        self.connections: list[SimulatedLink] = []
        self.start()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        """Free all rows of the engine for the next server, whatever has happened."""
        self.sessions.close()
        self.settle()

    def start(self) -> None:
        self.sessions = Sessions(
            self,
            self._terms,
            post=self._posted.put,
            clock=lambda: self.world.now,
            make_id=lambda: self._ids.randbytes(16),
        )

    def open_row(self, tokens, params, *, listener, **options):
        """Open a row of the engine, and give its verdicts a simulated time."""

        def listen(event) -> None:
            listener(
                replace(event, seconds=self._seconds) if isinstance(event, DraftVerified) else event
            )

        return self._engine.open_row(tokens, params, listener=listen, **options)

    def kill(self, seconds: float) -> None:
        """Forget everything, and be unreachable for some seconds."""
        for link in list(self.connections):
            link.break_off()
        self.sessions.close()
        self.settle()
        self.world.down_until = self.world.now + seconds
        self.start()

    def settle(self) -> list[Callable[[], None]]:
        """Wait until the engine has done its work, and return the actions that follow."""
        actions = []
        while self._is_busy():
            time.sleep(2e-4)
        while not self._posted.empty():
            actions.append(self._posted.get())
        return actions

    def _is_busy(self) -> bool:
        """Return whether the engine has work.

        Requests that wait for a row do not count, unless a row is free or its client is away.
        """
        engine = self._engine
        with engine._loop.wake:
            states = [request.state for request in engine._loop.clients.rows]
            is_given_up = any(
                request.away is not None
                for request in engine._loop.clients.rows
                if request.state == "held"
            )
            has_row = engine._loop.scheduler.occupied < engine.rows or is_given_up
            return (
                engine._loop.clients.has_work
                or "reading" in states
                or ("waiting" in states and has_row)
            )

    def receive(self, link: "SimulatedLink", frame: bytes) -> None:
        """Receive a frame. The actions that follow from it run a little later."""
        if link.connection is None:
            return
        try:
            link.connection.receive(frame)
        except FrameError as error:
            link.break_off(error.code)
        for what in self.settle():
            self.world.at(self.world.now + self._seconds, what)


class SimulatedLink:
    """A client's connection to the server."""

    def __init__(self, world: World, server: Server) -> None:
        self._world, self._server = world, server
        self._inbox: list[bytes] = []
        self._opens_at: float | None = None
        self._lost: LinkLostError | None = None
        self._generation = 0
        self.connection = None

    def connect(self, timeout: float) -> None:
        self.close()
        self._generation += 1
        world = self._world
        self._lost = None
        if world.now < world.down_until:
            self._lost = LinkLostError("refused")
        elif world.is_cut(world.now):
            self._opens_at, generation = None, self._generation

            def fail() -> None:
                if generation == self._generation and self.connection is None:
                    self._lost = LinkLostError("no answer")

            world.at(world.now + timeout, fail)
        else:
            self._opens_at = world.now + 2 * world.draw.uniform(*world.faults.delay)

    def is_open(self) -> bool:
        if self._lost is not None:
            lost, self._lost = self._lost, None
            raise lost
        if self._opens_at is not None and self._world.now >= self._opens_at:
            self._opens_at, generation = None, self._generation

            def down(frame: bytes) -> None:
                if generation == self._generation and self.connection is not None:
                    self._inbox.append(frame)

            def send(frame: bytes) -> None:
                if self.connection is not None:
                    self.connection.sent(len(frame))
                self._world.carry(frame, down)

            self.connection = self._server.sessions.connect(
                "me", send, lambda error: self.break_off(error.code)
            )
            self._server.connections.append(self)
        return self.connection is not None

    def break_off(self, code: int | None = None) -> None:
        """Reset the connection, and let both sides see it."""
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.lost()
            self._server.connections.remove(self)
            self._lost = LinkLostError("reset", code)
            self._inbox.clear()
        self._opens_at = None

    def send(self, frame: bytes) -> None:
        self._check()
        generation = self._generation

        def up(frame: bytes) -> None:
            if generation == self._generation and self.connection is not None:
                self._server.receive(self, frame)

        self._world.carry(frame, up)

    def receive(self, timeout: float) -> bytes | None:
        self._check()
        self._world.advance(
            self._world.now + timeout, unless=lambda: bool(self._inbox) or self._lost is not None
        )
        if self._inbox:
            return self._inbox.pop(0)
        self._check()
        return None

    def _check(self) -> None:
        if self._lost is not None:
            lost, self._lost = self._lost, None
            raise lost
        if self.connection is None:
            raise LinkLostError("not connected")

    def close(self) -> None:
        self._generation += 1
        self._opens_at = None
        if self.connection is not None:
            connection, self.connection = self.connection, None
            self._server.connections.remove(self)
            # The server learns of it after the network's delay.
            self._world.at(self._world.now + self._world.faults.delay[1], connection.lost)
        self._inbox.clear()

    def now(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        self._world.advance(self._world.now + seconds)


class SlowDevice(ClientDevice):
    """A device whose work takes simulated time."""

    world: World
    seconds = 0.004

    @contextmanager
    def on(self, world: World) -> Iterator["SlowDevice"]:
        self.world = world
        yield self

    def propose(self, *arguments, **options):
        tree = super().propose(*arguments, **options)
        self.world.advance(self.world.now + self.seconds)
        return tree


@dataclass
class Outcome:
    """The result of a simulated text.

    Attributes:
        tokens: the committed tokens.
        seconds: the simulated time that the text took.
        events: all events.
        report: the report of the client's last process.
        lives: the number of processes that the client had.
        frames: all frames that were sent, in both directions.
    """

    tokens: list[int]
    seconds: float
    events: list[TextEvent]
    report: object
    lives: int
    frames: list[bytes]


def run(
    engine,
    device: SlowDevice,
    terms: Terms,
    request: ExchangeRequest,
    seed: int,
    faults: Faults,
    expected: list[int],
) -> Outcome:
    """Generate a text with faults, and compare committed tokens with ``expected`` at once."""
    world = World(seed, faults, most_seconds(faults, request.params.max_new_tokens))
    with device.on(world), Server(world, engine, terms) as server:
        for at, seconds in faults.restarts:
            world.at(at, lambda seconds=seconds: server.kill(seconds))

        def reset() -> None:
            for link in list(server.connections):
                link.break_off()

        for at in faults.resets:
            world.at(at, reset)
        kills, journal, events, lives = list(faults.kills), None, [], 0
        # The timeouts are short, but longer than the slowest answer, which must be able to arrive.
        again, lost = max(0.5, 2 * faults.delay[1]), max(2.0, 5 * faults.delay[1])
        patience = Patience(
            provisional=0.3, again=again, lost=lost, connecting=1.0, retry=0.05, most_retry=1.0
        )
        while True:
            lives += 1
            exchange = Exchange(request) if journal is None else Exchange.restored(journal)
            exchange._make_nonce = lambda: world.draw.randbytes(16)
            link = SimulatedLink(world, server)
            writer = Writer(
                exchange, device, link, patience=patience, jitter=random.Random(world.draw.random())
            )
            shown, committed = [], []  # a new process reports all tokens again
            was_killed = False
            for event in writer:
                events.append(event)
                _follow(event, committed, shown)
                assert committed == expected[: len(committed)], (
                    f"seed {seed}: {committed} is no beginning of {expected}"
                )
                journal = writer.exchange.snapshot()
                if kills and world.now >= kills[0]:
                    kills.pop(0)
                    was_killed = True
                    link.break_off()
                    break
            if not was_killed:
                break
    return Outcome(committed, world.now, events, writer.report, lives, world.frames)


def _follow(event: TextEvent, committed: list[int], shown: list[int]) -> None:
    """Update the tokens of a reader: ``committed``, and ``shown``, which are provisional."""
    if isinstance(event, ProvisionalEvent):
        shown += event.tokens
    elif isinstance(event, RetractedEvent):
        assert tuple(shown[len(shown) - len(event.tokens) :]) == event.tokens
        del shown[len(shown) - len(event.tokens) :]
    else:
        assert isinstance(event, CommittedEvent)
        assert tuple(shown[: event.confirmed]) == event.tokens[: event.confirmed]
        del shown[: event.confirmed]
        assert not shown or event.confirmed == len(event.tokens)
        committed += event.tokens


def reference(engine, request: ExchangeRequest) -> list[int]:
    """Return the text of a request that runs without faults and without a client's drafts."""
    return list(engine.submit(list(request.prompt), request.params).result().tokens)
