"""Run every notebook from its first cell to its last."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
PRINTED = {
    "client_server": (
        "tokens a round",
        "the text is the target's own",
        "sampled, it is the same",
        "ended with 0",
    ),
    "gemma4": (
        "chain of 4",
        "tokens a step, the same text",
        "reads layer",
        "the assistant remembers",
        "acceptance length at",
    ),
    "quickstart": ("realised", "->"),
    "serve": (
        "is ready: embedded, 2 rows",
        "'completion_tokens': 48",
        "3 different texts",
        "ended with 0",
    ),
    "train_eagle3": ("trained in", "acceptance rose from", "acceptance length"),
    "write_a_drafter": ("conforms, and lossless: sampled tree", "refused: ", "a G-test of"),
}


PICTURES = {"client_server": 1, "serve": 0}
"""The number of pictures of a notebook; two if it is not named here."""


@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path, monkeypatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(path.parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), (
        "commit notebooks without outputs"
    )
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    printed = "".join(
        output["text"]
        for output in outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    assert len(pictures) == PICTURES.get(path.stem, 2)
    for expected in PRINTED[path.stem]:
        assert expected in printed
