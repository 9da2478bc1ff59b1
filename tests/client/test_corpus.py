"""A process of `specjax serve`, and `specjax client --corpus` in others, as users start them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.http.process import Server, serving

MODULE = Path(__file__).parents[2] / "specjax" / "drafts" / "tree.py"
"""A file that users have: the source code that an assistant edits."""

PROMPT = "def ancestors(parents: np.ndarray) -> np.ndarray:\n"
TOKENS = 60
EXAMPLE = {"temperature": 0.7, "seed": 5}


def run(*words: str) -> str:
    """Return the output of a command."""
    result = subprocess.run(
        [sys.executable, "-m", "specjax", *words],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> str:
    """Return the directory with the client's parts of the target."""
    directory = str(tmp_path_factory.mktemp("parts") / "client")
    models = ["--target", "embedded", "--drafter", "suffix"]
    run("convert", "--client-parts", *models, "--output", directory)
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    sizes = ["--rows", "1", "--capacity", "256", "--max-logprobs", "0", "--max-prediction", "0"]
    sizes += ["--grammars", "off", "--penalties", "off"]
    models = ["--target", "embedded", "--drafter", "suffix"]
    with serving(log, *models, *sizes, "--drafts") as server:
        yield server


def write(server: Server, parts: str, *corpus: Path) -> dict[str, Any]:
    """Return the report of a client that drafts from files."""
    words = ["--server", server.address.replace("http", "ws"), "--drafter", "suffix"]
    words += ["--target-parts", parts, "--prompt", PROMPT, "--max-new-tokens", str(TOKENS)]
    words += [word for name, value in EXAMPLE.items() for word in (f"--{name}", str(value))]
    files = ["--corpus", *map(str, corpus)] if corpus else []
    return json.loads(run("client", *words, "--capacity", "256", "--json", *files))


@pytest.mark.thorough
def test_a_client_drafts_from_its_files_and_writes_the_servers_text(
    server, parts, tmp_path
) -> None:
    """Compare with no files. An earlier answer of the server is in one of them."""
    body = {"model": "embedded", "prompt": PROMPT, "max_tokens": TOKENS, **EXAMPLE}
    expected = server.post("/v1/completions", body)["choices"][0]["text"]
    (tmp_path / "answer.py").write_text(PROMPT + expected)
    without, with_files = (
        write(server, parts, *files) for files in ((), (MODULE, tmp_path / "answer.py"))
    )
    for report in (without, with_files):
        assert (report["text"], report["finish_reason"]) == (expected, "length")
        assert report["rounds"] + report["accepted"] == TOKENS
        assert report["provisional"] == ""
    assert with_files["accepted"] >= TOKENS / 2 > without["accepted"]
