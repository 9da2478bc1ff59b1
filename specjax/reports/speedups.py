"""Figures of the speed-up: against draft size, context length, and batch size."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specjax.reports import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PLAIN = "plain decoding"


@style.styled
def draw_by_batch(
    title: str,
    predicted: Mapping[int, Mapping[int, float]],
    realised: Mapping[int, Mapping[int, float]] | None = None,
    critical: float | None = None,
) -> "Figure":
    """Draw the speed-up against the number of rows, with a line for each context, as in MagicDec.

    Args:
        title: the title of the figure.
        predicted: the predicted speed-up by context, then by rows.
        realised: the measured speed-up by context, then by rows; drawn as points.
        critical: the context from which the speed-up grows with the number of rows.
    """
    figure, (axes,) = style.new_figure(4.2, title=title)
    contexts, ends = sorted(predicted), {}
    for context, colour in zip(contexts, style.ramp(len(contexts)), strict=True):
        by_rows = sorted(predicted[context].items())
        axes.plot(*zip(*by_rows, strict=True), "-" if realised else "o-", color=colour)
        if realised and context in realised:
            axes.plot(
                *zip(*sorted(realised[context].items()), strict=True),
                "o",
                markersize=7,
                color=colour,
            )
        ends[f"{context:,} tokens"] = by_rows[-1][1], colour
    rows = sorted({count for by_rows in predicted.values() for count in by_rows})
    _label(axes, "rows decoded together")
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(count) for count in rows])
    if critical is not None:
        axes.set_xlabel(
            f"rows decoded together\nMore rows gain more from a context of about {critical:,.0f}"
            " tokens on."
        )
    if realised:
        muted = style.theme().muted
        axes.plot([], [], "o", markersize=7, color=muted, label="measured")
        axes.plot([], [], "-", color=muted, label="predicted from the times of its parts")
        figure.legend(loc="outside lower left", ncols=2)
    style.label_ends(axes, ends | _plain(axes))
    return figure


@style.styled
def draw_by_length(title: str, lines: Mapping[str, Sequence[float]], strong: str) -> "Figure":
    """Draw the speed-up against the length of the chain.

    Args:
        title: the title of the figure.
        lines: by name, the speed-up with chains of 0, 1, 2, … tokens.
        strong: the name of the line that is highlighted.
    """
    figure, (axes,) = style.new_figure(4.2, title=title)
    ends = {}
    for (name, factors), colour in zip(lines.items(), style.ramp(len(lines)), strict=True):
        width = 3.0 if name == strong else 1.5
        axes.plot(
            range(len(factors)), factors, "o-", color=colour, linewidth=width, markersize=3 + width
        )
        ends[name] = factors[-1], colour
    _label(axes, "chain length gamma (tokens)")
    style.label_ends(axes, ends | _plain(axes))
    return figure


@style.styled
def draw_by_length_and_context(
    title: str,
    by_length: Mapping[int, Sequence[float]],
    contexts: Sequence[int],
    by_context: Mapping[int, Sequence[float]],
    fitting: Mapping[int, int],
    context: int,
) -> "Figure":
    """Draw the speed-up against chain length and, with the best chain, against context length.

    There is a line for each number of rows.

    Args:
        title: the title of the figure.
        by_length: by rows, the speed-up with chains of 0, 1, 2, … tokens.
        contexts: the contexts in tokens, ascending.
        by_context: by rows, the speed-up with the best chain at each context.
        fitting: by rows, how many of the contexts, counted from the first, fit into memory.
        context: the context of ``by_length``.
    """
    figure, (above, below) = style.new_figure(3.4, 3.4, title=title)
    ends_above, ends_below = {}, {}
    for rows, colour in zip(by_length, style.ramp(len(by_length)), strict=True):
        factors, best, last = by_length[rows], by_context[rows], fitting[rows]
        above.plot(range(len(factors)), factors, "o-", color=colour)
        below.plot(contexts[:last], best[:last], color=colour)
        below.plot(contexts[max(last - 1, 0) :], best[max(last - 1, 0) :], ":", color=colour)
        ends_above[count_rows(rows)] = factors[-1], colour
        ends_below[count_rows(rows)] = best[-1], colour
    below.set_xscale("log", base=2)
    below.xaxis.set_major_formatter(lambda s, _: f"{s / 1024:g}k" if s >= 1024 else f"{s:g}")
    below.axvline(context, color=style.theme().muted, linewidth=1)
    _label(above, "chain length gamma (tokens)")
    above.set_title(f"at a context of {context:,} tokens")
    beyond = "; dotted: more than the memory holds" if min(fitting.values()) < len(contexts) else ""
    _label(below, f"context (tokens; 1k = 1024{beyond})", whole=False)
    below.set_title("with the best chain for each context")
    style.label_ends(above, ends_above | _plain(above))
    style.label_ends(below, ends_below | _plain(below))
    return figure


@style.styled
def draw_by_nodes(title: str, panels: Mapping[int, Mapping[str, Mapping[int, float]]]) -> "Figure":
    """Draw the speed-up against the number of nodes, with a panel for each number of rows.

    ``panels`` has, by rows and by the name of a line, the speed-up by number of nodes.
    """
    figure, all_axes = style.new_figure(*[2.9] * len(panels), title=title)
    for axes, (rows, lines) in zip(all_axes, panels.items(), strict=True):
        for (name, by_nodes), marker in zip(lines.items(), style.MARKERS, strict=False):
            axes.plot(*zip(*sorted(by_nodes.items()), strict=True), f"{marker}-", label=name)
        axes.set_title(count_rows(rows))
        _label(axes, "nodes of a draft, the root included")
        _plain(axes)
    figure.legend(
        *all_axes[0].get_legend_handles_labels(),
        loc="outside lower left",
        ncols=len(all_axes[0].lines),
    )
    return figure


def count_rows(count: int) -> str:
    """Return a text such as "1 row" or "4 rows"."""
    return f"{count} row{'s' * (count > 1)}"


def _label(axes: "Axes", label: str, whole: bool = True) -> None:
    """Label both axes. ``whole`` gives the x axis integers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(label)
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:g}x")
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _plain(axes: "Axes") -> dict[str, tuple[float, str]]:
    """Draw the line of plain decoding at 1, and return its end for `style.label_ends`."""
    muted = style.theme().muted
    axes.axhline(1, color=muted, linestyle="--", linewidth=1.2, label=_PLAIN)
    return {_PLAIN: (1.0, muted)}
