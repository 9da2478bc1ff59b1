"""Let guidellm measure a conversation with a tool, whose results are those of its data."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ADDRESS, CALLS, FUNCTIONS, MODEL, REQUESTS, hold_with_runs

TOOLS = json.dumps([{"type": "function", "function": function} for function in FUNCTIONS])


def measure(backend: str) -> tuple[list[Any], list[str]]:
    """Return the arguments of the calls and the texts of the answers."""
    row: dict[str, Any] = {}
    turn = requests_sent = 0
    for number, request in enumerate(REQUESTS):
        results = [call["result"] for call in CALLS if call["request"] == number]
        if len(results) > 1:
            continue  # its data has one result for a turn
        row[f"prompt_{turn}"] = request
        if results:
            row[f"tools_{turn}"] = TOOLS
            row[f"tool_response_{turn}"] = results[0]
        turn += 1
        requests_sent += 1 + len(results)
    Path("data.jsonl").write_text(json.dumps(row) + "\n")
    command = ["run", "--backend", f"kind=openai_http,target={ADDRESS},model={MODEL},{backend}"]
    command += ["--data", "kind=json_file,path=data.jsonl", "--profile", "kind=synchronous"]
    command += ["--constraint", f"kind=max_requests,count={requests_sent}"]
    command += ["--disable-console", "--output", "kind=json,path=report.json"]
    subprocess.run([Path(sys.executable).parent / "guidellm", *command], check=True, stdout=2)
    (benchmark,) = json.loads(Path("report.json").read_text())["benchmarks"]
    assert not benchmark["requests"]["errored"], benchmark["requests"]["errored"]
    runs, answers = [], []
    requests = sorted(benchmark["requests"]["successful"], key=lambda it: it["info"]["turn_index"])
    for request in requests:
        for call in request["tool_calls"] or []:
            function = call["function"]
            arguments = json.loads(function["arguments"])
            runs.append({"tool": function["name"], "arguments": arguments})
        if not request["tool_calls"]:
            answers.append(request["output"])
    return runs, answers


hold_with_runs({"one by one, chat": lambda: measure("request_format=/v1/chat/completions")})
