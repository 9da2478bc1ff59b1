"""Check that the demo prints real text and a table with every method."""

import re
import shlex
from collections.abc import Iterable

import jax
import pytest

from specjax.assets import embedded
from specjax.cli import demo
from specjax.cli.main import find_command, main, parse_options
from specjax.drafters import MTP, Eagle3
from specjax.models.transformer import Target
from tests.conftest import save_tiny


def check_shown(out: str, ways: int, methods: Iterable[str]) -> None:
    """Check the table and the text of a demo with ``ways`` of drawing tokens beside each other."""
    figures = r"\W+([\d,]+)\W+([\d.]+)x\W+([\d.]+)"  # of one way to draw tokens
    rows = {name: re.search(rf"{name}{figures * ways}", out) for name in methods}
    assert all(rows.values()), out
    assert [rows["plain"].group(3 * way + 2, 3 * way + 3) for way in range(ways)] == [
        ("1.00", "1.00")
    ] * ways
    assert all(float(rows["draft model"].group(3 * way + 3)) > 1.5 for way in range(ways))
    text = out[: out.index("how fast each method is")]
    prompts = " ".join(demo.PROMPTS[:2]).split()
    assert all(word in text for word in prompts)
    assert len(text) > len(" ".join(prompts)) + 40  # prompts and new text


@pytest.mark.full
def test_the_demo_shows_its_methods(capsys, monkeypatch, tmp_path) -> None:
    # A model that drafts for itself, and is inflated: all is accepted.
    directory = save_tiny(tmp_path / "target", num_layers=1)
    for name, kind in (("eagle3", Eagle3), ("mtp", MTP)):
        kind.init(Target.from_pretrained(directory), jax.random.key(0)).save_pretrained(
            tmp_path / name
        )
    monkeypatch.setattr(
        demo, "embedded", lambda name: tmp_path / name if name in ("eagle3", "mtp") else directory
    )
    few = ("plain", "EAGLE-3", "MTP", "draft model")  # the rest takes as long to compile
    monkeypatch.setattr(demo, "FEW", few)
    monkeypatch.setattr(
        demo, "INFLATED", {"hidden_size": 32, "intermediate_size": 32, "num_layers": 3}
    )
    assert main(["demo", "--max-new-tokens", "16", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    check_shown(out, 1, few)
    assert "9 greedy texts with drafters, 9 are equal to plain decoding's" in " ".join(out.split())
    following = [line for line in out.splitlines() if " -m specjax " in line]
    for line in following:  # the commands that it suggests can be typed
        words = shlex.split(line, comments=True)
        name, command, options = find_command(words[words.index("specjax") + 1 :])
        parse_options(command.config, options, prog=name)
    assert len(following) == 2 and "docs/index.md" in out.splitlines()[-1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options, ways, methods", [([], 1, demo.FEW), (["--all", "--max-new-tokens", "32"], 2, None)]
)
def test_the_demo_of_the_embedded_pair(
    capsys, options: list[str], ways: int, methods: Iterable[str] | None
) -> None:
    assert main(["demo", "--repeats", "1", *options]) == 0
    small = Target.from_pretrained(embedded("target"))
    check_shown(capsys.readouterr().out, ways, methods or demo.methods(small, small))
