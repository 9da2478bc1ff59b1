"""The checkpoints that come with specjax: a small target, and for it a draft model, an EAGLE-3 drafter and an MTP module.

Trained by ``configs/demo_target.yaml``, ``configs/demo_draft.yaml``, ``configs/eagle3_embedded.yaml`` and
``configs/mtp_embedded.yaml`` on the Python standard library's own source.
"""

from pathlib import Path

from specjax.errors import InputError


def embedded(name: str) -> Path:
    """The directory of the embedded checkpoint ``name``. Raises `InputError` when there is no such one."""
    root = Path(__file__).parent
    if not (root / name / "config.json").is_file():
        known = ", ".join(sorted(file.parent.name for file in root.glob("*/config.json")))
        raise InputError(f"embedded checkpoint {name!r}: there is none; there are {known}")
    return root / name
