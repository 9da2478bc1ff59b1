"""Check the README: it is short, its code runs, and everything it names exists."""

import re

import pytest

from tests import documents
from tests.documents import README, ROOT

TEXT = README.read_text()


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 250


def test_its_first_code_is_among_its_first_lines() -> None:
    first = min(block.line for block in documents.blocks(README, "bash", "python"))
    assert first <= 30


@pytest.mark.full
@pytest.mark.usefixtures("either_assets")
def test_its_python_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert documents.run_python(README)


def test_every_command_line_is_one_that_the_command_line_takes() -> None:
    commands = documents.command_lines(README)
    assert len(commands) >= 5
    for words in commands:
        documents.check_command_line(words)


def test_every_link_leads_somewhere() -> None:
    documents.check_links(README)


@pytest.mark.parametrize(
    "name",
    sorted(
        set(re.findall(r"(?:configs|tests|docs|specjax|benchmarks|notebooks)/[\w/.-]+\.\w+", TEXT))
    ),
)
def test_every_file_that_is_named_exists(name: str) -> None:
    assert (ROOT / name).is_file()


def test_every_target_of_make_that_is_named_exists() -> None:
    named = set(re.findall(r"make (?:PYTHON=\S+ )?([a-z-]+)", "\n".join(code_of(TEXT))))
    makefile = (ROOT / "Makefile").read_text()
    assert named
    assert not [name for name in named if f"\n{name}:" not in makefile]


def code_of(text: str) -> list[str]:
    """Return the code blocks, and the commands of make between backticks."""
    return re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) + re.findall(r"`(make [^`\n]+)`", text)
