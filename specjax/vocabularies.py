"""Comparison of two tokenizers: which of their tokens stand for the same text.

Tokenizers write the same text in different ways. Byte-level BPE (GPT-2, Llama 3, Qwen) gives every
byte a printable character, so that " the" is "Ġthe" and a line end is "Ċ". SentencePiece (Llama 2,
Gemma) writes "▁the", and has tokens such as "<0x0A>" for single bytes. This module converts both to
the bytes that each token stands for, and compares these.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

ROLES = ("eos_token", "bos_token")
"""The roles of special tokens, which have no text.

Two special tokens are the same if they are written the same way, such as ``<|im_start|>``, or else
if they have the same role.
"""

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def byte_characters() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE.

    Printable Latin-1 characters stand for their own code. The other 68 bytes are, in order, the
    characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(unprintable)
    }


_BYTE_OF = byte_characters()
_BYTES_ALONE = frozenset(character for character in _BYTE_OF if ord(character) >= 256)


@dataclass(frozen=True)
class VocabularyTokens:
    """The tokens of a tokenizer, by their texts and roles.

    Attributes:
        texts: the bytes of each token, by id, from `texts_of`. Special tokens are left out.
        roles: the id of the special token of each role, see `ROLES`.
        unknown: the id of the token for unknown text, or of a token that says little.
        written: the ids of special and other added tokens by their spelling, without that for
            unknown text.

    Examples:
        >>> from specjax.vocabularies import VocabularyTokens, texts_of
        >>> tokens = VocabularyTokens(texts_of({"▁the": 3, "A": 4, "<0x41>": 0}), {"eos_token": 2})
        >>> tokens.by_text
        {b' the': 3, b'A': 4}
        >>> len(tokens)  # different texts, and an end
        3
    """

    texts: Mapping[int, bytes]
    roles: Mapping[str, int]
    unknown: int = 0
    written: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of different texts and special tokens.

        It is less than the number of ids: SentencePiece has most one-byte characters twice.
        """
        return len(self.by_text) + len(self.special)

    @property
    def special(self) -> set[int]:
        """The ids of special tokens."""
        return {*self.roles.values(), *self.written.values()} - self.texts.keys()

    @classmethod
    def of(cls, tokenizer: Any, size: int | None = None) -> "VocabularyTokens":
        """Return the tokens of a tokenizer of transformers.

        Args:
            tokenizer: the tokenizer.
            size: ids from this one on are left out, for a model whose vocabulary is smaller than
                its tokenizer's.

        Examples:
            >>> from specjax.assets import embedded
            >>> from specjax.vocabularies import VocabularyTokens
            >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
            >>> tokens = VocabularyTokens.of(tokenizer)
            >>> tokens.texts[tokens.by_text[b" import"]]
            b' import'
        """
        vocabulary = {
            token: i for token, i in tokenizer.get_vocab().items() if size is None or i < size
        }
        added = {
            i: token
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.content in vocabulary
        }
        roles = {role: getattr(tokenizer, f"{role}_id") for role in ROLES}
        roles = {
            role: i for role, i in roles.items() if i is not None and (size is None or i < size)
        }
        special = {
            *tokenizer.all_special_ids,
            *roles.values(),
            *(i for i, token in added.items() if token.special),
        }
        literal = {token.content: i for i, token in added.items() if i not in special}
        plain = {token: i for token, i in vocabulary.items() if i not in special and i not in added}
        unknown = tokenizer.unk_token_id
        # Leave out the unknown token: if both models have one, its text differs between them.
        nothing = set() if unknown in roles.values() else {unknown}
        spellings = {
            token: i
            for token, i in vocabulary.items()
            if (i in special or i in added) and i not in nothing
        }
        if unknown is None or (size is not None and unknown >= size):
            unknown = roles.get("eos_token", 0)
        return cls(texts_of(plain, literal), roles, unknown, spellings)

    @cached_property
    def by_text(self) -> dict[bytes, int]:
        """The token of each text. Of several tokens with one text, it is the first in ``texts``."""
        by_text: dict[bytes, int] = {}
        for i, text in self.texts.items():
            by_text.setdefault(text, i)
        return by_text


def texts_of(
    vocabulary: Mapping[str, int], added: Mapping[str, int] | None = None
) -> dict[int, bytes]:
    """Return the bytes of each token, by id, in ascending order. Tokens for single bytes come last.

    The characters of the vocabulary show which kind it is: SentencePiece's marker ▁ is not a
    character of byte-level BPE.

    Args:
        vocabulary: the id of each token, as the tokenizer's model writes it, without special
            tokens.
        added: the ids of added tokens that are written literally, such as runs of spaces, without
            special tokens.

    Examples:
        >>> from specjax.vocabularies import texts_of
        >>> texts_of({"Ġthe": 0, "Ċ": 1, "Ã©": 2})  # byte-level BPE
        {0: b' the', 1: b'\\n', 2: b'\\xc3\\xa9'}
        >>> texts_of({"▁the": 0, "<0x0A>": 1, "é": 2})  # SentencePiece
        {0: b' the', 2: b'\\xc3\\xa9', 1: b'\\n'}
    """
    has_marker = any(_SPACE in token for token in vocabulary)
    is_byte_level = not has_marker and any(
        not _BYTES_ALONE.isdisjoint(token) for token in vocabulary
    )
    tokens = []
    for token, i in vocabulary.items():
        byte = None if is_byte_level else _BYTE.fullmatch(token)
        if byte:
            text = bytes([int(byte[1], 16)])
        elif is_byte_level:
            text = b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in token)
        else:
            text = token.replace(_SPACE, " ").encode()
        tokens.append((byte is not None, i, text))
    tokens += [(False, i, token.encode()) for token, i in (added or {}).items()]
    return {i: text for _, i, text in sorted(tokens)}


def shared_tokens(target: VocabularyTokens, draft: VocabularyTokens) -> dict[int, int]:
    """Return the draft's id for each of the target's tokens that it shares, in ascending order.

    No two of the target's tokens have the same id of the draft. Special and other added tokens are
    the same if they are written the same way; the remaining ones if they have the same role, the
    beginning or the end of a text. A special token is never the same as a word of the vocabulary.

    Examples:
        >>> from specjax.vocabularies import VocabularyTokens, shared_tokens, texts_of
        >>> target = VocabularyTokens(texts_of({"Ġthe": 0, "Ġcat": 1, "Ċ": 2}), {"eos_token": 3})
        >>> draft_texts = texts_of({"<0x0A>": 0, "▁cat": 8, "▁dog": 9})
        >>> draft = VocabularyTokens(draft_texts, {"eos_token": 5})
        >>> shared_tokens(target, draft)
        {1: 8, 2: 0, 3: 5}
        >>> written = {"<|im_start|>": 2, "<|im_end|>": 3}
        >>> target = VocabularyTokens({0: b"cat"}, {"eos_token": 3}, written=written)
        >>> written = {"<|im_start|>": 6, "<|im_end|>": 7, "</s>": 1}
        >>> draft = VocabularyTokens({8: b"cat"}, {"eos_token": 1}, written=written)
        >>> shared_tokens(target, draft)  # what is written alike goes before what has one role
        {0: 8, 2: 6, 3: 7}
    """
    shared = {i: draft.by_text[text] for text, i in target.by_text.items() if text in draft.by_text}
    alike = [
        (i, draft.written[token]) for token, i in target.written.items() if token in draft.written
    ]
    alike += [
        (target.roles[role], draft.roles[role])
        for role in ROLES
        if role in target.roles and role in draft.roles
    ]
    draft_ids = set(shared.values())
    for target_id, draft_id in alike:  # one token may have both roles
        if target_id not in shared and draft_id not in draft_ids:
            shared[target_id] = draft_id
            draft_ids.add(draft_id)
    return dict(sorted(shared.items()))


def read_as(target: VocabularyTokens, draft: VocabularyTokens) -> dict[int, int]:
    """Return the token that a draft model reads for each of the target's tokens.

    It is the same token if the draft model has it. Otherwise it is the token of the longest end of
    the text. For special tokens that it lacks it reads `VocabularyTokens.unknown`.

    Examples:
        >>> from specjax.vocabularies import VocabularyTokens, read_as, texts_of
        >>> target = VocabularyTokens(texts_of({"Ġthe": 0, "Ġcats": 1}), {"bos_token": 2})
        >>> draft = VocabularyTokens(texts_of({"▁the": 4, "ts": 5, "s": 6}), {}, unknown=7)
        >>> read_as(target, draft)
        {0: 4, 1: 5, 2: 7}
    """
    shared, by_text = shared_tokens(target, draft), draft.by_text
    ends = {
        i: next(
            (by_text[text[start:]] for start in range(len(text)) if text[start:] in by_text),
            draft.unknown,
        )
        for i, text in target.texts.items()
    }
    special = dict.fromkeys(target.special, draft.unknown)
    return dict(sorted((ends | special | shared).items()))
