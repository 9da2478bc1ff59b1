"""Tokenizers: trained on text or read from a checkpoint, and saved beside their models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from specjax import text
from specjax.config import ConfigError
from specjax.files import replacing

END_OF_TEXT = "<|endoftext|>"
"""The token that begins every document of a tokenizer trained here, and so ends the one before."""


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Train a byte-level BPE tokenizer. It encodes any text, and decoding restores it exactly."""
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
        raise ConfigError(
            f"data.vocab_size={vocab_size}: the text yields only {tokenizer.get_vocab_size()}"
            " tokens"
        )
    begin = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, begin)]
    )
    return tokenizer


def read_tokenizer(directory: str | Path) -> Any:
    """Load the tokenizer of a checkpoint directory with transformers, as generation does.

    The ``padding`` and ``truncation`` that tokenizer.json may have are turned off in its
    ``backend_tokenizer``, as in generation.

    Raises:
        InputError: The directory has no tokenizer, or a damaged one.
    """
    if not text.has_tokenizer(Path(directory)):
        raise ConfigError(
            f"data.tokenizer={str(directory)!r}: {Path(directory) / 'tokenizer.json'} is missing"
        )
    tokenizer = text.load_tokenizer(Path(directory))
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(
            f"data.tokenizer={str(directory)!r}: tokenizers cannot read it; convert it to a"
            " tokenizer.json"
        )
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer


def encode_texts(
    tokenizer: tokenizers.Tokenizer, texts: Sequence[str], end: int | None = None
) -> list[list[int]]:
    """Return the token ids of each text.

    If the tokenizer adds no special token at the beginning or the end, ``end`` is appended, unless
    it is None.
    """

    def with_end(encoding: tokenizers.Encoding) -> list[int]:
        if end is None or any(encoding.special_tokens_mask):
            return encoding.ids
        return [*encoding.ids, end]

    return [with_end(encoding) for encoding in tokenizer.encode_batch(texts)]


def begin_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the token that the tokenizer puts before every text; None if it puts none."""
    encoding = tokenizer.encode("a")
    return encoding.ids[0] if encoding.special_tokens_mask[:1] == [1] else None


def save_tokenizer(
    directory: Path, tokenizer: tokenizers.Tokenizer, source: str, max_positions: int
) -> None:
    """Save a tokenizer into a checkpoint directory.

    Args:
        directory: the directory to write to.
        tokenizer: the tokenizer to save if ``source`` is empty.
        source: the directory of the tokenizer to copy; may be empty.
        max_positions: the maximum length of the model.
    """
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
