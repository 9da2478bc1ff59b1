"""What a request's owner holds: the text while it grows, for threads and for asyncio."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from specjax.decoding.stats import Stats
from specjax.evaluation import metrics
from specjax.pipeline import Generation
from specjax.serving.scheduler import Ticket
from specjax.text import GrowingText

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""Why a text ended: at an end-of-sequence token or a stop string, at its limit, by its owner, or because the engine failed."""


class EngineError(RuntimeError):
    """The engine could not go on; its error is the cause."""


class TextCancelledError(RuntimeError):
    """The text was cancelled before it was finished."""


@dataclass(frozen=True)
class Piece:
    """What came in at once.

    Attributes:
        text: new text; may be empty where a token is only a part of a character, or may be the beginning of a stop string.
        tokens: new token ids. When a stop string ends the text, `Handle.tokens` lacks those behind the token that completed
            it.

    Examples:
        >>> from specjax.serving import Piece
        >>> pieces = [Piece(text="import ", tokens=(702, 221)), Piece(text="os", tokens=(709,))]
        >>> "".join(piece.text for piece in pieces)
        'import os'
    """

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class NewStats:
    """What a row did in a decode call.

    Attributes:
        steps: of the row.
        emitted: tokens.
        accepted_at: ``[D]`` steps in which a token of that depth was emitted.
    """

    steps: int
    emitted: int
    accepted_at: np.ndarray


@dataclass
class Times:
    """When things happened, by `time.perf_counter`; None: not yet."""

    submitted: float
    first_token: float | None = None
    finished: float | None = None


class Handle:
    """A text that is being generated. Made by `Engine.submit`.

    Iterate over it for the pieces, with ``for`` in a thread or with ``async for``; every iteration begins at the beginning.

    Attributes:
        ticket: what the scheduler knows it by.
        settings: how it is drawn.
        finish_reason: None while it goes on.
        times: when it was submitted, began and ended.

    Examples:
        >>> from specjax.serving import Engine
        >>> with Engine(target, drafts=(None,), rows=2, widths=(2,), capacity=32) as engine:
        ...     handle = engine.submit(prompts[0].tolist(), max_new_tokens=8)
        ...     tokens = [token for piece in handle for token in piece.tokens]
        >>> tokens == plain.tokens[0, 6:].tolist(), handle.finish_reason
        (True, 'length')
    """

    def __init__(
        self,
        cancel: Callable[[Ticket], None],
        ticket: Ticket,
        settings: dict[str, Any],
        growing: GrowingText | None,
    ) -> None:
        """Made by `Engine.submit`; ``growing`` is None where there is no tokenizer."""
        self.ticket, self.settings = ticket, settings
        self.finish_reason: FinishReason | None = None
        self.times = Times(submitted=time.perf_counter())
        self._cancel = cancel
        self._growing = growing
        self._pieces: list[Piece] = []
        self._tokens: list[int] = []
        self._changed = threading.Condition()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._error: BaseException | None = None
        self._before: Stats | None = None  # of the rows that it had before it was put back
        self._current: Stats | None = None

    # --- for its owner -------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """What there is so far; without a tokenizer, nothing."""
        with self._changed:
            return "".join(piece.text for piece in self._pieces)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Generated so far."""
        with self._changed:
            return tuple(self._tokens)

    @property
    def acceptance(self) -> metrics.Acceptance | None:
        """How the drafts fared so far; None before the first decode call."""
        with self._changed:
            stats = _added(self._before, self._current)
        return None if stats is None else metrics.summarise(stats)

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the end.

        Raises:
            TimeoutError: it took longer than ``timeout`` seconds. The text goes on.
            TextCancelledError: it was cancelled.
            EngineError: the engine ended with an error.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.finish_reason is not None, timeout):
                raise TimeoutError(f"not finished after {timeout:g} seconds")
        self._raise_if_broken()
        acceptance = self.acceptance
        assert acceptance is not None  # a text has at least one token
        return Generation(self.text, self.tokens, acceptance)

    def cancel(self) -> None:
        """End it. Its row is free for others within one decode call."""
        self._cancel(self.ticket)

    def __iter__(self) -> Iterator[Piece]:
        """The pieces as they come. Raises as `result`."""
        number = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._pieces) > number or self.finish_reason is not None)  # noqa: B023
                pieces = self._pieces[number:]
            if not pieces:
                self._raise_if_broken()
                return
            number += len(pieces)
            yield from pieces

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """As `__iter__`, without blocking the event loop."""
        number, changed = 0, asyncio.Event()
        listener = (asyncio.get_running_loop(), changed)
        with self._changed:
            self._listeners.append(listener)
        try:
            while True:
                changed.clear()
                with self._changed:
                    pieces, over = self._pieces[number:], self.finish_reason is not None
                for piece in pieces:
                    yield piece
                number += len(pieces)
                if over and not pieces:
                    self._raise_if_broken()
                    return
                if not pieces:
                    await changed.wait()
        finally:
            with self._changed:
                self._listeners.remove(listener)

    def _raise_if_broken(self) -> None:
        if self.finish_reason == "cancelled":
            raise TextCancelledError("the text was cancelled")
        if self.finish_reason == "error":
            raise EngineError("the engine could not go on") from self._error

    # --- for the engine ------------------------------------------------------------------------------------------------

    def take_stats(self, stats: Stats) -> "NewStats":
        """Keep what a row counts since its text was admitted, ``[1]``. What is new in it."""
        with self._changed:
            before, self._current = self._current, stats
        emitted = stats.histogram[0] @ np.arange(stats.depth + 2)
        if before is None:
            return NewStats(int(stats.steps[0]), int(emitted), np.asarray(stats.accepted_at[0]))
        emitted = emitted - before.histogram[0] @ np.arange(stats.depth + 2)
        accepted_at = np.subtract(stats.accepted_at[0], before.accepted_at[0])
        return NewStats(int(stats.steps[0] - before.steps[0]), int(emitted), accepted_at)

    def admitted(self) -> None:
        """It has a row, which counts from zero. It may have had another one before."""
        with self._changed:
            self._before, self._current = _added(self._before, self._current), None

    def deliver(self, tokens: Sequence[int], done: bool) -> bool:
        """There are new ``tokens``, after which the text may be over. False where they completed a stop string."""
        if not tokens and not done:
            return True
        new, piece = tuple(tokens), ""
        if self._growing is not None:
            known = len(self._growing.tokens)
            piece = self._growing.push(tokens)
            if done:
                piece += self._growing.finish()
            new = tuple(self._growing.tokens[known:])
        stopped = self._growing is not None and self._growing.stopped
        reason: FinishReason | None = None
        if stopped:
            reason = "stop"
        elif done:
            reason = "stop" if tokens and tokens[-1] in self.settings["eos"] else "length"
        self._add(Piece(piece, new), reason)
        return not stopped

    def end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """It is over without being finished."""
        with self._changed:
            if self.finish_reason is None:
                self._error = error
                self._finish(reason)

    def _add(self, piece: Piece, reason: FinishReason | None) -> None:
        with self._changed:
            if self.finish_reason is not None:
                return
            if piece.tokens and self.times.first_token is None:
                self.times.first_token = time.perf_counter()
            self._pieces.append(piece)
            self._tokens += piece.tokens
            if self._growing is not None and reason is not None:  # a stop string may have taken tokens back
                self._tokens = list(self._growing.tokens)
            if reason is not None:
                self._finish(reason)
            else:
                self._tell()

    def _finish(self, reason: FinishReason) -> None:
        self._cancel = _nothing  # a handle that is kept does not keep the engine
        self.finish_reason, self.times.finished = reason, time.perf_counter()
        self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        for loop, changed in self._listeners:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(changed.set)


def _added(one: Stats | None, other: Stats | None) -> Stats | None:
    if one is None or other is None:
        return other if one is None else one
    return jax.tree.map(np.add, one, other)


def _nothing(ticket: Ticket) -> None:
    """What cancelling a text does that has ended."""
