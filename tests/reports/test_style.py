"""Tests of the style of all pictures: distinct colours, no overlapping labels, two themes."""

from itertools import combinations

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb

from specjax.reports import style
from specjax.reports.speedups import draw_by_length

THEMES = {"light": style.LIGHT, "dark": style.DARK}

# Matrices for linear RGB from Machado, Oliveira and Fernandes 2009, table 1, severity 1.
VISION = {
    "normal": np.eye(3),
    "protanope": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranope": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanope": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(colour: str) -> np.ndarray:
    values = np.array(to_rgb(colour))
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def oklab(values: np.ndarray) -> np.ndarray:
    """Convert linear RGB to Oklab (Ottosson 2020), where distances are perceived differences."""
    cones = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    lab = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    return np.array(lab) @ np.cbrt(np.array(cones) @ np.clip(values, 0, 1))


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours, as WCAG defines it."""
    dark, light = sorted(
        float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (first, second)
    )
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
@pytest.mark.parametrize("vision", VISION)
def test_no_two_series_look_alike(theme, vision) -> None:
    perceived = {
        colour: oklab(np.array(VISION[vision]) @ linear(colour)) for colour in theme.series
    }
    distances = {
        pair: np.linalg.norm(perceived[pair[0]] - perceived[pair[1]])
        for pair in combinations(perceived, 2)
    }
    assert min(distances.values()) > 0.1, min(distances, key=lambda pair: distances[pair])


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_lines_and_text_stand_out_from_the_paper(theme) -> None:
    with style.use(theme):
        lines = [*theme.series, *map(to_hex, style.ramp(5))]
    assert min(contrast(colour, theme.paper) for colour in lines) > 2.95
    assert min(contrast(colour, theme.paper) for colour in (theme.ink, theme.muted)) > 4.5
    for paint in (theme.drafted, theme.accepted, theme.rejected, theme.passed_over):
        assert contrast(theme.muted, paint.face) > 4.5


def test_a_picture_is_light_unless_its_caller_asks_for_dark(monkeypatch) -> None:
    def draw():
        return draw_by_length("a title", {"alpha = 0.8": (1.0, 1.5, 1.7)}, strong="alpha = 0.8")

    # The process may have set matplotlib's defaults elsewhere: they neither matter nor change.
    monkeypatch.setitem(mpl.rcParams, "axes.facecolor", "#ff0000")
    with style.use(style.DARK):
        dark = draw()
    light = draw()
    for figure, theme in ((dark, style.DARK), (light, style.LIGHT)):
        assert (
            to_hex(figure.get_facecolor()) == to_hex(figure.axes[0].get_facecolor()) == theme.paper
        )
        assert to_hex(figure.axes[0].xaxis.label.get_color()) == theme.ink
    assert mpl.rcParams["axes.facecolor"] == "#ff0000"


def test_labels_beside_lines_that_end_together_do_not_overlap() -> None:
    figure = draw_by_length(
        "a title", {f"line {i}": (1.0, 2.0 + i / 100) for i in range(4)}, strong="line 0"
    )
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [label.get_window_extent() for label in axes.texts]
    assert len(boxes) == 4 + 1  # and the label of plain decoding
    assert not any(box.overlaps(second) for box, second in combinations(boxes, 2))
    assert min(box.x0 for box in boxes) > axes.get_window_extent().x1
    assert max(box.x1 for box in boxes) <= figure.bbox.x1


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([5.0, 40.0, 20.0], [5.0, 40.0, 20.0]),
        ([10.0, 10.0], [5.0, 15.0]),
        ([12.0, 11.0, 10.0], [21.0, 11.0, 1.0]),
        ([0.0, 9.0, 100.0], [-0.5, 9.5, 100.0]),
    ],
)
def test_places_are_moved_apart_and_no_further(places, expected) -> None:
    assert style.spread(places, 10) == pytest.approx(expected)


def test_a_long_title_is_broken_into_lines_and_a_dollar_is_a_dollar() -> None:
    figure = draw_by_length(
        "owner/a-model-with-$ and $ in its name, " * 3, {"a": (1.0, 2.0)}, strong="a"
    )
    figure.draw_without_rendering()
    title = figure._suptitle
    assert title.get_text().count("\n") == 1
    assert title.get_window_extent().x1 <= figure.bbox.x1
