"""Biases of single tokens, allowed tokens and banned words, as a request states them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specjax.arguments import LARGEST_FLOAT, is_whole
from specjax.errors import InputError
from specjax.text import encode_continuation


@dataclass(frozen=True)
class TokenBiases:
    """The tokens that a text may not contain, or shall contain more or less often.

    Attributes:
        logit_bias: numbers that are added to the logits of tokens, by token id, as sorted pairs.
            -inf bans a token, and so does -100 in practice.
        allowed_token_ids: the only tokens that may be generated; None: all.
        bad_words: words that must not be generated, each a string or a tuple of token ids.

    Examples:
        >>> from specjax.token_biases import TokenBiases
        >>> biases = TokenBiases.of(logit_bias={"3": 1.5}, bad_words=[[2], [0, 1]])
        >>> biases.logit_bias
        ((3, 1.5),)
        >>> biases.bias(vocab_size=4).tolist(), biases.words
        ([0.0, 0.0, -inf, 1.5], [[0, 1]])
        >>> TokenBiases.of(allowed_token_ids=[9]).bias(vocab_size=4)
        Traceback (most recent call last):
        specjax.errors.InputError: allowed_token_ids: token id 9 is outside the vocabulary of 4...
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls, logit_bias: Any = None, allowed_token_ids: Any = None, bad_words: Any = None
    ) -> "TokenBiases":
        """Check the three parameters of a text, and return them. None states nothing.

        Raises:
            InputError: a parameter has a wrong type, or a number that cannot be used.
        """
        allowed = None
        if allowed_token_ids is not None:
            allowed = tuple(_ids("allowed_token_ids", allowed_token_ids))
            if not allowed:
                raise InputError("allowed_token_ids=[]: no token is allowed; give one, or None")
        words = () if bad_words is None else bad_words
        if not _is_list(words):
            raise InputError(f"bad_words={words!r}: give a list of strings, or of lists of ids")
        bad = tuple(
            word if isinstance(word, str) else tuple(_ids("bad_words", word)) for word in words
        )
        if not all(bad):
            raise InputError("bad_words: a word is empty; leave it out")
        return cls(_pairs(logit_bias), allowed, bad)

    @property
    def is_neutral(self) -> bool:
        """True if they change nothing."""
        return self == TokenBiases()

    def encoded(self, tokenizer: Any) -> "TokenBiases":
        """Return them with token ids in place of strings.

        A word that is a string is encoded twice: as it begins a text, and after a space, if that
        has as many tokens and begins with another one. vLLM reads ``bad_words`` so.

        Raises:
            InputError: a word has no tokens.

        Examples:
            >>> from specjax.token_biases import TokenBiases
            >>> tokenizer = specjax.load("embedded").tokenizer
            >>> biases = TokenBiases.of(bad_words=["import"]).encoded(tokenizer)
            >>> [tokenizer.decode(list(word)) for word in biases.bad_words]
            ['import', ' import']
        """
        words: list[tuple[int, ...]] = []
        for word in self.bad_words:
            if not isinstance(word, str):
                words.append(word)
                continue
            plain = tuple(encode_continuation(tokenizer, word))
            spaced = tuple(encode_continuation(tokenizer, f" {word.lstrip()}"))
            if not plain:
                raise InputError(f"bad_words: {word!r} has no tokens; leave it out")
            words.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                words.append(spaced)
        return replace(self, bad_words=tuple(words))

    @property
    def words(self) -> list[list[int]]:
        """The banned words of two tokens or more. `bias` bans the others."""
        return [list(word) for word in self._words_of_ids() if len(word) > 1]

    def _words_of_ids(self) -> list[tuple[int, ...]]:
        """Return the banned words, after a check that none is a string."""
        words: list[tuple[int, ...]] = []
        for word in self.bad_words:
            if isinstance(word, str):
                raise InputError(f"bad_words: {word!r} needs a tokenizer; give its token ids")
            words.append(word)
        return words

    def bias(self, vocab_size: int) -> np.ndarray:
        """Return ``[V]`` float32 what is added to the logits, -inf for a token that is banned.

        Raises:
            InputError: a token id is outside the vocabulary, every token is banned, or a word is
                a string.
        """
        words = self._words_of_ids()
        for name, ids in (
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", [token for word in words for token in word]),
        ):
            if wrong := [token for token in ids if token >= vocab_size]:
                raise InputError(
                    f"{name}: token id {wrong[0]} is outside the vocabulary of {vocab_size} tokens"
                )
        bias = np.zeros(vocab_size, np.float32)
        for token, value in self.logit_bias:
            bias[token] = value
        if self.allowed_token_ids is not None:
            is_allowed = np.zeros(vocab_size, bool)
            is_allowed[list(self.allowed_token_ids)] = True
            bias[~is_allowed] = -np.inf
        bias[[word[0] for word in words if len(word) == 1]] = -np.inf
        if np.all(np.isneginf(bias)):
            raise InputError(
                "logit_bias, allowed_token_ids, bad_words: no token is left that may be generated;"
                " ban fewer"
            )
        return bias


def _pairs(logit_bias: Any) -> tuple[tuple[int, float], ...]:
    """Return the pairs of a mapping from token ids to numbers. JSON's ids are strings."""
    if logit_bias is None:
        return ()
    if isinstance(logit_bias, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in logit_bias
    ):
        logit_bias = dict(logit_bias)  # already checked pairs
    if not isinstance(logit_bias, Mapping):
        raise InputError(f"logit_bias={logit_bias!r}: give a mapping from token ids to numbers")
    pairs: dict[int, float] = {}
    for token, value in logit_bias.items():
        is_digits = isinstance(token, str) and token.isascii() and token.isdigit()
        is_digits = is_digits and len(token) < 20
        (token_id,) = _ids("logit_bias", [int(token) if is_digits else token])
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not is_number or not (
            value <= LARGEST_FLOAT and (value >= -LARGEST_FLOAT or math.isinf(value))
        ):
            raise InputError(f"logit_bias[{token}]={value!r}: give a number; -inf bans the token")
        pairs[token_id] = float(value)
    return tuple(sorted(pairs.items()))


def _ids(name: str, ids: Any) -> list[int]:
    """Return token ids as Python integers."""
    ids = ids.tolist() if isinstance(ids, np.ndarray) else ids
    if not _is_list(ids):
        raise InputError(f"{name}={ids!r}: give a list of token ids")
    if wrong := [token for token in ids if not is_whole(token) or token < 0]:
        raise InputError(f"{name}: {wrong[0]!r} is not a token id")
    return [int(token) for token in ids]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
