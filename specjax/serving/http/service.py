"""The service between the HTTP application and the engine: it encodes, submits and cancels."""

import asyncio
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from specjax.chat import AnswerSyntax, answer_syntax, prompt_text, response_form, tag_tokens
from specjax.chat.call_ids import with_ids_of_length
from specjax.errors import InputError
from specjax.fill_in_the_middle import encode_gap, gap_end_ids
from specjax.grammars import CompiledGrammar, GrammarChecker
from specjax.sampling import SAMPLING_NAMES
from specjax.serving.engine import Engine
from specjax.serving.handle import Handle, TextCancelledError
from specjax.serving.http import requests
from specjax.serving.http.answer_grammars import AnswerGrammars
from specjax.serving.http.drafts import Drafts
from specjax.serving.http.errors import RequestError, invalid
from specjax.serving.http.grammar_jobs import GrammarJobs
from specjax.serving.http.metrics import Metrics
from specjax.serving.http.regions import AnswerRegions
from specjax.serving.http.requests import Limits, TextRequest
from specjax.serving.http.responses import draining_error
from specjax.serving.http.stored_responses import StoredResponses
from specjax.serving.http.tokens import TokenTexts
from specjax.serving.http.tools import rendered_tools
from specjax.serving.scheduler import QueueFullError
from specjax.templates import ChatEnd, Settings, names_read, takes_tools, thinking_switch
from specjax.text import count_tokens, encode_chat, encode_continuation, special_texts

MAX_REQUEST_LOGPROBS = 500_000
"""The largest number of log-probabilities of an answer, the top ones included: some 50 MB."""

IGNORED_HEADER = "X-Specjax-Ignored"
"""The response header with the first eight unknown parameters of the request."""

MAX_NAMES_LOGGED = 256
"""The number of unknown parameters that are logged, each once. Clients may invent any number."""

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
        grammar_jobs: the grammars that are being compiled.
        answer_grammars: the grammars of requests.
        stored_responses: the stored responses of ``/v1/responses``.
        created: when the service was made, in seconds since 1970.
        is_draining: whether new requests are refused, because the server shuts down.
    """

    def __init__(
        self, engine: Engine, options: AppOptions, grammar_checker: GrammarChecker | None = None
    ) -> None:
        self.engine, self.options = engine, options
        config, tokenizer = engine.target.config, engine.tokenizer
        syntax = answer_syntax(tokenizer) if tokenizer.chat_template else AnswerSyntax()
        self._call_id_length = syntax.call_id_length
        self.grammar_jobs = GrammarJobs(engine, grammar_checker)
        self.answer_grammars = AnswerGrammars(
            self.grammar_jobs, syntax, tokenizer.chat_template, has_grammars=engine.has_grammars
        )
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
            can_require_calls=self.answer_grammars.can_require_calls,
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
                self.grammar_jobs.compile_for_client,
                share_prefixes=options.share_prefixes,
            )
        self.metrics = Metrics(engine, options.names[0], self.drafts and self.drafts.statistics)
        self.stored_responses = StoredResponses()
        self.is_draining = False
        self.created = int(time.time())
        self._submissions: set[Submission] = set()
        self._threads = ThreadPoolExecutor(2, "specjax-requests")
        self._logged_names: set[str] = set()
        self._places_lock = threading.Lock()

    async def in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Call ``work`` in one of two threads, because tokenizing a long text takes seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

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

    def prepare(
        self, request: TextRequest, submission: "Submission"
    ) -> tuple[list[list[int]], list[AnswerRegions]]:
        """Reserve places for all texts of a request, and read its prompts.

        It takes milliseconds or more, and must run in a thread.

        Args:
            request: the request.
            submission: the texts of the request.

        Returns:
            The token ids of the prompts, and the regions of each text, before its first token.

        Raises:
            RequestError: The request is invalid, or there is no room for all of its texts.
            TextCancelledError: The client has disconnected.
        """
        name, count = _prompt_name(request), request.n * len(request.prompts)
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
        return prompts, self.regions(request, prompts)

    async def compile_grammar(
        self, request: TextRequest, regions: Sequence[AnswerRegions]
    ) -> CompiledGrammar | None:
        """Compile the grammar of a request: its own, or that of its calls of tools.

        Args:
            request: the request.
            regions: the regions of its texts.

        Raises:
            RequestError: the grammar is wrong, or has a part that is not supported.
        """
        if not self.answer_grammars.is_needed(request):
            return None
        begin = ""
        if request.is_chat and self.form is not None:
            begin = await self.in_thread(self.form.after_anchor, regions[0].prompt)
        return await self.answer_grammars.compile(request, begin)

    def submit(
        self,
        request: TextRequest,
        submission: "Submission",
        owner: str,
        prompts: Sequence[list[int]],
        compiled: CompiledGrammar | None = None,
    ) -> None:
        """Submit all texts of a request to the engine.

        It takes milliseconds or more, and must run in a thread.

        Args:
            request: the request.
            submission: gets the handles of the texts.
            owner: the hash of the request's API key; empty: the server has no keys.
            prompts: the token ids of its prompts.
            compiled: the result of `compile_grammar`.

        Raises:
            RequestError: The request is invalid.
            TextCancelledError: The client has disconnected.
        """
        name = _prompt_name(request)
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
            "speculation": request.speculation,
            "spans": request.include_accepted,
            "tenant": "" if self.options.share_prefixes else owner,
            "cache_salt": request.cache_salt,
            "store": request.store,
            "priority": request.priority,
            "is_chat": request.is_chat,
            "special_texts": self._special_texts(request),
            "with_stop": request.include_stop,
            "compiled_grammar": compiled,
        }
        for tokens, count in zip(prompts, max_new_tokens, strict=True):
            seed = secrets.randbits(63) if request.seed is None else request.seed
            with _as_answers(name):
                params = replace(
                    request.params,
                    max_new_tokens=count,
                    seed=seed,
                    eos_token_ids=self._stop_token_ids(request),
                    grammar=None if compiled is None else compiled.grammar,
                )
                for choice in range(request.n):
                    submission.add(self.engine.submit(tokens, params, choice=choice, **options))

    def regions(
        self, request: TextRequest, prompts: Sequence[Sequence[int]]
    ) -> list[AnswerRegions]:
        """Return the regions of each text of a request, before its first token.

        It decodes the prompt of a chat, which takes milliseconds, and so must run in a thread.

        Args:
            request: the request.
            prompts: the token ids of its prompts.
        """
        form = self.form if request.is_chat else None
        has_begun = form is not None and request.chat_end != "messages"
        begins = [prompt_text(self.engine.tokenizer, it) if has_begun else "" for it in prompts]
        return [
            AnswerRegions(
                form,
                begin,
                request.tools,
                with_calls=request.tool_choice.mode != "none",
                whole_calls=not self.answer_grammars.has_calls(request),
                content_is_last=request.params.grammar is not None,
                with_reasoning=request.include_reasoning,
                id_length=self._call_id_length,
                with_content=request.tool_choice.mode != "required",
                count_tokens=self._count_tokens,
            )
            for begin in begins
            for _ in range(request.n)
        ]

    def _count_tokens(self, text: str) -> int:
        return count_tokens(self.engine.tokenizer, text)

    def _special_texts(self, request: TextRequest) -> dict[int, str] | None:
        """Return the special tokens that are text in the answer to a request; None: there are none.

        These are the tags of the model's form, from which its answer is read, and all of them if
        the request wants so. The stop token at the end of a text is left out, unless the request
        wants what it stops at.
        """
        tags = self._tags if request.is_chat else None
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
        if self._call_id_length is not None and is_text and not isinstance(prompt, str):
            prompt = with_ids_of_length(prompt, self._call_id_length)
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


def _prompt_name(request: TextRequest) -> str:
    """Return the parameter that has the prompts of a request."""
    return "messages" if request.is_chat else "prompt"


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
    rf"({'|'.join(SAMPLING_NAMES)}|seed|stop|logprobs|prediction|speculation|chat_template_kwargs"
    r"|thinking_budget)\b"
)
