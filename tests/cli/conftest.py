"""Helpers of the tests of the commands."""

import json
import shutil
from pathlib import Path


def end_at(directory: Path, copy: Path, token: int) -> Path:
    """Return a copy of a checkpoint with another end-of-sequence token."""
    shutil.copytree(directory, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
    return copy
