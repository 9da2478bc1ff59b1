"""Tests of clients' drafts over real WebSockets, to a server with a made-up engine."""

import gc
import itertools
import json
import random
import re
import socket
import ssl
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from specjax import wire
from specjax.serving.http import access, protocol, run
from specjax.serving.http.protocol import ConnectionLimits
from specjax.wire import FrameError
from tests.serving.http.made_up import MadeUpEngine, read_more, running, wait_until
from tests.serving.made_up_rows import DEPTH, NODES, MadeUpRows, whole
from tests.serving.test_sessions import AFTER, PROMPT, TEXT, chain, draft, opening, resume

KEYS = ("a-key-of-the-tests", "another-key-of-them")


class SpeakingEngine(MadeUpEngine):
    """An engine whose rows read texts and verify drafts in a thread."""

    def __init__(self, numbers: int = 2) -> None:
        super().__init__()
        self.capacity, self.rows_of_clients = 512, MadeUpRows()
        self.client_drafts = SimpleNamespace(
            nodes=NODES, depth=DEPTH, tells=lambda target: {"hidden": (numbers,)}, drafter=None
        )
        self.target.fingerprint = lambda: ""
        self.open_row, self._is_over = self.rows_of_clients.open_row, False
        self._thread = threading.Thread(target=self._speak)
        self._thread.start()

    def _speak(self) -> None:
        while not self._is_over:
            self.rows_of_clients.speak()
            time.sleep(0.0005)

    def end(self) -> None:
        self._is_over = True
        self._thread.join()


@contextmanager
def serving(**options: Any) -> Iterator[tuple[Any, tuple[str, int]]]:
    """Run a server that takes drafts, and yield it with its address."""
    engine = SpeakingEngine()
    try:
        with running(engine, **options) as (server, address):
            yield server, address
    finally:
        engine.end()


@contextmanager
def line(address: tuple[str, int], key: str = "", **more: Any) -> Iterator[ClientConnection]:
    """Connect a client."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = more.pop("url", f"ws://127.0.0.1:{address[1]}/v1/drafts")
    more = {"compression": None, "proxy": None, "additional_headers": headers} | more
    with connect(url, **more) as connection:
        yield connection


def ask(connection: ClientConnection, message: wire.UpMessage) -> Any:
    """Send a message, and return the next one that comes."""
    connection.send(wire.encode(message))
    return hear(connection)


def hear(connection: ClientConnection) -> Any:
    return wire.decode_down(connection.recv(10))  # pyright: ignore[reportArgumentType]


def begin() -> wire.OpenMessage:
    return opening(tokens=wire.pack(PROMPT, "int32"), prompt=len(PROMPT), limit=40)


def open_session(connection: ClientConnection) -> bytes:
    """Open a session, and return its id when it is ready."""
    session = ask(connection, begin()).session
    while not isinstance(hear(connection), wire.ReadyMessage):
        pass
    return session


def closed(connection: ClientConnection, seconds: float = 10) -> int:
    """Return the code with which a connection is closed, whatever else comes before."""
    with pytest.raises(ConnectionClosed) as end:
        while True:
            connection.recv(seconds)
    assert end.value.rcvd is not None
    return end.value.rcvd.code


def goes_on(address: tuple[str, int], key: str = "") -> bool:
    """Return whether a client gets a whole text from the server."""
    with line(address, key) as connection:
        session, text, sequence = open_session(connection), list(PROMPT), 0
        while True:
            sequence += 1
            sent = draft(session, text, sequence, right=sequence % 4)
            verdict = ask(connection, sent)
            tokens = wire.unpack(sent.tokens).tolist()
            text += [*(tokens[node] for node in verdict.accepted), verdict.token]
            if verdict.over:
                return text == whole(PROMPT, 40)


# --- texts ----------------------------------------------------------------------------------------


def test_a_text_and_what_prometheus_is_told():
    with serving() as (_, address):
        assert goes_on(address)
        with line(address) as connection:
            open_session(connection)
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/metrics").read().decode()
    values = dict(re.findall(r"^specjax:client_(\w+)\{.*\} (\S+)$", metrics, re.MULTILINE))
    for name in ("sessions", "sessions_away", "sessions_opened_total"):
        assert values[name] == "2.0"
    assert values["preemptions_total"] == "6.0"  # the number of the made-up engine
    assert float(values["drafts_total"]) > 8
    assert float(values["received_bytes_total"]) > 1000
    assert float(values["sent_bytes_total"]) > 1000


def test_a_session_goes_on_after_a_reset():
    with serving() as (_, address):
        with line(address) as connection:
            session = open_session(connection)
            connection.send(wire.encode(draft(session, PROMPT)))
            connection.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            connection.socket.close()
        with line(address) as connection:
            assert ask(connection, resume(session, PROMPT)) == wire.ReadyMessage(
                session=session, epoch=1, length=len(PROMPT)
            )
            answer = ask(connection, draft(session, PROMPT, epoch=1))
            # While the draft is still being verified, the server acknowledges the repeat.
            if isinstance(answer, wire.OpenedMessage):
                answer = hear(connection)
            assert (answer.sequence, answer.token) == (1, AFTER[-1])


def test_an_idle_connection_stays(monkeypatch):
    monkeypatch.setattr(run, "PING_SECONDS", 0.2)
    with (
        serving(bounds=ConnectionLimits(request_seconds=0.5, reader_seconds=0.5)) as (_, address),
        line(address) as connection,
    ):
        session = open_session(connection)
        time.sleep(1.5)
        assert ask(connection, draft(session, PROMPT)).token == AFTER[-1]


# --- who may --------------------------------------------------------------------------------------


def refusal(address: tuple[str, int], key: str = "", **more: Any) -> tuple[int, str]:
    """Return the status and the code of an answer that does not open a WebSocket."""
    with pytest.raises(InvalidStatus) as error, line(address, key, **more):
        pass
    response = error.value.response
    return response.status_code, json.loads(response.body)["error"]["code"]


def test_no_one_without_a_key():
    with serving(api_keys=KEYS, only_loopback=False) as (_, address):
        for key in ("", "a-wrong-key", KEYS[0] + "x"):
            assert refusal(address, key) == (401, "invalid_api_key")
        assert all(goes_on(address, key) for key in KEYS)
        with line(address, KEYS[0]) as mine, line(address, KEYS[1]) as foreign:
            session = open_session(mine)
            assert ask(foreign, resume(session, PROMPT)) == wire.ForgottenMessage(session=session)
            assert ask(mine, draft(session, PROMPT)).token == AFTER[-1]


@pytest.mark.parametrize(
    ("options", "keys", "expected"),
    [
        ({}, ("", ""), wire.RefusedMessage),
        ({"trusted_proxies": ("127.0.0.0/8",)}, ("", ""), wire.OpenedMessage),
        ({"api_keys": KEYS, "only_loopback": False}, (KEYS[0], KEYS[0]), wire.RefusedMessage),
        ({"api_keys": KEYS, "only_loopback": False}, KEYS, wire.OpenedMessage),
    ],
    ids=["one address", "a trusted proxy", "one key", "two keys"],
)
def test_one_key_or_address_has_so_many_sessions(
    options: dict[str, Any], keys: tuple[str, str], expected: type
):
    with serving(client_sessions=1, **options) as (_, address), line(address, keys[0]) as mine:
        session = open_session(mine)
        with line(address, keys[1]) as second:
            answer = ask(second, begin())
            assert isinstance(answer, expected)
            if expected is wire.RefusedMessage:
                assert answer.code == "full"
                mine.send(wire.encode(wire.CloseMessage(session=session)))
                assert isinstance(ask(mine, resume(session, PROMPT)), wire.ForgottenMessage)
                open_session(second)  # there is room again, for the same connection


def test_no_page_of_another_site():
    with serving() as (_, address):
        with line(address, origin=f"http://127.0.0.1:{address[1]}") as connection:
            open_session(connection)
        elsewhere = {
            "url": "ws://evil.example/v1/drafts",
            "sock": socket.create_connection(address),
        }
        assert refusal(address, **elsewhere) == (403, "host_not_allowed")
    for options in ({}, {"only_loopback": False}, {"only_loopback": False, "api_keys": KEYS}):
        with serving(**options) as (_, address):
            port = address[1]
            origins = (
                "https://evil.example",
                "http://127.0.0.1.evil.example",
                f"http://localhost:{port}",
                "http://127.0.0.1:80",
            )
            for origin in (*origins, "null", f"127.0.0.1:{port}", ""):
                assert refusal(address, origin=origin) == (403, "origin_not_allowed"), origin
    with serving(cors_origins=("https://chat.example",)) as (_, address):
        with line(address, origin="https://chat.example") as connection:
            open_session(connection)
        assert refusal(address, origin="https://evil.example") == (403, "origin_not_allowed")


@pytest.mark.parametrize(
    ("origin", "host", "is_of"),
    [
        ("https://here.example", "here.example", True),
        ("https://Here.example", "here.example:443", True),
        ("http://here.example:80", "here.example", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("https://here.example", "here.example:80", False),
        ("https://here.example:8000", "here.example", False),
        ("https://", "", False),
        ("file://", "", False),
    ],
)
def test_which_pages_are_of_a_host(origin: str, host: str, is_of: bool):
    assert access._is_of(origin, host) is is_of


def test_no_new_ones_while_draining():
    with serving(drain_seconds=30) as (server, address), line(address) as connection:
        session = open_session(connection)
        server.handle_exit(15, None)
        assert refusal(address) == (503, "draining")
        assert ask(connection, begin()).code == "draining"
        time.sleep(0.3)
        assert not server.should_exit  # a client is being served
        assert ask(connection, draft(session, PROMPT)).token == AFTER[-1]
        connection.send(wire.encode(wire.CloseMessage(session=session)))
        assert closed(connection) == 1012


def test_a_server_that_takes_no_drafts():
    engine = MadeUpEngine()
    with running(engine) as (_, address):
        assert refusal(address) == (404, "no_drafts")


def test_what_is_no_websocket():
    with serving() as (_, address):
        for headers, status in (
            ("", 426),
            ("Upgrade: websocket\r\nConnection: Upgrade\r\n", 426),
            (f"{HANDSHAKE}Content-Length: 3\r\n", 426),
            (f"{HANDSHAKE}" + "X: y\r\n" * 200, 400),
            (f"{HANDSHAKE}X: {'y' * 9000}\r\n", 400),
            (f"{HANDSHAKE}Sec-WebSocket-Key: again\r\n", 426),
        ):
            with socket.create_connection(address) as connection:
                connection.settimeout(10)
                connection.sendall(
                    f"GET /v1/drafts HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode()
                )
                received = b""
                while not received.endswith(b"}}"):
                    received += read_more(connection)
            assert received.startswith(f"HTTP/1.1 {status} ".encode()), received[:200]
            assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert goes_on(address)


HANDSHAKE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key:"
    " dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


# --- what they may not ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("text", 4400),
        (b"no msgpack", 4400),
        (b"", 4400),
        (b"\x00" * 8000, 1009),
        (
            msgspec.msgpack.encode(
                {
                    "type": "open",
                    "nonce": bytes(16),
                    "tokens": ["float32", [1], bytes(4)],
                    "prompt": 1,
                    "limit": 1,
                }
            ),
            4400,
        ),
        (msgspec.msgpack.encode({"type": "close", "session": bytes(16), "more": 1}), 4400),
    ],
)
def test_frames_for_which_a_connection_is_closed(frame: Any, code: int):
    with serving() as (_, address):
        with line(address) as connection:
            connection.send(frame)
            assert closed(connection) == code
        assert goes_on(address)


def handshaken(address: tuple[str, int], receive: int = 65536) -> socket.socket:
    """Return a connection after its handshake."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.connect(address)
    connection.settimeout(10)
    connection.sendall(f"GET /v1/drafts HTTP/1.1\r\nHost: localhost\r\n{HANDSHAKE}\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += read_more(connection, 1)
    assert head.startswith(b"HTTP/1.1 101 ")
    return connection


def framed(payload: bytes, opcode: int = 2, is_last: bool = True) -> bytes:
    """Return a WebSocket frame of a client."""
    assert len(payload) < 65536
    length = (
        bytes([0x80 | len(payload)])
        if len(payload) < 126
        else bytes([0xFE]) + len(payload).to_bytes(2, "big")
    )
    return bytes([0x80 * is_last | opcode]) + length + bytes(4) + payload


def sends_until_reset(connection: socket.socket, data: bytes, seconds: float = 20) -> bool:
    """Return whether the server closes a connection that sends ``data`` and reads nothing."""
    until = time.monotonic() + seconds
    with suppress(TimeoutError):
        while time.monotonic() < until:
            try:
                connection.sendall(data)
            except (ConnectionError, BrokenPipeError):
                return True
    return False


def test_half_a_frame_and_a_reset():
    with serving() as (server, address):
        drafts = server._service.drafts
        with handshaken(address) as connection:
            connection.sendall(framed(wire.encode(begin())))
            wait_until(lambda: drafts.statistics.sessions == 1)
            connection.sendall(framed(bytes(200))[:100])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: drafts.statistics.away == 1)
        with line(address) as connection:
            (session,) = drafts.sessions._sessions
            assert ask(connection, resume(session, PROMPT)).epoch == 1


def test_a_slow_reader_is_cut_off_and_costs_little():
    with serving(bounds=ConnectionLimits(reader_seconds=1.0)) as (server, address):
        connection = handshaken(address, 2048)
        with connection:
            connection.sendall(framed(wire.encode(begin())))
            drafts = server._service.drafts
            wait_until(lambda: drafts.statistics.sessions == 1)
            (session,) = drafts.sessions._sessions
            wait_until(lambda: drafts.sessions._sessions[session].is_ready)
            again = framed(wire.encode(draft(session, PROMPT)))
            assert sends_until_reset(connection, again * 50)
        wait_until(lambda: drafts.statistics.away == 1)
        assert drafts.statistics.bytes_down < 2 * drafts.sessions.terms.max_unsent_bytes
        assert goes_on(address)


def test_pings_whose_answers_nobody_reads():
    with serving() as (_, address):
        with handshaken(address, 2048) as connection:
            assert sends_until_reset(connection, framed(b"x" * 125, opcode=9) * 100)
        assert goes_on(address)


def test_a_message_in_too_many_parts(monkeypatch):
    monkeypatch.setattr(protocol, "MAX_PARTS", 100)
    with serving() as (_, address):
        with handshaken(address) as connection:
            connection.sendall(framed(b"", is_last=False) + framed(b"", 0, is_last=False) * 200)
            received = b""
            while more := connection.recv(1000):
                received += more
            assert struct.pack("!H", 1009) in received
        assert goes_on(address)


def test_connections_are_counted():
    with serving(bounds=ConnectionLimits(connections=2, trusted=("127.0.0.1",))) as (_, address):
        with line(address) as first, line(address):
            # The answer is 503. If the connection ends before it is read, the test's library raises
            # an AssertionError.
            with pytest.raises((WebSocketException, AssertionError)), line(address):
                pass
            open_session(first)
        wait_until(lambda: is_let_in(address))


def is_let_in(address: tuple[str, int]) -> bool:
    try:
        return goes_on(address)
    except WebSocketException:
        return False


# --- TLS ------------------------------------------------------------------------------------------


def test_tls(certificate: tuple[str, str]):
    run.check_tls(*certificate)
    context = ssl.create_default_context(cafile=certificate[0])
    with serving(tls=certificate) as (_, address):
        url = f"wss://127.0.0.1:{address[1]}/v1/drafts"
        with line(address, url=url, ssl=context) as connection:
            session = open_session(connection)
            assert ask(connection, draft(session, PROMPT)).token == AFTER[-1]
        with urllib.request.urlopen(
            f"https://127.0.0.1:{address[1]}/health", context=context
        ) as answer:
            assert answer.status == 200
        with (
            pytest.raises(ssl.SSLCertVerificationError),
            line(address, url=url, ssl=ssl.create_default_context()),
        ):
            pass
        with socket.create_connection(address) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert not connection.recv(100).startswith(b"HTTP")


def test_tls_whose_last_word_comes_with_the_request(certificate: tuple[str, str]):
    """Check a handshake whose last message comes together with the request.

    On a network the client may ask for the WebSocket before the server has sent the tickets of TLS
    1.3.
    """
    bounds = ConnectionLimits(request_seconds=0.2, reader_seconds=0.2)
    with (
        serving(tls=certificate, bounds=bounds) as (_, address),
        socket.create_connection(address) as connection,
    ):
        connection.settimeout(10)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = ssl.create_default_context(cafile=certificate[0]).wrap_bio(
            incoming, outgoing, server_hostname="127.0.0.1"
        )
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(read_more(connection))
        tls.write(f"GET /v1/drafts HTTP/1.1\r\nHost: 127.0.0.1\r\n{HANDSHAKE}\r\n".encode())
        connection.sendall(outgoing.read())

        def heard() -> bytes:
            while True:
                try:
                    return tls.read()
                except ssl.SSLWantReadError:
                    incoming.write(read_more(connection))

        assert heard().startswith(b"HTTP/1.1 101 ")
        time.sleep(1.0)  # longer than both time limits
        tls.write(framed(wire.encode(begin())))
        connection.sendall(outgoing.read())
        assert heard()[0] == 0x82


# --- anything -------------------------------------------------------------------------------------


def noise(rng: random.Random, session: bytes) -> bytes:
    """Return a frame that is invalid in most cases."""
    tokens, parents = chain(PROMPT, rng.randrange(6))
    text = TEXT[: rng.randrange(1, len(TEXT))]
    drafted = {"tokens": wire.pack(tokens, "int32"), "parents": wire.pack(parents, "uint8")}
    good: wire.UpMessage = rng.choice(
        [
            begin(),
            wire.CloseMessage(session=rng.randbytes(16)),
            draft(session, text, rng.randrange(1, 4), rng.randrange(2), **drafted),
            resume(session, text, rng.randrange(40), rng.randrange(3)),
        ]
    )
    if rng.random() < 0.15:
        return wire.encode(good)
    if rng.random() < 0.4:  # replace one value
        fields = msgspec.msgpack.decode(wire.encode(good))
        odd = [
            None,
            -1,
            2**63,
            2**64 - 1,
            1e308,
            float("nan"),
            "x",
            b"",
            bytes(16),
            [],
            {},
            [[]] * 5,
            True,
            rng.randbytes(40),
        ]
        fields[rng.choice([*fields, "more"])] = rng.choice(odd)
        return msgspec.msgpack.encode(fields)
    raw = bytearray(wire.encode(good))
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(raw))
        raw[at : at + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
        raw = raw or bytearray(b"\xc1")
    return bytes(raw)


def close_code(received: bytes) -> int | None:
    """Return the code of the close frame behind other frames of a server, or None."""
    while len(received) >= 4:
        if received[0] == 0x88:
            return int.from_bytes(received[2:4], "big")
        length, start = received[1], 2
        if length >= 126:
            start = 4 if length == 126 else 10
            length = int.from_bytes(received[2:start], "big")
        received = received[start + length :]
    return None


def refused(address: tuple[str, int], frames: Iterator[bytes]) -> tuple[int, int]:
    """Send frames until one is invalid.

    Return the code with which the connection is closed, and the number of frames.
    """
    number, is_message, received = 0, True, b""
    with handshaken(address) as connection:
        while is_message:
            frame = next(frames)
            connection.sendall(framed(frame))
            number += 1
            try:
                wire.decode_up(frame)
            except FrameError:
                is_message = False
        while (code := close_code(received)) is None:
            received += read_more(connection)
    return code, number


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    gc.collect()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


@pytest.mark.full
@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_whatever_is_sent_the_server_goes_on(count: int, caplog):
    rng, codes, sizes, number = random.Random(count), {}, [], 0
    with serving() as (_, address):
        with line(address) as connection:
            session = open_session(connection)
        while number < count:
            code, frames = refused(address, (noise(rng, session) for _ in itertools.count()))
            codes[code] = codes.get(code, 0) + 1
            number += frames
            if len(sizes) < 10 * number // count:
                sizes.append(resident())
        assert goes_on(address)
    print(codes, [size >> 20 for size in sizes])
    assert set(codes) == {4400}
    assert codes[4400] > count / 2
    assert sizes[-1] - sizes[4] < 32 * 2**20
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.full
def test_whatever_a_frame_is_it_is_taken_or_refused():
    rng, decoded = random.Random(7), 0
    for _ in range(20_000):
        with suppress(FrameError):
            wire.decode_up(noise(rng, bytes(16)))
            decoded += 1
    assert 100 < decoded < 10_000
