"""Figures of serving: the rows of requests over time, and throughput and latency by load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.reports import style
from specjax.reports.pictures import letters_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = 8  # font size in points of the numbers in bars


@dataclass(frozen=True)
class Stay:
    """The time of a request in a row.

    Attributes:
        request: the index of the request, by arrival.
        row: the index of the row.
        start: the time in seconds at which it got the row.
        end: the time in seconds at which its text was complete.

    Examples:
        >>> from benchmarks.arrivals_pictures import Stay
        >>> Stay(request=0, row=3, start=0.0, end=1.5).seconds
        1.5
    """

    request: int
    row: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The seconds for which the request had the row."""
        return self.end - self.start


def stays_of(submitted: Sequence[float], finished: Sequence[float], rows: int) -> list[Stay]:
    """Derive the rows of requests over time from their arrivals and ends.

    Requests are served in the order of arrival. The first one that waits gets a row as soon as one
    is free, and the row with the lowest index if several are free. The result is right if no
    request was preempted and no row was moved.

    Args:
        submitted: the arrival time of each request in seconds, ascending.
        finished: the time at which the text of each request was complete.
        rows: the number of rows.

    Raises:
        ValueError: The requests are not in the order of arrival.

    Examples:
        >>> from benchmarks.arrivals_pictures import stays_of
        >>> [(stay.row, stay.start) for stay in stays_of([0, 0, 0], [4.0, 1.0, 2.5], rows=2)]
        [(0, 0), (1, 0), (1, 1.0)]
    """
    if any(later < earlier for earlier, later in pairwise(submitted)):
        raise ValueError("submitted: requests are not in the order of their arrival")
    free_since = [submitted[0] if submitted else 0.0] * rows
    stays = []
    for request, (arrival, end) in enumerate(zip(submitted, finished, strict=True)):
        start = max(arrival, min(free_since))
        row = next(i for i, since in enumerate(free_since) if since <= start)
        stays.append(Stay(request, row, start, end))
        free_since[row] = end
    return stays


def share_in_use(stays: Sequence[Stay], rows: int) -> float:
    """Return the mean share of rows in use from the first start to the last end.

    Examples:
        >>> from benchmarks.arrivals_pictures import Stay, share_in_use
        >>> share_in_use([Stay(0, 0, 0.0, 4.0), Stay(1, 1, 0.0, 2.0)], rows=2)
        0.75
    """
    whole = max(stay.end for stay in stays) - min(stay.start for stay in stays)
    return sum(stay.seconds for stay in stays) / (rows * whole)


@style.styled
def draw_rows(title: str, panels: Mapping[str, Sequence[Stay]], rows: int) -> "Figure":
    """Draw rows over time: a bar for each request, and a panel for each engine.

    Args:
        title: the title of the figure.
        panels: by name, the stays of the same requests. A request has the same number and color in
            all panels.
        rows: the number of rows.
    """
    figure, all_axes = style.new_figure(*[0.62 + 0.24 * rows] * len(panels), title=title)
    count = 1 + max(stay.request for stays in panels.values() for stay in stays)
    last = max(stay.end for stays in panels.values() for stay in stays)
    colours = style.ramp(count)
    for axes, (name, stays) in zip(all_axes, panels.items(), strict=True):
        for stay in stays:
            _bar(axes, stay, colours[stay.request], last)
        end = max(stay.end for stay in stays)
        axes.axvline(end, color=style.theme().ink, linewidth=1.4)
        axes.set_title(
            f"{name}: {end:.3g} s, rows in use {share_in_use(stays, rows):.0%} of the time"
        )
        axes.set(xlim=(0, 1.02 * last), ylim=(rows - 0.4, -0.6))
        axes.set_yticks(range(rows), [str(row + 1) for row in range(rows)])
        axes.set_ylabel("row")
        axes.grid(False)
        axes.tick_params(axis="y", length=0)
    all_axes[-1].set_xlabel(
        "seconds; a bar is a request in its row, numbered and coloured by arrival"
    )
    return figure


def _bar(axes: "Axes", stay: Stay, colour: tuple[float, ...], last: float) -> None:
    """Draw one request in its row, and its number if the bar is wide enough."""
    paper = style.theme().paper
    axes.barh(
        stay.row,
        stay.seconds,
        left=stay.start,
        height=0.8,
        color=colour,
        edgecolor=paper,
        linewidth=0.8,
    )
    label = str(stay.request + 1)
    if stay.seconds / last * (style.WIDTH - 0.9) > letters_width(len(label), _SIZE) + 0.04:
        middle = stay.start + stay.seconds / 2
        axes.text(
            middle, stay.row, label, ha="center", va="center_baseline", fontsize=_SIZE, color=paper
        )


@dataclass(frozen=True)
class Spread:
    """The smallest, the median and the largest value of several measurements.

    Examples:
        >>> from benchmarks.arrivals_pictures import Spread
        >>> Spread.of([3.0, 1.0, 2.5])
        Spread(low=1.0, middle=2.5, high=3.0)
    """

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of one or several values."""
        return cls(float(min(values)), float(np.median(values)), float(max(values)))


@style.styled
def draw_by_rate(
    title: str,
    tokens: Mapping[str, Mapping[float, Spread]],
    seconds: Mapping[str, Mapping[float, Spread]],
    saturated: float,
) -> "Figure":
    """Draw throughput and latency against the rate of arrivals, with a line for each engine.

    Args:
        title: the title of the figure.
        tokens: by engine, then by requests per minute: tokens per second of all requests together.
        seconds: by engine, then by requests per minute: mean seconds from arrival to end of a
            request.
        saturated: the maximum requests per minute that the first engine finishes, drawn as a line.
    """
    figure, (above, below) = style.new_figure(3.2, 3.2, title=title)
    for axes, lines in ((above, tokens), (below, seconds)):
        _draw_lines(axes, lines)
        axes.axvline(saturated, color=style.theme().muted, linestyle="--", linewidth=1.2)
        axes.set_xlim(left=0)
    first = next(iter(tokens))
    above.set_ylabel("tokens a second")
    above.set_ylim(bottom=0)
    _scale_seconds(below)
    below.set_xlabel(f"requests a minute that arrive\ndashed: the most that “{first}” finishes")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower left", ncols=len(tokens))
    return figure


@style.styled
def draw_by_clients(
    title: str,
    tokens: Mapping[str, Mapping[int, Spread]],
    seconds: Mapping[str, Mapping[int, Spread]],
) -> "Figure":
    """Draw throughput and latency against the number of clients, with a line for each server.

    Args:
        title: the title of the figure.
        tokens: by server, then by clients: tokens per second of all clients together.
        seconds: by server, then by clients: seconds from sending a request to the end of its
            answer.
    """
    figure, (above, below) = style.new_figure(3.2, 3.2, title=title)
    numbers = sorted({count for by_clients in tokens.values() for count in by_clients})
    for axes, lines in ((above, tokens), (below, seconds)):
        _draw_lines(axes, lines)
        axes.set_xlim(left=0)
        axes.set_xticks(numbers)
    above.set_ylabel("tokens a second")
    above.set_ylim(bottom=0)
    _scale_seconds(below)
    below.set_xlabel("clients, each of which sends its next request when its last one has ended")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure


def _draw_lines(axes: "Axes", lines: Mapping[str, Mapping[Any, Spread]]) -> None:
    """Draw a line for each name through the medians, with bars from smallest to largest value."""
    for (name, by_x), marker in zip(lines.items(), style.MARKERS, strict=False):
        xs = sorted(by_x)
        spreads = [by_x[x] for x in xs]
        bars = [
            [spread.middle - spread.low for spread in spreads],
            [spread.high - spread.middle for spread in spreads],
        ]
        axes.errorbar(
            xs, [spread.middle for spread in spreads], yerr=bars, fmt=f"{marker}-", label=name
        )


def _scale_seconds(axes: "Axes") -> None:
    """Label the y axis as seconds per request, with a logarithmic scale and plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_ylabel("seconds a request")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
