"""The last lines of `make test-clients`: which programs were tested, and which were not and why."""

from typing import Any

import pytest

TEST = "test_a_program_holds_a_conversation_with_tools"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a line for each program."""
    lines = []
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if TEST in report.nodeid:
                program = report.nodeid.rpartition("[")[2].rstrip("]")
                lines.append(f"{program:<18} {outcome:<8} {_details(report)}")
    if lines:
        terminalreporter.section("programs that talk to the server")
        for line in lines:
            terminalreporter.write_line(line)


def _details(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return "; ".join(str(value) for _, value in report.user_properties)
