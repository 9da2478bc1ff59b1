"""What a command waits for, said to whoever waits: a bar in a terminal, and a line now and then elsewhere.

Code that takes long says so with `waiting` or `track`, wherever it stands. Only commands show it, for they call `show_waits`;
in a notebook or a script of one's own nothing is printed. It goes to the standard error: the output of a command stays clean.
What was found or decided on the way is a line of its own, `say`.
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
"""Seconds until the first line about a wait, where no terminal is; each pause after it is twice as long, up to the longest."""

Item = TypeVar("Item")


class Wait:
    """Something that takes long.

    Attributes:
        what: it is, such as "compiling EAGLE-3".
        total: how many parts it has; None where that is not known.
        done: how many of them are done.
    """

    def __init__(self, what: str, total: int | None = None, done: int = 0) -> None:
        self.what, self.total, self.done = what, total, done
        self._begun, self._done_before = time.monotonic(), done
        self._updated = self._begun

    def update(self, *, what: str | None = None, done: int | None = None) -> None:
        """Say what is new."""
        self.what = what or self.what
        if done is not None and done != self.done:
            self.done, self._updated = done, time.monotonic()

    def times(self) -> str:
        """How long it has taken, and how much longer it may take: "12 s, 40 s left"."""
        now, made = time.monotonic(), self.done - self._done_before
        if not self.total or made <= 0:
            return duration(now - self._begun)
        left = (self._updated - self._begun) * (self.total - self.done) / made - (now - self._updated)
        return duration(now - self._begun) + (f", {duration(left)} left" if left >= 1 else "")

    def line(self) -> str:
        """All of it in a line: "measuring 3 of 15, 12 s, 40 s left"."""
        parts = "" if self.total is None else f" {self.done:,} of {self.total:,}"
        return f"{self.what}{parts}, {self.times()}"


def duration(seconds: float) -> str:
    """In words, to the second: "48 s", "3 min 20 s"."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


@contextmanager
def waiting(what: str, total: int | None = None, done: int = 0) -> Iterator[Wait]:
    """While the body runs, show what is waited for. Nothing else may be printed meanwhile.

    Args:
        what: is done, such as "loading Qwen/Qwen3-8B".
        total: how many parts it has, where that is known.
        done: how many of them were done before.
    """
    wait = Wait(what, total, done)
    with _display.show(wait):
        yield wait


def track(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The ``items``, one after another, while how many of them are done is shown. In ``what``, {} stands for the item."""
    with waiting(what.replace("{}", str(next(iter(items), ""))), len(items)) as wait:
        for index, item in enumerate(items):
            wait.update(what=what.replace("{}", str(item)), done=index)
            yield item


def say(line: str, unasked: bool = False) -> None:
    """A ``line`` about what was found or decided. Commands show it; elsewhere what nobody asked for, as a warning."""
    _display.say(line, unasked)


def clear() -> None:
    """Take what is shown off the terminal: for a process that is about to end."""
    _display.clear()


# --- displays --------------------------------------------------------------------------------------------------------


class _Nothing:
    def show(self, wait: Wait) -> AbstractContextManager[None]:
        return nullcontext()

    def say(self, line: str, unasked: bool) -> None:
        if unasked:
            warnings.warn(line, stacklevel=2)

    def clear(self) -> None:
        pass


class _Lines:
    """A line now and then, about waits of more than a few seconds."""

    @contextmanager
    def show(self, wait: Wait) -> Iterator[None]:
        over = threading.Event()

        def speak() -> None:
            pause = FIRST_LINE
            while not over.wait(pause):
                print(f"specjax: {wait.line()}", file=sys.stderr, flush=True)
                pause = min(2 * pause, LAST_PAUSE)

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def say(self, line: str, unasked: bool) -> None:
        print(f"specjax: {line}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        pass


class _Bars:
    """A bar for each wait, a wait within a wait below it. They vanish when nothing is waited for any more."""

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), _Numbers(""))
        # What is printed must go where it belongs: the standard output may be a file.
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
        self._progress.console.print(f"specjax: {line}", markup=False, highlight=False, emoji=False, soft_wrap=True)

    def clear(self) -> None:
        self._progress.stop()  # shows the cursor again


class _Numbers(TextColumn):
    """Reads the wait anew whenever it is drawn: so nobody has to tell the bar."""

    def render(self, task: Task) -> Text:
        wait: Wait = task.fields["wait"]
        task.description, task.completed = wait.what, wait.done
        parts = "" if wait.total is None else f"{wait.done:,} of {wait.total:,}, "
        return Text(parts + wait.times(), no_wrap=True)


_display: _Nothing | _Lines | _Bars = _Nothing()


def show_waits() -> None:
    """From now on show what is waited for, as suits the standard error. For commands."""
    global _display  # noqa: PLW0603 - a process has one standard error
    console = Console(stderr=True)
    _display = _Bars(console) if console.is_terminal else _Lines()
