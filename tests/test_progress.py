"""Check how commands say what they wait for.

They print lines without a terminal and bars in one. The library by itself shows nothing.
"""

import io
import time

import pytest
from rich.console import Console

from specjax import progress


def test_nothing_is_shown_that_no_command_asked_for(capsys, monkeypatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE", 0.01)
    with progress.waiting("loading"):
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


def test_lines_where_no_terminal_is(capsys, monkeypatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE", 0.05)
    progress.show_waits()
    for item in progress.track(["plain", "MTP"], "compiling {}"):
        time.sleep(0.08 if item == "plain" else 0)
    with progress.waiting("short"):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["specjax: compiling plain 0 of 2, 0 s"]


def test_bars_in_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bars = progress._Bars(console)
    outer, inner = (
        progress.Wait("answering questions", total=80, done=3),
        progress.Wait("loading a drafter"),
    )
    with bars.show(outer):
        with bars.show(inner):
            bars._progress.refresh()
        outer.update(done=4)
        bars._progress.refresh()
    shown = console.file.getvalue()
    assert (
        "answering questions" in shown
        and "3 of 80" in shown
        and "4 of 80" in shown
        and "loading a drafter" in shown
    )
    assert not bars._progress.task_ids and bars._progress.finished


def test_a_line_is_said_by_commands_and_elsewhere_warned_of(capsys) -> None:
    progress.say("asked for")
    with pytest.warns(UserWarning, match="^not asked for$"):
        progress.say("not asked for", unasked=True)
    progress.show_waits()
    progress.say("drafting with 3 tokens")
    assert capsys.readouterr() == ("", "specjax: drafting with 3 tokens\n")
    console = Console(file=io.StringIO(), force_terminal=True, width=30)
    bars = progress._Bars(console)
    with bars.show(progress.Wait("loading")):
        bars.say("drafting with [3] tokens of all that there are", unasked=True)
    assert "specjax: drafting with [3] tokens of all that there are\n" in console.file.getvalue()


@pytest.mark.parametrize("seconds, words", [(0.4, "0 s"), (59.4, "59 s"), (200.2, "3 min 20 s")])
def test_durations_in_words(seconds: float, words: str) -> None:
    assert progress.duration(seconds) == words


def test_the_time_that_is_left(monkeypatch) -> None:
    clock = iter([0.0, 30.0, 40.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    # A run that is continued: 10 steps were done before.
    wait = progress.Wait("training", total=40, done=10)
    wait.update(done=20)
    assert wait.line() == "training 20 of 40, 40 s, 50 s left"
