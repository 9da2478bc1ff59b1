"""What is told of a text: committed tokens, provisional ones behind them, and which of those are taken back."""

from collections.abc import Sequence
from typing import Any

from specjax.client.events import CommittedEvent, ProvisionalEvent, RetractedEvent, TextEvent
from specjax.text import FinalChannel, GrowingText, TextStream, text_stream


class Display:
    """One text as its reader sees it: what is committed, and what is provisional behind it.

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
        """Behind a ``prompt``. Without a tokenizer there are tokens and no text.

        The text ends before the first ``stop`` string of what is committed; where nothing will be (``is_alone``), of what is
        provisional. Of a chat's answer it is that of `specjax.text.FinalChannel`.
        """
        self._tokenizer, self._is_chat = tokenizer, is_chat
        self._all = list(prompt)  # and what is committed
        self._prompt = len(prompt)
        self._growing = None if tokenizer is None else GrowingText(tokenizer, list(prompt), stop, is_chat=is_chat)
        is_cut = is_alone and bool(stop) and tokenizer is not None
        self._alone = GrowingText(tokenizer, list(prompt), stop, is_chat=is_chat) if is_cut else None
        self._stream: TextStream | FinalChannel | None = None  # of provisional tokens
        self.provisional: list[tuple[int, str]] = []

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string was found."""
        return any(growing is not None and growing.stopped for growing in (self._growing, self._alone))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Committed, up to a stop string."""
        return tuple(self._all[self._prompt :] if self._growing is None else self._growing.tokens)

    @property
    def text(self) -> str:
        """Of the committed tokens."""
        return "" if self._growing is None else "".join(self._growing.pieces)

    def show(self, tokens: Sequence[int]) -> list[TextEvent]:
        """Further provisional ``tokens``, one event each, up to a stop string."""
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
                known = [*self._all, *(token for token, _ in self.provisional)]
                self._stream = text_stream(self._tokenizer, known, self._is_chat)
            text = self._stream.push([token])
        self.provisional.append((token, text))
        return ProvisionalEvent((token,), text)

    def commit(self, tokens: Sequence[int], *, is_last: bool = False) -> list[TextEvent]:
        """``tokens`` are committed, with which the text may be over. Provisional ones that differ are taken back first."""
        new, text = self._grow(tokens, is_last=is_last)
        shown = [token for token, _ in self.provisional]
        same = next(
            (place for place, (one, other) in enumerate(zip(shown, new, strict=False)) if one != other),
            min(len(shown), len(new)),
        )
        events: list[TextEvent] = []
        if same < len(new) or is_last or self.has_stopped:
            wrong, self.provisional, self._stream = self.provisional[same:], self.provisional[:same], None
            if wrong:
                events.append(RetractedEvent(tuple(token for token, _ in wrong), "".join(text for _, text in wrong)))
        del self.provisional[:same]
        return [*events, CommittedEvent(new, text, confirmed=same)]

    def _grow(self, tokens: Sequence[int], *, is_last: bool) -> tuple[tuple[int, ...], str]:
        """The ``tokens`` up to a stop string, and the text that they add."""
        self._all += tokens
        if self._growing is None:
            return tuple(tokens), ""
        known = len(self._growing.tokens)
        # One by one, as provisional ones: else the text before an unfinished character would be held back with it.
        text = "".join([self._growing.push([token]) for token in tokens])
        if is_last:
            text += self._growing.finish()
        return tuple(self._growing.tokens[known:]), text
