"""Tests of what runs real programs, without any of them."""

from pathlib import Path
from typing import Any

import pytest

from tests.clients import programs
from tests.clients.expectations import NOTES, Counts, counts_of, fault_of
from tests.clients.programs import Program, UnavailableError
from tests.clients.scripted import THOUGHT
from tests.clients.written import TURNS, written_for

ANSWERS = [" ".join(parts) for parts in NOTES.answers]
RUNS = [{"tool": "read_note", "arguments": {"name": name}} for name in NOTES.names]


@pytest.mark.parametrize(
    ("runs", "answers", "fault"),
    [
        (RUNS, ANSWERS, ""),
        (RUNS[:1], ANSWERS, "the tool ran with [{'tool': 'read_note'"),
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


def test_an_error_is_a_fault() -> None:
    assert fault_of("chat", {"error": "no server"}) == "chat: no server"


CONVERSATION: dict[str, Any] = {
    "calls": [{"request": turn, "result": "", **run} for turn, run in enumerate(RUNS)],
    "answers": ["The ferry.", "The shop.", "Both.", "Goodbye."],
}


@pytest.mark.parametrize(
    ("runs", "answers", "counts"),
    [
        (RUNS, CONVERSATION["answers"], Counts(4, 4, 4, 0, 4, 4)),
        (RUNS[:3], ["The ferry.", "Both.", "Both"], Counts(4, 3, 3, 0, 4, 1)),
        ([RUNS[0]] * 3, [""] * 4, Counts(4, 3, 2, 0, 4, 0)),
        ([*RUNS, *RUNS], [], Counts(4, 4, 4, 4, 4, 0)),
        ([{"tool": "write_note", "arguments": {"name": "alpha"}}], [], Counts(4, 0, 0, 1, 4, 0)),
    ],
)
def test_calls_and_texts_of_a_model_are_counted(runs: Any, answers: Any, counts: Counts) -> None:
    assert counts_of("chat", {"runs": runs, "answers": answers}, CONVERSATION) == counts


def test_after_an_error_no_text_of_a_model_is_right() -> None:
    record = {"runs": RUNS[:2], "error": "no server"}
    assert counts_of("chat", record, CONVERSATION) == Counts(4, 2, 2, 0, 4, 0)
    assert counts_of("people, chat", record, CONVERSATION) == Counts(objects=2)


def test_objects_of_a_model_are_counted() -> None:
    record = {"runs": [], "answers": ["Ada, 36", "Bob, 8"]}
    assert counts_of("people", record, CONVERSATION) == Counts(objects=2, right_objects=1)


def test_a_model_holds_conversations_of_the_kind_that_it_is_trained_on() -> None:
    for program in programs.PROGRAMS:
        conversation = written_for(program.name)
        assert len(conversation["answers"]) == len(conversation["requests"]) == TURNS
        declared = {tool["name"]: tool["parameters"] for tool in conversation["tools"]}
        for call in conversation["calls"]:
            assert conversation["answers"][call["request"]] == call["result"]
            if declared:
                assert {*call["arguments"]} <= {*declared[call["tool"]]["properties"]}


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
