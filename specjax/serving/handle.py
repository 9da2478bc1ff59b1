"""What a request's owner holds: the text while it grows, for threads and for asyncio."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from specjax.decoding.stats import Stats
from specjax.errors import LogitsError
from specjax.evaluation import metrics
from specjax.pipeline import Generation
from specjax.serving.scheduler import Request
from specjax.text import GrowingText

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""Why a text ended: at an end-of-sequence token or a stop string, at its limit, by its owner, or with an error, of the engine
or of this text alone."""


class EngineError(RuntimeError):
    """The engine could not go on, or this text alone could not: the message says which. The error is the cause."""


class TextCancelledError(RuntimeError):
    """The text was cancelled before it was finished."""


@dataclass(frozen=True)
class Piece:
    """What came in at once.

    Attributes:
        text: new text; may be empty where a token is only a part of a character, or may be the beginning of a stop string.
        tokens: new token ids. When a stop string ends the text, `Handle.tokens` lacks those behind the token that completed
            it.
        accepted: for each of them, whether it was drafted and accepted. The others are the target's own.
        logprobs: of each of them, where they were asked for.
        spans: where they were asked for, ``text`` in parts, each with whether its tokens were drafted and accepted.

    Examples:
        >>> from specjax.serving import Piece
        >>> pieces = [Piece(text="import ", tokens=(702, 221)), Piece(text="os", tokens=(709,))]
        >>> "".join(piece.text for piece in pieces)
        'import os'
    """

    text: str
    tokens: tuple[int, ...]
    accepted: tuple[bool, ...] = ()
    logprobs: "tuple[TokenLogprobs, ...]" = ()
    spans: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was, by the target's own distribution: before temperature, truncation and ``min_new_tokens``.

    Attributes:
        token: its id.
        logprob: the natural logarithm of its probability.
        top: the likeliest tokens in its place with theirs, descending; as many as were asked for.

    Examples:
        >>> from specjax.serving import TokenLogprobs
        >>> TokenLogprobs(token=702, logprob=-0.5, top=((702, -0.5), (221, -1.5))).top[0]
        (702, -0.5)
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class OutputOptions:
    """What the owner of a text wants to know beside the text.

    Attributes:
        logprobs: of how many of the likeliest tokens in each place; None: of none, not even of the text's own.
        echo: those of the prompt, too.
        spans: `Piece.spans`.
        prediction: tokens of the prediction that came with the request.
    """

    logprobs: int | None = None
    echo: bool = False
    spans: bool = False
    prediction: int = 0


@dataclass(frozen=True)
class RowProgress:
    """What a decode call has come to in one row.

    Attributes:
        tokens: new ones.
        accepted: for each, whether it was drafted and accepted.
        logprobs: of each, where they were asked for.
        done: whether the text is over.
        error: with which it is over, after these tokens; None: it is not, or as it should be.
    """

    tokens: Sequence[int] = ()
    accepted: Sequence[bool] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    done: bool = False
    error: LogitsError | None = None


def token_logprobs(
    top_count: int, tokens: Sequence[int], chosen: np.ndarray, ids: np.ndarray, values: np.ndarray
) -> list[TokenLogprobs]:
    """Of each of the n ``tokens``, from the first n of ``chosen [T]``, ``ids [T, K]`` and ``values [T, K]``, and of these the
    first ``top_count``."""
    count = len(tokens)
    tops = zip(ids[:count, :top_count].tolist(), values[:count, :top_count].tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(*top, strict=True)))
        for token, logprob, top in zip(tokens, chosen[:count].tolist(), tops, strict=True)
    ]


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
        request: what the scheduler knows it by.
        settings: how it is drawn.
        output_options: what its owner wants to know.
        prompt_tokens: tokens of the prompt.
        finish_reason: None while it goes on.
        times: when it was submitted, began and ended.
        predicted_tokens: tokens that came where the prediction had them.
        prompt_logprobs: where they were asked for, of the prompt's tokens but the first, as far as it has been read.

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
        cancel: Callable[[Request], None],
        request: Request,
        settings: dict[str, Any],
        growing: GrowingText | None,
        output_options: OutputOptions = OutputOptions(),
    ) -> None:
        """Made by `Engine.submit`; ``growing`` is None where there is no tokenizer."""
        self.request, self.settings, self.output_options = request, settings, output_options
        self.prompt_tokens, self.predicted_tokens = request.prompt_length, 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.times = Times(submitted=time.perf_counter())
        self._cancel = cancel
        self._growing = growing
        self._pieces: list[Piece] = []
        self._tokens: list[int] = []
        self._changed = threading.Condition()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._error: BaseException | None = None
        self._message = ""
        self._before: Stats | None = None  # of the rows that it had before it was preempted
        self._current: Stats | None = None
        self._matched_before = 0

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
    def cached_tokens(self) -> int:
        """Tokens of the prompt that another request's pages held already."""
        return self.request.cached

    @property
    def prediction_length(self) -> int:
        """Tokens of the prediction that came with the request."""
        return self.output_options.prediction

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
            EngineError: the engine ended with an error, or this text did.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.finish_reason is not None, timeout):
                raise TimeoutError(f"not finished after {timeout:g} seconds")
        self._raise_if_broken()
        # A prompt that was only read has no statistics.
        acceptance = self.acceptance or metrics.summarise(Stats.zeros(1, 0))
        return Generation(self.text, self.tokens, acceptance)

    def cancel(self) -> None:
        """End it. Its row is free for others within one decode call."""
        self._cancel(self.request)

    def __iter__(self) -> Iterator[Piece]:
        """The pieces as they come. Raises as `result`."""
        delivered = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._pieces) > delivered or self.finish_reason is not None)  # noqa: B023
                pieces = self._pieces[delivered:]
            if not pieces:
                self._raise_if_broken()
                return
            delivered += len(pieces)
            yield from pieces

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """As `__iter__`, without blocking the event loop."""
        delivered, changed = 0, asyncio.Event()
        listener = (asyncio.get_running_loop(), changed)
        with self._changed:
            self._listeners.append(listener)
        try:
            while True:
                changed.clear()
                with self._changed:
                    pieces, over = self._pieces[delivered:], self.finish_reason is not None
                for piece in pieces:
                    yield piece
                delivered += len(pieces)
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
            raise EngineError(self._message) from self._error

    # --- for the engine ------------------------------------------------------------------------------------------------

    def take_stats(self, stats: Stats, matched: int = 0) -> None:
        """Keep what a row counts since its text was admitted, ``[1]``, and how many of its tokens came as predicted."""
        with self._changed:
            self._current = stats
            self.predicted_tokens = self._matched_before + matched

    def admitted(self) -> None:
        """It has a row, which counts from zero. It may have had another one before."""
        with self._changed:
            self._before, self._current = _added(self._before, self._current), None
            self._matched_before = self.predicted_tokens

    def prompt_read(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """The prompt's tokens from ``start`` + 1 on have these ``logprobs``. Where a text was preempted they come once more."""
        with self._changed:
            known = len(self.prompt_logprobs)
            room = self.prompt_tokens - 1 - known
            self.prompt_logprobs += list(logprobs)[known - start :][:room]

    def deliver(self, news: RowProgress) -> bool:
        """There are new tokens, after which the text may be over. False where they completed a stop string."""
        if not news.tokens and not news.done:
            return True
        new, piece, spans = tuple(news.tokens), "", ()
        if self._growing is not None:
            known = len(self._growing.tokens)
            parts = _runs(news) if self.output_options.spans else [(news.tokens, False)]
            spans = tuple((self._growing.push(tokens), accepted) for tokens, accepted in parts)
            if news.done:
                spans = (*spans, (self._growing.finish(), spans[-1][1] if spans else False))
            piece = "".join(text for text, _ in spans)
            new = tuple(self._growing.tokens[known:])
        stopped = self._growing is not None and self._growing.stopped
        reason: FinishReason | None = None
        if stopped:
            reason = "stop"
        elif news.error is not None:
            reason = "error"
        elif news.done:
            reason = "stop" if news.tokens and news.tokens[-1] in self.settings["stop_token_ids"] else "length"
        count = len(new)
        self._add(
            Piece(
                text=piece,
                tokens=new,
                accepted=tuple(news.accepted[:count]),
                logprobs=tuple(news.logprobs[:count]),
                spans=tuple(span for span in spans if span[0]) if self.output_options.spans else (),
            ),
            reason,
            news.error,
        )
        return not stopped

    def end(
        self, reason: FinishReason, error: BaseException | None = None, message: str = "the engine could not go on"
    ) -> None:
        """End the text without finishing it. With an ``error``, its owner sees ``message`` and the error as its cause."""
        with self._changed:
            if self.finish_reason is None:
                self._error, self._message = error, message
                self._finish(reason)

    def _add(self, piece: Piece, reason: FinishReason | None, error: LogitsError | None) -> None:
        with self._changed:
            if self.finish_reason is not None:
                return
            if piece.tokens and self.times.first_token is None:
                self.times.first_token = time.perf_counter()
            self._pieces.append(piece)
            self._tokens += piece.tokens
            if self._growing is not None and reason is not None:  # a stop string may have taken tokens back
                self._tokens = list(self._growing.tokens)
            if reason == "error":
                self._error, self._message = error, f"this text could not go on: {error}"
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


def _runs(news: RowProgress) -> list[tuple[list[int], bool]]:
    """The new tokens in runs of those that were accepted and those that were not."""
    pairs = zip(news.tokens, news.accepted, strict=True)
    return [([token for token, _ in run], accepted) for accepted, run in itertools.groupby(pairs, key=lambda pair: pair[1])]


def _added(one: Stats | None, other: Stats | None) -> Stats | None:
    if one is None or other is None:
        return other if one is None else one
    return jax.tree.map(np.add, one, other)


def _nothing(request: Request) -> None:
    """What cancelling a text does that has ended."""
