"""Small tokenizers for tests of grammars."""

from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LETTERS = tuple('abcdef"{}:,01 ')
MERGES = (("a", "b"), ("ab", "c"), ("d", "e"), ("0", "1"), ('"', "a"))
END = "</s>"


def small_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer of 20 tokens, of which id 19 ends a text."""
    letters = [pre_tokenizers.ByteLevel(False).pre_tokenize_str(c)[0][0] for c in LETTERS]
    pieces = [*letters, *(first + second for first, second in MERGES)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
