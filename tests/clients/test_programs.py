"""Tests with real programs against a running server: `make test-clients`.

Without `MODEL` an engine that follows rules answers them; with it, a model does.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients import recording
from tests.clients.expectations import Counts, counts_of, fault_of
from tests.clients.programs import PROGRAMS, Program, UnavailableError
from tests.clients.scripted import ScriptedEngine
from tests.clients.written import written_for
from tests.serving.http.made_up import running
from tests.serving.http.process import serving

MODEL = os.environ.get("MODEL", "")
SHARE = 0.8
"""The share of calls for which a model must choose the right tool."""
RECORDS = bool(os.environ.get("RECORD"))

pytestmark = pytest.mark.clients


@dataclass(frozen=True)
class _Answering:
    """A running server, and what records its requests."""

    address: str
    recorder: recording.Recorder | None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Answering]:
    """Run the server of all programs."""
    if MODEL:
        log = tmp_path_factory.mktemp("server") / "log"
        options = ("--target", MODEL, "--served-model-name", "tiny", "--rows", "2")
        with serving(log, *options, is_warm=False) as process:
            yield _Answering(process.address, None)
        return
    recorders: list[recording.Recorder] = []

    def recorded(app: Any) -> recording.Recorder:
        recorders.append(recording.Recorder(app))
        return recorders[0]

    with running(ScriptedEngine(), around=recorded) as (_, (host, port)):
        yield _Answering(f"http://{host}:{port}", recorders[0])


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_holds_a_conversation_with_tools(
    program: Program,
    server: _Answering,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    try:
        program.install()
    except UnavailableError as error:
        pytest.skip(f"NOT TESTED: {error}")
    answering = MODEL or "an engine that follows rules"
    record_property("versions", f"{program.versions}, answered by {answering}")
    if server.recorder:
        server.recorder.requests.clear()
    conversation = written_for(program.name) if MODEL else None
    report = program.run(server.address, "tiny", tmp_path, conversation)
    assert report
    if conversation is not None:
        _check_model(report, conversation, record_property)
        return
    faults = [fault for title, record in report.items() if (fault := fault_of(title, record))]
    count = f"{len(report) - len(faults)} of {len(report)} conversations"
    record_property("conversations", f"{count}: {'; '.join(report)}")
    assert not faults, "\n".join(faults)
    if RECORDS and server.recorder:
        recording.write_bodies(program.name, program.versions, server.recorder.requests)


def _check_model(
    report: Mapping[str, Any],
    conversation: Mapping[str, Any],
    record_property: Callable[[str, object], None],
) -> None:
    """Check that conversations with tools end without an error, and most calls are right.

    Without tools a model may be asked for JSON that nothing but its prompt demands: an answer that
    is none counts as a wrong one.
    """
    counts = {title: counts_of(title, record, conversation) for title, record in report.items()}
    total = sum(counts.values(), Counts())
    record_property("counts", total.line())
    faults = []
    for title, record in report.items():
        error = record.get("error", "")
        print(f"{title}: {counts[title].line()} {error}")
        if error and counts[title].calls:
            faults.append(f"{title}: {error}")
    assert not faults, "\n".join(faults)
    assert total.tools >= SHARE * total.calls, json.dumps(report, indent=1)
