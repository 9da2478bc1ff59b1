"""Trials of mutants: runs of tests on a mutated copy of the library, and what counts as a kill."""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import TypeVar

from tests.mutants.mutant import Mutant

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
NOT_IN_MAKE_TEST = ("full", "thorough", "browser")
"""Markers of tests that `make test` leaves out."""

TIME_LIMIT = 300.0
"""The most seconds that one run of pytest may take.

A mutant that runs into the limit does not count as killed: a test must fail.
"""

_COPIED = ("specjax", "tests", "pyproject.toml")
_FAILED = re.compile(r"^FAILED (.+?)(?: - .*)?$", re.MULTILINE)
_ERROR = re.compile(r"^ERROR \S*\.py\b", re.MULTILINE)  # and no line that a test has logged


@dataclass(frozen=True)
class Outcome:
    """The result of one run of pytest.

    Attributes:
        code: the exit code; None if the run took longer than `TIME_LIMIT`.
        text: the output.
        seconds: the duration of the run.
    """

    code: int | None
    text: str
    seconds: float = 0.0

    @property
    def failed(self) -> str | None:
        """Return the first test that failed, if the run is a kill.

        An error while tests are collected, or in a fixture, is no kill: the mutated code does not
        run at all.
        """
        first = _FAILED.search(self.text)
        return first[1] if self.code == 1 and first and not _ERROR.search(self.text) else None


@dataclass
class Copy:
    """A copy of the library and its tests, which mutants are applied to.

    Attributes:
        path: the folder of the copy.
        source: the folder of the repository.
        unchanged: the results of test runs without a mutant, by the tests that ran.
    """

    path: Path
    source: Path = ROOT
    unchanged: dict[tuple[str, ...], Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _COPIED:
            if (self.source / name).is_dir():
                shutil.copytree(self.source / name, self.path / name)
            else:
                shutil.copy2(self.source / name, self.path / name)

    @property
    def fast(self) -> str:
        """Return the marker expression that selects the tests of `make test`.

        It names registered markers only, because pytest refuses others.
        """
        settings = tomllib.loads((self.path / "pyproject.toml").read_text())
        registered = settings["tool"]["pytest"]["ini_options"]["markers"]
        names = {line.partition(":")[0].strip() for line in registered}
        return " and ".join(f"not {name}" for name in NOT_IN_MAKE_TEST if name in names)

    def run(self, tests: Sequence[str], keep_bytecode: bool = False) -> Outcome:
        """Run ``tests`` up to the first failure, on the copy as it is now."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST_", "XLA_FLAGS", "JAX_"))
        }
        environment = inherited | {"PYTHONPATH": str(self.path), "COLUMNS": "300"}
        if not keep_bytecode:  # the next run must not load the bytecode of a mutated file
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
        options = ["-x", "-q", "-rfE", "--color=no", "-p", "no:cacheprovider", "-m", self.fast]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=self.path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIME_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return Outcome(None, str(error.stdout or ""), time.perf_counter() - start)
        return Outcome(done.returncode, done.stdout, time.perf_counter() - start)

    def check(self, mutants: Sequence[Mutant]) -> None:
        """Run the tests of all ``mutants`` together, without any mutant.

        If all tests pass, this one run stands for the runs of the single mutants.
        """
        outcome = self.run(
            sorted({test for mutant in mutants for test in mutant.tests}), keep_bytecode=True
        )
        if outcome.code == 0:
            self.unchanged.update({mutant.tests: outcome for mutant in mutants})

    def try_mutant(self, mutant: Mutant) -> "Trial":
        """Run the mutant's tests with it, and before that without it unless that has been done.

        The mutant is removed from the copy afterwards.
        """
        if mutant.tests not in self.unchanged:
            self.unchanged[mutant.tests] = self.run(mutant.tests, keep_bytecode=True)
        before = self.unchanged[mutant.tests]
        if before.code != 0:
            return Trial(
                mutant, before, f"its tests do not pass without it (exit code {before.code})"
            )
        mutant.apply(self.path)
        try:
            outcome = self.run(mutant.tests)
        finally:
            shutil.copy2(self.source / mutant.file, self.path / mutant.file)
        if outcome.failed:
            return Trial(mutant, outcome)
        if outcome.code == 0:
            return Trial(mutant, outcome, "survives")
        how = (
            f"took more than {TIME_LIMIT:.0f} s"
            if outcome.code is None
            else f"ended with exit code {outcome.code}"
        )
        return Trial(mutant, outcome, f"no test fails: the run {how}, or with an error")


@dataclass(frozen=True)
class Trial:
    """The result of trying a mutant.

    Attributes:
        mutant: the mutant.
        outcome: the run with the mutant, or the run without it if that one failed.
        problem: why the mutant is not killed; None if it is killed.
    """

    mutant: Mutant
    outcome: Outcome
    problem: str | None = None

    def __str__(self) -> str:
        end = (
            f"killed by {self.outcome.failed}"
            if self.problem is None
            else f"NOT KILLED: {self.problem}"
        )
        return f"{self.mutant.name} ({self.outcome.seconds:.0f} s): {end}"


def try_all(mutants: Sequence[Mutant], jobs: int = 1) -> Iterator[Trial]:
    """Try ``mutants``, several at a time, and yield each result as soon as it is there.

    Each of the ``jobs`` works in its own copy of the repository.

    First the tests of each file run together without any mutant, which saves starts of pytest. If
    one of them fails, the tests of each mutant run alone.
    """
    with TemporaryDirectory(prefix="specjax-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        unchanged: dict[tuple[str, ...], Outcome] = {}
        copies: SimpleQueue[Copy] = SimpleQueue()
        for job in range(jobs):
            path = Path(folder) / str(job)
            path.mkdir()
            copies.put(Copy(path, unchanged=unchanged))

        def in_some_copy(action: Callable[[Copy], T]) -> T:
            copy = copies.get()
            try:
                return action(copy)
            finally:
                copies.put(copy)

        by_file: dict[str, list[Mutant]] = {}
        for mutant in mutants:
            by_file.setdefault(mutant.tests[0].partition("::")[0], []).append(mutant)
        for checked in [
            pool.submit(in_some_copy, partial(Copy.check, mutants=group))
            for group in by_file.values()
        ]:
            checked.result()
        trials = [
            pool.submit(in_some_copy, partial(Copy.try_mutant, mutant=mutant)) for mutant in mutants
        ]
        for future in as_completed(trials):
            yield future.result()


def table_of(trials: Iterable[Trial], root: Path = ROOT) -> str:
    """Return the ``trials`` as a table in Markdown, sorted by file and line."""
    rows = []
    for trial in trials:
        mutant = trial.mutant
        line = mutant.line_in((root / mutant.file).read_text())
        end = f"`{trial.outcome.failed}`" if trial.problem is None else trial.problem
        seconds = f"{trial.outcome.seconds:.0f}"
        cells = [mutant.name, mutant.breaks, f"`{mutant.file}:{line}`", end, seconds]
        rows.append((mutant.file, line, cells))
    rows.sort(key=lambda row: row[:2])
    lines = ["| Mutant | What is wrong | Line | Killed by | Seconds |", "|---|---|---|---|---:|"]
    lines += ["| " + " | ".join(cells) + " |" for _, _, cells in rows]
    return "\n".join(lines) + "\n"
