"""Text files to packed windows of tokens, in an order that is fixed by the seed and can be resumed."""

import glob
import hashlib
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

import grain
import numpy as np
import tokenizers

from specjax.config import ConfigError
from specjax.training.config import DataConfig
from specjax.training.tokenizer import read_tokenizer, train_tokenizer

# Not prose in code form: tests (absent from some distributions' Python), installed packages, and generated tables.
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}


def find_files(source: str) -> list[Path]:
    """The text files of ``source`` (see `DataConfig.source`), sorted by name.

    Raises:
        ConfigError: there are none.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in root.rglob("*.py") if not _STDLIB_SKIPPED.intersection(f.relative_to(root).parts)]
    elif Path(source).is_dir():
        files = [f for f in Path(source).rglob("*") if f.is_file()]
    else:
        files = [Path(f) for f in glob.glob(source, recursive=True) if Path(f).is_file()]
    if not files:
        raise ConfigError(f"data.source={source!r}: no files there; give 'stdlib', a directory or a glob")
    return sorted(files)


def split_files(files: Sequence[Path], holdout: float) -> tuple[list[Path], list[Path]]:
    """Training and held-out files. A file's side depends on its name alone, not on which others are there."""

    def held_out(file: Path) -> bool:
        return zlib.crc32("/".join(file.parts[-2:]).encode()) / 2**32 < holdout

    train, held = [f for f in files if not held_out(f)], [f for f in files if held_out(f)]
    if not train or not held:
        raise ConfigError(f"data.holdout={holdout}: leaves {len(train)} files to train on and {len(held)} held out")
    return train, held


def read_texts(files: Sequence[Path]) -> list[str]:
    """The files' contents; bytes that are not UTF-8 become the replacement character."""
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def pack(documents: Sequence[Sequence[int]], window: int) -> dict[str, np.ndarray]:
    """Lay documents end to end and cut windows of ``window + 1`` tokens, neighbours sharing one token.

    Returns:
        ``tokens [W, window+1]`` int32; ``segments [W, window+1]`` int32, the number of the document of each token; and
        ``loss_mask [W, window]`` bool, which labels count: in plain text all of them.
    """
    tokens = np.concatenate([np.asarray(d, np.int32) for d in documents])
    segments = np.repeat(np.arange(len(documents), dtype=np.int32), [len(d) for d in documents])
    windows = (len(tokens) - 1) // window
    if windows < 1:
        raise ConfigError(f"data.window={window}: the text has only {len(tokens)} tokens")
    index = np.arange(windows)[:, None] * window + np.arange(window + 1)[None]
    return {"tokens": tokens[index], "segments": segments[index], "loss_mask": np.ones((windows, window), bool)}


class PackedWindows(grain.sources.RandomAccessDataSource):
    """`pack`ed windows as a grain source: item ``i`` is row ``i`` of each array."""

    def __init__(self, packed: dict[str, np.ndarray]) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed["tokens"])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: array[index] for name, array in self._packed.items()}


def batches(packed: dict[str, np.ndarray], batch: int, seed: int) -> grain.DatasetIterator:
    """Endless batches, shuffled anew each epoch. The iterator's state is a small JSON object."""
    windows = len(packed["tokens"])
    if windows < batch:
        raise ConfigError(f"data.batch={batch}: the text makes only {windows} windows")
    dataset = grain.MapDataset.source(PackedWindows(packed)).seed(seed).shuffle().repeat().batch(batch, drop_remainder=True)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


def prepare(config: DataConfig) -> tuple[tokenizers.Tokenizer, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The tokenizer, and the packed training and held-out windows of a `DataConfig`."""
    train_files, held_files = split_files(find_files(config.source), config.holdout)
    train, held = read_texts(train_files), read_texts(held_files)
    tokenizer = read_tokenizer(config.tokenizer) if config.tokenizer else train_tokenizer(train, config.vocab_size)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(texts)]

    return tokenizer, pack(encode(train), config.window), pack(encode(held), config.window)


def fingerprint(*packed: dict[str, np.ndarray]) -> str:
    """A short hash of packed windows: two runs with the same one train on the same tokens in the same order."""
    digest = hashlib.sha256()
    for windows in packed:
        for name in sorted(windows):
            digest.update(np.ascontiguousarray(windows[name]).tobytes())
    return digest.hexdigest()[:32]
