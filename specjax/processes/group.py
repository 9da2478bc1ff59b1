"""The processes of one run, from the moment they are connected until they end.

Each process but the first keeps one connection to the first for as long as it runs. When a process ends, however it ends, its
connection is closed. So the others learn of it at once, print which one it was, and end too: they would wait for it for ever.
"""

import atexit
import hashlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import jax
from jax.experimental import multihost_utils

from specjax.processes.rank import ProcessPlace, find, join_seconds
from specjax.processes.rendezvous import DECISION, LEAVES, LOST, NO_MORE, Member, ProcessLink, gather, report, versions

_HEARTBEAT_SECONDS = 20
"""After which JAX gives up a process that still has its connection, but does nothing any more."""


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

    def __init__(self, number: int, roster: list[Member], links: dict[int, ProcessLink]) -> None:
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
            link.send(DECISION, decision)

    def receive(self) -> bytes | None:
        """The next of the first's decisions, in their order; waits for it. None: there are no more (`end`)."""
        return self._decisions.get()

    def end(self) -> None:
        """Tell all others that there are no more decisions, until the next one."""
        for link in self._links.values():
            link.send(NO_MORE)

    def leave(self) -> None:
        """This process ends, and nothing is wrong."""
        self._has_left = True
        for link in self._links.values():
            link.send(LEAVES)

    def _listen(self, other: int, link: ProcessLink) -> None:
        """Hear from another until it ends."""
        others_left = False
        while (message := link.receive()) is not None:
            kind, content = message
            if kind == LOST:  # another one, which only the first hears of
                self._end_all(int(content))
            elif kind == DECISION:
                self._decisions.put(content)
            elif kind == NO_MORE:
                self._decisions.put(None)
            others_left = others_left or kind == LEAVES
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
                link.send(LOST, str(lost).encode())
        finally:
            os._exit(1)

    def _end_unless_left(self) -> None:
        """At the end of Python. JAX would wait for the others, who wait for this one, before it lets go of the connections."""
        if not self._has_left:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(1)


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
    seconds = join_seconds()
    digest = hashlib.sha256(task.encode()).hexdigest()
    own = Member(place.number, place.count, socket.gethostname(), os.getpid(), versions(), digest)
    roster, links = gather(place, own, seconds) if place.number == 0 else report(place, own, seconds)
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
