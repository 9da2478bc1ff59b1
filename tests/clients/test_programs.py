"""Tests with real programs against a running server: `make test-clients`.

Without `MODEL` an engine that follows rules answers them; with it, a model does.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients import recording
from tests.clients.expectations import fault_of
from tests.clients.programs import PROGRAMS, Program, UnavailableError
from tests.clients.scripted import ScriptedEngine
from tests.serving.http.made_up import running
from tests.serving.http.process import serving

MODEL = os.environ.get("MODEL", "")
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
    report = program.run(server.address, "tiny", tmp_path)
    assert report
    faults = [
        fault
        for title, conversation in report.items()
        if (fault := fault_of(title, conversation, is_model=bool(MODEL)))
    ]
    count = f"{len(report) - len(faults)} of {len(report)} conversations"
    record_property("conversations", f"{count}: {'; '.join(report)}")
    assert not faults, "\n".join(faults)
    if RECORDS and server.recorder:
        recording.write_bodies(program.name, program.versions, server.recorder.requests)
