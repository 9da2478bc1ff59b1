"""The command ``python -m tests.mutants [NAME …]``, run from the root of the repository."""

import argparse
import sys
import time
from pathlib import Path

from tests.mutants.catalogue import CATALOGUE
from tests.mutants.trial import table_of, try_all

TABLE = Path(__file__).parent / "table.md"
_INTRODUCTION = """\
# Mutants

Each mutant changes one line of the library, or a few consecutive lines. The tests of `make test`
must notice the change: the named test fails with it and passes without it. The seconds are the
duration of a run of pytest, including its start. `python -m tests.mutants --write` writes it.

"""


def main() -> int:
    """Try the named mutants, or all of them; return 0 if all are killed, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=main.__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="mutants of tests/mutants/catalogue.py (default: all)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants to try at a time (default: 1)")
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
