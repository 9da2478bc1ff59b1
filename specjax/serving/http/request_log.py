"""One log line for each request: what was asked of which model, and how fast it was answered.

A line never has text of a prompt or an answer. The records go to the logger `LOGGER`, with the
fields of the line in the attribute ``request``; `show_requests` prints them.
"""

import json
import logging
import re
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specjax.serving.handle import Handle
from specjax.serving.http.places import PROBES

LOGGER = logging.getLogger("specjax.requests")
"""The logger of the lines."""

Format = Literal["text", "json", "off"]
"""How lines are printed: as ``name=value`` pairs, as JSON objects, or not at all."""

HEADER = b"x-request-id"

_ID = re.compile(r"[!-~]{1,128}")
_QUIET = (*PROBES, "/")
"""Paths that machines ask for all the time. Their lines have the level DEBUG."""


@dataclass
class RequestRecord:
    """The facts about a request that are known so far.

    Attributes:
        request_id: its id: the header ``X-Request-Id``, or a new one.
        model: the name of the model; "" if the request was refused before that was known.
        prompt_tokens: the number of tokens of all prompts.
        handles: its texts.
    """

    request_id: str
    model: str = ""
    prompt_tokens: int = 0
    handles: Sequence[Handle] = field(default_factory=tuple)

    def of_texts(self) -> dict[str, Any]:
        """Return the fields of the line that describe the texts; none before there are texts."""
        handles = self.handles
        if not handles:
            return {}
        times = [handle.times for handle in handles]
        submitted = min(text.submitted for text in times)
        first = [text.first_token for text in times if text.first_token is not None]
        finished = [text.finished for text in times if text.finished is not None]
        output = sum(len(handle.tokens) for handle in handles)
        seconds = max(finished) - submitted if finished else None
        acceptances = [handle.acceptance for handle in handles if handle.acceptance is not None]
        steps = sum(acceptance.steps for acceptance in acceptances)
        emitted = sum(acceptance.emitted for acceptance in acceptances)
        reasons = dict.fromkeys(handle.finish_reason or "unfinished" for handle in handles)
        return {
            "model": self.model,
            "texts": len(handles),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": sum(handle.cached_tokens for handle in handles),
            "output_tokens": output,
            "first_token_seconds": _rounded(min(first) - submitted if first else None),
            "tokens_per_second": _rounded(output / seconds if seconds else None),
            "acceptance_length": _rounded(emitted / steps if steps else None),
            "finish_reason": ",".join(reasons),
        }


class RequestLog:
    """The middleware that gives each request an id, and logs a line when it has been answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and log it, whether it was answered or not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(scope))
        scope["specjax.record"] = record
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (HEADER, record.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = status or 500  # Starlette answers it, outside of this middleware
            raise
        finally:
            path = scope["path"]
            line = {
                "id": record.request_id,
                "method": scope["method"][:20],
                "path": path[:200],
                "status": status,  # 0: the client left before there was an answer
                "seconds": _rounded(time.perf_counter() - started),
            } | record.of_texts()
            level = logging.DEBUG if path in _QUIET and status < 400 else logging.INFO
            if LOGGER.isEnabledFor(level):
                LOGGER.log(level, "%s", as_text(line), extra={"request": line})


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request; a new one if no `RequestLog` has made one."""
    return scope.setdefault("specjax.record", RequestRecord(""))


def as_text(line: dict[str, Any]) -> str:
    """Return a line as ``name=value`` pairs. Values that are None are left out.

    Examples:
        >>> from specjax.serving.http.request_log import as_text
        >>> as_text({"id": "a1", "path": "/v1/a b", "first_token_seconds": None, "status": 404})
        'id=a1 path="/v1/a b" status=404'
    """
    return " ".join(f"{name}={_plain(value)}" for name, value in line.items() if value is not None)


def show_requests(form: Format) -> None:
    """Print the lines to standard error.

    Examples:
        >>> from specjax.serving.http.request_log import show_requests
        >>> show_requests("off")
    """
    for handler in [*LOGGER.handlers]:
        LOGGER.removeHandler(handler)
    LOGGER.propagate = False
    if form == "off":
        LOGGER.setLevel(logging.CRITICAL + 1)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)


class _TextFormatter(logging.Formatter):
    """Formats a line with its time."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        """Return the time and the pairs."""
        return f"{self.formatTime(record)} {record.getMessage()}"


class _JsonFormatter(logging.Formatter):
    """Formats a line as a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object. Its first field is the time in seconds since 1970."""
        line: dict[str, Any] = getattr(record, "request", {})
        return msgspec.json.encode({"time": round(record.created, 3)} | line).decode()


def _request_id(scope: Scope) -> str:
    """Return the id that the client has sent, if it is printable and short, or a new one."""
    sent = dict(scope["headers"]).get(HEADER, b"").decode("latin-1")
    return sent if _ID.fullmatch(sent) else uuid.uuid4().hex


def _plain(value: Any) -> str:
    """Return a value as a word, in quotes if it would not be one. It stays on one line."""
    text = str(value)
    is_word = re.fullmatch(r"[!#-&(-<>-\[\]-~]+", text)  # without quotes, "=" and backslashes
    return text if is_word else json.dumps(text)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
