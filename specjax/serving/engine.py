"""The engine: requests in, texts out, one thread that keeps the device busy.

Between two decode calls it gives free rows to waiting requests and reads a chunk of a prompt. So a request begins as soon as a
row is free, and a long prompt holds the others up for no longer than a chunk.
"""

import atexit
import inspect
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import jax
import numpy as np

from specjax import pipeline, text
from specjax.decoding import rows as device_rows
from specjax.decoding.options import check_prompts
from specjax.decoding.stats import Stats
from specjax.drafters import Drafter
from specjax.drafters.pausable import ROOM
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError, LogitsError, check_options
from specjax.models.cache import groups_of
from specjax.models.transformer import Target
from specjax.sampling_params import SamplingParams
from specjax.serving import over_hosts
from specjax.serving.choice import Copies, DraftChoice
from specjax.serving.clients import ClientRow, Clients, Listener
from specjax.serving.config import EngineConfig
from specjax.serving.device import ClientDrafts, is_paused
from specjax.serving.handle import EngineError, Handle, OutputOptions, RowProgress, token_logprobs
from specjax.serving.programs import Programs
from specjax.serving.scheduler import PrefillChunk, Request, Scheduler
from specjax.serving.statistics import EngineStatistics, copies_of, difference
from specjax.serving.totals import Totals
from specjax.templates import Settings

_LOGGER = logging.getLogger(__name__)


class Engine:
    """Generates many texts together, each of which begins and ends when it will: continuous batching.

    Texts are drawn with coupled sampling, or greedily. So a request's text depends on the request alone: its prompt, its
    settings and its seed. It is what `specjax.generate` gives with ``rule="coupled"`` and the same key.

    Close it, or use it in a ``with`` statement: until then its thread keeps it, and the caches.

    Examples:
        >>> from specjax.serving import Engine
        >>> with Engine(target, drafts=(None,), rows=2, widths=(2,), capacity=32) as engine:
        ...     handles = [
        ...         engine.submit(prompt, max_new_tokens=8) for prompt in prompts.tolist()
        ...     ]
        ...     texts = [handle.result().tokens for handle in handles]
        >>> np.array_equal(texts, plain.tokens[:, 6:])
        True
    """

    def __init__(
        self,
        target: Target | pipeline.TextGenerator,
        drafter: Drafter | None = None,
        *,
        rows: int = 8,
        drafts: Sequence[DraftShape | int | str | None] | None = None,
        capacity: int | None = None,
        pages: int | None = None,
        page: int | None = None,
        chunk: int | None = None,
        steps: int = 8,
        max_waiting: int | None = None,
        tokenizer: Any = None,
        widths: Sequence[int] | None = None,
        max_logprobs: int = 0,
        max_prediction: int = 0,
        clients: ClientDrafts | None = None,
        client_rows: int | None = None,
        client_idle_seconds: float = 1.0,
        warm: bool = True,
    ) -> None:
        """Compile everything, or what a first request needs, and begin to wait for requests.

        Args:
            target: the target; or what `specjax.load` returns, with its drafter, tokenizer and default sampling.
            drafter: for a target alone; None is plain decoding.
            rows: most texts that are generated at a time.
            drafts: shapes of drafts to choose from by load, as `specjax.load` takes them; None among them is plain decoding.
                By default None, a short chain, and the drafter's own.
            capacity: most tokens of a text, prompt and output; by default what the models have positions for, at most
                `specjax.serving.memory.USUAL_CAPACITY`.
            pages: of the cache; on a mesh, for each group of rows. By default enough for texts of `USUAL_TEXT` tokens in all
                rows.
            page: tokens of a page, a power of two; by default 64, on a TPU 256.
            chunk: tokens of a prompt that are read at a time, a multiple of ``page``; by default 64 on a CPU and else 512.
            steps: most steps of a decode call, at most 64. Fewer look more often whether there is something else to do.
            max_waiting: most requests that wait for a row; None: any number.
            tokenizer: for a target alone, where prompts are text.
            widths: numbers of rows to compile for, the largest being ``rows``: the smallest that holds the running rows is
                computed. By default powers of two on a CPU, where fewer rows take less time, and else ``rows`` alone.
            max_logprobs: most likeliest tokens that a request may ask for in each place. With 0 it may ask for no
                log-probabilities at all: they take programs of their own, which then are not compiled.
            max_prediction: most tokens of a prediction that are copied in a step. With 0 a request may bring none.
            clients: what drafts come from clients, for `open_row`; None: there are no clients.
            client_rows: most rows that clients of one owner have at a time; None: half of ``rows``, at least 1.
            client_idle_seconds: seconds without a draft after which a client's row may go to a waiting request. The client gets
                a row again when it next drafts.
            warm: compile everything and time it before this returns. Otherwise it returns when a plain request in one row can
                be answered, and the rest is compiled meanwhile: texts are the same, more rows and drafts are used as they
                become ready, and requests that need other programs wait for them. A mesh that spans processes is always warm.

        Raises:
            InputError: an argument cannot be used; names it, its value and what to give instead.
        """
        setup = EngineConfig.of(
            target,
            drafter,
            rows=rows,
            drafts=drafts,
            capacity=capacity,
            pages=pages,
            page=page,
            chunk=chunk,
            steps=steps,
            tokenizer=tokenizer,
            widths=widths,
            max_logprobs=max_logprobs,
            max_prediction=max_prediction,
            clients=clients,
        )
        client_rows = max(1, rows // 2) if client_rows is None else client_rows
        if not 1 <= client_rows <= rows:
            raise InputError(f"client_rows={client_rows}: must be from 1 to rows={rows}")
        if not 0 <= client_idle_seconds < math.inf:
            raise InputError(f"client_idle_seconds={client_idle_seconds}: must be at least 0, and finite")
        self._config, self._together = setup, (together := setup.together())
        if together is not None and not together.is_first:
            raise InputError(f"this is process {together.number}, and the engine is process 0's: call specjax.serving.follow")
        sizes = setup.sizes
        self.target, self.tokenizer = setup.target, setup.tokenizer
        self.default_sampling = setup.default_sampling
        self.page, self.chunk, self.capacity, self.widths = sizes.page, sizes.chunk, sizes.capacity, sizes.widths
        self.rows, self.steps = rows, steps
        self.max_logprobs, self.max_prediction = max_logprobs, max_prediction
        self._groups = groups_of(setup.target.mesh)
        self._device = setup.device(together)
        self._depth = self._device.depth
        self._scheduler = Scheduler(
            rows=rows,
            pages=sizes.pages,
            page=self.page,
            chunk=self.chunk,
            capacity=self.capacity,
            last_widths=sizes.read_widths[:1],
            shards=self._groups,
            max_waiting=max_waiting,
            prefix_states=self._device.most_prefix_states(),
            client_rows=client_rows,
            idle_seconds=client_idle_seconds,
        )
        self._wake = threading.Condition(threading.RLock())
        self._programs = Programs(self._device.programs(setup.placeholder_settings()), self._wake)
        seconds: dict[tuple[int, int], float] = {}
        if warm or together is not None:
            seconds = self._device.warm_up(setup.placeholder_settings(), self._programs)
        else:
            self._programs.compile_stage(0, "compiling for the first request")
        self._choice = DraftChoice(setup.choices, seconds)
        self._draft = str(setup.choices[0] or "none")  # that was used last
        self._admitted: list[Request | None] = [None] * rows  # whose text each row of the device has
        self._undelivered: list[tuple[Handle, RowProgress]] = []
        # Log-probabilities of prompts that are still on the device.
        self._unread: list[tuple[Handle, PrefillChunk, int, Any]] = []
        self._counted = copies_of(Stats.zeros(rows, self._depth))  # what each row's text had counted after the newest call
        self._total = Totals(drafted_at=[0] * self._depth, accepted_at=[0] * self._depth)
        self._uncharged = 0.0  # seconds that catching up took
        self._pending = 0  # tokens that a paused drafter has yet to read, at most, in any row
        self._counts = {"read": 0, "shared": 0, "calls": 0}
        self._handles: dict[Request, Handle] = {}
        self._clients = Clients(self._device, self._scheduler, self._wake)
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="specjax-engine", daemon=True)
        self._programs_changed()
        self._thread.start()
        if not self._programs.are_all_ready:
            self._programs.start(self._programs_changed)
        atexit.register(self.close)  # a thread that is still on the device would bring the interpreter down as it ends

    # --- what users call -----------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | text.Messages | Sequence[int],
        params: SamplingParams | None = None,
        *,
        choice: int = 0,
        key: jax.Array | None = None,
        stop: str | Sequence[str] = (),
        prediction: str | Sequence[int] | None = None,
        logprobs: int | None = None,
        echo: bool = False,
        spans: bool = False,
        cache_salt: str = "",
        is_chat: bool | None = None,
        **stated: Any,
    ) -> Handle:
        """Ask for a text. Returns at once.

        Args:
            prompt: text, a chat, or token ids ``[P]``.
            params: the sampling parameters, complete: nothing stands for what they leave out. ``max_new_tokens`` may be 0 with
                ``echo``, and ``eos_token_ids`` are at most 8. The same request with the same seed has the same text, whatever
                else is running.
            choice: the index of this text among several of one request: texts of one seed and different indices are
                independent.
            key: a random key instead of seed and choice: the text's own, as in ``key [B]`` of `specjax.generate`.
            stop: a string, or several, before the first of which the text ends.
            prediction: what the text is expected to be, as text or token ids: it is copied into drafts as long as it fits. It
                changes the time that the text takes, not the text.
            logprobs: with a number, the target's log-probabilities of the tokens, and of as many of the likeliest ones in
                each place, in `Piece.logprobs`.
            echo: with ``logprobs``, those of the prompt too, in the handle's ``prompt_logprobs``. All of the prompt is then
                computed.
            spans: `Piece.spans` are wanted.
            cache_salt: what is read of the prompt is shared only with requests of the same salt: nobody else can tell by the
                time or by `Handle.cached_tokens` that there was such a prompt.
            is_chat: the text is that of a chat's answer: of a model that writes in channels, such as gpt-oss, the final one
                alone. None: where the prompt is a chat.
            stated: the fields of `SamplingParams` by name, such as ``temperature=0.7``, in place of ``params`` or over them. Of
                the distribution's parameters, what is left out or None without ``params`` is the generator's
                ``default_sampling``; without one, the text is greedy.

        Raises:
            InputError: an argument cannot be used; names it, its value and what to give instead.
            QueueFullError: too many requests wait.
            EngineError: the engine has failed; its error is the cause.
        """
        params = SamplingParams.of(params, stated, defaults=self.default_sampling, function=self.submit)
        if isinstance(prompt, jax.Array):
            prompt = np.asarray(prompt).tolist()
        if not isinstance(prompt, Sequence | np.ndarray):
            raise InputError(f"prompt={prompt!r}: give text, a chat, or token ids")
        if self.tokenizer is None and (stop or not _is_tokens(prompt)):
            raise InputError("prompt: an engine without a tokenizer takes token ids, and no stop strings; give tokenizer=...")
        self._check_wanted(params, logprobs, echo, spans)
        tokens, expected = self.encode(prompt), self.encode_prediction(prediction)
        drawn = params if params.max_new_tokens else replace(params, max_new_tokens=1)  # one that is not computed
        settings = self._config.settings(drawn, len(tokens), choice=choice, key=key, expected=expected)
        stop = text.check_stop(stop)
        growing = None
        if self.tokenizer is not None:
            is_chat = not isinstance(prompt, str) and not _is_tokens(prompt) if is_chat is None else is_chat
            growing = text.GrowingText(self.tokenizer, tokens, stop, params.min_new_tokens, is_chat)
        output_options = OutputOptions(logprobs=logprobs, echo=echo, spans=spans, prediction=len(expected))
        with self._wake:
            self._check_open()
            needs = None if logprobs is None else "logprobs"
            shares = 0 if echo else None
            request = self._scheduler.submit(tokens, params.max_new_tokens, shares=shares, needs=needs, salt=cache_salt)
            handle = Handle(self._cancel, request, settings, growing, output_options)
            self._handles[request] = handle
            self._wake.notify_all()
        return handle

    def open_row(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt_length: int | None = None,
        known: int = 0,
        listener: Listener,
        owner: str = "",
        **stated: Any,
    ) -> ClientRow:
        """Ask for a row for a client, whose drafts come from elsewhere. Returns at once.

        The client's text is the one that `submit` gives for the same prompt, settings and seed, whatever it drafts. A client
        states its settings: no ``default_sampling`` stands for those that are left out here.

        A row is the client's until the text is over, or it is closed or dropped: where others need rows or pages, first that of
        a client that is away (`ClientRow.is_away`). Next goes the row of a client that could draft and has not done so for
        ``client_idle_seconds``. The client is not told. When it next drafts, it waits for a row, its text is read again, and
        the verdict is the same. As long as clients that draft have all rows, others wait: close what is
        not used.

        Args:
            tokens: ``[n]`` token ids of the prompt, and of whatever there is already of the text.
            params: the sampling parameters. ``max_new_tokens`` counts all tokens after the prompt, those that there are among
                them.
            prompt_length: tokens of the prompt; None: all of them.
            known: of how many tokens, from the first on, the client has been told already.
            listener: is called from the engine's thread with each `specjax.serving.clients.RowEvent`. It must be quick.
            owner: whose client it is. The clients of one owner have at most ``client_rows`` rows of the engine at a time, and
                further ones wait. Empty: it is not counted.
            stated: the fields of `SamplingParams` by name, in place of ``params`` or over them.

        Raises:
            InputError: an argument cannot be used; names it, its value and what to give instead.
            QueueFullError: too many requests wait.
            EngineError: the engine has failed; its error is the cause.
        """
        if self._device.clients is None:
            raise InputError("open_row: this engine has no programs for drafts of clients; give Engine(clients=ClientDrafts())")
        tokens = self.encode(tokens)
        length = len(tokens) if prompt_length is None else prompt_length
        params = SamplingParams.of(params, stated, function=self.open_row)
        settings = self._config.settings(params, length)
        with self._wake:
            self._check_open()
            return self._clients.open(tokens, length, params.max_new_tokens, known, settings, listener, owner)

    @property
    def client_drafts(self) -> ClientDrafts | None:
        """What drafts may come from clients; None: there are no clients."""
        return self._device.clients

    def encode(self, prompt: str | text.Messages | Sequence[int], chat_template_kwargs: Settings | None = None) -> list[int]:
        """The token ids of what `submit` takes as a prompt; with ``chat_template_kwargs`` as in `specjax.text.encode_chat`.

        Raises:
            InputError: it cannot be used; says why.
        """
        if not _is_tokens(prompt):
            generator = pipeline.TextGenerator(self.target, self.tokenizer)
            return generator.encode(prompt, chat_template_kwargs=chat_template_kwargs)  # pyright: ignore[reportArgumentType]
        tokens = [int(token) for token in prompt]  # pyright: ignore[reportArgumentType]
        check_prompts([tokens], None, self.target.config.vocab_size)
        return tokens

    def encode_prediction(self, prediction: str | Sequence[int] | None) -> list[int]:
        """The token ids of what `submit` takes as a prediction; of one that is longer than any text, the beginning.

        Raises:
            InputError: it cannot be used; says why.
        """
        if prediction is None or len(prediction) == 0:
            return []
        if not self.max_prediction:
            raise InputError("prediction: this engine copies none; give Engine(max_prediction=16)")
        if not isinstance(prediction, str):
            return self.encode(prediction)[: self.capacity]
        if self.tokenizer is None:
            raise InputError("prediction: an engine without a tokenizer takes token ids; give tokenizer=...")
        return text.encode_continuation(self.tokenizer, prediction)[: self.capacity]

    @property
    def statistics(self) -> EngineStatistics:
        """What it is doing, and what it has done."""
        with self._wake:
            scheduler = self._scheduler
            return EngineStatistics(
                waiting=scheduler.waiting,
                running=len(scheduler.running),
                free_pages=scheduler.free_pages,
                pages=self._device.sizes.pages * self._groups,
                prompt_tokens_read=self._counts["read"],
                prompt_tokens_shared=self._counts["shared"],
                preemptions=scheduler.preemptions,
                decode_calls=self._counts["calls"],
                generated=self._total.generated,
                drafted_steps=self._total.drafted_steps,
                drafted=self._total.drafted,
                accepted=self._total.accepted,
                accepted_at=tuple(self._total.accepted_at),
                draft=self._draft,
                drafts=self._choice.table(),
                clients=self._clients.statistics,
                compiled=self._programs.compiled,
                programs=self._programs.total,
            )

    @property
    def state(self) -> Literal["running", "failed", "closed"]:
        """Whether requests are taken ("running"), or the thread has ended with an error, or `close` was called.

        Examples:
            >>> from specjax.serving import Engine
            >>> with Engine(target, drafts=(None,), rows=2, widths=(2,), capacity=32) as engine:
            ...     inside = engine.state
            >>> inside, engine.state
            ('running', 'closed')
        """
        if self._error is not None or not (self._closing or self._thread.is_alive()):
            return "failed"
        return "closed" if self._closing else "running"

    @property
    def is_compiling(self) -> bool:
        """Whether a program is being compiled in the background. `close` does not wait for it: it cannot be interrupted."""
        return self._programs.is_compiling

    @property
    def error(self) -> BaseException | None:
        """The error that the thread has ended with; None: it has not.

        Examples:
            >>> from specjax.serving import Engine
            >>> with Engine(target, drafts=(None,), rows=2, widths=(2,), capacity=32) as engine:
            ...     print(engine.error)
            None
        """
        return self._error

    def close(self) -> None:
        """End the thread. Texts that are not finished are cancelled."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._programs.stop()
        atexit.unregister(self.close)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    to_time = None
                    while not (self._has_work() or self._closing):
                        if self._programs.error is not None or (to_time := self._next_to_time()) is not None:
                            break
                        self._wake.wait(self._seconds_until_idle())
                    if self._closing:
                        break
                    if self._programs.error is not None:
                        raise self._programs.error
                if to_time is not None:  # one at a time, so that a request waits for no more
                    seconds = self._device.time_decoding(self._config.placeholder_settings(), *to_time)
                    with self._wake:
                        self._choice.seconds[to_time] = seconds
                    self._pending = 0
                    continue
                has_read = self._read_prompts()
                self._clients.verify()
                if not self._decode():
                    self._deliver(wait=not has_read)  # the device may go on with prompts meanwhile
            self._deliver()
        except _ClosedError:
            pass
        except BaseException as error:  # whoever waits must learn of it
            with self._wake:
                self._error = error
            raise
        finally:
            self._programs.stop()
            with self._wake:
                handles = [*self._handles.values(), *(handle for handle, _ in self._undelivered)]
                self._handles.clear()
                # The caches are free, whoever still holds the engine or a handle.
                self._scheduler.clear()
            for handle in handles:
                handle.end("error" if self._error else "cancelled", self._error)
            self._clients.end("the engine could not go on" if self._error else "the engine is closed")
            if self._together is not None and self._error is None:
                self._together.end()  # after a failure the others wait, until whoever looks after this process ends it
            self._device.release()

    def _has_work(self) -> bool:
        """Whether there is something to read, to decode, to verify or to hand out. With the lock."""
        return self._scheduler.can_go_on() or self._clients.has_work or bool(self._undelivered or self._unread)

    def _seconds_until_idle(self) -> float | None:
        """How long the thread may sleep before somebody who waits can have an idle client's row. With the lock."""
        seconds = self._scheduler.seconds_until_idle()
        return None if seconds is None else min(seconds, threading.TIMEOUT_MAX)

    def _programs_changed(self) -> None:
        """Give out as many rows as there is a plain program for, and let those run whose programs are ready."""
        ready = [width for width in self.widths if self._programs.is_ready("decode", width, self._device.plain, False)]
        with self._wake:
            self._scheduler.limit_rows(max(ready))
            self._scheduler.hold_back(self._held_back())
            self._wake.notify_all()

    def _held_back(self) -> list[str]:
        """What requests need that is not compiled yet."""
        needs, is_ready = [], self._programs.is_ready
        reads = self._device.sizes.read_widths
        if not (is_ready("read", self.chunk, True, False) and is_ready("decode", self.rows, self._device.reporting, True)):
            needs.append("logprobs")
        tells_remote_drafters = self._device.remote_drafter is not None
        if not all(is_ready("verify", width) for width in self.widths) or (
            tells_remote_drafters and not all(is_ready("read", width, False, True) for width in reads)
        ):
            needs.append("clients")
        return needs

    def _next_to_time(self) -> tuple[int, int] | None:
        """A number of rows and of a drafter whose seconds are not known, once nothing compiles and nobody has a row."""
        if not self._programs.are_all_ready or self._scheduler.occupied or self._scheduler.waiting:
            return None
        numbers = range(len(self._device.drafters))
        to_time = ((width, number) for number in numbers for width in self._device.widths_of(number))
        return next((call for call in to_time if call not in self._choice.seconds), None)

    def _cancel(self, request: Request) -> None:
        with self._wake:
            self._scheduler.cancel(request)
            handle = self._handles.pop(request, None)
            self._wake.notify_all()
        if handle is not None:
            handle.end("cancelled")

    def _read_prompts(self) -> bool:
        """Read a chunk's worth of prompts. Return whether there was any to read.

        It is no more than that also where no text runs: whoever asked for a prompt alone has the answer in every turn.
        """
        left, has_read = self.chunk, False
        while left >= self._device.sizes.read_widths[0]:
            self._device.wait_for_reads()  # before anything is decided: a prompt may be cancelled meanwhile
            with self._wake:
                if self._closing:
                    break
                chosen = self._prepared(self._scheduler.next_reads(left))
                table = self._scheduler.table.copy()
            if not chosen:
                break
            has_read = True
            reads = [read for read, _, _ in chosen]
            for read, _, words in chosen:
                if words is not None:
                    self._admitted[read.row] = read.request
                    for counts in vars(self._counted).values():
                        counts[read.row] = 0
                    self._device.admit(read.row, words, read.start, read.prefix_state)
            echoed = [(owner, read) for read, owner, _ in chosen if isinstance(owner, Handle) and owner.output_options.echo]
            prefix_state, said, told = self._read(reads, table, logprobs=bool(echoed))
            self._unread += [(handle, read, self._group(read), said) for handle, read in echoed]
            with self._wake:
                for read, owner, _ in chosen:
                    try:
                        self._was_read(read, prefix_state, told)
                    except Exception as error:  # this text's: the others go on
                        self._give_up(read.request, owner, error)
            left -= max(read.width for read in reads)
        return has_read

    def _prepared(
        self, reads: Sequence[PrefillChunk]
    ) -> list[tuple[PrefillChunk, Handle | ClientRow, device_rows.Text | None]]:
        """Return the reads with their owners, and with the texts that are new on the device. With the lock."""
        chosen = []
        for read in reads:
            owner = self._handles.get(read.request) or self._clients.rows.get(read.request)
            try:
                if owner is None:
                    raise RuntimeError(f"request {read.request.order}: a prompt is to be read, and nobody has asked for it")
                chosen.append((read, owner, self._words(read.request, owner) if read.is_first else None))
            except Exception as error:  # this text's: the others go on
                self._give_up(read.request, owner, error)
        return chosen

    def _words(self, request: Request, owner: Handle | ClientRow) -> device_rows.Text:
        """Return what the device is to know of a text that gets a row."""
        tokens = np.zeros(self.capacity, np.int32)
        tokens[: len(request.tokens)] = request.tokens
        words = device_rows.Text(
            tokens=tokens,
            length=np.int32(len(request.tokens)),
            max_length=np.int32(request.max_length),
            **owner.settings,
        )
        if isinstance(owner, Handle):
            owner.admitted()
        return words

    def _was_read(self, read: PrefillChunk, prefix_state: Any, told: dict[str, jax.Array]) -> None:
        """Note that the device has been asked to read a piece of a prompt. With the lock."""
        self._counts["read"] += read.count
        self._counts["shared"] += read.start if read.is_first else 0
        self._scheduler.was_read(read, (prefix_state, np.int32(self._group(read))))
        self._clients.was_read(read, told)
        if read.is_last and read.request.state == "done":  # it was to be read, and no more
            self._undelivered.append((self._handles.pop(read.request), RowProgress(done=True)))

    def _give_up(self, request: Request, owner: Handle | ClientRow | None, error: Exception) -> None:
        """End one text with an ``error`` that is its own. The others go on. With the lock.

        Raises:
            RuntimeError: rows or pages contradict each other, so that no text can go on.
        """
        if isinstance(owner, ClientRow):
            self._clients.give_up(owner, error)
            return
        _LOGGER.error("a text ends with an error; the others go on", exc_info=error)
        self._handles.pop(request, None)
        if owner is not None:
            owner.end("error", error, f"this text could not go on{f': {error}' if isinstance(error, LogitsError) else ''}")
        self._scheduler.cancel(request)
        self._scheduler.check()

    def _group(self, read: PrefillChunk) -> int:
        return read.row // (self.rows // self._groups)

    def _read(self, reads: Sequence[PrefillChunk], table: np.ndarray, logprobs: bool) -> tuple[Any, Any, dict[str, jax.Array]]:
        of_group = {self._group(read): read for read in reads}
        share = self.rows // self._groups
        given = [of_group.get(group) for group in range(self._groups)]
        for_client = any(read.request.is_client for read in reads)
        width = max(read.width for read in reads)
        if logprobs or not (for_client or self._programs.is_ready("read", width, False, False)):
            width = self.chunk  # which is compiled first
        return self._device.read(
            table,
            rows=[group * share if read is None else read.row for group, read in enumerate(given)],
            counts=[0 if read is None else read.count for read in given],
            # The device is to decode what has been read; not a client's.
            is_last=[read is not None and read.is_last and not read.request.is_client for read in given],
            width=width,
            logprobs=logprobs,
            for_client=for_client,
        )

    def _decode(self) -> bool:
        """Let the running rows go on, in one call. Return False where none runs any more."""
        scheduler = self._scheduler  # used under the lock alone, for a text may be cancelled at any moment
        with self._wake:
            self._give_up_orphans()
            if not scheduler.running:
                return False
            width, number, logprobs = self._choose()
            self._draft = str(self._choice.drafts[number] or "none")
            drafter = self._device.drafters[number]
            # Where a prompt is half read its owner waits, and a client that drafts may send its next draft at any time. Where
            # there is neither, the call ends by itself when a row is free.
            is_short = bool(scheduler.reading) or self._clients.are_drafting
            steps = max(1, self.steps // 4) if is_short else self.steps
            scheduler.reserve(steps * (drafter.draft_shape.depth + 1) + 1)
            if not scheduler.running:
                return False
            order = self._compact(width)
            requests = [scheduler.request_of(row) for row in range(self.rows)]
            snapshot = {row: (requests[row], self._handles[requests[row]]) for row in scheduler.running}  # pyright: ignore[reportArgumentType]
            # Also where another has a row, and is not on the device yet.
            free = np.array([request is None or request is not self._admitted[row] for row, request in enumerate(requests)])
            table, until_any_done = scheduler.table.copy(), scheduler.waiting > 0
        if order is not None:
            self._device.rearrange(order)
        pauses = is_paused(drafter)
        # The seconds of a draft are those of its own call: not of the prompts that the device is still reading.
        if self._device.is_busy():
            self._deliver()
            self._device.wait()
        if self._pending and (not pauses or self._pending + steps > ROOM):
            self._catch_up(table)
        nothing_compiles = self._programs.are_all_ready
        started = time.perf_counter()
        progress = self._device.decode(number, table, free, steps, until_any_done, width, logprobs)
        self._pending += steps if pauses else 0
        self._deliver()  # what the call before has come to, while the device is at this one
        was_late = progress.done.is_ready()  # then nobody knows how long before the device was done  # pyright: ignore[reportAttributeAccessIssue]
        progress = jax.device_get(progress)
        seconds = time.perf_counter() - started
        if pauses and nothing_compiles:  # catching up is a part of its price
            seconds, self._uncharged = seconds + self._uncharged, 0.0
        # Another program reports log-probabilities: its seconds are not the draft's.
        known = None if logprobs or not nothing_compiles else seconds
        return self._take(progress, snapshot, (width, number), known, is_upper_bound=was_late)

    def _give_up_orphans(self) -> None:
        """End texts that run and that nobody has asked for: none should. With the lock."""
        for row in self._scheduler.running:
            request = self._scheduler.request_of(row)
            if request is not None and request not in self._handles:
                self._give_up(request, None, RuntimeError(f"request {request.order}: it runs, and nobody has asked for it"))

    def _choose(self) -> tuple[int, int, bool]:
        """How many rows to compute, the number of the drafter, and whether log-probabilities are wanted."""
        scheduler = self._scheduler
        running = [self._handles[request] for row in scheduler.running if (request := scheduler.request_of(row))]
        if any(handle.output_options.logprobs is not None for handle in running):
            return self.rows, self._device.reporting, True
        predicted = sum(handle.output_options.prediction > 0 for handle in running) / len(running)
        copying, ready = len(self._device.drafters) - 1, self._programs.is_ready
        if predicted:
            width = next(each for each in self._device.widths_of(copying) if each >= len(running))
            predicted *= ready("decode", width, copying, False)
        if not predicted:
            plain = self._device.plain
            width = next(each for each in self.widths if each >= len(running) and ready("decode", each, plain, False))
        numbers = [number for number in range(copying + 1) if ready("decode", width, number, False)]
        is_measuring = self._programs.are_all_ready
        return width, self._choice.choose(width, predicted, numbers, plain=self._device.plain, is_measuring=is_measuring), False

    def _catch_up(self, table: np.ndarray) -> None:
        """Give the paused drafter its pending tokens. Plain decoding, which made them pending, is charged with the seconds."""
        if not self._programs.wait_for("catch_up"):
            raise self._programs.error or _ClosedError
        nothing_compiles = self._programs.are_all_ready
        started = time.perf_counter()
        self._device.catch_up(table)
        self._device.wait()
        if nothing_compiles:
            self._uncharged += time.perf_counter() - started
        self._pending = 0

    def _compact(self, width: int) -> np.ndarray | None:
        """How rows are to be rearranged so that the first ``width`` hold all that run; None: they do."""
        running = self._scheduler.running
        if max(running) < width:
            return None
        order = np.array([*running, *(row for row in range(self.rows) if row not in set(running))], np.int32)
        self._scheduler.swap(order.tolist())
        self._admitted = [self._admitted[row] for row in order]
        self._counted = Stats(*(counts[order] for counts in vars(self._counted).values()))
        return order

    def _take(
        self,
        progress: device_rows.Progress,
        snapshot: Mapping[int, Any],
        call: tuple[int, int],
        seconds: float | None,
        is_upper_bound: bool,
    ) -> bool:
        """Note what a decode call has come to, and what it took. Return whether a text still runs."""
        is_copying = isinstance(self._choice.drafts[call[1]], Copies)
        with self._wake:
            self._counts["calls"] += 1
            rows, copying_rows = [], []
            for row, (request, handle) in snapshot.items():
                try:
                    self._take_row(progress, row, request, handle)
                except Exception as error:  # this text's: the others go on
                    self._give_up(request, handle, error)
                    continue
                rows.append(row)
                if handle.output_options.prediction:
                    copying_rows.append(row)
            # All rows at once: with many, a few operations for each would keep the device waiting.
            new = difference(progress.stats, self._counted, rows)
            measured = difference(progress.stats, self._counted, copying_rows) if is_copying else new
            self._counted = copies_of(progress.stats)
            self._total.add(new)
            self._choice.record(
                *call,
                seconds=seconds,
                is_upper_bound=is_upper_bound,
                steps=int(new.steps.max(initial=0)),
                row_steps=int(measured.steps.sum()),
                emitted=int(measured.histogram.sum(axis=0) @ np.arange(self._depth + 2)),
                accepted_at=measured.accepted_at.sum(axis=0),
            )
            return bool(self._scheduler.running)

    def _take_row(self, progress: device_rows.Progress, row: int, request: Request, handle: Handle) -> None:
        """Note what one row has come to. With the lock."""
        matched = 0 if progress.matched is None else int(progress.matched[row])
        handle.take_stats(Stats(*(counts[row : row + 1] for counts in vars(progress.stats).values())), matched)
        if self._scheduler.request_of(row) is request:  # it was not cancelled meanwhile
            news = self._news(progress, row, request, handle)
            self._scheduler.decoded(row, news.tokens, news.done)
            if news.done:
                del self._handles[request]
            self._undelivered.append((handle, news))

    def _news(self, progress: device_rows.Progress, row: int, request: Request, handle: Handle) -> RowProgress:
        """Return what a row has come to beyond the tokens that its request has."""
        start, length = len(request.tokens), int(progress.lengths[row])
        if not start <= length <= request.max_length:
            raise RuntimeError(
                f"row {row}: the device has {length} tokens of a text that had {start} before and may have {request.max_length}"
            )
        if progress.starts[row] != start:
            raise RuntimeError(f"row {row}: the device began with {progress.starts[row]} tokens of a text that has {start}")
        count = length - start
        tokens, logprobs = progress.tokens[row, :count].tolist(), ()
        if handle.output_options.logprobs is not None and progress.logprobs is not None:
            said = [np.asarray(each)[row] for each in vars(progress.logprobs).values()]
            logprobs = token_logprobs(handle.output_options.logprobs, tokens, *said)
        error = LogitsError([row], [length]) if progress.failed[row] else None
        if error is not None:
            _LOGGER.error("request %d: %s; the others go on", request.order, error)
        return RowProgress(tokens, progress.accepted[row, :count].tolist(), logprobs, bool(progress.done[row]), error)

    def _deliver(self, wait: bool = True) -> None:
        """Hand out tokens: they become text here, and their owners are told. Without ``wait`` only what is on the host."""
        self._clients.deliver(wait)
        while self._unread and (wait or self._unread[0][3].chosen.is_ready()):
            handle, read, group, said = self._unread.pop(0)
            try:
                places = [np.asarray(each)[group] for each in vars(said).values()]
                _check_said(read, places[0][: read.count])
                tokens = read.request.tokens[read.start + 1 : read.start + 1 + read.count]
                handle.prompt_read(read.start, token_logprobs(handle.output_options.logprobs or 0, tokens, *places))
            except Exception as error:  # this text's: the others go on
                with self._wake:
                    self._give_up(read.request, handle, error)
        reading = {handle for handle, *_ in self._unread}  # their prompts' log-probabilities come first
        place = 0
        while place < len(self._undelivered):
            handle, news = self._undelivered[place]
            if handle in reading:
                place += 1
                continue
            try:
                goes_on = handle.deliver(news)
            except Exception as error:  # this text's: its tokens cannot be decoded, perhaps
                goes_on = True  # or it has ended: there is no more to cancel
                with self._wake:
                    self._give_up(handle.request, handle, error)
            del self._undelivered[place]
            if not goes_on and not news.done:
                with self._wake:
                    self._scheduler.cancel(handle.request)
                    self._handles.pop(handle.request, None)

    # --- what was asked ------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.state == "failed":
            raise EngineError("the engine could not go on") from self._error
        if self._closing:
            raise InputError("the engine is closed")

    def _check_wanted(self, params: SamplingParams, logprobs: int | None, echo: bool, spans: bool) -> None:
        if logprobs is not None and not self.max_logprobs:
            raise InputError("logprobs: this engine gives none; give Engine(max_logprobs=20)")
        if logprobs is not None and not 0 <= logprobs <= self.max_logprobs:
            raise InputError(f"logprobs={logprobs}: must be from 0 to max_logprobs={self.max_logprobs}")
        if echo and logprobs is None:
            raise InputError("echo: the prompt's log-probabilities; give logprobs, too")
        if spans and self.tokenizer is None:
            raise InputError("spans: parts of the text, and an engine without a tokenizer has none; give tokenizer=...")
        if params.max_new_tokens < 1 and not (echo and params.max_new_tokens == 0):
            raise InputError(f"max_new_tokens={params.max_new_tokens}: must be at least 1; with echo, 0 reads the prompt alone")


def _check_said(read: PrefillChunk, chosen: np.ndarray) -> None:
    """Refuse log-probabilities of a prompt's tokens that are NaN: the target's logits were none."""
    if np.isnan(chosen).any():
        raise LogitsError([read.row], [read.start + 1 + int(np.argmax(np.isnan(chosen)))])


class _ClosedError(Exception):
    """The engine was closed while its thread waited for a program."""


_FIRST_PROCESS_ALONE = ("max_waiting", "client_rows", "client_idle_seconds", "warm")
"""Arguments of `Engine` that say nothing of what is compiled."""


def follow(target: Target | pipeline.TextGenerator, drafter: Drafter | None = None, **options: Any) -> None:
    """What every process but the first does with an `Engine` over several processes, until the engine is closed.

    Takes the same arguments as the first process's `Engine`. Each process calls `specjax.processes.join` at the beginning. The
    first makes the engine, and the others call this.

    Raises:
        InputError: an argument cannot be used; or this is the first process, or works alone.

    Examples:
        >>> from specjax import processes
        >>> from specjax.serving import Engine, follow
        >>> if processes.speaks():
        ...     with Engine(target, drafts=(None,), rows=2, widths=(2,), capacity=32) as engine:
        ...         generation = engine.submit(prompts[0].tolist(), max_new_tokens=8).result()
        ... else:
        ...     follow(target, drafts=(None,), rows=2, widths=(2,), capacity=32)
    """
    check_options("follow", options, Engine)
    given = inspect.signature(Engine).bind(target, drafter, **options)
    given.apply_defaults()
    setup = EngineConfig.of(**{name: value for name, value in given.arguments.items() if name not in _FIRST_PROCESS_ALONE})
    together = setup.together()
    if together is None or together.is_first:
        raise InputError("follow: is for the processes after the first, of a mesh that spans several: make an Engine here")
    device = setup.device(together)
    device.warm_up(setup.placeholder_settings())
    over_hosts.repeat_calls(device, together)


def _is_tokens(prompt: Any) -> bool:
    return not isinstance(prompt, str) and all(isinstance(each, int | np.integer) for each in prompt)
