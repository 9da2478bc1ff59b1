"""Connections between the processes of one run. The first process checks that all run the same."""

import json
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version

from specjax.errors import InputError
from specjax.processes.rank import ProcessPlace
from specjax.progress import waiting

_PATIENCE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
"""Socket options that detect a vanished host after 20 seconds.

An idle connection needs 5 + 3 * 5 seconds. The last option applies while data is sent.
"""

_HEADER = struct.Struct("!cI")  # the kind of a message, and the length of its content in bytes
_HELLO, _ROSTER, _REFUSED = b"H", b"R", b"X"  # while the processes connect
DECISION, NO_MORE, LEAVES, LOST = b"D", b"N", b"E", b"L"  # afterwards
_LONGEST_HELLO = 2**16


@dataclass(frozen=True)
class Member:
    """A process, as the others know it.

    Attributes:
        number: its index, from 0.
        count: the number of processes according to its environment.
        host: the name of its machine.
        pid: its process id there.
        versions: the package versions that must be the same everywhere.
        task: its task, such as a digest of a command and its options. It must be the same
            everywhere.

    Examples:
        >>> from specjax.processes import Member
        >>> str(Member(number=1, count=2, host="node-b", pid=4711, versions="jax 0.10.2"))
        'process 1 (node-b, pid 4711)'
    """

    number: int
    count: int
    host: str
    pid: int
    versions: str
    task: str = ""

    def __str__(self) -> str:
        return f"process {self.number} ({self.host}, pid {self.pid})"


class ProcessLink:
    """A connection between the first process and another, for messages with a length prefix."""

    def __init__(self, connection: socket.socket) -> None:
        # Under this lock a message is sent whole: those of two threads must not mix.
        self._socket, self._sending = connection, threading.Lock()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _PATIENCE.items():
            if hasattr(socket, name):  # not every system has all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Send a message. A closed connection is ignored here: `receive` reports it."""
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(kind, len(content)) + content)
        except OSError:
            return

    def receive(
        self, max_bytes: int | None = None, seconds: float | None = None
    ) -> tuple[bytes, bytes] | None:
        """Wait for a message.

        Args:
            max_bytes: the maximum length of the content.
            seconds: the maximum time for the whole message.

        Returns:
            The kind of the message and its content. None: the connection is closed or broken, or a
            limit was exceeded.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        header = self._exactly(_HEADER.size, deadline)
        if header is None:
            return None
        kind, length = _HEADER.unpack(header)
        if max_bytes is not None and length > max_bytes:
            content = None
        else:
            content = self._exactly(length, deadline)
        return None if content is None else (kind, content)

    def is_closed(self) -> bool:
        """Return True if the other side has closed the connection."""
        try:
            self._socket.settimeout(None)
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _exactly(self, length: int, deadline: float | None) -> bytes | None:
        parts = bytearray()
        while len(parts) < length:
            try:
                self._socket.settimeout(
                    None if deadline is None else max(deadline - time.monotonic(), 0.001)
                )
                part = self._socket.recv(min(length - len(parts), 2**20))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)


def versions() -> str:
    """Return the versions of specjax and JAX, which must be the same in all processes."""
    specjax = sys.modules["specjax"]  # not an import statement, as specjax imports this module
    return f"specjax {specjax.__version__}, jax {version('jax')}, jaxlib {version('jaxlib')}"


def gather(
    place: ProcessPlace, first: Member, seconds: float
) -> tuple[list[Member], dict[int, ProcessLink]]:
    """Accept, in the first process, the connections of all others, and send each the roster.

    Returns:
        The roster, and the connections by index.

    Raises:
        InputError: the port is in use, a process is missing at the deadline, or processes do not
            fit together.
    """
    deadline = time.monotonic() + seconds
    connected: dict[int, tuple[Member, ProcessLink]] = {}
    port = int(place.address.rpartition(":")[2])
    try:
        server = _listen_at(port)
    except OSError as error:
        raise InputError(
            f"{place.address}: cannot listen at port {port} ({error.strerror}): choose another port"
        ) from None
    why = ""
    refused: list[ProcessLink] = []
    arrivals: queue.SimpleQueue[tuple[Member, ProcessLink]] = queue.SimpleQueue()
    with server, waiting("waiting for other processes", place.count, 1) as wait:
        server.settimeout(0.1)
        while not why:
            # A thread per connection reads the hello, because a foreign program may never send one.
            with suppress(TimeoutError):
                link = ProcessLink(server.accept()[0])
                threading.Thread(target=_hear, args=(link, arrivals), daemon=True).start()
            for number in [number for number, (_, link) in connected.items() if link.is_closed()]:
                connected.pop(number)[1].close()
            while not arrivals.empty() and not why:
                member, link = arrivals.get()
                if why := _why_not(member, first, connected):
                    refused.append(link)
                else:
                    connected[member.number] = member, link
            wait.update(done=1 + len(connected))
            if len(connected) == place.count - 1 or why:
                break
            if time.monotonic() > deadline:
                late = [number for number in range(1, place.count) if number not in connected]
                present = ", ".join(
                    map(str, [first, *(member for _, (member, _) in sorted(connected.items()))])
                )
                why = (
                    f"after {seconds:g} s process{'es' if len(late) > 1 else ''}"
                    f" {', '.join(map(str, late))} of {place.count} had not connected to"
                    f" {place.address} ({present} had): check them, or set SPECJAX_JOIN_SECONDS"
                )
    roster = [first, *(connected[number][0] for number in sorted(connected))]
    for link in [*refused, *(link for _, link in connected.values())]:
        link.send(
            _REFUSED if why else _ROSTER,
            json.dumps(why or [asdict(process) for process in roster]).encode(),
        )
    if why:
        raise InputError(why)
    return roster, {number: link for number, (_, link) in connected.items()}


def _hear(link: ProcessLink, arrivals: "queue.SimpleQueue[tuple[Member, ProcessLink]]") -> None:
    """Read the hello of a new connection. Close it if none comes soon, or if it is not valid."""
    member = _read_member(link.receive(max_bytes=_LONGEST_HELLO, seconds=5.0))
    if member is None:
        link.close()
    else:
        arrivals.put((member, link))


def _why_not(
    member: Member, first: Member, connected: Mapping[int, tuple[Member, ProcessLink]]
) -> str:
    """Return why a process cannot take part; empty if it can.

    An index is free again after its process has disconnected.
    """
    if member.count != first.count:
        return (
            f"{member} is one of {member.count}, and {first} one of {first.count}: give all the"
            " same JAX_NUM_PROCESSES"
        )
    if member.number == 0:
        holder = first
    elif member.number in connected:
        holder = connected[member.number][0]
    else:
        holder = None
    if holder is not None:
        return (
            f"{member} and {holder} have the same number: give each JAX_PROCESS_ID to one process"
        )
    if member.versions != first.versions:
        return (
            f"{member} has {member.versions}, and {first} has {first.versions}: install the same"
            " versions on all machines"
        )
    if member.task != first.task:
        return (
            f"{member} and {first} run different commands or options: give all processes the same"
        )
    return ""


def _listen_at(port: int) -> socket.socket:
    """Return a socket that listens at all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", port), backlog=1024)


def _read_member(message: tuple[bytes, bytes] | None) -> Member | None:
    """Return the process that sent a hello; None if the message is not a valid hello."""
    try:
        member = Member(**json.loads(message[1] if message and message[0] == _HELLO else b"{}"))
    except (TypeError, ValueError, RecursionError):
        return None
    numbers = (member.number, member.count, member.pid)
    texts = (member.host, member.versions, member.task)
    is_valid = all(isinstance(x, int) for x in numbers) and all(
        isinstance(x, str) and x.isprintable() for x in texts
    )
    return member if is_valid and 0 <= member.number < member.count else None


def report(
    place: ProcessPlace, member: Member, seconds: float
) -> tuple[list[Member], dict[int, ProcessLink]]:
    """Connect, in every other process, to the first process, and wait for the roster.

    Returns:
        The roster, and the connection to process 0 by its index.

    Raises:
        InputError: process 0 cannot be reached or refuses this process.
    """
    deadline = time.monotonic() + seconds
    host, _, port = place.address.rpartition(":")
    with waiting(f"waiting for process 0, at {place.address}"):
        while True:
            try:
                connection = socket.create_connection((host.strip("[]"), int(port)), timeout=5.0)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise InputError(
                        f"{place.address}: no answer after {seconds:g} s"
                        f" ({error.strerror or error}): check whether process 0 runs and this"
                        " machine can reach it"
                    ) from None
                time.sleep(0.2)
        link = ProcessLink(connection)
        link.send(_HELLO, json.dumps(asdict(member)).encode())
        # Process 0 gives up at its own deadline, and names the missing processes.
        message = link.receive()
    if message is None:
        raise InputError(
            f"{place.address}: process 0 ended before all had connected, or another program listens"
            " there"
        )
    kind, content = message
    try:
        reply = json.loads(content) if kind in (_ROSTER, _REFUSED) else None
        if kind == _ROSTER:
            return [Member(**fields) for fields in reply], {0: link}  # pyright: ignore[reportOptionalIterable]
    except (TypeError, ValueError):
        reply = None
    raise InputError(
        reply
        if isinstance(reply, str)
        else f"{place.address}: another program listens there, not process 0"
    )
