"""Handling of Ctrl-C and SIGTERM in commands: the command ends at once and prints one line.

A command that has something to save is offered the signal first (`offering`).

Python runs signal handlers in the main thread, between two of its instructions. While XLA compiles,
that may take many seconds. So a thread waits for signals at a pipe to which the interpreter's C
code writes their numbers. The thread removes half-written files, prints the line, and ends the
process without unwinding: an interpreter that shuts down while threads of XLA are running may
crash. This module imports only the standard library.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LONGEST = 1.0
"""The maximum time for the clean-up in seconds: the main thread may hold a lock that it needs."""

_also: list[Callable[[], None]] = []
_hint = ""
_heed: Callable[[int], bool] | None = None
_owner = 0
_is_ending = threading.Event()


def end_at_signals() -> None:
    """End this process at SIGINT with status 130 and at SIGTERM with 143, from now on.

    Commands call this in the main thread. Signals that the process was started to ignore stay
    ignored, and handlers that are set later take precedence, such as those of a server that drains.
    """
    global _owner  # noqa: PLW0603 - a process has one set of handlers
    _owner = os.getpid()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for signal_number in SIGNALS:
        if signal.getsignal(signal_number) != signal.SIG_IGN:
            signal.signal(signal_number, _handle)
    threading.Thread(
        target=_watch, args=(read_end,), name="specjax-interrupts", daemon=True
    ).start()


def say_also(hint: str) -> None:
    """Add a hint to the printed line, such as "the same command continues the run"."""
    global _hint  # noqa: PLW0603 - as above
    _hint = hint


@contextmanager
def ending_with(clean_up: Callable[[], None]) -> Iterator[None]:
    """Call ``clean_up`` if a signal ends the process while the block runs.

    For example, it may end child processes.
    """
    _also.append(clean_up)
    try:
        yield
    finally:
        _also.remove(clean_up)


@contextmanager
def offering(heed: Callable[[int], bool]) -> Iterator[None]:
    """Offer signals to ``heed`` while the block runs.

    It gets the number of a signal in a thread, while the main thread may be anywhere. It must
    return at once. If it returns True, the command goes on, and ends by itself soon.
    """
    global _heed  # noqa: PLW0603 - as above
    _heed = heed
    try:
        yield
    finally:
        _heed = None


def hold_if_ending() -> None:
    """Block if a signal is ending the process, so that errors that this causes are not printed."""
    if _is_ending.is_set():
        threading.Event().wait()


def _handle(number: int, frame: FrameType | None) -> None:
    """Do nothing, because the thread ends the process.

    A forked process has no such thread, and ends as if there were no handler.
    """
    if os.getpid() != _owner:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _watch(read: int) -> None:
    while True:
        for number in os.read(read, 64):
            if number not in SIGNALS or signal.getsignal(number) is not _handle:
                continue
            if (heed := _heed) is None or not heed(number):
                _end(number)


def _end(number: int) -> None:
    _is_ending.set()
    # The main thread may hold any lock and does not continue, so each step below has a time limit.
    cleaning = threading.Thread(target=_clean_up, daemon=True)
    cleaning.start()
    cleaning.join(LONGEST)
    speaking = threading.Thread(target=_speak, args=(number,), daemon=True)
    speaking.start()
    speaking.join(LONGEST / 2)
    os._exit(128 + number)


def _clean_up() -> None:
    calls = [*_also]
    for module, name in (("specjax.files", "discard_unfinished"), ("specjax.progress", "clear")):
        # A module that is still being imported has no such function.
        if call := getattr(sys.modules.get(module), name, None):
            calls.append(call)
    for call in calls:
        with suppress(Exception):  # the process ends in any case
            call()


def _speak(number: int) -> None:
    with suppress(Exception):
        sys.stdout.flush()
    print(f"specjax: {word_of(number)}{_hint and f'; {_hint}'}", file=sys.stderr, flush=True)


def word_of(number: int) -> str:
    """Return the word for a process that a signal ends."""
    return "interrupted" if number == signal.SIGINT else "terminated"
