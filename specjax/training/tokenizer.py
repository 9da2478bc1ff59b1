"""Tokenizers: trained on the text, or read from a checkpoint, and written beside the models that use them."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from specjax.config import ConfigError
from specjax.models.checkpoint import replacing

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


def read_tokenizer(directory: str | Path) -> tokenizers.Tokenizer:
    """The tokenizer.json of a checkpoint directory. Raises `ConfigError` when it has none."""
    file = Path(directory) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"data.tokenizer={str(directory)!r}: {file} is missing")
    return tokenizers.Tokenizer.from_file(str(file))


def save_tokenizer(directory: Path, tokenizer: tokenizers.Tokenizer, source: str, max_positions: int) -> None:
    """Write into a checkpoint ``directory`` the tokenizer of ``source``, a directory; if that is empty, ``tokenizer``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if source:  # with its chat template and special tokens
        exported = AutoTokenizer.from_pretrained(source)
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
