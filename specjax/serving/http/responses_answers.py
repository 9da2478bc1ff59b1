"""The answers of ``/v1/responses``: responses with items, whole and as events."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specjax.chat import RegionClosed, RegionGrew, RegionKind, RegionOpened
from specjax.serving.handle import Handle
from specjax.serving.http.errors import RequestError
from specjax.serving.http.region_writer import RegionWriter
from specjax.serving.http.regions import AnswerRegions
from specjax.serving.http.responses_requests import SEALED, ResponsesRequest

_DELTAS = {
    RegionKind.CONTENT: "response.output_text",
    RegionKind.REASONING: "response.reasoning_text",
    RegionKind.TOOL_CALL: "response.function_call_arguments",
}


class ResponseWriter(RegionWriter):
    """The writer of a response.

    A call that is cut or does not parse is an item of the stream with the status "incomplete", and
    is not in the whole response.

    Examples:
        >>> from types import SimpleNamespace
        >>> from specjax.chat import family_form
        >>> from specjax.serving import Piece
        >>> from specjax.serving.http.regions import AnswerRegions
        >>> from specjax.serving.http.requests import Limits
        >>> from specjax.serving.http.responses_answers import ResponseWriter
        >>> from specjax.serving.http.responses_requests import read_response
        >>> limits = Limits(names=("tiny",), vocab_size=3072)
        >>> request = read_response(b'{"model": "tiny", "input": "Hello"}', limits)
        >>> handle = SimpleNamespace(
        ...     finish_reason="stop", is_at_stop_string=False, tokens=(5, 6), cached_tokens=0
        ... )
        >>> writer = ResponseWriter(request, handle, [1, 2], AnswerRegions(family_form("qwen3")))
        >>> response = writer.whole([[Piece("<think>Hm.</think>Hi", (5, 6))]])
        >>> [item["type"] for item in response["output"]], response["status"]
        (['reasoning', 'message'], 'completed')
    """

    def __init__(
        self,
        request: ResponsesRequest,
        handle: Handle,
        prompt: Sequence[int],
        regions: AnswerRegions,
        store: Callable[[Mapping[str, Any]], None] = lambda response: None,
    ) -> None:
        """Start before the first token of a text.

        Args:
            request: the request.
            handle: the handle of its text.
            prompt: the token ids of its prompt.
            regions: the regions of its text.
            store: is called with the whole response before its last event.
        """
        super().__init__(handle, prompt, regions)
        self._request, self._store = request, store
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": request.text.model,
            "output": [],
            "usage": None,
            **request.echo,
        }
        self._number = 0  # of the next event
        self._index = -1  # of the open item among all items of the stream
        self._item: dict[str, Any] = {}
        self._pieces: list[str] = []

    # --- the response -----------------------------------------------------------------------------

    def start(self) -> Iterator[dict[str, Any]]:
        """Yield the begin of the response."""
        yield self._of_response("response.created")
        yield self._of_response("response.in_progress")

    def stop(self, reason: str) -> Iterator[dict[str, Any]]:
        """Yield the end of the response, after it was stored."""
        if self._index < 0:  # clients expect an item
            yield from self.opened(RegionOpened(RegionKind.CONTENT), "")
            yield from self.closed(RegionClosed(RegionKind.CONTENT), reason == "length")
        is_cut = reason == "length"
        self._response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response["usage"] = self._usage()
        self._response["completed_at"] = None if is_cut else int(time.time())
        self._store(self._response)
        yield self._of_response("response.incomplete" if is_cut else "response.completed")

    def fail(self, error: RequestError) -> Iterator[dict[str, Any]]:
        """Yield the response with the error."""
        self._response["status"] = "failed"
        code = "invalid_prompt" if error.status == 400 else "server_error"
        self._response["error"] = {"code": code, "message": error.message}
        yield self._of_response("response.failed")

    def result(self) -> dict[str, Any]:
        """Return the response."""
        return self._response

    def _of_response(self, kind: str) -> dict[str, Any]:
        response = self._response | {"output": [*self._response["output"]]}
        return self._event(kind, response=response)

    def _usage(self) -> dict[str, Any]:
        prompt, output = self.prompt_tokens, self.output_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": prompt + output,
        }

    # --- its items --------------------------------------------------------------------------------

    def opened(self, event: RegionOpened, call_id: str) -> Iterator[dict[str, Any]]:
        """Yield the begin of an item, and of its part."""
        self._index += 1
        self._pieces = []
        name = uuid.uuid4().hex
        if event.kind is RegionKind.TOOL_CALL:
            namespace, called = self._request.namespaces.get(event.name, ("", event.name))
            self._item = {
                "type": "function_call",
                "id": f"fc_{name}",
                "call_id": call_id,
                "name": called,
                "arguments": "",
                "status": "in_progress",
            }
            if namespace:
                self._item["namespace"] = namespace
        elif event.kind is RegionKind.REASONING:
            self._item = {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": []}
            self._item["status"] = "in_progress"
        else:
            self._item = {"type": "message", "id": f"msg_{name}", "role": "assistant"}
            self._item |= {"content": [], "status": "in_progress"}
        yield self._event(
            "response.output_item.added", output_index=self._index, item=dict(self._item)
        )
        if event.kind is not RegionKind.TOOL_CALL:
            yield self._of_part("response.content_part.added", part=_part(event.kind, ""))

    def grew(self, event: RegionGrew) -> Iterator[dict[str, Any]]:
        """Yield a piece of an item."""
        self._pieces.append(event.text)
        yield self._of_text(event.kind, "delta", delta=event.text)

    def closed(self, event: RegionClosed, is_cut: bool) -> Iterator[dict[str, Any]]:
        """Yield the end of an item, and of its part."""
        text = "".join(self._pieces)
        is_whole = event.is_complete and not is_cut
        if event.kind is RegionKind.TOOL_CALL:
            self._item["arguments"] = text
            is_whole = event.is_complete
            yield self._of_text(event.kind, "done", arguments=text)
        else:
            part = _part(event.kind, text)
            self._item["content"] = [part]
            yield self._of_text(event.kind, "done", text=text)
            yield self._of_part("response.content_part.done", part=part)
        self._item["status"] = "completed" if is_whole else "incomplete"
        if event.kind is RegionKind.REASONING and self._request.seals_reasoning:
            self._item["encrypted_content"] = SEALED + text
        if event.is_complete:
            self._response["output"].append(self._item)
        yield self._event("response.output_item.done", output_index=self._index, item=self._item)

    def _of_text(self, kind: RegionKind, stage: str, **fields: Any) -> dict[str, Any]:
        """Return an event about the text of an item."""
        name = f"{_DELTAS[kind]}.{stage}"
        if kind is RegionKind.TOOL_CALL:
            return self._event(name, item_id=self._item["id"], output_index=self._index, **fields)
        if kind is RegionKind.CONTENT:
            fields["logprobs"] = []
        return self._of_part(name, **fields)

    def _of_part(self, name: str, **fields: Any) -> dict[str, Any]:
        """Return an event about the only part of an item."""
        place = {"item_id": self._item["id"], "output_index": self._index, "content_index": 0}
        return self._event(name, **place, **fields)

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        return {"type": name, "sequence_number": number, **fields}


def _part(kind: RegionKind, text: str) -> dict[str, Any]:
    if kind is RegionKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
