"""Progress of long operations: a bar in a terminal, and a line now and then elsewhere.

Long operations report themselves with `waiting` or `track`. Only commands show the progress: they
call `show_waits`. A notebook or script prints nothing. All output goes to the standard error, so
that the output of a command stays clean. `say` prints a line about a finding or a decision.
"""

import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn
from rich.text import Text

FIRST_LINE, LAST_PAUSE = 5.0, 60.0
"""Seconds until the first line about an operation where there is no terminal. Each later pause is
twice as long as the one before, up to LAST_PAUSE.
"""

Item = TypeVar("Item")


class Wait:
    """A long operation.

    Attributes:
        what: the operation, such as "compiling EAGLE-3".
        total: the number of its parts; None if unknown.
        done: the number of parts that are done.
    """

    def __init__(self, what: str, total: int | None = None, done: int = 0) -> None:
        self.what, self.total, self.done = what, total, done
        self._start, self._done_before = time.monotonic(), done
        self._updated = self._start

    def update(self, *, what: str | None = None, done: int | None = None) -> None:
        """Set a new description or a new number of finished parts."""
        self.what = what or self.what
        if done is not None and done != self.done:
            self.done, self._updated = done, time.monotonic()

    def times(self) -> str:
        """Return the elapsed time and the estimated remaining time: "12 s, 40 s left"."""
        now, finished = time.monotonic(), self.done - self._done_before
        if not self.total or finished <= 0:
            return duration(now - self._start)
        remaining = (self._updated - self._start) * (self.total - self.done) / finished - (
            now - self._updated
        )
        return duration(now - self._start) + (
            f", {duration(remaining)} left" if remaining >= 1 else ""
        )

    def line(self) -> str:
        """Return the whole state as one line: "measuring 3 of 15, 12 s, 40 s left"."""
        parts = "" if self.total is None else f" {self.done:,} of {self.total:,}"
        return f"{self.what}{parts}, {self.times()}"


def duration(seconds: float) -> str:
    """Return a duration in words, to the second: "48 s", "3 min 20 s"."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


@contextmanager
def waiting(what: str, total: int | None = None, done: int = 0) -> Iterator[Wait]:
    """Show an operation while the block runs. Nothing else may be printed meanwhile.

    Args:
        what: the operation, such as "loading Qwen/Qwen3-8B".
        total: the number of its parts, if known.
        done: the number of parts that were done before.
    """
    wait = Wait(what, total, done)
    with _display.show(wait):
        yield wait


def track(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield the items one by one, and show how many are done.

    In ``what``, {} stands for the item.
    """
    with waiting(what.replace("{}", str(next(iter(items), ""))), len(items)) as wait:
        for index, item in enumerate(items):
            wait.update(what=what.replace("{}", str(item)), done=index)
            yield item


def say(line: str, unasked: bool = False) -> None:
    """Print a line about a finding or a decision, if this is a command.

    Elsewhere nothing is printed; with ``unasked``, a warning is issued instead.
    """
    _display.say(line, unasked)


def clear() -> None:
    """Remove the progress from the terminal; for a process that is about to exit."""
    _display.clear()


# --- displays -------------------------------------------------------------------------------------


class _Nothing:
    def show(self, wait: Wait) -> AbstractContextManager[None]:
        return nullcontext()

    def say(self, line: str, unasked: bool) -> None:
        if unasked:
            warnings.warn(line, stacklevel=2)

    def clear(self) -> None:
        pass


class _Lines:
    """A line now and then about operations of more than a few seconds."""

    @contextmanager
    def show(self, wait: Wait) -> Iterator[None]:
        is_over = threading.Event()

        def speak() -> None:
            pause = FIRST_LINE
            while not is_over.wait(pause):
                print(f"specjax: {wait.line()}", file=sys.stderr, flush=True)
                pause = min(2 * pause, LAST_PAUSE)

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def say(self, line: str, unasked: bool) -> None:
        print(f"specjax: {line}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        pass


class _Bars:
    """A bar per operation, nested ones below. The bars vanish when no operation is left."""

    def __init__(self, console: Console) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            _Numbers(""),
        )
        # rich must not redirect the standard output to the terminal: it may be a file.
        self._progress = Progress(*columns, console=console, transient=True, redirect_stdout=False)

    @contextmanager
    def show(self, wait: Wait) -> Iterator[None]:
        progress = self._progress
        task = progress.add_task(wait.what, total=wait.total, completed=wait.done, wait=wait)
        progress.start()
        try:
            yield
        finally:
            progress.remove_task(task)
            if not progress.task_ids:
                progress.stop()

    def say(self, line: str, unasked: bool) -> None:
        self._progress.console.print(
            f"specjax: {line}", markup=False, highlight=False, emoji=False, soft_wrap=True
        )

    def clear(self) -> None:
        self._progress.stop()  # makes the cursor visible again


class _Numbers(TextColumn):
    """The counts and times of a bar, read from the `Wait` at every refresh."""

    def render(self, task: Task) -> Text:
        wait: Wait = task.fields["wait"]
        task.description, task.completed = wait.what, wait.done
        parts = "" if wait.total is None else f"{wait.done:,} of {wait.total:,}, "
        return Text(parts + wait.times(), no_wrap=True)


_display: _Nothing | _Lines | _Bars = _Nothing()


def show_waits() -> None:
    """Show progress on the standard error from now on, as bars or lines. Commands call this."""
    global _display  # noqa: PLW0603 - a process has one standard error
    console = Console(stderr=True)
    _display = _Bars(console) if console.is_terminal else _Lines()
