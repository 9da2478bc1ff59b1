"""Measure what each test costs, and name the tests that are too slow for their tier.

A pytest plugin, loaded by ``conftest.py``. The cost of a test is the CPU time of its process and of
the child processes that ended while it ran, set-up and tear-down included, and the number of
programs that JAX traced, lowered, compiled, or read from the cache for it. The cost of a shared
fixture, of a module or of the session, counts for the first test that asks for it. It is also
recorded as ``shared``, and does not make a test too slow.

    python -m pytest -n 2 --costs costs.json       # one record per test, and a table by folder
"""

import json
import re
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

MOST_CPU_SECONDS = 2.0
"""The most that a test of ``make test`` may cost. A slower one carries a marker of `SLOW`."""

MOST_OF_FULL_TIER = 20.0
"""The most that a test marked ``full`` may cost. A slower one carries a marker of `SLOW`, too."""

SLOW = ("thorough", "browser", "clients", "kills_alone", "represents")
"""Markers of tests that may cost any time: of other tiers, or without a cheaper replacement."""

README = Path(__file__).parents[1] / "README.md"

_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
_COUNTS = {
    "/jax/compilation_cache/cache_hits": "read",
    "/jax/compilation_cache/cache_misses": "missed",
}

_totals: dict[str, float] = defaultdict(float)


def _count_duration(event: str, seconds: float, **_: object) -> None:
    if phase := _PHASES.get(event):
        _totals[phase] += seconds
        _totals["programs"] += phase == "compiling"


def _count_event(event: str, **_: object) -> None:
    if name := _COUNTS.get(event):
        _totals[name] += 1


jax.monitoring.register_event_duration_secs_listener(_count_duration)
jax.monitoring.register_event_listener(_count_event)


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _snapshot() -> dict[str, float]:
    return {"cpu": _cpu_seconds(), **_totals}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--beside-readme",
        action="store_true",
        help="print the time of the run beside the one README promises",
    )
    parser.addoption(
        "--costs",
        metavar="FILE",
        help="write what each test cost to FILE, as JSON, and print a table by folder",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Summary(config.getoption("--costs")), "costs-summary")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEFORE] = _snapshot()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    before = _cpu_seconds()
    try:
        return (yield)
    finally:
        _totals["shared"] += _cpu_seconds() - before


_BEFORE = pytest.StashKey[dict[str, float]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if call.when == "teardown" and item.stash.get(_BEFORE, None) is not None:
        before, after = item.stash[_BEFORE], _snapshot()
        cost = {name: round(value - before.get(name, 0), 3) for name, value in after.items()}
        report.user_properties.append(("cost", cost))
        report.user_properties.append(("is full", item.get_closest_marker("full") is not None))
        report.user_properties.append(
            ("may be slow", any(item.get_closest_marker(name) for name in SLOW))
        )
    return report


class _Summary:
    """The costs that the workers report, and their summary."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._start = time.monotonic()
        self._costs: dict[str, dict[str, float]] = {}
        self._too_slow: list[tuple[float, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if report.when != "teardown" or "cost" not in properties:
            return
        cost = self._costs[report.nodeid] = properties["cost"]
        seconds = cost["cpu"] - cost.get("shared", 0.0)
        most = MOST_OF_FULL_TIER if properties["is full"] else MOST_CPU_SECONDS
        if seconds > most and not properties["may be slow"]:
            self._too_slow.append((seconds, report.nodeid))

    def pytest_terminal_summary(self, terminalreporter, config: pytest.Config) -> None:
        if self._file:
            Path(self._file).write_text(json.dumps(self._costs, indent=0))
            for line in _table(self._costs):
                terminalreporter.write_line(line)
        for line in too_slow(self._too_slow):
            terminalreporter.write_line(line)
        if config.getoption("--beside-readme"):
            terminalreporter.write_line(
                beside_readme(time.monotonic() - self._start, README.read_text())
            )


def too_slow(tests: list[tuple[float, str]]) -> list[str]:
    """Return a line for each test that costs more than its tier allows, the slowest first."""
    if not tests:
        return []
    lines = [f"{seconds:6.1f}  {test}" for seconds, test in sorted(tests, reverse=True)]
    return [
        (
            f"{len(tests)} tests took more than {MOST_CPU_SECONDS:g} CPU seconds, or"
            f" {MOST_OF_FULL_TIER:g} in the full tier: make each cheaper, mark it `full` or"
            " `thorough`, or mark it `kills_alone` or `represents` where no cheaper test kills a"
            " mutant or covers a contract:"
        ),
        *lines,
    ]


def beside_readme(seconds: float, readme: str) -> str:
    """Return a line with the time of this run and the time that README says of ``make test``."""
    promise = re.search(r"^make test .*?(\d+) minutes", readme, re.MULTILINE)
    if promise is None:
        raise ValueError(
            "README.md: the line of `make test` names no minutes; write for example `make test  # 8"
            " minutes`"
        )
    return f"make test took {seconds / 60:.1f} minutes; README says {promise[1]} on two idle cores"


def _table(costs: dict[str, dict[str, float]]) -> list[str]:
    """Return the lines of a table with one folder a line, the costliest first."""
    folders: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for test, cost in costs.items():
        path = Path(test.partition("::")[0])
        folder = "/".join(path.parts[:2]) if len(path.parts) > 2 else str(path.parent)
        for name in (folder, "all"):
            folders[name]["tests"] += 1
            for column, value in cost.items():
                folders[name][column] += value
    columns = ("tests", "cpu", "tracing", "lowering", "compiling", "programs", "read")
    rows = sorted(folders.items(), key=lambda item: -item[1]["cpu"])
    lines = [f"{'folder':<24}" + "".join(f"{column:>11}" for column in columns)]
    return lines + [
        f"{folder:<24}" + "".join(f"{cost[column]:>11.0f}" for column in columns)
        for folder, cost in rows
    ]
