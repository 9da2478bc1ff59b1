"""Time from the cold start of a server to the first token of its first request.

    python -m benchmarks.startup
    python -m benchmarks.startup --options --rows 8 --until-compiled

Each start is a new process with an empty directory for compiled programs. The request is sent as
soon as the server listens. The seconds count from the start of the process, with the imports and
the loading of models.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from specjax.errors import InputError

_PAUSE = 0.05
_PATIENCE = 1800.0


@dataclass(frozen=True)
class StartupConfig:
    """Measure cold starts.

    Attributes:
        target: as for ``specjax serve``.
        drafter: as for ``specjax serve``.
        options: further options of the server.
        repeats: number of starts, one after another.
        prompt: prompt of the request.
        port: port of the server.
        until_compiled: wait in each start until every program is compiled, and report the time.
        output: JSON file for the results; by default none.
    """

    target: str = "embedded"
    drafter: str = "embedded:eagle3"
    options: tuple[str, ...] = ("--rows", "4")
    repeats: int = 3
    prompt: str = "import os\nimport "
    port: int = 18765
    until_compiled: bool = False
    output: Path | None = None


def run(config: StartupConfig) -> dict[str, Any]:
    """Return the seconds of every start, and their medians."""
    starts = []
    for _ in range(config.repeats):
        with tempfile.TemporaryDirectory() as directory:
            starts.append(_start(config, directory))
            print(json.dumps(starts[-1]), flush=True)
    names = [name for name in starts[0] if name.endswith("seconds")]
    return {
        "cores": os.cpu_count(),
        "starts": starts,
        "median": {name: median(start[name] for start in starts) for name in names},
    }


def _start(config: StartupConfig, directory: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "specjax",
        "serve",
        "--target",
        config.target,
        "--drafter",
        config.drafter,
    ]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": directory}
    log = Path(directory, "log")
    load = os.getloadavg()[0]
    began = time.perf_counter()
    with log.open("w") as lines:
        process = subprocess.Popen(
            [*command, "--port", str(config.port), *config.options],
            env=environment,
            stdout=lines,
            stderr=lines,
        )
    try:
        address = f"http://127.0.0.1:{config.port}"
        health = _wait_for_health(process, address, log)
        seconds: dict[str, Any] = {
            "health_seconds": time.perf_counter() - began,
            "programs": health["programs"],
            "load": load,
        }
        _first_token(address, config.prompt)
        seconds["first_token_seconds"] = time.perf_counter() - began
        if config.until_compiled:
            while (counts := _health(address)["programs"])["compiled"] < counts["of"]:
                time.sleep(_PAUSE)
            seconds["all_compiled_seconds"] = time.perf_counter() - began
        return seconds
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_health(process: subprocess.Popen[bytes], address: str, log: Path) -> dict[str, Any]:
    until = time.perf_counter() + _PATIENCE
    while time.perf_counter() < until:
        if process.poll() is not None:
            raise InputError(f"the server ended:\n{log.read_text()[-2000:]}")
        try:
            return _health(address)
        except urllib.error.URLError:
            time.sleep(_PAUSE)
    raise InputError(f"the server did not answer in {_PATIENCE:.0f} s:\n{log.read_text()[-2000:]}")


def _health(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/health", timeout=60) as answer:
        return json.load(answer)


def _first_token(address: str, prompt: str) -> None:
    """Request a text, and return when its first token is there."""
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True}
    with urllib.request.urlopen(f"{address}/v1/models", timeout=60) as answer:
        body["model"] = json.load(answer)["data"][0]["id"]
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
        for line in answer:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                return
    raise InputError("the text ended without a token")


def main(config: StartupConfig) -> None:
    """Print the results, and write them if an output is given."""
    results = run(config)
    print(json.dumps(results["median"]))
    if config.output is not None:
        config.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(StartupConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
