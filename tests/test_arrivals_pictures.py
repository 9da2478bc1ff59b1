"""Pictures of requests that arrive over time.

Bars are where requests were, and lines go through the measurements.
"""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from benchmarks.arrivals_pictures import (
    Spread,
    Stay,
    draw_by_clients,
    draw_by_rate,
    draw_rows,
    share_in_use,
    stays_of,
)
from specjax.reports import style

PANELS = {
    "static batches": [Stay(0, 0, 0.0, 8.0), Stay(1, 1, 0.0, 2.0), Stay(2, 0, 8.0, 10.0)],
    "continuous batching": [Stay(0, 0, 0.0, 8.0), Stay(1, 1, 0.0, 2.0), Stay(2, 1, 2.0, 4.0)],
}


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_found_from_the_times_alone(seed) -> None:
    """Serve requests of random lengths at random times in order, and find their rows again."""
    random = np.random.default_rng(seed)
    arrivals, durations, rows = np.sort(random.uniform(0, 10, 40)), random.uniform(0.1, 3, 40), 4
    free, expected = [0.0] * rows, []
    for request, at in enumerate(arrivals):
        row = next((row for row in range(rows) if free[row] <= at), int(np.argmin(free)))
        start = max(at, free[row])
        free[row] = start + durations[request]
        expected.append(Stay(request, row, start, free[row]))
    stays = stays_of(arrivals.tolist(), [stay.end for stay in expected], rows)
    assert stays == expected
    with pytest.raises(ValueError, match="order of their arrival"):
        stays_of([1.0, 0.0], [2.0, 2.0], rows)
    assert stays_of([], [], rows) == []


def test_the_share_in_use_counts_from_the_first_start() -> None:
    assert share_in_use([Stay(0, 0, 10.0, 14.0), Stay(1, 1, 11.0, 13.0)], rows=2) == 0.75
    assert share_in_use(PANELS["static batches"], rows=2) == pytest.approx(12 / 20)


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK], ids=["light", "dark"])
def test_a_bar_for_each_request_and_one_colour_for_it_in_all_panels(theme) -> None:
    with style.use(theme):
        figure = draw_rows("a title", PANELS, rows=2)
    assert to_hex(figure.get_facecolor()) == theme.paper
    colours = []
    for axes, stays in zip(figure.axes, PANELS.values(), strict=True):
        bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        places = [
            (bar.get_x(), bar.get_y() + bar.get_height() / 2, bar.get_width()) for bar in bars
        ]
        assert places == [(stay.start, stay.row, stay.seconds) for stay in stays]
        colours.append([to_hex(bar.get_facecolor()) for bar in bars])
        assert axes.get_ylim()[0] > axes.get_ylim()[1]  # row 1 is at the top
        assert axes.get_xlim() == figure.axes[0].get_xlim()
    assert colours[0] == colours[1] and len(set(colours[0])) == 3
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        "static batches: 10 s, rows in use 60% of the time",
        "continuous batching: 8 s, rows in use 75% of the time",
    ]


def test_a_number_is_written_only_where_it_fits() -> None:
    stays = [Stay(request, request, 0.0, 10.0 / 2**request) for request in range(12)]
    figure = draw_rows("a title", {"all": stays}, rows=12)
    figure.draw_without_rendering()
    bars = {
        round(patch.get_width(), 9): patch.get_window_extent() for patch in figure.axes[0].patches
    }
    labels = {
        int(label.get_text()) - 1: label.get_window_extent() for label in figure.axes[0].texts
    }
    assert 3 <= len(labels) < 12
    for request, label in labels.items():
        bar = bars[round(stays[request].seconds, 9)]
        assert bar.x0 <= label.x0 and label.x1 <= bar.x1


def test_lines_go_through_the_medians_in_order_of_the_rates(monkeypatch) -> None:
    # The rest of the process may draw with other settings.
    monkeypatch.setitem(mpl.rcParams, "axes.facecolor", "#ff0000")
    tokens = {
        "plain": {60.0: Spread(9, 10, 12), 30.0: Spread(5, 5, 5)},
        "by load": {30.0: Spread(5, 5, 5), 60.0: Spread(9, 11, 12)},
    }
    seconds = {
        name: {rate: Spread.of([2.0, 1.0, 4.0]) for rate in lines} for name, lines in tokens.items()
    }
    figure = draw_by_rate("a title", tokens, seconds, saturated=50.0)
    above, below = figure.axes
    for axes, lines in ((above, tokens), (below, seconds)):
        assert to_hex(axes.get_facecolor()) == style.LIGHT.paper
        for container, (name, by_rate) in zip(axes.containers, lines.items(), strict=True):
            line, _, (bars,) = container.lines
            assert container.get_label() == name
            assert line.get_xydata().tolist() == [
                [rate, by_rate[rate].middle] for rate in (30.0, 60.0)
            ]
            ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
            assert ends == [[by_rate[rate].low, by_rate[rate].high] for rate in (30.0, 60.0)]
        assert any(list(line.get_xdata()) == [50.0, 50.0] for line in axes.lines)
    assert "“plain”" in below.get_xlabel()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["plain", "by load"]


def test_a_line_for_each_server_through_its_medians() -> None:
    tokens = {"ours": {4: Spread(9, 10, 12), 1: Spread(5, 5, 5)}, "theirs": {1: Spread(5, 6, 7)}}
    seconds = {
        name: {count: Spread.of([1.0, 2.0]) for count in by_clients}
        for name, by_clients in tokens.items()
    }
    figure = draw_by_clients("a title", tokens, seconds)
    above, below = figure.axes
    for axes, lines in ((above, tokens), (below, seconds)):
        for container, by_clients in zip(axes.containers, lines.values(), strict=True):
            expected = [[count, by_clients[count].middle] for count in sorted(by_clients)]
            assert container.lines[0].get_xydata().tolist() == expected
        assert list(axes.get_xticks()) == [1, 4]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ours", "theirs"]
