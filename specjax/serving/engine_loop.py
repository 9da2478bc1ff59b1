"""The loop of the engine: one thread that prefills, decodes, and delivers texts, turn by turn.

A turn prefills up to a chunk of tokens in each group of rows, verifies the drafts of clients, and
makes one decode call for the running rows. While the device works on that call, the texts of the
previous call are delivered. While there is nothing to do, texts that have ended are read once more,
a chunk at a time (`specjax.serving.ended_texts`).

``EngineLoop.wake`` is the lock: other threads submit and cancel requests at any time. The device's
state belongs to this thread alone, and is used without the lock.
"""

import logging
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Literal

import jax
import numpy as np

from specjax import processes, text
from specjax.adjustments import Adjustments
from specjax.decoding import rows as device_rows
from specjax.decoding.constrained import FORCED
from specjax.decoding.stats import Stats
from specjax.drafters.pausable import ROOM
from specjax.errors import InputError, LogitsError
from specjax.grammars import Matcher
from specjax.models.cache import groups_of
from specjax.serving.choice import Copies, DraftChoice, RowGroup, RowResults
from specjax.serving.clients import ClientRow, Clients
from specjax.serving.config import EngineConfig
from specjax.serving.constrained_calls import ConstrainedCalls
from specjax.serving.constrained_choice import Call
from specjax.serving.device import (
    ADJUSTING,
    COPYING,
    FEW_PENDING,
    MASKED,
    MAX_WORD_TOKENS,
    MAX_WORDS,
    EngineDevice,
    is_paused,
)
from specjax.serving.earlier_answers import TenantSegments
from specjax.serving.handle import (
    EngineError,
    Handle,
    OutputOptions,
    RowProgress,
    token_logprobs,
    waking_once,
)
from specjax.serving.pages import Tenant
from specjax.serving.programs import Programs
from specjax.serving.row_kinds import RowKind, sums_by_kind
from specjax.serving.scheduler import PrefillChunk, Request, RereadChunk, Scheduler
from specjax.serving.statistics import EngineStatistics, PartStatistics, copies_of, difference
from specjax.serving.totals import RowTokens, Totals

_LOGGER = logging.getLogger(__name__)

REREAD_AFTER = 0.1
"""The seconds without work after which ended texts are read once more.

A program that sends its next request as soon as it has an answer would wait for a chunk otherwise.
"""


class EngineLoop:
    """The thread of an `Engine`, and the state that it shares with the threads of callers.

    Attributes:
        device: the rows on the device, and the programs for them.
        scheduler: the assignment of rows and pages to requests.
        programs: the list of programs, compiled or not.
        choice: the rule that chooses a draft by load.
        clients: the rows of clients that draft elsewhere.
        answers: the earlier answers that texts draft from; None: none are kept.
        handles: the handles of unfinished requests.
        wake: the lock of the scheduler, of the clients and handles, and of whatever this thread
            changes for others to read. The thread sleeps on it until there is something to do.
        closing: whether the thread is to end.
        error: the error that ended the thread; None: there was none.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: EngineDevice,
        scheduler: Scheduler,
        together: processes.Processes | None,
        *,
        warm: bool,
    ) -> None:
        """Compile all programs, or those that a first request needs, and start the thread.

        Args:
            config: the checked arguments of `Engine`.
            device: a device whose rows are free.
            scheduler: a scheduler of as many rows, without requests.
            together: the processes that share the model; None: there is only this one.
            warm: whether to compile and time everything first, as in `Engine`.
        """
        self.device, self.sizes, self.scheduler = device, device.sizes, scheduler
        self._config, self._together = config, together
        self._groups = groups_of(config.target.mesh)
        # The lock is reentrant: the compiler's thread holds it when it calls `_programs_changed`,
        # and that method acquires it again. A handle has a lock of its own, which is acquired after
        # this one, never before, so the two cannot deadlock.
        self.wake = threading.Condition(threading.RLock())
        self.programs = Programs(device.programs(config.placeholder_settings()), self.wake)
        seconds: dict[tuple[int, int], float] = {}
        if warm or together is not None:
            seconds = device.warm_up(config.placeholder_settings(), self.programs)
        else:
            self.programs.compile_stage(0, "compiling for the first request")
        self.choice = DraftChoice(config.choices, seconds)
        self._constrained = ConstrainedCalls(device, self.choice)
        self._draft = str(config.choices[0] or "none")  # the draft of the newest call
        # For each row, the request that was last admitted on the device. The scheduler may already
        # have given the row to another one.
        self._admitted: list[Request | None] = [None] * self.sizes.rows
        self._undelivered: list[tuple[Handle, RowProgress]] = []
        # Prompts whose log-probabilities are still on the device.
        self._undelivered_logprobs: list[tuple[Handle, PrefillChunk, int, Any]] = []
        # The device's counters of each row after the newest call. They begin at 0 with each new
        # text.
        self._device_stats = copies_of(
            Stats.zeros(self.sizes.rows, device.depth, parts=len(device.part_names))
        )
        self._total = Totals(drafted_at=[0] * device.depth, accepted_at=[0] * device.depth)
        # The kinds of the running rows at the start of the newest call, by request.
        self._kinds: dict[Request, RowKind] = {}
        # The seconds of catching up that no decode call has been charged with yet.
        self._uncharged = 0.0
        self._pending = 0  # tokens that a paused drafter has yet to read, at most, in any row
        self._counters = {"read": 0, "shared": 0, "reread": 0, "calls": 0}
        # Since when there is nothing to do, by `time.monotonic`; None: there was something.
        self._idle_since: float | None = None
        self.handles: dict[Request, Handle] = {}
        self.clients = Clients(device, scheduler, self.wake)
        self.answers = config.answers(together)
        self._segments = TenantSegments(self.sizes.rows)
        self.closing = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="specjax-engine", daemon=True)
        self._programs_changed()
        self._thread.start()
        if not self.programs.are_all_ready:
            self.programs.start(self._programs_changed)

    def submit(
        self,
        tokens: list[int],
        max_new_tokens: int,
        settings: dict[str, Any],
        growing: text.GrowingText | None,
        options: OutputOptions,
        *,
        tenant: Tenant,
        priority: int = 0,
    ) -> Handle:
        """Add a request to the queue, and return its handle.

        `Engine.submit` has checked the arguments.

        Raises:
            QueueFullError: Too many requests wait.
            EngineError: The engine has failed.
            InputError: The engine is closed, or can never serve the request.
        """
        needs = None if options.logprobs is None else "logprobs"
        needs = needs if options.matcher is None else "grammars"
        needs = needs if options.biases is None else "penalties"
        # The log-probabilities of a prompt need every token's logits, so no prefix is shared.
        shares = 0 if options.echo else None
        with self.wake:
            self.check_open()
            request = self.scheduler.submit(
                tokens,
                max_new_tokens,
                shares=shares,
                needs=needs,
                tenant=tenant,
                priority=priority,
            )
            handle = Handle(self._cancel, request, settings, growing, options)
            self.handles[request] = handle
            self.wake.notify_all()
        return handle

    def check_open(self) -> None:
        """Raise `EngineError` if the engine has failed, and `InputError` if it is closed."""
        if self.state == "failed":
            raise EngineError("the engine failed") from self.error
        if self.closing:
            raise InputError("the engine is closed")

    @property
    def state(self) -> Literal["running", "failed", "closed"]:
        """The state of the engine, see `Engine.state`."""
        if self.error is not None or not (self.closing or self._thread.is_alive()):
            return "failed"
        return "closed" if self.closing else "running"

    def close(self) -> None:
        """End the thread. Texts that are not finished are cancelled."""
        with self.wake:
            self.closing = True
            self.wake.notify_all()
        self.programs.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def statistics(self) -> EngineStatistics:
        """Return the engine's counters at this moment."""
        with self.wake:
            scheduler = self.scheduler
            return EngineStatistics(
                waiting=scheduler.waiting,
                running=len(scheduler.running),
                free_pages=scheduler.free_pages,
                pages=self.sizes.pages * self._groups,
                prompt_tokens_read=self._counters["read"],
                prompt_tokens_shared=self._counters["shared"],
                tokens_reread=self._counters["reread"],
                preemptions=scheduler.preemptions,
                decode_calls=self._counters["calls"],
                generated=self._total.generated,
                drafted_steps=self._total.drafted_steps,
                drafted=self._total.drafted,
                accepted=self._total.accepted,
                accepted_at=tuple(self._total.accepted_at),
                parts=self._parts(),
                draft=self._draft,
                drafts=self.choice.table(),
                kinds=dict(self._total.kinds),
                forced_tokens=self._constrained.counts.forced_tokens,
                illegal_nodes=self._constrained.counts.illegal_nodes,
                mask_seconds=self._constrained.counts.mask_seconds,
                restored_rows=self._constrained.counts.restored_rows,
                clients=self.clients.statistics,
                compiled=self.programs.compiled,
                programs=self.programs.total,
            )

    def _parts(self) -> tuple[PartStatistics, ...]:
        total, names = self._total, self.device.part_names
        counts = total.drafted_by, total.accepted_by, total.accepted_only_by
        # Before the first call nothing is counted.
        by_part = zip(*counts, strict=True) if total.drafted_by else [(0, 0, 0)] * len(names)
        return tuple(
            PartStatistics(name, *numbers) for name, numbers in zip(names, by_part, strict=True)
        )

    def _run(self) -> None:
        """Take turns until the engine is closed. This is the body of the thread."""
        try:
            while True:
                with self.wake:
                    rereads, untimed = self._wait_for_work()
                    if self.closing:
                        break
                    if self.programs.error is not None:
                        raise self.programs.error
                if rereads:
                    self._read_again(rereads)
                    continue
                if untimed is not None:
                    self._time(untimed)
                    continue
                has_prefilled = self._prefill_prompts()
                self.clients.verify()
                if not self._decode():
                    # If this turn queued a chunk of prefill, deliver only what is ready, so that
                    # the next turn can queue another chunk without waiting.
                    self._deliver(wait=not has_prefilled)
            self._deliver()  # the tokens of the last call, too
        except _ClosedError:
            pass
        except BaseException as error:
            # The callers that wait get it as the cause of an EngineError.
            with self.wake:
                self.error = error
            raise
        finally:
            self.programs.stop()
            with self.wake:
                handles = [*self.handles.values(), *(handle for handle, _ in self._undelivered)]
                self.handles.clear()
                # The caches are freed here, because callers may keep the engine or a handle for
                # long.
                self.scheduler.clear()
            for handle in handles:
                handle.end("error" if self.error else "cancelled", self.error)
            self.clients.end("the engine failed" if self.error else "the engine is closed")
            if self.answers is not None:
                self.answers.close()
            if self._together is not None and self.error is None:
                # After a failure here the other processes are not told to stop: they wait until a
                # supervisor ends this process.
                self._together.end()
            self.device.release()

    def _wait_for_work(self) -> tuple[list[RereadChunk], tuple[int, int] | None]:
        """Sleep until there is something to do, and return what to do if nobody waits for it.

        It needs the lock.

        Returns:
            The chunks of ended texts to read once more, and what to time. There is at most one of
            the two, so that a new request waits for no more. With neither, there is work, or the
            thread is to end.
        """
        while not (self._has_work() or self.closing or self.programs.error is not None):
            self._idle_since = self._idle_since or time.monotonic()
            if rereads := self._next_rereads():
                return rereads, None
            if (untimed := self._next_untimed()) is not None:
                return [], untimed
            self.wake.wait(self._seconds_to_sleep())
        self._idle_since = None
        return [], None

    def _time(self, untimed: tuple[int, int]) -> None:
        """Time one program, a width and a drafter's index.

        Without the lock, because the call takes as long as several decoding steps.
        """
        seconds = self.device.time_decoding(self._config.placeholder_settings(), *untimed)
        with self.wake:
            self.choice.seconds[untimed] = seconds
        self._pending = 0

    def _has_work(self) -> bool:
        """Return whether anything is to be prefilled, decoded, verified or delivered.

        It gives rows to waiting requests first (`Scheduler.can_go_on`). It needs the lock.
        """
        return (
            self.scheduler.can_go_on()
            or self.clients.has_work
            or bool(self._undelivered or self._undelivered_logprobs)
        )

    def _seconds_to_sleep(self) -> float | None:
        """Return the seconds until the thread must look for work again; None: no limit.

        Then a waiting request may get an idle client's row, or an ended text may be read once more.
        It needs the lock.
        """
        limits = [threading.TIMEOUT_MAX]
        if (seconds := self.scheduler.seconds_until_idle()) is not None:
            limits.append(seconds)
        if self.scheduler.has_ended_texts and self._idle_since is not None:
            remaining = self._idle_since + REREAD_AFTER - time.monotonic()
            # Afterwards something is in the way, such as a client that drafts: look again later.
            limits.append(remaining if remaining > 0 else REREAD_AFTER)
        return min(limits) if len(limits) > 1 else None

    def _next_rereads(self) -> list[RereadChunk]:
        """Return the chunks of ended texts to read once more now. It needs the lock.

        There are none until the engine has been idle for `REREAD_AFTER` seconds, or while a client
        may send a draft at any moment, which would have to wait.
        """
        assert self._idle_since is not None
        if time.monotonic() - self._idle_since < REREAD_AFTER or self.clients.are_drafting:
            return []
        return self.scheduler.next_rereads()

    def _read_again(self, chunks: Sequence[RereadChunk]) -> None:
        """Read chunks of ended texts once more, and wait for the device.

        So at most one chunk is queued, and a request that comes meanwhile waits for no more.
        """
        with self.wake:
            table = self.scheduler.table.copy()
        settings = self._config.placeholder_settings()
        for chunk in chunks:
            table[chunk.row, : len(chunk.pages)] = chunk.pages
            self._begin_row(chunk, self._text_of(chunk.request, settings))
        prefix_state, _, _ = self._read(chunks, table, logprobs=False)
        with self.wake:
            for chunk in chunks:
                self._counters["reread"] += chunk.count
                self.scheduler.was_reread(chunk, self._state_of(chunk, prefix_state))
        self.device.wait()

    def _state_of(self, chunk: PrefillChunk, prefix_state: Any) -> tuple[Any, np.int32]:
        """Return a prefix state as the scheduler stores it: with the chunk's group of rows."""
        return prefix_state, np.int32(self._group(chunk))

    def _begin_row(self, chunk: PrefillChunk, row_text: device_rows.Text) -> None:
        """Put the text of a first chunk into its row on the device."""
        self._admitted[chunk.row] = chunk.request
        for values in vars(self._device_stats).values():
            values[chunk.row] = 0
        self.device.admit(chunk.row, row_text, chunk.start, chunk.prefix_state)

    def _programs_changed(self) -> None:
        """Adjust the scheduler to the programs that are compiled now.

        The rows in use are limited to the width of the widest compiled program of plain decoding.
        Requests whose programs are ready are not held back any more.
        """
        ready = [
            width
            for width in self.sizes.widths
            if self.programs.is_ready("decode", width, self.device.plain, False)
        ]
        with self.wake:
            self.scheduler.limit_rows(max(ready))
            self.scheduler.hold_back(self._held_back())
            self.wake.notify_all()

    def _held_back(self) -> list[str]:
        """Return the needs of requests, such as "logprobs" or "grammars", that are not ready."""
        needs, is_ready, sizes = [], self.programs.is_ready, self.sizes
        if not (
            is_ready("read", sizes.chunk, True, False)
            and is_ready("decode", sizes.rows, self.device.reporting, True)
        ):
            needs.append("logprobs")
        if not self.programs.are_ready(*MASKED, "copy_rows", "restore_rows"):
            needs.append("grammars")
        # Requests with penalties may have a grammar or log-probabilities, too.
        kinds = "read", "decode", "adjust", "rearrange", "rearrange_adjusted"
        if not self.programs.are_ready(*kinds, *MASKED, *ADJUSTING):
            needs.append("penalties")
        are_ready = [is_ready("verify", width) for width in sizes.widths]
        if self.device.remote_drafter is not None:
            are_ready += [is_ready("read", size, False, True) for size in sizes.read_widths]
        if not all(are_ready):
            needs.append("clients")
        if not (all(are_ready) and self.programs.are_ready("verify_masked")):
            needs.append("clients' grammars")
        return needs

    def _next_untimed(self) -> tuple[int, int] | None:
        """Return a width and a drafter's index that were not timed yet.

        None: all are timed, a program is not compiled yet, a row is in use, or a request waits.
        """
        if not self.programs.are_all_ready or self.scheduler.occupied or self.scheduler.waiting:
            return None
        indices = range(len(self.device.drafters))
        calls = ((width, index) for index in indices for width in self.device.widths_of(index))
        return next((call for call in calls if call not in self.choice.seconds), None)

    def _cancel(self, request: Request) -> None:
        """Cancel a request. Handles call it from any thread."""
        with self.wake:
            self.scheduler.cancel(request)
            handle = self.handles.pop(request, None)
            self.wake.notify_all()  # the freed row may be what another request waits for
        if handle is not None:
            handle.end("cancelled")

    def _prefill_prompts(self) -> bool:
        """Prefill up to a chunk of tokens per group, and return whether there was any to prefill.

        Several short chunks may fit into the width of one. The limit also holds if no row decodes:
        requests with ``max_new_tokens`` of 0 get their results at the end of a turn, so a turn must
        be short.
        """
        remaining, has_prefilled = self.sizes.chunk, False
        while remaining >= self.sizes.read_widths[0]:
            # Wait before the scheduler decides, because requests may be cancelled meanwhile.
            self.device.wait_for_reads()
            with self.wake:
                if self.closing:
                    break
                chosen = self._prepared(self.scheduler.next_reads(remaining))
                # A copy: another thread may cancel a request, which changes the table, while the
                # device reads it.
                table = self.scheduler.table.copy()
            if not chosen:
                break
            has_prefilled = True
            chunks = [chunk for chunk, _, _ in chosen]
            for chunk, recipient, row_text in chosen:
                if row_text is not None:
                    self._begin_row(chunk, self._in_its_segment(row_text, chunk, recipient))
                    self.device.adjust(chunk.row, self._adjustments(chunk.request, recipient))
            echoed = [
                (recipient, chunk)
                for chunk, recipient, _ in chosen
                if isinstance(recipient, Handle) and recipient.output_options.echo
            ]
            prefix_state, logprobs, features = self._read(chunks, table, logprobs=bool(echoed))
            self._undelivered_logprobs += [
                (handle, chunk, self._group(chunk), logprobs) for handle, chunk in echoed
            ]
            # The device makes calls in the order of their queueing. So rows may share the pages of
            # a chunk from now on, although it may not be computed yet.
            with self.wake:
                for chunk, recipient, _ in chosen:
                    try:
                        self._chunk_queued(chunk, prefix_state, features)
                    except Exception as error:  # only this text ends
                        self._give_up(chunk.request, recipient, error)
            remaining -= max(chunk.width for chunk in chunks)
        return has_prefilled

    def _prepared(
        self, chunks: Sequence[PrefillChunk]
    ) -> list[tuple[PrefillChunk, Handle | ClientRow, device_rows.Text | None]]:
        """Return the chunks with the recipients of their texts, and the texts of new rows.

        The recipient is the request's handle, or the client's row. It needs the lock.
        """
        chosen = []
        for chunk in chunks:
            recipient = self.handles.get(chunk.request) or self.clients.rows.get(chunk.request)
            try:
                if recipient is None:
                    raise RuntimeError(
                        f"request {chunk.request.order}: its prompt is to be read, but it has no"
                        " recipient"
                    )
                row_text = self._row_text(chunk.request, recipient) if chunk.is_first else None
                chosen.append((chunk, recipient, row_text))
            except Exception as error:  # only this text ends
                self._give_up(chunk.request, recipient, error)
        return chosen

    def _row_text(self, request: Request, recipient: Handle | ClientRow) -> device_rows.Text:
        """Return what `_text_of` does, and tell a handle that the row's counters start at 0."""
        row_text = self._text_of(request, recipient.settings)
        if isinstance(recipient, Handle):
            recipient.admitted()
        return row_text

    def _in_its_segment(
        self, row_text: device_rows.Text, chunk: PrefillChunk, recipient: Handle | ClientRow
    ) -> device_rows.Text:
        """Let a new text draft from the earlier answers of its tenant, if there are any."""
        tenant, newest = chunk.request.tenant, None
        may_draft = isinstance(recipient, Handle) and recipient.output_options.store
        if self.answers is not None and may_draft:
            newest = self.answers.newest(tenant)
        if newest is None:
            return row_text
        version, answers = newest
        in_use = {
            request.tenant
            for row, request in enumerate(self._admitted)
            if request is not None and row != chunk.row
        }
        segment, is_new = self._segments.place(tenant, version, in_use)
        if is_new:
            self.device.put_answers(segment, answers, version)
        return replace(row_text, segment=np.int32(segment))

    def _text_of(self, request: Request, settings: Mapping[str, Any]) -> device_rows.Text:
        """Return a request's text and settings as arrays, for its new row on the device."""
        tokens = np.zeros(self.sizes.capacity, np.int32)
        tokens[: len(request.tokens)] = request.tokens
        return device_rows.Text(
            tokens=tokens,
            length=np.int32(len(request.tokens)),
            max_length=np.int32(request.max_length),
            **settings,
        )

    def _adjustments(self, request: Request, recipient: Handle | ClientRow) -> Adjustments | None:
        """Return what a text has generated and what it bans, for its new row on the device.

        None: it has no penalty, bias or ban. What was generated before a preemption stays so.
        """
        if isinstance(recipient, ClientRow) or recipient.output_options.biases is None:
            return None
        biases = recipient.output_options.biases
        size = self.device.target.config.vocab_size
        return Adjustments.of_texts(
            [request.tokens],
            [recipient.prompt_tokens],
            size,
            biases.bias(size)[None],
            [biases.words],
            (MAX_WORDS, MAX_WORD_TOKENS),
        )

    def _chunk_queued(
        self, chunk: PrefillChunk, prefix_state: Any, features: dict[str, jax.Array]
    ) -> None:
        """Record that a chunk was queued on the device. Needs the lock."""
        self._counters["read"] += chunk.count
        self._counters["shared"] += chunk.start if chunk.is_first else 0
        self.scheduler.was_read(chunk, self._state_of(chunk, prefix_state))
        self.clients.was_read(chunk, features)
        if chunk.is_last and chunk.request.state == "done":  # max_new_tokens is 0
            self._undelivered.append((self.handles.pop(chunk.request), RowProgress(done=True)))

    def _give_up(
        self, request: Request, recipient: Handle | ClientRow | None, error: Exception
    ) -> None:
        """End one text with an ``error`` that concerns it alone; others continue. Needs the lock.

        Raises:
            RuntimeError: Rows or pages are inconsistent, so that no text can continue.
        """
        if isinstance(recipient, ClientRow):
            self.clients.give_up(recipient, error)
            return
        if isinstance(error, InputError):  # the request's fault, such as its grammar's
            _LOGGER.warning("a text ended with an error; the others continue: %.500s", error)
        else:
            _LOGGER.error("a text ended with an error; the others continue", exc_info=error)
        self.handles.pop(request, None)
        is_for_caller = isinstance(error, LogitsError | InputError)
        if recipient is not None:
            recipient.end(
                "error",
                error,
                f"this text failed{f': {error}' if is_for_caller else ''}",
            )
        self.scheduler.cancel(request)
        self.scheduler.check()

    def _group(self, chunk: PrefillChunk) -> int:
        """Return the index of the group of rows that a chunk's row belongs to."""
        return chunk.row // (self.sizes.rows // self._groups)

    def _read(
        self, chunks: Sequence[PrefillChunk], table: np.ndarray, logprobs: bool
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        """Prefill chunks on the device, at most one per group of rows.

        Returns:
            The prefix state after the chunks, the log-probabilities if ``logprobs``, and the
            features for a remote drafter.
        """
        chunk_of_group = {self._group(chunk): chunk for chunk in chunks}
        rows_per_group = self.sizes.rows // self._groups
        chunks_by_group = [chunk_of_group.get(group) for group in range(self._groups)]
        for_client = any(chunk.request.is_client for chunk in chunks)
        size = max(chunk.width for chunk in chunks)
        if logprobs or not (for_client or self.programs.is_ready("read", size, False, False)):
            # The program of a full chunk is compiled first, and only it has log-probabilities.
            size = self.sizes.chunk
        return self.device.read(
            table,
            rows=[
                group * rows_per_group if chunk is None else chunk.row
                for group, chunk in enumerate(chunks_by_group)
            ],
            counts=[0 if chunk is None else chunk.count for chunk in chunks_by_group],
            # After its last chunk a row decodes in the next call, unless a client drafts for it.
            is_last=[
                chunk is not None and chunk.is_last and not chunk.request.is_client
                for chunk in chunks_by_group
            ],
            size=size,
            logprobs=logprobs,
            for_client=for_client,
        )

    def _decode(self) -> bool:
        """Make one decode call for the running rows, and return False if no row runs any more."""
        scheduler = self.scheduler  # used with the lock only: requests are cancelled at any time
        with self.wake:
            self._give_up_orphans()
            matchers = self._binding_matchers()
        host_tokens = self._known_tokens(matchers) if matchers else {}
        with self.wake:
            if not scheduler.running:
                return False
            # Use short calls while a prompt is being prefilled or a client drafts, because both
            # wait for this thread. Other calls may be long: they end by themselves when a text ends
            # and a request waits for its row. Pages are allocated for all steps, because the device
            # cannot ask for more.
            is_short = bool(scheduler.reading) or self.clients.are_drafting
            steps = max(1, self.sizes.steps // 4) if is_short else self.sizes.steps
            matchers, call = self._binding_matchers(), None
            self._kinds = self._running_kinds()
            is_adjusting = any(
                self.handles[request].output_options.biases is not None
                for row in scheduler.running
                if (request := scheduler.request_of(row))
            )
            if matchers:
                host_tokens = {request: host_tokens[request] for request in matchers}
                call, width, index, logprobs = self._choose_constrained(
                    host_tokens, steps, is_adjusting=is_adjusting
                )
                steps = call.steps
            elif is_adjusting:
                width, index, logprobs = self._choose_adjusting()
            else:
                width, index, logprobs = self._choose()
            self._draft = str(self.choice.drafts[index] or "none")
            drafter = self.device.drafters[index]
            depth = drafter.draft_shape.depth
            is_masked = call is not None and call.kind != "free"
            scheduler.reserve(steps * (max(depth, FORCED if is_masked else 0) + 1) + 1)
            if not scheduler.running:
                return False
            order = self._compact(width)
            requests = [scheduler.request_of(row) for row in range(self.sizes.rows)]
            snapshot = {}
            for row in scheduler.running:
                request = requests[row]
                snapshot[row] = (request, self.handles[request])  # pyright: ignore[reportArgumentType]
            # Retire rows that have no request, and rows whose new request is not admitted on the
            # device yet. Otherwise the device would continue the old text in such a row, and write
            # to pages that now belong to the new request.
            to_retire = np.array(
                [
                    request is None or request is not self._admitted[row]
                    for row, request in enumerate(requests)
                ]
            )
            # If a request waits for a row, the call ends as soon as any text does.
            table, until_any_done = scheduler.table.copy(), scheduler.waiting > 0
        if order is not None:
            self.device.rearrange(order)
        self.device.is_adjusting = is_adjusting
        pauses = is_paused(drafter)
        added = 1 + _longest(host_tokens) if is_masked else steps
        # Time the decode call alone, without the chunks that the device is still prefilling.
        if self.device.is_busy():
            self._deliver()
            self.device.wait()
        # Catch up before a call that drafts, because the drafter must have read all committed
        # tokens. Also before a paused call whose tokens may not fit into the buffer of pending
        # tokens, which has room for `ROOM` per row.
        if self._pending and (not pauses or self._pending + added > ROOM):
            self._catch_up(table)
        self._pending += added if pauses else 0
        if is_masked:
            assert call is not None
            progress = self._step_masked(
                call, index, host_tokens, table, to_retire, width, snapshot, logprobs
            )
            return self._record_call(progress, snapshot)
        before = None if call is None else self.device.copy_rows()
        return self._call_free(
            (width, index), table, to_retire, steps, until_any_done, snapshot, before, logprobs
        )

    def _call_free(
        self,
        width_and_drafter: tuple[int, int],
        table: np.ndarray,
        to_retire: np.ndarray,
        steps: int,
        until_any_done: bool,
        snapshot: Mapping[int, Any],
        before: Any,
        logprobs: bool,
    ) -> bool:
        """Make a call without masks, and return what `_record_call` returns.

        ``before`` is a copy of the rows, so that those that leave their grammar can be put back;
        None if no row has a grammar.
        """
        width, index = width_and_drafter
        pauses = is_paused(self.device.drafters[index])
        nothing_compiles = self.programs.are_all_ready
        started = time.perf_counter()
        progress = self.device.decode(
            index, table, to_retire, steps, until_any_done, width, logprobs
        )
        self._deliver()  # the texts of the previous call, while the device works on this one
        # If the call has ended already, its true time is unknown: the measured seconds are an upper
        # bound.
        is_upper_bound = progress.done.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
        progress = jax.device_get(progress)
        seconds = time.perf_counter() - started
        if pauses and nothing_compiles:  # plain decoding makes tokens pending: see `_catch_up`
            seconds, self._uncharged = seconds + self._uncharged, 0.0
        # Calls with log-probabilities run another program, whose time must not count for the draft.
        is_measured = nothing_compiles and not (logprobs or self.device.is_adjusting)
        seconds = seconds if is_measured else None
        has_left = None
        if before is not None:
            give_up = self._give_up_row(snapshot)
            has_left = self._constrained.check(progress, snapshot, before, give_up)
        # Rows with penalties draft worse: they say nothing about the draft of others.
        measured = None if self.device.is_adjusting else (width, index)
        return self._record_call(
            progress, snapshot, measured, seconds, has_left, is_upper_bound=is_upper_bound
        )

    def _binding_matchers(self) -> dict[Request, Matcher]:
        """Return the matchers under which a token of the next call may be illegal. Needs the lock.

        They are those of running requests with a grammar, and with a thinking budget that could be
        used up within the call. The others are free rows in this call.
        """
        scheduler = self.scheduler
        requests = filter(None, map(scheduler.request_of, scheduler.running))
        matchers = ((it, self.handles[it].output_options.matcher) for it in requests)
        depth = max(self.device.depth, FORCED)
        most = self.sizes.steps * (depth + 1)  # whatever kind of call is chosen
        return {
            request: matcher
            for request, matcher in matchers
            if matcher is not None and matcher.free_tokens < most
        }

    def _known_tokens(self, matchers: Mapping[Request, Matcher]) -> dict[Request, Sequence[int]]:
        """Return the tokens that the host can draft for each request with a grammar."""

        def give_up(request: Request, error: Exception) -> None:
            with self.wake:
                if (handle := self.handles.get(request)) is not None:
                    self._give_up(request, handle, error)

        return self._constrained.known_tokens(matchers, give_up)

    def _choose_adjusting(self) -> tuple[int, int, bool]:
        """Return what `_choose` does, if some row has a penalty or bias and none a grammar."""
        running = self.scheduler.running
        requests = filter(None, map(self.scheduler.request_of, running))
        if any(self.handles[it].output_options.logprobs is not None for it in requests):
            return self.sizes.rows, self.device.reporting, True
        width = next(width for width in self.device.masked_widths if width >= len(running))
        return width, self.device.adjusting, False

    def _choose_constrained(
        self, host_tokens: Mapping[Request, Sequence[int]], steps: int, *, is_adjusting: bool
    ) -> tuple[Call, int, int, bool]:
        """Return the call to make if some row has a grammar, and what `_choose` returns.

        Args:
            host_tokens: the tokens that the host can draft, of each running request with a grammar.
            steps: the largest number of steps of a free call.
            is_adjusting: whether some row has a penalty or bias. Then no free call is made, and
                no prediction is copied.
        """
        running, device = self.scheduler.running, self.device
        requests = filter(None, map(self.scheduler.request_of, running))
        options = [self.handles[request].output_options for request in requests]
        free_width, indices = self._free_programs()
        row_kinds = self._drafting_kinds()
        draft = self.choice.fastest(free_width, indices, row_kinds)
        width = next(width for width in device.masked_widths if width >= len(running))
        if logprobs := any(it.logprobs is not None for it in options):
            width, free_width, draft = self.sizes.rows, self.sizes.rows, device.reporting
        drafts = any(it.speculation.depth > 0 for it in options)
        # Some row has a prediction, and no row needs log-probabilities, which copies do not have.
        copies = any(it.copies for it in options) and self.programs.are_ready(*COPYING)
        copies = copies and device.copying is not None and not logprobs and not is_adjusting
        call = self._constrained.choose(
            host_tokens,
            len(running),
            (width, free_width),
            None if is_adjusting else draft,
            steps,
            copies=copies,
            drafts=drafts,
            row_kinds=row_kinds,
        )
        if call.kind == "free":
            return call, *self._choose()
        index = {"drafted": device.masked, "copying": device.copying}.get(call.kind)
        return call, width, device.plain if index is None else index, logprobs

    def _free_programs(self) -> tuple[int, list[int]]:
        """Return the width of a free call of the running rows, and the drafts that are compiled."""
        count, ready = len(self.scheduler.running), self.programs.is_ready
        plain = self.device.plain
        widths = (width for width in self.sizes.widths if ready("decode", width, plain, False))
        width = next(width for width in widths if width >= count)
        drafts = range(len(self.device.drafters))
        return width, [index for index in drafts if ready("decode", width, index, False)]

    def _step_masked(
        self,
        call: Call,
        index: int,
        host_tokens: Mapping[Request, Sequence[int]],
        table: np.ndarray,
        to_retire: np.ndarray,
        width: int,
        snapshot: Mapping[int, Any],
        logprobs: bool,
    ) -> device_rows.Progress:
        """Make one masked step with all running rows, and return its progress on the host."""
        nothing_compiles = self.programs.are_all_ready
        started = time.perf_counter()
        drafting, give_up = None if call.kind == "host" else index, self._give_up_row(snapshot)
        progress = self._constrained.begin_masked(
            drafting, host_tokens, snapshot, table, to_retire, width, logprobs, give_up
        )
        self._deliver()  # the texts of the previous call, while the device works on this one
        progress = jax.device_get(progress)
        seconds = time.perf_counter() - started
        if call.kind == "host" and nothing_compiles:
            seconds, self._uncharged = seconds + self._uncharged, 0.0
        self._constrained.end_masked(
            call, host_tokens, snapshot, progress, width, seconds if nothing_compiles else None
        )
        return progress

    def _give_up_row(self, snapshot: Mapping[int, Any]) -> Callable[[int, Exception], None]:
        """Return a function that ends the text of a row with an error. It acquires the lock."""

        def give_up(row: int, error: Exception) -> None:
            with self.wake:
                request, handle = snapshot[row]
                if request in self.handles:  # it was not cancelled meanwhile
                    self._give_up(request, handle, error)

        return give_up

    def _give_up_orphans(self) -> None:
        """End texts that run without a handle, which would be a bug. Needs the lock."""
        for row in self.scheduler.running:
            request = self.scheduler.request_of(row)
            if request is not None and request not in self.handles:
                self._give_up(
                    request,
                    None,
                    RuntimeError(f"request {request.order}: it runs, but it has no handle"),
                )

    def _choose(self) -> tuple[int, int, bool]:
        """Return how many rows to compute, the drafter's index, and whether to report logprobs."""
        scheduler = self.scheduler
        running = [
            self.handles[request]
            for row in scheduler.running
            if (request := scheduler.request_of(row))
        ]
        if any(handle.output_options.logprobs is not None for handle in running):
            return self.sizes.rows, self.device.reporting, True
        speculations = [handle.output_options.speculation for handle in running]
        num_drafting, named = (
            sum(it.depth > 0 for it in speculations),
            {it.draft for it in speculations},
        )
        copying = 0 if named - {None} else sum(it.output_options.copies for it in running)
        # The share of the rows with a prediction among those that draft.
        predicted = copying / max(1, num_drafting)
        # If a drafter copies predictions, it is the last one. Without it no request has a
        # prediction, and the last drafter is one like the others.
        last, ready = len(self.device.drafters) - 1, self.programs.is_ready
        if predicted:
            width = next(width for width in self.device.widths_of(last) if width >= len(running))
            predicted *= ready("decode", width, last, False)
        if not predicted:
            plain = self.device.plain
            widths = (width for width in self.sizes.widths if ready("decode", width, plain, False))
            width = next(width for width in widths if width >= len(running))
        indices = [index for index in range(last + 1) if ready("decode", width, index, False)]
        if not num_drafting:
            return width, self.device.plain, False
        # Drafts that requests name come first; if they name several, the fastest of them.
        indices = [index for index in indices if index in named] or indices
        is_measuring = self.programs.are_all_ready
        return (
            width,
            self.choice.choose(
                width,
                predicted,
                indices,
                plain=self.device.plain,
                is_measuring=is_measuring,
                drafting=num_drafting / len(running),
                row_kinds=self._drafting_kinds(),
            ),
            False,
        )

    def _running_kinds(self) -> dict[Request, RowKind]:
        """Return what each running text is writing, and how long it is. Needs the lock."""
        requests = filter(None, map(self.scheduler.request_of, self.scheduler.running))
        return {
            request: RowKind.of(
                self.handles[request].output_options.regions.region, len(request.tokens)
            )
            for request in requests
        }

    def _drafting_kinds(self) -> Counter[RowGroup]:
        """Return the number of running rows that draft, by kind. Needs the lock."""
        return Counter(
            kind
            for request, kind in self._kinds.items()
            if self.handles[request].output_options.speculation.depth > 0
        )

    def _catch_up(self, table: np.ndarray) -> None:
        """Give the paused drafter its pending tokens.

        The seconds count as part of the next call of plain decoding, because such calls are what
        makes tokens pending.
        """
        few = self._pending <= FEW_PENDING and self.programs.is_ready("catch_up", FEW_PENDING)
        if not few and not self.programs.wait_for("catch_up", ROOM):
            raise self.programs.error or _ClosedError
        nothing_compiles = self.programs.are_all_ready
        started = time.perf_counter()
        self.device.catch_up(table, *([FEW_PENDING] if few else []))
        self.device.wait()
        if nothing_compiles:
            self._uncharged += time.perf_counter() - started
        self._pending = 0

    def _compact(self, width: int) -> np.ndarray | None:
        """Move all running rows into the first ``width``, and return the new order of the rows.

        The scheduler and this thread's lists have that order afterwards; the caller must rearrange
        the device's rows. None: the running rows are there already, and nothing changes.
        """
        running = self.scheduler.running
        if max(running) < width:
            return None
        # A decode call computes only the first rows. Tables that are copied from now on have the
        # new order.
        order = np.array(
            [*running, *(row for row in range(self.sizes.rows) if row not in set(running))],
            np.int32,
        )
        self.scheduler.swap(order.tolist())
        self._admitted = [self._admitted[row] for row in order]
        self._device_stats = Stats(*(values[order] for values in vars(self._device_stats).values()))
        return order

    def _record_call(
        self,
        progress: device_rows.Progress,
        snapshot: Mapping[int, Any],
        width_and_drafter: tuple[int, int] | None = None,
        seconds: float | None = None,
        has_left: np.ndarray | None = None,
        is_upper_bound: bool = False,
    ) -> bool:
        """Record the tokens and the time of a decode call. Return whether a text still runs.

        ``width_and_drafter``, for `DraftChoice.record`, has the number of rows and the index of the
        drafter; None: the call says nothing about free text. ``has_left [rows]`` has the rows that
        went back to where they were before the call; None: there are none.
        """
        with self.wake:
            self._counters["calls"] += 1
            rows: list[int] = []
            went_back = [] if has_left is None else np.flatnonzero(has_left).tolist()
            kinds: list[RowKind] = []
            changed: dict[int, RowTokens] = {}
            for row, (request, handle) in snapshot.items():
                if row in went_back:
                    continue
                try:
                    tokens = self._record_row(progress, row, request, handle)
                except Exception as error:  # only this text ends
                    self._give_up(request, handle, error)
                    continue
                if tokens is not None:
                    changed[len(rows)] = tokens
                rows.append(row)
                kinds.append(self._kinds[request])
            # Count all rows at once, because a few numpy operations per row would delay the device.
            of_rows = difference(progress.stats, self._device_stats, rows)
            self._total.add(of_rows)
            self._total.add_kinds(of_rows, kinds, changed)
            if width_and_drafter is not None:
                self._judge_draft(
                    width_and_drafter,
                    progress,
                    snapshot,
                    rows,
                    went_back,
                    seconds,
                    is_upper_bound=is_upper_bound,
                )
            before, self._device_stats = self._device_stats, copies_of(progress.stats)
            for now, earlier in zip(
                vars(self._device_stats).values(), vars(before).values(), strict=True
            ):
                now[went_back] = earlier[went_back]
            return bool(self.scheduler.running)

    def _judge_draft(
        self,
        width_and_drafter: tuple[int, int],
        progress: device_rows.Progress,
        snapshot: Mapping[int, Any],
        rows: Sequence[int],
        went_back: Sequence[int],
        seconds: float | None,
        *,
        is_upper_bound: bool,
    ) -> None:
        """Record the result of a call's draft.

        It is judged by what rows that went back emitted, too: it was drafted for free text. A draft
        that copies predictions is judged by the rows that have one, and every draft by the rows
        that may draft as deep as it does.
        """
        draft, candidates = self.choice.drafts[width_and_drafter[1]], [*rows, *went_back]
        depth = 0 if draft is None else draft.depth
        steps = progress.stats.steps[candidates] - self._device_stats.steps[candidates]
        if isinstance(draft, Copies):
            candidates = [row for row in rows if snapshot[row][1].output_options.copies]
        judging = [
            row for row in candidates if snapshot[row][1].output_options.speculation.depth >= depth
        ]
        by_kind = _results_by_kind(
            difference(progress.stats, self._device_stats, judging),
            [self._kinds[snapshot[row][0]] for row in judging],
        )
        nothing = RowResults(0, 0, [0] * self.device.depth)
        self.choice.record(
            *width_and_drafter,
            reduce(operator.add, by_kind.values()) if by_kind else nothing,
            seconds=seconds,
            is_upper_bound=is_upper_bound,
            steps=int(steps.max(initial=0)),
            by_kind=by_kind,
        )

    def _record_row(
        self, progress: device_rows.Progress, row: int, request: Request, handle: Handle
    ) -> RowTokens | None:
        """Record the new tokens of one row. Needs the lock.

        Returns:
            The tokens, if the region of the text changed within them.
        """
        matched = 0 if progress.matched is None else int(progress.matched[row])
        handle.take_stats(
            Stats(*(values[row : row + 1] for values in vars(progress.stats).values())), matched
        )
        if self.scheduler.request_of(row) is not request:  # it was cancelled meanwhile
            return None
        row_progress = self._row_progress(progress, row, request, handle)
        if (matcher := handle.output_options.matcher) is not None:
            matcher.append(row_progress.tokens)
            is_full = int(progress.lengths[row]) >= request.max_length
            if row_progress.done and not is_full and matcher.is_stuck:
                raise matcher.stuck_error([row])
        has_failed = row_progress.error is not None
        self.scheduler.decoded(row, row_progress.tokens, row_progress.done, has_failed=has_failed)
        if row_progress.done:
            del self.handles[request]
        self._undelivered.append((handle, row_progress))
        runs = handle.output_options.regions.append(row_progress.tokens)
        if len(runs) < 2:
            return None
        return RowTokens(self._kinds[request], runs, row_progress.accepted)

    def _row_progress(
        self, progress: device_rows.Progress, row: int, request: Request, handle: Handle
    ) -> RowProgress:
        """Return the tokens of a row that its request does not have yet."""
        start, length = len(request.tokens), int(progress.lengths[row])
        if not start <= length <= request.max_length:
            raise RuntimeError(
                f"row {row}: the device has {length} tokens; the text had {start} before this call,"
                f" and its limit is {request.max_length}"
            )
        if progress.starts[row] != start:
            raise RuntimeError(
                f"row {row}: the device began with {progress.starts[row]} tokens, but the text has"
                f" {start}"
            )
        count = length - start
        tokens, logprobs = progress.tokens[row, :count].tolist(), ()
        if handle.output_options.logprobs is not None and progress.logprobs is not None:
            of_row = [np.asarray(values)[row] for values in vars(progress.logprobs).values()]
            logprobs = token_logprobs(handle.output_options.logprobs, tokens, *of_row)
        error = LogitsError([row], [length]) if progress.failed[row] else None
        if error is not None:
            _LOGGER.error("request %d: %s; the others continue", request.order, error)
        return RowProgress(
            tokens,
            progress.accepted[row, :count].tolist(),
            logprobs,
            bool(progress.done[row]),
            error,
        )

    def _deliver(self, wait: bool = True) -> None:
        """Detokenize the new tokens, and deliver them to the handles and to clients.

        Args:
            wait: whether to wait for the log-probabilities and the hidden states of prompts that
                are still being computed; otherwise their delivery ends at the first that is not
                ready. New tokens of texts are on the host already.
        """
        self.clients.deliver(wait)
        while self._undelivered_logprobs:
            handle, chunk, group, logprobs = self._undelivered_logprobs[0]
            if not (wait or logprobs.chosen.is_ready()):
                break
            del self._undelivered_logprobs[0]
            try:
                of_group = [np.asarray(values)[group] for values in vars(logprobs).values()]
                _check_logprobs(chunk, of_group[0][: chunk.count])
                tokens = chunk.request.tokens[chunk.start + 1 : chunk.start + 1 + chunk.count]
                handle.prompt_read(
                    chunk.start,
                    token_logprobs(handle.output_options.logprobs or 0, tokens, *of_group),
                )
            except Exception as error:  # only this text ends
                with self.wake:
                    self._give_up(chunk.request, handle, error)
        with waking_once():
            self._deliver_texts()

    def _deliver_texts(self) -> None:
        """Detokenize the new tokens of texts, and deliver them to the handles."""
        # A prompt's log-probabilities come before the tokens of its text.
        prompt_pending = {handle for handle, *_ in self._undelivered_logprobs}
        index = 0
        while index < len(self._undelivered):
            handle, row_progress = self._undelivered[index]
            if handle in prompt_pending:
                index += 1
                continue
            # Without the lock, because detokenizing takes long. The entry stays in the list until
            # it is delivered: if this thread fails in between, `_run` still ends the handle.
            try:
                goes_on = handle.deliver(row_progress)
            except Exception as error:  # only this text ends: perhaps its tokens cannot be decoded
                goes_on = True  # nothing is left to cancel
                with self.wake:
                    self._give_up(handle.request, handle, error)
            del self._undelivered[index]
            if self.answers is not None and handle.output_options.store and handle.is_answer:
                self.answers.add(handle.request.tenant, handle.tokens)
            if not goes_on and not row_progress.done:
                length = handle.prompt_tokens + len(handle.tokens)
                with self.wake:
                    self.scheduler.cut(handle.request, length)
                    self.handles.pop(handle.request, None)


def _results_by_kind(stats: Stats, kinds: Sequence[RowKind]) -> dict[RowGroup, RowResults]:
    """Return the counters ``[B]`` of rows by kind, as the choice of a draft takes them."""
    histogram = np.asarray(stats.histogram, np.int64)
    counts = [
        np.stack([stats.steps, histogram @ np.arange(histogram.shape[1])], axis=1),
        stats.accepted_at,
    ]
    depth = stats.accepted_at.shape[1]
    if stats.accepted_by.shape[1]:
        by_others = stats.accepted - stats.accepted_only_by[:, 0]
        counts.append(np.stack([stats.accepted_by[:, 0], by_others], axis=1))
    return {
        kind: RowResults(row_steps, emitted, numbers[:depth], *numbers[depth:])
        for kind, (row_steps, emitted, *numbers) in sums_by_kind(
            np.concatenate(counts, axis=1), kinds
        ).items()
    }


def _longest(host_tokens: Mapping[Request, Sequence[int]]) -> int:
    """Return the number of tokens of the longest draft that the host can make."""
    return max(map(len, host_tokens.values()), default=0)


def _check_logprobs(chunk: PrefillChunk, chosen: np.ndarray) -> None:
    """Raise `LogitsError` if a log-probability is NaN, because the target's logits were wrong."""
    if np.isnan(chosen).any():
        raise LogitsError([chunk.row], [chunk.start + 1 + int(np.argmax(np.isnan(chosen)))])


class _ClosedError(Exception):
    """The engine was closed while its thread waited for a program."""
