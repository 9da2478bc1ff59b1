"""The text of an answer's tokens, with those special tokens that are tags."""

from collections.abc import Iterable, Sequence
from typing import Any

from specjax.chat.forms import ResponseForm
from specjax.text import TextStream


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
        self._marks = _mark_tokens(tokenizer, form)
        self._stream = TextStream(tokenizer, prompt)

    def push(self, tokens: Iterable[Any], last: bool = False) -> str:
        """Append tokens and return the new text. ``last`` also returns what was held back."""
        pieces: list[str] = []
        plain: list[int] = []
        for token in map(int, tokens):
            if (mark := self._marks.get(token)) is None:
                plain.append(token)
            else:
                # A tag ends a character that is not whole.
                pieces += [self._stream.push(plain, last=True), mark]
                plain = []
        return "".join(pieces) + self._stream.push(plain, last)


def prompt_text(tokenizer: Any, prompt: Sequence[int]) -> str:
    """Return the text of a prompt with its special tokens, as an `AnswerParser` takes it.

    Examples:
        >>> from specjax.chat import prompt_text
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> prompt_text(tokenizer, tokenizer.encode("import os"))
        '<|endoftext|>import os'
    """
    return tokenizer.decode(list(prompt), skip_special_tokens=False)


def _mark_tokens(tokenizer: Any, form: ResponseForm) -> dict[int, str]:
    """Return the text of each special token that is a tag of the form, by id."""
    special = {
        *(int(token) for token in getattr(tokenizer, "all_special_ids", ())),
        *(
            token
            for token, added_token in getattr(tokenizer, "added_tokens_decoder", {}).items()
            if added_token.special
        ),
    }
    names = {token: tokenizer.convert_ids_to_tokens(token) for token in special}
    marks = form.marks(name for name in names.values() if name)
    return {token: name for token, name in names.items() if name in marks}
