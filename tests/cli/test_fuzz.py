"""Try absurd command lines: each is refused in one line with exit status 2, or runs.

None ends in a traceback.
"""

import dataclasses
import random
import re
import sys
from pathlib import Path

import pytest

from specjax.cli.main import Group, find_command, main
from specjax.lowering import topologies
from specjax.models import huggingface
from specjax.training import loop
from tests.conftest import ASSETS

PROGRESS = re.compile(r"specjax: (?!error: ).*, \d+ s")
"""A line that says what has taken so long."""

WHOLE = ["-1", "0", "1", "2", "1_0", "٣", "9" * 5000]
WHOLE += [f"{sign}{2**power}" for sign in ("", "-") for power in (31, 32, 63, 64, 200, 2000)]
NUMBERS = [
    *(*WHOLE, "0.5", "-0.5", "1e-320", "1e-30", "1e30", "1e308", "1e400", "nan", "inf", "-inf"),
    "0x10",
]
WORDS = [
    "",
    " ",
    "text",
    "🎉",
    "\n",
    "--",
    "-",
    "none",
    "None",
    "auto",
    "true",
    "[]",
    "{}",
    "x" * 5000,
]
PATHS = [
    *(".", "..", "/", "/dev/null", "./missing", "/missing/file.png", "~nobody-of-that-name/x"),
    *("missing.jsonl", "tree.png"),
]
PATHS += ["embedded", "embedded:x"]
PATHS += [str(ASSETS), str(ASSETS / "target"), str(ASSETS / "target" / "model.safetensors")]
NAMES = [
    *("prompt-lookup", "prompt-lookup:0", "early-exit:", "early-exit:0", "early-exit:99"),
    *("draft-model:", "self", "::"),
]
NAMES += [
    *("chain:0", "chain:nan", "chain:4,2", "complete:", "sampled:1,x", "sampled:99,99,99"),
    *("dynamic:1,1", "dynamic:9,9,9"),
]
VALUES = NUMBERS + WORDS + PATHS + NAMES
TEXTS = [*VALUES, "\udc80"]  # a byte that is not UTF-8
YAML = [
    *(*NUMBERS, "[1, 2]", "[1, x]", "{a: 1}", "{1: {2: 3}}", "null", "true", "2020-01-01"),
    *("2020-99-99", "&a [*a]", "*a"),
]
YAML += ["!!python/name:os", "- 1", "[" * 1500]
CONFIG = Path("absurd.yaml")  # written where the test runs

PAIR = ("--target", "embedded", "--drafter", "embedded:draft")
BASES = [
    ("generate", "--prompt", "x", *PAIR),
    ("generate", "--prompt", "x", "--temperature", "0.5"),
    ("serve", "--port", "0", *PAIR),
    ("demo",),
    ("plan",),
    ("plan", "theory", "--cost", "0.1"),
    ("plan", "roofline", "--target", "llama-3.1-8b", "--drafter", "llama-3.2-1b"),
    ("plan", "measure", "--prompts", __file__, *PAIR),
    ("plan", "contexts", "--prompts", __file__, "--target", "embedded", "--contexts", "64"),
    (
        *("plan", "compile", "--chips", "v5e:2x4", "--target", "llama-3.1-8b"),
        *("--drafter", "llama-3.2-1b"),
    ),
    (
        "plan",
        "compile-training",
        "--chips",
        "v5e:2x4",
        "--train",
        str(ASSETS.parents[1] / "configs" / "demo_target.yaml"),
    ),
    ("train",),
]


class WeightsReachedError(Exception):
    """The command line was accepted, up to the reading of weights."""


def command_line(rng: random.Random) -> list[str]:
    """Return a base with one to three options more, mostly of the right type, sometimes of any."""
    line = list(rng.choice(BASES))
    command = find_command(line)[1]
    if isinstance(command, Group):
        return [*line, *rng.sample([*VALUES, *command.commands], rng.randint(1, 2))]
    flags = options(command.config)
    if rng.random() < 0.15:
        name = rng.choice([*flags, "--unknown"]).removeprefix("--").replace("-", "_")
        CONFIG.write_text(f"{name}: {rng.choice(YAML)}\n", errors="replace")
        line += ["--config", str(CONFIG)]
    for flag in rng.sample(sorted(flags), rng.randint(0 if "--config" in line else 1, 3)):
        fitting = {int: WHOLE, tuple: WHOLE, float: NUMBERS, str: TEXTS}.get(
            type(flags[flag]), VALUES
        )
        line += [
            flag,
            *rng.sample(fitting if rng.random() < 0.8 else VALUES, 2 if flag == "--mesh" else 1),
        ]
    return line


def options(config: type, prefix: str = "--") -> dict[str, object]:
    """Return the flags of a config, with those of its sections, and their defaults."""
    defaults: dict[str, object] = {}
    for field in dataclasses.fields(config):
        name = f"{prefix}{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(field.default):
            defaults |= options(type(field.default), f"{name}.")
        else:
            defaults[name] = 0.0 if field.default is None else field.default
    return defaults


def check(line: list[str], capsys) -> None:
    """Check that the command line ends in one of the ways that are allowed.

    The parser of options may take a few lines for a value of the wrong type.
    """
    try:
        code, by_parser = main(line), False
    except SystemExit as exit:
        code, by_parser = exit.code, True
    except WeightsReachedError:
        return
    finally:
        captured = capsys.readouterr()
    if code == 0:
        return
    assert code == 2, (line, captured.err)
    assert "Traceback" not in captured.err, line
    if not by_parser:
        errors = [
            text
            for text in captured.err.splitlines()
            # Nor a line of progress, which a busy machine prints.
            if not text.endswith("which is greedy") and not PROGRESS.fullmatch(text)
        ]
        assert len(errors) == 1 and errors[0].startswith("specjax: error: "), (line, captured.err)


def fuzz(seeds: range, capsys, monkeypatch, tmp_path) -> None:
    def reach(*_, **__):
        raise WeightsReachedError

    def train(config, stop=None):
        config.check()
        raise WeightsReachedError

    monkeypatch.setattr(huggingface, "load_params", reach)
    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(topologies, "_devices", reach)
    monkeypatch.chdir(tmp_path)
    sys.stderr.reconfigure(errors="backslashreplace")  # as outside of pytest
    for seed in seeds:
        line = command_line(random.Random(seed))
        try:
            check(line, capsys)
        except (Exception, AssertionError) as error:
            error.add_note(f"seed {seed}: specjax {' '.join(map(ascii, line))[:2000]}")
            raise


@pytest.mark.full
def test_no_command_line_ends_in_a_traceback(capsys, monkeypatch, tmp_path) -> None:
    fuzz(range(150), capsys, monkeypatch, tmp_path)


@pytest.mark.thorough
def test_no_command_line_of_many_ends_in_a_traceback(capsys, monkeypatch, tmp_path) -> None:
    fuzz(range(150, 10_000), capsys, monkeypatch, tmp_path)
