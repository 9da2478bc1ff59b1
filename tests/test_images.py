"""Check that each picture of the documentation is light and dark, and drawn by a script."""

from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from docs.images import draw
from specjax.reports import style

IMAGES = Path(draw.__file__).parent
ALONE = {"logo.svg"}
RECORDED = {"demo"}


def test_every_picture_has_its_dark_twin_and_is_drawn_by_a_script() -> None:
    files = {
        file.name for file in IMAGES.iterdir() if file.suffix in {".png", ".svg", ".gif"}
    } - ALONE
    names = {file.rpartition(".")[0].removesuffix("-dark") for file in files}
    assert names - RECORDED == set(draw.PICTURES)
    for name in names:
        ending = "svg" if name in RECORDED else "png"
        assert {f"{name}.{ending}", f"{name}-dark.{ending}"} <= files


def test_the_script_draws_each_light_and_dark(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(draw, "IMAGES", tmp_path)
    draw.main(["long_context"])
    assert (
        capsys.readouterr().out
        == "docs/images/long_context.png\ndocs/images/long_context-dark.png\n"
    )
    for name, theme in (("long_context", style.LIGHT), ("long_context-dark", style.DARK)):
        pixels = imread(tmp_path / f"{name}.png")
        assert pixels[0, 0, :3] == pytest.approx(to_rgb(theme.paper), abs=0.01)
        assert 0.01 < (abs(pixels[..., :3] - pixels[0, 0, :3]).max(axis=-1) > 0.2).mean() < 0.5
    with pytest.raises(SystemExit, match="no such picture: portrait; there are arrivals_rows,"):
        draw.main(["portrait"])


def test_the_picture_of_a_step_shows_what_is_kept_of_it() -> None:
    step = draw.Step(
        "if x:\n    return",
        drafted=(" x", ".", "y"),
        target_tokens=(" x", "\n", "if", "def"),
        accepted=1,
    )
    axes = draw.draw_step(step).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("·x") == 3  # proposed, scored, accepted
    assert texts.count(".") == 2  # proposed, and not accepted
    assert len(axes.lines) == 2  # struck out: "." and the token after it
    assert "2 new tokens for one pass of the target" in texts
    assert texts.count("return") == 2  # the text before the step and after it


def test_a_recording_shortens_waits_and_keeps_what_was_printed() -> None:
    pytest.importorskip("pyte")
    from docs.images import record

    printed = [(0.5 * i, f"\rworking {i}%".encode()) for i in range(1, 41)]  # 20 seconds
    printed += [(21.0, b"\r\n\x1b[1;32mdone\x1b[0m and \x1b[2mdusted\x1b[0m\r\n")]
    frames = record.play(printed, typed="run", columns=30, lines=5, longest_wait=2.0)
    assert frames[-1].real == 21.0
    assert frames[-1].shown - frames[-4].shown < 2.0
    assert 2.0 < frames[-1].shown < 4.0
    svg = record.draw(frames, "run", 30, 5, shortened=True, theme=style.DARK)
    assert ">waits shortened" in svg and ">21 s<" in svg
    assert 'class="green b">done<' in svg and 'class="d">dusted<' in svg
    assert style.DARK.paper in svg and style.LIGHT.paper not in svg
