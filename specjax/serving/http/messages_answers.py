"""The answers of ``/v1/messages``: Anthropic's messages, whole and as events."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from specjax.chat import RegionClosed, RegionGrew, RegionKind, RegionOpened
from specjax.serving.handle import Handle
from specjax.serving.http.errors import RequestError, anthropic_error
from specjax.serving.http.region_writer import RegionWriter
from specjax.serving.http.regions import AnswerRegions

SIGNATURE = "unsigned"
"""The signature of thoughts. It says nothing, but clients send back only thoughts that have one."""

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_NEW_BLOCKS: Mapping[RegionKind, Mapping[str, Any]] = {
    RegionKind.CONTENT: {"type": "text", "text": ""},
    RegionKind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
}

_DELTAS = {
    RegionKind.CONTENT: ("text_delta", "text"),
    RegionKind.REASONING: ("thinking_delta", "thinking"),
    RegionKind.TOOL_CALL: ("input_json_delta", "partial_json"),
}


class MessageWriter(RegionWriter):
    """The writer of a message.

    A call that is cut or does not parse is a block of the stream, and is not in the whole message.

    Examples:
        >>> from types import SimpleNamespace
        >>> from specjax.chat import family_form
        >>> from specjax.serving import Piece
        >>> from specjax.serving.http.messages_answers import MessageWriter
        >>> from specjax.serving.http.regions import AnswerRegions
        >>> handle = SimpleNamespace(
        ...     finish_reason="stop", is_at_stop_string=False, stop_string="", tokens=(5, 6),
        ...     cached_tokens=0
        ... )
        >>> regions = AnswerRegions(family_form("qwen3"))
        >>> writer = MessageWriter("tiny", handle, [1, 2, 3], regions)
        >>> message = writer.whole([[Piece("<think>Hm.</think>Hi", (5, 6))]])
        >>> [block["type"] for block in message["content"]], message["stop_reason"]
        (['thinking', 'text'], 'end_turn')
    """

    def __init__(
        self, model: str, handle: Handle, prompt: Sequence[int], regions: AnswerRegions
    ) -> None:
        """Start before the first token of a text.

        Args:
            model: the name of the model in the request.
            handle: the handle of the text.
            prompt: the token ids of its prompt.
            regions: its regions.
        """
        super().__init__(handle, prompt, regions)
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
        }
        self._index = -1
        self._block: dict[str, Any] = {}
        self._pieces: list[str] = []

    def start(self) -> Iterator[dict[str, Any]]:
        """Yield the begin of the message."""
        # How many tokens were shared is not known yet; the last event says it.
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        yield {"type": "message_start", "message": self._message | {"usage": usage, "content": []}}
        yield {"type": "ping"}

    def opened(self, event: RegionOpened, call_id: str) -> Iterator[dict[str, Any]]:
        """Yield the begin of a block."""
        self._index += 1
        if event.kind is RegionKind.TOOL_CALL:
            self._block = {"type": "tool_use", "id": call_id, "name": event.name, "input": {}}
        else:
            self._block = dict(_NEW_BLOCKS[event.kind])
        self._pieces = []
        block = dict(self._block)
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def grew(self, event: RegionGrew) -> Iterator[dict[str, Any]]:
        """Yield a piece of a block."""
        self._pieces.append(event.text)
        kind, name = _DELTAS[event.kind]
        yield self._delta({"type": kind, name: event.text})

    def closed(self, event: RegionClosed, is_cut: bool) -> Iterator[dict[str, Any]]:
        """Yield the end of a block."""
        text = "".join(self._pieces)
        if event.kind is RegionKind.TOOL_CALL:
            # As the model has written it: a number may be larger than Python's.
            self._block["input"] = msgspec.Raw(text.encode(errors="replace"))
        else:
            self._block[_DELTAS[event.kind][1]] = text
        if event.kind is RegionKind.REASONING:
            self._block["signature"] = SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if event.is_complete:
            self._message["content"].append(self._block)
        yield {"type": "content_block_stop", "index": self._index}

    def stop(self, reason: str) -> Iterator[dict[str, Any]]:
        """Yield the stop reason and the usage, and the end."""
        handle = self.handles[0]
        if reason == "stop" and handle.stop_string:
            end = {"stop_reason": "stop_sequence", "stop_sequence": handle.stop_string}
        else:
            end = {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}
        usage = self._usage()
        self._message |= end | {"usage": usage}
        end = end | {"stop_details": None}
        yield {"type": "message_delta", "delta": end, "usage": usage}
        yield {"type": "message_stop"}

    def fail(self, error: RequestError) -> Iterator[dict[str, Any]]:
        """Yield the error."""
        yield anthropic_error(error.status, error.message)

    def result(self) -> dict[str, Any]:
        """Return the message."""
        return self._message

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"thinking_tokens": self.reasoning_tokens},
        }
