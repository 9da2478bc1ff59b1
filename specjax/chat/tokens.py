"""The text of an answer's tokens, with those special tokens that are tags."""

from collections.abc import Iterable, Sequence
from typing import Any

from specjax.chat.forms import ResponseForm
from specjax.text import TaggedStream, special_texts


class AnswerText:
    """A decoder of an answer's tokens for an `AnswerParser`.

    It differs from `specjax.text.TextStream` in one thing: special tokens that are tags of the
    answer's form are text. All others, such as the end token, are left out as usual.

    Examples:
        >>> from specjax.chat import AnswerText, family_form
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> text = AnswerText(tokenizer, family_form("qwen3"), tokenizer.encode("import"))
        >>> text.push(tokenizer.encode(" os"), last=True)
        ' os'
    """

    def __init__(self, tokenizer: Any, form: ResponseForm, prompt: Sequence[int]) -> None:
        """Start after the token ids of a prompt."""
        self._stream = TaggedStream(tokenizer, prompt, tag_tokens(tokenizer, form))

    def push(self, tokens: Iterable[Any], last: bool = False) -> str:
        """Append tokens and return the new text. ``last`` also returns what was held back."""
        return self._stream.push(tokens, last)


def prompt_text(tokenizer: Any, prompt: Sequence[int]) -> str:
    """Return the text of a prompt with its special tokens, as an `AnswerParser` takes it.

    Examples:
        >>> from specjax.chat import prompt_text
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> prompt_text(tokenizer, tokenizer.encode("import os"))
        '<|endoftext|>import os'
    """
    return tokenizer.decode(list(prompt), skip_special_tokens=False)


def tag_tokens(tokenizer: Any, form: ResponseForm) -> dict[int, str]:
    """Return the text of each special token that is a tag of the form, by id.

    Examples:
        >>> from specjax.chat import family_form, tag_tokens
        >>> tag_tokens(specjax.load("embedded").tokenizer, family_form("qwen3"))
        {}
    """
    names = special_texts(tokenizer)
    marks = form.marks(names.values())
    return {token: name for token, name in names.items() if name in marks}
