"""The service between the HTTP application and the engine: it encodes, submits and cancels."""

import asyncio
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from specjax.chat import ResponseForm, prompt_text, response_form, tag_tokens
from specjax.errors import InputError
from specjax.fill_in_the_middle import encode_gap, gap_end_ids
from specjax.grammars import CheckerBusyError, CompiledGrammar, Grammar, GrammarChecker
from specjax.grammars.checker import CONCURRENT
from specjax.sampling import SAMPLING_NAMES
from specjax.serving.engine import Engine
from specjax.serving.handle import Handle, TextCancelledError
from specjax.serving.http import requests
from specjax.serving.http.drafts import Drafts
from specjax.serving.http.errors import RequestError, invalid
from specjax.serving.http.metrics import Metrics
from specjax.serving.http.regions import AnswerRegions
from specjax.serving.http.requests import Limits, TextRequest
from specjax.serving.http.responses import draining_error
from specjax.serving.http.stored_responses import StoredResponses
from specjax.serving.http.tokens import TokenTexts
from specjax.serving.http.tools import rendered_tools
from specjax.serving.scheduler import QueueFullError
from specjax.templates import ChatEnd, Settings, names_read, takes_tools, thinking_switch
from specjax.text import encode_chat, encode_continuation, special_texts

MAX_REQUEST_LOGPROBS = 500_000
"""The largest number of log-probabilities of an answer, the top ones included: some 50 MB."""

IGNORED_HEADER = "X-Specjax-Ignored"
"""The response header with the first eight unknown parameters of the request."""

MAX_NAMES_LOGGED = 256
"""The number of unknown parameters that are logged, each once. Clients may invent any number."""

_CHECKING_THREADS = 32
"""The number of grammars that are compiled or wait. It is more than the checker takes.

Each has a thread. Grammars that are compiled already need none, and all requests that wait for one
grammar share one.
"""

_LOG = logging.getLogger(__name__)


_HEADER_NAME = re.compile("[A-Za-z0-9_.-]{1,64}")

Result = TypeVar("Result")


@dataclass(frozen=True)
class AppOptions:
    """The options of the HTTP application.

    Attributes:
        names: the names of the model. Answers have the first one.
        api_keys: the valid API keys. If there are any, a request without one gets only the page and
            ``/health``, and ``/ping``.
        only_loopback: whether to answer only requests whose Host header is a loopback name. On a
            server without keys this stops DNS rebinding: a web page that the user visits could
            otherwise reach the server under a name that resolves to this machine.
        max_texts: the largest number of unfinished texts, of one request and of all together.
        max_body: the largest size of a body in bytes.
        body_seconds: the seconds within which a body must arrive.
        with_acceptance: whether answers report the acceptance of drafts.
        cors_origins: the origins of web pages, such as ``https://chat.example``, whose scripts may
            send requests and read the answers; ``*``: all pages.
        client_sessions: the largest number of sessions of clients that draft, of one API key or,
            without keys, of one address; None: half of all.
        trusted_proxies: addresses or networks without a limit of sessions.
        share_prefixes: whether all API keys share prefixes. If not, each key is a tenant of its
            own.

    Examples:
        >>> from specjax.serving.http.service import AppOptions
        >>> AppOptions(names=("tiny",)).max_body
        4194304
    """

    names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    only_loopback: bool = False
    max_texts: int = requests.MAX_TEXTS
    max_body: int = 4 * 2**20
    body_seconds: float = 30.0
    with_acceptance: bool = False
    cors_origins: tuple[str, ...] = ()
    client_sessions: int | None = None
    trusted_proxies: tuple[str, ...] = ()
    share_prefixes: bool = False


class Service:
    """An engine, and the requests that it is answering.

    Attributes:
        engine: the engine.
        options: the options of the application.
        limits: the limits and defaults of the model.
        texts: the texts of single tokens.
        form: how the model writes the answers of chats; None: it is unknown.
        drafts: the clients that draft; None: the engine accepts no drafts of clients.
        metrics: the metrics for Prometheus.
        grammar_checker: the checker of requests' grammars; None: they are compiled at once.
        stored_responses: the stored responses of ``/v1/responses``.
        created: when the service was made, in seconds since 1970.
        is_draining: whether new requests are refused, because the server shuts down.
    """

    def __init__(
        self, engine: Engine, options: AppOptions, grammar_checker: GrammarChecker | None = None
    ) -> None:
        self.engine, self.options, self.grammar_checker = engine, options, grammar_checker
        config, tokenizer = engine.target.config, engine.tokenizer
        self.limits = Limits(
            names=options.names,
            vocab_size=config.vocab_size,
            max_logprobs=min(engine.max_logprobs, requests.MAX_LOGPROBS),
            max_prediction=engine.max_prediction,
            capacity=engine.capacity,
            has_chat=bool(tokenizer.chat_template),
            has_grammars=engine.has_grammars,
            has_penalties=engine.has_penalties,
            takes_tools=takes_tools(tokenizer),
            can_require_calls=False,
            template_names=names_read(tokenizer),
            thinking_switch=thinking_switch(tokenizer),
            has_thoughts=engine.has_thoughts,
            eos_token_ids=tuple(config.eos_token_ids),
            default_sampling=engine.default_sampling or Limits.default_sampling,
        )
        self.texts = TokenTexts(tokenizer)
        self.form = response_form(tokenizer) if self.limits.has_chat else None
        self._tags = None if self.form is None else tag_tokens(tokenizer, self.form)
        self._max_characters = engine.capacity * max(map(len, tokenizer.get_vocab()))
        self.drafts = None
        if engine.client_drafts is not None:
            self.drafts = Drafts(
                engine,
                options.client_sessions,
                options.trusted_proxies,
                self._compile_for_client,
                share_prefixes=options.share_prefixes,
            )
        self.metrics = Metrics(engine, options.names[0], self.drafts and self.drafts.statistics)
        self.stored_responses = StoredResponses()
        self.is_draining = False
        self.created = int(time.time())
        self._submissions: set[Submission] = set()
        self._threads = ThreadPoolExecutor(2, "specjax-requests")
        # Grammars that take long to compile do not keep other requests from being tokenized. The
        # checker bounds how many are compiled at a time, and how many wait.
        self._grammar_threads = ThreadPoolExecutor(_CHECKING_THREADS, "specjax-grammars")
        self._grammar_jobs: dict[Grammar, Future[CompiledGrammar]] = {}
        self._grammar_lock = threading.Lock()
        # One that was checked before is compiled here at once, which takes as much as the check.
        self._grammar_slots = threading.Semaphore(CONCURRENT)
        self._logged_names: set[str] = set()
        self._places_lock = threading.Lock()

    async def in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Call ``work`` in one of two threads, because tokenizing a long text takes seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def compile_grammar(self, request: TextRequest) -> CompiledGrammar | None:
        """Compile the grammar of a request, if it has one.

        Raises:
            RequestError: the grammar is wrong, or has a part that is not supported.
        """
        grammar, name = request.params.grammar, request.grammar_name
        if grammar is None:
            return None
        try:
            return await asyncio.wrap_future(self._compiled(grammar))
        except CheckerBusyError as error:
            message, headers = f"{name}: {error}", {"Retry-After": "1"}
            raise RequestError(429, message, code="queue_full", headers=headers) from None
        except InputError as error:
            message = str(error).removeprefix(f"grammar={grammar!r}: ")
            raise invalid(name, f"{name}: {message}") from None

    def _compiled(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Return the future in which a grammar is compiled, the same for all that wait for it.

        Its errors are an InputError if the grammar is wrong or exceeds a bound, and a
        CheckerBusyError if too many grammars wait.
        """
        with self._grammar_lock:
            if (running := self._grammar_jobs.get(grammar)) is not None:
                return running
            future: Future[CompiledGrammar] = Future()
            future.set_running_or_notify_cancel()  # nobody can cancel it for the others
            if (compiled := self.engine.compiled_grammar(grammar)) is not None:
                future.set_result(compiled)
                return future
            if len(self._grammar_jobs) >= _CHECKING_THREADS:
                busy = f"{len(self._grammar_jobs)} grammars are being compiled; try again later"
                future.set_exception(CheckerBusyError(busy))
                return future
            self._grammar_jobs[grammar] = future
        try:
            self._grammar_threads.submit(self._compile, grammar, future)
        except RuntimeError as error:  # there is no thread for it
            with self._grammar_lock:
                del self._grammar_jobs[grammar]
            future.set_exception(error)
        return future

    def _compile(self, grammar: Grammar, future: "Future[CompiledGrammar]") -> None:
        """Check and compile a grammar. It blocks its thread."""
        compiled, refusal = None, None
        try:
            checker = self.grammar_checker
            megabytes = 0.0 if checker is None else checker.check(grammar)
            with self._grammar_slots:
                compiled = self.engine.compile_grammar(grammar, megabytes=megabytes)
        except BaseException as error:
            refusal = error
        with self._grammar_lock:
            del self._grammar_jobs[grammar]
        if compiled is not None:
            future.set_result(compiled)
        else:
            future.set_exception(refusal)

    def _compile_for_client(
        self, grammar: Grammar, go_on: Callable[[CompiledGrammar | InputError], None]
    ) -> None:
        """Compile a grammar as `specjax.serving.sessions.CompileGrammar` describes."""

        def pass_on(future: "Future[CompiledGrammar]") -> None:
            try:
                go_on(future.result())
            except CheckerBusyError as busy:
                go_on(QueueFullError(f"grammar: {busy}"))
            except InputError as refusal:
                go_on(refusal)
            except Exception:
                _LOG.exception("a client's grammar failed; the others continue")
                go_on(InputError("grammar: it failed in the server; see its log"))

        self._compiled(grammar).add_done_callback(pass_on)

    def ignored_header(self, names: Sequence[str]) -> dict[str, str]:
        """Return the header that names the unknown parameters of a request, and log new ones."""
        for name in names:
            if name not in self._logged_names and len(self._logged_names) < MAX_NAMES_LOGGED:
                self._logged_names.add(name)
                _LOG.warning("a request has the unknown parameter %.80r, which is ignored", name)
        reported = [name for name in names if _HEADER_NAME.fullmatch(name)][:8]
        return {IGNORED_HEADER: ", ".join(reported)} if reported else {}

    @property
    def is_busy(self) -> bool:
        """True while a request is answered, or a connected client has an unfinished text."""
        return bool(self._submissions) or (self.drafts is not None and self.drafts.sessions.is_busy)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.is_draining = True
        if self.drafts is not None:
            self.drafts.sessions.is_draining = True

    def cancel_all(self) -> None:
        """Cancel the texts of all requests, and end all sessions."""
        for submission in list(self._submissions):
            submission.cancel()
        if self.drafts is not None:
            self.drafts.sessions.close()

    def begin(self) -> "Submission":
        """Begin a request.

        Raises:
            RequestError: The server is shutting down.
        """
        if self.is_draining:
            raise draining_error()
        submission = Submission()
        self._submissions.add(submission)
        return submission

    def end(self, submission: "Submission") -> None:
        """End a request, and cancel its unfinished texts."""
        submission.cancel()
        self._submissions.discard(submission)

    def submit(
        self,
        request: TextRequest,
        submission: "Submission",
        owner: str,
        grammar: CompiledGrammar | None = None,
    ) -> list[list[int]]:
        """Submit all texts of a request to the engine, and return the token ids of its prompts.

        It takes milliseconds or more, and must run in a thread.

        Args:
            request: the request.
            submission: gets the handles of the texts.
            owner: the hash of the request's API key; empty: the server has no keys.
            grammar: the result of `compile_grammar`.

        Raises:
            RequestError: The request is invalid, or there is no room for all of its texts.
            TextCancelledError: The client has disconnected.
        """
        name, count = "messages" if request.is_chat else "prompt", request.n * len(request.prompts)
        if count > self.options.max_texts:
            message = (
                f"n={request.n}: it makes {count} texts; this server accepts at most"
                f" {self.options.max_texts}"
            )
            raise invalid("n", message)
        self._reserve_places(submission, count)
        prompts = []
        for prompt in request.prompts:
            submission.check()
            prompts.append(
                self.encode(
                    prompt,
                    name,
                    request.add_special_tokens,
                    request.chat_template_kwargs,
                    request.chat_end,
                    request.suffix,
                    request.tools,
                )
            )
        max_new_tokens = [self._max_new_tokens(request, len(tokens), name) for tokens in prompts]
        _check_logprobs(request, prompts, max_new_tokens)
        prediction = request.prediction and request.prediction[: self._max_characters]
        if prediction is not None:
            with _as_answers("prediction"):
                # Encode it here once, not for each text.
                prediction = self.engine.encode_prediction(prediction)
        options = {
            "stop": request.stop,
            "logprobs": request.top_count,
            "echo": request.scores_prompt,
            "prediction": prediction,
            "spans": request.include_accepted,
            "tenant": "" if self.options.share_prefixes else owner,
            "cache_salt": request.cache_salt,
            "priority": request.priority,
            "is_chat": request.is_chat,
            "special_texts": self._special_texts(request),
            "with_stop": request.include_stop,
            "compiled_grammar": grammar,
        }
        for tokens, count in zip(prompts, max_new_tokens, strict=True):
            seed = secrets.randbits(63) if request.seed is None else request.seed
            with _as_answers(name):
                params = replace(
                    request.params,
                    max_new_tokens=count,
                    seed=seed,
                    eos_token_ids=self._stop_token_ids(request),
                )
                for choice in range(request.n):
                    submission.add(self.engine.submit(tokens, params, choice=choice, **options))
        return prompts

    def regions(
        self, request: TextRequest, prompts: Sequence[Sequence[int]]
    ) -> list[AnswerRegions]:
        """Return the regions of each text of a request, before its first token.

        It decodes the prompt of a chat, which takes milliseconds, and so must run in a thread.

        Args:
            request: the request.
            prompts: the token ids of its prompts.
        """
        form = self._form_of(request)
        has_begun = form is not None and request.chat_end != "messages"
        begins = [prompt_text(self.engine.tokenizer, it) if has_begun else "" for it in prompts]
        return [
            AnswerRegions(
                form,
                begin,
                request.tools,
                with_calls=request.tool_choice.mode != "none",
                with_reasoning=request.include_reasoning,
            )
            for begin in begins
            for _ in range(request.n)
        ]

    def _form_of(self, request: TextRequest) -> ResponseForm | None:
        """Return the form in which an answer is read; None: all of its text is content.

        A grammar holds from the first token on, also where the prompt has begun a thought. So the
        text that it allows is content, and not reasoning.
        """
        return self.form if request.is_chat and request.params.grammar is None else None

    def _special_texts(self, request: TextRequest) -> dict[int, str] | None:
        """Return the special tokens that are text in the answer to a request; None: there are none.

        These are the tags of the model's form, from which its answer is read, and all of them if
        the request wants so. The stop token at the end of a text is left out, unless the request
        wants what it stops at.
        """
        tags = None if self._form_of(request) is None else self._tags
        if request.skip_special_tokens:
            return tags
        stated = self._stop_token_ids(request)
        stops = self.limits.eos_token_ids if stated is None else stated
        texts = special_texts(self.engine.tokenizer)
        if not request.include_stop:
            texts = {token: text for token, text in texts.items() if token not in stops}
        return texts | (tags or {})

    def _stop_token_ids(self, request: TextRequest) -> tuple[int, ...] | None:
        """Return the stop tokens of a request; with a suffix also those that end a middle."""
        stated = request.params.eos_token_ids
        if not request.suffix or stated == ():
            return stated
        ids = self.limits.eos_token_ids if stated is None else stated
        ends = gap_end_ids(self.engine.tokenizer)
        return tuple(dict.fromkeys((*ids, *ends)))[: requests.MAX_STOP_TOKENS]

    def _reserve_places(self, submission: "Submission", count: int) -> None:
        """Reserve a row or a place in the queue for each text of a request, until the text ends.

        Rows of clients that draft are not counted here. If they use the last ones, the engine
        refuses a text.

        Raises:
            RequestError: There are not enough places for all texts of the request.
        """
        with self._places_lock:
            in_use = sum(other_submission.places for other_submission in list(self._submissions))
            if in_use + count > self.options.max_texts:
                message = (
                    f"too many requests: {in_use} of {self.options.max_texts} texts run or wait;"
                    " try again later"
                )
                raise RequestError(429, message, code="queue_full", headers={"Retry-After": "1"})
            submission.reserved = count

    def encode(
        self,
        prompt: Any,
        name: str,
        add_special_tokens: bool = True,
        chat_template_kwargs: Settings | None = None,
        chat_end: ChatEnd = "answer",
        suffix: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the token ids of a prompt.

        A tokenizer needs a hundred times the memory of its text. So a text is refused first if it
        is too long for the engine whatever its tokens are.

        Args:
            prompt: text, a chat, or token ids.
            name: the parameter to name in errors.
            add_special_tokens: whether to begin a text with the tokenizer's special tokens.
            chat_template_kwargs: the arguments of the chat template beside the messages.
            chat_end: where the text of a chat ends.
            suffix: the text after the gap that the model fills; empty: there is no gap.
            tools: the tools that a chat may call.

        Raises:
            RequestError: The prompt is invalid or too long.
        """
        is_text = isinstance(prompt, str) or isinstance(prompt[0], Mapping)
        length = 0
        if is_text:
            parts = (prompt, [chat_template_kwargs or {}], suffix, list(tools))
            length = sum(map(_characters, parts))
        if length > self._max_characters:
            names = f"{name} and suffix" if suffix else name
            message = (
                f"{names}: {length} characters make more than {self.engine.capacity} tokens, the"
                " longest text; shorten it"
            )
            raise invalid(name, message, code="context_length_exceeded")
        if suffix:
            with _as_answers("suffix"):
                tokens = encode_gap(self.engine.tokenizer, prompt, suffix, add_special_tokens)
                return self.engine.encode(tokens)
        with _as_answers(name):
            if (tools or chat_end != "answer") and not isinstance(prompt, str):
                tokens = encode_chat(
                    self.engine.tokenizer,
                    prompt,
                    chat_template_kwargs,
                    end=chat_end,
                    tools=rendered_tools(tools),
                )
                return self.engine.encode(tokens)
            if isinstance(prompt, str) and not add_special_tokens:
                tokens = encode_continuation(self.engine.tokenizer, prompt)
                return self.engine.encode(tokens)
            return self.engine.encode(prompt, chat_template_kwargs)

    def _max_new_tokens(self, request: TextRequest, length: int, name: str) -> int:
        """Return the limit of tokens after ``length`` tokens: the request's, or the room left.

        Raises:
            RequestError: There is no room for the fewest tokens of the request.
        """
        room, minimum = self.engine.capacity - length, 0 if request.max_tokens == 0 else 1
        if room < minimum:
            message = (
                f"{name}: {length} tokens, and at least {minimum} to generate, exceed the longest"
                f" text, {self.engine.capacity} tokens; shorten it"
            )
            raise invalid(name, message, code="context_length_exceeded")
        count = room if request.max_tokens is None else min(request.max_tokens, room)
        if request.params.min_new_tokens > count:
            message = (
                f"min_tokens={request.params.min_new_tokens}: there is room for {count}; give fewer"
            )
            raise invalid("min_tokens", message)
        return count


def _characters(prompt: Any) -> int:
    """Return the number of characters of a text, or of all strings in the messages of a chat.

    The chat template may use any of these strings.
    """
    if isinstance(prompt, str):
        remaining = [prompt]
    else:
        remaining = [value for message in prompt for value in message.values()]
    count = 0
    while remaining:
        value = remaining.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, Mapping):
            remaining += [*value, *value.values()]
        elif isinstance(value, list):
            remaining += value
    return count


def _check_logprobs(
    request: TextRequest, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]
) -> None:
    """Raise RequestError for so many log-probabilities that an answer would be too large.

    Args:
        request: the request.
        prompts: the token ids of each prompt.
        max_new_tokens: the limit of tokens of each prompt's texts.
    """
    if (count := request.top_count) is None:
        return
    name = "logprobs" if count == request.logprobs else "prompt_logprobs"
    read = sum(map(len, prompts)) if request.scores_prompt else 0
    tokens = (read + sum(max_new_tokens)) * request.n
    if tokens * (count + 1) > MAX_REQUEST_LOGPROBS:
        message = (
            f"{name}: {count} for each of {tokens} tokens, but a request may have"
            f" {MAX_REQUEST_LOGPROBS} in all; give a smaller number, fewer tokens, or fewer prompts"
            " at a time"
        )
        raise invalid(name, message, code="too_many_logprobs")


class Submission:
    """The texts of one request. All methods are thread-safe.

    Attributes:
        handles: the handles of the texts that were submitted so far.
        reserved: the number of texts that will be submitted in all.
    """

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.reserved = 0
        # A thread submits texts while the event loop may cancel all of them: under the lock, each
        # handle is cancelled by either `cancel` or `add`.
        self._lock = threading.Lock()
        self._is_over = False

    def add(self, handle: Handle) -> None:
        """Add a text, or cancel it if the request has ended.

        Raises:
            TextCancelledError: The request has ended.
        """
        with self._lock:
            self.handles.append(handle)
            is_over = self._is_over
        if is_over:
            handle.cancel()
            raise TextCancelledError("the request has ended")

    @property
    def places(self) -> int:
        """The number of texts that run, wait, or will be submitted."""
        return self.reserved - sum(
            handle.finish_reason is not None for handle in list(self.handles)
        )

    def check(self) -> None:
        """Raise TextCancelledError if the request has ended."""
        if self._is_over:
            raise TextCancelledError("the request has ended")

    def cancel(self) -> None:
        """End the request, and cancel all of its texts."""
        with self._lock:
            self._is_over = True
            handles = list(self.handles)
        for handle in handles:
            handle.cancel()


@contextmanager
def _as_answers(name: str) -> Iterator[None]:
    """Turn the engine's errors into RequestErrors. ``name`` is the parameter if they name none."""
    try:
        yield
    except QueueFullError as error:
        raise RequestError(
            429, f"too many requests: {error}", code="queue_full", headers={"Retry-After": "1"}
        ) from None
    except InputError as error:
        param = _PARAM.match(str(error))
        raise invalid(param[0] if param else name, str(error)) from None


_PARAM = re.compile(
    rf"({'|'.join(SAMPLING_NAMES)}|seed|stop|logprobs|prediction|chat_template_kwargs"
    r"|thinking_budget)\b"
)
