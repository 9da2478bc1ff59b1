"""A mutant: one line of the library, changed."""

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A change of one line that makes the library wrong, and the tests that must fail with it.

    Attributes:
        name: short, unique.
        file: from the root of the repository.
        old: the line, without indentation. Exactly one line of the file reads so.
        new: what stands in its place, with the same indentation.
        tests: pytest's node ids, of tests that `make test` runs.
        breaks: what is wrong then, in a sentence.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    breaks: str

    def line_in(self, source: str) -> int:
        """Return the number of the line in ``source``, from 1.

        Raises:
            ValueError: no line, or more than one, reads as `old`.
        """
        numbers = [number for number, line in enumerate(source.splitlines(), 1) if line.strip() == self.old]
        if len(numbers) != 1:
            where = f"lines {numbers}" if numbers else "no line"
            raise ValueError(f"mutant {self.name}: {where} of {self.file} read {self.old!r}: choose a line that is there once")
        return numbers[0]

    def applied_to(self, source: str) -> str:
        """Return ``source`` with the line changed.

        Raises:
            ValueError: as in `line_in`; or the line does not change, or is no Python afterwards.
        """
        number = self.line_in(source)
        if self.new == self.old or len(self.new.splitlines()) != 1:
            raise ValueError(f"mutant {self.name}: {self.new!r}: give one line that differs from the old one")
        lines = source.splitlines(keepends=True)
        lines[number - 1] = lines[number - 1].replace(self.old, self.new)
        changed = "".join(lines)
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise ValueError(f"mutant {self.name}: {self.new!r}: {self.file} is no Python with it: {error}") from error
        return changed

    def apply(self, root: Path) -> None:
        """Change the file below ``root``."""
        path = root / self.file
        path.write_text(self.applied_to(path.read_text()))
