"""The style of all figures: sizes, lines, and colors that color-blind readers can distinguish.

There is a light and a dark theme. All functions that draw are `styled`. They draw in the light
theme, unless the caller selects another one:

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
"""The default width of a figure in inches.

At this width, text of 11 points has a height of 9 pixels on a phone with a width of 390.
"""

DPI = 200
MARKERS = "os^Dv"
"""The markers, one for each color of a theme's series, for readers who cannot tell colors apart."""


@dataclass(frozen=True)
class Paint:
    """The colors of a box: ``edge`` for its edge and text, ``face`` for its inside."""

    edge: str
    face: str


@dataclass(frozen=True)
class Theme:
    """The colors of a theme, as ``#rrggbb``.

    Attributes:
        paper: the background.
        ink: text and highlighted lines.
        muted: secondary text and lines.
        grid: grid lines.
        series: the colors of things without an order, such as methods. Protanopes, deuteranopes and
            tritanopes can distinguish any two of them.
        ramp: the range of matplotlib's viridis for things with an order, such as context lengths.
        drafted: drafted tokens.
        accepted: accepted tokens and the bonus token.
        rejected: the rejected token.
        passed_over: tokens that were not considered.
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
        """Return the theme as matplotlib's rcParams."""
        from cycler import cycler

        return {
            "figure.facecolor": self.paper,
            "figure.dpi": DPI / 2,
            "figure.constrained_layout.use": True,
            "figure.titlesize": 12,
            "savefig.facecolor": "auto",
            "savefig.dpi": DPI,
            "font.family": (
                "DejaVu Sans"
            ),  # comes with matplotlib, so it is the same on every machine
            "font.monospace": ["DejaVu Sans Mono"],
            "font.size": 11,
            "text.color": self.ink,
            "text.parse_math": False,  # names may contain dollar signs
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
    """Return the current theme, which is `LIGHT` outside of `use`."""
    return _in_use.get()


@contextmanager
def use(theme: Theme) -> Iterator[None]:
    """Draw with this theme inside a ``with`` block."""
    from matplotlib import rc_context

    before = _in_use.set(theme)
    try:
        with rc_context(theme.settings()):
            yield
    finally:
        _in_use.reset(before)


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to draw in the current theme, whatever matplotlib's own settings are."""

    @wraps(draw)
    def in_theme(*args: P.args, **kwargs: P.kwargs) -> R:
        with use(theme()):
            return draw(*args, **kwargs)

    return in_theme


def new_figure(
    *heights: float, width: float = WIDTH, title: str = ""
) -> "tuple[Figure, list[Axes]]":
    """Make a figure with panels one below the other.

    Side by side they would be too small on a narrow screen.

    Args:
        heights: the height of each panel in inches.
        width: the width of the figure in inches.
        title: the title of the figure; long titles are wrapped.
    """
    from matplotlib.figure import Figure  # without pyplot: no window and no global state

    lines = textwrap.wrap(title, int(width * 10.5), break_long_words=False)
    figure = Figure(figsize=(width, sum(heights) + 0.25 * len(lines)), layout="constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    if lines:
        figure.suptitle("\n".join(lines), x=0.02, ha="left")
    return figure, list(panels[:, 0])


def ramp(count: int) -> list[tuple[float, ...]]:
    """Return ``count`` colors for things with an order."""
    from matplotlib import colormaps

    return [colormaps["viridis"](x) for x in np.linspace(*theme().ramp, count)]


def label_ends(axes: "Axes", ends: Mapping[str, tuple[float, Any]]) -> None:
    """Write the label of each line to the right of the axes, and move labels that would overlap.

    Call it last: it needs the final limits of the axes and the final layout of the figure.

    Args:
        axes: the axes with the lines.
        ends: by label, the y of the line's last point, and its color.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # lays out
    points = 72 / figure.dpi
    heights = [
        points * float(axes.transData.transform((axes.get_xlim()[1], y))[1])
        for y, _ in ends.values()
    ]
    for (label, (y, colour)), height, free_height in zip(
        ends.items(), heights, spread(heights, 13), strict=True
    ):
        axes.annotate(
            label,
            (1, y),
            xycoords=("axes fraction", "data"),
            xytext=(6, free_height - height),
            textcoords="offset points",
            va="center",
            fontsize=10.5,
            color=colour,
            annotation_clip=False,
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Return the nearest places, by least squares, in the same order and at least ``gap`` apart."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    blocks: list[list[float]] = []  # isotonic regression of the places minus the gaps
    for rank, i in enumerate(order):
        blocks.append([places[i] - rank * gap])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    fitted = [float(np.mean(block)) for block in blocks for _ in block]
    result = [0.0] * len(places)
    for rank, i in enumerate(order):
        result[i] = fitted[rank] + rank * gap
    return result
