"""The paths of the interfaces beside OpenAI's completions: ``/v1/responses``, ``/v1/messages``."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specjax.serving.handle import Handle
from specjax.serving.http.errors import RequestError
from specjax.serving.http.messages_answers import MessageWriter
from specjax.serving.http.messages_requests import read_messages
from specjax.serving.http.regions import AnswerRegions
from specjax.serving.http.requests import Limits
from specjax.serving.http.responses import json_response
from specjax.serving.http.responses_answers import ResponseWriter
from specjax.serving.http.responses_requests import ResponsesRequest, read_response
from specjax.serving.http.service import Result, Service
from specjax.serving.http.streaming import GenerationResponse


class ReadBody(Protocol):
    """Reads the body of a request, and returns what a parser makes of it."""

    def __call__(
        self, reader: Callable[[bytes, Limits], Result], request: Request
    ) -> Awaitable[Result]:
        """Return the parsed body of ``request``."""
        ...


def interface_routes(service: Service, read: ReadBody) -> list[Route]:
    """Return the routes of both interfaces.

    Args:
        service: the service that submits the requests.
        read: reads the body of a request.
    """

    async def responses(request: Request) -> Any:
        owner = request.scope["specjax.owner"]

        def read_owned(body: bytes, limits: Limits) -> ResponsesRequest:
            return read_response(body, limits, partial(service.stored_responses.items, owner))

        parsed = await read(read_owned, request)
        return GenerationResponse(
            service, parsed.text, partial(_response_writer, service, owner, parsed)
        )

    async def stored_response(request: Request) -> Response:
        owner, name = request.scope["specjax.owner"], request.path_params["name"]
        salt = request.query_params.get("cache_salt", "")
        if request.method == "DELETE":
            if service.stored_responses.delete(owner, name, salt):
                return json_response({"id": name, "object": "response", "deleted": True})
        elif (stored := service.stored_responses.response(owner, name, salt)) is not None:
            return Response(stored, media_type="application/json")
        message = (
            f"{name[:80]!r}: this server has no such response: it was never stored, or was dropped"
            " for newer ones, or belongs to another API key or cache_salt"
        )
        raise RequestError(404, message, code="response_not_found")

    async def messages(request: Request) -> Any:
        parsed = await read(read_messages, request)
        return GenerationResponse(service, parsed, partial(_message_writer, parsed.model))

    async def count_tokens(request: Request) -> Response:
        parsed = await read(partial(read_messages, is_count=True), request)
        tokens = await service.in_thread(
            lambda: service.encode(
                parsed.prompts[0],
                "messages",
                chat_template_kwargs=parsed.chat_template_kwargs,
                chat_end=parsed.chat_end,
                tools=parsed.tools,
            )
        )
        headers = service.ignored_header(parsed.ignored)
        return json_response({"input_tokens": len(tokens)}, headers=headers)

    return [
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/responses/{name}", stored_response, methods=["GET", "DELETE"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


def _response_writer(
    service: Service,
    owner: str,
    request: ResponsesRequest,
    handles: Sequence[Handle],
    prompts: Sequence[Sequence[int]],
    regions: Sequence[AnswerRegions],
) -> ResponseWriter:
    """Return the writer of a response, which stores the response if the request wants it."""

    def store(response: Mapping[str, Any]) -> None:
        if request.is_stored:
            items = [*request.items, *response["output"]]
            service.stored_responses.add(owner, request.text.cache_salt, response, items)

    return ResponseWriter(request, handles[0], prompts[0], regions[0], store)


def _message_writer(
    model: str,
    handles: Sequence[Handle],
    prompts: Sequence[Sequence[int]],
    regions: Sequence[AnswerRegions],
) -> MessageWriter:
    return MessageWriter(model, handles[0], prompts[0], regions[0])
