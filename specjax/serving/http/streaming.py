"""The sending of an answer, whole or as server-sent events, while the client is connected."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from specjax.serving.handle import EngineError, Handle, Piece, TextCancelledError
from specjax.serving.http import responses
from specjax.serving.http.errors import error_object
from specjax.serving.http.request_log import record_of
from specjax.serving.http.requests import TextRequest
from specjax.serving.http.responses import (
    UNEXPECTED,
    draining_error,
    engine_message,
    engine_status,
    json_response,
)
from specjax.serving.http.service import Service


class GenerationResponse:
    """The response to a request for texts, as an ASGI application."""

    def __init__(self, service: Service, request: TextRequest) -> None:
        self._service, self._request = service, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, and cancel its texts if the client disconnects."""
        await while_connected(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, request = self._service, self._request
        submission = service.begin()
        try:
            grammar = await service.compile_grammar(request)
            # Cancelling this task does not stop the thread. Texts that it submits later are
            # cancelled by the submission, which has ended by then.
            owner = scope["specjax.owner"]
            prompts = await service.in_thread(service.submit, request, submission, owner, grammar)
            handles = submission.handles
            record = record_of(scope)
            record.model, record.handles = request.model, handles
            record.prompt_tokens = sum(map(len, prompts))
            for index, handle in enumerate(handles):
                prompt_index, choice = divmod(index, request.n)
                # A prompt counts once, with its first choice.
                service.metrics.watch(handle, 0 if choice else len(prompts[prompt_index]))
            headers = service.ignored_header(request.ignored)
            regions = await service.in_thread(
                lambda: [
                    service.regions(request, prompts[index // request.n])
                    for index in range(len(handles))
                ]
            )
            answer = responses.Answer(
                request,
                handles,
                prompts,
                service.texts,
                regions,
                with_acceptance=service.options.with_acceptance,
            )
            if request.stream:
                await _stream(service, answer, send, headers)
            else:
                pieces = await run_all([_pieces(handle) for handle in handles])
                # In a thread, because the log-probabilities of many texts take seconds to encode.
                response = await service.in_thread(
                    lambda: json_response(answer.whole(pieces), headers=headers)
                )
                await response(scope, receive, send)
        finally:
            service.end(submission)


async def _pieces(handle: Handle) -> list[Piece]:
    return [piece async for piece in handle]


async def _stream(
    service: Service, answer: responses.Answer, send: Send, headers: Mapping[str, str]
) -> None:
    """Send server-sent events. Each waits for the one before, so they do not pile up in memory."""
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send(
        {"type": "http.response.start", "status": 200, "headers": [*_EVENT_HEADERS, *encoded]}
    )

    async def put(data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def put_first(index: int) -> None:
        # In a thread, because the log-probabilities of a long prompt take a second.
        if answer.request.echo:
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
            for chunk in answer.piece(index, piece):
                await put(responses.event(chunk))
        if is_first:
            await put_first(index)
        for chunk in answer.last(index):
            await put(responses.event(chunk))

    try:
        await run_all([put_choice(index) for index in range(len(answer.handles))])
        if answer.request.include_usage:
            await put(responses.event(answer.total()))
        await put(responses.DONE)
    except TextCancelledError:
        # The client is still connected, so the server is shutting down.
        await put(responses.event(draining_error().object))
    except EngineError as error:
        await put(responses.event(error_object(engine_status(error), engine_message(error))))
    except Exception:
        await put(responses.event(error_object(500, UNEXPECTED)))
        raise  # for the log
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event_or_none(chunk: dict[str, Any] | None) -> bytes | None:
    return None if chunk is None else responses.event(chunk)


_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run ``work`` until it ends or the client disconnects, and cancel it in the latter case."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        await _end((working, leaving))


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_all(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run several coroutines, and return their results. If one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
