"""What the README shows, run."""

import re
import shlex
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import struct

import specjax
from specjax.cli.main import Command, find_command, parse_options
from specjax.drafters import Draft, Drafter
from specjax.drafts.shapes import Chain

README = (Path(__file__).parents[1] / "README.md").read_text()
TEXT_EXAMPLE, EXAMPLE, DRAFTER = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_example_of_text_in_and_out_runs(capsys) -> None:
    names: dict = {}
    exec(TEXT_EXAMPLE, names)
    out = capsys.readouterr().out
    assert names["answer"].text
    assert "\n\n" not in names["answer"].text
    printed = f"{names['answer'].text}\n{names['answer'].statistics.acceptance_length}\n"
    assert out.startswith(printed + names["answer"].text)  # and what was streamed
    assert len(out) > len(printed) + 60


def test_the_python_example_runs(capsys) -> None:
    exec(EXAMPLE, {})
    text, acceptance_length = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert text.startswith("class Queue:\n")
    assert float(acceptance_length) > 1


def test_the_drafter_of_the_readme_is_lossless(target) -> None:
    names = {"struct": struct, "jnp": jnp, "Chain": Chain, "Draft": Draft, "Drafter": Drafter}
    exec(DRAFTER, names)
    prompts = [[1, 4, 2, 4, 2, 7], [3, 5, 0, 0, 0, 0]]
    plain = specjax.generate(target, None, prompts, [6, 2], max_new_tokens=40)
    drafted = specjax.generate(target, names["RepeatLast"](), prompts, [6, 2], max_new_tokens=40)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)


def test_every_command_line_is_one_that_the_command_line_takes() -> None:
    lines = [
        line
        for block in re.findall(r"```bash\n(.*?)```", README.replace("\\\n", " "), re.DOTALL)
        for line in block.splitlines()
    ]
    commands = [shlex.split(line, comments=True)[3:] for line in lines if line.startswith("python -m specjax ")]
    assert len(commands) > 15
    for words in commands:
        name, command, options = find_command(words)
        assert isinstance(command, Command), words
        parse_options(command.config, options, prog=name)


def test_every_command_and_file_that_is_named_exists() -> None:
    root = Path(__file__).parents[1]
    for name in set(re.findall(r"configs/\w+\.yaml|tests/\w+\.py|docs/\w+\.png|specjax/[\w/]+\.py", README)):
        assert (root / name).is_file(), name
    targets = set(re.findall(r"make (?:PYTHON=\S+ )?([a-z]+)", README)) & {"demo", "test", "lint", "assets"}
    makefile = (root / "Makefile").read_text()
    assert all(f"\n{name}:" in makefile for name in targets)
