"""Tests of the picture of a drafted text: a line of committed tokens, a bar per provisional one."""

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

from specjax.client import CommittedEvent, ProvisionalEvent, RetractedEvent
from specjax.reports import style
from specjax.reports.growth import Moment, Stand, draw_growth, stands_of

MOMENTS = [
    Moment.of(CommittedEvent((5, 6), "ab"), 0.5),
    Moment.of(ProvisionalEvent((7,), "c"), 2.0),
    Moment.of(ProvisionalEvent((8,), "d"), 2.1),
    Moment.of(ProvisionalEvent((9,), "e"), 2.2),
    Moment.of(RetractedEvent((9,), "e"), 4.0),
    Moment.of(CommittedEvent((7,), "c", confirmed=1), 4.0),
    Moment.of(CommittedEvent((8, 4), "df", confirmed=1), 4.5),
    Moment.of(ProvisionalEvent((3,), "g"), 6.0),
]
STANDS = [
    Stand(4, 2.2, 4.0, "retracted"),
    Stand(2, 2.0, 4.0, "committed"),
    Stand(3, 2.1, 4.5, "committed"),
    Stand(5, 6.0, 6.0, "provisional"),
]


def test_each_provisional_token_is_followed_to_its_end() -> None:
    assert stands_of(MOMENTS) == STANDS
    assert stands_of([]) == []


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK], ids=["light", "dark"])
def test_what_is_drawn_is_where_it_was(theme) -> None:
    with style.use(theme):
        figure = draw_growth("a title", MOMENTS, away=[(1.0, 4.0)])
    (axes,) = figure.axes
    (line,) = axes.lines
    assert np.array_equal(line.get_xydata(), [(0, 0), (0.5, 2), (4, 3), (4.5, 5), (6, 5)])
    bars = [bar for bar in axes.collections if isinstance(bar, LineCollection)]
    segments = {
        to_hex(bar.get_color()[0]): [segment.tolist() for segment in bar.get_segments()]
        for bar in bars
    }
    assert segments[theme.rejected.edge] == [[[2.2, 5], [4.0, 5]]]
    assert segments[theme.drafted.edge] == [[[2.0, 3], [4.0, 3]], [[2.1, 4], [4.5, 4]]]
    assert segments[theme.passed_over.edge] == [[[6.0, 6], [6.0, 6]]]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    expected = [
        "no network",
        "committed",
        "provisional, then committed",
        "provisional, then retracted",
    ]
    assert labels == [*expected, "provisional to the end"]
