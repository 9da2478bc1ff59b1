"""The conversation that every program holds, and its tools.

A program runs in an environment of its own, with this folder as the place of its modules. It prints
one JSON object: for each conversation the runs of the tools and the answers, or an error. Where a
program can ask for answers of a type, it also asks for two people, without the tools; the titles of
these conversations begin with "people".

The conversation is in conversation.json. Where it declares no tools, there is one: `read_note`,
which a program that can do so declares from the function itself.
"""

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ADDRESS, MODEL = sys.argv[1:3]
_CONVERSATION = json.loads((Path(__file__).parent / "conversation.json").read_text())
SYSTEM: str = _CONVERSATION["system"]
REQUESTS: list[str] = _CONVERSATION["requests"]
CALLS: list[dict[str, Any]] = _CONVERSATION["calls"]
PEOPLE: list[str] = _CONVERSATION["people"]
NOTES: dict[str, str] = _CONVERSATION["notes"]
LONGEST = 512
"""The most tokens of an answer about people, which a small model may not end by itself."""
DECLARED: list[dict[str, Any]] = _CONVERSATION["tools"]
"""The tools that the conversation declares: names, descriptions and parameters."""

_READ_NOTE = {
    "name": "read_note",
    "description": "Read the note with a name.",
    "parameters": {
        "type": "object",
        "properties": {"name": {"type": "string", "description": "The name of the note."}},
        "required": ["name"],
    },
}
FUNCTIONS = DECLARED or [_READ_NOTE]
"""The declarations of all tools."""
_runs: list[dict[str, Any]] = []


def read_note(name: str) -> str:
    """Read the note with a name.

    Args:
        name: The name of the note.
    """
    return run("read_note", {"name": name})


def run(tool: str, arguments: dict[str, Any]) -> str:
    """Run a tool: return the result that the conversation has for this call."""
    _runs.append({"tool": tool, "arguments": arguments})
    results = (
        call["result"] for call in CALLS if (call["tool"], call["arguments"]) == (tool, arguments)
    )
    return next(results, "There is no such thing.")


def say(words: str) -> str:
    """Return the request to say something."""
    return _CONVERSATION["say"].format(words)


def hold(conversations: dict[str, Callable[[], list[str]]]) -> None:
    """Hold each conversation, which returns its answers, and print what happened."""

    def with_runs(conversation: Callable[[], list[str]]) -> tuple[list[dict[str, Any]], list[str]]:
        answers = conversation()
        return [*_runs], answers

    hold_with_runs(
        {title: partial(with_runs, conversation) for title, conversation in conversations.items()}
    )


def hold_with_runs(
    conversations: dict[str, Callable[[], tuple[list[dict[str, Any]], list[str]]]],
) -> None:
    """Hold each conversation, which returns the tools' runs and its answers, and print them."""
    report = {}
    for title, conversation in conversations.items():
        _runs.clear()
        try:
            runs, answers = conversation()
            report[title] = {"runs": runs, "answers": answers}
        except Exception as error:
            traceback.print_exc()
            report[title] = {"runs": [*_runs], "error": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps(report))
