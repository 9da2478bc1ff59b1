"""End a run of tests in time, and say which tests it has left out.

A pytest plugin, loaded by ``conftest.py``. A check that is stopped from outside after a fixed time
says nothing at all. With ``--most-seconds`` no test begins later than that: the rest is skipped,
and the last lines of the output count it. With ``--begin-at``, the first file is another one for
another text, such as the name of a commit, so that no test is left out every time:

    python -m pytest -n 2 --most-seconds 3000 --begin-at "$(git rev-parse HEAD)"
"""

import hashlib
import time
from collections import defaultdict

import pytest

REASON = "not run: the time of the whole run is over"

_start = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--most-seconds",
        type=float,
        metavar="SECONDS",
        help="skip the tests that would begin later, and say how many at the end",
    )
    parser.addoption(
        "--begin-at",
        metavar="TEXT",
        help="begin with a file that depends on TEXT, and end with the one before it",
    )


@pytest.hookimpl(trylast=True)  # after the tests of other tiers have been deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (text := config.getoption("--begin-at")) is None:
        return
    by_file: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_file[item.nodeid.partition("::")[0]].append(item)
    files = list(by_file.values())
    first = int(hashlib.sha256(text.encode()).hexdigest(), 16) % max(len(files), 1)
    items[:] = [item for file in files[first:] + files[:first] for item in file]


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    most = item.config.getoption("--most-seconds")
    if most is not None and time.monotonic() - _start > most:
        pytest.skip(REASON)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    left_out = [report.nodeid for report in skipped if REASON in str(report.longrepr)]
    if left_out:
        terminalreporter.write_line(
            f"{len(left_out)} TESTS WERE NOT RUN, because"
            f" {config.getoption('--most-seconds'):g} seconds were over. The first and the last:"
            f" {left_out[0]}, {left_out[-1]}"
        )
