"""The picture of speed-up against batch for several contexts: MagicDec's figure."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from specjax.reports import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_by_batch(
    title: str,
    predicted: Mapping[int, Mapping[int, float]],
    realised: Mapping[int, Mapping[int, float]] | None = None,
    critical: float | None = None,
) -> "Figure":
    """A line for each context.

    Args:
        title: of the figure.
        predicted: speed-up by context, then by rows.
        realised: likewise, as measured; drawn as points.
        critical: the context from which on more rows gain more.
    """
    from matplotlib import colormaps

    figure, (axes,) = pictures.new_figure(7, 4.2)
    figure.suptitle(title, fontsize="medium")
    contexts = sorted(predicted)
    for i, context in enumerate(contexts):
        colour = colormaps["viridis"](0.85 * i / max(len(contexts) - 1, 1))
        rows = sorted(predicted[context])
        axes.plot(rows, [predicted[context][n] for n in rows], "-", color=colour, label=f"{context:,} tokens")
        if realised and context in realised:
            rows = sorted(realised[context])
            axes.plot(rows, [realised[context][n] for n in rows], "o", color=colour)
    if realised:
        axes.plot([], [], "o", color="grey", label="realised")
        axes.plot([], [], "-", color="grey", label="predicted from parts")
    axes.axhline(1, color="black", linestyle="--", linewidth=1, label="plain decoding")
    if critical is not None:
        axes.plot([], [], " ", label=f"critical context: about {critical:,.0f} tokens")
    rows = sorted({n for of_context in predicted.values() for n in of_context})
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(n) for n in rows])
    axes.set_xlabel("rows decoded together")
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    return figure
