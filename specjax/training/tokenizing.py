"""The conversion of a source's records to token sequences, by one process or several.

Records are converted in chunks, and the chunks come back in the order of the source. So the result
does not depend on the number of processes, and memory holds a few chunks at a time.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from specjax.training.config import DataConfig
from specjax.training.documents import Record, parse_documents
from specjax.training.records import Document
from specjax.training.sequences import (
    HeldOutBy,
    Reader,
    Sequencer,
    TokenSequence,
    TokensOfDocuments,
    is_held_out,
    make_reader,
)
from specjax.training.unusable import RecordTally

_CHUNK_RECORDS, _CHUNK_CHARACTERS = 1024, 2**22
"""The bounds of a chunk."""

_CHUNKS_IN_ADVANCE = 2
"""The number of chunks that are converted or wait for each process."""


@dataclass(frozen=True)
class TokenizedChunk:
    """The token sequences of a chunk of records.

    Attributes:
        sides: the sequences to train on, and those that are held out.
        documents: the number of documents of each side.
        kinds: a text and a conversation of the chunk, without content, if it has them.
        records: the counts of the records, `RecordTally.record`.
        tokens: the counts of the documents.
    """

    sides: tuple[list[TokenSequence], list[TokenSequence]]
    documents: tuple[int, int]
    kinds: tuple[Document, ...]
    records: Mapping[str, Any]
    tokens: TokensOfDocuments


@dataclass(frozen=True)
class Conversion:
    """The rule that converts records. It depends on the settings alone, never on other chunks.

    Attributes:
        config: the configuration of the data.
        has_chats: whether the documents are conversations.
        end: the end token of texts, see `sequences.make_reader`.
        vocab: the vocabulary size, see `Sequencer`.
        held_out_by: the rule that decides which documents are held out.
    """

    config: DataConfig
    has_chats: bool
    end: int | None
    vocab: int
    held_out_by: HeldOutBy

    def convert(self, reader: Reader, records: Sequence[Record]) -> TokenizedChunk:
        """Convert the records of a chunk with the reader of the run."""
        config = self.config
        tally = RecordTally(config.source, limit=1)
        documents = list(parse_documents(records, tally))
        tokens = TokensOfDocuments(reader.tokenizer_hash)
        tokens.add(documents)
        sequencer = Sequencer(reader, self.vocab, config.responses_only)
        sides: tuple[list[TokenSequence], list[TokenSequence]] = [], []
        counts = [0, 0]
        for document, sequences in zip(
            documents, sequencer.sequences(documents, tally), strict=True
        ):
            side = is_held_out(document, config.holdout, self.held_out_by)
            counts[side] += 1
            sides[side].extend(sequences)
        return TokenizedChunk(
            sides, (counts[0], counts[1]), _kinds(documents), tally.record(), tokens
        )


def _kinds(documents: Iterable[Document]) -> tuple[Document, ...]:
    """Return the first text and the first conversation, without content."""
    first: dict[bool, Document] = {}
    for document in documents:
        first.setdefault(document.messages is None, document)
    return tuple(
        Document(
            document.name,
            text=None if document.text is None else "",
            messages=None if document.messages is None else (),
            where=document.where,
        )
        for document in first.values()
    )


def tokenize(
    conversion: Conversion, reader: Reader, records: Iterable[Record], workers: int
) -> Iterator[TokenizedChunk]:
    """Yield the chunks of a source, converted, in their order.

    Args:
        conversion: the rule.
        reader: the reader of the run, which the conversion's settings describe.
        records: the records of the source.
        workers: the number of processes; with 1, this process converts the chunks itself.
    """
    chunks = _chunks(records)
    if workers == 1:
        yield from (conversion.convert(reader, chunk) for chunk in chunks)
        return
    # Spawned: a fork of a process with threads, such as those of JAX, may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start, (conversion,)) as executor:
        waiting: deque[Future[TokenizedChunk]] = deque()
        try:
            for chunk in chunks:
                waiting.append(executor.submit(_convert, chunk))
                if len(waiting) > _CHUNKS_IN_ADVANCE * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield the records in lists that need a bounded memory."""
    chunk: list[Record] = []
    characters = 0
    for record in records:
        chunk.append(record)
        characters += _characters(record[2])
        if len(chunk) == _CHUNK_RECORDS or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _characters(value: Any) -> int:
    """Return about how many characters a JSON value has."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    if isinstance(value, list):
        # Lists of numbers are long, and their elements are alike.
        is_flat = bool(value) and isinstance(value[0], int)
        return 8 * len(value) if is_flat else sum(map(_characters, value))
    return 8


# --- a process that converts chunks ---------------------------------------------------------------

_of_process: tuple[Conversion, Reader] | None = None
"""The rule and the reader of this process."""


def _start(conversion: Conversion) -> None:
    """Prepare a process that converts chunks."""
    global _of_process  # noqa: PLW0603 - the functions of a pool have no other place
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        # A parent that was killed closes no queue: its processes would wait for ever.
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have processes of their own
    reader = make_reader(conversion.config, conversion.has_chats, conversion.end)
    _of_process = conversion, reader


def _convert(chunk: Sequence[Record]) -> TokenizedChunk:
    assert _of_process is not None
    conversion, reader = _of_process
    return conversion.convert(reader, chunk)
