"""A pair of checkpoints that compiles fast: random weights, the embedded tokenizer."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import ASSETS, tiny_target


def save_tiny(directory: Path, **sizes) -> Path:
    tiny_target(vocab_size=3072, eos_token_ids=(2,), **sizes).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "target" / name, directory)
    return directory


def end_at(directory: Path, copy: Path, token: int) -> Path:
    """A copy of a checkpoint whose end-of-sequence token is another."""
    shutil.copytree(directory, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
    return copy


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory) -> tuple[str, str]:
    """Directories of a target of three layers and a draft model of one."""
    root = tmp_path_factory.mktemp("pair")
    return str(save_tiny(root / "target")), str(save_tiny(root / "draft", num_layers=1))
