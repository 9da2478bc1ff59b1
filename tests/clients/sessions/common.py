"""The conversation that every program holds, and its tool.

A program runs in an environment of its own, with this folder as the place of its modules. It prints
one JSON object: for each conversation the arguments of the tool's runs and the answers, or an
error. Where a program can ask for answers of a type, it also asks for two people, without the tool;
the titles of these conversations begin with "people".
"""

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

ADDRESS, MODEL = sys.argv[1:3]
_CONVERSATION = json.loads((Path(__file__).parent / "conversation.json").read_text())
SYSTEM: str = _CONVERSATION["system"]
REQUESTS: list[str] = _CONVERSATION["requests"]
PEOPLE: list[str] = _CONVERSATION["people"]
NOTES: dict[str, str] = _CONVERSATION["notes"]

DESCRIPTION = "Read the note with a name."
PARAMETERS = {
    "type": "object",
    "properties": {"name": {"type": "string", "description": "The name of the note."}},
    "required": ["name"],
}
_runs: list[dict[str, str]] = []


def read_note(name: str) -> str:
    """Read the note with a name.

    Args:
        name: The name of the note.
    """
    _runs.append({"name": name})
    return NOTES.get(name, f"There is no note {name}.")


def hold(conversations: dict[str, Callable[[], list[str]]]) -> None:
    """Hold each conversation, which returns its answers, and print what happened."""

    def with_runs(conversation: Callable[[], list[str]]) -> tuple[list[dict[str, str]], list[str]]:
        _runs.clear()
        answers = conversation()
        return [*_runs], answers

    hold_with_runs(
        {title: partial(with_runs, conversation) for title, conversation in conversations.items()}
    )


def hold_with_runs(
    conversations: dict[str, Callable[[], tuple[list[dict[str, str]], list[str]]]],
) -> None:
    """Hold each conversation, which returns the tool's runs and its answers, and print them."""
    report = {}
    for title, conversation in conversations.items():
        try:
            runs, answers = conversation()
            report[title] = {"runs": runs, "answers": answers}
        except Exception as error:
            traceback.print_exc()
            report[title] = {"error": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps(report))
