"""The conversion of documents to packed windows of tokens, in an order that the seed fixes.

The order can be resumed at any batch.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grain
import numpy as np
import tokenizers

from specjax.config import ConfigError
from specjax.files import replacing
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
from specjax.training.documents import (
    check_one_kind,
    find_origin,
    hash_of,
    hash_of_source,
    iterate_documents,
    read_documents,
)
from specjax.training.records import Document
from specjax.training.stored_windows import WindowsWriter, check_windows, read_windows
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

    sides: tuple[list[Document], list[Document]] = [], []
    for document in documents:
        sides[_is_held_out(document, holdout, held_out_by)].append(document)
    _check_sides(len(sides[0]), len(sides[1]), holdout)
    return sides


def _is_held_out(document: Document, holdout: float, held_out_by: HeldOutBy) -> bool:
    if held_out_by == "name":
        return zlib.crc32(document.name.encode(errors="replace")) / 2**32 < holdout
    return int(hash_of(find_origin(document))[:8], 16) / 2**32 < holdout


def _check_sides(train: int, held_out: int, holdout: float) -> None:
    if not train or not held_out:
        raise ConfigError(
            f"data.holdout={holdout}: it leaves {train} documents to train on and {held_out} held"
            " out; change it, or give more documents"
        )


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
    windows = max((len(tokens) - 1) // window, 0)
    index = np.arange(windows)[:, None] * window + np.arange(window + 1)[None]
    packed = {
        "tokens": tokens[index],
        "segments": segments[index],
        "loss_mask": counts[index[:, 1:]],
    }
    useful = packed["loss_mask"].any(axis=1)
    check_windows(windows, int(useful.sum()), len(tokens), window)
    return {name: array[useful] for name, array in packed.items()}


def count_labels(packed: Windows, vocab: int) -> np.ndarray:
    """Count how often each token is a label that counts, ``[vocab]``."""
    counts = np.zeros(vocab, np.int64)
    for begin in range(0, len(packed["tokens"]), _ROWS):  # the windows may be memory maps
        rows = slice(begin, begin + _ROWS)
        labels = packed["tokens"][rows, 1:][packed["loss_mask"][rows]]
        counts += np.bincount(labels, minlength=vocab)
    return counts


_ROWS = 4096
"""The number of windows that are read at once."""


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
    tally = tally or RecordTally(config.source, limit=config.max_unusable)
    if config.cache:
        return _prepare_stored(config, end, vocab, held_out_by, tally)
    documents = read_documents(config.source, tally=tally)
    has_chats = check_one_kind(documents, f"data.source={config.source!r}")
    sides = split_documents(documents, config.holdout, held_out_by)
    reader = _chat_reader(config, tally) if has_chats else _text_reader(config, sides[0], end)
    tokens = _TokensOfDocuments.of(reader)
    tokens.add(documents)
    tokens.report(reader, config)
    encoded = [
        _Sequencer(reader, vocab or reader.vocab, config, tally).sequences(side) for side in sides
    ]
    tally.check()
    if has_chats:
        chat.check_marks(reader.chat_tokenizer, [*encoded[0], *encoded[1]])
    train, held_out = (
        pack([ids for ids, _ in side], config.window, [mask for _, mask in side], reader.begin)
        for side in encoded
    )
    tally.report()
    return TrainingData(reader.tokenizer, train, held_out, reader.chat_tokenizer)


_STORED_VERSION = 1
"""The version of the stored windows. A change of how a source becomes windows must increase it."""

_SIDES = ("train", "held_out")


def _prepare_stored(
    config: DataConfig,
    end: int | None,
    vocab: int | None,
    held_out_by: HeldOutBy,
    tally: RecordTally,
) -> TrainingData:
    """Return the same as `prepare` without a cache, from files that are written if necessary."""
    if not config.tokenizer:
        raise ConfigError(
            f"data.cache={config.cache!r}: a tokenizer that is trained on the source cannot be"
            " cached; name one with data.tokenizer, or leave data.cache out"
        )
    uncounted = RecordTally(config.source, limit=1)
    first = next(iterate_documents(config.source, "data.source", uncounted), None)
    has_chats = first is not None and first.messages is not None
    reader = _chat_reader(config, tally) if has_chats else _text_reader(config, [], end)
    size = vocab or reader.vocab
    parts = [
        *(_STORED_VERSION, hash_of_source(config.source), reader.tokenizer_hash, end, size),
        *(config.responses_only, config.window, config.holdout, held_out_by),
    ]
    folder = Path(config.cache) / hash_of(json.dumps(parts))
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        with replacing(folder) as scratch:
            stored = _store(scratch, config, reader, size, held_out_by, tally)
            (scratch / manifest.name).write_text(json.dumps(stored, indent=2) + "\n")
    stored = json.loads(manifest.read_text())
    tally.restore(stored["records"])
    tally.check()
    tally.report()
    _TokensOfDocuments(**stored["tokens"]).report(reader, config)
    train, held_out = (
        read_windows(folder, side, stored["windows"][side], config.window) for side in _SIDES
    )
    return TrainingData(reader.tokenizer, train, held_out, reader.chat_tokenizer)


def _store(
    folder: Path,
    config: DataConfig,
    reader: "_Reader",
    vocab: int,
    held_out_by: HeldOutBy,
    tally: RecordTally,
) -> dict[str, Any]:
    """Write the windows of a source into a folder, and return the manifest."""
    writers = [WindowsWriter(folder, side, config.window, reader.begin) for side in _SIDES]
    sequencers = [_Sequencer(reader, vocab, config, tally) for _ in _SIDES]
    tokens, sizes = _TokensOfDocuments.of(reader), [0, 0]
    first: Document | None = None
    documents = iterate_documents(config.source, "data.source", tally)
    for chunk in _chunks(documents):
        first = first or chunk[0]
        check_one_kind([first, *chunk], f"data.source={config.source!r}")
        tokens.add(chunk)
        sides: tuple[list[Document], list[Document]] = [], []
        for document in chunk:
            sides[_is_held_out(document, config.holdout, held_out_by)].append(document)
        for index, side in enumerate(sides):
            sizes[index] += len(side)
            for ids, mask in sequencers[index].sequences(side):
                writers[index].add(ids, mask)
    tally.check()
    _check_sides(sizes[0], sizes[1], config.holdout)
    if reader.chat_tokenizer is not None and not any(writer.has_labels for writer in writers):
        chat.check_marks(reader.chat_tokenizer, [([], np.zeros(0, bool))])
    windows = {side: writer.close() for side, writer in zip(_SIDES, writers, strict=True)}
    return {"windows": windows, "records": tally.record(), "tokens": asdict(tokens)}


_CHUNK_DOCUMENTS, _CHUNK_CHARACTERS = 1024, 2**22


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield the documents in lists that need a bounded memory."""
    chunk: list[Document] = []
    characters = 0
    for document in documents:
        chunk.append(document)
        characters += len(document.text or "") + sum(
            len(message["content"]) for message in document.messages or ()
        )
        if len(chunk) == _CHUNK_DOCUMENTS or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


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


class _Sequencer:
    """The token sequences of documents, of one side, in order and piece by piece."""

    def __init__(self, reader: _Reader, vocab: int, config: DataConfig, tally: RecordTally) -> None:
        self._reader, self._vocab, self._config, self._tally = reader, vocab, config, tally
        self._follows_generated = False

    def sequences(self, documents: Sequence[Document]) -> list[chat.Encoded]:
        """Return the token sequences of documents in order, each with a mask of its labels.

        They are the generated tokens of a document if it has tokens of this tokenizer. Otherwise
        the reader tokenizes the document.
        """
        tokenizer_hash = self._reader.tokenizer_hash
        to_encode = [d for d in documents if _tokens_of(tokenizer_hash, d) is None]
        encoded = iter(self._reader.encode(to_encode))
        sequences: list[chat.Encoded] = []
        for document in documents:
            generated = _tokens_of(tokenizer_hash, document)
            if generated is not None:
                try:
                    generated.check_vocabulary(self._vocab)
                except UnusableRecordError as error:
                    self._tally.leave_out(error)
                    continue
                sequences += generated.sequences(self._config.responses_only)
            else:
                tokens = next(encoded)
                if tokens is None:
                    continue
                ids, mask = tokens
                # Generated tokens have their own end token, or were cut at the token limit. So a
                # begin token that follows them does not mean that they have ended.
                if self._follows_generated:
                    mask[:1] = False
                sequences.append((ids, mask))
            self._follows_generated = generated is not None
        return sequences


def _tokens_of(tokenizer_hash: str | None, document: Document) -> WrittenTokens | None:
    """Return the generated tokens of a document if they are of this tokenizer, else None."""
    if document.written is not None and document.written.tokenizer == tokenizer_hash:
        return document.written
    return None


@dataclass
class _TokensOfDocuments:
    """The counts of documents by where their tokens come from.

    Attributes:
        tokenizer_hash: the fingerprint of the run's tokenizer.
        documents: the number of documents.
        recorded: how many of them have generated tokens.
        used: how many have tokens of this tokenizer.
        reasoning: how many of those to tokenize have reasoning.
        variables: how many have each of the recorded variables of a chat template.
    """

    tokenizer_hash: str | None
    documents: int = 0
    recorded: int = 0
    used: int = 0
    reasoning: int = 0
    variables: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, reader: _Reader) -> "_TokensOfDocuments":
        """Return the counts of no documents."""
        return cls(reader.tokenizer_hash)

    def add(self, documents: Sequence[Document]) -> None:
        """Count documents."""
        for document in documents:
            self.documents += 1
            is_used = _tokens_of(self.tokenizer_hash, document) is not None
            self.used += is_used
            if not is_used and any(m.get("thinking") for m in document.messages or ()):
                self.reasoning += 1
            if document.written is None:
                continue
            self.recorded += 1
            if (settings := document.written.chat_template_kwargs) is not None:
                shown = shown_settings(settings)
                self.variables[shown] = self.variables.get(shown, 0) + 1

    def report(self, reader: _Reader, config: DataConfig) -> None:
        """Print where the tokens come from."""
        source = f"data.source={config.source!r}"
        if self.used:
            say(
                f"{source}: {self.used} of {self.documents} documents are read in the tokens they"
                " were written in"
            )
        if self.used < self.recorded:
            say(
                f"{source}: {self.recorded - self.used} of {self.documents} documents have tokens"
                " of another tokenizer or chat template than this run's: their text is tokenised"
            )
        if reader.chat_tokenizer is not None:
            self._warn_of_variables(reader.chat_tokenizer, source)
            chat.report_reasoning(reader.chat_tokenizer, self.reasoning, self.documents, source)

    def _warn_of_variables(self, tokenizer: Any, source: str) -> None:
        """Warn of answers that were generated with other variables of the chat template."""
        used = settings_of(tokenizer)
        listed = " and ".join(
            f"{count} conversations with chat_template_kwargs={shown}"
            for shown, count in self.variables.items()
            if not have_same_effect(tokenizer, read_settings(shown), used)
        )
        if listed:
            say(
                f"{source}: a target answered {listed}, and this run has"
                f" data.chat_template_kwargs={shown_settings(used)}; give the same variables",
                unasked=True,
            )
