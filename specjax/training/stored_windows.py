"""Packed windows in files, which are read as memory maps, with a manifest that describes them.

So the windows of a large data set need little memory, and are made once.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from specjax.training import fingerprint
from specjax.training.contract import Windows

SIDES = ("train", "held_out")
"""The names of the windows to train on and of those to evaluate on."""

_TYPES = {"tokens": np.int32, "segments": np.int32, "loss_mask": np.bool_}
_MANIFEST = "manifest.json"


class WindowsFiles:
    """A `WindowsSink` that writes its windows to files, one for each array."""

    def __init__(self, folder: Path, name: str) -> None:
        """Create the files.

        Args:
            folder: the folder of the files, which exists.
            name: the beginning of their names.
        """
        self._files = {
            array: (folder / f"{name}.{array}").open("wb", buffering=2**20) for array in _TYPES
        }

    def write(self, windows: Windows) -> None:
        """Append windows."""
        for array, file in self._files.items():
            file.write(np.ascontiguousarray(windows[array], _TYPES[array]).tobytes())

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


@dataclass(frozen=True)
class WindowsManifest:
    """The description of the stored windows of a data set.

    Attributes:
        window: the number of labels of a window.
        windows: the number of windows of each side.
        packed_tokens: the number of their places with a token.
        label_counts: how often each token is a label that counts, in the windows to train on.
        records: the counts of the records, `RecordTally.record`.
        tokens: the counts of the documents, `TokensOfDocuments`.
        digest: the hash of all windows, `fingerprint.of_windows`.
        files: the size in bytes of each file, and the time at which it was written, in nanoseconds.
    """

    window: int
    windows: Mapping[str, int]
    packed_tokens: int
    label_counts: list[int]
    records: Mapping[str, Any]
    tokens: Mapping[str, Any]
    digest: str = ""
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the manifest into the folder of the windows, with their hash and their files."""
        complete = replace(
            self,
            digest=fingerprint.of_windows(*self.sides(folder)),
            files={
                file.name: (file.stat().st_size, file.stat().st_mtime_ns)
                for file in sorted(folder.iterdir())
            },
        )
        (folder / _MANIFEST).write_text(json.dumps(asdict(complete)) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "WindowsManifest | None":
        """Return the manifest of a folder; None if there is none, or the files are not its files.

        Files of the right size and time are not read. Those of another time, such as copies, are.
        """
        try:
            manifest = cls(**json.loads((folder / _MANIFEST).read_text()))
            states = {name: (folder / name).stat() for name in manifest.files}
        except (OSError, ValueError, TypeError):
            return None
        if any(states[name].st_size != size for name, (size, _) in manifest.files.items()):
            return None
        if any(states[name].st_mtime_ns != time for name, (_, time) in manifest.files.items()):
            is_copy = fingerprint.of_windows(*manifest.sides(folder)) == manifest.digest
            return manifest if is_copy else None
        return manifest

    def sides(self, folder: Path) -> list[Windows]:
        """Return the windows of both sides, from their folder, as memory maps."""
        return [read_windows(folder, side, self.windows[side], self.window) for side in SIDES]


def read_windows(folder: Path, name: str, windows: int, window: int) -> Windows:
    """Return the windows of `WindowsFiles` as memory maps.

    Args:
        folder: the folder of the files.
        name: the beginning of their names.
        windows: the number of windows.
        window: the number of labels of a window.
    """
    widths = {"tokens": window + 1, "segments": window + 1, "loss_mask": window}
    return {
        array: np.memmap(folder / f"{name}.{array}", kind, "r", shape=(windows, widths[array]))
        for array, kind in _TYPES.items()
    }
