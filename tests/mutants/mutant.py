"""A mutant: a line of the library, or a few consecutive lines, changed."""

import ast
import textwrap
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A change of one expression that makes the library wrong, and the tests that must then fail.

    Attributes:
        name: a short name, unique in the catalogue.
        file: the path from the root of the repository.
        old: the line, or consecutive lines, without common indentation. They occur exactly once in
            the file.
        new: the lines that replace them, indented in the same way.
        tests: the pytest node ids of tests that `make test` runs.
        breaks: a sentence that says what the change breaks.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    breaks: str

    def line_in(self, source: str) -> int:
        """Return the number of the first of the old lines in ``source``, from 1.

        Raises:
            ValueError: the old lines occur nowhere, or more than once.
        """
        lines, count = source.splitlines(), len(self.old.split("\n"))
        numbers = [
            start + 1
            for start in range(len(lines) - count + 1)
            if textwrap.dedent("\n".join(lines[start : start + count])) == self.old
        ]
        if len(numbers) != 1:
            where = f"lines {numbers}" if numbers else "no line"
            raise ValueError(
                f"mutant {self.name}: {where} of {self.file} read {self.old!r}: choose lines that"
                " occur once"
            )
        return numbers[0]

    def applied_to(self, source: str) -> str:
        """Return ``source`` with the lines changed.

        Raises:
            ValueError: as in `line_in`; or nothing changes, or the result is not valid Python.
        """
        number = self.line_in(source)
        if self.new == self.old or not self.new.strip():
            raise ValueError(
                f"mutant {self.name}: {self.new!r}: give lines that differ from the old ones"
            )
        lines = source.splitlines()
        first = lines[number - 1]
        indentation = first[: len(first) - len(first.lstrip())]
        new_lines = textwrap.indent(self.new, indentation).splitlines()
        lines[number - 1 : number - 1 + len(self.old.split("\n"))] = new_lines
        changed = "\n".join(lines) + "\n"
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise ValueError(
                f"mutant {self.name}: {self.new!r}: {self.file} is not valid Python with it:"
                f" {error}"
            ) from error
        return changed

    def apply(self, root: Path) -> None:
        """Change the file below ``root``."""
        path = root / self.file
        path.write_text(self.applied_to(path.read_text()))
