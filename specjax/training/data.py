"""Documents to packed windows of tokens, in an order that is fixed by the seed and can be resumed."""

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path

import grain
import numpy as np
import tokenizers

from specjax import text
from specjax.config import ConfigError
from specjax.training import chat
from specjax.training.config import DataConfig
from specjax.training.documents import Document, read_documents
from specjax.training.tokenizer import read_tokenizer, train_tokenizer


def split_documents(documents: Sequence[Document], holdout: float) -> tuple[list[Document], list[Document]]:
    """Those to train on and those held out. A document's side depends on its name alone, not on which others are there."""

    def held_out(document: Document) -> bool:
        return zlib.crc32(document.name.encode()) / 2**32 < holdout

    train, held = [d for d in documents if not held_out(d)], [d for d in documents if held_out(d)]
    if not train or not held:
        raise ConfigError(f"data.holdout={holdout}: leaves {len(train)} documents to train on and {len(held)} held out")
    return train, held


def pack(documents: Sequence[Sequence[int]], window: int, masks: Sequence[np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Lay documents end to end and cut windows of ``window + 1`` tokens, neighbours sharing one token.

    Args:
        documents: token ids.
        window: labels of a window.
        masks: for each document, ``[tokens]`` bool, which of its tokens count as labels; None: all of them.

    Returns:
        ``tokens [W, window+1]`` int32; ``segments [W, window+1]`` int32, the number of the document of each token; and
        ``loss_mask [W, window]`` bool, which labels count. Windows in which none does are left out.
    """
    tokens = np.concatenate([np.asarray(d, np.int32) for d in documents])
    counted = np.ones(len(tokens), bool) if masks is None else np.concatenate(masks)
    segments = np.repeat(np.arange(len(documents), dtype=np.int32), [len(d) for d in documents])
    windows = (len(tokens) - 1) // window
    if windows < 1:
        raise ConfigError(f"data.window={window}: the text has only {len(tokens)} tokens")
    index = np.arange(windows)[:, None] * window + np.arange(window + 1)[None]
    packed = {"tokens": tokens[index], "segments": segments[index], "loss_mask": counted[index[:, 1:]]}
    useful = packed["loss_mask"].any(axis=1)
    if not useful.any():
        raise ConfigError(f"data.source: none of the {windows} windows holds a token that counts")
    return {name: array[useful] for name, array in packed.items()}


def count_labels(packed: dict[str, np.ndarray], vocab: int) -> np.ndarray:
    """``[vocab]`` how often each token is a label that counts."""
    return np.bincount(packed["tokens"][:, 1:][packed["loss_mask"]], minlength=vocab)


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
    train, held = split_documents(read_documents(config.source), config.holdout)
    chats = [document for document in (*train, *held) if document.messages is not None]
    if chats and len(chats) < len(train) + len(held):
        raise ConfigError(f"data.source={config.source!r}: holds texts and conversations; give one kind")
    if chats:
        return _prepare_chats(config, train, held)
    train_texts, held_texts = ([document.text or "" for document in part] for part in (train, held))
    tokenizer = read_tokenizer(config.tokenizer) if config.tokenizer else train_tokenizer(train_texts, config.vocab_size)

    def windows(texts: Sequence[str]) -> dict[str, np.ndarray]:
        return pack([encoding.ids for encoding in tokenizer.encode_batch(texts)], config.window)

    return tokenizer, windows(train_texts), windows(held_texts)


def _prepare_chats(
    config: DataConfig, train: Sequence[Document], held: Sequence[Document]
) -> tuple[tokenizers.Tokenizer, dict[str, np.ndarray], dict[str, np.ndarray]]:
    if not config.tokenizer:
        raise ConfigError("data.tokenizer='': conversations need a tokenizer with a chat template; name its directory")
    tokenizer = chat.with_template(text.load_tokenizer(Path(config.tokenizer)), config.chat_template)

    def windows(documents: Sequence[Document]) -> dict[str, np.ndarray]:
        encoded = chat.encode(tokenizer, [document.messages or () for document in documents], config.responses_only)
        return pack([ids for ids, _ in encoded], config.window, [mask for _, mask in encoded])

    return tokenizer.backend_tokenizer, windows(train), windows(held)


def fingerprint(*packed: dict[str, np.ndarray]) -> str:
    """A short hash of packed windows: two runs with the same one train on the same tokens in the same order."""
    digest = hashlib.sha256()
    for windows in packed:
        for name in sorted(windows):
            digest.update(np.ascontiguousarray(windows[name]).tobytes())
    return digest.hexdigest()[:32]
