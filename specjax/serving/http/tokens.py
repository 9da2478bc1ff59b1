"""Single tokens as text and bytes, for logprobs."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    r"""What single tokens say. A token that is a part of a character says its bytes: ``bytes:\xc3``.

    So tokens that are no text by themselves can be told apart.

    Examples:
        >>> from specjax.assets import embedded
        >>> from specjax.serving.http.tokens import TokenTexts
        >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
        >>> texts = TokenTexts(tokenizer)
        >>> [texts.text(token) for token in tokenizer.encode("import os")]
        ['<|endoftext|>', 'import', ' os']
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._of = lru_cache(maxsize=65536)(self._look_up)

    def text(self, token: int) -> str:
        """What a token says."""
        return self._of(token)[0]

    def bytes_of(self, token: int) -> bytes:
        """The bytes that it stands for."""
        return self._of(token)[1]

    def decode(self, tokens: Sequence[int]) -> str:
        """What tokens say together, special tokens left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _look_up(self, token: int) -> tuple[str, bytes]:
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        word = self._tokenizer.convert_ids_to_tokens(token) or ""
        if _REPLACEMENT in text and _REPLACEMENT not in word:
            known = _bytes_of(word)
            if known is not None:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known), known
        # SentencePiece writes a space as a block. At the beginning of a text many tokenizers drop the first one, or all.
        spaced = word.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
        if spaced != word and spaced.replace(" ", "") == text.replace(" ", ""):
            text = spaced
        return text, text.encode(errors="replace")


def _bytes_of(word: str) -> bytes | None:
    """The bytes of a vocabulary's entry: ``<0xC3>``, or a character for each byte; None: it is written in another way."""
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes.fromhex(word[3:5])
    try:
        return bytes(_BYTES[character] for character in word)
    except KeyError:
        return None


def _byte_characters() -> dict[str, int]:
    """Which character byte-level vocabularies write for which byte: printable ones for themselves, the others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
