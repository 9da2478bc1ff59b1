"""Prompts for models that were trained to fill in the middle of a text, mostly code.

Such a model reads the text before and after a gap, with special tokens between them, and writes
what belongs into the gap. Bavarian et al. (2022, arXiv:2207.14255) describe the method. The tokens
and their order differ between families of models.
"""

from typing import Any, NamedTuple

from specjax import text
from specjax.errors import InputError


class Marks(NamedTuple):
    """The special tokens around a gap.

    Attributes:
        before_prefix: comes before the text before the gap.
        before_suffix: comes before the text after the gap.
        before_middle: comes where the model begins to write; empty: nothing does.
        is_suffix_first: whether the text after the gap comes first.
    """

    before_prefix: str
    before_suffix: str
    before_middle: str
    is_suffix_first: bool = False


FAMILIES: tuple[Marks, ...] = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma.
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder 2, Granite Code.
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # DeepSeek-Coder and DeepSeek-V2, V3.
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    # GLM-4.
    Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    # Codestral.
    Marks("[PREFIX]", "[SUFFIX]", "", is_suffix_first=True),
    # Code Llama.
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


def marks_of(tokenizer: Any) -> Marks | None:
    """Return the special tokens by which a tokenizer marks a gap; None: it has none.

    Examples:
        >>> from specjax.fill_in_the_middle import marks_of
        >>> marks_of(specjax.load("embedded").tokenizer) is None
        True
    """
    added = tokenizer.get_added_vocab()
    for marks in FAMILIES:
        if all(mark in added for mark in marks[:3] if mark):
            return marks
    return None


def encode_gap(tokenizer: Any, prefix: str, suffix: str) -> list[int]:
    """Return the token ids of a prompt after which the model writes what is between two texts.

    A begin token comes first if the tokenizer adds one to texts. Text that spells a special token
    is ordinary text.

    Raises:
        InputError: the tokenizer has no tokens that mark a gap, or a text is not valid Unicode.

    Examples:
        >>> from specjax.fill_in_the_middle import encode_gap
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> marks = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
        >>> tokenizer.add_special_tokens({"additional_special_tokens": marks})
        3
        >>> tokenizer.decode(encode_gap(tokenizer, "x = ", " + 1"))
        '<|endoftext|><fim_prefix>x = <fim_suffix> + 1<fim_middle>'
    """
    marks = marks_of(tokenizer)
    if marks is None:
        raise InputError(
            "suffix: this model's tokenizer has no tokens that mark a gap in a text; leave it out"
        )

    def mark(token: str) -> list[int]:
        return [tokenizer.convert_tokens_to_ids(token)] if token else []

    def plain(part: str) -> list[int]:
        return text.encode_plain(tokenizer, part) if part else []

    before = [*mark(marks.before_prefix), *plain(prefix)]
    after = [*mark(marks.before_suffix), *plain(suffix)]
    parts = [after, before] if marks.is_suffix_first else [before, after]
    begin, beginning = tokenizer.bos_token_id, tokenizer("a")["input_ids"][:1]
    first = [begin] if begin is not None and list(beginning) == [begin] else []
    return [*first, *parts[0], *parts[1], *mark(marks.before_middle)]
