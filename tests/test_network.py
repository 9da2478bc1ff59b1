"""The bad network of tests and benchmarks: its bytes, and how long they take.

Bounds are wide for busy machines.
"""

import socket
import socketserver
import statistics
import threading
import time
from collections.abc import Callable
from random import Random

import pytest

from benchmarks import network
from benchmarks.network import FIVE_G, FOUR_G, SEGMENT, Conditions, Line, Proxy
from specjax.errors import InputError


class Echo(socketserver.BaseRequestHandler):
    """A server that sends back all bytes, until the client has sent its last."""

    server: "EchoServer"

    def handle(self) -> None:
        try:
            while data := self.request.recv(65536):
                self.server.received.extend(data)
                self.request.sendall(data)
            self.server.ended.set()
        except ConnectionResetError:
            self.server.was_reset.set()


class EchoServer(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Echo)
        self.port = self.server_address[1]
        self.received, self.ended, self.was_reset = (
            bytearray(),
            threading.Event(),
            threading.Event(),
        )


@pytest.fixture
def echo():
    with EchoServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def connect(proxy: Proxy) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", proxy.port), timeout=20)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def receive(client: socket.socket, count: int) -> bytes:
    """Return up to ``count`` bytes, and fewer if the connection ends."""
    data = b""
    while len(data) < count and (more := client.recv(count - len(data))):
        data += more
    return data


def ping(client: socket.socket, data: bytes = b"ping") -> float:
    start = time.perf_counter()
    client.sendall(data)
    assert receive(client, len(data)) == data
    return time.perf_counter() - start


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- when bytes arrive, without a clock -----------------------------------------------------------


@pytest.mark.parametrize("conditions", [FOUR_G, FIVE_G, Conditions(0.1, 0.001)])
def test_two_ways_are_a_round_trip_of_the_asked_mean_and_deviation(conditions) -> None:
    conditions = Conditions(conditions.round_trip, conditions.jitter)
    up, down = (Line(conditions, Random(seed)) for seed in (1, 2))
    trips = [up.arrival(at, 50) + down.arrival(at, 50) - 2 * at for at in map(float, range(20_000))]
    assert abs(statistics.mean(trips) - conditions.round_trip) < 0.03 * conditions.round_trip
    assert abs(statistics.stdev(trips) - conditions.jitter) < 0.05 * conditions.jitter
    assert min(trips) >= 0


def test_what_is_sent_first_arrives_first() -> None:
    line = Line(Conditions(0.02, 0.02, rate=1e6, loss=0.1), Random(0))
    arrivals = [line.arrival(0.001 * i, 100) for i in range(1000)]
    assert arrivals == sorted(arrivals) and line.lost > 50


def test_a_line_carries_no_more_than_its_rate() -> None:
    line = Line(Conditions(0.01, rate=8e6), Random(0))  # a megabyte a second
    arrivals = [line.arrival(0.0, 10_000) for _ in range(100)]
    assert arrivals[0] == pytest.approx(0.015) and arrivals[-1] == pytest.approx(1.005)
    assert line.arrival(5.0, 10_000) == pytest.approx(5.015)  # an idle line saves nothing up


def test_a_lost_segment_waits_for_the_timer_or_for_what_is_behind_it() -> None:
    conditions = Conditions(0.04, 0.0, loss=0.01)
    alone, many = ([], [])
    for size, waits in ((100, alone), (11 * SEGMENT, many)):
        line = Line(conditions, Random(5))
        waits += [line.arrival(at, size) - at - 0.02 for at in map(float, range(2000))]
        assert abs(line.lost / 2000 - 0.01 * -(-size // SEGMENT)) < 0.01 * -(-size // SEGMENT) / 2
    assert {round(wait, 6) for wait in alone} >= {0.0, 0.24}  # a round trip and 200 ms
    assert {round(wait, 6) for wait in many} >= {0.0, 0.04, 0.24}
    assert conditions.timer == pytest.approx(0.24)
    assert Conditions(0.04, 0.1).timer == pytest.approx(0.44)


def test_the_same_seed_gives_the_same_delays() -> None:
    lines = [Line(FOUR_G, Random(seed)) for seed in (3, 3, 4)]
    delays, same_delays, other_delays = (
        [line.arrival(float(i), 100) for i in range(100)] for line in lines
    )
    assert delays == same_delays != other_delays


@pytest.mark.parametrize(
    "wrong", [{"round_trip": -1}, {"rate": float("inf")}, {"loss": 1}, {"jitter": 0.1}]
)
def test_conditions_that_cannot_be_are_refused(wrong) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))}="):
        Conditions(**wrong)


# --- through the proxy ----------------------------------------------------------------------------


def test_every_byte_comes_and_in_order(echo) -> None:
    data = Random(0).randbytes(150_000)
    with (
        Proxy(echo.port, Conditions(0.004, 0.004, loss=0.002), seed=1) as proxy,
        connect(proxy) as client,
    ):
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        assert receive(client, len(data)) == data
        sender.join()
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b"" and echo.ended.wait(10)
        assert proxy.counted.up == proxy.counted.down == len(data)
        assert proxy.counted.connections == 1


def test_a_round_trip_takes_as_long_as_it_should(echo) -> None:
    with Proxy(echo.port) as proxy, connect(proxy) as client:
        without = statistics.median(ping(client) for _ in range(10))
        proxy.conditions = Conditions(0.03)
        trips = [ping(client) for _ in range(10)]
    assert without < 0.02
    assert min(trips) > 0.029 and statistics.median(trips) < 0.06


def test_bytes_are_throttled(echo) -> None:
    with Proxy(echo.port, Conditions(rate=20e6)) as proxy, connect(proxy) as client:
        size = 500_000  # 0.2 s
        sender = threading.Thread(target=client.sendall, args=(bytes(size),))
        start = time.perf_counter()
        sender.start()
        assert len(receive(client, size)) == size
        sender.join()
        assert 0.19 < time.perf_counter() - start < 1.0


def test_a_black_hole_closes_nothing(echo) -> None:
    with Proxy(echo.port) as proxy, connect(proxy) as client:
        ping(client)
        proxy.cut()
        client.sendall(b"hello")
        with connect(proxy) as late:
            late.sendall(b"late")
            for waiting in (client, late):
                waiting.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    waiting.recv(1)
            assert bytes(echo.received) == b"ping"
            proxy.restore()
            client.settimeout(10)
            late.settimeout(10)
            assert receive(client, 5) == b"hello" and receive(late, 4) == b"late"


def test_a_reset_reaches_both_sides(echo) -> None:
    for after in (0.0, 0.05):
        echo.was_reset.clear()
        with Proxy(echo.port) as proxy, connect(proxy) as client:
            ping(client)
            proxy.reset(after)
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            assert echo.was_reset.wait(10)
            with connect(proxy) as again:
                ping(again)


def test_half_a_message(echo) -> None:
    with Proxy(echo.port) as proxy:
        with connect(proxy) as client:
            ping(client)
            proxy.end_after(3)
            client.sendall(b"message")
            assert receive(client, 100) == b"mes"
        with connect(proxy) as client:
            proxy.end_after(2, "up")
            client.sendall(b"MESSAGE")
            assert receive(client, 100) in (b"", b"ME")
            wait_until(lambda: bytes(echo.received) == b"pingmessageME")
        with connect(proxy) as client:
            ping(client)


def test_a_server_that_is_not_there_is_a_reset() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        # The reset may come before the connection is handed over, or after.
        with (
            Proxy(nobody.getsockname()[1]) as proxy,
            pytest.raises(ConnectionResetError),
            connect(proxy) as client,
        ):
            client.recv(1)


def test_the_presets_have_names() -> None:
    assert set(network.PRESETS) == {"none", "4g", "5g"}
