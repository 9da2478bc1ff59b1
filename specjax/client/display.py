"""The events that a reader sees: committed tokens, provisional tokens, and retractions."""

from collections.abc import Sequence
from typing import Any

from specjax.client.events import CommittedEvent, ProvisionalEvent, RetractedEvent, TextEvent
from specjax.text import FinalChannel, GrowingText, TaggedStream, TextStream, text_stream


class Display:
    """A text as its reader sees it: the committed tokens, and the provisional tokens after them.

    Attributes:
        provisional: the provisional tokens, each with its text.

    Examples:
        >>> from specjax.client.display import Display
        >>> display = Display(None, prompt=[5, 6])
        >>> for event in [*display.show([7]), *display.show([8]), *display.commit([7, 9])]:
        ...     print(event)
        ProvisionalEvent(tokens=(7,), text='')
        ProvisionalEvent(tokens=(8,), text='')
        RetractedEvent(tokens=(8,), text='')
        CommittedEvent(tokens=(7, 9), text='', confirmed=1)
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        *,
        is_alone: bool = False,
        is_chat: bool = False,
    ) -> None:
        """Start an empty text.

        Args:
            tokenizer: the tokenizer; None for events without text.
            prompt: the token ids of the prompt.
            stop: stop strings. The committed text ends before the first one that occurs.
            is_alone: whether nothing will be committed. The provisional text then ends before the
                first stop string.
            is_chat: whether the text is the answer in a chat; see `specjax.text.FinalChannel`.
        """
        self._tokenizer, self._is_chat = tokenizer, is_chat
        self._all = list(prompt)  # the prompt and the committed tokens
        self._prompt = len(prompt)
        if tokenizer is None:
            self._growing = None
        else:
            self._growing = GrowingText(tokenizer, list(prompt), stop, is_chat=is_chat)
        is_cut = is_alone and bool(stop) and tokenizer is not None
        self._alone = (
            GrowingText(tokenizer, list(prompt), stop, is_chat=is_chat) if is_cut else None
        )
        # Decodes the provisional tokens.
        self._stream: TextStream | FinalChannel | TaggedStream | None = None
        self.provisional: list[tuple[int, str]] = []

    @property
    def has_stopped(self) -> bool:
        """True if the text has reached a stop string."""
        return any(
            growing is not None and growing.stopped for growing in (self._growing, self._alone)
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """The committed tokens up to a stop string."""
        return tuple(self._all[self._prompt :] if self._growing is None else self._growing.tokens)

    @property
    def text(self) -> str:
        """The text of the committed tokens."""
        return "" if self._growing is None else "".join(self._growing.pieces)

    def show(self, tokens: Sequence[int]) -> list[TextEvent]:
        """Append provisional tokens up to a stop string, and return one event for each."""
        events: list[TextEvent] = []
        for token in tokens:
            if self._alone is not None and self._alone.stopped:
                break
            events.append(self._show(token))
        return events

    def _show(self, token: int) -> TextEvent:
        text = ""
        if self._alone is not None:
            text = self._alone.push([token])
        elif self._tokenizer is not None:
            if self._stream is None:
                shown = [*self._all, *(token for token, _ in self.provisional)]
                self._stream = text_stream(self._tokenizer, shown, self._is_chat)
            text = self._stream.push([token])
        self.provisional.append((token, text))
        return ProvisionalEvent((token,), text)

    def commit(self, tokens: Sequence[int], *, is_last: bool = False) -> list[TextEvent]:
        """Append committed tokens, and return the events.

        Provisional tokens that differ from them are retracted first. ``is_last`` says that the text
        ends with these tokens.
        """
        new, text = self._grow(tokens, is_last=is_last)
        shown = [token for token, _ in self.provisional]
        is_equal = [before == after for before, after in zip(shown, new, strict=False)]
        confirmed = is_equal.index(False) if False in is_equal else len(is_equal)
        events: list[TextEvent] = []
        if confirmed < len(new) or is_last or self.has_stopped:
            wrong, self.provisional = self.provisional[confirmed:], self.provisional[:confirmed]
            self._stream = None  # it has decoded the wrong tokens
            if wrong:
                tokens_of_wrong = tuple(token for token, _ in wrong)
                events.append(RetractedEvent(tokens_of_wrong, "".join(text for _, text in wrong)))
        del self.provisional[:confirmed]
        return [*events, CommittedEvent(new, text, confirmed=confirmed)]

    def _grow(self, tokens: Sequence[int], *, is_last: bool) -> tuple[tuple[int, ...], str]:
        """Append committed tokens, and return them up to a stop string, with the text they add."""
        self._all += tokens
        if self._growing is None:
            return tuple(tokens), ""
        start = len(self._growing.tokens)
        # Push tokens one by one, as `_show` does. Pushed together, the text before an unfinished
        # character would be held back with that character.
        text = "".join([self._growing.push([token]) for token in tokens])
        if is_last:
            text += self._growing.finish()
        return tuple(self._growing.tokens[start:]), text
