"""A client and a server on a simulated network and clock, where everything that may go wrong does, by a seed.

The server's sessions and the engine with its rows are the real ones, and so is all of the client. Simulated are the socket, the
clock, and the seconds that drafting and verifying take. What is between two calls of the engine's thread is waited for, so a
schedule is the same whenever it is run.
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
"""Seconds after which nothing new goes wrong. What has begun then ends within 12 more."""


def most_seconds(faults: "Faults", limit: int) -> float:
    """Until then a text must be whole, or something hangs: once nothing goes wrong, a round takes what two messages take, and
    brings a token at least. Twenty seconds more are for what was waited for in vain."""
    return HEALED + 12 + 20 + limit * (2 * faults.delay[1] + 0.1)


@dataclass
class Faults:
    """What goes wrong, and how often.

    Attributes:
        delay: seconds that a message takes, at least and at most. They may pass each other.
        lost: share of messages that never come.
        doubled: share that come twice.
        resets: seconds at which connections break.
        holes: from when to when nothing comes through, and nothing is said of it.
        restarts: seconds at which the server forgets everything, and for how long it is gone.
        kills: seconds at which the client is killed, and goes on from its journal.
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
        """Some of everything."""
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
    """The clock, and what is to happen at which time."""

    def __init__(self, seed: int, faults: Faults, most: float) -> None:
        self.now, self.faults, self.draw = 0.0, faults, random.Random(seed)
        self.most = most  # seconds, after which something hangs
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self.down_until = 0.0
        self.frames: list[bytes] = []  # all that went over the wire, either way

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(when, self.now), next(self._number), what))

    def advance(self, until: float, unless: Callable[[], bool] = lambda: False) -> None:
        """Time goes on, and things happen, until then or ``unless`` something has come."""
        while not unless() and self._due and self._due[0][0] <= until:
            self.now, _, what = heapq.heappop(self._due)
            what()
        if not unless():
            self.now = max(self.now, until)
        assert self.now < self.most, f"not finished after {self.now:.0f} s"

    def is_cut(self, when: float) -> bool:
        return any(begin <= when < end for begin, end in self.faults.holes)

    def carry(self, frame: bytes, deliver: Callable[[bytes], None]) -> None:
        """A message is on its way, if it comes at all."""
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
    """Sessions in front of a real engine. Killed, it forgets them."""

    def __init__(self, world: World, engine, terms: Terms, seconds: float = 0.01) -> None:
        self.world, self._engine, self._terms, self._seconds = world, engine, terms, seconds
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ids = random.Random(world.draw.random())
        self.connections: list[SimulatedLink] = []
        self.start()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        """The engine's rows are free for the next one, whatever has happened."""
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
        """The engine's, whose verdicts take simulated seconds."""

        def listen(event) -> None:
            listener(
                replace(event, seconds=self._seconds) if isinstance(event, DraftVerified) else event
            )

        return self._engine.open_row(tokens, params, listener=listen, **options)

    def kill(self, seconds: float) -> None:
        """Everything is forgotten; nobody is there for so long."""
        for link in list(self.connections):
            link.break_off()
        self.sessions.close()
        self.settle()
        self.world.down_until = self.world.now + seconds
        self.start()

    def settle(self) -> list[Callable[[], None]]:
        """Wait until the engine has done what it was asked for: what it had to say."""
        said = []
        while self._is_busy():
            time.sleep(2e-4)
        while not self._posted.empty():
            said.append(self._posted.get())
        return said

    def _is_busy(self) -> bool:
        """Whether the engine has something to do. Who waits for a row that nobody gives up is not waited for."""
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
        """A frame has come: whatever follows from it comes a little later."""
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
        """The connection is reset: both sides see it."""
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
            # The server learns of it when the network lets it.
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

    def propose(self, *given, **named):
        tree = super().propose(*given, **named)
        self.world.advance(self.world.now + self.seconds)
        return tree


@dataclass
class Outcome:
    """What became of a text.

    Attributes:
        tokens: committed.
        seconds: that it took, simulated.
        events: all of them.
        report: of the last process.
        lives: processes that the client had.
        frames: all that went over the wire.
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
    """Write a text while things go wrong. Whatever is committed is checked at once against what is ``expected``."""
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
        # Impatient, but no more than the network is slow: who gives up before an answer can come never hears one.
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
            shown, seen = [], []  # a new process tells everything again
            was_killed = False
            for event in writer:
                events.append(event)
                _follow(event, seen, shown)
                assert seen == expected[: len(seen)], (
                    f"seed {seed}: {seen} is no beginning of {expected}"
                )
                journal = writer.exchange.snapshot()
                if kills and world.now >= kills[0]:
                    kills.pop(0)
                    was_killed = True
                    link.break_off()
                    break
            if not was_killed:
                break
    return Outcome(seen, world.now, events, writer.report, lives, world.frames)


def _follow(event: TextEvent, seen: list[int], shown: list[int]) -> None:
    """What a reader of the events believes: ``seen`` is committed, ``shown`` is provisional."""
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
        seen += event.tokens


def reference(engine, request: ExchangeRequest) -> list[int]:
    """The text of an undisturbed run, with nobody's drafts."""
    return list(engine.submit(list(request.prompt), request.params).result().tokens)
