"""The common part of the writers of answers whose regions are parts of their own."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specjax.chat import Event, RegionClosed, RegionGrew, RegionOpened
from specjax.serving.handle import Handle, Piece
from specjax.serving.http.errors import RequestError
from specjax.serving.http.regions import AnswerRegions
from specjax.serving.http.responses import encode


class RegionWriter:
    """A writer of an answer with one text, see `specjax.serving.http.streaming.InterfaceWriter`.

    The whole answer is what its events have added up to, so it equals the sum of a stream.

    Attributes:
        handles: the handle of the text.
        has_long_begin: False.
    """

    has_long_begin = False

    def __init__(self, handle: Handle, prompt: Sequence[int], regions: AnswerRegions) -> None:
        """Start before the first token of a text.

        Args:
            handle: the handle of the text.
            prompt: the token ids of its prompt.
            regions: its regions.
        """
        self.handles = (handle,)
        self._prompt_tokens, self._regions = len(prompt), regions

    # --- for subclasses ---------------------------------------------------------------------------

    def start(self) -> Iterable[dict[str, Any]]:
        """Return the events before the text."""
        raise NotImplementedError

    def opened(self, event: RegionOpened, call_id: str) -> Iterable[dict[str, Any]]:
        """Return the events of a region that opens; ``call_id`` is that of a call."""
        raise NotImplementedError

    def grew(self, event: RegionGrew) -> Iterable[dict[str, Any]]:
        """Return the events of a region that grows."""
        raise NotImplementedError

    def closed(self, event: RegionClosed, is_cut: bool) -> Iterable[dict[str, Any]]:
        """Return the events of a region that closes; ``is_cut``: the limit of tokens ended it."""
        raise NotImplementedError

    def stop(self, reason: str) -> Iterable[dict[str, Any]]:
        """Return the events after the text, whose finish reason is that of a chat completion."""
        raise NotImplementedError

    def fail(self, error: RequestError) -> Iterable[dict[str, Any]]:
        """Return the events of an error in the middle of a stream."""
        raise NotImplementedError

    def result(self) -> dict[str, Any]:
        """Return the whole answer, after all events."""
        raise NotImplementedError

    @property
    def cached_tokens(self) -> int:
        """The number of tokens of the prompt that prefix caching saved."""
        return self.handles[0].cached_tokens

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return self._prompt_tokens

    @property
    def output_tokens(self) -> int:
        """The number of tokens of the text so far."""
        return len(self.handles[0].tokens)

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of the reasoning, see `AnswerRegions.reasoning_tokens`."""
        return self._regions.reasoning_tokens(self.output_tokens)

    # --- as a writer of an answer -----------------------------------------------------------------

    def begin(self) -> Iterator[bytes]:
        """Yield the events before the text."""
        return map(named_event, self.start())

    def first(self, index: int) -> tuple[bytes, ...]:
        """Return nothing: `begin` has sent it already."""
        return ()

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        """Yield the events of a piece."""
        return map(named_event, self._events(self._regions.push(piece.text)))

    def last(self, index: int) -> Iterator[bytes]:
        """Yield the events at the end of the text."""
        return map(named_event, self._last())

    def end(self) -> tuple[bytes, ...]:
        """Return nothing: the text is the whole answer."""
        return ()

    def failure(self, error: RequestError) -> Iterator[bytes]:
        """Yield the events of an error."""
        return map(named_event, self.fail(error))

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """Return the whole answer from the pieces of the text."""
        for _ in self.start():
            pass
        for piece in pieces[0]:
            for _ in self._events(self._regions.push(piece.text)):
                pass
        for _ in self._last():
            pass
        return self.result()

    def _last(self) -> Iterator[dict[str, Any]]:
        handle = self.handles[0]
        events = self._regions.finish(str(handle.finish_reason), handle.is_at_stop_string)
        reason = str(self._regions.finish_reason)
        yield from self._events(events, is_cut=reason == "length")
        yield from self.stop(reason)

    def _events(self, events: Sequence[Event], is_cut: bool = False) -> Iterator[dict[str, Any]]:
        for event in events:
            if isinstance(event, RegionOpened):
                call_id = self._regions.call_ids[event.index] if event.index >= 0 else ""
                yield from self.opened(event, call_id)
            elif isinstance(event, RegionGrew):
                yield from self.grew(event)
            else:
                yield from self.closed(event, is_cut)


def named_event(value: dict[str, Any]) -> bytes:
    """Return an object as a server-sent event that has the object's type as its name.

    Examples:
        >>> from specjax.serving.http.region_writer import named_event
        >>> named_event({"type": "ping"})
        b'event: ping\\ndata: {"type":"ping"}\\n\\n'
    """
    return b"event: " + value["type"].encode() + b"\ndata: " + encode(value) + b"\n\n"
