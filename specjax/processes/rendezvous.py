"""Connect the processes of one run: each finds the first, which checks that all run the same."""

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
"""A host that is gone without a word is noticed after 20 seconds: where nothing is sent, 5 + 3 * 5; else the last."""

_HEADER = struct.Struct("!cI")  # what a message is, and how many bytes of it follow
_HELLO, _ROSTER, _REFUSED = b"H", b"R", b"X"  # at the beginning
DECISION, NO_MORE, LEAVES, LOST = b"D", b"N", b"E", b"L"  # from then on
_LONGEST_HELLO = 2**16


@dataclass(frozen=True)
class Member:
    """A process, as the others know it.

    Attributes:
        number: from 0.
        count: how many it says there are.
        host: the name of its machine.
        pid: its number there.
        versions: of what must be the same everywhere.
        task: what it is to do, such as a digest of a command and its options: the same everywhere.

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
    """One connection between the first process and another: messages, each with its length."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._sending = connection, threading.Lock()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _PATIENCE.items():
            if hasattr(socket, name):  # not everywhere
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """To one that has gone nothing is sent: `receive` says that it has."""
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(kind, len(content)) + content)
        except OSError:
            return

    def receive(self, most: int | None = None, seconds: float | None = None) -> tuple[bytes, bytes] | None:
        """What a message is, and its content; None: the other side has closed, or is not there, or sends more than ``most``
        bytes, or takes more than so many ``seconds``."""
        deadline = None if seconds is None else time.monotonic() + seconds
        header = self._exactly(_HEADER.size, deadline)
        if header is None:
            return None
        kind, length = _HEADER.unpack(header)
        content = None if most is not None and length > most else self._exactly(length, deadline)
        return None if content is None else (kind, content)

    def is_closed(self) -> bool:
        """Whether the other side has gone."""
        try:
            self._socket.settimeout(None)
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Say nothing more."""
        self._socket.close()

    def _exactly(self, length: int, deadline: float | None) -> bytes | None:
        parts = bytearray()
        while len(parts) < length:
            try:
                self._socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
                part = self._socket.recv(min(length - len(parts), 2**20))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)


def versions() -> str:
    """Return the versions of specjax and JAX, which must be the same in all processes."""
    specjax = sys.modules["specjax"]  # it imports this module, and has been imported
    return f"specjax {specjax.__version__}, jax {version('jax')}, jaxlib {version('jaxlib')}"


def gather(place: ProcessPlace, own: Member, seconds: float) -> tuple[list[Member], dict[int, ProcessLink]]:
    """In the first process: wait until all others have said who they are, and tell each the roster."""
    deadline = time.monotonic() + seconds
    here: dict[int, tuple[Member, ProcessLink]] = {}
    port = int(place.address.rpartition(":")[2])
    try:
        server = _listen_at(port)
    except OSError as error:
        raise InputError(f"{place.address}: cannot listen at port {port} ({error.strerror}): choose another one") from None
    why = ""
    refused: list[ProcessLink] = []
    came: queue.SimpleQueue[tuple[Member, ProcessLink]] = queue.SimpleQueue()
    with server, waiting("waiting for other processes", place.count, 1) as wait:
        server.settimeout(0.1)
        while not why:
            # Whoever comes is heard in a thread: it may be anybody, and say nothing.
            with suppress(TimeoutError):
                link = ProcessLink(server.accept()[0])
                threading.Thread(target=_hear, args=(link, came), daemon=True).start()
            for gone in [number for number, (_, link) in here.items() if link.is_closed()]:
                here.pop(gone)[1].close()
            while not came.empty() and not why:
                member, link = came.get()
                if why := _why_not(member, own, here):
                    refused.append(link)
                else:
                    here[member.number] = member, link
            wait.update(done=1 + len(here))
            if len(here) == place.count - 1 or why:
                break
            if time.monotonic() > deadline:
                late = [number for number in range(1, place.count) if number not in here]
                known = ", ".join(map(str, [own, *(member for _, (member, _) in sorted(here.items()))]))
                why = (
                    f"after {seconds:g} s process{'es' if len(late) > 1 else ''} {', '.join(map(str, late))} of {place.count} "
                    f"had not come to {place.address} ({known} had): see why not, or set SPECJAX_JOIN_SECONDS"
                )
    roster = [own, *(here[number][0] for number in sorted(here))]
    for link in [*refused, *(link for _, link in here.values())]:
        link.send(_REFUSED if why else _ROSTER, json.dumps(why or [asdict(each) for each in roster]).encode())
    if why:
        raise InputError(why)
    return roster, {number: link for number, (_, link) in here.items()}


def _hear(link: ProcessLink, came: "queue.SimpleQueue[tuple[Member, ProcessLink]]") -> None:
    """Who has connected, if it says so soon and as one of these processes does."""
    member = _read_member(link.receive(most=_LONGEST_HELLO, seconds=5.0))
    if member is None:
        link.close()
    else:
        came.put((member, link))


def _why_not(member: Member, own: Member, here: Mapping[int, tuple[Member, ProcessLink]]) -> str:
    """Why one that has come cannot take part; empty: it can. A place is free again when who had it has gone."""
    if member.count != own.count:
        return f"{member} is one of {member.count}, and {own} one of {own.count}: give all the same JAX_NUM_PROCESSES"
    other = own if member.number == 0 else here[member.number][0] if member.number in here else None
    if other is not None:
        return f"{member} and {other} have one number: give each JAX_PROCESS_ID to one process"
    if member.versions != own.versions:
        return f"{member} has {member.versions}, and {own} has {own.versions}: install the same on all machines"
    if member.task != own.task:
        return f"{member} was given another command, or other options, than {own}: give all the same"
    return ""


def _listen_at(port: int) -> socket.socket:
    """A socket at all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def _read_member(message: tuple[bytes, bytes] | None) -> Member | None:
    """Who a message is from; None: it is none of this program."""
    try:
        member = Member(**json.loads(message[1] if message and message[0] == _HELLO else b"{}"))
    except (TypeError, ValueError, RecursionError):
        return None
    numbers, texts = (member.number, member.count, member.pid), (member.host, member.versions, member.task)
    is_one = all(isinstance(each, int) for each in numbers) and all(isinstance(x, str) and x.isprintable() for x in texts)
    return member if is_one and 0 <= member.number < member.count else None


def report(place: ProcessPlace, own: Member, seconds: float) -> tuple[list[Member], dict[int, ProcessLink]]:
    """In every other process: tell the first who this is, and wait for the roster."""
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
                        f"{place.address}: after {seconds:g} s nothing answers there ({error.strerror or error}): see whether "
                        "process 0 runs, and whether this machine reaches it"
                    ) from None
                time.sleep(0.2)
        link = ProcessLink(connection)
        link.send(_HELLO, json.dumps(asdict(own)).encode())
        message = link.receive()  # the first gives up at its own deadline, and says for whom it waited
    if message is None:
        raise InputError(f"{place.address}: process 0 ended before all processes had come, or another program listens there")
    kind, content = message
    try:
        said = json.loads(content) if kind in (_ROSTER, _REFUSED) else None
        if kind == _ROSTER:
            return [Member(**each) for each in said], {0: link}  # pyright: ignore[reportOptionalIterable]
    except (TypeError, ValueError):
        said = None
    raise InputError(said if isinstance(said, str) else f"{place.address}: what listens there is no process 0 that waits")
