"""The application: which path does what, who may ask, and what happens when somebody goes away.

It is plain ASGI where it matters. A request's texts are generated while its client is listened to: when the client goes away
they are cancelled, and their rows are free for others.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from specjax.errors import InputError, LogitsError
from specjax.sampling import SAMPLING_NAMES
from specjax.serving.engine import Engine
from specjax.serving.handle import EngineError, Handle, Piece, TextCancelledError
from specjax.serving.http import requests, responses
from specjax.serving.http.drafts import Drafts
from specjax.serving.http.errors import RequestError, error_object
from specjax.serving.http.metrics import Metrics
from specjax.serving.http.requests import Limits, TextRequest
from specjax.serving.http.tokens import TokenTexts
from specjax.serving.scheduler import QueueFullError
from specjax.templates import Settings, names_read
from specjax.text import encode_continuation
from specjax.wire import PATH

MOST_LOGPROBS = 500_000
"""Log-probabilities of an answer, those of likeliest tokens among them: some 50 MB."""

IGNORED_HEADER = "X-Specjax-Ignored"
"""Of an answer: the parameters of the request that are not known, the first eight."""

MOST_NAMES_LOGGED = 256
"""Unknown parameters that the log names, each once. A client may make up any number of them."""

SHORT_BODY = 2**15
"""Bytes of a body that is read in the event loop: it takes less than a millisecond."""

_LOG = logging.getLogger(__name__)
_HEADER_NAME = re.compile("[A-Za-z0-9_.-]{1,64}")

Result = TypeVar("Result")
_CLOSE = {"Connection": "close"}
_OPEN_PATHS = ("/", "/health")


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
        >>> from specjax.serving.http.app import AppOptions
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
            own_ends=tuple(config.eos_token_ids),
            default_sampling=engine.default_sampling or Limits.default_sampling,
        )
        self.texts = TokenTexts(tokenizer)
        self._most_characters = engine.capacity * max(map(len, tokenizer.get_vocab()))
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
        """Tokens are made here, away from the event loop: two at a time, for a long text takes seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    def ignored_header(self, names: Sequence[str]) -> dict[str, str]:
        """Return the header that tells a client which parameters are not known, and log those that are new."""
        for name in names:
            if name not in self._logged_names and len(self._logged_names) < MOST_NAMES_LOGGED:
                self._logged_names.add(name)
                _LOG.warning("a request has the parameter %.80r, which is not known and is ignored", name)
        told = [name for name in names if _HEADER_NAME.fullmatch(name)][:8]
        return {IGNORED_HEADER: ", ".join(told)} if told else {}

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered, or a client that drafts has a text that goes on."""
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
        """A request begins, unless it is too late for one."""
        if self.is_draining:
            raise _draining()
        submission = Submission()
        self._submissions.add(submission)
        return submission

    def end(self, submission: "Submission") -> None:
        """A request is over: what it has left is cancelled."""
        submission.cancel()
        self._submissions.discard(submission)

    def submit(self, asked: TextRequest, submission: "Submission") -> list[list[int]]:
        """Hand the texts of a request to the engine: all of them, or none stays. The tokens of its prompts.

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
        limits = [self._most_tokens(asked, len(tokens), name) for tokens in prompts]
        _check_logprobs(asked, prompts, limits)
        prediction = asked.prediction and asked.prediction[: self._most_characters]
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
        for tokens, most in zip(prompts, limits, strict=True):
            seed = secrets.randbits(63) if asked.seed is None else asked.seed
            with _as_answers(name):
                params = replace(asked.params, max_new_tokens=most, seed=seed)
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
        """Token ids of a prompt, of which errors speak as ``name``.

        Of megabytes of text a tokenizer makes hundreds of megabytes. So what is too long for any tokens is refused before.
        """
        is_text = isinstance(prompt, str) or isinstance(prompt[0], Mapping)
        length = _characters(prompt) + _characters([chat_template_kwargs or {}]) if is_text else 0
        if length > self._most_characters:
            message = (
                f"{name}: {length} characters, more than {self.engine.capacity} tokens, which is the longest text; shorten it"
            )
            raise RequestError(400, message, param=name, code="context_length_exceeded")
        with _as_answers(name):
            if isinstance(prompt, str) and not add_special_tokens:
                tokens = encode_continuation(self.engine.tokenizer, prompt)
                return self.engine.encode(tokens)
            return self.engine.encode(prompt, chat_template_kwargs)

    def _most_tokens(self, asked: TextRequest, length: int, name: str) -> int:
        """Return how many tokens a text may have after a prompt of ``length``: as asked, as far as there is room for them."""
        room, least = self.engine.capacity - length, 0 if asked.max_tokens == 0 else 1
        if room < least:
            message = (
                f"{name}: {length} tokens, and at least {least} to generate, are more than {self.engine.capacity}, "
                "which is the longest text; shorten it"
            )
            raise RequestError(400, message, param=name, code="context_length_exceeded")
        most = room if asked.max_tokens is None else min(asked.max_tokens, room)
        if asked.params.min_new_tokens > most:
            message = f"min_tokens={asked.params.min_new_tokens}: there is room for {most}; give fewer"
            raise RequestError(400, message, param="min_tokens")
        return most


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


def _check_logprobs(asked: TextRequest, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
    """Refuse so many log-probabilities that an answer would take hundreds of megabytes.

    ``limits`` are the most tokens that the text of each prompt may have.
    """
    if asked.logprobs is None:
        return
    read = sum(map(len, prompts)) if asked.echo else 0
    places = (read + sum(limits)) * asked.n
    if places * (asked.logprobs + 1) > MOST_LOGPROBS:
        message = (
            f"logprobs: {asked.logprobs} in each of {places} places; a request may have {MOST_LOGPROBS} in all: ask for fewer, "
            "for fewer tokens, or send fewer prompts at a time"
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
        """One more text."""
        with self._lock:
            self.handles.append(handle)
            is_over = self._is_over
        if is_over:
            handle.cancel()
            raise TextCancelledError("the request is over")

    @property
    def places(self) -> int:
        """How many texts run, wait, or are still to come."""
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
    """What the engine has against a request, as an answer. What it does not name itself is about the parameter ``name``."""
    try:
        yield
    except QueueFullError as error:
        raise RequestError(429, f"too many requests: {error}", code="queue_full", headers={"Retry-After": "1"}) from None
    except InputError as error:
        param = _PARAM.match(str(error))
        raise RequestError(400, str(error), param=param[0] if param else name) from None


_PARAM = re.compile(rf"({'|'.join(SAMPLING_NAMES)}|seed|stop|logprobs|prediction|chat_template_kwargs)\b")


def make_app(service: Service) -> ASGIApp:
    """The ASGI application of a ``service``."""
    page = resources.files("specjax.serving.http").joinpath("page.html").read_bytes()

    async def answer_page(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=_PAGE_HEADERS)

    async def health(request: Request) -> Response:
        state = service.engine.state
        if service.is_draining or state != "running":
            is_ending = service.is_draining or state == "closed"
            message = "the server is shutting down" if is_ending else "the engine has failed; start the server anew"
            raise RequestError(503, message, headers={"Retry-After": "10"})
        statistics = service.engine.statistics
        return _json({"status": "ok", "programs": {"compiled": statistics.compiled, "of": statistics.programs}})

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [_model(service, name) for name in service.limits.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in service.limits.names:
            message = f"model={name[:80]!r}: not served here; the model is {service.limits.names[0]!r}"
            raise RequestError(404, message, param="model", code="model_not_found")
        return _json(_model(service, name))

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def read(reader: Callable[[bytes, Limits], Result], request: Request) -> Result:
        """Return what a request asks for. A long body is read where nobody else waits: a million ids take a while."""
        body = await read_body(request, service.options)
        if len(body) <= SHORT_BODY:
            return reader(body, service.limits)
        return await service.in_thread(reader, body, service.limits)

    async def tokenize(request: Request) -> Response:
        asked = await read(requests.read_tokenize, request)
        tokens = await service.in_thread(
            service.encode, asked.prompt, asked.param, asked.add_special_tokens, asked.chat_template_kwargs
        )
        said = {"count": len(tokens), "max_model_len": service.engine.capacity, "tokens": tokens}
        return _json(said, headers=service.ignored_header(asked.ignored))

    async def completions(request: Request) -> Any:
        return _Generation(service, await read(requests.read_completion, request))

    async def chat(request: Request) -> Any:
        return _Generation(service, await read(requests.read_chat, request))

    async def drafts(request: Request) -> Response:
        if service.drafts is None:
            raise RequestError(404, f"{PATH}: this server takes no drafts; start it with --drafts clients", code="no_drafts")
        raise RequestError(426, f"{PATH}: drafts come over a WebSocket", code="no_websocket", headers={"Upgrade": "websocket"})

    async def socket(websocket: WebSocket) -> None:
        assert service.drafts is not None  # otherwise no WebSocket is begun
        await service.drafts.serve(websocket)

    app = Starlette(
        routes=[
            Route(PATH, drafts),
            WebSocketRoute(PATH, socket),
            Route("/", answer_page),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ],
        middleware=[*_cors(service.options), Middleware(_Guard, service=service)],
        exception_handlers={
            RequestError: _answer_error,
            HTTPException: _answer_http_error,
            EngineError: _answer_engine_error,
            TextCancelledError: _answer_cancelled,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_unexpected,
        },
    )
    app.router.redirect_slashes = False  # a path with a slash more is none
    return app


def _cors(options: AppOptions) -> list[Middleware]:
    """Return what answers preflight requests, which carry no key, and lets the pages of some origins read answers."""
    if not options.cors_origins:
        return []
    middleware = Middleware(
        CORSMiddleware,
        allow_origins=options.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[IGNORED_HEADER, "Retry-After"],
    )
    return [middleware]


async def answer_starting(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer any request with 503: the application in the place of `make_app`'s as long as there is no engine."""
    message = "the server is starting: it loads the models, and compiles what a first request needs"
    answer = _error_response(RequestError(503, message, code="starting", headers={"Retry-After": "5", **_CLOSE}))
    await answer(scope, receive, send)


_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.begun,
        "owned_by": "specjax",
        "root": service.limits.names[0],
        "max_model_len": service.engine.capacity,
        "has_chat_template": service.limits.has_chat,
    }


# --- texts -----------------------------------------------------------------------------------------------------------


class _Generation:
    """The answer to a request for texts, an ASGI application of its own."""

    def __init__(self, service: Service, asked: TextRequest) -> None:
        self._service, self._asked = service, asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_listened_to(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, asked = self._service, self._asked
        submission = service.begin()
        try:
            # A cancelled thread goes on: what it submits then is cancelled by the submission, which is over.
            prompts = await service.in_thread(service.submit, asked, submission)
            handles = submission.handles
            for index, handle in enumerate(handles):
                number, choice = divmod(index, asked.n)
                service.metrics.watch(handle, 0 if choice else len(prompts[number]))  # a prompt counts once
            headers = service.ignored_header(asked.ignored)
            answer = responses.Answer(asked, handles, prompts, service.texts, with_acceptance=service.options.with_acceptance)
            if asked.stream:
                await _stream(service, answer, send, headers)
            else:
                pieces = await together([_pieces(handle) for handle in handles])
                # In a thread: with the log-probabilities of many texts it takes seconds.
                response = await service.in_thread(lambda: _json(answer.whole(pieces), headers=headers))
                await response(scope, receive, send)
        finally:
            service.end(submission)


async def _pieces(handle: Handle) -> list[Piece]:
    return [piece async for piece in handle]


async def _stream(service: Service, answer: responses.Answer, send: Send, headers: Mapping[str, str]) -> None:
    """Server-sent events. A chunk is sent when the one before has been taken: what a slow reader has not read is not kept."""
    more = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": [*_EVENT_HEADERS, *more]})

    async def put(data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def put_first(index: int) -> None:
        if answer.asked.echo:  # In a thread: the log-probabilities of a long prompt take a second.
            chunk = await service.in_thread(lambda: _event_or_none(answer.first(index)))
        else:
            chunk = _event_or_none(answer.first(index))
        if chunk is not None:
            await put(chunk)

    async def put_choice(index: int) -> None:
        handle, is_first = answer.handles[index], True
        async for piece in handle:
            if is_first:
                await put_first(index)
            is_first = False
            if (chunk := _event_or_none(answer.piece(index, piece))) is not None:
                await put(chunk)
        if is_first:
            await put_first(index)
        await put(responses.event(answer.last(index)))

    try:
        await together([put_choice(index) for index in range(len(answer.handles))])
        if answer.asked.include_usage:
            await put(responses.event(answer.total()))
        await put(responses.DONE)
    except TextCancelledError:
        await put(responses.event(_draining().object))
    except EngineError as error:
        await put(responses.event(error_object(500, _engine_message(error))))
    except Exception:
        await put(responses.event(error_object(500, _UNEXPECTED)))
        raise  # for the log
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event_or_none(chunk: dict[str, Any] | None) -> bytes | None:
    return None if chunk is None else responses.event(chunk)


_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def while_listened_to(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do ``work`` until it is done or the client is gone. Afterwards it is not being done any more."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        await _end((working, leaving))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def together(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of all of ``work``. When one of it fails, the others are ended."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# --- who may ask, and for how long -----------------------------------------------------------------------------------


class _Guard:
    """Before anything is read: whether the client may ask at all."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (error := self._refusal(scope)) is not None:
            await _error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        """Why a request is not answered. Of one that is, the scope says whose it is."""
        options, headers = self._service.options, dict(scope["headers"])
        is_socket, method = scope["type"] == "websocket", scope.get("method")
        host = headers.get(b"host", b"").decode("latin-1")
        if options.only_loopback and not _is_loopback(host):
            message = "Host: this server is for this machine alone, under the names localhost and 127.0.0.1"
            return RequestError(403, message, code="host_not_allowed")
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if is_socket and not all(_is_of(origin, host) or _is_among(origin, options.cors_origins) for origin in origins):
            return RequestError(403, "Origin: pages of other sites may not open a WebSocket here", code="origin_not_allowed")
        if scope["path"] not in _OPEN_PATHS:
            key = _key(headers.get(b"authorization", b""), options.api_keys)
            if options.api_keys and key is None:
                message = "Authorization: missing or wrong; send the header 'Authorization: Bearer KEY'"
                return RequestError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            scope["specjax.owner"] = "" if key is None else hashlib.sha256(key.encode()).hexdigest()
            if (is_socket or method == "POST") and self._service.is_draining:
                return _draining()
        if method == "POST" and not _is_json(headers.get(b"content-type", b"")):
            return RequestError(415, "Content-Type: must be application/json", code="not_json")
        return None


def _is_of(origin: str, host: str) -> bool:
    """Whether an Origin header names the site that a Host header names. Browsers let the pages of any site begin a WebSocket,
    and say which site it is."""
    scheme, _, site = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return bool(port and site) and site.removesuffix(port) == host.lower().removesuffix(port)


def _is_among(origin: str, origins: Sequence[str]) -> bool:
    return origin in origins or "*" in origins


def check_origins(origins: Sequence[str]) -> None:
    """Refuse what is no origin of web pages.

    Raises:
        InputError: an origin is not of the form that browsers send.

    Examples:
        >>> from specjax.serving.http.app import check_origins
        >>> check_origins(["http://localhost:3000", "https://chat.example"])
    """
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise InputError(
                f"cors_origin={origin!r}: must be as browsers send it, such as http://localhost:3000 or https://chat.example, "
                "in small letters and without a path; or * for all pages"
            )


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?|null")


def _draining() -> RequestError:
    return RequestError(503, "the server is shutting down", code="draining", headers={"Retry-After": "10"} | _CLOSE)


def _key(given: bytes, keys: Sequence[str]) -> str | None:
    """The one of the ``keys`` that an Authorization header has. All are looked at, so that time does not tell which."""
    scheme, _, value = given.partition(b" ")
    same = [key for key in keys if hmac.compare_digest(value.strip(), key.encode())]
    return same[0] if same and scheme.lower() == b"bearer" else None


def _is_json(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


def _is_loopback(host: str) -> bool:
    """Whether a Host header names this machine: localhost, or an address of its own."""
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def read_body(request: Request, options: AppOptions) -> bytes:
    """The body of a request, unless it is too long or takes too long."""
    too_long = RequestError(413, f"the body is longer than {options.max_body} bytes; send less", code="body_too_long")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 12 or int(length) > options.max_body):
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(options.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > options.max_body:
                    raise too_long
    except TimeoutError:
        message = f"the body did not come within {options.body_seconds:g} seconds"
        raise RequestError(408, message, code="timeout", headers=_CLOSE) from None
    return bytes(body)


# --- answers ---------------------------------------------------------------------------------------------------------


def _json(value: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(responses.encode(value), status, headers, media_type="application/json")


def _error_response(error: RequestError) -> Response:
    return _json(error.object, error.status, error.headers)


async def _answer_error(request: Request, error: Any) -> Response:
    return _error_response(error)


async def _answer_http_error(request: Request, error: Any) -> Response:
    """What the router says: a path or a method that is none."""
    path, headers = request.url.path[:200], error.headers
    if error.status_code == 404:
        message = (
            f"{path}: no such path; there are /v1/completions, /v1/chat/completions, /v1/drafts, /v1/models, /tokenize, "
            "/metrics, /health"
        )
    elif error.status_code == 405:
        message = f"{path}: not by {request.method[:20]}, but by {(headers or {}).get('Allow')}"
    else:
        message = str(error.detail)
    return _json(error_object(error.status_code, message), error.status_code, headers)


_UNEXPECTED = "an error of the server; its log says more"


def _engine_message(error: EngineError) -> str:
    if error.__cause__ is None or isinstance(error.__cause__, LogitsError):  # whose message says it all
        return str(error)
    return f"{error}: {type(error.__cause__).__name__}"


async def _answer_engine_error(request: Request, error: Any) -> Response:
    return _json(error_object(500, _engine_message(error), code="engine_error"), 500)


async def _answer_cancelled(request: Request, error: Any) -> Response:
    return _error_response(_draining())


async def _answer_nobody(request: Request, error: Any) -> Response:
    return Response(status_code=400)


async def _answer_unexpected(request: Request, error: Any) -> Response:
    return _json(error_object(500, _UNEXPECTED, code="internal_error"), 500)
