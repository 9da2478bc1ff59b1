"""What the tests of the commands share."""

import json
import shutil
from pathlib import Path


def end_at(directory: Path, copy: Path, token: int) -> Path:
    """A copy of a checkpoint whose end-of-sequence token is another."""
    shutil.copytree(directory, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
    return copy
