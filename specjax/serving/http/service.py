"""Encode, check, submit and cancel requests: what the paths of the application do with the engine."""

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

from specjax.errors import InputError
from specjax.sampling import SAMPLING_NAMES
from specjax.serving.engine import Engine
from specjax.serving.handle import Handle, TextCancelledError
from specjax.serving.http import requests
from specjax.serving.http.drafts import Drafts
from specjax.serving.http.errors import RequestError
from specjax.serving.http.metrics import Metrics
from specjax.serving.http.requests import Limits, TextRequest
from specjax.serving.http.responses import draining_error
from specjax.serving.http.tokens import TokenTexts
from specjax.serving.scheduler import QueueFullError
from specjax.templates import Settings, names_read
from specjax.text import encode_continuation

MAX_REQUEST_LOGPROBS = 500_000
"""Log-probabilities of an answer, those of likeliest tokens among them: some 50 MB."""

IGNORED_HEADER = "X-Specjax-Ignored"
"""Of an answer: the parameters of the request that are not known, the first eight."""

MAX_NAMES_LOGGED = 256
"""Unknown parameters that the log names, each once. A client may make up any number of them."""

_LOG = logging.getLogger(__name__)


_HEADER_NAME = re.compile("[A-Za-z0-9_.-]{1,64}")

Result = TypeVar("Result")


@dataclass(frozen=True)
class AppOptions:
    """How requests are taken.

    Attributes:
        names: of the model, the first of which it goes by.
        api_keys: without one of which nothing but the page and ``/health`` is answered; none: everybody is let in.
        only_loopback: answer only requests that were addressed to this machine by a name for itself. Without a key, a web page
            that the user visits could otherwise reach the server under a name of its own that resolves to this machine.
        max_texts: most texts of a request: what has a row or waits.
        max_body: bytes of a request's body.
        body_seconds: in which a body must be there.
        with_acceptance: tell in answers how the drafts of their texts fared.
        cors_origins: origins of web pages, such as ``https://chat.example``, whose scripts may send requests and read the
            answers; ``*``: all pages.
        client_sessions: most texts that clients of one key draft at a time, or of one address where there are no keys; None:
            half of all.
        trusted_proxies: addresses or networks from which any number of them may come.

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


class Service:
    """An engine, and the requests that are at it.

    Attributes:
        engine: the engine.
        options: how requests are taken.
        limits: what the model can do.
        texts: what its tokens say.
        drafts: clients that draft themselves; None: it takes no drafts.
        metrics: what Prometheus is told.
        begun: when, in seconds since 1970.
        is_draining: whether no new requests are taken.
    """

    def __init__(self, engine: Engine, options: AppOptions) -> None:
        self.engine, self.options = engine, options
        config, tokenizer = engine.target.config, engine.tokenizer
        self.limits = Limits(
            names=options.names,
            vocab_size=config.vocab_size,
            max_logprobs=min(engine.max_logprobs, requests.MAX_LOGPROBS),
            max_prediction=engine.max_prediction,
            capacity=engine.capacity,
            has_chat=bool(tokenizer.chat_template),
            template_names=names_read(tokenizer),
            eos_token_ids=tuple(config.eos_token_ids),
            default_sampling=engine.default_sampling or Limits.default_sampling,
        )
        self.texts = TokenTexts(tokenizer)
        self._max_characters = engine.capacity * max(map(len, tokenizer.get_vocab()))
        self.drafts = None
        if engine.client_drafts is not None:
            self.drafts = Drafts(engine, options.client_sessions, options.trusted_proxies)
        self.metrics = Metrics(engine, options.names[0], self.drafts and self.drafts.statistics)
        self.is_draining = False
        self.begun = int(time.time())
        self._submissions: set[Submission] = set()
        self._threads = ThreadPoolExecutor(2, "specjax-requests")
        self._logged_names: set[str] = set()
        self._places = threading.Lock()

    async def in_thread(self, work: Callable[..., Result], *given: Any) -> Result:
        """Do ``work`` away from the event loop, two at a time: the tokens of a long text take seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    def ignored_header(self, names: Sequence[str]) -> dict[str, str]:
        """Return the header that tells a client which parameters are not known, and log those that are new."""
        for name in names:
            if name not in self._logged_names and len(self._logged_names) < MAX_NAMES_LOGGED:
                self._logged_names.add(name)
                _LOG.warning("a request has the parameter %.80r, which is not known and is ignored", name)
        told = [name for name in names if _HEADER_NAME.fullmatch(name)][:8]
        return {IGNORED_HEADER: ", ".join(told)} if told else {}

    @property
    def is_busy(self) -> bool:
        """Return whether a request is being answered, or a client that drafts has a text that goes on."""
        return bool(self._submissions) or (self.drafts is not None and self.drafts.sessions.is_busy)

    def drain(self) -> None:
        """Take no new requests."""
        self.is_draining = True
        if self.drafts is not None:
            self.drafts.sessions.is_draining = True

    def cancel_all(self) -> None:
        """End the texts of all requests."""
        for submission in list(self._submissions):
            submission.cancel()
        if self.drafts is not None:
            self.drafts.sessions.close()

    def begin(self) -> "Submission":
        """Begin a request. Raises RequestError where the server is shutting down."""
        if self.is_draining:
            raise draining_error()
        submission = Submission()
        self._submissions.add(submission)
        return submission

    def end(self, submission: "Submission") -> None:
        """End a request, and cancel what it has left."""
        submission.cancel()
        self._submissions.discard(submission)

    def submit(self, asked: TextRequest, submission: "Submission") -> list[list[int]]:
        """Submit the texts of a request to the engine, all of them or none. Return the tokens of its prompts.

        It takes some milliseconds, and belongs in a thread of its own.
        """
        name, count = "messages" if asked.is_chat else "prompt", asked.n * len(asked.prompts)
        if count > self.options.max_texts:
            message = f"n={asked.n}: {count} texts at once; this server takes at most {self.options.max_texts}"
            raise RequestError(400, message, param="n")
        self._keep_places(submission, count)
        prompts = []
        for prompt in asked.prompts:
            submission.check()
            prompts.append(self.encode(prompt, name, asked.add_special_tokens, asked.chat_template_kwargs))
        max_new_tokens = [self._max_new_tokens(asked, len(tokens), name) for tokens in prompts]
        _check_logprobs(asked, prompts, max_new_tokens)
        prediction = asked.prediction and asked.prediction[: self._max_characters]
        if prediction is not None:
            with _as_answers("prediction"):
                prediction = self.engine.encode_prediction(prediction)  # once for all texts
        options = {
            "stop": asked.stop,
            "logprobs": asked.logprobs,
            "echo": asked.echo and asked.logprobs is not None,
            "prediction": prediction,
            "spans": asked.include_accepted,
            "cache_salt": asked.cache_salt,
            "is_chat": asked.is_chat,
        }
        for tokens, count in zip(prompts, max_new_tokens, strict=True):
            seed = secrets.randbits(63) if asked.seed is None else asked.seed
            with _as_answers(name):
                params = replace(asked.params, max_new_tokens=count, seed=seed)
                for choice in range(asked.n):
                    submission.add(self.engine.submit(tokens, params, choice=choice, **options))
        return prompts

    def _keep_places(self, submission: "Submission", count: int) -> None:
        """Keep a row, or a place in the line, for every text of a request. Where there are too few, none of them begins.

        A text has its place until it has ended. Rows of clients that draft are not counted here: where these take the last
        ones, the engine refuses a text.
        """
        with self._places:
            taken = sum(each.places for each in list(self._submissions))
            if taken + count > self.options.max_texts:
                message = f"too many requests: {taken} texts run or wait, and {self.options.max_texts} may; try again later"
                raise RequestError(429, message, code="queue_full", headers={"Retry-After": "1"})
            submission.kept = count

    def encode(
        self, prompt: Any, name: str, add_special_tokens: bool = True, chat_template_kwargs: Settings | None = None
    ) -> list[int]:
        """Return the token ids of a prompt, which errors call ``name``.

        Of megabytes of text a tokenizer makes hundreds of megabytes. So what is too long for any tokens is refused before.
        """
        is_text = isinstance(prompt, str) or isinstance(prompt[0], Mapping)
        length = _characters(prompt) + _characters([chat_template_kwargs or {}]) if is_text else 0
        if length > self._max_characters:
            message = (
                f"{name}: {length} characters, more than {self.engine.capacity} tokens, which is the longest text; shorten it"
            )
            raise RequestError(400, message, param=name, code="context_length_exceeded")
        with _as_answers(name):
            if isinstance(prompt, str) and not add_special_tokens:
                tokens = encode_continuation(self.engine.tokenizer, prompt)
                return self.engine.encode(tokens)
            return self.engine.encode(prompt, chat_template_kwargs)

    def _max_new_tokens(self, asked: TextRequest, length: int, name: str) -> int:
        """Return how many tokens a text may have after a prompt of ``length``: as asked, as far as there is room for them."""
        room, minimum = self.engine.capacity - length, 0 if asked.max_tokens == 0 else 1
        if room < minimum:
            message = (
                f"{name}: {length} tokens, and at least {minimum} to generate, are more than {self.engine.capacity}, "
                "which is the longest text; shorten it"
            )
            raise RequestError(400, message, param=name, code="context_length_exceeded")
        count = room if asked.max_tokens is None else min(asked.max_tokens, room)
        if asked.params.min_new_tokens > count:
            message = f"min_tokens={asked.params.min_new_tokens}: there is room for {count}; give fewer"
            raise RequestError(400, message, param="min_tokens")
        return count


def _characters(prompt: Any) -> int:
    """Return how many characters a text has, or all texts in the messages of a chat: the template may write any of them."""
    left = [prompt] if isinstance(prompt, str) else [each for message in prompt for each in message.values()]
    count = 0
    while left:
        value = left.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, Mapping):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
    return count


def _check_logprobs(asked: TextRequest, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> None:
    """Refuse so many log-probabilities that an answer would take hundreds of megabytes.

    ``max_new_tokens`` are the most tokens that the text of each prompt may have.
    """
    if asked.logprobs is None:
        return
    read = sum(map(len, prompts)) if asked.echo else 0
    places = (read + sum(max_new_tokens)) * asked.n
    if places * (asked.logprobs + 1) > MAX_REQUEST_LOGPROBS:
        message = (
            f"logprobs: {asked.logprobs} in each of {places} places; a request may have {MAX_REQUEST_LOGPROBS} in all: ask for "
            "fewer, for fewer tokens, or send fewer prompts at a time"
        )
        raise RequestError(400, message, param="logprobs", code="too_many_logprobs")


class Submission:
    """The texts of one request, from any thread. What is added after it was cancelled is cancelled at once.

    Attributes:
        handles: the texts that are at the engine.
        kept: how many texts there will be.
    """

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.kept = 0
        self._lock = threading.Lock()
        self._is_over = False

    def add(self, handle: Handle) -> None:
        """Add a text. Raises TextCancelledError where the request is over."""
        with self._lock:
            self.handles.append(handle)
            is_over = self._is_over
        if is_over:
            handle.cancel()
            raise TextCancelledError("the request is over")

    @property
    def places(self) -> int:
        """Return how many texts run, wait, or are still to come."""
        return self.kept - sum(handle.finish_reason is not None for handle in list(self.handles))

    def check(self) -> None:
        """Raise TextCancelledError where the request is over."""
        if self._is_over:
            raise TextCancelledError("the request is over")

    def cancel(self) -> None:
        """End all of them."""
        with self._lock:
            self._is_over = True
            handles = list(self.handles)
        for handle in handles:
            handle.cancel()


@contextmanager
def _as_answers(name: str) -> Iterator[None]:
    """Turn what the engine has against a request into an answer, about the parameter ``name`` where it names none itself."""
    try:
        yield
    except QueueFullError as error:
        raise RequestError(429, f"too many requests: {error}", code="queue_full", headers={"Retry-After": "1"}) from None
    except InputError as error:
        param = _PARAM.match(str(error))
        raise RequestError(400, str(error), param=param[0] if param else name) from None


_PARAM = re.compile(rf"({'|'.join(SAMPLING_NAMES)}|seed|stop|logprobs|prediction|chat_template_kwargs)\b")
