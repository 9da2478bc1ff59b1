"""The embedded checkpoints: a small target, its draft model, EAGLE-3 drafter and MTP module.

They were trained by ``configs/demo_target.yaml``, ``configs/demo_draft.yaml``,
``configs/eagle3_embedded.yaml`` and ``configs/mtp_embedded.yaml`` on the source of Python's
standard library.
"""

from pathlib import Path

from specjax.errors import InputError


def embedded(name: str) -> Path:
    """Return the directory of an embedded checkpoint.

    Raises:
        InputError: there is no such checkpoint.
    """
    root = Path(__file__).parent
    if not (root / name / "config.json").is_file():
        names = ", ".join(sorted(file.parent.name for file in root.glob("*/config.json")))
        raise InputError(f"embedded checkpoint {name!r}: it does not exist; give one of {names}")
    return root / name
