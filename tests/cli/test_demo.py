"""The demo prints real text and a table with every method."""

import re

from specjax.cli.demo import PROMPTS
from specjax.cli.main import main


def test_the_demo_shows_every_method(capsys) -> None:
    assert main(["demo", "--max-new-tokens", "32", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    rows = {
        name: re.search(rf"{name}\W+([\d,]+)\W+([\d.]+)x\W+([\d.]+)\W+([\d.]+|-)", out)
        for name in ("plain", "draft model", "draft model, adaptive", "prompt lookup", "early exit")
    }
    assert all(rows.values()), out
    assert rows["plain"].group(2, 3, 4) == ("1.00", "1.00", "-")
    assert float(rows["draft model"].group(3)) > 1.5
    text = out[: out.index("what it bought")]
    assert len(text.split()) > sum(len(prompt.split()) for prompt in PROMPTS[:2]) + 20  # prompts and new text
