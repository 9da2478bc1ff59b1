"""Pictures: what every one of them shares, and the one of a draft tree."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specjax.drafts import tree
from specjax.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = (".png", ".pdf", ".svg")
_ACCEPTED, _REJECTED = "#2a9d4a", "#b8b8b8"


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
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as scratch:
            file = Path(scratch) / path.name
            figure.savefig(file, dpi=150)
            file.replace(path)
    except OSError as error:
        raise InputError(f"{argument}={str(path)!r}: cannot be written ({error})") from None


def new_figure(width: float, height: float, panels: int = 1) -> "tuple[Figure, list[Axes]]":
    """A figure, in inches, of so many panels side by side."""
    from matplotlib.figure import Figure  # without pyplot: no window and no global state

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def draw_draft(parents: np.ndarray, path: Sequence[int], labels: Sequence[str], bonus: str, valid: np.ndarray) -> "Figure":
    """A draft tree from left to right, its accepted path in green, and the bonus token after it.

    Args:
        parents: ``[N]``.
        path: accepted nodes, the root first.
        labels: what each node says.
        bonus: what the target adds after the path.
        valid: ``[N]`` bool, the nodes that were drafted; others are left out.
    """
    parents = np.asarray(parents)
    depths, below = tree.depths(parents), [np.flatnonzero((parents == node) & valid) for node in range(len(parents))]
    height: dict[int, float] = {}
    rows = 0

    def place(node: int) -> float:  # leaves one below the other, a parent amid its children
        nonlocal rows
        children = [place(int(child)) for child in below[node]]
        if not children:
            rows += 1
        height[node] = float(np.mean(children)) if children else -rows
        return height[node]

    place(0)
    longest = max(len(label) for label in [*labels, bonus])
    column = 1.0 + 0.09 * longest
    figure, (axes,) = new_figure(1.5 + column * (depths.max() + 2), min(max(2.2, 0.8 + 0.26 * rows), 100))
    accepted = set(path)
    for node in sorted(height, key=lambda node: node in accepted):
        colour = _ACCEPTED if node in accepted else _REJECTED
        if node:
            parent = int(parents[node])
            ends = [depths[parent], depths[node]], [height[parent], height[node]]
            axes.plot(*ends, color=colour, linewidth=2.2 if node in accepted else 0.9, zorder=1)
        _write(axes, depths[node], height[node], labels[node], colour, node in accepted)
    last = path[-1]
    at = depths[last] + 1, height[last] + (0.5 if len(below[last]) else 0.0)
    axes.plot([depths[last], at[0]], [height[last], at[1]], "--", color=_ACCEPTED, linewidth=1.2, zorder=1)
    _write(axes, *at, bonus, _ACCEPTED, True, dashed=True)
    axes.set_xlim(-0.5, depths.max() + 1.6)
    axes.set_xticks(range(depths.max() + 2), ["root", *(f"depth {d}" for d in range(1, depths.max() + 1)), "bonus"])
    axes.set_yticks([])
    axes.set_ylim(-rows - 0.9, 0.0)
    axes.spines[["left", "right", "top"]].set_visible(False)
    figure.suptitle(
        f"{int(valid.sum()) - 1} tokens drafted, {len(path) - 1} accepted (green), and the bonus token after them (dashed)",
        fontsize="medium",
    )
    return figure


def _write(axes: "Axes", x: float, y: float, label: str, colour: str, strong: bool, dashed: bool = False) -> None:
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour, "linestyle": "--" if dashed else "-"}
    axes.text(
        x, y, label, ha="center", va="center", family="monospace", fontsize=8, zorder=2, bbox=box,
        color="black" if strong else "#666666", fontweight="bold" if strong else "normal", parse_math=False,
    )  # fmt: skip
