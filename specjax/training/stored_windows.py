"""Packed windows in files: written piece by piece, and read as memory maps.

So the windows of a large data set need little memory, and are made once.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specjax.config import ConfigError
from specjax.training.contract import Windows

_PIECE = 2**20
"""The number of tokens that are held in memory before their windows are written."""

_TYPES = {"tokens": np.int32, "segments": np.int32, "loss_mask": np.bool_}


class WindowsWriter:
    """A writer of the windows that `specjax.training.data.pack` makes of the same sequences.

    Attributes:
        tokens: the number of tokens so far.
        windows: the number of windows that are written.
        has_labels: whether any token of a sequence counts as a label.
    """

    def __init__(self, folder: Path, name: str, window: int, begin: int | None) -> None:
        """Start with no windows.

        Args:
            folder: the folder of the files, which exists.
            name: the beginning of their names.
            window: the number of labels of a window.
            begin: the token that begins each document, and so separates them; None without one.
        """
        self._window, self._begin = window, begin
        self._files = {
            field: (folder / f"{name}.{field}").open("wb", buffering=2**20) for field in _TYPES
        }
        self._pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._waiting, self._sequences = 0, 0
        self.tokens, self.windows, self.cut, self.has_labels = 0, 0, 0, False

    def add(self, ids: Sequence[int] | np.ndarray, mask: np.ndarray) -> None:
        """Append a sequence of tokens, and the mask of its labels."""
        tokens, counts = np.asarray(ids, np.int32), np.array(mask, bool)
        segment, self._sequences = self._sequences, self._sequences + 1
        self.has_labels = self.has_labels or bool(counts.any())
        if not len(tokens):
            return
        # The first token does not follow from the sequence before, unless it says that it has
        # ended. The very first token is no label of any window.
        counts[0] &= self._begin is not None and tokens[0] == self._begin
        self._pieces.append((tokens, np.full(len(tokens), segment, np.int32), counts))
        self._waiting += len(tokens)
        self.tokens += len(tokens)
        if self._waiting >= _PIECE:
            self._write()

    def close(self) -> int:
        """Write the last windows, close the files, and return the number of windows.

        Raises:
            ConfigError: The sequences are too short for a window, or no label counts.
        """
        if self._pieces:
            self._write()
        for file in self._files.values():
            file.close()
        check_windows(self.cut, self.windows, self.tokens, self._window)
        return self.windows

    def _write(self) -> None:
        """Write all windows that are complete; the last token of one is the first of the next."""
        tokens, segments, counts = (
            np.concatenate(arrays) for arrays in zip(*self._pieces, strict=True)
        )
        windows = (len(tokens) - 1) // self._window
        end = windows * self._window
        self._pieces = [(tokens[end:], segments[end:], counts[end:])]
        self._waiting = len(tokens) - end
        if not windows:
            return
        index = np.arange(windows)[:, None] * self._window + np.arange(self._window + 1)[None]
        mask = counts[index[:, 1:]]
        useful = mask.any(axis=1)
        self.cut += windows
        self.windows += int(useful.sum())
        arrays = {"tokens": tokens[index], "segments": segments[index], "loss_mask": mask}
        for field, array in arrays.items():
            self._files[field].write(np.ascontiguousarray(array[useful]).tobytes())


def check_windows(cut: int, useful: int, tokens: int, window: int) -> None:
    """Raise ConfigError if there are no windows, or none with a label that counts.

    Args:
        cut: the number of windows of the text.
        useful: the number of those with a label that counts.
        tokens: the number of tokens of the text.
        window: the number of labels of a window.
    """
    if cut < 1:
        raise ConfigError(
            f"data.window={window}: the text has only {tokens} tokens; give a shorter window or"
            " more text"
        )
    if not useful:
        raise ConfigError(
            f"data.source: none of the {cut} windows has a label that counts; give other documents"
        )


def read_windows(folder: Path, name: str, windows: int, window: int) -> Windows:
    """Return the windows of a `WindowsWriter` as memory maps.

    Args:
        folder: the folder of the files.
        name: the beginning of their names.
        windows: the number of windows.
        window: the number of labels of a window.
    """
    widths = {"tokens": window + 1, "segments": window + 1, "loss_mask": window}
    return {
        field: np.memmap(folder / f"{name}.{field}", kind, "r", shape=(windows, widths[field]))
        for field, kind in _TYPES.items()
    }
