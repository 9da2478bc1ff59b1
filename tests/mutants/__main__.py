"""``python -m tests.mutants [NAME …]``, from the root of the repository: see `--help`."""

import argparse
import sys
import time
from pathlib import Path

from tests.mutants.catalogue import CATALOGUE
from tests.mutants.trial import table_of, try_all

TABLE = Path(__file__).parent / "table.md"
_INTRODUCTION = """\
# Mutants

Each is one line of the library, changed. The tests of `make test` must notice: the named test fails with the change and passes
without it. Written by `python -m tests.mutants --write`. The seconds are those of a run of pytest, its start included.

"""


def main() -> int:
    """Try the mutants that are named, or all; return 0 where all are killed, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=main.__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="of mutants in tests/mutants/catalogue.py; none: all",
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are tried at a time (1)")
    parser.add_argument(
        "--write", action="store_true", help="write tests/mutants/table.md; only with all mutants"
    )
    arguments = parser.parse_args()
    by_name = {mutant.name: mutant for mutant in CATALOGUE}
    if unknown := sorted(set(arguments.names) - set(by_name)):
        parser.error(f"no mutant is called {', '.join(unknown)}: see tests/mutants/catalogue.py")
    if arguments.write and arguments.names:
        parser.error("--write: the table is of all mutants; give no NAME")
    start, trials = time.perf_counter(), []
    for trial in try_all(
        [by_name[name] for name in arguments.names] or CATALOGUE, max(1, arguments.jobs)
    ):
        print(trial, flush=True)
        if trial.problem:
            print(trial.outcome.text, flush=True)
        trials.append(trial)
    table = table_of(trials)
    alive = [trial.mutant.name for trial in trials if trial.problem]
    summary = (
        f"{len(trials) - len(alive)} of {len(trials)} mutants killed in"
        f" {(time.perf_counter() - start) / 60:.0f} min"
    )
    print(f"\n{table}\n{summary}{': not ' + ', '.join(alive) if alive else ''}")
    if arguments.write:
        TABLE.write_text(f"{_INTRODUCTION}{table}\n{summary}, {arguments.jobs} at a time.\n")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
