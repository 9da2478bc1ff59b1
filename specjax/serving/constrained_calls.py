"""The engine's calls for rows with a grammar: their drafts, their masks, and the check of tokens.

`specjax.decoding.constrained_rows` explains masked steps and free calls. The methods are for the
engine's thread, which owns the matchers. They need no lock.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import jax
import numpy as np

from specjax.decoding.constrained import (
    FORCED,
    begin_with_forced,
    forced_draft,
    legal_tokens,
)
from specjax.decoding.rows import Progress
from specjax.drafts.draft import Draft
from specjax.grammars import Matcher
from specjax.grammars.matcher import has_bit
from specjax.serving.choice import DraftChoice, RowGroup
from specjax.serving.constrained_choice import Call, ConstrainedChoice, Leaving, pooled_leaving
from specjax.serving.device import EngineDevice
from specjax.serving.handle import Handle
from specjax.serving.scheduler import Request

GiveUp = Callable[[int, Exception], None]
"""Ends the text of a row, or of a request's row, with an error that concerns it alone."""

STALL_SECONDS = 0.04, 0.005
"""The seconds for the masks of a call after which steps draft nothing for a while.

They are those of a whole call, or those of each row if that is more. All rows wait for the masks. A
step without drafts has one mask for each row. Texts do not depend on drafts, so a grammar with slow
masks makes others slower for a moment only, and ends none of them.
"""

PAUSES = (8, 64)
"""The steps without drafts after a call with slow masks, and the most if that happens again."""


@dataclass
class GrammarCounts:
    """The counters of an engine for texts with a grammar.

    Attributes:
        forced_tokens: tokens that grammars forced, drafted by the host and emitted.
        illegal_nodes: drafted nodes of masked steps that were not legal.
        mask_seconds: the host's seconds of making masks, and of checking the tokens of calls
            without masks.
        free_calls: calls without masks for rows with a grammar.
        restored_rows: how often a row went back to where it was before such a call.
    """

    forced_tokens: int = 0
    illegal_nodes: int = 0
    mask_seconds: float = 0.0
    free_calls: int = 0
    restored_rows: int = 0


class ConstrainedCalls:
    """The state of the engine's loop for rows with a grammar, between two calls.

    Attributes:
        kinds: the kinds of calls that are made: those that `ConstrainedChoice` chooses, or masked
            steps alone, or free calls wherever one can be made. Texts do not depend on it.
        counts: the counters.
    """

    def __init__(self, device: EngineDevice, choice: DraftChoice) -> None:
        """Begin without a text."""
        self.kinds: Literal["chosen", "masked", "free"] = "chosen"
        self.counts = GrammarCounts()
        self._device = device
        self._choice = ConstrainedChoice(choice, device.plain, device.masked, device.sizes.steps)
        # The rates of leaving over all texts of a grammar.
        self._pooled: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._leaving: WeakKeyDictionary[Request, Leaving] = WeakKeyDictionary()
        self._pause = self._pause_left = 0  # steps without drafts: in all, and to come
        # The legal tokens of a free call that a row is put back before. The row must stay in masked
        # steps until they and the token after them are emitted: a free call would leave again.
        self._replays: WeakKeyDictionary[Request, list[int]] = WeakKeyDictionary()
        # The rates that need no measurement, because a thinking budget tells when a row leaves.
        self._certain_rates: WeakKeyDictionary[Request, float | None] = WeakKeyDictionary()

    def known_tokens(
        self, matchers: Mapping[Request, Matcher], give_up: Callable[[Request, Exception], None]
    ) -> dict[Request, Sequence[int]]:
        """Return the tokens that the host can draft for each request, at most `FORCED` of them.

        There are none after a call whose masks were slow.
        """
        host_tokens: dict[Request, Sequence[int]] = {}
        for request, matcher in matchers.items():
            try:
                matcher.begin_step()
                if request not in self._leaving:
                    pooled = self._pooled.setdefault(matcher.compiled, pooled_leaving())
                    self._leaving[request] = Leaving(pooled)
                self._certain_rates[request] = matcher.leaving_rate
                replay = self._replays.get(request)
                tokens = matcher.forced(FORCED) if replay is None else replay[:FORCED]
                host_tokens[request] = [] if self._pause_left else tokens
            except Exception as error:  # only this text ends
                give_up(request, error)
        return host_tokens

    def _rate(self, request: Request) -> float:
        """Return the chance that the next free token of a request is not legal."""
        rate = self._certain_rates[request]
        return self._leaving[request].rate if rate is None else rate

    def choose(
        self,
        host_tokens: Mapping[Request, Sequence[int]],
        rows: int,
        widths: tuple[int, int],
        draft: int | None,
        most: int,
        *,
        copies: bool = False,
        drafts: bool = True,
        row_kinds: Mapping[RowGroup, int] | None = None,
    ) -> Call:
        """Return the call to make.

        Args:
            host_tokens: the result of `known_tokens`.
            rows: the number of running rows.
            widths: the number of rows that a masked step computes, and that a free call computes.
            draft: the index of the draft of a free call; None: none may be made.
            most: the largest number of steps of a free call.
            copies: whether masked steps copy predictions.
            drafts: whether some row may draft.
            row_kinds: the number of rows that draft, by kind.
        """
        if self._pause_left:
            return Call("host")
        may_be_free = draft is not None and self.kinds != "masked"
        may_be_free = may_be_free and not any(map(self._replays.__contains__, host_tokens))
        if may_be_free and self.kinds == "free":
            return Call("free", most)
        return self._choice.choose(
            widths,
            rows,
            forced=[len(tokens) for tokens in host_tokens.values()],
            leaving=[self._rate(request) for request in host_tokens],
            draft=draft if may_be_free else None,
            most=most,
            copies=copies,
            drafts=drafts,
            row_kinds=row_kinds,
        )

    def _record_masks(self, seconds: float, rows: int, has_draft: bool) -> None:
        """Record the host's seconds for the masks of a call. Pause drafts if they took long."""
        self.counts.mask_seconds += seconds
        of_call, of_row = STALL_SECONDS
        if seconds > max(of_call, of_row * rows):
            self._pause = min(max(PAUSES[0], 2 * self._pause), PAUSES[1])
            self._pause_left = self._pause
        elif has_draft or not self._pause_left:
            self._pause = 0
        else:
            self._pause_left -= 1

    # --- masked steps -----------------------------------------------------------------------------

    def begin_masked(
        self,
        index: int | None,
        host_tokens: Mapping[Request, Sequence[int]],
        snapshot: Mapping[int, tuple[Request, Handle]],
        table: np.ndarray,
        to_retire: np.ndarray,
        width: int,
        logprobs: bool,
        give_up: GiveUp,
    ) -> Progress:
        """Queue a masked step on the device, and return its progress, which is not ready yet.

        Args:
            index: the index of the drafter; None: the host drafts.
            host_tokens: the tokens that the host can draft, by request.
            snapshot: the request and the handle of each running row.
            table: ``[rows, n]`` the pages of all rows.
            to_retire: ``[rows]`` bool, rows without a text.
            width: the number of rows to compute.
            logprobs: whether to report log-probabilities.
            give_up: ends a text with an error.
        """
        matchers: list[Matcher | None] = [None] * width
        tokens: list[Sequence[int]] = [()] * width
        for row, (request, handle) in snapshot.items():
            if not to_retire[row] and request in host_tokens:
                matchers[row] = handle.output_options.matcher
                tokens[row] = host_tokens[request]
        if index is None:
            on_host = changed = forced_draft(tokens)
        else:
            on_host = jax.device_get(self._device.propose(index, table, to_retire, width))
            changed = None
        if index is not None and index == self._device.copying and any(tokens):
            # A drafter that copies takes any draft, so that some rows can have forced text.
            on_host = changed = begin_with_forced(on_host, tokens)
        started = time.perf_counter()
        vocab_size = self._device.target.config.vocab_size
        legal, illegal = legal_tokens(matchers, on_host, vocab_size, give_up)
        has_draft = index is not None or any(tokens)
        self._record_masks(time.perf_counter() - started, len(snapshot), has_draft)
        self.counts.illegal_nodes += illegal
        if index is not None and index == self._device.masked:
            self._judge_drafts(on_host, legal, matchers, snapshot)
        return self._device.advance(index, table, to_retire, changed, legal, width, logprobs)

    def _judge_drafts(
        self,
        draft: Draft,
        legal: np.ndarray,
        matchers: Sequence[Matcher | None],
        snapshot: Mapping[int, tuple[Request, Handle]],
    ) -> None:
        """Record whether the first drafted token of each constrained row is legal."""
        if draft.tokens.shape[1] < 2:
            return
        for row, matcher in enumerate(matchers):
            if matcher is not None and (draft.valid is None or draft.valid[row, 1]):
                token = int(draft.tokens[row, 1])
                is_legal = has_bit(legal[row, 0], token)
                if matcher.leaving_rate is None:
                    self._leaving[snapshot[row][0]].drafted(is_legal)

    def end_masked(
        self,
        call: Call,
        host_tokens: Mapping[Request, Sequence[int]],
        snapshot: Mapping[int, tuple[Request, Handle]],
        progress: Progress,
        width: int,
        seconds: float | None,
    ) -> None:
        """Record the result of a masked step. ``seconds`` is None if it was not measured."""
        counts = progress.lengths - progress.starts
        for row, (request, _) in snapshot.items():
            emitted, replay = int(counts[row]), self._replays.get(request)
            if replay is None:
                if call.kind == "host" and request in host_tokens:
                    self.counts.forced_tokens += min(emitted, len(host_tokens[request]))
            elif progress.tokens[row, :emitted].tolist() == replay[:emitted]:
                self._replays[request] = replay[emitted:]
            else:  # the token after the legal ones, or, at a near tie, another one
                del self._replays[request]
        if call.kind != "host":
            emitted = int(sum(counts[row] for row in snapshot))
            self._choice.record_tokens(call.kind, len(snapshot), emitted)
        # The time of a call with slow masks says nothing about the usual ones.
        if seconds is not None and not self._pause:
            longest = max(map(len, host_tokens.values()), default=0)
            self._choice.record(call, width, longest, seconds)

    # --- free calls -------------------------------------------------------------------------------

    def check(
        self,
        progress: Progress,
        snapshot: Mapping[int, tuple[Request, Handle]],
        before: Any,
        give_up: GiveUp,
    ) -> np.ndarray:
        """Check the tokens of a free call, and put rows back in which one is not legal.

        Args:
            progress: the progress of the call, on the host.
            snapshot: the request and the handle of each running row.
            before: the copy of the rows before the call, from `EngineDevice.copy_rows`.
            give_up: ends a text with an error.

        Returns:
            ``[rows]`` bool, the rows that were put back. Their progress has no meaning.
        """
        started, has_left = time.perf_counter(), np.zeros(len(progress.lengths), bool)
        counts = progress.lengths - progress.starts
        self.counts.free_calls += 1
        for row, (request, handle) in snapshot.items():
            if (matcher := handle.output_options.matcher) is None:
                continue
            tokens = progress.tokens[row, : counts[row]].tolist()
            try:
                legal = matcher.count_legal(tokens)
            except Exception as error:  # only this text ends
                give_up(row, error)
                continue
            has_left[row] = legal < len(tokens)
            if matcher.leaving_rate is None and request in self._leaving:
                self._leaving[request].checked(legal, bool(has_left[row]))
            if has_left[row]:
                self._replays[request] = tokens[:legal]
        self._record_masks(time.perf_counter() - started, len(snapshot), has_draft=True)
        if has_left.any():
            self._device.restore_rows(before, has_left)
            self.counts.restored_rows += int(has_left.sum())
        self._choice.record_free(time.perf_counter() - started)
        return has_left
