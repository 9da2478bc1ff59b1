"""What Ctrl-C and SIGTERM do to a command: it ends at once, wherever it is, with one line.

A handler in Python runs in the main thread between two of its instructions, and while XLA compiles there is none for many
seconds. So a thread of its own waits for signals, at a pipe to which the interpreter's C code writes their numbers. The thread
removes what is half written, prints the line, and ends the process without unwinding it: an interpreter that is taken down
beside the threads of XLA may crash. This file needs Python alone.
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
"""Seconds that are left for cleaning up, should the command hold a lock that it takes."""

_also: list[Callable[[], None]] = []
_hint = ""
_owner = 0
_is_ending = threading.Event()


def end_at_signals() -> None:
    """From now on end this process at SIGINT with 130, and at SIGTERM with 143. For commands: call it in the main thread.

    A signal is left alone that the process was started to ignore, and one for which somebody sets another handler later: a
    server that drains, or a training that is saved.
    """
    global _owner  # noqa: PLW0603 - a process has one set of handlers
    _owner = os.getpid()
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)
    threading.Thread(target=_watch, args=(read,), name="specjax-interrupts", daemon=True).start()


def say_also(hint: str) -> None:
    """Add to the line that is printed, such as "the same command continues the run"."""
    global _hint  # noqa: PLW0603 - as above
    _hint = hint


@contextmanager
def ending_with(clean_up: Callable[[], None]) -> Iterator[None]:
    """While the block runs, call ``clean_up`` too before a signal ends the process: such as to end what it has started."""
    _also.append(clean_up)
    try:
        yield
    finally:
        _also.remove(clean_up)


def hold_if_ending() -> None:
    """Wait for the end, if a signal is ending the process: an error that it has caused is not to be told."""
    if _is_ending.is_set():
        threading.Event().wait()


def _handle(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread ends the process. One that was forked has no such thread, and ends as if there were no handler."""
    if os.getpid() != _owner:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _watch(read: int) -> None:
    while True:
        for number in os.read(read, 64):
            if number in SIGNALS and signal.getsignal(number) is _handle:
                _end(number)


def _end(number: int) -> None:
    _is_ending.set()
    # The main thread may hold any lock, and does not go on: whoever waits for one is left behind.
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
        if call := getattr(sys.modules.get(module), name, None):  # of a module that is only half imported there is none yet
            calls.append(call)
    for call in calls:
        with suppress(Exception):  # the process ends, whatever happens
            call()


def _speak(number: int) -> None:
    with suppress(Exception):
        sys.stdout.flush()
    word = "interrupted" if number == signal.SIGINT else "terminated"
    print(f"specjax: {word}{_hint and f'; {_hint}'}", file=sys.stderr, flush=True)
