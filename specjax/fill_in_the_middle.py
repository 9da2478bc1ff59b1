"""Prompts for models that were trained to fill in the middle of a text, mostly code.

Such a model reads the text before and after a gap, with special tokens between them, and writes
what belongs into the gap. Bavarian et al. (2022, arXiv:2207.14255) describe the method, with the
order prefix, suffix, middle. Models that need another order, or SentencePiece's spaces removed
(Codestral, Code Llama), are not supported.
"""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from specjax import text
from specjax.errors import InputError
from specjax.plain_text import PlainText


class GapTokens(NamedTuple):
    """The special tokens around a gap.

    Attributes:
        prefix: comes before the text before the gap.
        suffix: comes before the text after the gap.
        middle: comes where the model begins to write.
        ends: tokens by which such models end the middle, besides their end-of-sequence token.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()


FAMILIES: tuple[GapTokens, ...] = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma.
    GapTokens(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder 2, Granite Code.
    GapTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>")),
    # DeepSeek-Coder, DeepSeek-V2, DeepSeek-V3.
    GapTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
)


_PLAIN: WeakKeyDictionary[Any, PlainText] = WeakKeyDictionary()


def gap_tokens(tokenizer: Any) -> GapTokens | None:
    """Return the special tokens by which a tokenizer marks a gap; None: it has none.

    Examples:
        >>> from specjax.fill_in_the_middle import gap_tokens
        >>> gap_tokens(specjax.load("embedded").tokenizer) is None
        True
    """
    added = tokenizer.get_added_vocab()
    for tokens in FAMILIES:
        if all(token in added for token in tokens[:3]):
            return tokens
    return None


def gap_end_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of the tokens that end a middle, besides the end-of-sequence token.

    Examples:
        >>> from specjax.fill_in_the_middle import gap_end_ids
        >>> gap_end_ids(specjax.load("embedded").tokenizer)
        ()
    """
    tokens, added = gap_tokens(tokenizer), tokenizer.get_added_vocab()
    return () if tokens is None else tuple(added[end] for end in tokens.ends if end in added)


def encode_gap(
    tokenizer: Any, prefix: str, suffix: str, add_special_tokens: bool = True
) -> list[int]:
    """Return the token ids of a prompt after which the model writes what is between two texts.

    Text that spells a special token is ordinary text.

    Args:
        tokenizer: a tokenizer of transformers.
        prefix: the text before the gap.
        suffix: the text after the gap.
        add_special_tokens: whether the prompt begins as the tokenizer begins a text.

    Raises:
        InputError: the tokenizer has no tokens that mark a gap, or a text is not valid Unicode.

    Examples:
        >>> from specjax.fill_in_the_middle import encode_gap
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokens = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
        >>> tokenizer.add_special_tokens({"additional_special_tokens": tokens})
        3
        >>> tokenizer.decode(encode_gap(tokenizer, "x = ", " + 1"))
        '<|endoftext|><fim_prefix>x = <fim_suffix> + 1<fim_middle>'
    """
    tokens = gap_tokens(tokenizer)
    if tokens is None:
        raise InputError(
            "suffix: this model's tokenizer has no tokens that mark a gap in a text; leave it out"
        )
    # It is made once for a tokenizer.
    if (plain := _PLAIN.get(tokenizer)) is None:
        plain = _PLAIN[tokenizer] = PlainText(tokenizer, tokens[:3])
    before, after, middle = tokenizer.convert_tokens_to_ids(list(tokens[:3]))
    beginning = text.beginning_of_texts(tokenizer) if add_special_tokens else []
    return [*beginning, before, *plain.encode(prefix), after, *plain.encode(suffix), middle]
