"""The processes of one run, from when they are connected until they end.

Every other process keeps one connection to the first process. When a process ends in any way, its
connection closes. The others notice this at once, print which process is lost, and end too:
otherwise they would wait for it for ever.
"""

import atexit
import hashlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import jax
from jax.experimental import multihost_utils

from specjax.processes.rank import ProcessPlace, find, join_seconds
from specjax.processes.rendezvous import (
    DECISION,
    LEAVES,
    LOST,
    NO_MORE,
    Member,
    ProcessLink,
    gather,
    report,
    versions,
)

_HEARTBEAT_SECONDS = 20
"""Seconds after which JAX gives up a process that is connected but no longer responds."""

_REPORT_SECONDS = 2.0
"""Seconds to wait for the report of a lost process. On one machine it comes much sooner."""


class Processes:
    """The processes that work together, as one of them sees them. `join` makes it.

    Attributes:
        number: the index of this process. The first process, 0, decides.
        roster: all processes, by index.

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
        for peer, link in links.items():
            threading.Thread(
                target=self._listen, args=(peer, link), name=f"process-{peer}", daemon=True
            ).start()

    @property
    def is_first(self) -> bool:
        """True for the process that decides and prints for all."""
        return self.number == 0

    def send(self, decision: bytes) -> None:
        """Send a decision of the first process to all others."""
        for link in self._links.values():
            link.send(DECISION, decision)

    def receive(self) -> bytes | None:
        """Wait for the first process's next decision; None: there are no more (`end`)."""
        return self._decisions.get()

    def end(self) -> None:
        """Tell all others that there are no more decisions for now."""
        for link in self._links.values():
            link.send(NO_MORE)

    def leave(self) -> None:
        """Tell all others that this process ends without an error."""
        self._has_left = True
        for link in self._links.values():
            link.send(LEAVES)

    def _listen(self, number: int, link: ProcessLink) -> None:
        """Receive the messages of another process until it ends."""
        has_left = False
        while (message := link.receive()) is not None:
            kind, content = message
            if kind == LOST:  # another process, which is connected to the first process only
                self._end_all(int(content))
            elif kind == DECISION:
                self._decisions.put(content)
            elif kind == NO_MORE:
                self._decisions.put(None)
            has_left = has_left or kind == LEAVES
        if not has_left:
            self._end_all(number)

    def _end_all(self, number: int) -> None:
        """Report which process is lost, and exit.

        An exception would not reach a thread that waits for the device.
        """
        exit_timer = threading.Timer(5.0, os._exit, (1,))  # the prints and sends below may block
        exit_timer.daemon = True
        exit_timer.start()
        try:
            # `sys.stderr` may be redirected to nowhere, because only the first process prints.
            print(
                f"specjax: error: {self.roster[number]} is lost; all other processes end",
                file=sys.__stderr__,
                flush=True,
            )
            for link in self._links.values():
                link.send(LOST, str(number).encode())
        finally:
            os._exit(1)

    def _end_unless_left(self) -> None:
        """Exit at once at the end of Python, unless `leave` was called.

        Otherwise JAX would wait for the other processes before it closes the connections, and they
        would wait for this one.
        """
        if not self._has_left:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(1)


@contextmanager
def waiting_for_report() -> Iterator[None]:
    """Hold back an error of the device until a process that may be lost is reported.

    When a process is lost, what the others compute together with it fails. That may be noticed
    before the connection closes, which ends this process and says who is lost.
    """
    try:
        yield
    except Exception as error:
        # An engine reports the error of its thread as a cause.
        if isinstance(error, jax.errors.JaxRuntimeError) or isinstance(
            error.__cause__, jax.errors.JaxRuntimeError
        ):
            time.sleep(_REPORT_SECONDS)
        raise


_joined: Processes | None = None


def joined() -> Processes | None:
    """Return the processes that this one works with; None if it works alone or before `join`.

    Examples:
        >>> from specjax import processes
        >>> print(processes.joined())
        None
    """
    return _joined


def speaks() -> bool:
    """Return True if this process prints and writes files for all.

    Examples:
        >>> from specjax import processes
        >>> processes.speaks()  # one that works alone does
        True
    """
    return _joined is None or _joined.is_first


def join(
    place: ProcessPlace | None = None, *, task: str = "", say: Callable[[str], None] | None = None
) -> Processes | None:
    """Connect to the other processes, and give JAX the devices of all.

    Call this before the first array is made.

    Args:
        place: this process's place; None: the result of `find`.
        task: a description of the task. It must be the same in all processes.
        say: a function that the first process calls with a line about all processes.

    Returns:
        The processes; None if this one works alone. Call `Processes.leave` at the end: a process
        that ends without it counts as lost.

    Raises:
        InputError: some processes have not come in time, and the message names them; or their
            versions or tasks differ.

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
    member = Member(
        place.number, place.count, socket.gethostname(), os.getpid(), versions(), digest
    )
    roster, links = (
        gather(place, member, seconds) if place.number == 0 else report(place, member, seconds)
    )
    together = Processes(place.number, roster, links)
    atexit.register(together._end_unless_left)  # runs before the handlers that JAX has registered
    if threading.current_thread() is threading.main_thread():
        sigterm_handler = signal.getsignal(signal.SIGTERM)
    else:
        sigterm_handler = None
    # From here on JAX uses the port. Its processes connect anew; all of them are running by now.
    jax.distributed.initialize(
        place.address,
        place.count,
        place.number,
        local_device_ids=None
        if place.devices is None or "JAX_LOCAL_DEVICE_IDS" in os.environ
        else place.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(int(seconds), 30),
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )
    if sigterm_handler is not None:
        signal.signal(signal.SIGTERM, sigterm_handler)  # JAX's handler would only note the signal
    _joined = together
    meet("joined")
    if say is not None and _joined.is_first:
        say(
            f"{len(roster)} processes: "
            + ", ".join(f"{peer.number} is {peer.host} (pid {peer.pid})" for peer in roster)
        )
    return _joined


def meet(what: str) -> None:
    """Wait until all processes have called this; do nothing if this process works alone.

    Call it after work that may take one process much longer than another, such as loading or
    compiling: devices wait only half a minute for each other in their first common computation.

    Args:
        what: a name, the same in all processes.

    Examples:
        >>> from specjax import processes
        >>> processes.meet("loaded")
    """
    if _joined is not None:
        multihost_utils.sync_global_devices(what)
