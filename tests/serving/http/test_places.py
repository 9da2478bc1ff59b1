"""Tests of silent connections: they are counted, and cost other clients neither time nor files."""

import json
import select
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from specjax.errors import InputError
from specjax.serving.http import run
from specjax.serving.http.places import RESERVED, Places, networks
from specjax.serving.http.protocol import ConnectionLimits
from tests.serving.http.made_up import MadeUpEngine, running, wait_until
from tests.serving.http.test_drafts import SpeakingEngine, open_session

MOST = 8
HERE = "127.0.0.1"
both = pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])


@contextmanager
def listening(
    bounds: ConnectionLimits, tls: tuple[str, str] | None, is_starting: bool = False
) -> Iterator[tuple[str, int]]:
    """Run a server, ready or still starting, and yield its address."""
    if not is_starting:
        with running(MadeUpEngine(), bounds, tls=tls) as (_, address):
            yield address
        return
    with run.bind(HERE, 0) as bound, run.starting(bound, bounds=bounds, tls=tls):
        yield bound.getsockname()


def answer(
    address: tuple[str, int],
    tls: tuple[str, str] | None,
    path: str = "/health",
    source: str = HERE,
    method: str = "GET",
) -> bytes:
    """Send a request, and return the whole answer."""
    connection = socket.create_connection(address, 10, source_address=(source, 0))
    if tls is not None:
        connection = ssl.create_default_context(cafile=tls[0]).wrap_socket(
            connection, server_hostname=HERE
        )
    with connection:
        connection.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        received = b""
        while more := connection.recv(65536):
            received += more
    return received


def status(received: bytes) -> int:
    return int(received.split()[1])


def are_closed(sockets: list[socket.socket]) -> int:
    """Return how many of the connections the other side has closed."""
    ready, _, _ = select.select(sockets, [], [], 0)
    closed = 0
    for connection in ready:
        try:
            while connection.recv(65536):
                pass
        except BlockingIOError:
            continue
        except OSError:
            pass
        closed += 1
    return closed


@contextmanager
def silent(
    address: tuple[str, int], count: int, source: str = HERE
) -> Iterator[list[socket.socket]]:
    """Open ``count`` connections that send nothing, and yield them."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_connection(address, 10, source_address=(source, 0)))
            for _ in range(count)
        ]
        for connection in sockets:
            connection.setblocking(False)
        yield sockets


@both
@pytest.mark.parametrize("is_starting", [False, True], ids=["ready", "starting"])
@pytest.mark.parametrize("trusted", [(), (HERE,), ("127.0.0.0/8",)])
def test_silent_connections_keep_nobody_from_looking_after_the_server(
    has_tls: bool, is_starting: bool, trusted: tuple[str, ...], certificate: tuple[str, str]
) -> None:
    tls, most = certificate if has_tls else None, MOST if trusted else MOST // 4
    with listening(
        ConnectionLimits(connections=MOST, trusted=trusted), tls, is_starting
    ) as address:
        with silent(address, 40) as sockets:
            wait_until(lambda: are_closed(sockets) == 40 - most - RESERVED)
            for path in ("/health", "/metrics"):
                received = answer(address, tls, path)
                assert status(received) == (503 if is_starting else 200)
                assert b"connection: close" in received.lower()
                if is_starting:
                    assert (
                        json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"]
                        == "starting"
                    )
            for path, method in (
                ("/v1/models", "GET"),
                ("/", "GET"),
                ("/v1/completions", "POST"),
                ("/health", "POST"),
            ):
                received = answer(address, tls, path, method=method)
                assert status(received) == 503
                assert b"retry-after: 1" in received.lower()
                assert b"too many connections" in received
            assert are_closed(sockets[:most]) == 0  # the connections within the limit stay
        if not is_starting:
            wait_until(lambda: status(answer(address, tls, "/v1/models")) == 200)


@both
def test_one_address_has_a_quarter(has_tls: bool, certificate: tuple[str, str]) -> None:
    tls = certificate if has_tls else None
    with listening(ConnectionLimits(connections=MOST), tls) as address:
        with silent(address, MOST // 4):
            wait_until(lambda: b"from this address" in answer(address, tls, "/v1/models"))
            assert status(answer(address, tls)) == 200
            assert status(answer(address, tls, "/v1/models", source="127.0.0.2")) == 200
        wait_until(lambda: status(answer(address, tls, "/v1/models")) == 200)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "a part"])
def test_a_handshake_that_does_not_come(sent: bytes, certificate: tuple[str, str]) -> None:
    bounds = ConnectionLimits(connections=MOST, trusted=(HERE,), handshake_seconds=0.3)
    with listening(bounds, certificate) as address, silent(address, MOST) as sockets:
        for connection in sockets:
            connection.sendall(sent)
        wait_until(lambda: are_closed(sockets) == MOST, 5)
        assert status(answer(address, certificate, "/v1/models")) == 200


def test_a_client_that_does_not_end_tls_is_not_waited_for(certificate: tuple[str, str]) -> None:
    """Check a connection that only the server has closed.

    It counts as long as it has a file.
    """
    bounds = ConnectionLimits(connections=1, request_seconds=30, handshake_seconds=0.5)
    with (
        listening(bounds, certificate) as address,
        socket.create_connection(address, 10) as connection,
    ):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = ssl.create_default_context(cafile=certificate[0]).wrap_bio(
            incoming, outgoing, server_hostname=HERE
        )
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(65536))
        tls.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        connection.sendall(outgoing.read())
        wait_until(lambda: status(answer(address, certificate, "/v1/models")) == 200, 5)


@both
def test_a_probe_that_says_nothing_does_not_stay(
    has_tls: bool, certificate: tuple[str, str]
) -> None:
    bounds = ConnectionLimits(connections=1, probe_seconds=0.3, handshake_seconds=0.3)
    tls = certificate if has_tls else None
    with (
        listening(bounds, tls) as address,
        silent(address, 1),
        silent(address, RESERVED) as sockets,
    ):
        wait_until(lambda: are_closed(sockets) == RESERVED, 5)


def test_a_server_does_not_wait_for_handshakes_when_it_ends(certificate: tuple[str, str]) -> None:
    with run.bind(HERE, 0) as bound:
        with run.starting(bound, tls=certificate), silent(bound.getsockname(), 3) as sockets:
            time.sleep(0.2)
            started = time.monotonic()
        assert time.monotonic() - started < 4
        assert all(connection.fileno() == -1 for connection in sockets)


@both
def test_a_websocket_is_counted_until_it_is_closed(
    has_tls: bool, certificate: tuple[str, str]
) -> None:
    tls, engine = certificate if has_tls else None, SpeakingEngine()
    context = ssl.create_default_context(cafile=certificate[0]) if has_tls else None
    try:
        with running(engine, ConnectionLimits(connections=1), tls=tls) as (_, address):
            url = f"{'wss' if has_tls else 'ws'}://{HERE}:{address[1]}/v1/drafts"
            with connect(url, ssl=context, compression=None, proxy=None) as connection:
                open_session(connection)
                assert status(answer(address, tls, "/v1/models")) == 503
                assert status(answer(address, tls)) == 200
                with (
                    pytest.raises(InvalidStatus, match="503"),
                    connect(url, ssl=context, compression=None, proxy=None),
                ):
                    pass
            wait_until(lambda: status(answer(address, tls, "/v1/models")) == 200)
    finally:
        engine.end()


def test_whose_connections_are_counted_together() -> None:
    places = Places(8, ("10.0.0.0/8", "fd00::/8"))
    for address, second_address in (
        ("192.0.2.1", "192.0.2.2"),
        ("2001:db8::1", "2001:db8:0:1::1"),
        ("fe80::1%eth0", "::ffff:192.0.2.9"),
    ):
        occupied = [places.take(address) for _ in range(2)]
        assert not any(place.refusal for place in occupied)
        assert places.take(address).refusal
        beside = places.take(second_address)
        assert not beside.refusal
        for place in [*occupied, beside, *occupied]:  # leaving twice counts once
            place.leave()
    occupied = [places.take(f"2001:db8::{number}") for number in range(2)]  # one /64 network
    assert places.take("2001:db8::7").refusal
    mapped = [places.take(mapped_address) for mapped_address in ("192.0.2.1", "::ffff:192.0.2.1")]
    assert places.take("192.0.2.1").refusal
    for place in [*occupied, *mapped]:
        place.leave()
    for _ in range(2):
        trusted = [
            places.take(mapped_address)
            for mapped_address in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1", "")
        ]
        assert not any(place.refusal for place in trusted)
    assert "this address" not in places.take("10.1.2.3").refusal
    assert networks(()) == []
    with pytest.raises(InputError, match=r"trusted_proxy='a\.example'"):
        networks(["a.example"])


def test_who_has_asked_gives_way_last() -> None:
    places, dropped = Places(1), []
    places.take("192.0.2.1")
    occupied = []
    for number in range(RESERVED):
        occupied.append(place := places.take("192.0.2.1"))
        place.on_give_way(lambda number=number: dropped.append(number))
    occupied[0].has_no_request = False
    for _ in range(RESERVED):
        place = places.take("192.0.2.1")
        place.on_give_way(lambda: dropped.append("new"))
    assert dropped == [1, 2, 3, "new"]
    occupied[0].leave()
    assert places.take("192.0.2.1").refusal
    assert dropped == [1, 2, 3, "new"]
