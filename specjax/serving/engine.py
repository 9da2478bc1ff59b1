"""The engine's public class: it takes requests and returns handles of their texts.

The engine's thread is in `specjax.serving.engine_loop`. Between two decode calls the thread gives
free rows to waiting requests and prefills a chunk of a prompt. So a request begins as soon as a row
is free, and a long prompt delays the others by no more than a chunk.
"""

import atexit
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import jax
import numpy as np

from specjax import pipeline, text
from specjax.arguments import is_whole
from specjax.decoding.options import check_prompts
from specjax.drafters import Drafter
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError, check_options
from specjax.grammars import CompiledGrammar, Grammar, Matcher, ThinkingBudget
from specjax.models.cache import groups_of
from specjax.models.transformer import Target
from specjax.sampling_params import SamplingParams
from specjax.serving import over_hosts
from specjax.serving.clients import ClientRow, Listener
from specjax.serving.config import EngineConfig
from specjax.serving.device import MAX_WORD_TOKENS, MAX_WORDS, ClientDrafts
from specjax.serving.engine_loop import EngineLoop
from specjax.serving.handle import Handle, OutputOptions
from specjax.serving.pages import Tenant
from specjax.serving.region_marks import region_marks
from specjax.serving.row_kinds import RegionReader
from specjax.serving.scheduler import Scheduler
from specjax.serving.statistics import EngineStatistics
from specjax.templates import Settings, check_is_chat
from specjax.token_biases import TokenBiases


class Engine:
    """An engine with continuous batching: requests may come and end at any time.

    Tokens are sampled with the coupled rule, or greedily. So a request's text depends on the
    request alone: its prompt, its sampling parameters and its seed. It equals the text of
    `specjax.generate` with ``rule="coupled"`` and the same key.

    The engine has a thread, which keeps the models and the caches in memory until `close` is
    called. Use the engine in a ``with`` statement, or close it.

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
        grammars: bool = False,
        penalties: bool | None = None,
        thought_tokens: Sequence[str] | None = None,
        earlier_answers: int = 0,
        client_rows: int | None = None,
        client_idle_seconds: float = 1.0,
        urgent_after: int = 256,
        reread: bool = True,
        warm: bool = True,
    ) -> None:
        """Compile all programs, or those that a first request needs, and start the thread.

        Args:
            target: the target, or what `specjax.load` returns. The latter brings its drafter, its
                tokenizer and its default sampling parameters.
            drafter: the drafter, if ``target`` is a target alone; None is plain decoding.
            rows: the largest number of texts that are generated together.
            drafts: shapes of drafts, as `specjax.load` takes them. The engine chooses among them by
                load; None among them is plain decoding. The default is None, a short chain, and the
                drafter's own shape. If each part of a `specjax.Together` has room for its
                whole draft, there are up to three more (`specjax.UnionTree.splits`).
            capacity: the maximal length of a text in tokens, prompt and output together. The
                default is the number of positions of the models, at most
                `specjax.serving.memory.USUAL_CAPACITY`.
            pages: the number of pages in the KV cache; on a mesh, per group of rows. The default
                holds texts of `USUAL_TEXT` tokens in all rows.
            page: tokens per page, a power of two; the default is 64, and 256 on a TPU.
            chunk: tokens per chunk of prefill, a multiple of ``page``; the default is 64 on a CPU
                and 512 otherwise.
            steps: the largest number of decoding steps per call, at most 64. With fewer steps the
                engine looks more often for new requests.
            max_waiting: the largest number of requests that wait for a row; None: any number.
            tokenizer: the tokenizer, if ``target`` is a target alone and prompts are text.
            widths: numbers of rows to compile for; the largest is ``rows``. A call computes the
                smallest one that holds the running rows. The default is powers of two on a CPU,
                where fewer rows take less time, and ``rows`` alone otherwise.
            max_logprobs: the largest number of top log-probabilities per token that a request may
                ask for. With 0 the programs that report log-probabilities are not compiled, and no
                request may ask for any.
            max_prediction: the largest number of tokens of a prediction that are copied per step.
                With 0 no request may bring a prediction.
            clients: the shapes of drafts that clients may send, for `open_row`; None: there are no
                clients.
            grammars: whether requests may have grammars and thinking budgets. Then a few more
                programs are compiled, and the engine needs a tokenizer.
            penalties: whether requests may have penalties, biases and banned words. Then a few more
                programs are compiled, and every row takes eight bytes for each token of the
                vocabulary. None: only if the checkpoint's own parameters have a penalty.
            thought_tokens: the two texts that begin and end a thought, for requests with a thinking
                budget, such as ``("<think>", "</think>")``; None: the tokenizer states them.
            earlier_answers: the number of tokens of earlier answers that are kept for each tenant,
                from which its later texts draft. The drafter must be a `specjax.Suffix` or a
                `specjax.TokenRecycling`, or have one as a part. Each row takes eight bytes for each
                of these tokens. With 0 a text drafts from itself, and from the drafter's own index.
            client_rows: the largest number of rows for the clients of one owner; None: half of
                ``rows``, at least 1.
            client_idle_seconds: seconds without a draft after which a client's row may be given to
                a waiting request. The client gets a row again when it sends its next draft.
            urgent_after: the number of decode calls after which a waiting request goes before all
                priorities.
            reread: whether texts that have ended are read once more while the engine has nothing
                else to do, so that the next turn of a chat shares their prefix. No text depends on
                it.
            warm: whether to compile and time everything before this returns. Otherwise this returns
                as soon as a plain request in one row can be answered, and the rest is compiled in
                the background. Texts are the same; more rows and drafts are used as their programs
                become ready, and requests that need other programs wait for them. An engine on a
                mesh that spans processes is always warm.

        Raises:
            InputError: An argument cannot be used. The message names it, its value and a remedy.
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
            grammars=grammars,
            penalties=penalties,
            thought_tokens=thought_tokens,
            earlier_answers=earlier_answers,
        )
        client_rows = max(1, rows // 2) if client_rows is None else client_rows
        if not 1 <= client_rows <= rows:
            raise InputError(f"client_rows={client_rows}: must be from 1 to rows={rows}")
        if not 0 <= client_idle_seconds < math.inf:
            raise InputError(
                f"client_idle_seconds={client_idle_seconds}: must be at least 0, and finite"
            )
        if not is_whole(urgent_after) or urgent_after < 1:
            raise InputError(f"urgent_after={urgent_after!r}: must be a whole number, at least 1")
        if not isinstance(reread, bool):
            raise InputError(f"reread={reread!r}: must be True or False")
        together = config.together()
        if together is not None and not together.is_first:
            raise InputError(
                f"this is process {together.number}, but process 0 has the engine; call"
                " specjax.serving.follow"
            )
        sizes = config.sizes
        self._config, self.target, self.tokenizer = config, config.target, config.tokenizer
        self._region_marks = region_marks(config.tokenizer, config.thought_texts)
        self.default_sampling = config.default_sampling
        self.page = sizes.page
        self.chunk = sizes.chunk
        self.capacity = sizes.capacity
        self.widths = sizes.widths
        self.rows, self.steps = rows, steps
        self.max_logprobs, self.max_prediction = max_logprobs, max_prediction
        device = config.device(together)
        scheduler = Scheduler(
            rows=rows,
            pages=sizes.pages,
            page=self.page,
            chunk=self.chunk,
            capacity=self.capacity,
            last_widths=sizes.read_widths[:1],
            shards=groups_of(config.target.mesh),
            max_waiting=max_waiting,
            prefix_states=device.most_prefix_states(),
            client_rows=client_rows,
            idle_seconds=client_idle_seconds,
            urgent_after=urgent_after,
            reread=reread,
        )
        self._loop = EngineLoop(config, device, scheduler, together, warm=warm)
        # A thread that still uses the device would crash the interpreter at its exit.
        atexit.register(self.close)

    # --- the public methods -----------------------------------------------------------------------

    def submit(
        self,
        prompt: str | text.Messages | Sequence[int],
        params: SamplingParams | None = None,
        *,
        choice: int = 0,
        key: jax.Array | None = None,
        stop: str | Sequence[str] = (),
        prediction: str | Sequence[int] | None = None,
        speculation: str | int | DraftShape | None = None,
        logprobs: int | None = None,
        echo: bool = False,
        spans: bool = False,
        tenant: str = "",
        cache_salt: str = "",
        store: bool = True,
        priority: int = 0,
        is_chat: bool | None = None,
        special_texts: Mapping[int, str] | None = None,
        with_stop: bool = False,
        compiled_grammar: CompiledGrammar | None = None,
        chat_template_kwargs: Settings | None = None,
        **stated: Any,
    ) -> Handle:
        """Submit a request, and return its handle at once.

        Args:
            prompt: text, a chat, or token ids ``[P]``.
            params: the sampling parameters, complete: no default replaces a field.
                ``max_new_tokens`` may be 0 with ``echo``, and ``eos_token_ids`` has at most 8 ids.
                Equal requests with equal seeds have equal texts, whatever else is running.
            choice: the index of this text among several of one request. Texts with one seed and
                different indices are independent.
            key: the text's own random key in place of seed and choice, as in ``key [B]`` of
                `specjax.generate`.
            stop: stop strings. The text ends before the first of them.
            prediction: the expected text, as a string or token ids. Its tokens are drafted as long
                as they match. It changes the time of the request, not its text.
            speculation: how far the request speculates: "off" for no drafts, a whole number for the
                largest depth of a draft, one of the engine's drafts by its name or shape, or "auto"
                for no limit. A text does not depend on it. If all running requests are off, the
                engine decodes plainly, provided that its ``drafts`` include None. A call has one
                draft: if requests name several, it is the fastest of them, cut to the depth of the
                one that a request names. None: that of the generator, otherwise "auto".
            logprobs: the number of top log-probabilities to report with each token's own, in
                `Piece.logprobs`; None: no log-probabilities.
            echo: whether to report the log-probabilities of the prompt, too, in the handle's
                ``prompt_logprobs``. The whole prompt is then computed, without prefix caching.
            spans: whether to report `Piece.spans`.
            tenant: the name of the tenant that asks, such as a hash of its API key. Only requests
                of the same tenant share prefixes, so that others cannot detect the prompt by time
                or by `Handle.cached_tokens`.
            cache_salt: a string that divides a tenant further: only requests of the same tenant
                and the same salt share prefixes.
            store: whether the text may draft from earlier answers of the same tenant and salt, and
                later texts from this one; see ``earlier_answers`` of the engine. A text does not
                depend on it.
            priority: a number; requests with lower numbers get rows first, and are preempted last.
                A text does not depend on it.
            is_chat: whether the text answers a chat. Of a model that writes in channels, such as
                gpt-oss, it is then the final channel alone. None: it does if the prompt is a chat.
            special_texts: the special tokens that stay in the text, and in which stop strings are
                searched: their texts by id, such as `specjax.chat.tag_tokens` returns them. The
                text of a chat then has all channels. None: no special token has text.
            with_stop: whether the text ends behind its stop string, not before it.
            compiled_grammar: what `compile_grammar` has returned for the grammar of the parameters,
                so that it is not compiled again if it was forgotten meanwhile. None: it is looked
                up, or compiled here.
            chat_template_kwargs: variables for the template of this chat. They override those of
                the tokenizer (`specjax.load`).
            stated: fields of `SamplingParams` by name, such as ``temperature=0.7``, in place of
                ``params`` or to override them. Without ``params``, the distribution's fields that
                are left out are those of ``default_sampling``, or greedy if there is none.

        Raises:
            InputError: An argument cannot be used. The message names it, its value and a remedy.
            QueueFullError: Too many requests wait.
            EngineError: The engine has failed. The cause is the error that it failed with.
        """
        params = SamplingParams.of(
            params, stated, defaults=self.default_sampling, function=self.submit
        )
        if isinstance(prompt, jax.Array):
            prompt = np.asarray(prompt).tolist()
        if not isinstance(prompt, Sequence | np.ndarray):
            raise InputError(f"prompt={prompt!r}: give text, a chat, or token ids")
        if self.tokenizer is None and (stop or not _is_tokens(prompt)):
            raise InputError(
                "prompt: an engine without a tokenizer takes token ids, and no stop strings; give"
                " tokenizer=..."
            )
        self._check_output_options(params, logprobs, echo, spans)
        tokens = self.encode(prompt, chat_template_kwargs)
        predicted_tokens = self.encode_prediction(prediction)
        # With max_new_tokens=0 the row is freed after its prefill, and the one token is never
        # sampled.
        row_params = params if params.max_new_tokens else replace(params, max_new_tokens=1)
        speculates = self._config.speculation(speculation)
        settings = self._config.settings(
            row_params,
            len(tokens),
            choice=choice,
            key=key,
            expected=predicted_tokens,
            draft_limit=speculates.depth,
        )
        stop = text.check_stop(stop)
        growing = None
        if self.tokenizer is not None:
            if is_chat is None:
                is_chat = not isinstance(prompt, str) and not _is_tokens(prompt)
            growing = text.GrowingText(
                self.tokenizer,
                tokens,
                stop,
                params.min_new_tokens,
                is_chat=is_chat,
                tags=special_texts,
                with_stop=with_stop,
            )
        matcher = None
        if params.grammar is not None:
            matcher = self._matcher(params.grammar, compiled_grammar, settings)
        if params.thinking_budget is not None:
            matcher = self._budget_matcher(params, tokens, settings, matcher)
        options = OutputOptions(
            logprobs=logprobs,
            echo=echo,
            spans=spans,
            prediction=len(predicted_tokens),
            speculation=speculates,
            matcher=matcher,
            biases=self._biases(params),
            store=store,
            regions=RegionReader(self._region_marks, tokens),
        )
        if not is_whole(priority) or not -(2**31) <= priority < 2**31:
            raise InputError(f"priority={priority!r}: must be a whole number of 32 bits")
        return self._loop.submit(
            tokens,
            params.max_new_tokens,
            settings,
            growing,
            options,
            tenant=Tenant(tenant, cache_salt),
            priority=int(priority),
        )

    def open_row(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt_length: int | None = None,
        known: int = 0,
        listener: Listener,
        owner: str = "",
        tenant: str = "",
        compiled_grammar: CompiledGrammar | None = None,
        **stated: Any,
    ) -> ClientRow:
        """Request a row for a client that drafts elsewhere, and return its handle at once.

        The client's text equals the one of `submit` for the same prompt, parameters and seed,
        whatever the client drafts. ``default_sampling`` is not used: a client states its
        parameters.

        The client keeps the row until its text ends, or the row is closed or dropped. Where other
        requests need rows or pages, rows are taken first from clients that are disconnected
        (`ClientRow.is_away`), then from clients that could draft and have not done so for
        ``client_idle_seconds``. The client is not informed. When it drafts next, it waits for a
        row, its text is prefilled again, and the verdict is the same. While clients that draft hold
        all rows, other requests wait: close rows that are not used.

        Args:
            tokens: ``[n]`` token ids of the prompt, and of the output so far.
            params: the sampling parameters. ``max_new_tokens`` counts all tokens after the prompt,
                the output so far included.
            prompt_length: the number of tokens of the prompt; None: all of ``tokens``.
            known: the number of tokens, from the first one on, that have been sent to the client.
            listener: a function that the engine's thread calls with each
                `specjax.serving.clients.RowEvent`. It must return quickly.
            owner: the client's owner. The clients of one owner have at most ``client_rows`` rows at
                a time, and further ones wait. Rows with an empty owner are not counted.
            tenant: the name of the tenant, as in `submit`.
            compiled_grammar: as for `submit`.
            stated: fields of `SamplingParams` by name, in place of ``params`` or to override them.

        Raises:
            InputError: An argument cannot be used. The message names it, its value and a remedy.
            QueueFullError: Too many requests wait.
            EngineError: The engine has failed. The cause is the error that it failed with.
        """
        if self._loop.device.clients is None:
            raise InputError(
                "open_row: this engine has no programs for drafts of clients; give"
                " Engine(clients=ClientDrafts())"
            )
        tokens = self.encode(tokens)
        length = len(tokens) if prompt_length is None else prompt_length
        params = SamplingParams.of(params, stated, function=self.open_row)
        if params.has_adjustments:
            raise InputError(
                f"{params.first_adjustment}: not supported for clients that draft; leave it out"
            )
        if params.thinking_budget is not None:
            raise InputError(
                f"thinking_budget={params.thinking_budget}: not supported for clients that draft;"
                " leave it out"
            )
        settings, matcher = self._config.settings(params, length), None
        if params.grammar is not None:
            matcher = self._matcher(params.grammar, compiled_grammar, settings, tokens[length:])
        with self._loop.wake:
            self._loop.check_open()
            return self._loop.clients.open(
                tokens,
                length,
                params.max_new_tokens,
                known,
                settings,
                listener,
                owner=owner,
                tenant=Tenant(tenant),
                matcher=matcher,
            )

    @property
    def has_penalties(self) -> bool:
        """True if requests may have penalties, biases and banned words."""
        return self._config.penalties

    @property
    def has_grammars(self) -> bool:
        """True if requests may have grammars."""
        return self._config.grammars is not None

    @property
    def has_thoughts(self) -> bool:
        """True if requests may have a thinking budget: the tokens of thoughts are known."""
        try:
            return self._config.thought is not None
        except InputError:
            return False

    @property
    def client_drafts(self) -> ClientDrafts | None:
        """The shapes of drafts that clients may send; None: there are no clients."""
        return self._loop.device.clients

    def encode(
        self,
        prompt: str | text.Messages | Sequence[int],
        chat_template_kwargs: Settings | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt, in any form that `submit` takes.

        Args:
            prompt: text, a chat, or token ids.
            chat_template_kwargs: arguments of the chat template, as in `specjax.text.encode_chat`.

        Raises:
            InputError: The prompt cannot be used. The message says why.
        """
        if not _is_tokens(prompt):
            generator = pipeline.TextGenerator(self.target, self.tokenizer)
            return generator.encode(prompt, chat_template_kwargs=chat_template_kwargs)  # pyright: ignore[reportArgumentType]
        check_is_chat(False, "", chat_template_kwargs or {})
        tokens = [int(token) for token in prompt]  # pyright: ignore[reportArgumentType]
        check_prompts([tokens], None, self.target.config.vocab_size)
        return tokens

    def encode_prediction(self, prediction: str | Sequence[int] | None) -> list[int]:
        """Return the token ids of a prediction, cut to the capacity of a text.

        Raises:
            InputError: The prediction cannot be used. The message says why.
        """
        if prediction is None or len(prediction) == 0:
            return []
        if not self.max_prediction:
            raise InputError(
                "prediction: this engine copies no predictions; give Engine(max_prediction=16)"
            )
        if not isinstance(prediction, str):
            return self.encode(prediction)[: self.capacity]
        if self.tokenizer is None:
            raise InputError(
                "prediction: an engine without a tokenizer takes token ids; give tokenizer=..."
            )
        return text.encode_continuation(self.tokenizer, prediction)[: self.capacity]

    @property
    def statistics(self) -> EngineStatistics:
        """The engine's counters at this moment."""
        return self._loop.statistics()

    @property
    def state(self) -> Literal["running", "failed", "closed"]:
        """ "running" while requests are accepted, "failed" after an error, "closed" after `close`.

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
        """True while a program is compiled in the background. `close` does not wait for its end."""
        return self._loop.programs.is_compiling

    @property
    def error(self) -> BaseException | None:
        """The error that ended the engine's thread, or None.

        Examples:
            >>> from specjax.serving import Engine
            >>> with Engine(target, drafts=(None,), rows=2, widths=(2,), capacity=32) as engine:
            ...     print(engine.error)
            None
        """
        return self._loop.error

    def close(self) -> None:
        """End the thread, and cancel the unfinished texts."""
        self._loop.close()
        atexit.unregister(self.close)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def compiled_grammar(self, grammar: Grammar) -> CompiledGrammar | None:
        """Return what `compile_grammar` returns if it is there already, or None."""
        compiler = self._config.grammars
        return None if compiler is None else compiler.compiled(grammar, is_bounded=True)

    def compile_grammar(self, grammar: Grammar, *, megabytes: float = 0.0) -> CompiledGrammar:
        """Compile a grammar of a request now, so that `submit` finds it compiled.

        It is forgotten after a while, unless it is given to `submit` or `open_row`, too.

        Args:
            grammar: the grammar.
            megabytes: the memory that the compiled grammar takes, as
                `specjax.grammars.GrammarChecker.check` returns it.

        Raises:
            InputError: this engine has no grammars, or the grammar is wrong or has a part that is
                not supported.
        """
        if self._config.grammars is None:
            raise InputError("grammar: this engine has no grammars; give Engine(grammars=True)")
        return self._config.grammars.compile(grammar, is_bounded=True, megabytes=megabytes)

    def _matcher(
        self,
        grammar: Grammar,
        compiled: CompiledGrammar | None,
        settings: Mapping[str, Any],
        output: Sequence[int] | None = None,
    ) -> Matcher:
        """Return the matcher of a request.

        Args:
            grammar: the request's grammar.
            compiled: the compiled grammar; None: it is looked up, or compiled here.
            settings: the settings of the request's row.
            output: the tokens after the prompt that a client has already; None: there is no client.

        Raises:
            InputError: This engine has no grammars, or the grammar cannot be compiled, or the
                output cannot go on under it.
        """
        stop_ids = _stop_ids(settings)
        if compiled is None:
            compiled = self.compile_grammar(grammar)
        elif compiled.grammar != grammar:
            raise InputError(
                f"compiled_grammar={compiled.grammar!r}: the request has the grammar {grammar!r};"
                " give what compile_grammar returns for that"
            )
        matcher = compiled.matcher(stop_ids)
        if output is None:
            return matcher
        try:
            matcher.read(output)
        except RuntimeError as error:
            raise InputError(
                f"tokens: the {len(output)} tokens after the prompt do not satisfy the grammar:"
                f" {error}"
            ) from None
        # At the beginning of a text llguidance may learn by the first mask that it is over.
        if matcher.is_over or not matcher.mask().any():
            raise InputError(
                f"tokens: no token can follow the {len(output)} tokens after the prompt, because of"
                " the grammar or of a stop token"
            )
        return matcher

    def _budget_matcher(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        settings: Mapping[str, Any],
        inner: Matcher | None,
    ) -> Matcher:
        """Return the matcher of a request with a thinking budget, around that of its grammar.

        Raises:
            InputError: This engine supports no budgets, the tokens of thoughts are unknown, or the
                request bans the end of a thought.
        """
        assert params.thinking_budget is not None
        budget = ThinkingBudget(params.thinking_budget, self._config.thought)
        vocab_size = self.target.config.vocab_size
        if (biases := self._biases(params)) is not None:
            budget.check_can_end(biases.bias(vocab_size), biases.words)
        stop_ids = _stop_ids(settings)
        return budget.matcher(prompt, vocab_size, stop_ids, inner)

    def _biases(self, params: SamplingParams) -> TokenBiases | None:
        """Return the biases of a request, checked; None if it has neither these nor penalties.

        Raises:
            InputError: this engine has no penalties, a token does not exist, or there are too many
                banned words.
        """
        if not params.has_adjustments:
            return None
        if not self._config.penalties:
            raise InputError(
                f"{params.first_adjustment}: this engine has no penalties; give"
                " Engine(penalties=True)"
            )
        biases = params.biases
        if self.tokenizer is not None:
            biases = biases.encoded(self.tokenizer)
        biases.bias(self.target.config.vocab_size)
        words = biases.words
        if len(words) > MAX_WORDS:
            raise InputError(
                f"bad_words: {len(words)} words of several tokens; give at most {MAX_WORDS}"
            )
        longest = max(map(len, words), default=0)
        if longest > MAX_WORD_TOKENS:
            raise InputError(
                f"bad_words: a word has {longest} tokens; give words of at most {MAX_WORD_TOKENS}"
            )
        return biases

    def _check_output_options(
        self, params: SamplingParams, logprobs: int | None, echo: bool, spans: bool
    ) -> None:
        if logprobs is not None and not self.max_logprobs:
            raise InputError(
                "logprobs: this engine reports no log-probabilities; give Engine(max_logprobs=20)"
            )
        if logprobs is not None and not 0 <= logprobs <= self.max_logprobs:
            raise InputError(
                f"logprobs={logprobs}: must be from 0 to max_logprobs={self.max_logprobs}"
            )
        if echo and logprobs is None:
            raise InputError(
                "echo: it reports the log-probabilities of the prompt; give logprobs, too"
            )
        if spans and self.tokenizer is None:
            raise InputError(
                "spans: an engine without a tokenizer has no text to split; give tokenizer=..."
            )
        if params.max_new_tokens < 1 and not (echo and params.max_new_tokens == 0):
            raise InputError(
                f"max_new_tokens={params.max_new_tokens}: must be at least 1; with echo, 0 reads"
                " the prompt alone"
            )


_FIRST_PROCESS_ALONE = (
    "max_waiting",
    "client_rows",
    "client_idle_seconds",
    "urgent_after",
    "reread",
    "warm",
)
"""Arguments of `Engine` that `follow` ignores, because only the first process uses them."""


def follow(
    target: Target | pipeline.TextGenerator, drafter: Drafter | None = None, **options: Any
) -> None:
    """Serve the first process's `Engine` with this process's devices, until the engine is closed.

    Each process calls `specjax.processes.join` first. Then the first process makes the `Engine`,
    and all others call this function with the same arguments.

    Raises:
        InputError: An argument cannot be used, or this is the first process, or the only one.

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
    bound = inspect.signature(Engine).bind(target, drafter, **options)
    bound.apply_defaults()
    config = EngineConfig.of(
        **{
            name: value
            for name, value in bound.arguments.items()
            if name not in _FIRST_PROCESS_ALONE
        }
    )
    together = config.together()
    if together is None or together.is_first:
        raise InputError(
            "follow: only the processes after the first one of a mesh may call it; make an Engine"
            " here"
        )
    device = config.device(together)
    device.warm_up(config.placeholder_settings())
    over_hosts.repeat_calls(device, together)


def _is_tokens(prompt: Any) -> bool:
    return not isinstance(prompt, str) and all(
        isinstance(token, int | np.integer) for token in prompt
    )


def _stop_ids(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the stop tokens of a row's settings, without the filler."""
    return tuple(int(token) for token in settings["stop_token_ids"] if token >= 0)
