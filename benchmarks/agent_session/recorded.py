"""Turns of a session on code, from the commits of a repository.

    python -m benchmarks.agent_session.recorded --repository . --commit d78db968 \
        --python .venv/bin/python --output runs/turns/specjax.json

A turn is what an agent reads and writes for a commit. It reads the places of a file that it will
change. It writes the edits, reads the log of a test, and shows the new text of the places. All
texts are real: git has the files and edits, and the logs are those of the tests at the commit.

The commits: the newest ones, up to a given one, that are no merge and change a Python file. Of
each, the first file in git's order counts, and the first three places in it.

The test: the first test file that the commit changes, otherwise the one that is named after the
changed file. A commit without such a file has no log.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

import tyro

from specjax.errors import InputError
from specjax.files import write_text

MOST_PLACES = 3
READ_LINES = 60
"""The number of lines that are read around each place."""
SHOWN_LINES = 12
"""The number of lines that are shown around each place after the edit."""
LOG_LINES = 40
"""The number of lines of a log that count: its last ones."""
_HUNK = re.compile(r"^@@ .*?@@.*\n", re.MULTILINE)


@dataclass(frozen=True)
class RecordedConfig:
    """Write the turns of a session.

    Attributes:
        repository: the directory of a git repository, with or without a work tree.
        commit: the newest commit.
        output: the file to write, in JSON.
        turns: the number of commits.
        python: the Python that runs the tests, with pytest and what the repository needs. Empty:
            no tests are run.
        source: the directory in the repository that holds its packages.
        seconds: the time after which a test is stopped. The log is what it has printed until then.
        tests: the number of newest turns whose test is run.
    """

    repository: str
    commit: str
    output: str
    turns: int = 40
    python: str = ""
    source: str = "."
    seconds: float = 30.0
    tests: int = 1000


@dataclass(frozen=True)
class Turn:
    """The texts that an agent reads and writes for a commit.

    Attributes:
        commit: the hash of the commit.
        subject: the first line of its message: the request.
        path: the file.
        read: the places of the file before the edits.
        edits: what the agent writes: a unified diff without the lines that git computes.
        log: the end of the test's log; empty if there is none.
        log_kind: "whole", "stopped" by the time limit, or "none".
        shown: what the agent writes at the end: the places of the file after the edits.
    """

    commit: str
    subject: str
    path: str
    read: str
    edits: str
    log: str
    log_kind: str
    shown: str


def git(repository: str | Path, *arguments: str) -> bytes:
    """Return the output of a git command.

    Raises:
        InputError: The command fails.
    """
    command = ["git", "-C", str(repository), *arguments]
    result = subprocess.run(command, capture_output=True, check=False)
    if result.returncode:
        raise InputError(f"{' '.join(command)}: {result.stderr.decode(errors='replace').strip()}")
    return result.stdout


def choose_commits(repository: str | Path, commit: str, count: int) -> list[tuple[str, str]]:
    """Return the hashes of the chosen commits and the file of each, the oldest first."""
    chosen = []
    for line in git(repository, "log", "--no-merges", "--format=%H", commit).decode().split():
        changed = _changed(repository, line, "*.py")
        if changed:
            chosen.append((line, changed[0]))
        if len(chosen) == count:
            return chosen[::-1]
    raise InputError(
        f"repository={str(repository)!r}: {len(chosen)} commits change a Python file; give turns="
        f"{len(chosen)} or less"
    )


def _changed(repository: str | Path, commit: str, pattern: str) -> list[str]:
    arguments = "diff-tree", "-r", "--no-commit-id", "--diff-filter=M", "--name-only", commit
    return git(repository, *arguments, "--", pattern).decode().split("\n")[:-1]


def first_hunks(diff: str, count: int = MOST_PLACES) -> list[str]:
    """Return the first hunks of a unified diff of one file, without their ``@@`` lines.

    Examples:
        >>> from benchmarks.agent_session.recorded import first_hunks
        >>> first_hunks("--- a/x\\n+++ b/x\\n@@ -1 +1 @@\\n-a\\n+b\\n@@ -9 +9 @@ f\\n-c\\n+d\\n")
        ['-a\\n+b\\n', '-c\\n+d\\n']
    """
    return _HUNK.split(diff)[1 : count + 1]


def before_and_after(hunk: str) -> tuple[str, str]:
    """Return the lines of a hunk before and after the edit.

    Examples:
        >>> from benchmarks.agent_session.recorded import before_and_after
        >>> before_and_after(" a\\n-b\\n+c\\n")
        ('a\\nb\\n', 'a\\nc\\n')
    """
    lines = [line for line in hunk.splitlines(keepends=True) if not line.startswith("\\")]
    return (
        "".join(line[1:] for line in lines if line[0] != "+"),
        "".join(line[1:] for line in lines if line[0] != "-"),
    )


def read_turn(repository: str | Path, commit: str, path: str) -> Turn:
    """Return the turn of a commit, without a log."""

    def hunks(lines: int) -> list[str]:
        arguments = "show", "--format=", "--no-color", "--no-ext-diff", f"-U{lines}", commit
        return first_hunks(git(repository, *arguments, "--", path).decode(errors="replace"))

    subject = git(repository, "show", "-s", "--format=%s", commit).decode(errors="replace").strip()
    return Turn(
        commit=commit,
        subject=subject,
        path=path,
        read="...\n".join(before_and_after(hunk)[0] for hunk in hunks(READ_LINES)),
        edits="".join(f"@@\n{hunk}" for hunk in hunks(3)),
        log="",
        log_kind="none",
        shown="...\n".join(before_and_after(hunk)[1] for hunk in hunks(SHOWN_LINES)),
    )


def choose_test(repository: str | Path, commit: str, path: str) -> str | None:
    """Return the test file of a commit; None if there is none."""
    changed = _changed(repository, commit, "*test_*.py")
    if changed:
        return changed[0]
    name = PurePosixPath(path).stem.strip("_")
    files = git(repository, "ls-tree", "-r", "--name-only", commit).decode().split("\n")
    named = [file for file in files if PurePosixPath(file).name == f"test_{name}.py"]
    return named[0] if named else None


def run_test(
    repository: str | Path, commit: str, test: str, python: str, source: str, seconds: float
) -> tuple[str, str]:
    """Run a test file at a commit, in a temporary directory.

    Returns:
        The last lines of its log, and whether the log is "whole" or the test was "stopped".
    """
    with tempfile.TemporaryDirectory() as directory:
        with tarfile.open(fileobj=BytesIO(git(repository, "archive", commit))) as archive:
            archive.extractall(directory, filter="data")
        environment = {
            "HOME": directory,
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(directory, source)),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [python, "-u", "-m", "pytest", "-p", "no:cacheprovider", "--color=no", test]
        log = Path(directory, "log.of.test")
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            kind = "whole"
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                kind = "stopped"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        text = log.read_text(errors="replace").replace(directory, "/repository")
    lines = text.splitlines(keepends=True)[-LOG_LINES:]
    return "".join(lines), kind if "".join(lines).strip() else "none"


def read_session(config: RecordedConfig) -> list[Turn]:
    """Return all turns, the oldest first, with their logs."""
    turns = []
    chosen = choose_commits(config.repository, config.commit, config.turns)
    for index, (commit, path) in enumerate(chosen):
        turn = read_turn(config.repository, commit, path)
        test = choose_test(config.repository, commit, path)
        log, kind = "", "none"
        is_run = config.python and index >= len(chosen) - config.tests
        if test is not None and is_run:
            log, kind = run_test(
                config.repository, commit, test, config.python, config.source, config.seconds
            )
        turns.append(Turn(**(asdict(turn) | {"log": log, "log_kind": kind})))
        print(f"{commit[:8]} {path}: log of {test}: {kind}", flush=True)
    return turns


def write_turns(path: str | Path, turns: Sequence[Turn]) -> None:
    """Write turns as JSON."""
    write_text(Path(path), json.dumps([asdict(turn) for turn in turns], indent=1) + "\n")


def load_turns(path: str | Path) -> list[Turn]:
    """Read the turns that `write_turns` wrote."""
    return [Turn(**turn) for turn in json.loads(Path(path).read_text())]


def main(config: RecordedConfig) -> None:
    """Write the session."""
    write_turns(config.output, read_session(config))


if __name__ == "__main__":
    try:
        main(tyro.cli(RecordedConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
