"""Slow and obvious packings, for comparison: all sequences are in memory."""

from collections.abc import Sequence

import numpy as np

from specjax.training.config import Packing
from specjax.training.contract import Windows
from specjax.training.packing import PACKERS, WindowsInMemory
from specjax.training.sequences import TokenSequence


def sequence(ids, mask=None, is_generated=False) -> TokenSequence:
    mask = np.ones(len(ids), bool) if mask is None else np.asarray(mask, bool)
    return TokenSequence(np.asarray(ids, np.int32), mask, is_generated)


def pack(
    sequences: Sequence, window: int, begin: int | None = None, packing: Packing = "windows"
) -> Windows:
    """Pack sequences, or lists of tokens that are all labels, as a run does."""
    sink = WindowsInMemory()
    packer = PACKERS[packing](sink, window, begin)
    for item in sequences:
        packer.add(item if isinstance(item, TokenSequence) else sequence(item))
    packer.close()
    return sink.take()


def slow_windows(sequences: Sequence[TokenSequence], window: int, begin: int | None) -> Windows:
    """Concatenate all sequences, and cut windows from the result."""
    tokens, counts, segments = [], [], []
    for index, (ids, mask, _) in enumerate(sequences):
        follows_generated = index > 0 and sequences[index - 1].is_generated
        for place, (token, is_label) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
            tokens.append(token)
            segments.append(index)
            says_end = token == begin and not follows_generated
            counts.append(is_label and (place > 0 or says_end))
    packed: dict[str, list] = {"tokens": [], "segments": [], "loss_mask": []}
    for start in range(0, len(tokens) - window, window):
        end = start + window + 1
        if any(counts[start + 1 : end]):
            packed["tokens"].append(tokens[start:end])
            packed["segments"].append(segments[start:end])
            packed["loss_mask"].append(counts[start + 1 : end])
    types = {"tokens": np.int32, "segments": np.int32, "loss_mask": bool}
    return {name: np.array(rows, types[name]) for name, rows in packed.items()}
