"""The packing of token sequences into the windows of a batch, piece by piece in bounded memory."""

from typing import Protocol

import numpy as np

from specjax.config import ConfigError
from specjax.training.config import Packing
from specjax.training.contract import Windows
from specjax.training.sequences import TokenSequence

_PIECE = 2**20
"""The number of tokens that are held in memory before their windows are written."""

_OPEN_TOKENS, _FEWEST_OPEN, _MOST_OPEN = 2**21, 64, 1024
"""The tokens of the windows that documents may still join, and the bounds of their number.

More windows would be fuller, and need more memory and time.
"""

_ROWS_AT_ONCE = 256
"""The number of windows with whole documents that are written at once."""


class WindowsSink(Protocol):
    """The place that packed windows are written to, in order."""

    def write(self, windows: Windows) -> None:
        """Append windows."""
        ...


class WindowsInMemory:
    """A `WindowsSink` that holds its windows in memory."""

    def __init__(self) -> None:
        self._parts: list[Windows] = []

    def write(self, windows: Windows) -> None:
        """Append windows."""
        self._parts.append(windows)

    def take(self) -> Windows:
        """Return all windows, and hold them no longer."""
        parts, self._parts = self._parts, []
        joined = {}
        for name in tuple(parts[0]):  # one array after the other, to save memory
            joined[name] = np.concatenate([part.pop(name) for part in parts])
        return joined


class Packer:
    """The part that both kinds of packing share. A subclass defines `add` and `close`.

    Attributes:
        tokens: the number of tokens of all sequences.
        windows: the number of windows that are written.
        packed_tokens: the number of tokens in these windows; those that two share count twice.
        has_labels: whether any token of a sequence counts as a label.
        label_counts: ``[V]`` how often each token is a label that counts in these windows.
    """

    def __init__(self, sink: WindowsSink, window: int, begin: int | None) -> None:
        """Start with no windows.

        Args:
            sink: takes the windows.
            window: the number of labels of a window.
            begin: the token that begins each document, and so says that the one before it has
                ended; None without one.
        """
        self._sink, self._window, self._begin = sink, window, begin
        self.tokens, self.windows, self.packed_tokens, self.has_labels = 0, 0, 0, False
        self.label_counts = np.zeros(0, np.int64)

    def add(self, sequence: TokenSequence) -> None:
        """Append a sequence."""
        raise NotImplementedError

    def close(self) -> None:
        """Write the last windows.

        Raises:
            ConfigError: There is no window with a label that counts.
        """
        raise NotImplementedError

    def _count(self, sequence: TokenSequence) -> None:
        self.tokens += len(sequence.ids)
        self.has_labels = self.has_labels or bool(sequence.mask.any())

    def _write(self, windows: Windows) -> None:
        """Write windows that all have a label that counts."""
        labels = np.bincount(windows["tokens"][:, 1:][windows["loss_mask"]])
        size = max(len(labels), len(self.label_counts))
        self.label_counts = np.pad(self.label_counts, (0, size - len(self.label_counts)))
        self.label_counts[: len(labels)] += labels
        self.windows += len(windows["tokens"])
        self.packed_tokens += int(np.count_nonzero(windows["segments"] >= 0))
        self._sink.write(windows)


class WindowsPacker(Packer):
    """The concatenation of the sequences, cut into windows. Neighbors share one token.

    The first token of a document does not follow from the document before it, so it does not count
    as a label, unless it is ``begin``. Windows without a label that counts are left out.
    """

    def __init__(self, sink: WindowsSink, window: int, begin: int | None) -> None:
        super().__init__(sink, window, begin)
        self._pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._waiting, self._sequences, self._cut = 0, 0, 0
        self._follows_generated = False

    def add(self, sequence: TokenSequence) -> None:
        """Append a sequence."""
        self._count(sequence)
        segment, self._sequences = self._sequences, self._sequences + 1
        ids, counts = sequence.ids, sequence.mask.copy()
        if len(ids):
            # The very first token is no label of any window.
            counts[0] &= ids[0] == self._begin and not self._follows_generated
            self._pieces.append((ids, np.full(len(ids), segment, np.int32), counts))
            self._waiting += len(ids)
        self._follows_generated = sequence.is_generated
        if self._waiting >= _PIECE:
            self._cut_windows()

    def close(self) -> None:
        """Write the last windows, see `Packer.close`."""
        if self._pieces:
            self._cut_windows()
        if self._cut < 1:
            raise ConfigError(
                f"data.window={self._window}: the text has only {self.tokens} tokens; give a"
                " shorter window or more text"
            )
        if not self.windows:
            raise ConfigError(
                f"data.source: none of the {self._cut} windows has a label that counts; give other"
                " documents"
            )

    def _cut_windows(self) -> None:
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
        self._cut += windows
        arrays = {"tokens": tokens[index], "segments": segments[index], "loss_mask": mask}
        if useful.any():
            self._write({name: array[useful] for name, array in arrays.items()})


class DocumentsPacker(Packer):
    """Windows of whole documents: each joins the fullest window that still has room for it.

    This is best-fit packing (Ding et al. 2024, arXiv 2404.10830), for documents in their order and
    among the newest windows, so that it needs no memory for all documents.

    A document that does not end with a token of its own ends with ``begin``, if there is one. A
    document that is longer than a window is cut into windows, each of which shares one token with
    the next; its last part joins other documents. Parts without a label that counts are left out.
    Documents have their own index in ``segments``, and so have the parts of a long one; empty
    places have -1, no label, and the token ``begin`` or 0.
    """

    def __init__(self, sink: WindowsSink, window: int, begin: int | None) -> None:
        super().__init__(sink, window, begin)
        self._open = int(np.clip(_OPEN_TOKENS // (window + 1), _FEWEST_OPEN, _MOST_OPEN))
        # Window number w is in row w modulo the number of open windows, until it is written.
        self._tokens = np.zeros((self._open, window + 1), np.int32)
        self._segments = np.zeros((self._open, window + 1), np.int32)
        self._loss_mask = np.zeros((self._open, window), bool)
        self._room = np.zeros(self._open, np.int64)  # 0: there is no window yet
        self._opened, self._parts = 0, 0
        self._complete: list[Windows] = []

    def add(self, sequence: TokenSequence) -> None:
        """Append a sequence."""
        self._count(sequence)
        ids, mask = sequence.ids, sequence.mask
        if not len(ids):
            return
        # The same rule as in windows: what the begin token would say in front of the next document.
        if ids[0] == self._begin and mask[0] and not sequence.is_generated:
            ids, mask = np.append(ids, ids[:1]), np.append(mask, True)
        for start in range(0, max(len(ids) - 1, 1), self._window):
            end = start + self._window + 1
            self._place(ids[start:end], mask[start:end])

    def close(self) -> None:
        """Write the last windows, see `Packer.close`."""
        for number in range(max(self._opened - self._open, 0), self._opened):
            self._take(number)
        self._flush()
        if not self.windows:
            raise ConfigError(
                f"data.source: it has {self.tokens} tokens, and no document with a label that"
                " counts; give other documents"
            )

    def _place(self, ids: np.ndarray, mask: np.ndarray) -> None:
        """Put a document, or a part of one, into a window."""
        if not mask[1:].any():
            return
        room = np.where(self._room >= len(ids), self._room, self._window + 2)
        row = int(room.argmin())
        if room[row] > self._window + 1:
            row = self._new_window()
        start = self._window + 1 - int(self._room[row])
        end = start + len(ids)
        self._tokens[row, start:end] = ids
        self._segments[row, start:end] = self._parts
        # Nothing says which document comes after another.
        self._loss_mask[row, start : end - 1] = mask[1:]
        self._room[row] -= len(ids)
        self._parts += 1

    def _new_window(self) -> int:
        """Return the row of a new window. The oldest open window leaves it, if there is one."""
        row = self._opened % self._open
        if self._opened >= self._open:
            self._take(self._opened - self._open)
        self._tokens[row] = self._begin or 0
        self._segments[row], self._loss_mask[row], self._room[row] = -1, False, self._window + 1
        self._opened += 1
        return row

    def _take(self, number: int) -> None:
        row = number % self._open
        arrays = {
            "tokens": self._tokens,
            "segments": self._segments,
            "loss_mask": self._loss_mask,
        }
        self._complete.append({name: array[row].copy() for name, array in arrays.items()})
        if len(self._complete) == _ROWS_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        if self._complete:
            self._write(
                {n: np.stack([row[n] for row in self._complete]) for n in self._complete[0]}
            )
        self._complete = []


PACKERS: dict[Packing, type[Packer]] = {"windows": WindowsPacker, "documents": DocumentsPacker}
"""The packer of each kind of packing."""
