"""``specjax plan`` as a user meets it: the numbers, what is refused, and the picture."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from specjax.chips import CHIPS
from specjax.cli.main import main
from specjax.models import huggingface
from specjax.models.shapes import PUBLISHED
from specjax.planning import roofline, theory
from tests.conftest import tiny_config

MODELS = ("--target", "llama-3.1-8b", "--drafter", "llama-3.2-1b")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def table(out: str) -> list[list[str]]:
    """The cells of the table's body."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]


def test_the_table_of_a_cost(capsys) -> None:
    code, out, _ = run(capsys, "--alpha", "0.8", "--cost", "0.05")
    assert code == 0
    rows = table(out)
    assert [row[0] for row in rows] == [str(gamma) for gamma in range(1, 17)]
    assert rows[0] == ["1", "1.80", "1.71x", "1.14x", "0.56x", ""]  # 1.8 / 1.05, 2.05 / 1.8, 1 / 1.8
    assert rows[3][1:5] == ["3.36", "2.80x", "1.55x", "0.30x"]  # 3.3616 / 1.2, 5.2 / 3.3616, 1 / 3.3616
    best = theory.best_gamma(0.8, 0.05)
    assert [row[0] for row in rows if row[5] == "best"] == [str(best.gamma)] == ["8"]
    assert "Best: chains of 8, 3.09 times as fast as plain decoding." in out


def test_operations_are_the_cost_unless_they_are_given(capsys) -> None:
    _, out, _ = run(capsys, "--alpha", "0.5", "--cost", "0.1", "--operations", "0.02", "--longest", "2")
    assert [row[3] for row in table(out)] == ["1.35x", "1.74x"]  # 2.02 / 1.5, 3.04 / 1.75


@pytest.mark.parametrize(("longest", "cut_short"), [("8", True), ("9", False)])
def test_it_says_when_the_best_chain_is_the_longest_looked_at(capsys, longest, cut_short) -> None:
    _, out, _ = run(capsys, "--alpha", "0.8", "--cost", "0.05", "--longest", longest)
    assert "Best: chains of 8" in out
    assert ("A chain of more than 8 may be better still: raise --longest." in out) == cut_short


def test_it_says_when_speculation_does_not_pay(capsys) -> None:
    code, out, _ = run(capsys, "--alpha", "0.2", "--cost", "0.3")
    assert code == 0
    assert "Speculation does not pay, plain decoding is best: alpha = 0.2 is not above c = 0.3." in out.splitlines()
    assert "best" not in [row[5] for row in table(out)]


def test_the_table_of_two_models(capsys) -> None:
    code, out, _ = run(capsys, *MODELS, "--batch", "1", "256", "--context", "1024")
    assert code == 0
    pair = roofline.Pair(PUBLISHED["llama-3.1-8b"], CHIPS["h100"], PUBLISHED["llama-3.2-1b"])
    one, many = table(out)
    assert one == ["1", "4.52", "0.75", "4.52", "4", "2.02x", "1", "18.7"]
    best = roofline.best_gamma(pair, 256, 1024, 0.8)
    verify = 1e3 * pair.verify_time(256, 1024, best.gamma)
    assert many[3:7] == [f"{verify:.2f}", "2", f"{best.factor:.2f}x", f"{roofline.break_even_context(pair, 256, 0.8)}"]
    assert many[7] == f"{pair.memory(256, 1024) / 1e9:.1f}"
    assert "upper bounds" in out


def test_a_draft_cache_and_rows_that_do_not_pay_or_fit(capsys) -> None:
    options = ("--drafter", "self", "--draft-cache", "512", "--chip", "a100", "--context", "2000")
    code, out, _ = run(capsys, "--target", "llama-3.1-8b", *options, "--batch", "1", "16", "64", "256")
    assert code == 0
    assert [row[4] for row in table(out)] == ["plain", "plain", "1", "1"]
    assert [row[3] for row in table(out)][:2] == ["-", "-"]
    assert "Speculation does not pay with 1, 16 rows: plain decoding is best there." in out.splitlines()
    assert [row[7] for row in table(out)] == ["16.4", "21.3", "37.1", "100.3 > 80"]
    _, out, _ = run(capsys, "--target", "llama-3.1-8b", *options, "--batch", "1", "--alpha", "0.1")
    assert table(out)[0][6] == "never"


def test_models_are_read_from_directories_without_their_weights(capsys, tmp_path) -> None:
    for name, layers in (("target", 6), ("draft", 1)):
        (tmp_path / name).mkdir()
        content = huggingface.format_config(tiny_config(num_layers=layers, max_positions=64), "float32")
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    models = ("--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "draft"), "--batch", "1")
    code, out, _ = run(capsys, *models, "--context", "32", "--plot", str(tmp_path / "a.svg"))
    assert code == 0
    assert len(table(out)) == 1
    code, _, err = run(capsys, *models, "--context", "65")
    assert (code, "context=65: the models have positions for 64 tokens" in err) == (2, True)


FAULTS = [
    ([], "cost: give either --cost C, or --target MODEL"),
    (["--cost", "0.1", *MODELS], "cost: give either --cost C, or --target MODEL"),
    (["--cost", "0.1", "--alpha", "1.5"], "alpha=1.5"),
    (["--cost", "0.1", "--alpha", "nan"], "alpha=nan"),
    ([*MODELS, "--alpha", "-0.5"], "alpha=-0.5"),
    (["--cost", "0"], "cost=0:"),
    (["--cost", "-0.1"], "cost=-0.1:"),
    (["--cost", "0.1", "--operations", "0"], "operations=0:"),
    (["--cost", "0.1", "--longest", "0"], "longest=0"),
    (["--cost", "0.1", "--draft-cache", "0"], "draft_cache=0: goes with --target"),
    (["--cost", "0.1", "--drafter", "self"], "drafter=self: goes with --target"),
    ([*MODELS, "--operations", "0.1"], "operations=0.1: goes with --cost"),
    ([*MODELS, "--chip", "h900"], "chip='h900': not a chip known here; known are h100, a100, tpu-v4"),
    ([*MODELS, "--batch", "0"], "batch=0"),
    ([*MODELS, "--batch"], "batch=()"),
    ([*MODELS, "--context", "0"], "context=0"),
    ([*MODELS, "--context", "200000"], "context=200000: the models have positions for 131072 tokens"),
    ([*MODELS, "--draft-cache", "0"], "draft_cache=0"),
    (["--target", "llama-3.1-8b"], "drafter='': give a draft model"),
    (["--target", "llama-3.1-8b", "--drafter", "self"], "drafter='self': a target that drafts with its whole cache"),
    (["--target", "llama-3.1-8b", "--drafter", "qwen3-0.6b"], "drafter has a vocabulary of 151936"),
    (["--target", "llama-9", "--drafter", "llama-3.2-1b"], "target: 'llama-9' is not a published shape known here; known are"),
    (["--target", "llama-3.1-8b", "--drafter", "tiny"], "drafter: 'tiny' is not a published shape"),
    (["--target", "./nothing", "--drafter", "llama-3.2-1b"], "'./nothing' is not a directory"),
    (["--cost", "0.1", "--plot", "out.txt"], "plot='out.txt': the name must end in .png, .pdf, .svg"),
    (["--cost", "0.1", "--plot", "no/such/out.png"], "plot='no/such/out.png': there is no directory 'no/such'"),
]


@pytest.mark.parametrize(("arguments", "message"), FAULTS)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


PICTURES = {"cost": ("--cost", "0.05"), "models": (*MODELS, "--batch", "1", "64", "--longest", "6")}


@pytest.mark.parametrize("arguments", PICTURES.values(), ids=PICTURES)
def test_the_picture_is_written_and_shows_something(capsys, tmp_path, arguments) -> None:
    path = tmp_path / "plan.png"
    code, out, _ = run(capsys, *arguments, "--plot", str(path))
    assert code == 0
    assert str(path) in out
    assert list(tmp_path.iterdir()) == [path]  # no scratch file stays
    pixels = imread(path)
    assert min(pixels.shape[:2]) > 500
    assert 0.01 < (pixels[..., :3] < 0.9).any(axis=-1).mean() < 0.5  # ink on paper


def test_a_picture_that_fails_leaves_the_old_one(capsys, tmp_path, monkeypatch) -> None:
    path = tmp_path / "plan.png"
    path.write_bytes(b"the old one")

    def fails_halfway(self: Figure, file: Path, **_) -> None:
        Path(file).write_bytes(b"half a pict")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fails_halfway)
    code, _, err = run(capsys, "--cost", "0.05", "--plot", str(path))
    assert code == 2
    assert "cannot be written (disk full)" in err
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"the old one"]
