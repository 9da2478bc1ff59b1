"""The files of figures, and the figure of a draft tree."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specjax import files
from specjax.drafts import tree
from specjax.errors import InputError
from specjax.reports import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = (".png", ".pdf", ".svg")


def check_path(argument: str, name: str) -> Path:
    """Return the path of a figure to write, or raise `InputError` if it cannot be written.

    ``argument`` is the name of the argument, for messages.
    """
    path = Path(name)
    if path.suffix.lower() not in IMAGES:
        raise InputError(f"{argument}={name!r}: the name must end in {', '.join(IMAGES)}")
    if not path.parent.is_dir():
        raise InputError(f"{argument}={name!r}: there is no directory {str(path.parent)!r}")
    if path.is_dir():
        raise InputError(f"{argument}={name!r}: it is a directory; give the name of a file")
    return path


def save(figure: "Figure", argument: str, path: Path) -> None:
    """Write a figure to a file, completely or not at all."""
    try:
        with files.writing(path) as scratch:
            figure.savefig(scratch, dpi=style.DPI)
    except OSError as error:
        raise InputError(
            f"{argument}={str(path)!r}: the file cannot be written ({error})"
        ) from None


_ROW, _GAP, _SIZE = 0.36, 0.42, 11
"""Sizes of a draft tree: inches between rows, inches between columns, and font size in points."""


@style.styled
def draw_draft(
    parents: np.ndarray,
    path: Sequence[int],
    labels: Sequence[str],
    bonus: str,
    valid: np.ndarray,
    *,
    notes: Sequence[str] = (),
    illegal: Collection[int] = (),
    title: str = "",
) -> "Figure":
    """Draw a draft tree from left to right, its accepted path in green, and the bonus token.

    Args:
        parents: ``[N]`` the parent of each node.
        path: the accepted nodes, beginning with the root.
        labels: the text of each node.
        bonus: the text of the bonus token.
        valid: ``[N]`` bool which nodes were drafted; all others are left out.
        notes: a short text below each node; empty for none.
        illegal: nodes that are drawn in red.
        title: the title of the figure; empty: it says how many tokens were drafted and accepted.
    """
    drafted, end = int(valid.sum()) - 1, len(parents)
    row_inches = 1.6 * _ROW if notes else _ROW
    notes = [*notes, *[""] * (end + 1 - len(notes))]
    # The bonus token becomes one more node, below the end of the path.
    parents, labels, valid = np.append(parents, path[-1]), [*labels, bonus], np.append(valid, True)
    depths, rows = tree.depths(parents).tolist(), _rows(parents, valid)
    columns: list[list[str]] = [[] for _ in range(max(depths[node] for node in rows) + 1)]
    for node in rows:
        columns[depths[node]] += [labels[node], notes[node][: len(notes[node]) * 3 // 4]]
    inches = np.array([letters_width(max(map(len, column)), _SIZE) + 0.2 for column in columns])
    lefts = np.cumsum([0.15, *inches[:-1] + _GAP])
    centre = (lefts + inches / 2).tolist()
    width = lefts[-1] + inches[-1] + 0.15
    lowest = max(rows.values())
    accepted = f"{len(path) - 1} accepted (green)"
    title = title or f"{drafted} tokens drafted, {accepted}; dashed: the bonus token"
    figure, (axes,) = style.new_figure(
        min(row_inches * (lowest + 2.2), 100), width=max(width, 3.0), title=title
    )
    green, grey = {*path, end}, style.theme().passed_over
    points = {node: (centre[depths[node]], row) for node, row in rows.items()}
    for node in sorted(points, key=green.__contains__):  # green nodes last, on top of the others
        paint = style.theme().rejected if node in illegal else grey
        look = {
            "paint": style.theme().accepted if node in green else paint,
            "strong": node in green,
            "dashed": node == end,
        }
        if node:
            _join(axes, points[int(parents[node])], points[node], **look)
        write_token(axes, *points[node], labels[node], **look)
        if notes[node]:
            x, y = points[node]
            note = {"fontsize": 0.75 * _SIZE, "color": style.theme().muted, "zorder": 3}
            axes.text(x, y + 0.19 / row_inches, notes[node], ha="center", va="top", **note)
    axes.set_xlim(0, width)
    axes.set_ylim(lowest + 0.7, -0.9)
    axes.set_xticks(
        centre,
        ["root", *(f"depth {depth}" for depth in range(1, len(columns)))],
        color=style.theme().muted,
    )
    axes.set_yticks([])
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure


def _rows(parents: np.ndarray, valid: np.ndarray) -> dict[int, float]:
    """Return the row of each drafted node: leaves in order, parents amid their children."""
    rows: dict[int, float] = {}
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        below = [place(int(child)) for child in np.flatnonzero((parents == node) & valid)]
        if not below:
            below = [float(leaves)]
            leaves += 1
        rows[node] = float(np.mean(below))
        return rows[node]

    place(0)
    return rows


def _join(
    axes: "Axes",
    start: tuple[float, float],
    end: tuple[float, float],
    paint: style.Paint,
    strong: bool,
    dashed: bool,
) -> None:
    """Draw a curve between two nodes that is horizontal at both ends."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    middle = (start[0] + end[0]) / 2
    curve = Curve(
        [start, (middle, start[1]), (middle, end[1]), end], [Curve.MOVETO, *[Curve.CURVE4] * 3]
    )
    line = {"linewidth": 2.2 if strong else 1.0, "linestyle": "--" if dashed else "-"}
    axes.add_patch(PathPatch(curve, fill=False, edgecolor=paint.edge, zorder=1, **line))


def letters_width(count: int, size: float) -> float:
    """Return the width in inches of some letters of the monospace font of a size in points."""
    return count * size * 0.602 / 72


def write_token(
    axes: "Axes",
    x: float,
    y: float,
    label: str,
    paint: style.Paint,
    *,
    strong: bool = True,
    dashed: bool = False,
    size: float = _SIZE,
) -> None:
    """Draw a token in a box, centered at a point."""
    box = {
        "boxstyle": "round,pad=0.3",
        "facecolor": paint.face,
        "edgecolor": paint.edge,
        "linewidth": 1.4 if strong else 1.0,
        "linestyle": "--" if dashed else "-",
    }
    axes.text(
        x,
        y,
        label,
        ha="center",
        va="center",
        family="monospace",
        fontsize=size,
        fontweight="bold" if strong else "normal",
        color=style.theme().ink if strong else style.theme().muted,
        bbox=box,
        zorder=2,
    )
