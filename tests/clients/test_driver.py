"""Tests of what runs real programs, without any of them."""

from pathlib import Path
from typing import Any

import pytest

from tests.clients import programs
from tests.clients.expectations import NOTES, fault_of
from tests.clients.programs import Program, UnavailableError
from tests.clients.scripted import THOUGHT

ANSWERS = [" ".join(parts) for parts in NOTES.answers]
RUNS = [{"name": name} for name in NOTES.names]


@pytest.mark.parametrize(
    ("runs", "answers", "fault"),
    [
        (RUNS, ANSWERS, ""),
        (RUNS[:1], ANSWERS, "the tool ran with [{'name': 'alpha'}]"),
        ([*RUNS, RUNS[0]], ANSWERS, "the tool ran with"),
        (RUNS, ANSWERS[:3], "the answers are"),
        (RUNS, ["", *ANSWERS[1:]], "the answers are"),
        (RUNS, [THOUGHT + ANSWERS[0], *ANSWERS[1:]], "the answers are"),
        (RUNS, ["Sunny.", *ANSWERS[1:]], "the answers are ['Sunny.'"),
    ],
)
def test_a_conversation_that_went_wrong_is_a_fault(runs: Any, answers: Any, fault: str) -> None:
    conversation = {"runs": runs, "answers": answers}
    assert fault in fault_of("chat", conversation)
    assert bool(fault) == bool(fault_of("chat", conversation))
    is_wrong = bool(fault) and not (len(answers) == len(ANSWERS) and all(answers) and runs == RUNS)
    assert is_wrong == bool(fault_of("chat", conversation, is_model=True))


def test_an_error_is_a_fault() -> None:
    assert fault_of("chat", {"error": "no server"}) == "chat: no server"


def test_a_program_that_cannot_be_had_is_unavailable(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(programs, "ENVIRONMENTS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    program = Program("node", "node.mjs", npm=("nothing@1.0.0",))
    with pytest.raises(UnavailableError, match="there is no npm"):
        program.install()
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho the registry does not answer >&2\nexit 1\n")
    npm.chmod(0o755)
    with pytest.raises(UnavailableError, match="npm installs nothing: the registry does not"):
        program.install()
    npm.write_text("#!/bin/sh\nexit 0\n")
    program.environment.mkdir()
    program.install()
    npm.unlink()
    program.install()  # it is installed


def test_a_program_that_fails_is_no_success(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(programs, "ENVIRONMENTS", tmp_path / "environments")
    monkeypatch.setattr(programs, "SESSIONS", tmp_path / "sessions")
    (tmp_path / "sessions").mkdir()
    session = tmp_path / "sessions" / "it.py"
    program = Program("it", "it.py", npm=("nothing@1.0.0",))
    session.write_text("import sys\nsys.exit('no server')")
    with pytest.raises(AssertionError, match="no server"):
        program.run("http://127.0.0.1:1", "tiny", tmp_path)
    session.write_text("import sys, json\nprint(json.dumps({'a': sys.argv[1:]}))")
    assert program.run("http://127.0.0.1:1", "tiny", tmp_path) == {
        "a": ["http://127.0.0.1:1", "tiny"]
    }
