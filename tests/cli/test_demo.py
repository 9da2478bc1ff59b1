"""The demo prints real text and a table with every method."""

import re

import jax
import pytest

from specjax.cli import demo
from specjax.cli.main import main
from specjax.drafters import MTP, Eagle3
from specjax.models.transformer import Target
from tests.conftest import save_tiny

METHODS = (
    "plain",
    "EAGLE-3",
    "EAGLE-3, tree",
    "MTP",
    "draft model",
    "draft model, adaptive",
    "draft model, tree",
    "prompt lookup",
    "early exit",
)


def check_shown(out: str, ways: int, methods: tuple[str, ...] = METHODS) -> None:
    """``ways`` to draw tokens stand beside each other."""
    figures = r"\W+([\d,]+)\W+([\d.]+)x\W+([\d.]+)"  # of one way to draw tokens
    rows = {name: re.search(rf"{name}{figures * ways}", out) for name in methods}
    assert all(rows.values()), out
    assert [rows["plain"].group(3 * way + 2, 3 * way + 3) for way in range(ways)] == [("1.00", "1.00")] * ways
    assert all(float(rows["draft model"].group(3 * way + 3)) > 1.5 for way in range(ways))
    text = out[: out.index("what it bought")]
    prompts = " ".join(demo.PROMPTS[:2]).split()
    assert all(word in text for word in prompts)
    assert len(text) > len(" ".join(prompts)) + 40  # prompts and new text


def test_the_demo_shows_its_methods(capsys, monkeypatch, tmp_path) -> None:
    directory = save_tiny(tmp_path / "target", num_layers=1)  # a model that drafts for itself, and is inflated: all is accepted
    for name, kind in (("eagle3", Eagle3), ("mtp", MTP)):
        kind.init(Target.from_pretrained(directory), jax.random.key(0)).save_pretrained(tmp_path / name)
    monkeypatch.setattr(demo, "embedded", lambda name: tmp_path / name if name in ("eagle3", "mtp") else directory)
    every, few = demo.methods, ("plain", "EAGLE-3", "MTP", "draft model")  # the others take as long to compile
    monkeypatch.setattr(demo, "methods", lambda *models: {name: every(*models)[name] for name in few})
    monkeypatch.setattr(demo, "INFLATED", {"hidden_size": 32, "intermediate_size": 32, "num_layers": 3})
    assert main(["demo", "--max-new-tokens", "16", "--repeats", "1", "--temperature", "0"]) == 0
    check_shown(capsys.readouterr().out, 1, few)


@pytest.mark.thorough
def test_the_demo_of_the_embedded_pair(capsys) -> None:
    assert main(["demo", "--max-new-tokens", "32", "--repeats", "1"]) == 0
    check_shown(capsys.readouterr().out, ways=2)
