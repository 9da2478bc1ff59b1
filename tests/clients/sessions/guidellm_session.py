"""Let guidellm measure a conversation with a tool, whose results are those of its data."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ADDRESS, DESCRIPTION, MODEL, NOTES, PARAMETERS, REQUESTS, hold_with_runs

FUNCTION = {"name": "read_note", "description": DESCRIPTION, "parameters": PARAMETERS}


def measure(backend: str) -> tuple[list[Any], list[str]]:
    """Return the arguments of the calls and the texts of the answers."""
    row: dict[str, Any] = {}
    for turn, (request, note) in enumerate(
        zip([*REQUESTS[:2], REQUESTS[-1]], [*NOTES.values(), None], strict=True)
    ):
        row[f"prompt_{turn}"] = request
        if note:
            row[f"tools_{turn}"] = json.dumps([{"type": "function", "function": FUNCTION}])
            row[f"tool_response_{turn}"] = note
    Path("data.jsonl").write_text(json.dumps(row) + "\n")
    command = ["run", "--backend", f"kind=openai_http,target={ADDRESS},model={MODEL},{backend}"]
    command += ["--data", "kind=json_file,path=data.jsonl", "--profile", "kind=synchronous"]
    command += ["--constraint", "kind=max_requests,count=5", "--disable-console"]
    command += ["--output", "kind=json,path=report.json"]
    subprocess.run([Path(sys.executable).parent / "guidellm", *command], check=True, stdout=2)
    (benchmark,) = json.loads(Path("report.json").read_text())["benchmarks"]
    assert not benchmark["requests"]["errored"], benchmark["requests"]["errored"]
    runs, answers = [], []
    requests = sorted(benchmark["requests"]["successful"], key=lambda it: it["info"]["turn_index"])
    for request in requests:
        for call in request["tool_calls"] or []:
            runs.append(json.loads(call["function"]["arguments"]))
        if not request["tool_calls"]:
            answers.append(request["output"])
    return runs, answers


hold_with_runs({"one by one, chat": lambda: measure("request_format=/v1/chat/completions")})
