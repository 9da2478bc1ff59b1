"""Pictures: where they are written, and the one of a draft tree."""

from collections.abc import Sequence
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
    """The path of a picture to write. Raises `InputError`, naming the ``argument``, where it cannot be one."""
    path = Path(name)
    if path.suffix.lower() not in IMAGES:
        raise InputError(f"{argument}={name!r}: the name must end in {', '.join(IMAGES)}")
    if not path.parent.is_dir():
        raise InputError(f"{argument}={name!r}: there is no directory {str(path.parent)!r}")
    if path.is_dir():
        raise InputError(f"{argument}={name!r}: is a directory")
    return path


def save(figure: "Figure", argument: str, path: Path) -> None:
    """Write the picture whole or not at all."""
    try:
        with files.writing(path) as scratch:
            figure.savefig(scratch, dpi=style.DPI)
    except OSError as error:
        raise InputError(f"{argument}={str(path)!r}: cannot be written ({error})") from None


_ROW, _GAP, _SIZE = 0.36, 0.42, 11
"""Of a draft tree: inches between two rows, inches between two columns, and points of its text."""


@style.styled
def draw_draft(parents: np.ndarray, path: Sequence[int], labels: Sequence[str], bonus: str, valid: np.ndarray) -> "Figure":
    """A draft tree from left to right, its accepted path in green, and the bonus token after it.

    Args:
        parents: ``[N]``.
        path: accepted nodes, the root first.
        labels: what each node says.
        bonus: what the target adds after the path.
        valid: ``[N]`` bool, the nodes that were drafted; others are left out.
    """
    drafted, end = int(valid.sum()) - 1, len(parents)
    parents, labels, valid = (
        np.append(parents, path[-1]),
        [*labels, bonus],
        np.append(valid, True),
    )  # the bonus as one node more
    depths, rows = tree.depths(parents).tolist(), _rows(parents, valid)
    columns: list[list[str]] = [[] for _ in range(max(depths[node] for node in rows) + 1)]
    for node in rows:
        columns[depths[node]].append(labels[node])
    inches = np.array([letters_width(max(map(len, column)), _SIZE) + 0.2 for column in columns])
    left = np.cumsum([0.15, *inches[:-1] + _GAP])
    centre, width, lowest = (left + inches / 2).tolist(), left[-1] + inches[-1] + 0.15, max(rows.values())
    title = f"{drafted} tokens drafted, {len(path) - 1} accepted (green); dashed: the bonus token"
    figure, (axes,) = style.new_figure(min(_ROW * (lowest + 2.2), 100), width=max(width, 3.0), title=title)
    green, grey = {*path, end}, style.theme().passed_over
    places = {node: (centre[depths[node]], row) for node, row in rows.items()}
    for node in sorted(places, key=green.__contains__):
        look = {"paint": style.theme().accepted if node in green else grey, "strong": node in green, "dashed": node == end}
        if node:
            _join(axes, places[int(parents[node])], places[node], **look)
        write_token(axes, *places[node], labels[node], **look)
    axes.set_xlim(0, width)
    axes.set_ylim(lowest + 0.7, -0.9)
    axes.set_xticks(centre, ["root", *(f"depth {depth}" for depth in range(1, len(columns)))], color=style.theme().muted)
    axes.set_yticks([])
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure


def _rows(parents: np.ndarray, valid: np.ndarray) -> dict[int, float]:
    """The row of every node that was drafted: leaves one below the other, a parent amid its children."""
    found: dict[int, float] = {}
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        below = [place(int(child)) for child in np.flatnonzero((parents == node) & valid)]
        if not below:
            below = [float(leaves)]
            leaves += 1
        found[node] = float(np.mean(below))
        return found[node]

    place(0)
    return found


def _join(
    axes: "Axes", start: tuple[float, float], end: tuple[float, float], paint: style.Paint, strong: bool, dashed: bool
) -> None:
    """A curve that leaves a node and reaches the next one level."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    middle = (start[0] + end[0]) / 2
    curve = Curve([start, (middle, start[1]), (middle, end[1]), end], [Curve.MOVETO, *[Curve.CURVE4] * 3])
    line = {"linewidth": 2.2 if strong else 1.0, "linestyle": "--" if dashed else "-"}
    axes.add_patch(PathPatch(curve, fill=False, edgecolor=paint.edge, zorder=1, **line))


def letters_width(count: int, size: float) -> float:
    """Inches of so many letters of the fixed-width font, of ``size`` points."""
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
    """A token in a box, centred."""
    box = {"boxstyle": "round,pad=0.3", "facecolor": paint.face, "edgecolor": paint.edge, "linewidth": 1.4 if strong else 1.0}
    axes.text(
        x, y, label, ha="center", va="center", family="monospace", fontsize=size, zorder=2,
        bbox=box | {"linestyle": "--" if dashed else "-"}, fontweight="bold" if strong else "normal",
        color=style.theme().ink if strong else style.theme().muted,
    )  # fmt: skip
