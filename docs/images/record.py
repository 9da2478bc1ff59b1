"""Record a command in a terminal, and draw its output over time as an animated SVG, light and dark.

.venv/bin/python -m docs.images.record                  records the demo: demo.svg, demo-dark.svg
.venv/bin/python -m docs.images.record --name NAME -- COMMAND    records another command

It requires pyte, a terminal in Python: pip install pyte. The output and its times are real. A wait,
in which only a progress bar changes, is shortened to `--longest-wait` seconds, and the picture says
so; the clock in its corner shows the real time. To record with nothing compiled yet, as a new user
sees it, put JAX_COMPILATION_CACHE_DIR=$(mktemp -d) before the command.
"""

import argparse
import colorsys
import fcntl
import html
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyte

from specjax.reports import style

IMAGES = Path(__file__).parent
DEMO = (min(os.path.relpath(sys.executable), sys.executable, key=len), "-m", "specjax", "demo")
CELL, LINE, SIZE, MARGIN, BAR = 8.4, 17, 14, 14, 34
"""Sizes in pixels: a letter's width, a line's height, the font size, the margin, the title bar."""

PROGRESS = re.compile(r"[━╸╺]{3}|[⠁-⣿]|\d%")
"""A line with a progress bar or a spinner. Its changes do not end a wait."""


class Run(NamedTuple):
    """Adjacent letters with the same look."""

    column: int
    text: str
    look: str


Screen = tuple[tuple[Run, ...], ...]


@dataclass(frozen=True)
class Frame:
    """A screen of the terminal, and when it appears.

    Attributes:
        real: seconds after the start of the command.
        shown: seconds after the start of the animation.
        screen: the lines of the terminal.
    """

    real: float
    shown: float
    screen: Screen


class Terminal(pyte.Screen):
    """A terminal that supports faint letters, which pyte does not.

    It stores them as blinking letters, which no command here uses.
    """

    def select_graphic_rendition(self, *attrs: int, **kwargs: bool) -> None:
        """Set the look of the letters that follow."""
        super().select_graphic_rendition(*attrs, **kwargs)
        if 2 in attrs and 38 not in attrs and 48 not in attrs:
            self.cursor.attrs = self.cursor.attrs._replace(blink=True)

    def runs(self) -> Screen:
        """Return the screen, each line in runs of one look."""
        return tuple(tuple(self._runs(number)) for number in range(self.lines))

    def _runs(self, number: int) -> Iterator[Run]:
        letters = [self.buffer[number][column] for column in range(self.columns)]
        column = 0
        for look, group in groupby(letters, _look):
            text = "".join(letter.data for letter in group)
            for words in re.finditer(r"\S+( \S+)*", text):  # SVG draws two spaces as one
                yield Run(column + words.start(), words[0], look)
            column += len(text)


def _look(letter: pyte.screens.Char) -> str:
    """Return the classes of a letter in the style sheet of the SVG."""
    names = [
        _ink(letter.fg),
        "b" if letter.bold else "",
        "d" if letter.blink else "",
        "i" if letter.italics else "",
    ]
    return " ".join(filter(None, names))


@cache
def _ink(colour: str) -> str:
    """Return the name of the nearest of the terminal's eight colours. Each theme defines them."""
    if not re.fullmatch("[0-9a-f]{6}", colour):
        return "" if colour == "default" else colour.removeprefix("bright")
    hue, saturation, value = colorsys.rgb_to_hsv(
        *(int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4))
    )
    if saturation < 0.3:
        return "white" if value > 0.7 else "black"
    return ("red", "brown", "green", "cyan", "blue", "magenta")[round(6 * hue) % 6]


def record(command: Sequence[str], columns: int, lines: int) -> list[tuple[float, bytes]]:
    """Run a command in a pseudo-terminal. Return its output, with the times in seconds."""
    child, terminal = pty.fork()
    if not child:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), LINES=str(lines))
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    started, printed = time.monotonic(), []
    while True:
        select.select([terminal], [], [])
        try:
            data = os.read(terminal, 65536)
        except OSError:  # on Linux, the other end is closed
            data = b""
        if not data:
            break
        data = data.replace(os.getcwd().encode(), b"~/specjax")  # hide the path of this clone
        printed.append((time.monotonic() - started, data))
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"{' '.join(command)} ended with status {status}")
    return printed


def play(
    printed: list[tuple[float, bytes]], typed: str, columns: int, lines: int, longest_wait: float
) -> list[Frame]:
    """Return the frames: the command is typed, then come at most ten screens a second.

    Waits are shortened.
    """
    terminal = Terminal(columns, lines)
    stream = pyte.ByteStream(terminal)
    stream.feed(b"$ ")
    frames = [Frame(0.0, 0.0, terminal.runs())]
    for count, letter in enumerate(typed):
        stream.feed(letter.encode())
        frames.append(Frame(0.0, 0.5 + 0.04 * count, terminal.runs()))
    stream.feed(b"\r\n")
    begin = frames[-1].shown + 0.4
    screens: list[tuple[float, Screen]] = []
    for (moment, data), (after, _) in pairwise([*printed, (float("inf"), b"")]):
        stream.feed(data)
        if after == float("inf") or int(10 * after) > int(10 * moment):
            screens.append((moment, terminal.runs()))
    moments = _shortened(
        [moment for moment, _ in screens], [_content(screen) for _, screen in screens], longest_wait
    )
    for (real, screen), moment in zip(screens, moments, strict=True):
        start = begin + moment
        # It replaces a frame that would be visible only for an instant.
        if start < frames[-1].shown + 0.09:
            start = frames.pop().shown
        frames.append(Frame(real, start, screen))
    return frames


def _content(screen: Screen) -> tuple[str, ...]:
    """Return the lines without progress bars and spinners."""
    lines = (" ".join(run.text for run in line) for line in screen)
    return tuple(line for line in lines if not PROGRESS.search(line))


def _shortened(
    moments: list[float], contents: list[tuple[str, ...]], longest: float
) -> list[float]:
    """Return the moments with each wait for new content shortened to ``longest`` seconds."""
    changes = [0.0] + [
        now
        for now, (before, after) in zip(moments[1:], pairwise(contents), strict=True)
        if before != after
    ]
    changes.append(moments[-1])
    shortened, elapsed = [], 0.0
    for begin, end in pairwise(changes):
        length = end - begin
        scale = min(1.0, longest / length) if length else 1.0
        shortened += [
            elapsed + scale * (moment - begin) for moment in moments if begin <= moment < end
        ]
        elapsed += scale * length
    return [*shortened, *[elapsed] * (len(moments) - len(shortened))]


def _inks(theme: style.Theme) -> dict[str, str]:
    """Return the colours of the terminal, by pyte's names."""
    blue, red, teal, purple, yellow = theme.series
    plain = {
        "black": theme.muted,
        "red": red,
        "green": theme.accepted.edge,
        "brown": yellow,
        "blue": blue,
    }
    return plain | {"magenta": purple, "cyan": teal, "white": theme.ink}


def draw(
    frames: list[Frame],
    title: str,
    columns: int,
    lines: int,
    shortened: bool,
    theme: style.Theme,
    rest: float = 6.0,
) -> str:
    """Return the SVG. Every line of every screen is an element, which is visible at its time.

    A viewer without animation shows the last screen.
    """
    whole = frames[-1].shown + rest
    width, height = round(columns * CELL + 2 * MARGIN), lines * LINE + 2 * MARGIN + BAR
    pieces = _lasting(frames, whole, width - MARGIN)
    times = sorted({(begin, end) for begin, end, *_ in pieces})
    names = {pair: f"t{i}" for i, pair in enumerate(times)}
    keyframes = [_keyframes(names[pair], *pair, whole) for pair in times]
    body = [
        f'<g class="{names[begin, end]}{" last" if end >= whole else ""}">{content}</g>'
        for begin, end, content in pieces
    ]
    sheet = [
        (
            f"text{{font:{SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans"
            f" Mono',monospace;fill:{theme.ink}}}"
        ),
        f".b{{font-weight:bold}}.d{{fill:{theme.muted}}}.i{{font-style:italic}}"
        f".c{{fill:{theme.muted};font-size:13px}}",
        *(f".{name}{{fill:{colour}}}" for name, colour in _inks(theme).items()),
        "g{visibility:hidden}g.last{visibility:visible}",
        "@media (prefers-reduced-motion:no-preference){",
        *(f".{name}{{animation:{name} {whole:.2f}s step-end infinite}}" for name in names.values()),
        "}",
        *keyframes,
    ]
    waits = "waits shortened · " if shortened else ""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{html.escape(title)}">',
        f"<style>{''.join(sheet)}</style>",
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" '
        f'fill="{theme.paper}" stroke="{theme.passed_over.edge}"/>',
        *(f'<circle cx="{20 + 18 * i}" cy="18" r="5.5" fill="{theme.grid}"/>' for i in range(3)),
        f'<text class="c" x="{width / 2}" y="22" text-anchor="middle">{html.escape(title)}</text>',
        f'<text class="c" x="{width - MARGIN - 52}" y="22" text-anchor="end">{waits}</text>',
        *body,
        "</svg>",
        "",
    ])  # fmt: skip


def _lasting(frames: list[Frame], whole: float, clock: int) -> list[tuple[float, float, str]]:
    """Return the start, the end and the element of each line, and of each second of the clock.

    A line that stays the same over several frames is one element.
    """
    ends = [*(frame.shown for frame in frames[1:]), whole]
    elements = []

    def add(values: Iterable[Any], element: Callable[[Any], str]) -> None:
        spans = zip(values, frames, ends, strict=True)
        for value, group in groupby(spans, lambda span: span[0]):
            steps = list(group)
            if value != ():  # not an empty line
                elements.append((steps[0][1].shown, steps[-1][2], element(value)))

    for number in range(len(frames[0].screen)):
        add((frame.screen[number] for frame in frames), partial(_line, number))
    attributes = f'class="c" x="{clock}" y="22" text-anchor="end"'
    seconds = (int(frame.real) for frame in frames)
    add(seconds, lambda second: f"<text {attributes}>{second} s</text>")
    return elements


def _line(number: int, line: tuple[Run, ...]) -> str:
    """Return the elements of a line. Runs have the terminal's positions and widths in any font."""
    elements = []
    for run in line:
        look = f' class="{run.look}"' if run.look else ""
        x, y = MARGIN + run.column * CELL, BAR + MARGIN + number * LINE + SIZE - 2
        width = f'textLength="{len(run.text) * CELL:.1f}" lengthAdjust="spacingAndGlyphs"'
        elements.append(f'<text x="{x:.1f}" y="{y}" {width}{look}>{html.escape(run.text)}</text>')
    return "".join(elements)


def _keyframes(name: str, begin: float, end: float, whole: float) -> str:
    """Return the CSS keyframes of an element that is visible from ``begin`` to ``end``."""
    first, last = 100 * begin / whole, 100 * end / whole
    hidden, visible = "{visibility:hidden}", "{visibility:visible}"
    before = f"0%{hidden}" if begin else ""
    after = f"{last:.3f}%,to{hidden}" if end < whole else f"to{visible}"
    return f"@keyframes {name}{{{before}{first:.3f}%{visible}{after}}}"


def main(arguments: Sequence[str]) -> None:
    """Record a command, and write its pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="demo", help="of the pictures")
    parser.add_argument("--columns", type=int, default=92)
    parser.add_argument("--lines", type=int, default=28)
    parser.add_argument("--longest-wait", type=float, default=1.5, help="seconds")
    parser.add_argument("command", nargs="*", default=DEMO)
    options = parser.parse_args(arguments)
    typed = " ".join(options.command)
    printed = record(options.command, options.columns, options.lines)
    frames = play(printed, typed, options.columns, options.lines, options.longest_wait)
    shortened = frames[-1].real > frames[-1].shown
    for ending, theme in {"": style.LIGHT, "-dark": style.DARK}.items():
        path = IMAGES / f"{options.name}{ending}.svg"
        path.write_text(draw(frames, typed, options.columns, options.lines, shortened, theme))
        print(
            f"{path.name}: {path.stat().st_size / 1000:.0f} KB, {frames[-1].real:.0f} s shown in"
            f" {frames[-1].shown:.0f} s"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
