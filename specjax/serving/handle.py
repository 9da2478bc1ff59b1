"""The handle of a request: it delivers the text while it grows, to threads and to asyncio."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from specjax.decoding.stats import Stats
from specjax.drafts.speculation import DraftLimit
from specjax.errors import LogitsError
from specjax.evaluation import metrics
from specjax.grammars import Matcher
from specjax.pipeline import Generation
from specjax.serving.row_kinds import RegionReader
from specjax.serving.scheduler import Request
from specjax.text import GrowingText
from specjax.token_biases import TokenBiases

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""Why a text ended: a stop token or stop string, its limit, `Handle.cancel`, or an error."""


class EngineError(RuntimeError):
    """The engine failed, or this text alone did; the message says which.

    ``__cause__`` is the underlying error.
    """


class TextCancelledError(RuntimeError):
    """The text was cancelled before it was finished."""


@dataclass(frozen=True)
class Piece:
    """A piece of a text, delivered at once.

    Attributes:
        text: the new text. It is empty if the tokens end within a character, or may begin a stop
            string.
        tokens: the new token ids. If a stop string ends the text, `Handle.tokens` ends with the
            token that completes the string.
        accepted: for each token, whether it was drafted and accepted. The target sampled the
            other tokens itself.
        logprobs: the log-probabilities of each token, if the request has ``logprobs``.
        spans: if the request has ``spans``, the parts of ``text``, each with whether its tokens
            were drafted and accepted.

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
    """The log-probability of a token, and the top alternatives at its position.

    The distribution is the target's own: before penalties, biases, banned words, temperature,
    top-k, top-p, min-p, ``min_new_tokens`` and the grammar.

    Attributes:
        token: the token's id.
        logprob: the natural logarithm of its probability.
        top: the most likely tokens at this position with their log-probabilities, descending.

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
    """The outputs that a request has beside its text.

    Attributes:
        logprobs: the number of top log-probabilities per token, beside the token's own; None: no
            log-probabilities.
        echo: whether to report the log-probabilities of the prompt, too.
        spans: whether to report `Piece.spans`.
        prediction: the number of tokens of the request's prediction.
        speculation: how far the request speculates.
        matcher: the position of the text in its grammar and under its thinking budget; None without
            both. The engine's thread owns it.
        biases: the biases, allowed tokens and banned words of a text that has these or penalties;
            None: it has neither.
        store: whether the text drafts from earlier answers of its tenant, and is one of them
            itself.
        regions: the region of the answer that the text is in. The engine's thread owns it.
    """

    logprobs: int | None = None
    echo: bool = False
    spans: bool = False
    prediction: int = 0
    speculation: DraftLimit = DraftLimit()
    matcher: Matcher | None = None
    biases: TokenBiases | None = None
    store: bool = True
    regions: RegionReader = field(default_factory=RegionReader)

    @property
    def copies(self) -> bool:
        """True if tokens of a prediction may be drafted: a named draft takes its place."""
        return self.prediction > 0 and self.speculation.depth > 0 and self.speculation.draft is None


@dataclass(frozen=True)
class RowProgress:
    """The result of a decode call in one row.

    Attributes:
        tokens: the new tokens.
        accepted: for each token, whether it was drafted and accepted.
        logprobs: the log-probabilities of each token, if the request has ``logprobs``.
        done: whether the text has ended.
        error: the error that ended the text after these tokens; None: there was no error.
    """

    tokens: Sequence[int] = ()
    accepted: Sequence[bool] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    done: bool = False
    error: LogitsError | None = None


def token_logprobs(
    top_count: int, tokens: Sequence[int], chosen: np.ndarray, ids: np.ndarray, values: np.ndarray
) -> list[TokenLogprobs]:
    """Pair each token with its log-probability and its top alternatives.

    Args:
        top_count: the number of alternatives to return for each token.
        tokens: ``[n]`` token ids.
        chosen: ``[T]`` the tokens' log-probabilities, of which the first n are used.
        ids: ``[T, K]`` the most likely tokens, descending.
        values: ``[T, K]`` their log-probabilities.
    """
    count = len(tokens)
    tops = zip(ids[:count, :top_count].tolist(), values[:count, :top_count].tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(*top, strict=True)))
        for token, logprob, top in zip(tokens, chosen[:count].tolist(), tops, strict=True)
    ]


@dataclass
class Times:
    """The times of a request, by `time.perf_counter`; None: not yet."""

    submitted: float
    first_token: float | None = None
    finished: float | None = None


class Handle:
    """The handle of a text that is being generated. `Engine.submit` returns it.

    Iterate over it with ``for`` in a thread, or with ``async for``, to get its pieces. Each
    iteration starts with the first piece.

    Attributes:
        request: the scheduler's record of the request.
        settings: the text's settings on the device.
        output_options: what the request reports beside its text.
        prompt_tokens: the number of tokens of the prompt.
        finish_reason: why the text ended; None while it is generated.
        times: when the request was submitted, had its first token, and ended.
        predicted_tokens: the number of generated tokens that matched the prediction.
        grammar_completed: whether the text satisfies its grammar as a whole, once it has ended.
            None without a grammar.
        prompt_logprobs: with ``echo``, the log-probabilities of the prompt's tokens except the
            first, as far as the prompt has been prefilled.

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
        """Make the handle of a submitted request.

        Args:
            cancel: the engine's function that cancels a request.
            request: the scheduler's record of the request.
            settings: the text's settings on the device.
            growing: the detokenizer with the stop strings; None: the engine has no tokenizer.
            output_options: what the request reports beside its text.
        """
        self.request, self.settings, self.output_options = request, settings, output_options
        self.prompt_tokens, self.predicted_tokens = request.prompt_length, 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.grammar_completed: bool | None = None
        self.times = Times(submitted=time.perf_counter())
        self._cancel = cancel
        self._growing = growing
        self._pieces: list[Piece] = []
        self._piece_times: list[float] = []
        self._tokens: list[int] = []
        # The engine's thread delivers under this lock, and other threads read and wait under it.
        self._changed = threading.Condition()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._error: BaseException | None = None
        self._message = ""
        # The counters of the rows that the text had before it was preempted.
        self._before: Stats | None = None
        self._current: Stats | None = None
        self._matched_before = 0

    # --- for its owner ----------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The text generated so far; empty if the engine has no tokenizer."""
        with self._changed:
            return "".join(piece.text for piece in self._pieces)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens generated so far."""
        with self._changed:
            return tuple(self._tokens)

    @property
    def is_answer(self) -> bool:
        """True if the text has ended by itself or at its largest length."""
        return self.finish_reason in ("stop", "length")

    @property
    def is_at_stop_string(self) -> bool:
        """True if the text has ended at a stop string."""
        return self._growing is not None and self._growing.stopped

    @property
    def stop_string(self) -> str:
        """The stop string at which the text has ended; "" if it has not."""
        return "" if self._growing is None else self._growing.stop_string

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens that prefix caching saved."""
        return self.request.cached

    @property
    def prediction_length(self) -> int:
        """The number of tokens of the request's prediction."""
        return self.output_options.prediction

    @property
    def acceptance(self) -> metrics.Acceptance | None:
        """The acceptance of the drafts so far; None before the first decode call."""
        with self._changed:
            stats = _added(self._before, self._current)
        return None if stats is None else metrics.summarise(stats)

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the end of the text, and return it.

        Raises:
            TimeoutError: The text has not ended after ``timeout`` seconds. It continues.
            TextCancelledError: The text was cancelled.
            EngineError: The engine failed, or this text did.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.finish_reason is not None, timeout):
                raise TimeoutError(f"not finished after {timeout:g} seconds")
        self._raise_if_broken()
        # A request without new tokens (``echo``) has no decode call, and so no counters.
        acceptance = self.acceptance or metrics.summarise(Stats.zeros(1, 0))
        return Generation(self.text, self.tokens, acceptance, self.grammar_completed)

    def cancel(self) -> None:
        """Cancel the request. Its row is free for another one after at most one decode call."""
        self._cancel(self.request)

    def __iter__(self) -> Iterator[Piece]:
        """Yield the pieces as they are delivered. It raises the errors of `result`."""
        delivered = 0
        while True:
            with self._changed:
                while len(self._pieces) == delivered and self.finish_reason is None:
                    self._changed.wait()
                pieces = self._pieces[delivered:]
            if not pieces:
                self._raise_if_broken()
                return
            delivered += len(pieces)
            yield from pieces

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Yield the pieces as they are delivered, without blocking the event loop."""
        delivered, changed = 0, asyncio.Event()
        listener = (asyncio.get_running_loop(), changed)
        with self._changed:
            self._listeners.append(listener)
        try:
            while True:
                # Clear before looking, so that a piece that is delivered in between is not missed.
                changed.clear()
                with self._changed:
                    pieces, over = self._pieces[delivered:], self.finish_reason is not None
                for piece in pieces:
                    yield piece
                if over:
                    self._raise_if_broken()
                    return
                delivered += len(pieces)
                await changed.wait()
        finally:
            with self._changed:
                self._listeners.remove(listener)

    def news(self, start: int) -> tuple[list[tuple[float, Piece]], bool]:
        """Return what has come since a moment, without waiting.

        Args:
            start: the number of pieces before it.

        Returns:
            The pieces, each with the time of its delivery by `time.perf_counter`, and whether the
            text has ended, so that these are the last ones.
        """
        with self._changed:
            pieces = zip(self._piece_times[start:], self._pieces[start:], strict=True)
            return [*pieces], self.finish_reason is not None

    def _raise_if_broken(self) -> None:
        if self.finish_reason == "cancelled":
            raise TextCancelledError("the text was cancelled")
        if self.finish_reason == "error":
            raise EngineError(self._message) from self._error

    # --- for the engine ---------------------------------------------------------------------------

    def take_stats(self, stats: Stats, matched: int = 0) -> None:
        """Store the counters of the text's row.

        Args:
            stats: ``[1]`` the counters since the text was admitted to the row.
            matched: the number of tokens since then that matched the prediction.
        """
        with self._changed:
            self._current = stats
            self.predicted_tokens = self._matched_before + matched

    def admitted(self) -> None:
        """Note that the text has a row, whose counters start at zero.

        A text that was preempted had other rows before, and their counters are added.
        """
        with self._changed:
            self._before, self._current = _added(self._before, self._current), None
            self._matched_before = self.predicted_tokens

    def prompt_read(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Store the log-probabilities of the prompt's tokens from index ``start`` + 1 on.

        After a preemption the prompt is prefilled again, and those that are stored are skipped.
        """
        with self._changed:
            stored = len(self.prompt_logprobs)
            room = self.prompt_tokens - 1 - stored
            self.prompt_logprobs += list(logprobs)[stored - start :][:room]

    def deliver(self, news: RowProgress) -> bool:
        """Deliver the result of a decode call, and return False if it completes a stop string."""
        if not news.tokens and not news.done:
            return True
        new, piece = tuple(news.tokens), ""
        spans: tuple[tuple[str, bool], ...] = ()
        if self._growing is not None:
            start = len(self._growing.tokens)
            if self.output_options.spans:
                spans = self._push_spans(self._growing, news)
                piece = "".join(text for text, _ in spans)
            else:
                piece = self._growing.push(news.tokens)
                piece += self._growing.finish() if news.done else ""
            new = tuple(self._growing.tokens[start:])
        stopped = self._growing is not None and self._growing.stopped
        reason: FinishReason | None = None
        if stopped:
            reason = "stop"
        elif news.error is not None:
            reason = "error"
        elif news.done:
            reason = "stop" if self._is_over(news.tokens) else "length"
        matcher = self.output_options.matcher
        if matcher is not None and matcher.has_grammar and reason is not None:
            self.grammar_completed = matcher.is_complete and not stopped
        count = len(new)
        self._add(
            Piece(
                text=piece,
                tokens=new,
                accepted=tuple(news.accepted[:count]),
                logprobs=tuple(news.logprobs[:count]),
                spans=spans,
            ),
            reason,
            news.error,
        )
        return not stopped

    @staticmethod
    def _push_spans(growing: GrowingText, news: RowProgress) -> tuple[tuple[str, bool], ...]:
        """Detokenize new tokens, and return the parts of their text, see `Piece.spans`."""
        spans = [(growing.push(tokens), accepted) for tokens, accepted in _runs(news)]
        if news.done:
            spans.append((growing.finish(), spans[-1][1] if spans else False))
        return tuple(span for span in spans if span[0])

    def _is_over(self, tokens: Sequence[int]) -> bool:
        """Return whether a text has ended before its limit, with these newest tokens."""
        if tokens and tokens[-1] in self.settings["stop_token_ids"]:
            return True
        if self.output_options.matcher is None:
            return False
        # A grammar after which nothing can follow, in a text that no token ends.
        return len(self.request.tokens) < self.request.max_length

    def end(
        self,
        reason: FinishReason,
        error: BaseException | None = None,
        message: str = "the engine failed",
    ) -> None:
        """End the text before its regular end.

        Args:
            reason: why it ended.
            error: the error to report to callers as the cause of an EngineError.
            message: the message of that EngineError.
        """
        with self._changed:
            if self.finish_reason is None:
                self._error, self._message = error, message
                self._finish(reason)

    def _add(self, piece: Piece, reason: FinishReason | None, error: LogitsError | None) -> None:
        with self._changed:
            if self.finish_reason is not None:
                return
            now = time.perf_counter()
            if piece.tokens and self.times.first_token is None:
                self.times.first_token = now
            self._pieces.append(piece)
            self._piece_times.append(now)
            self._tokens += piece.tokens
            # A stop string removes the tokens after it.
            if self._growing is not None and reason is not None:
                self._tokens = list(self._growing.tokens)
            if reason == "error":
                self._error, self._message = error, f"this text failed: {error}"
            if reason is not None:
                self._finish(reason)
            else:
                self._notify()

    def _finish(self, reason: FinishReason) -> None:
        self._cancel = _nothing  # a caller that stores handles does not keep the engine in memory
        self.finish_reason, self.times.finished = reason, time.perf_counter()
        self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for loop, changed in self._listeners:
            if _WAKING.events is None:
                _wake(loop, [changed])
            else:
                _WAKING.events.setdefault(loop, []).append(changed)


class _Waking(threading.local):
    """The events that a thread sets at the end of its `waking_once`; None outside of one."""

    events: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] | None = None


_WAKING = _Waking()


@contextmanager
def waking_once() -> Iterator[None]:
    """Wake each event loop once, at the end of the block, for all that is delivered in it.

    To wake a loop takes as long as to detokenize a token.

    Examples:
        >>> from specjax.serving.handle import waking_once
        >>> with waking_once():
        ...     pass
    """
    _WAKING.events = {}
    try:
        yield
    finally:
        events, _WAKING.events = _WAKING.events, None
        for loop, changed in events.items():
            _wake(loop, changed)


def _wake(loop: asyncio.AbstractEventLoop, events: Sequence[asyncio.Event]) -> None:
    """Set events in the thread of their loop."""
    with suppress(RuntimeError):  # the event loop was closed during an iteration
        loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()


def _runs(news: RowProgress) -> list[tuple[list[int], bool]]:
    """Split the new tokens into runs, each with whether its tokens were accepted."""
    pairs = zip(news.tokens, news.accepted, strict=True)
    return [
        ([token for token, _ in run], accepted)
        for accepted, run in itertools.groupby(pairs, key=lambda pair: pair[1])
    ]


def _added(before: Stats | None, current: Stats | None) -> Stats | None:
    if before is None or current is None:
        return current if before is None else before
    return jax.tree.map(np.add, before, current)


def _nothing(request: Request) -> None:
    """Do nothing: the text has ended, and there is nothing to cancel."""
