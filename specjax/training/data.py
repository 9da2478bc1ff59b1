"""The conversion of documents to packed windows of tokens, in an order that the seed fixes.

The order can be resumed at any batch.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import grain
import numpy as np
import tokenizers

from specjax.config import ConfigError
from specjax.progress import say
from specjax.templates import (
    have_same_effect,
    read_settings,
    settings_of,
    shown_settings,
    with_template,
)
from specjax.training import chat, fingerprint
from specjax.training.config import DataConfig
from specjax.training.contract import Windows
from specjax.training.documents import check_one_kind, find_origin, hash_of, read_documents
from specjax.training.records import Document
from specjax.training.tokenizer import begin_token, encode_texts, read_tokenizer, train_tokenizer
from specjax.training.unusable import RecordTally, UnusableRecordError
from specjax.training.written import WrittenTokens

HeldOutBy = Literal["content", "name"]
"""The rule that decides which documents are held out.

"content": a hash of the content, so that equal documents are on one side, wherever their files are.
"name": a hash of the name of the file and the place in it, as in runs of older versions.
"""


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

    def is_held_out(document: Document) -> bool:
        if held_out_by == "name":
            return zlib.crc32(document.name.encode(errors="replace")) / 2**32 < holdout
        return int(hash_of(find_origin(document))[:8], 16) / 2**32 < holdout

    sides: tuple[list[Document], list[Document]] = [], []
    for document in documents:
        sides[is_held_out(document)].append(document)
    train, held_out = sides
    if not train or not held_out:
        raise ConfigError(
            f"data.holdout={holdout}: it leaves {len(train)} documents to train on and"
            f" {len(held_out)} held out; change it, or give more documents"
        )
    return train, held_out


def pack(
    documents: Sequence[Sequence[int] | np.ndarray],
    window: int,
    masks: Sequence[np.ndarray] | None = None,
    begin: int | None = None,
) -> Windows:
    """Concatenate documents and cut windows of ``window + 1`` tokens; neighbors share one token.

    The first token of a document does not follow from the document before it, so it does not count
    as a label, unless it is ``begin``: then it says that the document before it has ended.

    Args:
        documents: the token ids of each document.
        window: the number of labels of a window.
        masks: for each document, ``[tokens]`` bool which of its tokens count as labels; None if all
            count.
        begin: the token that begins each document, and so separates them; None without one.

    Returns:
        ``tokens [W, window+1]`` int32; ``segments [W, window+1]`` int32 index of each token's
        document; and ``loss_mask [W, window]`` bool which labels count. Windows without a label
        that counts are left out.

    Raises:
        ConfigError: The documents are too short for a window, or no label counts.
    """
    tokens = np.concatenate([np.asarray(d, np.int32) for d in documents])
    counts = np.ones(len(tokens), bool) if masks is None else np.concatenate(masks)
    segments = np.repeat(np.arange(len(documents), dtype=np.int32), [len(d) for d in documents])
    is_first = np.append(False, segments[1:] != segments[:-1])
    counts &= ~is_first if begin is None else ~is_first | (tokens == begin)
    windows = (len(tokens) - 1) // window
    if windows < 1:
        raise ConfigError(
            f"data.window={window}: the text has only {len(tokens)} tokens; give a shorter window"
            " or more text"
        )
    index = np.arange(windows)[:, None] * window + np.arange(window + 1)[None]
    packed = {
        "tokens": tokens[index],
        "segments": segments[index],
        "loss_mask": counts[index[:, 1:]],
    }
    useful = packed["loss_mask"].any(axis=1)
    if not useful.any():
        raise ConfigError(
            f"data.source: none of the {windows} windows has a label that counts; give other"
            " documents"
        )
    return {name: array[useful] for name, array in packed.items()}


def count_labels(packed: Windows, vocab: int) -> np.ndarray:
    """Count how often each token is a label that counts, ``[vocab]``."""
    return np.bincount(packed["tokens"][:, 1:][packed["loss_mask"]], minlength=vocab)


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
    """

    tokenizer: tokenizers.Tokenizer
    windows: Windows
    held_out: Windows
    chat_tokenizer: Any = None


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
    source = f"data.source={config.source!r}"
    tally = tally or RecordTally(config.source, limit=config.max_unusable)
    documents = read_documents(config.source, tally=tally)
    has_chats = check_one_kind(documents, source)
    train, held_out = split_documents(documents, config.holdout, held_out_by)
    reader = _chat_reader(config, tally) if has_chats else _text_reader(config, train, end)
    _report_generated_tokens(documents, reader, config)
    if reader.chat_tokenizer is not None:
        encoded = [d for d in documents if _tokens_of(reader.tokenizer_hash, d) is None]
        chat.report_reasoning(reader.chat_tokenizer, encoded, source)
    size = vocab or reader.vocab

    def windows(documents: Sequence[Document]) -> Windows:
        encoded = _sequences(documents, reader, size, config, tally)
        masks = [mask for _, mask in encoded]
        return pack([ids for ids, _ in encoded], config.window, masks, reader.begin)

    packed = windows(train), windows(held_out)
    tally.check()
    tally.report()
    return TrainingData(reader.tokenizer, *packed, reader.chat_tokenizer)


@dataclass(frozen=True)
class _Reader:
    """The tokenization of the documents of a run.

    Attributes:
        tokenizer: the tokenizer.
        tokenizer_hash: the fingerprint of the tokenizer; None if the run trains the tokenizer.
        vocab: the vocabulary size of the tokenizer.
        begin: the token that begins each document; None without one.
        encode: tokenizes documents; None for those that are left out.
        chat_tokenizer: the tokenizer of transformers with the chat template; None for texts.
    """

    tokenizer: tokenizers.Tokenizer
    tokenizer_hash: str | None
    vocab: int
    begin: int | None
    encode: Callable[[Sequence[Document]], Sequence[chat.Encoded | None]]
    chat_tokenizer: Any = None


def _text_reader(config: DataConfig, train: Sequence[Document], end: int | None) -> _Reader:
    tokenizer_hash = None
    if config.tokenizer:
        loaded = read_tokenizer(config.tokenizer)
        tokenizer_hash = fingerprint.of_tokenizer(loaded, chats=False)
        tokenizer = loaded.backend_tokenizer
        end = end if loaded.eos_token_id is None else loaded.eos_token_id
    else:
        tokenizer = train_tokenizer([document.text or "" for document in train], config.vocab_size)

    def encode(documents: Sequence[Document]) -> list[chat.Encoded]:
        encoded = encode_texts(tokenizer, [document.text or "" for document in documents], end)
        return [(ids, np.ones(len(ids), bool)) for ids in encoded]

    vocab = tokenizer.get_vocab_size()
    return _Reader(tokenizer, tokenizer_hash, vocab, begin_token(tokenizer), encode)


def _chat_reader(config: DataConfig, tally: RecordTally) -> _Reader:
    if not config.tokenizer:
        raise ConfigError(
            "data.tokenizer='': conversations need a tokenizer with a chat template; name its"
            " directory"
        )
    tokenizer = with_template(
        read_tokenizer(config.tokenizer),
        config.chat_template,
        config.chat_template_kwargs,
        section="data.",
    )

    def encode(documents: Sequence[Document]) -> list[chat.Encoded | None]:
        return chat.encode_documents(tokenizer, documents, config.responses_only, tally)

    tokenizer_hash = fingerprint.of_tokenizer(tokenizer)
    begin = tokenizer.bos_token_id
    backend = tokenizer.backend_tokenizer
    return _Reader(backend, tokenizer_hash, len(tokenizer), begin, encode, tokenizer)


def _sequences(
    documents: Sequence[Document],
    reader: _Reader,
    vocab: int,
    config: DataConfig,
    tally: RecordTally,
) -> list[chat.Encoded]:
    """Return the token sequences of documents in order, each with a mask of its labels.

    They are the generated tokens of a document if it has tokens of this tokenizer. Otherwise
    the reader tokenizes the document.
    """
    tokenizer_hash = reader.tokenizer_hash
    to_encode = [d for d in documents if _tokens_of(tokenizer_hash, d) is None]
    encoded = iter(reader.encode(to_encode))
    sequences: list[chat.Encoded] = []
    previous = None
    for document in documents:
        generated = _tokens_of(tokenizer_hash, document)
        if generated is not None:
            try:
                generated.check_vocabulary(vocab)
            except UnusableRecordError as error:
                tally.leave_out(error)
                continue
            sequences += generated.sequences(config.responses_only)
        else:
            tokens = next(encoded)
            if tokens is None:
                continue
            ids, mask = tokens
            # Generated tokens have their own end token, or were cut at the token limit. So a begin
            # token that follows them does not mean that they have ended.
            if previous is not None:
                mask[:1] = False
            sequences.append((ids, mask))
        previous = generated
    tally.check()
    return sequences


def _tokens_of(tokenizer_hash: str | None, document: Document) -> WrittenTokens | None:
    """Return the generated tokens of a document if they are of this tokenizer, else None."""
    if document.written is not None and document.written.tokenizer == tokenizer_hash:
        return document.written
    return None


def _report_generated_tokens(
    documents: Sequence[Document], reader: _Reader, config: DataConfig
) -> None:
    with_tokens = [document for document in documents if document.written is not None]
    tokenizer_hash = reader.tokenizer_hash
    used = sum(_tokens_of(tokenizer_hash, document) is not None for document in with_tokens)
    if used:
        say(
            f"data.source={config.source!r}: {used} of {len(documents)} documents are read in the"
            " tokens they were written in"
        )
    if used < len(with_tokens):
        say(
            f"data.source={config.source!r}: {len(with_tokens) - used} of {len(documents)}"
            " documents have tokens of another tokenizer or chat template than this run's: their"
            " text is tokenised"
        )
    if reader.chat_tokenizer is not None:
        _warn_of_variables(with_tokens, reader.chat_tokenizer, config)


def _warn_of_variables(documents: Sequence[Document], tokenizer: Any, config: DataConfig) -> None:
    """Warn of answers that were generated with other variables of the chat template."""
    used = settings_of(tokenizer)
    recorded = [
        document.written.chat_template_kwargs
        for document in documents
        if document.written is not None and document.written.chat_template_kwargs is not None
    ]
    counts = Counter(map(shown_settings, recorded))
    different = {
        shown: counts[shown]
        for shown in counts
        if not have_same_effect(tokenizer, read_settings(shown), used)
    }
    if different:
        listed = " and ".join(
            f"{count} conversations with chat_template_kwargs={shown}"
            for shown, count in different.items()
        )
        say(
            f"data.source={config.source!r}: a target answered {listed}, and this run has"
            f" data.chat_template_kwargs={shown_settings(used)}; give the same variables",
            unasked=True,
        )
