"""Hold the conversation with Codex, which runs commands: the notes are files of its folder.

It runs without a terminal, in a sandbox that may only read, and goes on with the same conversation
for each request.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from common import ADDRESS, MODEL, NOTES, REQUESTS, hold_with_runs

_READ = re.compile(r'read_note with name "(\w+)"')
_SERVER = f'{{name="local", base_url="{ADDRESS}/v1", wire_api="responses"}}'
_OPTIONS = ["--json", "--skip-git-repo-check", "-s", "read-only", "-m", MODEL]
_OPTIONS += ["-c", 'model_provider="local"', "-c", f"model_providers.local={_SERVER}"]


def _turn(request: str, is_first: bool, folder: Path) -> list[dict[str, Any]]:
    """Send a request, and return the items that Codex reports."""
    resume = [] if is_first else ["resume", "--last"]
    done = subprocess.run(
        ["codex", "exec", *_OPTIONS, *resume, request],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return [event["item"] for event in events if event["type"] == "item.completed"]


def conversation() -> tuple[list[dict[str, Any]], list[str]]:
    """Return the names of the files that Codex has read, and the last message of each turn."""
    folder = Path("folder")
    folder.mkdir()
    for name, note in NOTES.items():
        (folder / f"{name}.txt").write_text(note)
    runs, answers = [], []
    for number, request in enumerate(REQUESTS):
        items = _turn(
            _READ.sub(r'exec_command with cmd "cat \1.txt"', request), number == 0, folder
        )
        for item in items:
            if item["type"] == "command_execution":
                command = re.search(r"-lc '?cat (\w+)\.txt'?$", item["command"])
                if command and command[1] in NOTES:
                    assert item["aggregated_output"] == NOTES[command[1]], item
                    runs.append({"tool": "read_note", "arguments": {"name": command[1]}})
                else:
                    runs.append({"tool": "exec_command", "arguments": {"cmd": item["command"]}})
        texts = [item["text"] for item in items if item["type"] == "agent_message"]
        answers.append(texts[-1] if texts else "")
    return runs, answers


hold_with_runs({"exec": conversation})
