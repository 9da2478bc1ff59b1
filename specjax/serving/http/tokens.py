"""The text and bytes of single tokens, for logprobs."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from specjax.vocabularies import byte_characters

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    r"""The texts of single tokens. A token that is part of a character is shown as ``bytes:\xc3``.

    So tokens that are not valid text by themselves remain distinct.

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
        """Return the text of a token."""
        return self._of(token)[0]

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._of(token)[1]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of several tokens, without special tokens."""
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _look_up(self, token: int) -> tuple[str, bytes]:
        text = self._tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        word = self._tokenizer.convert_ids_to_tokens(token) or ""
        if _REPLACEMENT in text and _REPLACEMENT not in word:
            content = _bytes_of(word)
            if content is not None:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content
        # SentencePiece writes a space as a block, and many tokenizers drop leading ones when they
        # decode. This restores them.
        spaced = word.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
        if spaced != word and spaced.replace(" ", "") == text.replace(" ", ""):
            text = spaced
        return text, text.encode(errors="replace")


def _bytes_of(word: str) -> bytes | None:
    """Return the bytes of a vocabulary entry: ``<0xC3>``, or one character per byte; else None."""
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes.fromhex(word[3:5])
    try:
        return bytes(_BYTES[character] for character in word)
    except KeyError:
        return None


_BYTES = byte_characters()
