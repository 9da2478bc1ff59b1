"""The conversations that a model holds with real programs.

They are held-out ones of the kind that `benchmarks.tools_model` trains its model on. Each program
gets a list of tools of its own. Codex has its own tools, so it is asked for commands in the same
words.
"""

import json
from typing import Any

from benchmarks.tools_model.conversations import Conversation, Writer
from tests.clients.programs import SESSIONS

CHARACTERS = 1_500
"""The size of the list of tools, as JSON."""
TURNS = 3


def written_for(program: str) -> dict[str, Any]:
    """Return the conversation for a program, in the form of conversation.json."""
    if program == "codex":
        return _commands()
    writer = Writer(f"program {program}", is_held_out=True)
    return _of_chat(writer.conversation(CHARACTERS, system_characters=60, turns=TURNS))


def _of_chat(chat: Conversation) -> dict[str, Any]:
    system, *messages = chat.messages
    requests, calls, answers = [], [], []
    for message in messages:
        if message["role"] == "user":
            requests.append(message["content"])
        elif message["role"] == "tool":
            calls[-1]["result"] = message["content"]
        elif "tool_calls" in message:
            function = message["tool_calls"][0]["function"]
            call = {"tool": function["name"], "arguments": function["arguments"]}
            calls.append({"request": len(requests) - 1, **call})
        else:
            answers.append(message["content"])
    return {
        "system": system["content"],
        "requests": requests,
        "calls": calls,
        "answers": answers,
        "tools": [_declaration(tool["function"]) for tool in chat.tools],
        **_without_tools(),
    }


def _declaration(function: dict[str, Any]) -> dict[str, Any]:
    return {name: function[name] for name in ("name", "description", "parameters")}


def _commands() -> dict[str, Any]:
    conversation = _without_tools()
    names = ["alpha", "beta", "alpha"]
    forms = ('Use "exec_command" with {}', "Please call `exec_command` with the arguments {}")
    commands = [json.dumps({"cmd": f"cat {name}.txt"}) for name in names]
    notes = [conversation["notes"][name] for name in names]
    return {
        "system": "",
        "requests": [forms[index % 2].format(text) for index, text in enumerate(commands)],
        "calls": [
            {"request": index, "tool": "read_note", "arguments": {"name": name}, "result": note}
            for index, (name, note) in enumerate(zip(names, notes, strict=True))
        ],
        "answers": notes,
        "tools": [],
        **conversation,
    }


def _without_tools() -> dict[str, Any]:
    """Return the requests for people and words, and the notes, in the model's words."""
    notes = json.loads((SESSIONS / "conversation.json").read_text())["notes"]
    people = [{"name": "Ada", "age": 36}, {"name": "Bob", "age": 7}]
    return {
        "notes": notes,
        "people": [f'Use "Person" with {json.dumps(person)}' for person in people],
        "say": "Say: {}",
    }
