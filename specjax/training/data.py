"""Documents to packed windows of tokens, in an order that is fixed by the seed and can be resumed."""

import zlib
from collections.abc import Callable, Sequence

import grain
import numpy as np
import tokenizers

from specjax.config import ConfigError
from specjax.progress import say
from specjax.templates import with_template
from specjax.training import chat, fingerprint
from specjax.training.config import DataConfig
from specjax.training.documents import Document, read_documents
from specjax.training.tokenizer import begin_token, encode_texts, read_tokenizer, train_tokenizer
from specjax.training.written import WrittenTokens


def split_documents(documents: Sequence[Document], holdout: float) -> tuple[list[Document], list[Document]]:
    """Those to train on and those held out. A document's side depends on its name alone, not on which others are there."""

    def held_out(document: Document) -> bool:
        return zlib.crc32(document.name.encode()) / 2**32 < holdout

    train, held = [d for d in documents if not held_out(d)], [d for d in documents if held_out(d)]
    if not train or not held:
        raise ConfigError(f"data.holdout={holdout}: leaves {len(train)} documents to train on and {len(held)} held out")
    return train, held


def pack(
    documents: Sequence[Sequence[int] | np.ndarray],
    window: int,
    masks: Sequence[np.ndarray] | None = None,
    begin: int | None = None,
) -> dict[str, np.ndarray]:
    """Lay documents end to end and cut windows of ``window + 1`` tokens, neighbours sharing one token.

    What one document says first does not follow from another: such a label does not count, unless it is ``begin``, which says
    that the document before it has ended.

    Args:
        documents: token ids.
        window: labels of a window.
        masks: for each document, ``[tokens]`` bool, which of its tokens count as labels; None: all of them.
        begin: the token that documents begin with, so that it separates them; None: they begin with none.

    Returns:
        ``tokens [W, window+1]`` int32; ``segments [W, window+1]`` int32, the number of the document of each token; and
        ``loss_mask [W, window]`` bool, which labels count. Windows in which none does are left out.
    """
    tokens = np.concatenate([np.asarray(d, np.int32) for d in documents])
    counted = np.ones(len(tokens), bool) if masks is None else np.concatenate(masks)
    segments = np.repeat(np.arange(len(documents), dtype=np.int32), [len(d) for d in documents])
    across = np.append(False, segments[1:] != segments[:-1])
    counted &= ~across if begin is None else ~across | (tokens == begin)
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
    """Endless batches, shuffled again each epoch; every bit of ``seed`` counts. The iterator's state is a small JSON object."""
    windows = len(packed["tokens"])
    if windows < batch:
        raise ConfigError(f"data.batch={batch}: the text makes only {windows} windows")
    dataset = grain.MapDataset.source(PackedWindows(packed)).seed(seed).shuffle().repeat().batch(batch, drop_remainder=True)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


def prepare(
    config: DataConfig, end: int | None = None, vocab: int | None = None
) -> tuple[tokenizers.Tokenizer, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The tokenizer, and the packed training and held-out windows of a `DataConfig`.

    Texts are separated by the token that the tokenizer begins them with. Where it begins them with none, they end with its end
    token, or if it names none with ``end``, the target's. Without that either, nothing says that a text ends, and it is not
    learnt. Conversations end as their template has it.

    Records that have the tokens that they were written in, by this tokenizer, are read in those; they end as they were written.
    Their ids must be below ``vocab``, by default the tokenizer's size.
    """
    train, held = split_documents(read_documents(config.source), config.holdout)
    chats = [document for document in (*train, *held) if document.messages is not None]
    if chats and len(chats) < len(train) + len(held):
        raise ConfigError(f"data.source={config.source!r}: holds texts and conversations; give one kind")
    if chats:
        return _prepare_chats(config, train, held, vocab)
    own = None
    if config.tokenizer:
        loaded = read_tokenizer(config.tokenizer)
        own = fingerprint.of_tokenizer(loaded, chats=False)
        tokenizer, end = loaded.backend_tokenizer, end if loaded.eos_token_id is None else loaded.eos_token_id
    else:
        tokenizer = train_tokenizer([document.text or "" for document in train], config.vocab_size)
    begin = begin_token(tokenizer)

    def encode(documents: Sequence[Document]) -> list[chat.Encoded]:
        encoded = encode_texts(tokenizer, [document.text or "" for document in documents], end)
        return [(ids, np.ones(len(ids), bool)) for ids in encoded]

    _say_what_is_used([*train, *held], own, config)
    size = vocab or tokenizer.get_vocab_size()

    def windows(documents: Sequence[Document]) -> dict[str, np.ndarray]:
        return _pack(_as_written(documents, own, size, config, encode), config.window, begin)

    return tokenizer, windows(train), windows(held)


def _prepare_chats(
    config: DataConfig, train: Sequence[Document], held: Sequence[Document], vocab: int | None
) -> tuple[tokenizers.Tokenizer, dict[str, np.ndarray], dict[str, np.ndarray]]:
    if not config.tokenizer:
        raise ConfigError("data.tokenizer='': conversations need a tokenizer with a chat template; name its directory")
    tokenizer = with_template(
        read_tokenizer(config.tokenizer), config.chat_template, config.chat_template_kwargs, section="data."
    )

    def encode(documents: Sequence[Document]) -> list[chat.Encoded]:
        return chat.encode(tokenizer, [document.messages or () for document in documents], config.responses_only)

    own = fingerprint.of_tokenizer(tokenizer)
    _say_what_is_used([*train, *held], own, config)
    size = vocab or len(tokenizer)

    def windows(documents: Sequence[Document]) -> dict[str, np.ndarray]:
        return _pack(_as_written(documents, own, size, config, encode), config.window, tokenizer.bos_token_id)

    return tokenizer.backend_tokenizer, windows(train), windows(held)


def _pack(encoded: Sequence[chat.Encoded], window: int, begin: int | None) -> dict[str, np.ndarray]:
    return pack([ids for ids, _ in encoded], window, [mask for _, mask in encoded], begin)


def _as_written(
    documents: Sequence[Document],
    own: str | None,
    vocab: int,
    config: DataConfig,
    encode: Callable[[Sequence[Document]], list[chat.Encoded]],
) -> list[chat.Encoded]:
    """The sequences of ``documents`` in order, each with which of its tokens count: those that they were written in where these
    are of the tokenizer ``own``, and else what ``encode`` makes of their texts."""
    encoded = iter(encode([document for document in documents if _tokens_of(own, document) is None]))
    found: list[chat.Encoded] = []
    before = None
    for document in documents:
        written = _tokens_of(own, document)
        if written is not None:
            written.check_vocabulary(vocab)
            found += written.sequences(config.responses_only)
        else:
            ids, mask = next(encoded)
            if before is not None:  # it says itself where it ends, or was cut: what follows does not say that it ended
                mask[:1] = False
            found.append((ids, mask))
        before = written
    return found


def _tokens_of(own: str | None, document: Document) -> WrittenTokens | None:
    """Those that ``document`` was written in, where they are of the tokenizer ``own``."""
    return document.written if document.written is not None and document.written.tokenizer == own else None


def _say_what_is_used(documents: Sequence[Document], own: str | None, config: DataConfig) -> None:
    having = [document for document in documents if document.written is not None]
    used = sum(_tokens_of(own, document) is not None for document in having)
    if used:
        say(f"data.source={config.source!r}: {used} of {len(documents)} documents are read in the tokens they were written in")
    if used < len(having):
        say(
            f"data.source={config.source!r}: {len(having) - used} of {len(documents)} documents have tokens of another "
            "tokenizer or chat template than this run's: their text is tokenised"
        )
