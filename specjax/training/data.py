"""The conversion of a source to packed windows of tokens, in an order that the seed fixes.

The order can be resumed at any batch.
"""

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
import tokenizers

from specjax.config import ConfigError
from specjax.files import creating_parents, replacing
from specjax.progress import say, waiting
from specjax.training import chat, fingerprint
from specjax.training.cache_lock import only_one
from specjax.training.config import DataConfig
from specjax.training.contract import Windows
from specjax.training.documents import (
    Record,
    check_one_kind,
    hash_of,
    hash_of_source,
    iterate_documents,
    parse_documents,
    read_records,
)
from specjax.training.packing import PACKERS, Packer, WindowsInMemory, WindowsSink
from specjax.training.records import Document
from specjax.training.sequences import (
    HeldOutBy,
    Reader,
    TokensOfDocuments,
    is_held_out,
    make_reader,
)
from specjax.training.stored_windows import SIDES, WindowsFiles, WindowsManifest
from specjax.training.tokenizing import Conversion, tokenize
from specjax.training.unusable import RecordTally


def split_documents(
    documents: Sequence[Document], holdout: float, held_out_by: HeldOutBy = "content"
) -> tuple[list[Document], list[Document]]:
    """Split documents into those to train on and those that are held out.

    The side of a document depends on itself alone, not on the other documents. All documents that
    were regenerated from one document are on its side.

    Args:
        documents: the documents.
        holdout: the share to hold out.
        held_out_by: the rule.
    """

    sides: tuple[list[Document], list[Document]] = [], []
    for document in documents:
        sides[is_held_out(document, holdout, held_out_by)].append(document)
    _check_sides(len(sides[0]), len(sides[1]), holdout)
    return sides


def _check_sides(train: int, held_out: int, holdout: float) -> None:
    if not train or not held_out:
        raise ConfigError(
            f"data.holdout={holdout}: it leaves {train} documents to train on and {held_out} held"
            " out; change it, or give more documents"
        )


class PackedWindows(grain.sources.RandomAccessDataSource):
    """A grain source of packed windows: item ``i`` is row ``i`` of each array."""

    def __init__(self, packed: Windows) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed["tokens"])

    def __getitem__(self, index: int) -> Windows:
        return {name: array[index] for name, array in self._packed.items()}


def batches(packed: Windows, batch: int, seed: int) -> grain.DatasetIterator:
    """Return an infinite iterator over batches, which are shuffled again in each epoch.

    Every bit of the seed counts. The state of the iterator is a small JSON object.
    """
    windows = len(packed["tokens"])
    if windows < batch:
        raise ConfigError(
            f"data.batch={batch}: the text has only {windows} windows; give a smaller batch or more"
            " text"
        )
    dataset = (
        grain.MapDataset.source(PackedWindows(packed))
        .seed(seed)
        .shuffle()
        .repeat()
        .batch(batch, drop_remainder=True)
    )
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


class TrainingData(NamedTuple):
    """The data of a run.

    Attributes:
        tokenizer: the tokenizer.
        windows: the windows to train on.
        held_out: the windows to evaluate on.
        chat_tokenizer: the tokenizer of transformers, with the chat template of the conversations
            and its variables; None if the data are texts.
        label_counts: how often each token is a label that counts in the windows to train on, up to
            the last token that is one.
        digest: the hash of all windows, `fingerprint.of_windows`.
    """

    tokenizer: tokenizers.Tokenizer
    windows: Windows
    held_out: Windows
    chat_tokenizer: Any
    label_counts: np.ndarray
    digest: str

    def count_labels(self, vocab: int) -> np.ndarray:
        """Return `label_counts` for all tokens of a vocabulary, ``[vocab]``."""
        return np.pad(self.label_counts, (0, max(vocab - len(self.label_counts), 0)))


def prepare(
    config: DataConfig,
    end: int | None = None,
    vocab: int | None = None,
    held_out_by: HeldOutBy = "content",
    tally: RecordTally | None = None,
) -> TrainingData:
    """Read the documents of a `DataConfig`, tokenize them, and pack them into windows.

    The token that the tokenizer puts before every text separates texts. If it puts none, texts end
    with its end token; if it has none, with ``end``. Without any of these, the end of a text is not
    learnt. Conversations end as their chat template defines.

    If a record has generated tokens of this tokenizer, they are used instead of its text, and end
    as they were generated.

    Args:
        config: the configuration of the data.
        end: the end token of the target; None without one.
        vocab: the vocabulary size, which generated token ids must stay below; None for the
            tokenizer's.
        held_out_by: the rule that decides which documents are held out.
        tally: counts the records, and those that are left out; None counts them anew.

    Raises:
        InputError: The configuration cannot be used, or more records than ``config.max_unusable``
            allows.
    """
    tally = tally or RecordTally(config.source, limit=config.max_unusable)
    if config.cache and not config.tokenizer:
        raise ConfigError(
            f"data.cache={config.cache!r}: a tokenizer that is trained on the source cannot be"
            " cached; name one with data.tokenizer, or leave data.cache out"
        )
    if config.workers > 1 and not config.tokenizer:
        raise ConfigError(
            f"data.workers={config.workers}: a tokenizer that is trained on the source exists in"
            " one process; name one with data.tokenizer, or leave data.workers out"
        )
    has_chats, records = _first_kind(config)
    texts: Sequence[str] = ()
    if not config.tokenizer and not has_chats:
        texts = _texts_to_train_on(config, held_out_by)
    reader = make_reader(config, has_chats, end, texts)
    conversion = Conversion(config, has_chats, end, vocab or reader.vocab, held_out_by)
    if config.cache:
        return _prepare_stored(conversion, reader, records, tally)
    sinks = [WindowsInMemory() for _ in SIDES]
    packers, tokens = _pack(conversion, reader, records, tally, sinks)
    tally.report()
    tokens.report(reader, config)
    _report_room(
        config,
        sum(packer.windows for packer in packers),
        sum(packer.packed_tokens for packer in packers),
    )
    windows, held_out = (sink.take() for sink in sinks)
    digest = fingerprint.of_windows(windows, held_out)
    counts = packers[0].label_counts
    return TrainingData(reader.tokenizer, windows, held_out, reader.chat_tokenizer, counts, digest)


def _first_kind(config: DataConfig) -> tuple[bool, Iterator[Record]]:
    """Return whether the first document is a conversation, and all records."""
    records = read_records(config.source, "data.source")
    read: list[Record] = []
    for record in records:
        read.append(record)
        document = next(parse_documents([record], RecordTally(config.source, limit=1)), None)
        if document is not None:
            return document.messages is not None, itertools.chain(read, records)
    return False, iter(read)


def _texts_to_train_on(config: DataConfig, held_out_by: HeldOutBy) -> list[str]:
    """Return the texts that a tokenizer is trained on: those that are not held out."""
    uncounted = RecordTally(config.source, limit=1)
    documents = list(iterate_documents(config.source, "data.source", uncounted))
    check_one_kind(documents, f"data.source={config.source!r}")
    train, _ = split_documents(documents, config.holdout, held_out_by)
    return [document.text or "" for document in train]


def _pack(
    conversion: Conversion,
    reader: Reader,
    records: Iterable[Record],
    tally: RecordTally,
    sinks: Sequence[WindowsSink],
) -> tuple[list[Packer], TokensOfDocuments]:
    """Pack the windows of both sides of a source, and return the packers and the counts.

    Args:
        conversion: the conversion of records to tokens.
        reader: its reader.
        records: the records of the source.
        tally: counts the records.
        sinks: take the windows of the two sides.
    """
    config = conversion.config
    source = f"data.source={config.source!r}"
    packer = PACKERS[config.packing]
    packers = [packer(sink, config.window, reader.begin) for sink in sinks]
    tokens, sizes, kinds = TokensOfDocuments(reader.tokenizer_hash), [0, 0], ()
    with waiting(f"tokenizing {config.source}") as wait:
        for chunk in tokenize(conversion, reader, records, config.workers):
            kinds = (*kinds, *chunk.kinds)[:2]
            check_one_kind([*kinds, *chunk.kinds], source)
            tally.merge(chunk.records)
            tokens.merge(chunk.tokens)
            for side, sequences in enumerate(chunk.sides):
                sizes[side] += chunk.documents[side]
                for sequence in sequences:
                    packers[side].add(sequence)
            count = sum(packer.tokens for packer in packers)
            wait.update(what=f"tokenizing {config.source}, {count:,} tokens")
        tally.check()
        _check_sides(sizes[0], sizes[1], config.holdout)
        if reader.chat_tokenizer is not None and not any(packer.has_labels for packer in packers):
            chat.check_marks(reader.chat_tokenizer, [([], np.zeros(0, bool))])
        for packer in packers:
            packer.close()
    return packers, tokens


def _report_room(config: DataConfig, windows: int, packed_tokens: int) -> None:
    """Print how full the windows are, if they need not be full."""
    if config.packing != "windows":
        share = packed_tokens / (windows * (config.window + 1))
        say(
            f"data.packing={config.packing}: {windows:,} windows with {packed_tokens:,} tokens;"
            f" {1 - share:.1%} of their places are empty"
        )


_STORED_VERSION = 2
"""The version of the stored windows. A change of how a source becomes windows must increase it."""


def _prepare_stored(
    conversion: Conversion, reader: Reader, records: Iterable[Record], tally: RecordTally
) -> TrainingData:
    """Return the same as `prepare` without a cache, from files that are written if necessary."""
    config = conversion.config
    with waiting(f"reading {config.source}"):
        parts = [
            *(_STORED_VERSION, hash_of_source(config.source), reader.tokenizer_hash),
            *(conversion.end, conversion.vocab, config.responses_only, config.packing),
            *(config.window, config.holdout, conversion.held_out_by),
        ]
        folder = Path(config.cache) / hash_of(json.dumps(parts))
        manifest = WindowsManifest.read(folder)
    if manifest is None:
        manifest = _store(folder, conversion, reader, records, tally)
    tally.restore(manifest.records)
    tally.check()
    tally.report()
    TokensOfDocuments(**manifest.tokens).report(reader, config)
    _report_room(config, sum(manifest.windows.values()), manifest.packed_tokens)
    windows, held_out = manifest.sides(folder)
    return TrainingData(
        reader.tokenizer,
        windows,
        held_out,
        reader.chat_tokenizer,
        np.asarray(manifest.label_counts, np.int64),
        manifest.digest,
    )


def _store(
    folder: Path,
    conversion: Conversion,
    reader: Reader,
    records: Iterable[Record],
    tally: RecordTally,
) -> WindowsManifest:
    """Write the windows of a source into a folder, unless another process does so."""
    config = conversion.config
    lock = folder.with_name(f"{folder.name}.lock")
    with (
        creating_parents(lock),
        only_one(lock, lambda: WindowsManifest.read(folder) is not None, "tokenizing") as is_mine,
    ):
        if is_mine:
            # Those of processes that were killed: nobody else writes while this one has the lock.
            for left_over in folder.parent.glob(f".{folder.name}-*"):
                shutil.rmtree(left_over, ignore_errors=True)
            with replacing(folder) as scratch:
                sinks = [WindowsFiles(scratch, side) for side in SIDES]
                packers, tokens = _pack(conversion, reader, records, tally, sinks)
                for sink in sinks:
                    sink.close()
                WindowsManifest(
                    window=config.window,
                    windows={
                        side: packer.windows for side, packer in zip(SIDES, packers, strict=True)
                    },
                    packed_tokens=sum(packer.packed_tokens for packer in packers),
                    label_counts=packers[0].label_counts.tolist(),
                    records=tally.record(),
                    tokens=asdict(tokens),
                ).write(scratch)
    manifest = WindowsManifest.read(folder)
    if manifest is None:
        raise ConfigError(
            f"data.cache={config.cache!r}: {folder} was changed while it was written; start again"
        )
    return manifest
