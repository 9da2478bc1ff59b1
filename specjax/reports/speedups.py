"""Pictures of speed-up: against the size of the drafts, the context, and the rows decoded together."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specjax.reports import pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_by_batch(
    title: str,
    predicted: Mapping[int, Mapping[int, float]],
    realised: Mapping[int, Mapping[int, float]] | None = None,
    critical: float | None = None,
) -> "Figure":
    """Speed-up against rows, a line for each context: MagicDec's figure.

    Args:
        title: of the figure.
        predicted: speed-up by context, then by rows.
        realised: likewise, as measured; drawn as points.
        critical: the context from which on more rows gain more.
    """
    figure, (axes,) = _figure(1, title, width=7)
    contexts = sorted(predicted)
    for context, colour in zip(contexts, _colours(len(contexts)), strict=True):
        rows = sorted(predicted[context])
        axes.plot(rows, [predicted[context][n] for n in rows], "-", color=colour, label=f"{context:,} tokens")
        if realised and context in realised:
            rows = sorted(realised[context])
            axes.plot(rows, [realised[context][n] for n in rows], "o", color=colour)
    if realised:
        axes.plot([], [], "o", color="grey", label="realised")
        axes.plot([], [], "-", color="grey", label="predicted from parts")
    _finish(axes, "rows decoded together")
    if critical is not None:
        axes.plot([], [], " ", label=f"critical context: about {critical:,.0f} tokens")
    rows = sorted({n for of_context in predicted.values() for n in of_context})
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(n) for n in rows])
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    return figure


def draw_by_length(title: str, lines: Mapping[str, Sequence[float]], strong: str) -> "Figure":
    """Speed-up against the length of the chain.

    Args:
        title: of the figure.
        lines: by name, the speed-up with chains of 0, 1, 2, … tokens.
        strong: the name of the line that stands out.
    """
    figure, (axes,) = _figure(1, title)
    for (name, factors), colour in zip(lines.items(), _colours(len(lines)), strict=True):
        width = 2.5 if name == strong else 1.2
        axes.plot(range(len(factors)), factors, "o-", color=colour, linewidth=width, markersize=2 * width, label=name)
    _finish(axes, "chain length gamma (tokens)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    return figure


def draw_by_length_and_context(
    title: str,
    by_length: Mapping[int, Sequence[float]],
    contexts: Sequence[int],
    by_context: Mapping[int, Sequence[float]],
    held: Mapping[int, int],
    context: int,
) -> "Figure":
    """Speed-up against chain length, and that of the best chain against context; a line for each number of rows.

    Args:
        title: of the figure.
        by_length: by rows, the speed-up with chains of 0, 1, 2, … tokens.
        contexts: in tokens, ascending.
        by_context: by rows, the best chain's speed-up at each of them.
        held: by rows, for how many of them there is memory.
        context: the one that ``by_length`` is of.
    """
    figure, (left, right) = _figure(2, title)
    for rows, colour in zip(by_length, _colours(len(by_length)), strict=True):
        factors, best, last = by_length[rows], by_context[rows], held[rows]
        left.plot(range(len(factors)), factors, "o-", color=colour, markersize=3, label=count_rows(rows))
        right.plot(contexts[:last], best[:last], color=colour)
        right.plot(contexts[max(last - 1, 0) :], best[max(last - 1, 0) :], ":", color=colour)
    left.plot([], [], ":", color="grey", label="beyond the memory")
    _finish(left, "chain length gamma (tokens)")
    _finish(right, "context (tokens; 1k = 1024), each with its best chain")
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(lambda s, _: f"{s / 1024:g}k" if s >= 1024 else f"{s:g}")
    right.axvline(context, color="grey", linewidth=0.8)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
    return figure


def draw_by_nodes(title: str, panels: Mapping[int, Mapping[str, Mapping[int, float]]]) -> "Figure":
    """Speed-up against the nodes of a draft, a panel for each number of rows: by name, the speed-up of so many nodes."""
    figure, all_axes = _figure(len(panels), title)
    for axes, (rows, lines) in zip(all_axes, panels.items(), strict=True):
        for name, by_nodes in lines.items():
            nodes = sorted(by_nodes)
            axes.plot(nodes, [by_nodes[n] for n in nodes], "o-", markersize=3, label=name)
        axes.set_title(count_rows(rows), fontsize="medium")
        _finish(axes, "nodes, the root included")
    all_axes[0].legend()
    return figure


def count_rows(count: int) -> str:
    """Such as "1 row" or "4 rows"."""
    return f"{count} row{'s' * (count > 1)}"


def _figure(panels: int, title: str, width: float | None = None) -> "tuple[Figure, list[Axes]]":
    figure, axes = pictures.new_figure(2 + 4.5 * panels if width is None else width, 4.2, panels)
    figure.suptitle(title, fontsize="medium")
    return figure, axes


def _colours(count: int) -> list[tuple[float, ...]]:
    from matplotlib import colormaps

    return [colormaps["viridis"](x) for x in np.linspace(0, 0.85, count)]


def _finish(axes: "Axes", label: str) -> None:
    """Labels, a light grid, whole numbers below, and the line at 1 above which speculation pays."""
    from matplotlib.ticker import MaxNLocator

    axes.axhline(1, color="black", linestyle="--", linewidth=1, label="plain decoding")
    axes.set_xlabel(label)
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
