"""Check the wording of the library, its tests, benchmarks and tools.

Docstrings begin with a subject or a verb, and variables say what they hold.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import prose

HELD = [prose.ROOT / folder for folder in ("specjax", "benchmarks", "release", "tests", "docs")]

EXAMPLE = '''
"""Of a module."""

LIMIT = 3  # why

class Row:
    """A row."""

    found: int

    def __init__(self, known):
        """Return nothing."""
        self._own = self.put = known

def fill(rows):
    """Fill rows."""
    for each in rows:
        print([it for it in each])  # noqa: T201
'''


class PlainnessOfFile(NamedTuple):
    """The path of a file, its docstrings with their lines, and its local names."""

    path: str
    docstrings: list[tuple[int, str]]
    names: list[tuple[str, str]]


@pytest.fixture(scope="module")
def plainness() -> list[PlainnessOfFile]:
    """Return every file, parsed once, which takes most of the time."""
    code = []
    for file in prose.files(HELD):
        module = ast.parse(file.read_text())
        docstrings = [(getattr(node, "lineno", 1), text) for node, text in prose.docstrings(module)]
        path = str(file.relative_to(prose.ROOT))
        code.append(PlainnessOfFile(path, docstrings, prose.local_names(module)))
    return code


@pytest.fixture
def example(tmp_path) -> Path:
    path = tmp_path / "example.py"
    path.write_text(EXAMPLE)
    return path


def test_first_words_and_local_names_are_found(example) -> None:
    counts = prose.Counts()
    counts.add(example)
    assert counts.openers == ["of", "a", "fill", "return"]
    assert counts.names == [
        *(("Row.__init__", "self"), ("Row.__init__", "known"), ("Row.__init__", "own")),
        *(("fill", "rows"), ("fill", "each"), ("fill", "it")),
    ]


def test_comments_and_code_are_counted_without_pragmas_and_docstrings(example) -> None:
    counts = prose.Counts()
    counts.add(example)
    assert (counts.comments, counts.code, counts.lines, counts.long) == (1, 8, 12, 0)


def test_the_table_has_a_line_for_each_package(capsys) -> None:
    prose.main([str(prose.ROOT / "specjax" / "wire"), str(prose.ROOT / "specjax" / "drafts")])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "docstrings"
    assert [row.split()[0] for row in rows] == ["specjax/drafts", "specjax/wire", "total"]


def test_the_code_has_no_docstring_that_opens_with_part_of_a_sentence(plainness) -> None:
    errors = []
    for path, docstrings, _ in plainness:
        for line, text in docstrings:
            if prose.first_word(text) in prose.OPENERS:
                errors.append(f"{path}:{line}: {text.splitlines()[0]}")
    assert not errors, "begin with a verb, or name the thing:\n" + "\n".join(errors)


def test_the_code_has_no_variable_with_a_banned_name(plainness) -> None:
    errors = []
    for path, _, names in plainness:
        for scope, name in names:
            stays = (path, name) in prose.FORMATS or (
                scope.rpartition(".")[2],
                name,
            ) in prose.KEYWORDS
            if name in prose.BANNED and not stays:
                errors.append(f"{path}: {scope}: {name}")
    assert not errors, "say what the variable holds:\n" + "\n".join(errors)
