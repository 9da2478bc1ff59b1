"""Several processes that work on one model: how they find each other, who is who, and what happens when one is lost.

A model may need the devices of several hosts. Then a process runs on each, all of them run the same command, and JAX joins
their devices into one mesh (`specjax.sharding`). JAX asks of them that all make the same calls in the same order. So whatever
one process alone knows, such as a request that came in or what a clock said, the *first* process, number 0, decides and tells.

For that each of the others keeps one connection to the first, for as long as they run. When a process ends, however it ends,
its connection is closed. So the others learn of it at once, say which one it was, and end too: they would wait for it for ever.
"""

import atexit
import hashlib
import json
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version

import jax
from jax.experimental import multihost_utils

from specjax.errors import InputError
from specjax.progress import waiting

JOIN_SECONDS = 300.0
"""How long processes wait for each other at the beginning, unless SPECJAX_JOIN_SECONDS says otherwise."""

PORT = 8476
"""Where the first process listens, where nothing says another port."""

_HEARTBEAT_SECONDS = 20
"""After which JAX gives up a process that still has its connection, but does nothing any more."""

_PATIENCE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
"""A host that is gone without a word is noticed after 20 seconds: where nothing is sent, 5 + 3 * 5; else the last."""

_HEADER = struct.Struct("!cI")  # what a message is, and how many bytes of it follow
_HELLO, _ROSTER, _REFUSED = b"H", b"R", b"X"  # at the beginning
_DECISION, _NO_MORE, _LEAVES, _LOST = b"D", b"N", b"E", b"L"  # from then on
_LONGEST_HELLO = 2**16

_SCHEDULERS = ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "TPU_WORKER_HOSTNAMES", "JOB_COMPLETION_INDEX")
"""A variable that Slurm's steps, Open MPI, TPUs of GKE, and jobs of Kubernetes set. Without one of them, and off a Cloud TPU,
JAX need not look: in a pod of Kubernetes it would complain that it cannot ask the cluster."""


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process stands among those that it works with.

    Attributes:
        address: host:port of the first.
        count: how many there are.
        number: which one this is, from 0.
        devices: numbers of the devices of its host that are its own; None: all.

    Examples:
        >>> from specjax.processes import ProcessPlace
        >>> ProcessPlace("10.0.0.1:8476", count=2, number=1)
        ProcessPlace(address='10.0.0.1:8476', count=2, number=1, devices=None)
    """

    address: str
    count: int
    number: int
    devices: tuple[int, ...] | None = None


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


def find(environment: Mapping[str, str] = os.environ) -> ProcessPlace | None:
    """What the environment says of this process's place; None: it works alone.

    Three variables say it on any machines: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. LeaderWorkerSets of
    Kubernetes say it by LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and LWS_WORKER_INDEX. Slurm, Open MPI, Cloud TPUs and jobs of
    Kubernetes are asked as JAX asks them: by the process's own environment. JAX_COORDINATOR_PORT is the port of the first
    process, where only its host is known. JAX_NUM_PROCESSES=1 says that this process works alone, whatever started it.

    Raises:
        InputError: a variable is no number, or says something that cannot be.

    Examples:
        >>> from specjax import processes
        >>> processes.find({"LWS_LEADER_ADDRESS": "m-0.m", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"})
        ProcessPlace(address='m-0.m:8476', count=2, number=1, devices=None)
        >>> processes.find({})
    """
    if _number_in(environment, "JAX_NUM_PROCESSES") == 1:
        return None
    if address := environment.get("JAX_COORDINATOR_ADDRESS"):
        count, number = (_number_in(environment, name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        if count is not None and number is not None:
            return _checked(ProcessPlace(address, count, number))
        found = _of_scheduler(environment)
        if found is None:
            raise InputError(
                f"JAX_COORDINATOR_ADDRESS={address!r}: no scheduler says how many processes there are, and which one this is: "
                "set JAX_NUM_PROCESSES and JAX_PROCESS_ID too"
            )
        count, number = found.count if count is None else count, found.number if number is None else number
        return _checked(ProcessPlace(address, count, number, found.devices))
    if leader := environment.get("LWS_LEADER_ADDRESS"):
        count, number = (_number_in(environment, name) for name in ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX"))
        if count is None or number is None:
            raise InputError(f"LWS_LEADER_ADDRESS={leader!r}: LWS_GROUP_SIZE and LWS_WORKER_INDEX are not both set: set them")
        port = _number_in(environment, "JAX_COORDINATOR_PORT") or PORT
        return _checked(ProcessPlace(f"{leader}:{port}", count, number))
    return _of_scheduler(environment)


def _checked(place: ProcessPlace) -> ProcessPlace | None:
    host, colon, port = place.address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise InputError(f"the address of the first process is {place.address!r}: give HOST:PORT, as JAX_COORDINATOR_ADDRESS")
    if not 0 <= place.number < place.count:
        raise InputError(
            f"this is process {place.number} of {place.count}: give numbers from 0 to {place.count - 1}, each to one process"
        )
    return place if place.count > 1 else None


def _number_in(environment: Mapping[str, str], variable: str) -> int | None:
    value = environment.get(variable)
    if value is not None and not (value.isascii() and value.isdecimal()):
        raise InputError(f"{variable}={value!r}: must be a whole number")
    return None if value is None else int(value)


def _of_scheduler(environment: Mapping[str, str]) -> ProcessPlace | None:
    """What a scheduler that JAX knows says."""
    # JAX has no public name for what `jax.distributed.initialize` finds, and that alone would not say who is who.
    from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm
    from jax._src.clusters import ClusterEnv

    if not running_in_cloud_tpu_vm and not any(name in environment for name in _SCHEDULERS):
        return None
    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(_join_seconds()))
    except Exception as error:  # what the clients of the schedulers raise has no common kind
        raise InputError(
            f"the scheduler does not say which processes work together ({' '.join(str(error).split())}): set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from None
    address, count, number, devices = found
    if address is None or count is None or number is None or count < 2:
        return None
    # JAX takes a task of Slurm's to be one device's. Where a node has one task alone, all of its devices are meant.
    if environment.get("SLURM_STEP_NUM_NODES") == str(count):
        devices = None
    return ProcessPlace(address, count, number, None if devices is None else tuple(devices))


def _join_seconds() -> float:
    text = os.environ.get("SPECJAX_JOIN_SECONDS", "")
    try:
        seconds = float(text or JOIN_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        raise InputError(f"SPECJAX_JOIN_SECONDS={text!r}: must be a number of seconds above 0")
    return seconds


class Processes:
    """Those that work together, as one of them sees them. `join` makes it.

    Attributes:
        number: of this process; the first, 0, decides.
        roster: all of them, by number.

    Examples:
        >>> from specjax import processes
        >>> together = processes.join()  # in each of them, before the first array
        >>> if together is not None:
        ...     if together.is_first:
        ...         together.send(b"begin")
        ...     else:
        ...         assert together.receive() == b"begin"
        ...     together.leave()
    """

    def __init__(self, number: int, roster: list[Member], links: dict[int, "_Link"]) -> None:
        self.number, self.roster, self._links, self._has_left = number, roster, links, False
        self._decisions: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for other, link in links.items():
            threading.Thread(target=self._listen, args=(other, link), name=f"process-{other}", daemon=True).start()

    @property
    def is_first(self) -> bool:
        """Whether this one decides, and speaks for all."""
        return self.number == 0

    def send(self, decision: bytes) -> None:
        """Tell all others what the first has decided."""
        for link in self._links.values():
            link.send(_DECISION, decision)

    def receive(self) -> bytes | None:
        """The next of the first's decisions, in their order; waits for it. None: there are no more (`end`)."""
        return self._decisions.get()

    def end(self) -> None:
        """Tell all others that there are no more decisions, until the next one."""
        for link in self._links.values():
            link.send(_NO_MORE)

    def leave(self) -> None:
        """This process ends, and nothing is wrong."""
        self._has_left = True
        for link in self._links.values():
            link.send(_LEAVES)

    def _listen(self, other: int, link: "_Link") -> None:
        """Hear from another until it ends."""
        others_left = False
        while (message := link.receive()) is not None:
            kind, content = message
            if kind == _LOST:  # another one, which only the first hears of
                self._end_all(int(content))
            elif kind == _DECISION:
                self._decisions.put(content)
            elif kind == _NO_MORE:
                self._decisions.put(None)
            others_left = others_left or kind == _LEAVES
        if not others_left:
            self._end_all(other)

    def _end_all(self, lost: int) -> None:
        """Say which one was lost, and end. No exception would reach a thread that waits for the device."""
        limit = threading.Timer(5.0, os._exit, (1,))  # if somebody does not take what is sent or printed
        limit.daemon = True
        limit.start()
        try:
            # Not `sys.stderr`, which may lead nowhere: of several processes the first speaks.
            print(f"specjax: error: {self.roster[lost]} is lost, and all others end with it", file=sys.__stderr__, flush=True)
            for link in self._links.values():
                link.send(_LOST, str(lost).encode())
        finally:
            os._exit(1)

    def _end_unless_left(self) -> None:
        """At the end of Python. JAX would wait for the others, who wait for this one, before it lets go of the connections."""
        if not self._has_left:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(1)


class _Link:
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


_joined: Processes | None = None


def joined() -> Processes | None:
    """Those that this process works with; None: it works alone, or has not called `join`.

    Examples:
        >>> from specjax import processes
        >>> print(processes.joined())
        None
    """
    return _joined


def speaks() -> bool:
    """Whether this process prints, and writes files, for all.

    Examples:
        >>> from specjax import processes
        >>> processes.speaks()  # one that works alone does
        True
    """
    return _joined is None or _joined.is_first


def join(place: ProcessPlace | None = None, *, task: str = "", say: Callable[[str], None] | None = None) -> Processes | None:
    """Meet the other processes, and give JAX the devices of all. To be called before the first array is made.

    Args:
        place: this process's; None: what `find` finds.
        task: what this process is to do, in any words: all must say the same.
        say: is told who is who, in the first process.

    Returns:
        The processes; None where this one works alone. Call `Processes.leave` when all is done: to the others a process that
        ends without it is lost.

    Raises:
        InputError: not all have come in time; names those. Or they do not run the same versions, or not the same task.

    Examples:
        >>> from specjax import processes
        >>> together = processes.join()  # nothing in the environment says that there are others
        >>> print(together)
        None
    """
    global _joined  # noqa: PLW0603  JAX knows one group of processes, too
    place = place or find()
    if place is None or _joined is not None:
        return _joined
    seconds = _join_seconds()
    digest = hashlib.sha256(task.encode()).hexdigest()
    own = Member(place.number, place.count, socket.gethostname(), os.getpid(), _versions(), digest)
    roster, links = _gather(place, own, seconds) if place.number == 0 else _report(place, own, seconds)
    together = Processes(place.number, roster, links)
    atexit.register(together._end_unless_left)  # before what JAX has registered
    ends = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    # The port is JAX's now. Its processes meet once more, and nobody is late any more.
    jax.distributed.initialize(
        place.address,
        place.count,
        place.number,
        local_device_ids=None if place.devices is None or "JAX_LOCAL_DEVICE_IDS" in os.environ else place.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(int(seconds), 30),
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )
    if ends is not None:
        signal.signal(signal.SIGTERM, ends)  # JAX would note the signal, and go on
    _joined = together
    meet("joined")
    if say is not None and _joined.is_first:
        say(f"{len(roster)} processes: " + ", ".join(f"{each.number} is {each.host} (pid {each.pid})" for each in roster))
    return _joined


def meet(what: str) -> None:
    """Wait until all processes have come here; where this one works alone, do nothing.

    After what takes one of them much longer than another, such as loading or compiling: the devices themselves wait for each
    other only half a minute, the first time.

    Args:
        what: a name, the same in all of them.

    Examples:
        >>> from specjax import processes
        >>> processes.meet("loaded")
    """
    if _joined is not None:
        multihost_utils.sync_global_devices(what)


def _versions() -> str:
    specjax = sys.modules["specjax"]  # it imports this module, and has been imported
    return f"specjax {specjax.__version__}, jax {version('jax')}, jaxlib {version('jaxlib')}"


def _gather(place: ProcessPlace, own: Member, seconds: float) -> tuple[list[Member], dict[int, _Link]]:
    """In the first process: wait until all others have said who they are, and tell each the roster."""
    deadline = time.monotonic() + seconds
    here: dict[int, tuple[Member, _Link]] = {}
    port = int(place.address.rpartition(":")[2])
    try:
        server = _listen_at(port)
    except OSError as error:
        raise InputError(f"{place.address}: cannot listen at port {port} ({error.strerror}): choose another one") from None
    why = ""
    refused: list[_Link] = []
    came: queue.SimpleQueue[tuple[Member, _Link]] = queue.SimpleQueue()
    with server, waiting("waiting for other processes", place.count, 1) as wait:
        server.settimeout(0.1)
        while not why:
            # Whoever comes is heard in a thread: it may be anybody, and say nothing.
            with suppress(TimeoutError):
                link = _Link(server.accept()[0])
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


def _hear(link: _Link, came: "queue.SimpleQueue[tuple[Member, _Link]]") -> None:
    """Who has connected, if it says so soon and as one of these processes does."""
    member = _read_member(link.receive(most=_LONGEST_HELLO, seconds=5.0))
    if member is None:
        link.close()
    else:
        came.put((member, link))


def _why_not(member: Member, own: Member, here: Mapping[int, tuple[Member, _Link]]) -> str:
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


def _report(place: ProcessPlace, own: Member, seconds: float) -> tuple[list[Member], dict[int, _Link]]:
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
        link = _Link(connection)
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
