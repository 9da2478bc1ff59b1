"""The token sequences of documents: what a run's tokenizer makes of texts and conversations."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

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
from specjax.training.documents import find_origin, hash_of
from specjax.training.records import Document
from specjax.training.tokenizer import begin_token, encode_texts, read_tokenizer, train_tokenizer
from specjax.training.unusable import RecordTally, UnusableRecordError
from specjax.training.written import WrittenTokens

HeldOutBy = Literal["content", "name"]
"""The rule that decides which documents are held out.

"content": a hash of the content, so that equal documents are on one side, wherever their files are.
"name": a hash of the name of the file and the place in it, as in runs of older versions.
"""


def is_held_out(document: Document, holdout: float, held_out_by: HeldOutBy) -> bool:
    """Return whether a document is held out. It depends on the document alone."""
    if held_out_by == "name":
        return zlib.crc32(document.name.encode(errors="replace")) / 2**32 < holdout
    return int(hash_of(find_origin(document))[:8], 16) / 2**32 < holdout


class TokenSequence(NamedTuple):
    """The tokens of a document, or of a part of it that is learnt by itself.

    Attributes:
        ids: ``[tokens]`` int32.
        mask: ``[tokens]`` bool which of them count as labels.
        is_generated: whether a target generated the tokens. They have their own end token, or were
            cut at the token limit, so a begin token that follows them does not mean their end.
    """

    ids: np.ndarray
    mask: np.ndarray
    is_generated: bool


@dataclass(frozen=True)
class Reader:
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
    encode: Callable[[Sequence[Document], RecordTally], Sequence[chat.Encoded | None]]
    chat_tokenizer: Any = None


def make_reader(
    config: DataConfig, has_chats: bool, end: int | None, texts: Sequence[str] = ()
) -> Reader:
    """Return the reader of a run.

    Args:
        config: the configuration of the data.
        has_chats: whether the documents are conversations.
        end: the end token of texts, if the tokenizer has none of its own; None without one.
        texts: the texts to train the tokenizer on, if the configuration names none.
    """
    if has_chats:
        return _chat_reader(config)
    tokenizer_hash = None
    if config.tokenizer:
        loaded = read_tokenizer(config.tokenizer)
        tokenizer_hash = fingerprint.of_tokenizer(loaded, chats=False)
        tokenizer = loaded.backend_tokenizer
        end = end if loaded.eos_token_id is None else loaded.eos_token_id
    else:
        tokenizer = train_tokenizer(texts, config.vocab_size)

    def encode(documents: Sequence[Document], _: RecordTally) -> list[chat.Encoded]:
        encoded = encode_texts(tokenizer, [document.text or "" for document in documents], end)
        return [(ids, np.ones(len(ids), bool)) for ids in encoded]

    vocab = tokenizer.get_vocab_size()
    return Reader(tokenizer, tokenizer_hash, vocab, begin_token(tokenizer), encode)


def _chat_reader(config: DataConfig) -> Reader:
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

    def encode(documents: Sequence[Document], tally: RecordTally) -> list[chat.Encoded | None]:
        return chat.encode_documents(tokenizer, documents, config.responses_only, tally)

    tokenizer_hash = fingerprint.of_tokenizer(tokenizer)
    backend, begin = tokenizer.backend_tokenizer, tokenizer.bos_token_id
    return Reader(backend, tokenizer_hash, len(tokenizer), begin, encode, tokenizer)


@dataclass(frozen=True)
class Sequencer:
    """The rule that makes token sequences of documents.

    Attributes:
        reader: tokenizes the documents that have no tokens of this run's tokenizer.
        vocab: the vocabulary size, which generated token ids must stay below.
        responses_only: see `DataConfig`.
    """

    reader: Reader
    vocab: int
    responses_only: bool

    def sequences(
        self, documents: Sequence[Document], tally: RecordTally
    ) -> list[list[TokenSequence]]:
        """Return the token sequences of each document, none of those that are left out.

        They are the generated tokens of a document if it has tokens of this tokenizer. Otherwise
        the reader tokenizes the document.

        Args:
            documents: the documents.
            tally: counts the documents that are left out.
        """
        tokenizer_hash = self.reader.tokenizer_hash
        to_encode = [d for d in documents if tokens_of(tokenizer_hash, d) is None]
        encoded = iter(self.reader.encode(to_encode, tally))
        by_document: list[list[TokenSequence]] = []
        for document in documents:
            generated = tokens_of(tokenizer_hash, document)
            sequences = [next(encoded)] if generated is None else self._generated(generated, tally)
            by_document.append(
                [
                    TokenSequence(np.asarray(ids, np.int32), mask, generated is not None)
                    for ids, mask in filter(None, sequences)
                ]
            )
        return by_document

    def _generated(self, generated: WrittenTokens, tally: RecordTally) -> list[chat.Encoded]:
        try:
            generated.check_vocabulary(self.vocab)
        except UnusableRecordError as error:
            tally.leave_out(error)
            return []
        return list(generated.sequences(self.responses_only))


def tokens_of(tokenizer_hash: str | None, document: Document) -> WrittenTokens | None:
    """Return the generated tokens of a document if they are of this tokenizer, else None."""
    if document.written is not None and document.written.tokenizer == tokenizer_hash:
        return document.written
    return None


@dataclass
class TokensOfDocuments:
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

    def add(self, documents: Sequence[Document]) -> None:
        """Count documents."""
        for document in documents:
            self.documents += 1
            is_used = tokens_of(self.tokenizer_hash, document) is not None
            self.used += is_used
            if not is_used and any(m.get("thinking") for m in document.messages or ()):
                self.reasoning += 1
            if document.written is None:
                continue
            self.recorded += 1
            if (settings := document.written.chat_template_kwargs) is not None:
                shown = shown_settings(settings)
                self.variables[shown] = self.variables.get(shown, 0) + 1

    def merge(self, more: "TokensOfDocuments") -> None:
        """Add the counts of more documents."""
        for name in ("documents", "recorded", "used", "reasoning"):
            setattr(self, name, getattr(self, name) + getattr(more, name))
        for shown, count in more.variables.items():
            self.variables[shown] = self.variables.get(shown, 0) + count

    def report(self, reader: Reader, config: DataConfig) -> None:
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
