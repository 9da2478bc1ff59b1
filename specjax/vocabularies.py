"""Comparing two tokenizers: which tokens of one stand for the same text as tokens of the other.

Tokenizers write the same text in different ways. Byte-level BPE (GPT-2, Llama 3, Qwen) gives every byte a printable character
of its own, so that " the" is "Ġthe" and a line end is "Ċ". SentencePiece (Llama 2, Gemma) writes "▁the", and has tokens such
as "<0x0A>" for single bytes. Here both become the bytes that a token stands for, and these are compared.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

ROLES = ("eos_token", "bos_token")
"""What a special token may be for. Special tokens are no text: two of them are the same where they are written alike, as
``<|im_start|>``, or else where their roles are."""

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def _byte_characters() -> dict[str, int]:
    """The byte that each character stands for in byte-level BPE: printable Latin-1 characters for their own codes, and for the
    68 others the characters from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
_BYTES_ALONE = frozenset(character for character in _BYTE_OF if ord(character) >= 256)


@dataclass(frozen=True)
class VocabularyTokens:
    """The tokens of a tokenizer, by what they stand for.

    Attributes:
        texts: the bytes that each token stands for, by id, as `texts_of` makes them. Special tokens are not among them.
        roles: the ids of special tokens by what they are for, see `ROLES`.
        unknown: the id of the token for what has no token; else of one that says little.
        written: the ids of special and other added tokens by how they are written, but for that of what has no token.

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
        """How many different texts and special tokens: SentencePiece has most characters of a byte twice."""
        return len(self.by_text) + len(self.special)

    @property
    def special(self) -> set[int]:
        """The ids of special tokens."""
        return {*self.roles.values(), *self.written.values()} - self.texts.keys()

    @classmethod
    def of(cls, tokenizer: Any, size: int | None = None) -> "VocabularyTokens":
        """Those of a tokenizer of transformers.

        Args:
            tokenizer: of transformers.
            size: ids from here on are left out: of a model whose vocabulary is smaller than its tokenizer's.

        Examples:
            >>> from specjax.assets import embedded
            >>> from specjax.vocabularies import VocabularyTokens
            >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
            >>> tokens = VocabularyTokens.of(tokenizer)
            >>> tokens.texts[tokens.by_text[b" import"]]
            b' import'
        """
        vocabulary = {token: i for token, i in tokenizer.get_vocab().items() if size is None or i < size}
        added = {i: each for i, each in tokenizer.added_tokens_decoder.items() if each.content in vocabulary}
        roles = {role: getattr(tokenizer, f"{role}_id") for role in ROLES}
        roles = {role: i for role, i in roles.items() if i is not None and (size is None or i < size)}
        special = {*tokenizer.all_special_ids, *roles.values(), *(i for i, each in added.items() if each.special)}
        literal = {each.content: i for i, each in added.items() if i not in special}
        plain = {token: i for token, i in vocabulary.items() if i not in special and i not in added}
        unknown = tokenizer.unk_token_id
        # The unknown token is left out: both models may have one, but it stands for different text in each.
        nothing = set() if unknown in roles.values() else {unknown}
        written = {token: i for token, i in vocabulary.items() if (i in special or i in added) and i not in nothing}
        unknown = roles.get("eos_token", 0) if unknown is None or (size is not None and unknown >= size) else unknown
        return cls(texts_of(plain, literal), roles, unknown, written)

    @cached_property
    def by_text(self) -> dict[bytes, int]:
        """The token of each text; of several that have it the first of ``texts``."""
        found: dict[bytes, int] = {}
        for i, text in self.texts.items():
            found.setdefault(text, i)
        return found


def texts_of(vocabulary: Mapping[str, int], added: Mapping[str, int] | None = None) -> dict[int, bytes]:
    """The bytes that each token stands for, by id. Tokens for single bytes come last, and else lower ids come first.

    SentencePiece's marker ▁ is no character of byte-level BPE, so that a vocabulary tells by its tokens which it is.

    Args:
        vocabulary: the id of each token, as the tokenizer's model writes it, without special tokens.
        added: of tokens that are written as they are, such as runs of spaces; special tokens are not among them either.

    Examples:
        >>> from specjax.vocabularies import texts_of
        >>> texts_of({"Ġthe": 0, "Ċ": 1, "Ã©": 2})  # byte-level BPE
        {0: b' the', 1: b'\\n', 2: b'\\xc3\\xa9'}
        >>> texts_of({"▁the": 0, "<0x0A>": 1, "é": 2})  # SentencePiece
        {0: b' the', 2: b'\\xc3\\xa9', 1: b'\\n'}
    """
    has_marker = any(_SPACE in token for token in vocabulary)
    is_byte_level = not has_marker and any(not _BYTES_ALONE.isdisjoint(token) for token in vocabulary)
    found = []
    for token, i in vocabulary.items():
        byte = None if is_byte_level else _BYTE.fullmatch(token)
        if byte:
            text = bytes([int(byte[1], 16)])
        elif is_byte_level:
            text = b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in token)
        else:
            text = token.replace(_SPACE, " ").encode()
        found.append((byte is not None, i, text))
    found += [(False, i, token.encode()) for token, i in (added or {}).items()]
    return {i: text for _, i, text in sorted(found)}


def shared_tokens(target: VocabularyTokens, draft: VocabularyTokens) -> dict[int, int]:
    """The draft's token for each of the target's that it has too, ascending; no two of them alike.

    Special tokens, and others that were added, are the same where they are written alike; of the rest, where a text ends and
    where it begins. A special token and a word of the vocabulary are never the same.

    Examples:
        >>> from specjax.vocabularies import VocabularyTokens, shared_tokens, texts_of
        >>> target = VocabularyTokens(texts_of({"Ġthe": 0, "Ġcat": 1, "Ċ": 2}), {"eos_token": 3})
        >>> draft = VocabularyTokens(texts_of({"<0x0A>": 0, "▁cat": 8, "▁dog": 9}), {"eos_token": 5})
        >>> shared_tokens(target, draft)
        {1: 8, 2: 0, 3: 5}
        >>> target = VocabularyTokens({0: b"cat"}, {"eos_token": 3}, written={"<|im_start|>": 2, "<|im_end|>": 3})
        >>> draft = VocabularyTokens({8: b"cat"}, {"eos_token": 1}, written={"<|im_start|>": 6, "<|im_end|>": 7, "</s>": 1})
        >>> shared_tokens(target, draft)  # what is written alike goes before what has one role
        {0: 8, 2: 6, 3: 7}
    """
    shared = {i: draft.by_text[text] for text, i in target.by_text.items() if text in draft.by_text}
    alike = [(i, draft.written[token]) for token, i in target.written.items() if token in draft.written]
    alike += [(target.roles[role], draft.roles[role]) for role in ROLES if role in target.roles and role in draft.roles]
    taken = set(shared.values())
    for ours, theirs in alike:  # one token may have both roles
        if ours not in shared and theirs not in taken:
            shared[ours] = theirs
            taken.add(theirs)
    return dict(sorted(shared.items()))


def read_as(target: VocabularyTokens, draft: VocabularyTokens) -> dict[int, int]:
    """What a draft model reads for each of the target's tokens: the same token; where it has none, the longest end of it.

    For special tokens that it lacks it reads `VocabularyTokens.unknown`.

    Examples:
        >>> from specjax.vocabularies import VocabularyTokens, read_as, texts_of
        >>> target = VocabularyTokens(texts_of({"Ġthe": 0, "Ġcats": 1}), {"bos_token": 2})
        >>> draft = VocabularyTokens(texts_of({"▁the": 4, "ts": 5, "s": 6}), {}, unknown=7)
        >>> read_as(target, draft)
        {0: 4, 1: 5, 2: 7}
    """
    shared, known = shared_tokens(target, draft), draft.by_text
    ends = {
        i: next((known[text[at:]] for at in range(len(text)) if text[at:] in known), draft.unknown)
        for i, text in target.texts.items()
    }
    special = dict.fromkeys(target.special, draft.unknown)
    return dict(sorted((ends | special | shared).items()))
