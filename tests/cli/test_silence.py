"""Check that remarks of transformers on a tokenizer's configuration do not reach the user."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specjax.assets import embedded
from specjax.cli.silence import REMARKS, silence

CONFIGURATIONS = {
    "a type that transformers does not know": {"model_type": "mimo"},
    "a rotary embedding with a factor of no meaning": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "alpha": 1.0}
    },
    "a scale in the older way, of no class": {
        "model_type": "kimi_k2",
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
    },
}


def with_configuration(folder: Path, changes: dict) -> Path:
    """Return the embedded target with another configuration beside its tokenizer."""
    shutil.copytree(embedded("target"), folder / "model")
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return folder / "model"


def stderr_of(*command: str) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, check=True
    )
    return run.stderr


READ = (
    "import sys; from pathlib import Path; from specjax.text import load_tokenizer;"
    " load_tokenizer(Path(sys.argv[1]))"
)
FIRST = "from specjax.cli.silence import silence; silence(); silence();"


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_that_transformers_remarks_on_is_read_in_silence(tmp_path, name) -> None:
    """Check that commands alone are silent: the library passes the remarks on."""
    model = with_configuration(tmp_path, CONFIGURATIONS[name])
    assert "[transformers]" in stderr_of("-c", READ, str(model))
    assert stderr_of("-c", FIRST + READ, str(model)) == ""


@pytest.mark.full
def test_a_command_prints_nothing_but_its_own_lines(tmp_path) -> None:
    model = with_configuration(
        tmp_path, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "alpha": 1.0}}
    )
    words = ("generate", "--target", str(model), "--prompt", "class A:", "--max-new-tokens", "2")
    lines = [
        line
        for line in stderr_of("-m", "specjax", *words).replace("\r", "\n").splitlines()
        if line.strip()
    ]
    assert lines[-1].startswith("2 tokens in")
    assert [line for line in lines[:-1] if not line.startswith("specjax: ")] == []


def test_only_the_remarks_are_left_out(monkeypatch) -> None:
    for name in REMARKS:  # a command that ran in this process has left its filter
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    silence()
    silence()
    for name, remarks in REMARKS.items():
        logger = logging.getLogger(name)
        assert len(logger.filters) == 1

        def passes(message: str, logger: logging.Logger = logger) -> bool:
            return bool(
                logger.filter(
                    logger.makeRecord(logger.name, logging.WARNING, "", 0, message, (), None)
                )
            )

        assert not any(passes(f"[transformers] {remark} and more") for remark in remarks)
        assert passes("The tokenizer you are loading has an incorrect regex pattern")
