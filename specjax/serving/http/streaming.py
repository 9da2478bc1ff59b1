"""The sending of an answer, whole or as server-sent events, while the client is connected."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from specjax.serving.handle import EngineError, Handle, Piece, TextCancelledError
from specjax.serving.http import responses
from specjax.serving.http.errors import RequestError
from specjax.serving.http.regions import AnswerRegions
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


class InterfaceWriter(Protocol):
    """A writer of the answer to a request in the words of one interface.

    All methods but `whole` return server-sent events. They may be called for several texts in turn,
    but for each one in the order ``first``, ``piece`` for each piece, ``last``.
    """

    @property
    def handles(self) -> Sequence[Handle]:
        """The handles of the texts."""
        ...

    @property
    def has_long_begin(self) -> bool:
        """True if ``first`` takes a second, because it has the log-probabilities of a prompt."""
        ...

    def begin(self) -> Iterable[bytes]:
        """Return the events before all texts."""
        ...

    def first(self, index: int) -> Iterable[bytes]:
        """Return the events before a text."""
        ...

    def piece(self, index: int, piece: Piece) -> Iterable[bytes]:
        """Return the events of a piece."""
        ...

    def last(self, index: int) -> Iterable[bytes]:
        """Return the events at the end of a text."""
        ...

    def end(self) -> Iterable[bytes]:
        """Return the events after all texts."""
        ...

    def failure(self, error: RequestError) -> Iterable[bytes]:
        """Return the events after which no more come, because of an error."""
        ...

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """Return the whole answer, from the pieces of each text."""
        ...


MakeWriter = Callable[
    [Sequence[Handle], Sequence[Sequence[int]], Sequence[AnswerRegions]], InterfaceWriter
]
"""Makes the writer of an answer from its texts, their prompts, and their regions."""


class ChunkWriter:
    """The writer of completions and chat completions.

    Examples:
        >>> from specjax.serving.http.streaming import InterfaceWriter, ChunkWriter
        >>> names = [name for name in vars(InterfaceWriter) if not name.startswith("_")]
        >>> all(hasattr(ChunkWriter, name) for name in names if name != "handles")
        True
    """

    def __init__(self, answer: responses.Answer) -> None:
        self._answer = answer
        self.handles = answer.handles

    @property
    def has_long_begin(self) -> bool:
        """True if a text begins with its prompt."""
        return self._answer.request.echo

    def begin(self) -> list[bytes]:
        """Return nothing: each text begins by itself."""
        return []

    def first(self, index: int) -> list[bytes]:
        """Return the chunk before a text, if there is one."""
        chunk = self._answer.first(index)
        return [] if chunk is None else [self._answer.event(chunk)]

    def piece(self, index: int, piece: Piece) -> list[bytes]:
        """Return the chunks of a piece."""
        return [*map(self._answer.event, self._answer.piece(index, piece))]

    def last(self, index: int) -> list[bytes]:
        """Return the chunks with the rest of a text and its finish reason."""
        return [*map(self._answer.event, self._answer.last(index))]

    def end(self) -> list[bytes]:
        """Return the chunk with the usage, if it is wanted, and the end of the stream."""
        answer = self._answer
        usage = [answer.event(answer.total())] if answer.request.include_usage else []
        return [*usage, responses.DONE]

    def failure(self, error: RequestError) -> list[bytes]:
        """Return the error object."""
        return [responses.event(error.object)]

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """Return the whole answer."""
        return self._answer.whole(pieces)


class GenerationResponse:
    """The response to a request for texts, as an ASGI application."""

    def __init__(
        self, service: Service, request: TextRequest, make_writer: MakeWriter | None = None
    ) -> None:
        """Make the response to a request.

        Args:
            service: the service that submits it.
            request: the request.
            make_writer: makes the writer of its answer; None: that of chunks.
        """
        self._service, self._request = service, request
        self._make_writer = make_writer or self._chunk_writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, and cancel its texts if the client disconnects."""
        await while_connected(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, request = self._service, self._request
        submission = service.begin()
        try:
            # Cancelling this task does not stop the threads. Texts that they submit later are
            # cancelled by the submission, which has ended by then.
            prompts, regions = await service.in_thread(service.prepare, request, submission)
            compiled = await service.compile_grammar(request, regions)
            owner = scope["specjax.owner"]
            await service.in_thread(service.submit, request, submission, owner, prompts, compiled)
            handles = submission.handles
            record = record_of(scope)
            record.model, record.handles = request.model, handles
            record.prompt_tokens = sum(map(len, prompts))
            for index, handle in enumerate(handles):
                prompt_index, choice = divmod(index, request.n)
                # A prompt counts once, with its first choice.
                service.metrics.watch(handle, 0 if choice else len(prompts[prompt_index]))
            headers = service.ignored_header(request.ignored)
            writer = self._make_writer(handles, prompts, regions)
            if request.stream:
                await _stream(service, writer, send, headers)
            else:
                pieces = await run_all([_pieces(handle) for handle in handles])
                # In a thread, because the log-probabilities of many texts take seconds to encode.
                response = await service.in_thread(
                    lambda: json_response(writer.whole(pieces), headers=headers)
                )
                await response(scope, receive, send)
        finally:
            service.end(submission)

    def _chunk_writer(
        self,
        handles: Sequence[Handle],
        prompts: Sequence[Sequence[int]],
        regions: Sequence[AnswerRegions],
    ) -> InterfaceWriter:
        service = self._service
        answer = responses.Answer(
            self._request,
            handles,
            prompts,
            service.texts,
            regions,
            with_acceptance=service.options.with_acceptance,
        )
        return ChunkWriter(answer)


async def _pieces(handle: Handle) -> list[Piece]:
    return [piece async for piece in handle]


async def _stream(
    service: Service, writer: InterfaceWriter, send: Send, headers: Mapping[str, str]
) -> None:
    """Send server-sent events. Those of a piece wait for the piece before to be sent.

    So they do not pile up in memory.
    """
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send(
        {"type": "http.response.start", "status": 200, "headers": [*_EVENT_HEADERS, *encoded]}
    )

    async def put(events: Iterable[bytes]) -> None:
        if data := b"".join(events):
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def put_first(index: int) -> None:
        if writer.has_long_begin:
            await put(await service.in_thread(writer.first, index))
        else:
            await put(writer.first(index))

    async def put_choice(index: int) -> None:
        is_first = True
        async for piece in writer.handles[index]:
            if is_first:
                await put_first(index)
            is_first = False
            await put(writer.piece(index, piece))
        if is_first:
            await put_first(index)
        await put(writer.last(index))

    try:
        await put(writer.begin())
        await run_all([put_choice(index) for index in range(len(writer.handles))])
        await put(writer.end())
    except TextCancelledError:
        # The client is still connected, so the server is shutting down.
        await put(writer.failure(draining_error()))
    except EngineError as error:
        await put(writer.failure(RequestError(engine_status(error), engine_message(error))))
    except Exception:
        await put(writer.failure(RequestError(500, UNEXPECTED)))
        raise  # for the log
    await send({"type": "http.response.body", "body": b"", "more_body": False})


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
