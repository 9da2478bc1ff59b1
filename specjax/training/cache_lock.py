"""A lock between the processes and hosts that share a directory. A killed owner does not keep it.

The owner of the lock writes into its file again and again. A process that waits takes the lock over
if nothing is written for a while. It compares no clocks: it measures the time by its own. On the
machine of the owner it need not wait, because it sees that the owner has ended. The file is opened
for each look, so that network file systems show what another host has written.

If two processes own the lock after all, because an owner was suspended for that long, both do the
same work. So what they make must be put in place by one rename.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specjax.progress import waiting

_BEAT, _PATIENCE, _LOOK = 5.0, 90.0, 0.5
"""Seconds between two signs of life, until an owner without one is dead, and between two looks."""


@contextmanager
def only_one(lock: Path, is_done: Callable[[], bool], what: str) -> Iterator[bool]:
    """Yield True to one process at a time; to the others, wait, and yield False when it is done.

    Args:
        lock: the file of the lock. Its directory exists.
        is_done: returns whether the work is done, so that nobody need do it.
        what: the work, for the progress of those that wait.
    """
    if not _acquire(lock, is_done, what):
        yield False
        return
    owner = _Owner(lock)
    try:
        yield not is_done()
    finally:
        owner.release()


def _acquire(lock: Path, is_done: Callable[[], bool], what: str) -> bool:
    """Wait for the lock, and return True; False if the work is done before."""
    if _create(lock):
        return True
    with waiting(f"another process is {what}: waiting"):
        content, since = _read(lock), time.monotonic()
        while True:
            if is_done():
                return False
            if _create(lock):
                return True
            newest = _read(lock)
            if newest != content:
                content, since = newest, time.monotonic()
            if time.monotonic() - since > _PATIENCE or _has_ended(newest):
                _remove(lock, newest)
                continue
            time.sleep(_LOOK)


class _Owner:
    """The owner of a lock: a thread that writes signs of life until `release`."""

    def __init__(self, lock: Path) -> None:
        self._lock, self._is_over = lock, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lock up."""
        self._is_over.set()
        self._thread.join()
        if _is_mine(_read(self._lock)):
            self._lock.unlink(missing_ok=True)

    def _beat(self) -> None:
        beats = 0
        while not self._is_over.wait(_BEAT):
            beats += 1
            _write_sign(self._lock, beats)


def _write_sign(lock: Path, beats: int) -> None:
    """Write a sign of life, unless another process has taken the lock over."""
    if _is_mine(_read(lock)):
        with suppress(OSError):
            lock.write_text(f"{_identity()} {beats}")


def _create(lock: Path) -> bool:
    """Create the file of the lock, and return whether it was not there."""
    try:
        file = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(file, "w") as content:
        content.write(f"{_identity()} 0")
    return True


def _read(lock: Path) -> str:
    """Return the content of the lock's file; "" if it is not there, or is just being written."""
    try:
        return lock.read_text(errors="replace")
    except OSError:
        return ""


def _remove(lock: Path, content: str) -> None:
    """Remove a lock whose owner is dead, unless another process has taken it over meanwhile."""
    aside = lock.with_name(f"{lock.name}.{uuid.uuid4().hex}")
    with suppress(OSError):
        lock.rename(aside)
        if _read(aside) != content:  # the lock of the process that was faster
            os.link(aside, lock)
    aside.unlink(missing_ok=True)


def _identity() -> str:
    """Return which process this is: the boot of its machine, its name space, and its number."""
    return f"{_machine()} {os.getpid()}"


def _machine() -> str:
    """Return a name for the numbers of processes that this process sees."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # not Linux
        return f"{uuid.getnode():x}"


def _is_mine(content: str) -> bool:
    return content.rpartition(" ")[0] == _identity()


def _has_ended(content: str) -> bool:
    """Return whether the owner ran on this machine, and runs no more."""
    machine, _, rest = content.partition(" ")
    process = rest.partition(" ")[0]
    if machine != _machine() or not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
