"""Tokenizers: trained on the text, or read from a checkpoint, and written beside the models that use them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from specjax import text
from specjax.config import ConfigError
from specjax.files import replacing

END_OF_TEXT = "<|endoftext|>"
"""Begins every document of a tokenizer trained here, and so also ends the one before it."""


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer: any text can be encoded, and decoding gives it back exactly."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError(f"data.vocab_size={vocab_size}: the text yields only {tokenizer.get_vocab_size()} tokens")
    begin = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, begin)])
    return tokenizer


def read_tokenizer(directory: str | Path) -> Any:
    """The tokenizer of a checkpoint directory as transformers loads it, and so as generation reads it.

    Its ``backend_tokenizer`` gives a text its tokens and no more: the ``padding`` and ``truncation`` that tokenizer.json may
    have are off, as they are in generation.

    Raises:
        InputError: there is no tokenizer, or one that is damaged.
    """
    if not text.has_tokenizer(Path(directory)):
        raise ConfigError(f"data.tokenizer={str(directory)!r}: {Path(directory) / 'tokenizer.json'} is missing")
    tokenizer = text.load_tokenizer(Path(directory))
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(f"data.tokenizer={str(directory)!r}: cannot be read by tokenizers: convert it to a tokenizer.json")
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer


def encode_texts(tokenizer: tokenizers.Tokenizer, texts: Sequence[str], end: int | None = None) -> list[list[int]]:
    """Token ids of each text. Where the tokenizer marks neither its beginning nor its end, ``end`` follows, if there is one."""

    def ended(encoding: tokenizers.Encoding) -> list[int]:
        return encoding.ids if end is None or any(encoding.special_tokens_mask) else [*encoding.ids, end]

    return [ended(encoding) for encoding in tokenizer.encode_batch(texts)]


def begin_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """The token that the tokenizer itself puts before every text; None where it puts none."""
    encoding = tokenizer.encode("a")
    return encoding.ids[0] if encoding.special_tokens_mask[:1] == [1] else None


def save_tokenizer(directory: Path, tokenizer: tokenizers.Tokenizer, source: str, max_positions: int) -> None:
    """Write into a checkpoint ``directory`` the tokenizer of ``source``, a directory; if that is empty, ``tokenizer``."""
    from transformers import PreTrainedTokenizerFast

    if source:  # with its chat template and special tokens
        exported = text.load_tokenizer(Path(source))
    else:
        exported = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=END_OF_TEXT,
            eos_token=END_OF_TEXT,
            clean_up_tokenization_spaces=False,
            model_max_length=max_positions,
        )
    with replacing(directory) as scratch:
        exported.save_pretrained(scratch)
