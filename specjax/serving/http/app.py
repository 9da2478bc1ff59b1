"""The HTTP application: its routes, and the responses to errors.

`specjax.serving.http.access` checks the access, `specjax.serving.http.service` submits requests to
the engine, and `specjax.serving.http.streaming` sends the answers. If a client disconnects, its
texts are cancelled, and their rows are free for others.
"""

from collections.abc import Callable
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from specjax import __version__
from specjax.serving.handle import EngineError, TextCancelledError
from specjax.serving.http import requests
from specjax.serving.http.access import Guard, read_body
from specjax.serving.http.errors import ANTHROPIC_PATH, RequestError
from specjax.serving.http.interfaces import interface_routes
from specjax.serving.http.model_objects import ServedModel, is_of_anthropic, model_list
from specjax.serving.http.request_log import RequestLog
from specjax.serving.http.requests import Limits
from specjax.serving.http.responses import (
    CLOSE,
    UNEXPECTED,
    draining_error,
    engine_message,
    engine_status,
    error_response,
    json_response,
)
from specjax.serving.http.service import IGNORED_HEADER, AppOptions, Result, Service
from specjax.serving.http.streaming import GenerationResponse
from specjax.wire import PATH

SHORT_BODY = 2**15
"""The largest body in bytes that is parsed in the event loop, in less than a millisecond."""


def make_app(service: Service) -> ASGIApp:
    """Return the ASGI application of a ``service``."""
    page = resources.files("specjax.serving.http").joinpath("page.html").read_bytes()

    async def answer_page(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=_PAGE_HEADERS)

    async def health(request: Request) -> Response:
        state = service.engine.state
        if service.is_draining or state != "running":
            is_ending = service.is_draining or state == "closed"
            if is_ending:
                message = "the server is shutting down"
            else:
                message = "the engine has failed; restart the server"
            raise RequestError(503, message, headers={"Retry-After": "10"})
        statistics = service.engine.statistics
        return json_response(
            {
                "status": "ok",
                "programs": {"compiled": statistics.compiled, "of": statistics.programs},
            }
        )

    async def models(request: Request) -> Response:
        served = [_model(service, name) for name in service.limits.names]
        return json_response(model_list(served, for_anthropic=is_of_anthropic(request.headers)))

    async def model(request: Request) -> Response:
        name, for_anthropic = request.path_params["name"], is_of_anthropic(request.headers)
        if name not in service.limits.names:
            message = (
                f"model={name[:80]!r}: the server does not have it; give"
                f" {service.limits.names[0]!r}"
            )
            error = RequestError(404, message, param="model", code="model_not_found")
            return error_response(error, ANTHROPIC_PATH if for_anthropic else request.url.path)
        served = _model(service, name)
        return json_response(served.anthropic_object() if for_anthropic else served.openai_object())

    async def metrics(request: Request) -> Response:
        return Response(
            service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def read(reader: Callable[[bytes, Limits], Result], request: Request) -> Result:
        """Return a parsed request. Long bodies are parsed in a thread, not in the event loop."""
        body = await read_body(request, service.options)
        if len(body) <= SHORT_BODY:
            return reader(body, service.limits)
        return await service.in_thread(reader, body, service.limits)

    async def tokenize(request: Request) -> Response:
        parsed = await read(requests.read_tokenize, request)
        tokens = await service.in_thread(
            lambda: service.encode(
                parsed.prompt,
                parsed.param,
                parsed.add_special_tokens,
                parsed.chat_template_kwargs,
                parsed.chat_end,
                tools=parsed.tools,
            )
        )
        result = {"count": len(tokens), "max_model_len": service.engine.capacity, "tokens": tokens}
        return json_response(result, headers=service.ignored_header(parsed.ignored))

    async def detokenize(request: Request) -> Response:
        parsed = await read(requests.read_detokenize, request)
        text = await service.in_thread(
            lambda: service.engine.tokenizer.decode(
                parsed.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
        return json_response({"prompt": text}, headers=service.ignored_header(parsed.ignored))

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def completions(request: Request) -> Any:
        return GenerationResponse(service, await read(requests.read_completion, request))

    async def chat(request: Request) -> Any:
        return GenerationResponse(service, await read(requests.read_chat, request))

    async def drafts(request: Request) -> Response:
        if service.drafts is None:
            raise RequestError(
                404,
                f"{PATH}: this server accepts no drafts; start it with --drafts clients",
                code="no_drafts",
            )
        raise RequestError(
            426,
            f"{PATH}: it needs a WebSocket",
            code="no_websocket",
            headers={"Upgrade": "websocket"},
        )

    async def socket(websocket: WebSocket) -> None:
        assert service.drafts is not None  # otherwise uvicorn accepts no WebSocket
        await service.drafts.serve(websocket)

    app = Starlette(
        routes=[
            Route(PATH, drafts),
            WebSocketRoute(PATH, socket),
            Route("/", answer_page),
            Route("/health", health),
            Route("/ping", health, methods=["GET", "POST"]),
            Route("/version", version),
            Route("/metrics", metrics),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            *interface_routes(service, read),
        ],
        middleware=[
            Middleware(RequestLog),
            *_cors(service.options),
            Middleware(Guard, service=service),
        ],
        exception_handlers={
            RequestError: _answer_error,
            HTTPException: _answer_http_error,
            EngineError: _answer_engine_error,
            TextCancelledError: _answer_cancelled,
            ClientDisconnect: _answer_disconnected,
            Exception: _answer_unexpected,
        },
    )
    app.router.redirect_slashes = False  # a path with another slash at its end is a 404
    return app


def _cors(options: AppOptions) -> list[Middleware]:
    """Return the CORS middleware. It precedes `Guard`, as preflight requests have no API key."""
    if not options.cors_origins:
        return []
    middleware = Middleware(
        CORSMiddleware,
        allow_origins=options.cors_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[IGNORED_HEADER, "Retry-After", "X-Request-Id"],
    )
    return [middleware]


async def answer_starting(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer any request with 503. It is the application until the engine is ready."""
    message = "the server is starting: it loads the models and compiles the first programs"
    error = RequestError(503, message, code="starting", headers={"Retry-After": "5", **CLOSE})
    answer = error_response(error, scope.get("path", ""))
    await answer(scope, receive, send)


_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src"
        " 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def _model(service: Service, name: str) -> ServedModel:
    return ServedModel(
        name,
        service.limits.names[0],
        service.created,
        service.engine.capacity,
        service.limits.has_chat,
    )


async def _answer_error(request: Request, error: Any) -> Response:
    return error_response(error, request.url.path)


async def _answer_http_error(request: Request, error: Any) -> Response:
    """Answer a request whose path or method the router refuses."""
    path, headers = request.url.path[:200], error.headers
    if error.status_code == 404:
        message = (
            f"{path}: the path does not exist; give /v1/completions, /v1/chat/completions,"
            " /v1/responses, /v1/messages, /v1/drafts, /v1/models, /tokenize, /detokenize,"
            " /metrics, /health, /ping or /version"
        )
    elif error.status_code == 405:
        message = (
            f"{path}: the method {request.method[:20]} is not allowed; use"
            f" {(headers or {}).get('Allow')}"
        )
    else:
        message = str(error.detail)
    return error_response(RequestError(error.status_code, message, headers=headers), path)


async def _answer_engine_error(request: Request, error: Any) -> Response:
    status, message = engine_status(error), engine_message(error)
    return error_response(RequestError(status, message, code="engine_error"), request.url.path)


async def _answer_cancelled(request: Request, error: Any) -> Response:
    # A text whose client is still connected is cancelled only when the server shuts down.
    return error_response(draining_error(), request.url.path)


async def _answer_disconnected(request: Request, error: Any) -> Response:
    return Response(status_code=400)


async def _answer_unexpected(request: Request, error: Any) -> Response:
    return error_response(RequestError(500, UNEXPECTED, code="internal_error"), request.url.path)
