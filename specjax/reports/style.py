"""The one look of all pictures: sizes, lines, and colours that the colour-blind can tell apart, on light and on dark paper.

A function that draws is `styled`; what it draws is light, unless its caller asks for another theme:

    with style.use(style.DARK):
        figure = draw_by_length(...)

In a notebook, ``plt.rcParams.update(style.LIGHT.settings())`` gives pyplot the same look.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
R = TypeVar("R")

WIDTH = 6.4
"""Inches of a picture whose width is free. At this width text of 11 points has 9 pixels on a telephone of 390."""

DPI = 200
MARKERS = "os^Dv"
"""One for each colour of a theme's series, for those who see no difference between two colours."""


@dataclass(frozen=True)
class Paint:
    """The colours of a box: of its edge and its text, and inside."""

    edge: str
    face: str


@dataclass(frozen=True)
class Theme:
    """Colours, as ``#rrggbb``, of all pictures on one kind of paper.

    Attributes:
        paper: what is drawn on.
        ink: text, and lines that stand out.
        muted: text and lines of less weight.
        grid: the lines behind the data.
        series: of things that have no order, such as methods. Any two differ for protanopes, deuteranopes and tritanopes.
        ramp: of things in order, such as context lengths: from where to where in matplotlib's viridis.
        drafted: tokens that a drafter proposed.
        accepted: those that verification accepted, and what the target added.
        rejected: the token at which a draft was left.
        passed_over: tokens of no consequence.
    """

    paper: str
    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]
    ramp: tuple[float, float]
    drafted: Paint
    accepted: Paint
    rejected: Paint
    passed_over: Paint

    def settings(self) -> dict[Any, Any]:
        """As matplotlib's rcParams."""
        from cycler import cycler

        return {
            "figure.facecolor": self.paper,
            "figure.dpi": DPI / 2,
            "figure.constrained_layout.use": True,
            "figure.titlesize": 12,
            "savefig.facecolor": "auto",
            "savefig.dpi": DPI,
            "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
            "font.monospace": ["DejaVu Sans Mono"],
            "font.size": 11,
            "text.color": self.ink,
            "text.parse_math": False,  # a dollar sign in a name is a dollar sign
            "axes.facecolor": self.paper,
            "axes.edgecolor": self.muted,
            "axes.labelcolor": self.ink,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.titlecolor": self.ink,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.prop_cycle": cycler(color=list(self.series)),
            "grid.color": self.grid,
            "grid.linewidth": 0.8,
            "xtick.color": self.muted,
            "ytick.color": self.muted,
            "xtick.labelcolor": self.ink,
            "ytick.labelcolor": self.ink,
            "lines.linewidth": 2.0,
            "lines.markersize": 5,
            "errorbar.capsize": 2,
            "legend.frameon": False,
            "legend.fontsize": 10.5,
        }


LIGHT = Theme(
    paper="#ffffff",
    ink="#1f2328",
    muted="#59636e",
    grid="#e4e8ec",
    series=("#0b3fa8", "#a82e0b", "#128a80", "#e03fe0", "#b39000"),
    ramp=(0.0, 0.6),
    drafted=Paint("#0969da", "#ddf4ff"),
    accepted=Paint("#1a7f37", "#dafbe1"),
    rejected=Paint("#cf222e", "#ffebe9"),
    passed_over=Paint("#8c959f", "#f6f8fa"),
)

DARK = Theme(
    paper="#0d1117",
    ink="#e6edf3",
    muted="#9198a1",
    grid="#262c36",
    series=("#79c0ff", "#ff6a3d", "#17978c", "#c45cf5", "#ecd048"),
    ramp=(0.42, 1.0),
    drafted=Paint("#58a6ff", "#121d2f"),
    accepted=Paint("#3fb950", "#12261e"),
    rejected=Paint("#f85149", "#25171c"),
    passed_over=Paint("#6e7681", "#161b22"),
)

_in_use: ContextVar[Theme] = ContextVar("theme", default=LIGHT)


def theme() -> Theme:
    """The one in use: `LIGHT`, unless `use` says otherwise."""
    return _in_use.get()


@contextmanager
def use(theme: Theme) -> Iterator[None]:
    """Whatever is drawn within has this theme."""
    from matplotlib import rc_context

    before = _in_use.set(theme)
    try:
        with rc_context(theme.settings()):
            yield
    finally:
        _in_use.reset(before)


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Draws in the theme in use, whatever settings of matplotlib's are in force."""

    @wraps(draw)
    def in_theme(*args: P.args, **kwargs: P.kwargs) -> R:
        with use(theme()):
            return draw(*args, **kwargs)

    return in_theme


def new_figure(*heights: float, width: float = WIDTH, title: str = "") -> "tuple[Figure, list[Axes]]":
    """A figure of panels one below the other: side by side they are too small on a narrow screen.

    Args:
        heights: inches of each panel.
        width: inches of all.
        title: of the figure, broken into lines where it is long.
    """
    from matplotlib.figure import Figure  # without pyplot: no window and no global state

    lines = textwrap.wrap(title, int(width * 10.5), break_long_words=False)
    figure = Figure(figsize=(width, sum(heights) + 0.25 * len(lines)), layout="constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    if lines:
        figure.suptitle("\n".join(lines), x=0.02, ha="left")
    return figure, list(panels[:, 0])


def ramp(count: int) -> list[tuple[float, ...]]:
    """So many colours for things in order."""
    from matplotlib import colormaps

    return [colormaps["viridis"](x) for x in np.linspace(*theme().ramp, count)]


def label_ends(axes: "Axes", ends: Mapping[str, tuple[float, Any]]) -> None:
    """Write to the right of the axes what each line is; labels that would overlap are moved apart.

    Call it last: it needs the limits of the axes and the layout of the figure as they will be.

    Args:
        axes: with the lines.
        ends: by label, y of the line's last point, and its colour.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # lays out
    points = 72 / figure.dpi
    heights = [points * float(axes.transData.transform((axes.get_xlim()[1], y))[1]) for y, _ in ends.values()]
    for (label, (y, colour)), at, place in zip(ends.items(), heights, spread(heights, 13), strict=True):
        axes.annotate(
            label, (1, y), xycoords=("axes fraction", "data"), xytext=(6, place - at), textcoords="offset points",
            va="center", fontsize=10.5, color=colour, annotation_clip=False,
        )  # fmt: skip


def spread(places: Sequence[float], gap: float) -> list[float]:
    """The nearest places, by least squares, that are in the same order and ``gap`` apart at least."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    blocks: list[list[float]] = []  # isotonic regression of what is left when the gaps are taken away
    for rank, i in enumerate(order):
        blocks.append([places[i] - rank * gap])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    fitted = [float(np.mean(block)) for block in blocks for _ in block]
    found = [0.0] * len(places)
    for rank, i in enumerate(order):
        found[i] = fitted[rank] + rank * gap
    return found
