"""The engine: what users call. Requests go in, texts come out.

Its thread is `specjax.serving.engine_loop`. Between two decode calls the thread gives free rows to waiting requests and reads a
chunk of a prompt. So a request begins as soon as a row is free, and a long prompt delays the others by no more than a chunk.
"""

import atexit
import inspect
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import jax
import numpy as np

from specjax import pipeline, text
from specjax.decoding.options import check_prompts
from specjax.drafters import Drafter
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError, check_options
from specjax.models.cache import groups_of
from specjax.models.transformer import Target
from specjax.sampling_params import SamplingParams
from specjax.serving import over_hosts
from specjax.serving.clients import ClientRow, Listener
from specjax.serving.config import EngineConfig
from specjax.serving.device import ClientDrafts
from specjax.serving.engine_loop import EngineLoop
from specjax.serving.handle import Handle, OutputOptions
from specjax.serving.scheduler import Scheduler
from specjax.serving.statistics import EngineStatistics
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
        config = EngineConfig.of(
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
        together = config.together()
        if together is not None and not together.is_first:
            raise InputError(f"this is process {together.number}, and the engine is process 0's: call specjax.serving.follow")
        sizes = config.sizes
        self._config, self.target, self.tokenizer = config, config.target, config.tokenizer
        self.default_sampling = config.default_sampling
        self.page, self.chunk, self.capacity, self.widths = sizes.page, sizes.chunk, sizes.capacity, sizes.widths
        self.rows, self.steps = rows, steps
        self.max_logprobs, self.max_prediction = max_logprobs, max_prediction
        device = config.device(together)
        scheduler = Scheduler(
            rows=rows,
            pages=sizes.pages,
            page=self.page,
            chunk=self.chunk,
            capacity=self.capacity,
            tails=sizes.read_widths[:1],
            shards=groups_of(config.target.mesh),
            max_waiting=max_waiting,
            prefix_states=device.most_prefix_states(),
            client_rows=client_rows,
            idle_seconds=client_idle_seconds,
        )
        self._loop = EngineLoop(config, device, scheduler, together, warm=warm)
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
        self._check_output_options(params, logprobs, echo, spans)
        tokens, expected = self.encode(prompt), self.encode_prediction(prediction)
        drawn = params if params.max_new_tokens else replace(params, max_new_tokens=1)  # one that is not computed
        settings = self._config.settings(drawn, len(tokens), choice=choice, key=key, expected=expected)
        stop = text.check_stop(stop)
        growing = None
        if self.tokenizer is not None:
            is_chat = not isinstance(prompt, str) and not _is_tokens(prompt) if is_chat is None else is_chat
            growing = text.GrowingText(self.tokenizer, tokens, stop, params.min_new_tokens, is_chat)
        options = OutputOptions(logprobs=logprobs, echo=echo, spans=spans, prediction=len(expected))
        return self._loop.submit(tokens, params.max_new_tokens, settings, growing, options, cache_salt=cache_salt)

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
        if self._loop.device.clients is None:
            raise InputError("open_row: this engine has no programs for drafts of clients; give Engine(clients=ClientDrafts())")
        tokens = self.encode(tokens)
        length = len(tokens) if prompt_length is None else prompt_length
        params = SamplingParams.of(params, stated, function=self.open_row)
        settings = self._config.settings(params, length)
        with self._loop.wake:
            self._loop.check_open()
            return self._loop.clients.open(tokens, length, params.max_new_tokens, known, settings, listener, owner)

    @property
    def client_drafts(self) -> ClientDrafts | None:
        """What drafts may come from clients; None: there are no clients."""
        return self._loop.device.clients

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
        return self._loop.statistics()

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
        return self._loop.state

    @property
    def is_compiling(self) -> bool:
        """Whether a program is being compiled in the background. `close` does not wait for it: it cannot be interrupted."""
        return self._loop.programs.is_compiling

    @property
    def error(self) -> BaseException | None:
        """The error that the thread has ended with; None: it has not.

        Examples:
            >>> from specjax.serving import Engine
            >>> with Engine(target, drafts=(None,), rows=2, widths=(2,), capacity=32) as engine:
            ...     print(engine.error)
            None
        """
        return self._loop.error

    def close(self) -> None:
        """End the thread. Texts that are not finished are cancelled."""
        self._loop.close()
        atexit.unregister(self.close)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_output_options(self, params: SamplingParams, logprobs: int | None, echo: bool, spans: bool) -> None:
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
